"""A mask as the kernels see it: a grid of tiles, each skipped, full, partial, or left to the data."""
from __future__ import annotations

from dataclasses import dataclass

import torch

from ..region import Problem
from ..spec import BLOCK, AttentionSpec
from .plan import Plan
from .schedules.blocks import EMPTY, FULL
from .tiles import cut, tile_bounds

SKIPPED, FULL_TILE, PARTIAL, DATA = "sfpd"
LARGEST = 96
"""Cells along a side; larger grids are drawn with several tiles to a cell."""
EVALUATED = 2 ** 24
"""Queries times keys up to which a mask over indices is evaluated for its run-time summary."""


@dataclass(frozen=True)
class Picture:
    """rows[r][c] is the kind of the cell of queries r * M_step … and keys c * N_step …: "s" skipped, "f" full, "p" partial or of several kinds,
    "d" decided by data at run time. `at` is the batch index that is drawn: the first.
    """

    rows: tuple[str, ...]
    M_step: int
    N_step: int
    M: int
    N: int
    BLOCK_M: int
    BLOCK_N: int
    at: dict[str, int]


def picture(spec: AttentionSpec, problem: Problem, plan: Plan) -> Picture:
    """The forward tiles of `plan`, by the arithmetic by which the kernels cut. Costs O(tiles), or O(M * N) where a summary is evaluated."""
    M, N, m, n = problem.M, problem.N, plan.BLOCK_M, plan.BLOCK_N
    if plan.listed and not spec.visible.loads and M * N <= EVALUATED:
        rows = _listed(spec, problem, m, n)
    else:
        rows = []
        for lo, hi, *full in tile_bounds(spec, m, M, N, (*problem.extents, *problem.sizes), first=True):
            start, full_start, full_stop, stop = (-(-x // n) for x in cut(lo, hi, *full[:2], n))
            _, sure_start, sure_stop, _ = (-(-x // n) for x in cut(lo, hi, *full[2:], n))
            rows.append("".join(SKIPPED if not start <= c < stop else FULL_TILE if full_start <= c < full_stop else DATA if sure_start <= c < sure_stop else PARTIAL
                                for c in range(-(-N // n))))
    high, wide = (-(-len(rows) // LARGEST), -(-len(rows[0]) // LARGEST)) if rows else (1, 1)
    return Picture(tuple(_merged(rows[r: r + high], wide) for r in range(0, len(rows), high)), m * high, n * wide, M, N, m, n,
                   {a: 0 for a in spec.axes if a in spec.visible.variables})


def _merged(rows: list[str], wide: int) -> str:
    if len(rows) == wide == 1:
        return rows[0]
    cells = ({x for row in rows for x in row[c: c + wide]} for c in range(0, len(rows[0]), wide))
    return "".join(kinds.pop() if len(kinds) == 1 else DATA if DATA in kinds else PARTIAL for kinds in cells)


def _listed(spec: AttentionSpec, problem: Problem, m: int, n: int) -> list[str]:
    """Tiles by the blocks of the summary: each lies in one block."""
    from .blocks import evaluated, joined
    mask, table = spec.mask(), dict(zip((*spec.axes, *spec.sizes), (*problem.extents, *problem.sizes)))
    kinds = evaluated(mask, [], [*(table[a] for a in mask.axes), problem.M, problem.N, *(table[s] for s in mask.sizes)], torch.device("cpu"))
    kinds = joined(kinds[(0,) * len(mask.axes)])
    letter = lambda kind: SKIPPED if kind == EMPTY else FULL_TILE if kind == FULL else PARTIAL
    letters = ["".join(map(letter, row)) for row in kinds.tolist()]
    return ["".join(letters[i // BLOCK][j // BLOCK] for j in range(0, problem.N, n)) for i in range(0, problem.M, m)]
