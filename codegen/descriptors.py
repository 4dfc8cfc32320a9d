"""Tensor descriptors: Hopper's and Blackwell's tensor memory accelerator (TMA) copies whole tiles, computes their addresses itself, and
fills what lies beyond the end with zeros. It wants a contiguous last dimension and strides and base aligned to 16 bytes."""
from __future__ import annotations

from typing import Sequence

import torch


def describable(tensor: torch.Tensor, absent: Sequence[bool] = ()) -> bool:
    """Can TMA read this operand where it lies? `absent` marks axes along which it is broadcast; their strides do not matter."""
    size = tensor.element_size()
    if tensor.dim() > 5 or tensor.stride(-1) != 1 or tensor.data_ptr() % 16:
        return False
    outer = [s for n, s in enumerate(tensor.stride()[:-1]) if not (n < len(absent) and absent[n])]
    return all(s > 0 and s * size % 16 == 0 for s in outer)


def tiles_of(tensor: torch.Tensor, axes: Sequence[int], rows: int, width: int):
    """Descriptor of (rows, width) tiles of the operand's matrices, indexed by the batch `axes` along which it varies."""
    from triton.tools.tensor_descriptor import TensorDescriptor
    kept = [*axes, tensor.dim() - 2, tensor.dim() - 1]
    return TensorDescriptor(tensor, [tensor.shape[d] for d in kept], [tensor.stride(d) for d in kept], [1] * len(axes) + [rows, width])


def tma_tiles(tensor: torch.Tensor, axes: Sequence[int], rows: int, width: int, sizes: Sequence[int] = ()):
    """`tiles_of` for Gluon, whose kernels lay tiles out in shared memory themselves: swizzled as the matrix units read them. sizes: where the matrices end, if
    they are larger; booleans are copied as bytes."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    kept, block = [*axes, tensor.dim() - 2, tensor.dim() - 1], [1] * len(axes) + [rows, width]
    tensor = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
    element = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32, torch.uint8: gl.uint8}[tensor.dtype]
    shape = [*(tensor.shape[d] for d in kept[:-2]), *(sizes or tensor.shape[-2:])]
    return TensorDescriptor(tensor, shape, [tensor.stride(d) for d in kept], block,
                            gl.NVMMASharedLayout.get_default_for(block, element))
