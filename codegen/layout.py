"""Where the results of `flashfx::attention` live in memory: one definition for the fake and the real kernel.

`out` has shape (*extents, M, Dv) but is stored as (axis 0, M, other axes…, Dv), so that the `transpose(1, 2).reshape(B, M, H * Dv)`
with which nearly every model continues is a view. The log-sum-exp has shape (*extents, M), contiguous.
"""
from __future__ import annotations

from typing import Sequence

import torch


def output_strides(extents: Sequence[int], M: int, Dv: int) -> tuple[int, ...]:
    """Strides of out (*extents, M, Dv), in elements; works on SymInts too.

    before -> after: extents (B, H) -> (M * H * Dv, Dv, H * Dv, 1), the strides of a (B, M, H, Dv) tensor seen as (B, H, M, Dv)
    """
    inner, running = [], Dv
    for extent in reversed(extents[1:]):
        inner.insert(0, running)
        running = running * extent
    outer = [running * M] if len(extents) else []
    return (*outer, *inner, running, 1)


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """The log-sum-exp is float32, but float64 when v is."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_output(extents: Sequence[int], M: int, v: torch.Tensor) -> torch.Tensor:
    """Uninitialised out for values `v` (…, N, Dv), in v's dtype and on its device."""
    Dv = v.shape[-1]
    return torch.empty_strided((*extents, M, Dv), output_strides(extents, M, Dv), dtype=v.dtype, device=v.device)


def empty_lse(extents: Sequence[int], M: int, v: torch.Tensor) -> torch.Tensor:
    """Uninitialised log-sum-exp (*extents, M), contiguous, natural logarithm."""
    return torch.empty((*extents, M), dtype=lse_dtype(v.dtype), device=v.device)
