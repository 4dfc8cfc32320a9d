"""Tiles that a kernel could have, and the cost model's order of those that fit."""
from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from ..region import Problem
from ..spec import BLOCK, FINE, AttentionSpec
from . import cost
from .gpu import GPU
from .largest import largest
from .limits import LIMIT, padded, registers_per_thread, resident, shared_bytes, units, wider_bytes
from .schedules import hopper, hopper_memory
from .split import number

GAIN = 1.1
"""How much faster splitting the keys must be predicted to be."""

Tiles = tuple[int, int, int, int]
"""(BLOCK_M, BLOCK_N, num_warps, num_stages)."""


@dataclass(frozen=True)
class Candidate:
    """Tiles with what they need. unfit: why they cannot be had, or "". seconds: of the kernel, predicted; infinite where unfit. parts: as `Plan.parts`."""

    tiles: Tiles
    shared: int
    registers: float
    unfit: str = ""
    seconds: float = float("inf")
    parts: int = 1

    def __str__(self) -> str:
        m, n, warps, stages = self.tiles
        return f"{m}x{n}, {warps} warps, {stages} stages"


def generated(schedule: str, kernel: str, spec: AttentionSpec, problem: Problem, gpu: GPU, listed: bool = False, group: int = 1) -> list[Tiles]:
    """Tiles worth a look, in no order. listed: the mask's run-time summary says which tiles to visit; group: heads that are rows of one tile."""
    head = max(padded(problem.D), padded(problem.Dv))
    if schedule == "hopper":
        if kernel == "keys":  # its kernel is written for these
            return [(64, 128, 12 if head <= 64 else 8, stages) for stages in (2, 1)]
        return [(m, n, m // 64 * 4, stages) for m in (128, 192) for n in (128, 64, 32) for stages in (3, 2)
                if not (m == 192 and (head > 64 or not hopper.is_simple(spec) or listed and BLOCK % m))]
    if units(problem, gpu) != "wgmma" or kernel == "dense":
        return shrunk(kernel, largest(kernel, spec, problem, gpu), problem, spec, gpu)
    outer = problem.N if kernel == "keys" else problem.M * group  # rows of the first product: what a program holds
    least = 16 if outer < 64 and head <= 128 else 32 if head > 128 and kernel != "forward" else 64  # a warpgroup's instruction takes 64
    most = 128 if outer > 64 else max(least, 1 << (outer - 1).bit_length())
    found = [(first, second, warps, stages) for first in (16, 32, 64, 128) for second in (32, 64, 128) for warps in (4, 8) for stages in (3, 2)
             if least <= first <= most and (warps == 4 or first == 128 or head > 128)]
    return [(second, first, *rest) for first, second, *rest in found if not (listed and second > FINE)] if kernel == "keys" else found


def shrunk(kernel: str, tiles: Tiles, problem: Problem, spec: AttentionSpec, gpu: GPU) -> list[Tiles]:
    """Tiles with their stages, halved along the longer side until they fit in shared memory."""
    m, n, warps, most = tiles
    while True:
        found = [(m, n, warps, stages) for stages in range(most, min(most, 2) - 1, -1)]
        if shared_bytes(kernel, found[-1], problem, spec, gpu) + wider_bytes(kernel, found[-1], problem, spec) <= gpu.shared_per_block:
            return found
        if m == n == 16:
            return [*found, (m, n, warps, 1)]
        m, n = (m // 2, n) if m > n or n == 16 else (m, n // 2)
        warps = min(warps, 4 if m * n <= 2048 and max(padded(problem.D), padded(problem.Dv)) <= 128 else 8)


@functools.lru_cache(maxsize=4096)
def ranked(schedule: str, kernel: str, spec: AttentionSpec, problem: Problem, gpu: GPU, listed: bool = False, tiled: tuple[str, ...] = (),
           packed: bool = False, descriptors: bool = True) -> tuple[Candidate, ...]:
    """Every candidate, fastest first by the cost model at the problem's rounded sizes; those that do not fit last. The same on every machine.
    packed: heads that share keys are rows of one tile; descriptors: tiles are read by TMA where the card has it."""
    problem = rounded(problem)
    known, scalar = cost.facts(spec, problem).packed(packed), units(problem, gpu) == "fma"
    found = _offers(schedule, kernel, spec, problem, gpu, listed, tiled, known, scalar, True, packed, descriptors)
    if schedule == "triton" and all(c.unfit for c in found):  # what needs fewest registers may spill some, but runs
        least = min((c for c in found if c.shared <= gpu.shared_per_block), key=lambda c: (c.registers, c.tiles), default=None)
        more = lambda c: _weighed(schedule, kernel, c.tiles, spec, problem, gpu, tiled, known, scalar, float("inf"), listed, True, packed, descriptors)
        found = [more(c) if c is least else c for c in found]
    return tuple(sorted(found, key=_order))


@functools.lru_cache(maxsize=4096)
def fitting(schedule: str, kernel: str, spec: AttentionSpec, problem: Problem, gpu: GPU, listed: bool = False, tiled: tuple[str, ...] = (),
            packed: bool = False, descriptors: bool = True) -> tuple[Candidate, ...]:
    """Of `ranked` those that fit, or its first where none does: what a choice takes. Of tiles with too many registers nothing more is worked out."""
    size = rounded(problem)
    known, scalar = cost.facts(spec, size).packed(packed), units(size, gpu) == "fma"
    offers = _offers(schedule, kernel, spec, size, gpu, listed, tiled, known, scalar, False, packed, descriptors)
    found = [c for c in offers if not c.unfit]
    return tuple(sorted(found, key=_order)) or ranked(schedule, kernel, spec, problem, gpu, listed, tiled, packed, descriptors)[:1]


def _order(c: Candidate) -> tuple:
    return bool(c.unfit), c.seconds, c.tiles


def _offers(schedule, kernel, spec, problem, gpu, listed, tiled, known, scalar, every: bool, packed: bool, descriptors: bool) -> list[Candidate]:
    """every: also those with too many registers."""
    offers = generated(schedule, kernel, spec, problem, gpu, listed, known.group)
    found = [_weighed(schedule, kernel, tiles, spec, problem, gpu, tiled, known, scalar, None, listed, every, packed, descriptors) for tiles in offers]
    return [c for c in found if c]


def _weighed(schedule, kernel, tiles, spec, problem, gpu, tiled, known, scalar, most: float | None, listed: bool, every: bool, packed: bool,
             descriptors: bool) -> Candidate | None:
    """every: False gives None for too many registers."""
    m, n, warps, stages = tiles
    specialised = schedule == "hopper"
    if specialised:
        registers = hopper.registers_per_thread(kernel, problem, m, n, hopper.is_heavy(spec, kernel, max(problem.D, problem.Dv)))
        limit = most or hopper.register_limit(kernel, m)
    else:
        registers = registers_per_thread(kernel, tiles, problem, spec)
        limit = most or (LIMIT[kernel] if units(problem, gpu) == "wgmma" and kernel != "dense" else float("inf"))  # `largest` has been compiled
    if registers > limit and not every:
        return None
    if specialised:
        shared = hopper_memory.shared_bytes(kernel, spec, problem, m, n, stages, tiled, listed)
        programs, name = 1, "one_pass" if kernel == "keys" else kernel
    else:
        shared = shared_bytes(kernel, tiles, problem, spec, gpu, listed, packed, descriptors)
        programs, name = resident(gpu, warps, shared, registers), kernel
    unfit, seconds, parts = "", float("inf"), 1
    # lengths that are no multiples of tiles: a number that partitions are handed; a loop for the last tile, whose buffers are aligned anew
    spare = 64 if specialised else 1024 * (not spec.is_masked) + wider_bytes(kernel, tiles, problem, spec)
    if shared > gpu.shared_per_block - spare:
        unfit = f"{shared / 1024:.0f} KiB of shared memory, a block has {gpu.shared_per_block / 1024:.0f}"
    elif registers > limit:
        unfit = f"about {registers:.0f} registers, {limit:.0f} can be had"
    if not unfit:
        seconds, parts = predicted(schedule, name, tiles, known, gpu, scalar, programs, registers)
    return Candidate(tiles, shared, registers, unfit, seconds, parts)


def predicted(schedule: str, kernel: str, tiles: Tiles, known: cost.Facts, gpu: GPU, scalar: bool, programs: int, registers: float) -> tuple[float, int]:
    """(seconds, parts as `Plan.parts`) of a kernel, its keys split where that is predicted faster. Arguments as `cost.features`."""
    whole = cost.kernel_cost(schedule, kernel, tiles, known, gpu, scalar, programs, registers).seconds
    m, n = tiles[:2]
    if (schedule, kernel) != ("triton", "forward"):
        return whole, 1
    parts = number(known.visible, known.z, known.M, known.N, known.given, m, n, gpu.sms * programs, known.group)
    if parts == 1:
        return whole, 1
    split = cost.kernel_cost(schedule, kernel, tiles, known, gpu, scalar, programs, registers, None, parts).seconds
    split += cost.kernel_cost(schedule, "combine", tiles, known, gpu, scalar, programs, registers, (parts, 0.0)).seconds
    return (split, 0) if split * GAIN < whole else (whole, 1)


@functools.lru_cache(maxsize=4096)
def rounded(problem: Problem) -> Problem:
    """Sizes rounded up to two significant bits (…, 96, 128, 192, 256, …): one choice holds for a range, and dynamic sizes need few kernels."""
    def up(size: int) -> int:
        unit = 1 << max(0, size.bit_length() - 2)
        return -(-size // unit) * unit
    return replace(problem, extents=tuple(map(up, problem.extents)), M=up(problem.M), N=up(problem.N))
