"""Ops for relative positions that depend on the query or the key too, as DeBERTa's do (He et al. 2021, disentangled attention).

    flashfx::gather_by_difference(source, positions, columns) -> out
    out[..., r, c] = source[..., r, positions[c - r + rows - 1]]
    flashfx::gather_by_difference_backward(grad, positions, width) -> the gradient of source

source (..., rows, width), positions (rows + columns - 1,) int64 in 0..width - 1, out and grad (..., rows, columns). Models say it by `torch.gather`,
whose gradient is an atomic addition for every pair of query and key, thousands of them to one element where far positions share a
bucket: in DeBERTa two fifths of a training step. Here sums are float32, always in the same order, and made by products with one-hot vectors.
"""
from __future__ import annotations

import torch

from .compat import interpreting, repair_interpreter

_library = torch.library.Library("flashfx", "FRAGMENT")
_library.define("gather_by_difference(Tensor source, Tensor positions, SymInt columns) -> Tensor")
_library.define("gather_by_difference_backward(Tensor grad, Tensor positions, SymInt width) -> Tensor")


def gather_by_difference(source: torch.Tensor, positions: torch.Tensor, columns: int) -> torch.Tensor:
    rows = source.shape[-2]
    r, c = torch.arange(rows, device=source.device), torch.arange(columns, device=source.device)
    at = positions[c - r[:, None] + (rows - 1)]
    return source.gather(-1, at.expand(*source.shape[:-1], columns))


def gather_by_difference_backward(grad: torch.Tensor, positions: torch.Tensor, width: int) -> torch.Tensor:
    rows, columns = grad.shape[-2:]
    if (grad.is_cuda or interpreting()) and grad.dtype != torch.float64 and rows * max(columns, width) < 2 ** 31:
        if interpreting():
            repair_interpreter()
        from .codegen.differences import gradient
        return gradient(grad, positions, width)
    from .codegen.captured import skewed
    one_hot = positions[:, None] == torch.arange(width, device=grad.device)
    sums = torch.promote_types(grad.dtype, torch.float32)
    return (skewed(grad).to(sums) @ one_hot.to(sums)).to(grad.dtype)


_library.impl("gather_by_difference", gather_by_difference, "CompositeExplicitAutograd")
_library.impl("gather_by_difference_backward", gather_by_difference_backward, "CompositeExplicitAutograd")


@torch.library.register_fake("flashfx::gather_by_difference", lib=_library)
def _fake(source, positions, columns):
    return source.new_empty((*source.shape[:-1], columns))


@torch.library.register_fake("flashfx::gather_by_difference_backward", lib=_library)
def _backward_fake(grad, positions, width):
    return grad.new_empty((*grad.shape[:-1], width))


def _setup(ctx, inputs, output):
    source, positions, _ = inputs
    ctx.save_for_backward(positions)
    ctx.width = source.shape[-1]


def _gradients(ctx, grad):
    positions, = ctx.saved_tensors
    return torch.ops.flashfx.gather_by_difference_backward(grad, positions, ctx.width), None, None


torch.library.register_autograd("flashfx::gather_by_difference", _gradients, setup_context=_setup, lib=_library)
