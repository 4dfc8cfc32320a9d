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
    narrow    the same, where the inner tile has fewer than 64 rows
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
    narrow: float = 0.0
    nested: float = 0.0
    turn: float = 0.0
    restart: float = 0.0
    cold: float = 0.0
    launch: float = 0.0


MATRIX, SPECIAL, TURNS = slice(0, 7), slice(7, 17), slice(17, 24)
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
    ('hopper', 'forward'): Rate(matrix=0.79, pieces=0.111, slim=0.0729, element=0.491, broad=0.248, function=0.605, step=0.242, random=1.11, load=0.585, pressure=9.22, tile=2.5e-07, shallow=9.78e-08, restart=5.13e-07, cold=0.889, launch=8.04e-06),  # 270 measurements
    ('hopper', 'one_pass'): Rate(matrix=0.641, split=1.3, pieces=0.69, element=2.02, function=0.557, step=0.0548, random=1.06, load=1.1, pressure=4.48, shallow=8.01e-07, nested=8.12e-07, turn=3.73e-06, launch=6.17e-06),  # 79 measurements
    ('triton', 'forward'): Rate(matrix=1.43, scalar=2.63, split=1.94, pieces=0.353, slim=0.171, element=0.949, solo=0.381, function=0.554, step=0.107, random=1.72, load=0.585, pressure=0.29, partial=0.611, shallow=1.03e-06, narrow=1.3e-07, turn=2.41e-06, cold=0.597, launch=4.37e-06),  # 392 measurements
    ('triton', 'keys'): Rate(matrix=1.24, scalar=4.27, older=2.57, split=1.61, pieces=0.308, slim=0.243, shared=0.447, element=0.786, wide=0.489, broad=0.091, solo=1.19, function=1.44, random=5.02, load=3.25, tile=1.81e-07, shallow=2e-07, nested=3.16e-07, turn=2.64e-06, restart=8.46e-07, cold=1.18),  # 281 measurements
    ('triton', 'rows'): Rate(matrix=0.963, scalar=2.3, older=2.57, split=2.76, pieces=0.296, slim=0.0114, element=0.51, wide=0.174, broad=0.174, solo=0.78, function=1.16, step=0.0676, random=2.17, load=1.05, partial=0.587, tile=1.7e-07, shallow=1.27e-06, narrow=1.13e-07, turn=2.44e-06, cold=1.26, launch=1.67e-07),  # 301 measurements
    ('triton', 'dense'): Rate(matrix=3.57, slim=0.436, element=1.61, broad=0.17, solo=1.21, pressure=1.82, tile=1.81e-07, narrow=4.48e-07, launch=1.12e-05),  # 20 measurements
}
"""(schedule, kernel) -> Rate."""
