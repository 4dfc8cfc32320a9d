"""Into how many parts the keys of a tile of rows are split, a program for each (Flash-Decoding): one rule for the host functions and the cost model."""
from __future__ import annotations

import math
from typing import Mapping, Sequence

from ..expr import Expr
from ..spec import AttentionSpec
from .tiles import estimate, known_names

LEAST = 256
"""Keys of a part at least: a program takes about as long as they do to start and to end."""
WAVES = 4
"""Turns of programs at most: so many parts that the last turn is hardly shorter than the others."""
MOST = 128
"""Parts of a row: what adds them up reads `TOGETHER` at a time, one time after the other."""
TOGETHER = 32
"""Parts of rows that a program of that kernel reads at a time: of one row, or fewer of several. With a program for each row it took some 30 of 77 microseconds on
an H200 (250 queries of 65 batch indices, 4096 keys, head size 64)."""


def shared_out(parts: int) -> dict[str, int]:
    """Options of that kernel."""
    together = min(TOGETHER, 1 << (parts - 1).bit_length())
    return {"TOGETHER": together, "ROWS": TOGETHER // together, "num_warps": 4}


def number(visible: Expr, z: int, M: int, N: int, known: tuple[tuple[str, int], ...], m: int, n: int, slots: int, group: int = 1) -> int:
    """As many parts as fill the card with programs, one turn of them or a few; 1 where tiles of rows fill it alone.

    visible  the mask; tiles that only data hide count as visible
    z        batch indices
    known    `tiles.known_names`
    m, n     BLOCK_M, BLOCK_N
    slots    programs that the card holds at once
    group    heads that are rows of one tile
    """
    rows = z * -(-M * group // m)
    if not M * N or not 0 < rows < slots:
        return 1
    tiles = max(1, math.ceil(sum(estimate(visible, M, n, M, N, known)) if group > 1 else z * sum(estimate(visible, m, n, M, N, known)) / rows))
    return _number(rows, tiles, n, slots)


def parts_of_rows(z: int, M: int, options: Mapping[str, int], slots: int) -> int:
    """The same of the rows where a tile holds all keys of each of z batch indices. options: the kernel's."""
    return _number(z, max(1, -(-M // options["BLOCK_M"])), options["BLOCK_M"], slots) if 0 < z < slots else 1


def _number(programs: int, tiles: int, size: int, slots: int) -> int:
    """Of parts of programs that go through so many tiles of this size."""
    offers = {1}
    for wave in range(1, WAVES + 1):
        most = max(1, min(wave * slots // programs, tiles * size // LEAST, MOST))
        offers.add(-(-tiles // -(-tiles // most)))  # no part is left without tiles
    return min(offers, key=lambda parts: (-(-programs * parts // slots) * (-(-tiles // parts) * size + LEAST), parts))


def parts_of(spec: AttentionSpec, sizes: Sequence[int], M: int, N: int, options: Mapping[str, int], slots: int,
             packed: Sequence[str] = ()) -> int:
    """`number` for a generated host function. sizes: extents of the axes, then `spec.sizes`; options: the kernel's;
    packed: axes whose heads are rows of one tile."""
    extents = [int(e) for e in sizes[: len(spec.axes)]]
    known = known_names(spec, extents, [int(s) for s in sizes[len(extents):]])
    group = math.prod(e for axis, e in zip(spec.axes, extents) if axis in packed)
    return number(spec.visible, math.prod(extents) // max(group, 1), M, N, known, options["BLOCK_M"], options["BLOCK_N"], slots, group)
