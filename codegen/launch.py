"""The two calls behind `flashfx::attention` and `flashfx::attention_backward`: pick the schedule, run it.

CUDA tensors run through generated Triton kernels. Tensors elsewhere, and float64 anywhere, run through the tiled pure-torch
schedule; with Triton's interpreter switched on (TRITON_INTERPRET=1), CPU tensors run through the generated kernels too.
Triton is imported only when a kernel is needed.
"""
from __future__ import annotations

import functools
from typing import Sequence

import torch

from ..errors import PlanError
from ..spec import AttentionSpec
from . import torch_tiled
from .blocks import Summary
from .captured import differentiable_loads
from ..compat import interpreting


def uses_triton(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Do these operands run through generated Triton kernels?"""
    if torch.float64 in (q.dtype, k.dtype, v.dtype):
        return False
    return q.is_cuda or (q.device.type == "cpu" and interpreting())


@functools.cache
def _triton_host():
    from . import triton_host
    return triton_host


def forward(spec: AttentionSpec, q, k, v, aux: Sequence[torch.Tensor], seed: torch.Tensor | None, sizes: Sequence[int],
            blocks: Summary | None = None, outer: int = 1, key: tuple | None = None):
    """(out, lse) of one attention site.

    q (*Bq, M, D), k (*Bk, N, D), v (*Bv, N, Dv): any strides; leading extents follow `spec.axes`, 1 where an operand does not
    vary. sizes = extents of the axes, then `spec.sizes`. seed: one int64 element on the device when `spec.dropout`. blocks: the
    mask's summary (`flashfx.codegen.blocks`) and is it of `document_tiles`, by which hidden tiles are skipped; results are the same without it. key: what calls
    like this one are remembered by (`calls.key`).
    out (*extents, M, Dv) in v's dtype with the strides of `layout.output_strides`, `outer` axes outside of the rows; lse (*extents, M), float32 (float64 for
    float64), natural logarithm, with empty rows marked as `torch_tiled` says. With N = 0 the output is 0, as a sum over
    nothing is in eager PyTorch. Raises PlanError if no tile fits the device.
    """
    if uses_triton(q, k, v):
        return _triton_host().run_forward(spec, q, k, v, aux, seed, sizes, blocks, outer, key)
    return torch_tiled.forward(spec, q, k, v, aux, seed, sizes, blocks=blocks, outer=outer)


def backward(spec: AttentionSpec, grad_out, q, k, v, aux: Sequence[torch.Tensor], seed: torch.Tensor | None, out, lse,
             sizes: Sequence[int], needs: Sequence[bool],
             grad_lse: torch.Tensor | None = None, blocks: Summary | None = None, key: tuple | None = None) -> list[torch.Tensor]:
    """Gradients of (q, k, v, *aux), each of its operand's shape and dtype, contiguous; an empty tensor where `needs` is False.

    Deterministic, but for dQ of the Hopper schedule, which is a sum in no fixed order unless `torch.use_deterministic_algorithms(True)`
    holds. `out` and `lse` are forward's results; grad_out has out's shape and any strides. grad_lse (lse's shape) is the
    gradient of the log-sum-exp, None where nothing reads it; raises PlanError for it beside gradients of captured tensors.
    """
    if grad_lse is not None and differentiable_loads(spec, dict(zip((a.name for a in spec.aux), needs[3:]))):
        raise PlanError("a gradient of the log-sum-exp beside gradients of captured tensors is not supported")
    if uses_triton(q, k, v):
        return _triton_host().run_backward(spec, grad_out, q, k, v, aux, seed, out, lse, sizes, needs, grad_lse, blocks, key)
    return torch_tiled.backward(spec, grad_out, q, k, v, aux, seed, out, lse, sizes, needs, grad_lse=grad_lse, blocks=blocks)
