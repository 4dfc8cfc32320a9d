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
    ('hopper', 'forward'): Rate(matrix=0.728, pieces=0.115, slim=0.0038, element=0.432, broad=0.255, function=0.571, step=0.077, random=1.04, load=0.777, pressure=13.8, partial=0.67, tile=2.45e-07, shallow=1.43e-06, turn=4.33e-07, cold=0.66, launch=6.59e-06),  # 233 measurements
    ('hopper', 'one_pass'): Rate(matrix=0.86, split=1.23, pieces=0.384, element=1.85, function=0.291, step=0.0159, random=1.12, load=1.12, pressure=2, partial=0.649, shallow=2.03e-08, nested=6.46e-08, turn=8.32e-07, restart=2.59e-07, cold=0.935, launch=9.55e-07),  # 91 measurements
    ('triton', 'forward'): Rate(matrix=1.12, scalar=2.51, split=1.92, pieces=0.357, slim=0.445, element=0.977, solo=0.581, function=0.512, step=0.0695, random=1.62, load=0.775, pressure=0.678, partial=0.515, tile=1.01e-07, shallow=1.48e-06, idle=3.71e-07, turn=2.11e-06, cold=0.557, launch=6.17e-06),  # 653 measurements
    ('triton', 'keys'): Rate(matrix=1.45, scalar=4.3, older=2.17, split=1.51, pieces=0.37, slim=0.33, shared=0.366, element=0.729, wide=0.474, broad=0.0232, solo=1.2, function=1.53, random=5.17, load=3.04, partial=1.03, tile=5.79e-08, shallow=3.31e-07, idle=8e-07, nested=3.02e-07, turn=2.63e-06, restart=4.4e-07, cold=0.739, launch=5.1e-06),  # 468 measurements
    ('triton', 'rows'): Rate(matrix=1.04, scalar=2.35, older=1.88, split=2.83, pieces=0.302, slim=0.15, element=0.468, wide=0.219, broad=0.0663, solo=0.913, function=1.21, step=0.0574, random=2.25, load=1.25, pressure=0.204, partial=1.23, tile=1.28e-07, shallow=1.33e-06, idle=2.07e-07, narrow=5.27e-08, turn=1.75e-06, restart=1.06e-07, cold=0.967, launch=4.63e-06),  # 483 measurements
    ('triton', 'one_tile'): Rate(matrix=2.32, older=5.34, split=1.36, pieces=0.95, wide=0.178, random=6.89, load=4.5, idle=4.9e-07, narrow=1.78e-08, cold=0.702, launch=1.35e-05),  # 46 measurements
    ('triton', 'dense'): Rate(matrix=3.57, slim=0.436, element=1.61, broad=0.17, solo=1.21, pressure=1.82, partial=2.61, tile=1.81e-07, narrow=4.48e-07, launch=1.12e-05),  # 21 measurements
}
"""(schedule, kernel) -> Rate."""
