"""What the L2 cache leaves of a kernel's bytes: those that pass between it and device memory, as Nsight Compute's DRAM counters see them.

Programs of one batch index stream the same rows (keys and values forward; queries, dO and dQ backward) beside each other, so that all but the
first find a row in the cache, unless it has been displaced since. Two things take too long for that: a later wave of programs begins at rows
that the one before began with (`passes`), and under a mask programs over keys are apart from the start, or drift apart where each goes through
several heads one after the other (`Streaming.apart`). What was written last is still in the cache when a kernel ends, and is not counted.

The formulas were found by simulating a cache that displaces what was used least recently (tests/test_l2.py), and agree with what was counted on an H200.
"""
from __future__ import annotations

import functools
from dataclasses import dataclass

from .order import PORTABLE, grouped, long_first, row_groups

HOLDS = 0.78
"""Of the L2 cache, what holds rows to be read again and results; the rest goes to copies in its other half. From the ten counted kernels of tests/test_l2.py."""

DRIFT = 0.512
"""Of a stream, how far apart programs over keys are that go through several heads: half of it by their lengths, since short ones are through when long
ones are half through, and a little that their clocks add on the card. From the same kernels: 502 MB counted where half of it would move 356."""

SYMBOLS = "O Q V S G A T P W Y C"
"""Bytes, of all batch indices: moved if every tile stayed in the cache, read again from it, written, streamed. G: streams (batch indices whose programs
read the same rows), A of them at once, T programs of each; P: programs at once; W: waves of programs that begin a stream again. Y: how far apart those of a
stream are, of all its bytes, 0 to 1. C: bytes that the cache holds."""


@functools.cache
def formulas() -> dict[str, object]:
    """Sympy expressions. "moved": bytes between cache and device memory on behalf of a kernel; "counted": without what it leaves in the cache."""
    import sympy
    O, Q, V, S, G, A, T, P, W, Y, C = sympy.symbols(SYMBOLS, positive=True)
    beside, seen = A * S / G, (Q + S) / (S * T)  # bytes of all streams at once; share of its stream that a program reads
    wave = beside * sympy.Min(1, seen + P / (A * T))
    passes = W * seen * S * sympy.Min(1, sympy.Max(0, 2 * wave / C - 1))
    apart = Q * sympy.Max(0, 1 - C / (Y * beside + 1))
    moved = O + sympy.Max(passes, apart)
    return {"moved": moved, "counted": moved - V * sympy.Min(1, C / moved)}


@functools.cache
def _compiled():
    import sympy
    found = formulas()
    return sympy.lambdify(sympy.symbols(SYMBOLS, positive=True), [found["moved"], found["counted"]], "math", cse=True)


@dataclass(frozen=True)
class Streaming:
    """Of a kernel: streams in all, those that programs read at once, programs in all and at once, and how far apart those of a stream are (`apart`). bytes: of
    all streams. long_first, share: the schedules start the programs with most rows first, each of which goes through so many heads. sms: multiprocessors."""

    schedule: str
    kernel: str
    bytes: float
    streams: float
    outer: float
    programs: float
    uneven: float
    share: float
    long_first: bool
    sms: int

    @functools.cached_property
    def at_once(self) -> float:
        """Streams that programs read at the same time, by the order in which they start."""
        each, tiles = self.bytes / self.streams, self.outer / self.streams
        if self.long_first and (self.schedule, self.kernel) == ("hopper", "forward"):
            return self.streams / row_groups(round(self.streams), round(tiles), each / 1024, self.sms)
        if self.long_first and self.kernel == "one_pass":
            return float(long_first(round(self.streams), round(tiles), each / 1024)[0])
        if self.long_first:
            return float(grouped(round(self.streams), round(tiles), each / 1024, PORTABLE * self.sms)[0])
        return min(self.streams, max(1.0, self.programs / tiles))

    @property
    def waves(self) -> float:
        """Waves of programs of a stream, one after the other, that begin it again. Forward, a group of streams has several, of which the first finds nothing."""
        each = self.outer / self.streams / self.programs
        return max(each, self.at_once * each - 1) if self.kernel == "forward" else each

    def apart(self, turns: bool) -> float:
        """Share of a stream's bytes between the first and the last of the programs over keys that run at once. turns: heads take turns."""
        if self.kernel not in ("keys", "one_pass") or turns:
            return 0.0
        running = min(1.0, self.programs * self.streams / (self.at_once * self.outer))
        if self.share > 1:  # they start together
            return self.uneven * min(DRIFT, running)
        return self.uneven * min(1.0, 4 / 3 * running)  # each at its own row; those that follow the first short ones, further on

    def takes_turns(self, cache: float) -> bool:
        """Do programs of the Hopper backward go through the heads that share keys in turn, tile of rows by tile of rows? One after the other, those with more rows
        and less are at different heads after a while: no matter as long as the cache holds what lies between them, some 3 % faster even."""
        return (self.schedule, self.kernel) == ("hopper", "one_pass") and self.share > 1 and self.long_first \
            and self.apart(False) * self.at_once * self.bytes / self.streams > HOLDS * cache


def device_bytes(once: float, again: float, written: float, found: Streaming, cache: float) -> tuple[float, float]:
    """(bytes that a kernel moves, bytes that a counter sees while it runs). Arguments as `SYMBOLS`."""
    apart = found.apart(found.takes_turns(cache))
    return tuple(_compiled()(once, again, written, found.bytes, found.streams, found.at_once, found.outer / found.streams, found.programs, found.waves, apart, HOLDS * cache))
