"""What each term of the cost model takes on real kernels: fitted to a recorded sweep by `flashfx.bench.fit`, judged on its other half in tests."""
from __future__ import annotations

from typing import NamedTuple


class Rate(NamedTuple):
    """Of one kernel of one schedule: what multiplies the seconds that `cost.features` finds for each term at the rates of the data sheet, or seconds.

    matrix    matrix products; the following add to it
    scalar    float32 products, at `GPU.exact_rate`
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
    shallow   seconds of a copy, of which a stage hides its share: on Hopper as many stages hide all as warpgroups read the same tiles, else three
    idle      as tile, by the share of programs that a multiprocessor has room for and there are none
    narrow    as tile, where the inner tile has fewer than 64 rows
    nested    the same, in a loop over the queries that share keys
    turn      seconds from a program's last tile to the next one's first
    restart   seconds of a further loop of a program
    cold      what device memory must deliver once, as much of it as the L2 cache holds: while all programs begin nothing hides it
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
    idle: float = 0.0
    narrow: float = 0.0
    nested: float = 0.0
    turn: float = 0.0
    restart: float = 0.0
    cold: float = 0.0
    launch: float = 0.0


MATRIX, SPECIAL, TURNS = slice(0, 7), slice(7, 17), slice(17, 25)
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
    ('hopper', 'forward'): Rate(matrix=0.683, pieces=0.128, slim=0.0618, element=0.495, broad=0.209, function=0.392, step=0.216, random=0.923, load=0.755, pressure=14, partial=0.791, tile=2.54e-07, shallow=1.48e-07, turn=4.99e-07, cold=0.789, launch=5.43e-06),  # 413 measurements
    ('hopper', 'one_pass'): Rate(matrix=0.833, split=1.24, pieces=0.409, element=1.95, function=0.459, step=0.0661, random=1.18, load=0.706, pressure=2.08, partial=0.506, shallow=2.1e-09, nested=8.2e-08, turn=8.6e-07, restart=2.1e-07, launch=1.34e-05),  # 79 measurements
    ('triton', 'forward'): Rate(matrix=1.1, scalar=2.49, split=1.94, pieces=0.331, slim=0.439, element=0.987, wide=0.00539, solo=0.572, function=0.486, step=0.071, random=1.6, load=0.777, pressure=0.658, partial=0.533, tile=1.02e-07, shallow=1.5e-06, idle=3.63e-07, turn=2.12e-06, cold=0.753, launch=4.34e-06),  # 623 measurements
    ('triton', 'keys'): Rate(matrix=1.48, scalar=4.33, older=2.26, split=1.6, pieces=0.311, slim=0.382, shared=0.274, element=0.839, wide=0.44, solo=1.27, function=1.56, random=5.17, load=3.1, partial=0.945, shallow=1.64e-07, idle=5.21e-07, nested=3.88e-07, turn=2.61e-06, restart=5.46e-07, cold=1.24),  # 432 measurements
    ('triton', 'rows'): Rate(matrix=1.03, scalar=2.31, older=1.9, split=2.84, pieces=0.254, slim=0.124, element=0.482, wide=0.2, broad=0.0926, solo=0.891, function=1.14, step=0.0528, random=2.18, load=1.23, pressure=0.156, partial=1.23, tile=1.33e-07, shallow=1.37e-06, idle=1.77e-07, narrow=6.16e-08, turn=1.69e-06, restart=2.11e-07, cold=1.41),  # 441 measurements
    ('triton', 'one_tile'): Rate(matrix=1.66, older=3.67, split=1.52, wide=0.773, function=0.776, random=5.78, load=4.14, pressure=2.73, turn=7.4e-07, cold=0.0829),  # 18 measurements
    ('triton', 'dense'): Rate(matrix=3.57, slim=0.436, element=1.61, broad=0.17, solo=1.21, pressure=1.82, partial=2.57, tile=1.81e-07, narrow=4.48e-07, launch=1.12e-05),  # 21 measurements
}
"""(schedule, kernel) -> Rate."""
