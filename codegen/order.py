"""In which order programs of unequal length start: the grid says it, the hardware counts its first dimension fastest."""
from __future__ import annotations

L2_KIB = 24 * 1024
"""Of rows that several programs read one after the other: what an H200's L2 cache (60 MB in two halves) keeps of them."""
BALANCED = 256
"""Programs among which long and short ones even out: two for each multiprocessor."""


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
