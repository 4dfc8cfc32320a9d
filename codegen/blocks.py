"""Run-time summaries of masks that only the data decides: for each block of queries the blocks of keys that it sees, and the reverse.

    flashfx::block_lists(aux, sizes, mask) -> (rows, keys)

`mask` is the text of `AttentionSpec.mask()`: the mask alone, over the axes on which it depends, so that layers, heads, forward and
backward share one summary. With R = ceil(M / BLOCK) and C = ceil(N / BLOCK)

    rows  int32 (*extents, R, 2 + C): of each row of blocks [number partly visible, number fully visible, the partly visible ones,
          the fully visible ones, the hidden ones], each of the three ascending
    keys  int32 (*extents, C, 2 + R): the same of each column of blocks

Memory is O(blocks). The lists are a hint: kernels give the same results without them.
"""
from __future__ import annotations

import math
from typing import Sequence

import torch

from ..compat import interpreting
from ..reference import evaluate, index_grid
from ..region import Problem
from ..spec import BLOCK, AttentionSpec
from .schedules.blocks import EMPTY, FULL, PARTIAL

Lists = tuple[torch.Tensor, torch.Tensor]

CHUNK = 1 << 22
"""Elements of a mask evaluated at a time on the CPU."""
SUMMARISED_FROM = 2 ** 19
"""Queries times keys from which a summary pays: below, its few small kernels cost more than the tiles that it could skip."""


def pays(spec: AttentionSpec, problem: Problem) -> bool:
    """Is the mask worth a run-time summary: does data decide it, and are there enough tiles to skip?"""
    return spec.is_data_masked and problem.M > 1 and problem.M * problem.N >= SUMMARISED_FROM


def shape(mask: AttentionSpec, sizes: Sequence[int]) -> tuple[list, list]:
    """Shapes of `rows` and `keys`; works on SymInts too. sizes = extents of the mask's axes, M, N, then its sizes."""
    n = len(mask.axes)
    R, C = (-(-s // BLOCK) for s in sizes[n: n + 2])
    return [*sizes[:n], R, 2 + C], [*sizes[:n], C, 2 + R]


def block_lists(mask: AttentionSpec, aux: Sequence[torch.Tensor], sizes: Sequence[int]) -> Lists:
    """(rows, keys) as the module's docstring says. sizes = extents of the mask's axes, M, N, then its sizes."""
    device = aux[0].device
    n = len(mask.axes)
    if 0 in sizes[: n + 2]:
        return tuple(torch.zeros(s, dtype=torch.int32, device=device) for s in shape(mask, sizes))
    if device.type == "cuda" or interpreting():
        from .render import blocks_module
        kinds = blocks_module(mask).kinds(aux, sizes)
    else:
        kinds = _evaluated(mask, aux, sizes)
    return _listed(kinds), _listed(kinds.mT)


def lists_for(spec: AttentionSpec, aux: Sequence[torch.Tensor], sizes: Sequence[int], M: int, N: int) -> Lists:
    """The lists of a whole spec's mask: `aux` and `sizes` as the attention op takes them (extents of all axes first)."""
    mask, table = spec.mask(), dict(zip((*spec.axes, *spec.sizes), sizes))
    tensors = {a.name: t for a, t in zip(spec.aux, aux)}
    return block_lists(mask, [tensors[a.name] for a in mask.aux], [*(table[a] for a in mask.axes), M, N, *(table[s] for s in mask.sizes)])


def _listed(kinds: torch.Tensor) -> torch.Tensor:
    """before -> after: [0, 2, 1, 2, 1] -> [2, 2, 2, 4, 1, 3, 0]"""
    order = torch.where(kinds == EMPTY, 2, kinds - 1).to(torch.uint8).sort(dim=-1, stable=True).indices
    counts = [(kinds == kind).sum(-1, keepdim=True) for kind in (PARTIAL, FULL)]
    return torch.cat([*counts, order], -1).to(torch.int32)


def kinds_of(rows: torch.Tensor) -> torch.Tensor:
    """Kinds (*extents, R, C) from the lists of the rows: the inverse of how they were made."""
    partial, full, order = rows[..., :1], rows[..., 1:2], rows[..., 2:].long()
    position = torch.arange(order.shape[-1], device=rows.device)
    kinds = torch.where(position < partial, PARTIAL, torch.where(position < partial + full, FULL, EMPTY))
    return torch.empty_like(order).scatter_(-1, order, kinds)


def _evaluated(mask: AttentionSpec, aux: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    """Kinds by evaluating the mask, a strip of one block of rows at a time, in plain PyTorch."""
    n = len(mask.axes)
    extents, (M, N) = list(sizes[:n]), sizes[n: n + 2]
    tensors = {a.name: t for a, t in zip(mask.aux, aux)}
    width = max(1, CHUNK // (BLOCK * BLOCK * max(1, math.prod(extents)))) * BLOCK
    strips = []
    for i in range(0, M, BLOCK):
        pieces = []
        for j in range(0, N, width):
            rows, cols = slice(i, min(i + BLOCK, M)), slice(j, min(j + width, N))
            env = index_grid(mask, [*extents, *sizes[n + 2:]], M, N, aux[0].device, rows, cols)
            visible = evaluate(mask.visible, env, tensors, None, torch.float32).expand(*extents, rows.stop - i, cols.stop - j)
            some = _by_block(visible.any(-2)).any(-1)
            every = _by_block(visible.all(-2)).all(-1)
            pieces.append(some.long() + every.long())
        strips.append(torch.cat(pieces, -1))
    return torch.stack(strips, -2)


def _by_block(x: torch.Tensor) -> torch.Tensor:
    """(…, n) -> (…, blocks, BLOCK), the last block filled up with False."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % BLOCK), value=False).unflatten(-1, (-1, BLOCK))
