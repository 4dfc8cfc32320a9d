"""What the L2 cache leaves of a kernel's bytes: those that pass between it and device memory, as Nsight Compute's DRAM counters see them.

Programs of one batch index stream the same rows (keys and values forward; queries, dO and dQ backward) beside each other, so that all but the
first find a row in the cache, unless it has been displaced since. Two things take too long for that: a later wave of programs begins at rows
that the one before began with (`passes`), and under a mask programs over keys are apart from the start, or drift apart where each goes through
several heads (`apart`). What was written last is still in the cache when a kernel ends, and is not counted.

The formulas were found by simulating a cache that displaces what was used least recently (tests/test_l2.py), and agree with what was counted on an H200.
"""
from __future__ import annotations

import functools

from .order import long_first
from .schedules.hopper_locate import L2_KIB

HOLDS = 0.78
"""Of the L2 cache, what holds rows to be read again and results; the rest goes to copies in its other half. From the ten counted kernels of tests/test_l2.py."""

DRIFT = 0.512
"""Of a stream, how far apart programs over keys are that go through several heads: half of it by their lengths, since short ones are through when long
ones are half through, and a little that their clocks add on the card. From the same kernels: 502 MB counted where half of it would move 356."""

SYMBOLS = "O Q V S G A T P Y C"
"""Bytes, of all batch indices: moved if every tile stayed in the cache, read again from it, written, streamed. G: streams (batch indices whose programs
read the same rows), A of them at once, T programs of each; P: programs at once. Y: how far apart those of a stream are, of all its bytes, 0 to 1. C: bytes
that the cache holds."""


@functools.cache
def formulas() -> dict[str, object]:
    """Sympy expressions. "moved": bytes between cache and device memory on behalf of a kernel; "counted": without what it leaves in the cache."""
    import sympy
    O, Q, V, S, G, A, T, P, Y, C = sympy.symbols(SYMBOLS, positive=True)
    beside, seen = A * S / G, (Q + S) / (S * T)  # bytes of all streams at once; share of its stream that a program reads
    wave = beside * sympy.Min(1, seen + P / (A * T))
    passes = T / P * seen * S * sympy.Min(1, sympy.Max(0, 2 * wave / C - 1))
    apart = Q * sympy.Max(0, 1 - C / (Y * beside + 1))
    moved = O + sympy.Max(passes, apart)
    return {"moved": moved, "counted": moved - V * sympy.Min(1, C / moved)}


@functools.cache
def _compiled():
    import sympy
    found = formulas()
    return sympy.lambdify(sympy.symbols(SYMBOLS, positive=True), [found["moved"], found["counted"]], "math", cse=True)


def device_bytes(once: float, again: float, written: float, streamed: float, streams: float, together: float, outer: float, programs: float, apart: float,
                 cache: float) -> tuple[float, float]:
    """(bytes that a kernel moves, bytes that a counter sees while it runs). Arguments as `SYMBOLS`; outer: programs in all."""
    return tuple(_compiled()(once, again, written, streamed, streams, together, outer / streams, programs, apart, HOLDS * cache))


def at_once(schedule: str, kernel: str, streams: float, streamed: float, outer: float, programs: float, first_long: bool) -> float:
    """Streams that programs read at the same time, by the order in which they start. first_long: the schedules start long ones first where they differ."""
    each, tiles = streamed / streams, outer / streams
    if first_long and (schedule, kernel) == ("hopper", "forward"):
        return min(streams, max(1.0, L2_KIB * 1024 // each))
    if first_long and kernel == "one_pass":
        return float(long_first(round(streams), round(tiles), each / 1024)[0])
    return min(streams, max(1.0, programs / tiles))


def apart(uneven: float, heads: float, together: float, tiles: float, programs: float) -> float:
    """Share of a stream's bytes between the first and the last of the programs over keys that run at once. heads: that share the keys."""
    running = min(1.0, programs / (together * tiles))
    if heads > 1:  # they start together
        return uneven * min(DRIFT, running)
    return uneven * min(1.0, 4 / 3 * running)  # each at its own row; those that follow the first short ones, further on
