"""Tiles that a kernel could have, and the cost model's order of those that fit."""
from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Iterable, NamedTuple

from ..expr import cached_hash
from ..region import Problem
from ..spec import BLOCK, FINE, AttentionSpec
from . import cost
from .captured import ends, grouped, is_divided, is_overfull
from .gpu import EXACT, GPU, units
from .largest import largest
from .limits import is_uneven, padded, shared_bytes, wider_bytes
from .reads import ROW, across
from .registers import LIMIT, registers_per_thread, resident
from .schedules import hopper, hopper_memory, one_tile
from .split import number

GAIN = 1.1
"""How much faster splitting the keys must be predicted to be."""

Tiles = tuple[int, int, int, int]
"""(BLOCK_M, BLOCK_N, num_warps, num_stages)."""
ORDERED = 256
"""Bytes of shared memory at most that a fixed order of dQ's sum takes in the Hopper backward: whether there is one is asked when tiles are chosen already."""


@cached_hash
@dataclass(frozen=True)
class Asked:
    """For what tiles are wanted: one kernel of a schedule. `ask` makes one.

    problem      sizes, as `representative`
    sizes        those that the cost model is told
    listed       the mask's run-time summary says which tiles to visit
    tiled        captured tensors of which the Hopper schedules read tiles by TMA
    packed       heads that share keys are rows of one tile
    descriptors  tiles are read by TMA where the card has it
    ordered      gradients must be the same bits in every run
    """

    schedule: str
    kernel: str
    spec: AttentionSpec
    problem: Problem
    sizes: Problem
    gpu: GPU
    listed: bool = False
    tiled: tuple[str, ...] = ()
    packed: bool = False
    descriptors: bool = True
    ordered: bool = False

    @functools.cached_property
    def known(self) -> cost.Facts:
        return cost.facts(self.spec, self.sizes).packed(self.packed)

    @functools.cached_property
    def units(self) -> str:
        return units(self.problem, self.gpu)

    @property
    def exact(self) -> bool:
        """Are products of float32?"""
        return self.units in EXACT

    @property
    def costed(self) -> str:
        """The kernel as `cost` calls it."""
        return "one_pass" if (self.schedule, self.kernel) == ("hopper", "keys") else self.kernel

    @functools.cached_property
    def score_tiles(self) -> float:
        """As `hopper.score_tiles`."""
        return hopper.score_tiles(self.spec, max(self.problem.D, self.problem.Dv))


def ask(schedule: str, kernel: str, spec: AttentionSpec, problem: Problem, gpu: GPU, **more) -> Asked:
    """For what tiles are wanted: one answer holds for a range of sizes. more: as `Asked`."""
    return Asked(schedule, kernel, spec, representative(problem), rounded(problem), gpu, **more)


@dataclass(frozen=True)
class Candidate:
    """Tiles with what they need. unfit: why they cannot be had, or "". seldom: as the function. seconds: of the kernel, predicted; infinite where unfit.
    parts: as `Plan.parts`. busy: seconds without memory, which decide where memory binds tiles alike."""

    tiles: Tiles
    shared: int
    registers: float
    unfit: str = ""
    seldom: bool = False
    seconds: float = float("inf")
    parts: int = 1
    busy: float = float("inf")

    def __str__(self) -> str:
        m, n, warps, stages = self.tiles
        return f"{m}x{n}, {warps} warps, {stages} stages"


def generated(asked: Asked) -> list[Tiles]:
    """Tiles worth a look, in no order."""
    kernel, spec, problem, gpu, listed = asked.kernel, asked.spec, asked.problem, asked.gpu, asked.listed
    head = max(padded(problem.D), padded(problem.Dv))
    if asked.schedule == "hopper":
        if kernel == "keys":  # its kernel is written for these
            thirds = (64, hopper.BY_THIRDS, 12, 2)
            if hopper.takes_thirds(spec, problem, listed, asked.ordered) and not _exceeds(asked, thirds, _shared(asked, thirds)):
                return [thirds]
            *found, one = [(64, 128 if head <= 128 else 64, 12 if head <= 64 else 8, stages) for stages in ((3, 2, 1) if head <= 64 else (2, 1))]
            return found if not _exceeds(asked, found[-1], _shared(asked, found[-1])) else [one]  # above 64 one stage mostly spills
        # few keys, H200, head size 64: 128 of 128 rows in one tile 79 microseconds, in two 74; 77 of 4096 rows by tiles of 192 rows and 128, 64, 32 keys 28, 29, 22
        few = head <= 64 and problem.N <= 128
        return [_deepest(asked, m, n, head) for m in (128, 192) for n in (128, 64, 32)
                if not (m == 192 and (head > 64 or not hopper.takes_three(spec) or listed and BLOCK % m)) and not (few and (n == 128 or m == 192 and n == 64 < problem.N))]
    if kernel == "one_tile":
        tiles = one_tile.tiles(spec, problem)
        return [(*tiles[:3], 1) if _exceeds(asked, tiles, _shared(asked, tiles)) else tiles]
    if asked.units == "wgmma" and kernel == "keys" and is_divided(spec):
        crowded = grouped(spec) and (head > 64 and is_overfull(spec) or head > 128 and spec.dropout > 0) or head == 160 and is_overfull(spec)
        return [(16, 64, 8, 2) if head <= 128 and not crowded else (16, 16, 4, 2) if crowded else (16, 32, 4, 2)]
    if asked.units != "wgmma" or kernel == "dense":
        return shrunk(kernel, largest(kernel, spec, problem, gpu), problem, spec, gpu)
    outer = problem.N if kernel == "keys" else problem.M * asked.known.group  # rows of the first product: what a program holds
    uneven = kernel != "forward" and is_uneven(problem)
    least = 16 if outer < 64 and head <= 128 else 32 if head > 128 and kernel != "forward" and not uneven else 64  # a warpgroup's instruction takes 64
    most = 128 if outer > 64 else max(least, 1 << (outer - 1).bit_length())
    found = [(first, second, warps, stages) for first in (16, 32, 64, 128) if least <= first <= most for second in ((16, 32, 64) if uneven else (32, 64, 128))
             for warps in (4, 8) if warps == 4 or first == 128 or head > 128 for stages in (3, 2)]
    if kernel == "forward" and head <= 64 and problem.N > 32 and problem.N % ROW and across(spec):  # read element by element: H200, N = 49, 32 keys take 14 to 22 % more time
        found = [tiles for tiles in found if tiles[1] > 32]
    if kernel == "keys" and outer < 64 and any(map(ends, spec.score.loads)):  # sums beyond the ends of a table
        found = sorted({(first, 16, warps, stages) for first, _, warps, stages in found})
    return [(second, first, *rest) for first, second, *rest in found if not (listed and second > FINE)] if kernel == "keys" else found


def _deepest(asked: Asked, m: int, n: int, head: int) -> Tiles:
    """Tiles of the Hopper forward with a third place for keys and values, where there are as many tiles of keys and it fits. H200, the recorded sweep: with two
    128 keys take 1 % more time up to heads of 64, 17 to 20 % where every tile comes from device memory (100 to 500 queries), 64 keys 5 % at all heads, 32 keys 11 %; of
    128 keys a third is 1 % slower at heads of 80 and 96, 0 to 25 at 128."""
    stages = 2 if n == 128 and head > 64 else max(2, min(3, -(-asked.problem.N // n)))
    tiles = (m, n, m // 64 * 4, stages)
    return (*tiles[:3], 2) if stages == 3 and _exceeds(asked, tiles, _shared(asked, tiles)) else tiles


def seldom(asked: Asked, tiles: Tiles) -> bool:
    """Were such tiles at no point of the recorded sweep (tests/data/h200_tiles.json) more than 1 % faster than all others? They are for what has no place
    for others."""
    m, n, warps, _ = tiles
    if asked.schedule == "hopper":
        return n == 32 and asked.problem.N > 128
    if asked.units != "wgmma" or asked.kernel == "dense":
        return False
    if asked.kernel == "keys":
        return m == n == 128 or warps == 8 and not m == n == 64
    return n != 64 if m == 128 else warps == 8


def shrunk(kernel: str, tiles: Tiles, problem: Problem, spec: AttentionSpec, gpu: GPU) -> list[Tiles]:
    """Tiles with their stages, halved along the longer side until they fit in shared memory."""
    m, n, warps, most = tiles
    while True:
        found = [(m, n, warps, stages) for stages in range(most, min(most, 2) - 1, -1)]
        if shared_bytes(kernel, found[-1], problem, spec, gpu) + _spare(kernel, found[-1], problem, spec) <= gpu.shared_per_block:
            return found
        if m == n == 16:
            return [*found, (m, n, warps, 1)]
        m, n = (m // 2, n) if m > n or n == 16 else (m, n // 2)
        warps = min(warps, 4 if m * n <= 2048 and max(padded(problem.D), padded(problem.Dv)) <= 128 else 8)


@functools.lru_cache(maxsize=4096)
def ranked(asked: Asked) -> tuple[Candidate, ...]:
    """Every candidate, fastest first by the cost model; then those of `seldom`; those that do not fit last. The same on every machine."""
    found = [_weighed(asked, tiles, *_registers(asked, tiles)) for tiles in generated(asked)]
    if asked.schedule == "triton" and all(c.unfit for c in found):
        fewest = _fewest(asked, ((c.registers, c.tiles) for c in found))
        found = [_weighed(asked, c.tiles, c.registers, float("inf")) if (c.registers, c.tiles) == fewest else c for c in found]
    return tuple(sorted(found, key=_order))


@functools.lru_cache(maxsize=4096)
def chosen(asked: Asked) -> tuple[Candidate, bool]:
    """(the first of `ranked`, could there be others that fit?): tiles that take longer than the best so far whatever else they need are not looked at."""
    groups = bounded(asked)
    best, compared = _chosen(asked, groups)
    if best is None and (all_groups := bounded(asked, True)) is not groups:
        best, compared = _chosen(asked, all_groups)
    return (best, compared) if best else (ranked(asked)[0], False)


def _chosen(asked: Asked, groups: list[Group]) -> tuple[Candidate | None, bool]:
    """As `chosen`, of such groups; None if none of their tiles fits."""
    best, fit, compared = None, False, len(groups) > 1
    for group in groups:
        if group.spills or best is not None and group.seconds > best.seconds:  # so do all that follow
            break
        for tiles in group.tiles:
            slower = best is not None and _least(asked, tiles, group.registers) > best.seconds
            if slower and compared or _exceeds(asked, tiles, shared := _shared(asked, tiles)):
                continue
            compared, fit = compared or fit, True
            if not slower:
                found = _priced(asked, tiles, shared, group.registers)
                best = min(best or found, found, key=_order)
    return best, compared


def _fewest(asked: Asked, needed: Iterable[tuple[float, Tiles]]) -> tuple[float, Tiles] | None:
    """(registers, tiles): what needs fewest registers may spill some, but runs."""
    return next((found for found in sorted(needed) if _shared(asked, found[1]) <= asked.gpu.shared_per_block), None)


def fits(asked: Asked) -> bool:
    """Do any tiles fit?"""
    fitting = lambda groups: any(not g.spills and not _exceeds(asked, tiles, _shared(asked, tiles)) for g in groups for tiles in reversed(g.tiles))
    return fitting(bounded(asked)) or fitting(bounded(asked, True))


class Group(NamedTuple):
    """Tiles that differ in stages alone: seconds that they take at least, registers of a thread, and are those too many?"""

    seconds: float
    registers: float
    spills: bool
    tiles: list[Tiles]


@functools.lru_cache(maxsize=4096)
def bounded(asked: Asked, every: bool = False) -> list[Group]:
    """Tiles for which there are registers, the least seconds first; where there are for none, those that run all the same, or all. every: those of `seldom` too,
    which are there otherwise only if there are registers for no others."""
    groups: dict[tuple[int, int, int], list[Tiles]] = {}
    for tiles in generated(asked):
        if every or not seldom(asked, tiles):
            groups.setdefault(tiles[:3], []).append(tiles)
    needed = {key: _registers(asked, tiles[0]) for key, tiles in groups.items()}
    spills = all(registers > limit for registers, limit in needed.values())
    if spills and not every:
        return bounded(asked, True)
    if spills and asked.schedule == "triton" and (fewest := _fewest(asked, ((needed[key][0], x) for key, tiles in groups.items() for x in tiles))):
        registers, tiles = fewest
        return [Group(_least(asked, tiles, registers), registers, False, [tiles])]
    weighed = len(groups) > 1 or asked.schedule == "hopper"  # beside other tiles, or the portable schedule
    return sorted(Group(_least(asked, max(groups[key]), registers) if weighed else 0.0, registers, spills, groups[key])
                  for key, (registers, limit) in needed.items() if spills or registers <= limit)


def _least(asked: Asked, tiles: Tiles, registers: float) -> float:
    programs = 2 if asked.schedule == "hopper" else resident(asked.gpu, tiles[2], 0, registers)  # as many as there may be, of programs and of tiles of query rows
    return cost.least(asked.schedule, asked.costed, tiles, asked.known, asked.gpu, asked.exact, programs, registers)


def _order(c: Candidate) -> tuple:
    return bool(c.unfit), c.seldom, c.seconds, c.busy, c.tiles


def _registers(asked: Asked, tiles: Tiles) -> tuple[float, float]:
    """(of a thread, how many can be had): the same whatever the stages."""
    m, n, _, _ = tiles
    if asked.schedule == "hopper":
        return hopper.registers_per_thread(asked.kernel, asked.problem, m, n, asked.score_tiles), hopper.register_limit(asked.kernel, m)
    limited = asked.units == "wgmma" and asked.kernel != "dense"  # `largest` has been compiled
    return registers_per_thread(asked.kernel, tiles, asked.problem, asked.spec), LIMIT[asked.kernel] if limited else float("inf")


@functools.lru_cache(maxsize=4096)
def _shared(asked: Asked, tiles: Tiles) -> int:
    if asked.schedule == "hopper":
        return hopper_memory.shared_bytes(asked.kernel, asked.spec, asked.problem, *tiles[:2], tiles[3], asked.tiled, asked.listed)
    return shared_bytes(asked.kernel, tiles, asked.problem, asked.spec, asked.gpu, asked.listed, asked.packed, asked.descriptors)


def _spare(kernel: str, tiles: Tiles, problem: Problem, spec: AttentionSpec) -> int:
    """What the portable schedule's kernels may take where no tile divides the length: a loop for the last tile, whose buffers are aligned anew."""
    return 1024 * (not spec.is_masked) + wider_bytes(kernel, tiles, problem, spec)


def _exceeds(asked: Asked, tiles: Tiles, shared: int) -> bool:
    """Is there too little shared memory?"""
    if asked.schedule == "hopper":  # where no tile divides the length, a number that partitions are handed
        spare = 64 + ORDERED * (asked.kernel == "keys")
    else:
        spare = _spare(asked.kernel, tiles, asked.problem, asked.spec)
    return shared > asked.gpu.shared_per_block - spare


def _weighed(asked: Asked, tiles: Tiles, registers: float, limit: float) -> Candidate:
    shared, unfit = _shared(asked, tiles), ""
    if _exceeds(asked, tiles, shared):
        unfit = f"{shared / 1024:.0f} KiB of shared memory, a block has {asked.gpu.shared_per_block / 1024:.0f}"
    elif registers > limit:
        unfit = f"about {registers:.0f} registers, {limit:.0f} can be had"
    return Candidate(tiles, shared, registers, unfit, seldom(asked, tiles)) if unfit else _priced(asked, tiles, shared, registers)


def _priced(asked: Asked, tiles: Tiles, shared: int, registers: float) -> Candidate:
    programs = resident_of(asked, tiles, shared, registers)
    return Candidate(tiles, shared, registers, "", seldom(asked, tiles), *predicted(asked, tiles, programs, registers))


def resident_of(asked: Asked, tiles: Tiles, shared: int, registers: float) -> int:
    """Programs that a multiprocessor holds at once; of the Hopper forward, which holds one, tiles of query rows."""
    if asked.schedule == "triton":
        return resident(asked.gpu, tiles[2], shared, registers)
    return hopper_memory.q_tiles(asked.spec, asked.problem, *tiles[:2], tiles[3], asked.tiled) if asked.kernel == "forward" else 1


def predicted(asked: Asked, tiles: Tiles, programs: int, registers: float) -> tuple[float, int, float]:
    """(seconds, parts as `Plan.parts`, seconds without memory) of a kernel, its keys split where that is predicted faster. programs: of a multiprocessor."""
    known, gpu, scalar = asked.known, asked.gpu, asked.exact
    whole = cost.kernel_cost(asked.schedule, asked.costed, tiles, known, gpu, scalar, programs, registers, None, 1)
    if (asked.schedule, asked.kernel) != ("triton", "forward"):
        return whole.seconds, 1, whole.busy
    parts = number(known.visible, known.z, known.M, known.N, known.given, *tiles[:2], gpu.sms * programs, known.group)
    if parts == 1:
        return whole.seconds, 1, whole.busy
    split = cost.kernel_cost(asked.schedule, asked.kernel, tiles, known, gpu, scalar, programs, registers, None, parts)
    seconds = split.seconds + cost.kernel_cost(asked.schedule, "combine", tiles, known, gpu, scalar, programs, registers, (parts, 0.0)).seconds
    return (seconds, 0, split.busy) if seconds * GAIN < whole.seconds else (whole.seconds, 1, whole.busy)


@functools.lru_cache(maxsize=4096)
def rounded(problem: Problem) -> Problem:
    """Sizes rounded up to three significant bits (…, 112, 128, 160, 192, …), queries to two: one choice holds for a range, and dynamic sizes need few kernels."""
    def up(size: int, bits: int = 3) -> int:
        unit = 1 << max(0, size.bit_length() - bits)
        return -(-size // unit) * unit
    return replace(problem, extents=tuple(map(up, problem.extents)), M=up(problem.M, 2), N=up(problem.N))


@functools.lru_cache(maxsize=4096)
def representative(problem: Problem) -> Problem:
    """Of the problems that one choice holds for. As `rounded`, but what decides on code and what it needs stays: whether N is a multiple of `BLOCK`, of
    `ROW` or of neither, and whether there are more queries than keys."""
    found = rounded(problem)
    M, N = found.M, found.N
    if N % ROW == 0 and problem.N % ROW:
        N -= 1
    elif N % BLOCK == 0 and problem.N % BLOCK:
        N -= ROW
    return replace(found, M=min(M, N) if problem.M <= problem.N else max(M, N + 1), N=N)
