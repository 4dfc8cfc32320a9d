"""Where the results of `flashfx::attention` live in memory: one definition for the fake and the real kernel.

`out` has shape (*extents, M, Dv) but is stored as (axes[:outer], M, axes[outer:], Dv). With the first axis outside of the rows, `transpose(1, 2).reshape(B, M,
H * Dv)`, with which nearly every model continues, is a view; none is outside where a batch of one is no axis. All of them are where the graph returns the
output as it is: its gradient will be laid out so, and AOTAutograd copies one that is laid out otherwise. The log-sum-exp has shape (*extents, M), contiguous.
"""
from __future__ import annotations

from typing import Sequence

import torch


def output_strides(extents: Sequence[int], M: int, Dv: int, outer: int = 1) -> tuple[int, ...]:
    """Strides of out (*extents, M, Dv), in elements; works on SymInts too.

    before -> after: extents (B, H) -> (M * H * Dv, Dv, H * Dv, 1), the strides of a (B, M, H, Dv) tensor seen as (B, H, M, Dv)
    """
    strides, running = {}, Dv
    rows = len(extents)
    for axis in reversed((*range(min(outer, rows)), rows, *range(outer, rows))):
        strides[axis] = running
        running = running * (M if axis == rows else extents[axis])
    return (*(strides[axis] for axis in range(rows + 1)), 1)


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """The log-sum-exp is float32, but float64 when v is."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_output(extents: Sequence[int], M: int, v: torch.Tensor, outer: int = 1) -> torch.Tensor:
    """Uninitialised out for values `v` (…, N, Dv), in v's dtype and on its device."""
    Dv = v.shape[-1]
    return torch.empty_strided((*extents, M, Dv), output_strides(extents, M, Dv, outer), dtype=v.dtype, device=v.device)


def empty_lse(extents: Sequence[int], M: int, v: torch.Tensor) -> torch.Tensor:
    """Uninitialised log-sum-exp (*extents, M), contiguous, natural logarithm."""
    return torch.empty((*extents, M), dtype=lse_dtype(v.dtype), device=v.device)
