"""In which order programs, or tiles that programs take one after the other, of unequal length start."""
from __future__ import annotations

import functools
import math

L2_KIB = 24 * 1024
"""Of rows that several programs read one after the other: what an H200's L2 cache (60 MB in two halves) keeps of them."""
BALANCED = 256
"""Programs among which long and short ones even out: two for each multiprocessor."""
KEYS_KIB = 12 * 1024
"""Keys and values that stay in the L2 cache (60 MB on an H200, two halves that copy each other) while several programs read them: measured."""
EVEN, SHARING = 4, 4
"""Tiles of rows for each multiprocessor among which long and short ones even out, and programs at least that read the same keys beside each other: where
fewer do, device memory binds."""

PORTABLE = 2
"""Programs of the portable schedule that a multiprocessor is taken to hold, where long ones and short ones are to even out."""


def long_first(batches: int, tiles: int, kib: float) -> tuple[int, int, int]:
    """The grid (batch indices that go together, tiles, groups of them) where the first tiles have most to do.

    They start first, of as many batch indices as the cache holds (`kib` KiB of rows each) and balance needs, and short ones fill the gaps.
    Groups are equally large: their number divides `batches`.
    """
    wanted = min(batches, max(1, int(L2_KIB / max(kib, 1e-9)), -(-BALANCED // max(tiles, 1))))
    together = next(n for n in range(wanted, 0, -1) if batches % n == 0) if batches else 0
    if not batches or batches // together > 65535 or 4 * together < wanted:  # a prime number of them, say
        together = batches
    return together, tiles, batches // together if together else 1


def evened(programs: int) -> tuple[int, int]:
    """(batch indices at most, tiles of rows in all) of a group of `row_groups`, for balance. programs: one for each multiprocessor."""
    return max(1, programs // SHARING), EVEN * programs


def row_groups(batches: int, tiles: int, kib: float, programs: int) -> int:
    """Groups of batch indices whose tiles of rows the Hopper forward starts together, the longest first, one group after the other: of as many indices as
    the cache holds (`kib` KiB of keys and values each) and balance needs, or the last group's long tiles would find all others at an end. programs: one for
    each multiprocessor; 0 where all tiles are as long."""
    most, even = evened(programs)
    return max(1, min(math.ceil(batches * kib / KEYS_KIB), -(-batches // max(1, min(most, -(-even // max(tiles, 1)))))))


@functools.lru_cache(maxsize=1024)
def grouped(batches: int, tiles: int, kib: float, programs: int) -> tuple[int, int, int]:
    """(batch indices of a group, tiles, groups) of a grid in which groups follow each other: as `row_groups`, but all as large, so that their number divides `batches`."""
    if not batches:
        return 0, tiles, 0
    wanted = -(-batches // row_groups(batches, tiles, kib, programs))
    divisors = {d for n in range(1, math.isqrt(batches) + 1) if batches % n == 0 for d in (n, batches // n)}
    together = min(divisors, key=lambda n: (batches // n > 65535, abs(math.log(n / wanted))))
    return together, tiles, batches // together
