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
    ('hopper', 'forward'): Rate(matrix=0.596, pieces=0.0855, slim=0.145, element=0.839, solo=0.303, function=0.565, step=0.0788, random=0.898, load=0.695, pressure=9.18, partial=0.84, tile=1.15e-07, shallow=1.71e-06, narrow=3.81e-08, turn=3.86e-07, single=2.52e-06, cold=0.671, launch=7.07e-06),  # 252 measurements
    ('hopper', 'one_pass'): Rate(matrix=0.811, split=1.18, pieces=0.413, function=0.315, step=0.0237, random=1.15, load=1.14, pressure=2.17, partial=0.646, tile=5.03e-07, shallow=4.32e-09, nested=7.05e-08, turn=8.27e-07, restart=2.87e-07, cold=0.98, launch=4.64e-07),  # 97 measurements
    ('triton', 'forward'): Rate(matrix=1.07, scalar=2.06, split=1.79, pieces=0.329, slim=0.432, element=0.973, solo=0.602, function=0.593, step=0.0891, random=1.73, load=0.833, pressure=0.571, partial=0.549, tile=9.96e-08, shallow=1.39e-06, idle=3.91e-07, turn=2.12e-06, cold=0.56, launch=6.19e-06),  # 727 measurements
    ('triton', 'keys'): Rate(matrix=1.31, scalar=4.24, older=2.28, split=1.69, pieces=0.274, slim=0.143, shared=0.572, element=0.349, wide=0.644, broad=0.269, solo=0.997, function=1.47, random=5.11, load=3.05, partial=1.12, tile=2.64e-07, shallow=4.42e-07, idle=6.67e-07, nested=1.94e-07, turn=2.54e-06, restart=4.85e-07, cold=0.862, launch=4.19e-06),  # 526 measurements
    ('triton', 'rows'): Rate(matrix=0.992, scalar=2.32, older=2.18, split=1.8, pieces=0.275, element=0.403, wide=0.206, broad=0.132, solo=0.858, function=1.17, step=0.0496, random=2.19, load=1.22, pressure=0.24, partial=1.32, tile=1.84e-07, shallow=1.38e-06, idle=1.15e-07, narrow=1.12e-07, turn=1.65e-06, restart=1.15e-07, cold=1, launch=4.49e-06),  # 548 measurements
    ('triton', 'one_tile'): Rate(matrix=2.32, older=5.34, split=1.36, pieces=0.95, wide=0.178, random=6.89, load=4.5, idle=4.9e-07, narrow=1.78e-08, cold=0.702, launch=1.35e-05),  # 46 measurements
    ('triton', 'dense'): Rate(matrix=3.57, slim=0.436, element=1.61, broad=0.17, solo=1.21, pressure=1.82, partial=2.61, shallow=2.72e-07, narrow=4.48e-07, launch=1.12e-05),  # 21 measurements
}
"""(schedule, kernel) -> Rate."""
