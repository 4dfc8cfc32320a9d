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
    ('hopper', 'forward'): Rate(matrix=0.679, pieces=0.123, slim=0.023, element=0.446, broad=0.24, function=0.471, step=0.207, random=0.99, load=0.763, pressure=14.1, partial=0.493, tile=2.7e-07, shallow=1.13e-07, turn=7.21e-07, cold=0.786, launch=4.93e-06),  # 368 measurements
    ('hopper', 'one_pass'): Rate(matrix=0.869, split=1.21, pieces=0.406, element=1.85, function=0.477, step=0.0605, random=1.19, load=0.756, pressure=1.93, shallow=1.59e-09, nested=7.54e-08, turn=8.74e-07, restart=3.9e-07, cold=1.03),  # 75 measurements
    ('triton', 'forward'): Rate(matrix=1.13, scalar=2.53, split=1.98, pieces=0.333, slim=0.417, element=1, broad=0.0195, solo=0.547, function=0.494, step=0.0731, random=1.66, load=0.77, pressure=0.552, partial=1.01, tile=8.77e-08, shallow=1.51e-06, idle=3.7e-07, turn=1.88e-06, cold=0.753, launch=4.48e-06),  # 580 measurements
    ('triton', 'keys'): Rate(matrix=1.42, scalar=4.32, older=2.55, split=1.57, pieces=0.309, slim=0.309, shared=0.455, element=0.675, wide=0.548, broad=0.0171, solo=1.21, function=1.49, random=5.06, load=3.22, tile=7.74e-08, shallow=2.41e-07, idle=5.88e-07, nested=3.27e-07, turn=3.19e-06, restart=5.44e-07, cold=1.1),  # 372 measurements
    ('triton', 'rows'): Rate(matrix=0.96, scalar=2.26, older=2.56, split=2.77, pieces=0.271, slim=0.0651, element=0.426, wide=0.209, broad=0.145, solo=0.848, function=1.16, step=0.0702, random=2.12, load=1.04, pressure=0.189, partial=0.59, tile=1.94e-07, shallow=1.52e-06, idle=1.37e-07, narrow=6.69e-08, turn=2.17e-06, restart=1.95e-07, cold=1.16, launch=1.11e-06),  # 389 measurements
    ('triton', 'one_tile'): Rate(matrix=1.95, element=0.675, function=1.49, random=5.06, load=3.22, tile=3.7e-07, launch=3e-06),  # 12 of a draft, its scores as of "keys"
    ('triton', 'dense'): Rate(matrix=3.57, slim=0.436, element=1.61, broad=0.17, solo=1.21, pressure=1.82, tile=1.81e-07, narrow=4.48e-07, launch=1.12e-05),  # 20 measurements
}
"""(schedule, kernel) -> Rate."""
