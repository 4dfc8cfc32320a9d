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
    solo      one program alone on its multiprocessor: nothing runs while it waits; of the Hopper forward, whose programs are, two warpgroups where three hide more
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
    single    as turn, of a Hopper forward without shared memory for the next query rows while the output leaves from the place of the ones before
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
    single: float = 0.0
    restart: float = 0.0
    cold: float = 0.0
    launch: float = 0.0


MATRIX, SPECIAL, TURNS = slice(0, 7), slice(7, 17), slice(17, 26)
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
    ('hopper', 'forward'): Rate(matrix=0.622, pieces=0.0826, slim=0.194, element=0.867, solo=0.303, function=0.579, step=0.07, random=1.02, load=0.689, pressure=11, partial=0.749, tile=1.1e-07, shallow=1.49e-06, narrow=3.1e-08, turn=4.01e-07, single=2.61e-06, cold=0.626, launch=7.02e-06),  # 242 measurements
    ('hopper', 'one_pass'): Rate(matrix=0.852, split=1.23, pieces=0.389, element=1.85, function=0.306, step=0.0202, random=1.14, load=1.13, pressure=2, partial=0.649, shallow=1.29e-08, nested=6.93e-08, turn=8.35e-07, restart=2.61e-07, cold=0.94, launch=9.33e-07),  # 94 measurements
    ('triton', 'forward'): Rate(matrix=1.1, scalar=2.5, split=1.92, pieces=0.357, slim=0.434, element=0.989, solo=0.567, function=0.504, step=0.0681, random=1.61, load=0.766, pressure=0.695, partial=0.52, tile=1.12e-07, shallow=1.47e-06, idle=3.58e-07, turn=2.1e-06, cold=0.562, launch=6.13e-06),  # 671 measurements
    ('triton', 'keys'): Rate(matrix=1.41, scalar=4.29, older=2.19, split=1.52, pieces=0.394, slim=0.342, shared=0.39, element=0.772, wide=0.493, broad=0.00688, solo=1.22, function=1.58, random=5.22, load=3.08, partial=1.03, tile=5.07e-08, shallow=3.58e-07, idle=8.06e-07, nested=3.02e-07, turn=2.64e-06, restart=4.36e-07, cold=0.768, launch=4.97e-06),  # 488 measurements
    ('triton', 'rows'): Rate(matrix=1.04, scalar=2.35, older=1.88, split=2.83, pieces=0.299, slim=0.158, element=0.49, wide=0.216, broad=0.0723, solo=0.907, function=1.2, step=0.0543, random=2.24, load=1.25, pressure=0.193, partial=1.22, tile=1.26e-07, shallow=1.34e-06, idle=2.06e-07, narrow=5.23e-08, turn=1.75e-06, restart=1.14e-07, cold=0.966, launch=4.6e-06),  # 497 measurements
    ('triton', 'one_tile'): Rate(matrix=2.32, older=5.34, split=1.36, pieces=0.95, wide=0.178, random=6.89, load=4.5, idle=4.9e-07, narrow=1.78e-08, cold=0.702, launch=1.35e-05),  # 46 measurements
    ('triton', 'dense'): Rate(matrix=3.57, slim=0.436, element=1.61, broad=0.17, solo=1.21, pressure=1.82, partial=2.61, shallow=2.72e-07, narrow=4.48e-07, launch=1.12e-05),  # 21 measurements
}
"""(schedule, kernel) -> Rate."""
