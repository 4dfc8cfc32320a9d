"""What each term of the cost model takes on real kernels: fitted to a recorded sweep by `flashfx.bench.fit`, judged on its other half in tests."""
from __future__ import annotations

from typing import NamedTuple


class Rate(NamedTuple):
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


MATRIX, SPECIAL, TURNS = slice(0, 7), slice(7, 17), slice(17, 23)
"""Places of the terms that add up to the time of the matrix units, of what is done to each score, of programs and their tiles."""

BANDWIDTH, CACHE = 0.85, 2.5
"""Of the device memory's bandwidth: sustained, and what the L2 cache delivers beside it."""
LAUNCH = 3e-6
"""Seconds from one kernel's end to the next one's work, for kernels without tiles."""

NEAR, FAR, STREAM, STEP = 0.3e-6, 0.95e-6, 1e11, 0.05e-6
"""Seconds until the first byte of a tile arrives from the L2 cache and from device memory, bytes per second into one multiprocessor after it, and seconds
from a tile's last byte to asking for another: what a program of the portable schedule waits for that does nothing else, as in decoding. Programs
that read the same keys beside each other, as of grouped queries, are in step, and all wait for device memory."""

RATES: dict[tuple[str, str], Rate] = {
    ('hopper', 'forward'): Rate(matrix=0.957, pieces=0.0138, slim=0.36, element=0.787, function=0.826, step=0.231, random=1.22, load=0.433, pressure=9.28, partial=1.1, tile=1.82e-07, turn=5.01e-07, restart=6.84e-07, launch=1.18e-05),  # 259 measurements
    ('hopper', 'one_pass'): Rate(matrix=0.832, pieces=0.738, element=2.56, function=0.598, random=0.527, load=0.873, pressure=3.51, partial=0.283, shallow=4.12e-07, nested=6.61e-07, turn=6e-06, launch=1.63e-06),  # 61 measurements
    ('triton', 'forward'): Rate(matrix=1.46, scalar=6.1, split=1.89, pieces=0.392, slim=0.201, element=0.903, solo=0.345, function=0.723, step=0.111, random=1.71, load=0.618, pressure=0.31, partial=0.686, shallow=1.78e-07, narrow=1.3e-07, turn=2.86e-06, launch=7.25e-06),  # 395 measurements
    ('triton', 'keys'): Rate(matrix=1.26, scalar=11, older=2.52, split=1.58, pieces=0.324, slim=0.265, shared=0.429, element=0.786, wide=0.474, broad=0.0694, solo=1.13, function=0.959, random=4.86, load=3.3, tile=1.72e-07, shallow=4.25e-08, nested=3.01e-07, turn=3.31e-06, restart=8.56e-07, launch=8.99e-06),  # 275 measurements
    ('triton', 'rows'): Rate(matrix=1.02, scalar=13.5, older=2.49, split=2.7, pieces=0.343, element=0.498, wide=0.189, broad=0.0745, solo=0.769, function=1.09, step=0.0874, random=2.09, load=1.11, partial=0.44, tile=1.32e-07, shallow=2.05e-07, narrow=1.43e-07, turn=3.34e-06, restart=1.91e-07, launch=8.02e-06),  # 297 measurements
    ('triton', 'dense'): Rate(matrix=3.57, slim=0.436, element=1.61, broad=0.17, solo=1.21, pressure=1.82, tile=1.81e-07, narrow=4.48e-07, launch=1.12e-05),  # 20 measurements
}
"""(schedule, kernel) -> Rate."""
