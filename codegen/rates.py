"""What each term of the cost model takes on real kernels: fitted to a recorded sweep by `flashfx.bench.fit`, judged on its other half in tests."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rate:
    """Of one kernel of one schedule: what multiplies the seconds that `cost.features` finds for each term at the rates of the data sheet, or seconds.

    matrix    matrix products; the following add to it
    scalar    float32 products, on the ordinary units
    older     tiles of fewer rows than a warpgroup's instruction takes
    split     more warps than rows of 16: they divide the columns, and each reads all of the other operand
    pieces    a head size that is no power of two: several accumulators
    slim      the inner tile has fewer than 64 rows: each product reads the outer operand for few
    shared    a loop over the queries that share keys around the loop over their rows
    element   each element of a tile of scores: exponential, maximum, sums, conversion; the following add to it
    wide      a warp holds two rows of 16
    broad     the inner tile has more than 64 rows
    solo      one program alone on its multiprocessor: nothing runs while it waits
    function  special functions of a score's own
    step      other operations of a score's own
    random    dropout
    load      tensors with an element for every query and key
    pressure  registers beyond those that leave the compiler room
    partial   elements of tiles that a mask cuts
    tile      seconds of waiting for each tile, shared by the programs on a multiprocessor
    shallow   the same, where few stages hide the copies
    narrow    the same, where the inner tile has fewer than 64 rows
    nested    the same, in a loop over the queries that share keys
    turn      seconds from a program's last tile to the next one's first
    restart   seconds of a further loop of a program
    launch    seconds of a launch
    """

    matrix: float = 0.0
    scalar: float = 0.0
    older: float = 0.0
    split: float = 0.0
    pieces: float = 0.0
    slim: float = 0.0
    shared: float = 0.0
    element: float = 0.0
    wide: float = 0.0
    broad: float = 0.0
    solo: float = 0.0
    function: float = 0.0
    step: float = 0.0
    random: float = 0.0
    load: float = 0.0
    pressure: float = 0.0
    partial: float = 0.0
    tile: float = 0.0
    shallow: float = 0.0
    narrow: float = 0.0
    nested: float = 0.0
    turn: float = 0.0
    restart: float = 0.0
    launch: float = 0.0


MATRIX = ("matrix", "scalar", "older", "split", "pieces", "slim", "shared")
SPECIAL = ("element", "wide", "broad", "solo", "function", "step", "random", "load", "pressure", "partial")
TURNS = ("tile", "shallow", "narrow", "nested", "turn", "restart")

BANDWIDTH, CACHE = 0.85, 2.5
"""Of the device memory's bandwidth: sustained, and what the L2 cache delivers beside it."""
LAUNCH = 3e-6
"""Seconds from one kernel's end to the next one's work, for kernels without tiles."""

NEAR, FAR, STREAM, STEP = 0.3e-6, 0.95e-6, 1e11, 0.05e-6
"""Seconds until the first byte of a tile arrives from the L2 cache and from device memory, bytes per second into one multiprocessor after it, and seconds
from a tile's last byte to asking for another: what a program waits for that does nothing else, as in decoding."""

RATES: dict[tuple[str, str], Rate] = {
    ('hopper', 'forward'): Rate(matrix=0.951, pieces=0.0138, slim=0.363, element=0.791, function=0.825, step=0.231, random=1.7, load=0.434, pressure=9.42, partial=1.08, tile=1.84e-07, turn=4.6e-07, restart=7.06e-07, launch=1.19e-05),  # 241 measurements; random of four
    ('hopper', 'one_pass'): Rate(matrix=0.815, pieces=0.75, shared=0.0926, element=2.52, function=0.591, step=0.000188, random=0.9, load=0.852, pressure=3.82, partial=0.0923, shallow=4.3e-07, nested=6.95e-07, turn=6.45e-06),  # 58 measurements; random of four
    ('triton', 'forward'): Rate(matrix=1.4, scalar=6.12, split=1.93, pieces=0.382, slim=0.268, element=0.866, wide=0.0464, solo=0.399, function=0.706, step=0.0946, random=3.05, load=0.712, pressure=0.374, partial=0.785, tile=3.58e-08, shallow=1.68e-07, narrow=7.2e-08, turn=2.76e-06, launch=7.56e-06),  # 428 measurements
    ('triton', 'keys'): Rate(matrix=1.3, scalar=11, older=2.32, split=1.58, pieces=0.37, slim=0.299, element=0.873, wide=0.503, broad=0.0361, solo=1.13, function=1.02, random=3.52, load=3.5, partial=0.199, tile=9.53e-08, shallow=3.47e-08, nested=6.35e-07, turn=3.66e-06, restart=7.73e-07, launch=8.16e-06),  # 275 measurements
    ('triton', 'rows'): Rate(matrix=0.948, scalar=13.5, older=2.05, split=2.81, pieces=0.318, slim=0.0642, element=0.52, wide=0.262, broad=0.0566, solo=0.851, function=1.13, step=0.0865, random=3.21, load=1.26, partial=0.793, tile=1.49e-07, shallow=2.15e-07, narrow=8.43e-08, turn=3.42e-06, restart=3.6e-08, launch=8e-06),  # 338 measurements
    ('triton', 'dense'): Rate(matrix=3.57, slim=0.436, element=1.61, broad=0.17, solo=1.21, pressure=1.82, tile=1.81e-07, narrow=4.48e-07, launch=1.12e-05),  # 20 measurements
}
"""(schedule, kernel) -> Rate."""
