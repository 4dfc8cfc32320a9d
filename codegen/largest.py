"""The largest tiles that compile without spilling registers where no register model predicts that, at lengths that tiles divide: found by compiling
(tests/kernels/test_compile.py).

Matrix units other than Hopper's take their operands from registers, and what the assembler makes of that jumps with head sizes, masks and tiles: of
1000 builds for sm_80, sm_89, sm_100 and sm_120 no linear model tells those that spill apart.
"""
from __future__ import annotations

from ..expr import Var
from ..region import Problem
from ..spec import BLOCK, AttentionSpec
from . import exact
from .captured import grouped, is_divided, is_overfull
from .gpu import EXACT, GPU, units
from .limits import has_relative, is_heavy, is_uneven, padded
from .parts import DENSE_IN_PIECES, chunks
from .reads import ROW

LARGEST = {
    # (matrix units, kernel, head size up to) -> (BLOCK_M, BLOCK_N, num_warps, num_stages) for simple scores, and for heavy ones
    ("tcgen05", "forward", 64): ((64, 64, 4, 3), (64, 64, 8, 2)),
    ("tcgen05", "forward", 128): ((64, 64, 4, 3), (64, 64, 8, 2)),
    ("tcgen05", "forward", 256): ((128, 32, 8, 3), (64, 32, 8, 2)),
    ("tcgen05", "keys", 64): ((64, 64, 4, 2), (64, 64, 8, 2)),
    ("tcgen05", "keys", 128): ((64, 64, 4, 2), (64, 64, 8, 2)),
    ("tcgen05", "keys", 256): ((64, 32, 8, 2), (64, 32, 8, 2)),
    ("tcgen05", "rows", 64): ((64, 64, 4, 2), (64, 64, 8, 2)),
    ("tcgen05", "rows", 128): ((64, 64, 8, 2), (64, 64, 8, 2)),
    ("tcgen05", "rows", 256): ((64, 32, 8, 2), (64, 32, 8, 2)),
    ("mma", "forward", 64): ((64, 64, 4, 3), (64, 64, 4, 3)),
    ("mma", "forward", 128): ((64, 64, 4, 2), (64, 64, 8, 2)),
    ("mma", "forward", 256): ((64, 32, 8, 2), (32, 32, 4, 2)),
    ("mma", "keys", 64): ((64, 64, 8, 2), (32, 64, 4, 1)),
    ("mma", "keys", 128): ((64, 64, 8, 2), (32, 64, 8, 1)),
    ("mma", "keys", 256): ((32, 32, 8, 2), (32, 32, 8, 2)),
    ("mma", "rows", 64): ((64, 64, 4, 2), (64, 64, 8, 2)),
    ("mma", "rows", 128): ((64, 64, 8, 2), (64, 32, 8, 2)),
    ("mma", "rows", 256): ((32, 32, 8, 2), (32, 32, 8, 2)),
}


def largest(kernel: str, spec: AttentionSpec, problem: Problem, gpu: GPU) -> tuple[int, int, int, int]:
    """(BLOCK_M, BLOCK_N, num_warps, num_stages) of a kernel whose products run on other units than Hopper's; of "dense" on all."""
    head, found = max(padded(problem.D), padded(problem.Dv)), units(problem, gpu)
    step = 64 if head <= 64 else 128 if head <= 128 else 256
    pieces = len(chunks(max(problem.D, problem.Dv)))
    several = pieces > 1
    if kernel == "dense" and (found != "bf16x6" or head > DENSE_IN_PIECES):
        return _dense(spec, found, head, several, problem.N % ROW > 0)
    tiled = any({"i", "j"} <= load.variables for load in spec.visible.loads)  # addresses of a mask's tile
    heavy = is_heavy(spec, kernel) or found == "mma" and tiled and (kernel != "forward" or problem.N % ROW > 0)
    if found in EXACT:
        return exact.largest(kernel, spec, step, found, heavy or tiled, problem.N % BLOCK == 0, gpu)
    tiles = LARGEST[found, kernel, step][heavy or found == "mma" and kernel == "keys" and (grouped(spec) or several or gpu.capability[0] == 12)]
    if several and found == "mma":  # an accumulator for each piece of the head: registers run out earlier
        tiles = {("keys", True): (16, 64, 8, 1), ("rows", True): (64, 32, 8, 2), ("forward", True): (64, 32, 8, 2),
                 ("forward", False): (32, 32, 4, 2)}.get((kernel, head <= 128), tiles)
    elif several and found == "tcgen05" and kernel == "keys" and heavy and head <= 128:
        tiles = (32, 64, 4 if head <= 80 else 8, 2)
    if kernel == "keys" and is_uneven(problem):  # where the next tile is takes registers too: nothing is copied ahead
        tiles = (32, 64, 8, 1) if found == "tcgen05" else (32, 16, 8, 1)
    if kernel == "keys" and found == "mma" and step == 64 and has_relative(spec) and grouped(spec):  # sums of dS beyond a table's ends
        tiles = (32, 64, 8, 1)
    if kernel == "keys" and is_divided(spec):
        masked = any(c.masked for c in chunks(max(problem.D, problem.Dv)))  # columns beyond the head's end
        return (16, 16, 4, 1) if found == "mma" and head > 128 and masked else (16, 32, 8, 1) if found == "mma" else (16, 64, 4, 2) if step == 64 else (16, 16, 4, 2)
    if kernel == "forward" and found == "tcgen05" and step == 128 and tiled and problem.N % ROW:
        return LARGEST[found, kernel, step][True]
    if kernel == "rows" and found == "mma" and step == 128 and is_overfull(spec):
        return 32, 32, 4, 2
    if kernel == "rows" and found == "mma" and heavy and spec.is_data_masked:
        tiles = (min(tiles[0], 64), min(tiles[1], 32), *tiles[2:])
    if kernel != "forward" and found == "mma" and step == 64 and not heavy and not several and spec.is_data_masked:  # what the mask reads, by row or key
        tiles = LARGEST[found, kernel, step][True]
    if kernel == "keys" and spec.dropout and tiled and found == "mma" and step == 128 and problem.N % ROW:  # and a mask's tile element by element
        tiles = (16, 32, 8, 1)
    if kernel == "keys" and spec.dropout and grouped(spec):  # random words in a loop over the queries that share the keys
        narrow = max(problem.D, problem.Dv) % 16 > 0 or several and head > 80 and spec.is_data_masked  # columns to hide in the last piece; many of both
        tiles = {("mma", 64): (32, 64, 8, 1) if not several else tiles, ("mma", 128): (16, 16, 4, 1) if narrow else tiles, ("mma", 256): tiles if is_uneven(problem) else (16, 32, 8, 2), ("tcgen05", 128): (32, 64, 8, 1 if pieces > 2 and spec.is_data_masked else 2)}.get((found, step), tiles)
    return tiles


def _dense(spec: AttentionSpec, found: str, head: int, several: bool, one_by_one: bool) -> tuple[int, int, int, int]:
    """one_by_one: tensors are read and written element by element."""
    by_rows = not several and all(load.index[-2:] == (Var("i"), Var("j")) for load in spec.score.loads if {"i", "j"} <= load.variables)
    wide = {"mma": (64, 32, 4, 1), "wgmma": (128, 64, 8, 1) if by_rows else (64, 64, 8, 1)}  # others have addresses of their own
    tiles = (32, 32, 4, 1) if found in EXACT or head > 128 or found == "mma" and is_overfull(spec) else (64, 32, 4, 1) if spec.is_data_masked or found == "mma" and not by_rows else wide.get(found, (64, 64, 4, 1)) if head > 64 else (64, 64, 8 if found == "mma" else 4, 1)
    if found not in EXACT and head > 128 and (one_by_one or spec.dropout and has_relative(spec)):
        return (16, 16, 4, 1) if has_relative(spec) else (32, 16, 4, 1)
    if has_relative(spec):  # every tile of a diagonal of tiles has the same diagonals; they are added up in registers
        side = 32 if several and head <= 64 and one_by_one and spec.dropout else min(tiles[:2])
        return (side, side, *((4 if head <= 64 else 8, 2) if found == "wgmma" else (tiles[2] if found in EXACT else 8, 1)))
    if found == "wgmma" and head <= 128 and (head > 64 and one_by_one or tiles[1] == 64 and (one_by_one or head <= 64 and grouped(spec) and spec.is_masked)):
        return (64, 32 if several and one_by_one and head <= 64 else tiles[1], 8, 1)
    return tiles
