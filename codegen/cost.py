"""What a plan costs: the work and the traffic of each kernel as formulas, and from a GPU's row the time that each resource takes.

The formulas are sympy expressions over the symbols below, counted from the tiling itself: a program holds one tile of the outer operand
and walks the visible tiles of the inner one. FlashAttention's Theorem 2 (forward), Theorem 5 (backward) and Proposition 4 (block-sparse)
are their limits for tiles that fill the SRAM (`limit`, tests/test_cost.py).

Time is a model (`features`), calibrated on measured kernels (`flashfx.codegen.rates`): matrix units and the steps of the softmax do not overlap
in the long run, whatever the schedule tries, so that their times add up; memory runs beside them.
"""
from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from operator import mul
from typing import TYPE_CHECKING, NamedTuple, Sequence

from ..region import Problem
from ..spec import BLOCK, AttentionSpec
from . import l2
from .facts import Facts, facts
from .gpu import GPU
from .rates import BANDWIDTH, CACHE, FAR, LAUNCH, MATRIX, NEAR, RATES, SPECIAL, STEP, STREAM, TURNS, Rate
from .split import number, parts_of_rows
from .tiles import classify

if TYPE_CHECKING:
    from .plan import Plan

SYMBOLS = "Z G M N D E W BLOCK_M BLOCK_N T"
"""Batch indices, how many of them share keys (grouped queries), queries, keys, head sizes of q and k (D) and of v (E), bytes of an element, tile sizes, visible tiles over all batch indices."""
LSE = 4
"""Bytes of a log-sum-exp, a delta, an element of dQ's float32 sum."""
PASSING = "delta", "reset", "sum"
"""Kernels that go through rows once, which take as long whatever their tiles."""
BY_KEYS = "keys", "one_pass", "one_tile"  # their programs hold tiles of keys


class Work(NamedTuple):
    """One kernel's formulas.

    products  float operations of the matrix products, 2 a multiply-add, hidden elements of partial tiles included
    exps      exponentials
    once      bytes that each kernel must move if every tile stayed in a cache: operands and results, once
    again     bytes that tiles of the inner operand are read (or added to: read and written) beyond the first time
    outer     programs, or turns of a persistent one
    written   of `once`, the results
    streamed  bytes of the inner operands and sums that programs go through
    """

    products: object
    exps: object
    once: object
    again: object
    outer: object
    written: object
    streamed: object


@functools.cache
def formulas() -> dict[str, Work]:
    """Kernel -> its formulas. "one_pass" is the Hopper backward, "keys" and "rows" are the two of the portable one."""
    import sympy
    Z, G, M, N, D, E, W, m, n, T = sympy.symbols(SYMBOLS, positive=True, integer=True)
    rows, keys, tile = Z * sympy.ceiling(M / m), Z / G * sympy.ceiling(N / n), m * n * T
    q, k, vectors, sums, none = Z * M * W, Z / G * N * W, 2 * LSE * Z * M, LSE * Z * M * D, sympy.Integer(0)
    out, both, row = q * E + LSE * Z * M, k * (D + E), W * (D + E) + 2 * LSE
    return {
        # Q K^T and P V; k and v are read again by every row of tiles but the first
        "forward": Work(2 * tile * (D + E), tile, q * D + both + out, W * (D + E) * (T * n - Z / G * N), rows, out, both),
        # Q K^T, dO V^T, P^T dO, dS^T Q; q, dO, lse and delta again by every column of tiles but the first
        "keys": Work(2 * tile * 2 * (D + E), tile, q * (D + E) + 2 * both + vectors, row * (T * m - Z * M), keys, both, row * Z * M),
        # Q K^T, dO V^T, dS K
        "rows": Work(2 * tile * (2 * D + E), tile, q * (2 * D + E) + both + vectors, W * (D + E) * (T * n - Z / G * N), rows, q * D, both),
        # those of "keys" and dS K; dQ is added to in float32, read and written once for every visible tile
        "one_pass": Work(2 * tile * (3 * D + 2 * E), tile, q * (D + E) + 2 * both + vectors + 2 * sums, (row + 2 * LSE * D) * (T * m - Z * M), keys,
                         both + sums, (row + LSE * D) * Z * M),
        # the same without sums of dQ in memory, every row read once; o in place of delta
        "one_tile": Work(2 * tile * (3 * D + 2 * E), tile, q * (2 * D + 2 * E) + 2 * both + LSE * Z * M, none, Z / G, q * D + both, none),
        # Q K^T, dO V^T: the gradient of a bias, a tile to a program
        "dense": Work(2 * tile * (D + E), tile, q * (D + E) + both + vectors, W * (D + E) * (T * (m + n) - Z * M - Z / G * N), rows * sympy.ceiling(N / n), none, none),
        # delta = rowsum(dO * O), with it 0 for dQ's float32 sum, and dQ from that: no products
        "delta": Work(none, none, 2 * q * E + LSE * Z * M + vectors, none, rows, vectors, none),
        "reset": Work(none, none, 2 * q * E + LSE * Z * M + vectors + sums, none, rows, vectors + sums, none),
        "sum": Work(none, none, sums + q * D, none, rows, q * D, none),
        # maximum, sum and accumulator of each of T parts of the keys of a row, written by "forward" and read again
        "combine": Work(none, none, 2 * LSE * Z * M * T * (E + 2), none, Z * M, none, none),
    }


@functools.cache
def _compiled(kernel: str):
    import sympy
    return sympy.lambdify(sympy.symbols(SYMBOLS, positive=True, integer=True), list(formulas()[kernel]), "math", cse=True)


def limit(kernel: str):
    """Bytes that tiles are read again, over N^2 d^2 / S, for M = N, E = D = d, all tiles visible and tiles that fill an SRAM of S bytes as in
    FlashAttention's Algorithm 1 (S / 4 for each of four tiles), as N grows: the constant of Theorem 2 and of Theorem 5."""
    import sympy
    Z, G, M, N, D, E, W, m, n, T = sympy.symbols(SYMBOLS, positive=True, integer=True)
    S = sympy.Symbol("S", positive=True)
    block = S / (4 * D * W)
    again = formulas()[kernel].again.subs({E: D, M: N}).subs({G: 1, m: block, n: block, T: Z * (N / block) ** 2})
    return sympy.limit(sympy.simplify(again / (Z * N ** 2 * D ** 2 / S)), N, sympy.oo)


@dataclass(frozen=True)
class Cost:
    """Predicted time of one kernel, in seconds, by resource.

    matrix, special, memory, cache   at the rates that such kernels sustain; special is all that is done to a score
    turns                            prologues and epilogues of the programs that follow each other on a multiprocessor, and of their tiles
    fixed                            of a launch, from one kernel's end to the next one's work
    waits                            a program waits for all that it reads, also where that is copied ahead: its products wait for each other
    """

    kernel: str
    matrix: float
    special: float
    memory: float
    cache: float
    turns: float
    fixed: float
    waits: bool = False

    @property
    def busy(self) -> float:
        """Without memory."""
        return self.matrix + self.special + self.turns

    @property
    def seconds(self) -> float:
        moved = max(self.memory, self.cache)
        return (self.busy + moved if self.waits else max(self.busy, moved)) + self.fixed

    @property
    def binds(self) -> str:
        """What binds: the largest share of the larger side."""
        if max(self.memory, self.cache) > (max(self.matrix, self.special, self.turns) if self.waits else self.busy):
            return "device memory" if self.memory >= self.cache else "L2 cache"
        return max((self.matrix, "matrix units"), (self.special, "special functions"), (self.turns, "starting and ending programs"))[1]

    def __str__(self) -> str:
        us = lambda s: f"{s * 1e6:.0f}"
        return (f"{self.kernel} {self.seconds * 1e6:.0f} us, bound by {self.binds} (matrix units {us(self.matrix)}, special functions {us(self.special)}, "
                f"programs {us(self.turns)}; device memory {us(self.memory)}, L2 cache {us(self.cache)})")


def kernels(plan: Plan) -> tuple[tuple[str, Plan], ...]:
    """Names in `formulas` and plans of the kernels of a plan, in the order in which they run."""
    if plan.direction == "forward":
        return (("forward", plan), *([("combine", plan)] if plan.parts != 1 else []))
    dense = (("dense", plan.dense),) if plan.dense is not None and not plan.stored else ()
    if plan.kernel == "one_tile":
        return (*([("delta", plan)] if dense else []), ("one_tile", plan), *dense)
    if plan.rows is None:
        return ("reset", plan), ("one_pass", plan), ("sum", plan), *dense
    return ("delta", plan), ("rows", plan.rows), ("keys", plan), *dense


def predict(spec: AttentionSpec, problem: Problem, plan: Plan, exact: bool = True) -> tuple[Cost, ...]:
    """Predicted cost of each kernel of a plan, in the order in which they run. exact: tiles are counted, not estimated.

    Tiles that only captured tensors hide count as visible. A call of a fraction of a millisecond: closed forms, no search.
    """
    known, scalar = facts(spec, problem).packed(bool(plan.packed)), "float32" in (problem.dtype, problem.v_dtype)
    return tuple(kernel_cost(own.schedule, kernel, own.tiles, known, own.gpu, scalar, own.queries if own.schedule == "hopper" else own.resident, own.registers,
                             _counted(spec, problem, own, kernel) if exact or kernel == "combine" else None, parts(known, own))
                 for kernel, own in kernels(plan))


def parts(known: Facts, plan: Plan) -> int:
    """Into how many parts a plan splits the keys of a tile of rows, or the rows of a tile of all keys."""
    known = known.packed(bool(plan.packed))
    if plan.kernel == "one_tile":
        return plan.parts or parts_of_rows(known.z // known.share, known.M, plan.options, plan.slots)
    return plan.parts or number(known.visible, known.z, known.M, known.N, known.given, plan.BLOCK_M, plan.BLOCK_N, plan.slots, known.group)


def _counted(spec: AttentionSpec, problem: Problem, plan: Plan, kernel: str) -> tuple[float, float]:
    known = facts(spec, problem)
    if kernel == "combine":
        return parts(known, plan), 0.0
    if 0 in (*problem.extents, problem.M, problem.N):
        return 0.0, 0.0
    if plan.packed:
        return known.packed().tiles(plan.BLOCK_M, plan.BLOCK_N)
    if kernel == "dense" and known.near != known.visible:  # it visits no others
        return known.tiles(plan.BLOCK_M, plan.BLOCK_N, near=True)
    counts = classify(spec, plan.BLOCK_M, plan.BLOCK_N, problem.M, problem.N, (*problem.extents, *problem.sizes))
    return counts.visited, counts.partial + counts.data


def seconds(spec: AttentionSpec, problem: Problem, plan: Plan, exact: bool = True) -> float:
    """Predicted time of all kernels of a plan. Arguments as `predict`."""
    return sum(c.seconds for c in predict(spec, problem, plan, exact))


def moved(spec: AttentionSpec, problem: Problem, plan: Plan) -> int:
    """Bytes that all kernels of a plan read and write with SRAM as the only cache, as the papers count them."""
    return round(sum(work.once + work.again for *_, work in _works(spec, problem, plan)))


def profiled(spec: AttentionSpec, problem: Problem, plan: Plan) -> int:
    """Bytes of device memory that a profiler should count while the kernels of a plan run, each with an empty L2 cache."""
    known = facts(spec, problem).packed(bool(plan.packed))
    return round(sum(device_bytes(own.schedule, kernel, work, known, own.gpu, own.resident, parts(known, own))[1]
                     for kernel, own, work in _works(spec, problem, plan)))


def _works(spec: AttentionSpec, problem: Problem, plan: Plan) -> list[tuple[str, Plan, Work]]:
    """(kernel, its plan, its traffic) of all kernels of a plan, tiles counted."""
    known = facts(spec, problem).packed(bool(plan.packed))
    return [(kernel, own, traffic(kernel, known, own.BLOCK_M, own.BLOCK_N, _counted(spec, problem, own, kernel)[0])) for kernel, own in kernels(plan)]


@functools.lru_cache(maxsize=4096)
def traffic(kernel: str, known: Facts, m: int, n: int, visible: float) -> Work:
    """The formulas' values."""
    sizes = known.z, known.share, known.M * known.group, known.N, *known.heads(n), known.width
    products, exps, once, again, *rest = _compiled(kernel)(*sizes, m, n, visible)
    if products:
        gathered = known.gathered(m, n, visible)
        for width, relative, whole in known.loads:
            read = gathered * (m + n) + (visible - gathered) if relative else visible * m * n
            own = min(read, whole)
            once, again = once + width * own, again + width * (read - own)
    return Work(products, exps, once, max(again, 0), *rest)


def device_bytes(schedule: str, kernel: str, work: Work, known: Facts, gpu: GPU, resident: int, parts: int = 1) -> tuple[float, float, float]:
    """(bytes that a kernel moves between the L2 cache and device memory, those that a counter sees while it runs, programs that read the same
    rows beside each other). work: of `traffic`; parts: of the keys, each read by programs of its own."""
    if not (work.streamed and work.outer):
        return work.once, work.once - work.written * min(1.0, l2.HOLDS * gpu.l2 / max(work.once, 1)), 1.0
    s = streaming(schedule, kernel, work, known, gpu, resident, parts)
    return (*l2.device_bytes(work.once, work.again, work.written, s, gpu.l2), min(s.outer / s.streams, s.programs / s.at_once))


def streaming(schedule: str, kernel: str, work: Work, known: Facts, gpu: GPU, resident: int, parts: int = 1) -> l2.Streaming:
    """Arguments as `device_bytes`."""
    return l2.Streaming(schedule, kernel, work.streamed, parts * known.z / known.share, work.outer * parts, gpu.sms * (resident if schedule == "triton" else 1), known.uneven, known.share,
                        known.long_first(kernel in BY_KEYS, schedule), gpu.sms)


def takes_turns(known: Facts, m: int, n: int, gpu: GPU) -> bool:
    """As `l2.Streaming.takes_turns`."""
    return streaming("hopper", "one_pass", traffic("one_pass", known, m, n, known.tiles(m, n)[0]), known, gpu, 1).takes_turns(gpu.l2)


def features(schedule: str, kernel: str, tiles: tuple[int, int, int, int], known: Facts, gpu: GPU, scalar: bool, resident: int, registers: float,
             counts: tuple[float, float] | None = None, parts: int = 1) -> tuple[Rate, float, float, float]:
    """(seconds that each term of `Rate` takes at the rates of the data sheet, bytes of device memory, bytes with SRAM alone, seconds of waiting for tiles one by one).

    scalar     float32 products, at `GPU.exact_rate`
    resident   programs that a multiprocessor holds at once; of the Hopper forward, which holds one, tiles of query rows
    registers  of a thread, for accumulators, scores and the steps between them
    counts     visible and partial tiles; estimated unless given
    parts      of the keys of a tile of rows, a program for each
    """
    if not known.z * known.M * known.N:
        return Rate(), 0.0, 0.0, 0.0
    size = _of_size(schedule, kernel, tiles[0], tiles[1], known, gpu, scalar, counts, parts)
    moved, _, beside = device_bytes(schedule, kernel, size.work, known, gpu, resident, parts)
    all_bytes = size.work.once + size.work.again
    if not size.terms:
        return Rate(launch=1.0), moved, all_bytes, 0.0
    found = Rate(*_filled(size, schedule, kernel, tiles, known, gpu, scalar, resident, registers))
    if schedule != "triton":  # the other asks ahead
        return found, moved, all_bytes, 0.0
    rows, inner = (tiles[1], tiles[0]) if kernel in BY_KEYS else tiles[:2]
    full, rest = divmod(size.outer, gpu.sms * resident)  # waves of programs, and what the last one has
    # the share of the tiles of which device memory is waited for, by all programs that read them beside each other
    latency, stream = NEAR + (FAR - NEAR) * min(1.0, moved * beside / max(all_bytes, 1)), inner * (known.D + known.E) * known.width / STREAM
    copies = tiles[3] if gpu.is_hopper and not scalar and rows >= 64 else max(1, tiles[3] - 1)  # asynchronous products read one tile while the next is copied
    return found, moved, all_bytes, size.visible / size.outer * ((full + (rest > 0)) * (latency / copies + STEP) + (full * resident + math.ceil(rest / gpu.sms)) * stream)


class Size(NamedTuple):
    """What tiles of one size have to do, whatever their warps, stages and registers and however many programs run at once.

    work     of `traffic`
    terms    of `Rate`, 0 for those that follow from more than the size; () without tiles
    visible  tiles over all batch indices
    outer    programs, of all parts of the keys
    tail     the last wave's idle multiprocessors, a factor of all `terms`
    """

    work: Work
    terms: tuple[float, ...] = ()
    visible: float = 0.0
    outer: float = 0.0
    tail: float = 1.0


@functools.lru_cache(maxsize=4096)
def _of_size(schedule: str, kernel: str, m: int, n: int, known: Facts, gpu: GPU, scalar: bool, counts: tuple[float, float] | None,
             parts: int) -> Size:
    """Arguments as `features`."""
    visible, partial = known.tiles(m, n, kernel == "dense") if counts is None else counts
    work = traffic(kernel, known, m, n, visible)
    if kernel == "one_tile" and parts > 1:  # sums of dK and dV, written and read
        work = work._replace(once=work.once + 2 * LSE * parts * known.z / known.share * known.N * (known.D + known.E))
    products, exps, outer = work.products, work.exps, work.outer * parts
    if not products or not outer:
        return Size(work)
    rows, inner = (n, m) if kernel in BY_KEYS else (m, n)
    tail = max(1.0, gpu.sms / outer) if (schedule, kernel) == ("hopper", "forward") else _tail(outer / gpu.sms)  # its programs take tile after tile
    matrix, element = products / gpu.matrix_rate * tail, exps / gpu.exp_rate * tail
    near = known.gathered(m, n, visible) / max(visible, 1)  # beyond the ends of a table one number serves a tile
    loads = near * sum(schedule == "triton" or not relative for _, relative, _ in known.loads)  # Hopper reads those at j - i while products run
    return Size(work, Rate(
        matrix=0.0 if scalar else matrix, scalar=products / gpu.exact_rate(max(known.D, known.E)) * tail if scalar else 0.0,
        older=matrix if gpu.is_hopper and not scalar and rows < 64 else 0.0, pieces=matrix * known.pieces, slim=matrix if inner < 64 else 0.0,
        shared=matrix if kernel in BY_KEYS and known.share > 1 else 0.0, element=element, broad=element if inner > 64 else 0.0,
        function=element * known.functions, step=element * (known.steps + near * known.places), random=element * known.random, load=element * loads,
        partial=element * partial / max(visible, 1), cold=min(work.once, gpu.l2) / gpu.bandwidth, launch=1.0), visible, outer, tail)


MANY, THIRDS = 3, 0.45
"""Stages from which on none hides more. Where three warpgroups hold 96 keys, of what two of 64 take for being two: they add less to dQ."""
MULTIPLIED, SPLIT, ELEMENT, WIDE, SOLO, PRESSURE, TILE, SHALLOW, IDLE, NARROW, NESTED, TURN, SINGLE, RESTART = map(Rate._fields.index, (
    "matrix", "split", "element", "wide", "solo", "pressure", "tile", "shallow", "idle", "narrow", "nested", "turn", "single", "restart"))
"""Places of the terms that warps, stages, registers and programs decide, and of those that they follow from."""


def _filled(size: Size, schedule: str, kernel: str, tiles: tuple[int, int, int, int], known: Facts, gpu: GPU, scalar: bool, resident: int,
            registers: float, whole: bool = True) -> list[float]:
    """All terms of `Rate`. whole: do programs come in whole waves? Other arguments as `features`."""
    m, n, warps, stages = tiles
    portable, by_keys, programs = schedule == "triton", kernel in BY_KEYS, gpu.sms * (resident if schedule == "triton" else 1)
    rows, inner = (n, m) if by_keys else (m, n)
    found, tail = list(size.terms), _tail(size.outer / programs) if whole else 1.0
    element = found[ELEMENT]
    waves, each = size.outer / programs * tail, size.visible / programs * tail
    found[TILE], found[TURN], found[RESTART] = each, waves, waves * ((known.keys * known.share if by_keys else known.rows) - 1)
    if (portable or by_keys and rows < 128) and warps * 16 > rows >= 64 and gpu.is_hopper:
        found[SPLIT] = found[MULTIPLIED] * (1.0 if rows == 64 else THIRDS)
    if warps * 16 < rows:
        found[WIDE] = element
    if portable and resident == 1 or not (portable or by_keys) and warps < 12:
        found[SOLO] = element
    elif whole and portable and size.outer < programs:
        found[IDLE] = each * (1 - max(size.outer / programs, 1 / resident))
    found[PRESSURE] = element * (max(0.0, registers - (200 if portable else 170 if m <= 128 else 130)) / 55)
    found[SHALLOW] = each * max(0.0, 1 / stages - 1 / (MANY if portable else warps // 4))
    found[NARROW], found[NESTED], found[SINGLE] = each * (inner < 64), each * (by_keys and known.share > 1), waves * (resident == 1 and not (portable or by_keys))
    return found


def _tail(mean: float) -> float:
    """The last wave's idle multiprocessors, as a factor: turns are whole; of many, half a turn is lost."""
    return math.ceil(mean) / mean if mean < 8 else 1.0 + 0.5 / mean


@functools.lru_cache(maxsize=4096)
def kernel_cost(schedule: str, kernel: str, tiles: tuple[int, int, int, int], known: Facts, gpu: GPU, scalar: bool, resident: int, registers: float,
                counts: tuple[float, float] | None = None, parts: int = 1) -> Cost:
    """Predicted cost of one kernel. Arguments as `features`."""
    if kernel in PASSING:
        return passing(kernel, known, gpu)
    found, device, all_bytes, waiting = features(schedule, kernel, tiles, known, gpu, scalar, resident, registers, counts, parts)
    memory, cache = max(device / (gpu.bandwidth * BANDWIDTH), waiting), all_bytes / (gpu.bandwidth * CACHE)
    rate = RATES.get((schedule, kernel))
    if rate is None or not known.z * known.M * known.N:
        return Cost(kernel, 0.0, 0.0, memory, cache, 0.0, LAUNCH)
    return Cost(kernel, _sum(found, rate, MATRIX), _sum(found, rate, SPECIAL), memory, cache, _sum(found, rate, TURNS), rate.launch, kernel == "one_tile")


@functools.lru_cache(maxsize=4096)
def passing(kernel: str, known: Facts, gpu: GPU) -> Cost:
    """Of one of `PASSING`."""
    once = traffic(kernel, known, BLOCK, BLOCK, 0.0).once if known.z * known.M * known.N else 0
    return Cost(kernel, 0.0, 0.0, once / (gpu.bandwidth * BANDWIDTH), once / (gpu.bandwidth * CACHE), 0.0, LAUNCH)


def _sum(found: Sequence[float], rate: Rate, terms: slice) -> float:
    return sum(map(mul, found[terms], rate[terms]))


def least(schedule: str, kernel: str, tiles: tuple[int, int, int, int], known: Facts, gpu: GPU, scalar: bool, resident: int,
          registers: float) -> float:
    """Seconds below which `kernel_cost` does not come for such tiles, of as many stages or fewer, however few programs a multiprocessor holds, `resident`
    at most, and into however many parts keys are split. What takes long to find is left out: bytes that device memory delivers again, and waiting
    for tiles one by one."""
    rate = RATES.get((schedule, kernel))
    if rate is None or not known.z * known.M * known.N:
        return 0.0
    size = _of_size(schedule, kernel, tiles[0], tiles[1], known, gpu, scalar, None, 1)
    if not size.terms:
        return 0.0
    found = _filled(size, schedule, kernel, tiles, known, gpu, scalar, resident, registers)
    found[IDLE] = 0.0  # a multiprocessor that holds fewer programs idles less
    busy = _sum(found, rate, MATRIX) + _sum(found, rate, SPECIAL) + _sum(found, rate, TURNS)
    if (schedule, kernel) == ("triton", "forward") and size.outer < gpu.sms * resident:  # parts may fill all waves; another kernel adds them up
        divided = _filled(size, schedule, kernel, tiles, known, gpu, scalar, resident, registers, whole=False)
        busy = min(busy, (_sum(divided, rate, MATRIX) + _sum(divided, rate, SPECIAL)) / size.tail + _sum(divided, rate, TURNS) + LAUNCH)
    moved = max(size.work.once / BANDWIDTH, (size.work.once + size.work.again) / CACHE) / gpu.bandwidth
    return (max(busy, moved) + rate.launch) * (1 - 1e-9)  # sums are rounded
