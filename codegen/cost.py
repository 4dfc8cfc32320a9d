"""What a plan costs: the work and the traffic of each kernel as formulas, and from a GPU's row the time that each resource takes.

The formulas are sympy expressions over the symbols below, counted from the tiling itself: a program holds one tile of the outer operand
and walks the visible tiles of the inner one. FlashAttention's Theorem 2 (forward), Theorem 5 (backward) and Proposition 4 (block-sparse)
are their limits for tiles that fill the SRAM (`limit`, tests/test_cost.py).

Time is a model, calibrated on measured kernels (`RATES`): matrix units and special functions do not overlap in the long run, whatever the
schedule tries, so that their times add up; memory runs beside them.
"""
from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from ..expr import Call, walk
from ..region import Problem
from ..spec import AttentionSpec
from .captured import is_relative
from .gpu import GPU
from .factors import peel
from .parts import chunks
from .plan import WIDTHS, Plan, registers_per_thread
from .tiles import classify

SYMBOLS = "Z G M N D E W BLOCK_M BLOCK_N T"
"""Batch indices, how many of them share keys (grouped queries), queries, keys, head sizes of q and k (D) and of v (E), bytes of an element, tile sizes, visible tiles over all batch indices."""
ELEMENT = {"bool": 1, "int": 8}
LSE = 4
"""Bytes of a log-sum-exp, a delta, an element of dQ's float32 sum."""


@dataclass(frozen=True)
class Work:
    """One kernel's formulas.

    products  float operations of the matrix products, 2 a multiply-add, hidden elements of partial tiles included
    exps      exponentials
    once      bytes that each kernel must move if every tile stayed in a cache: operands and results, once
    again     bytes that tiles of the inner operand are read (or added to) beyond the first time
    outer     programs, or turns of a persistent one
    """

    products: object
    exps: object
    once: object
    again: object
    outer: object


@functools.cache
def formulas() -> dict[str, Work]:
    """Kernel -> its formulas. "one_pass" is the Hopper backward, "keys" and "rows" are the two of the portable one."""
    import sympy
    Z, G, M, N, D, E, W, m, n, T = sympy.symbols(SYMBOLS, positive=True, integer=True)
    rows, keys, tile = Z * sympy.ceiling(M / m), Z / G * sympy.ceiling(N / n), m * n * T
    q, k = Z * M * W, Z / G * N * W
    vectors = 2 * LSE * Z * M
    return {
        # Q K^T and P V; k and v are read again by every row of tiles but the first
        "forward": Work(2 * tile * (D + E), tile, (q + k) * (D + E) + LSE * Z * M, W * (D + E) * (T * n - Z / G * N), rows),
        # Q K^T, dO V^T, P^T dO, dS^T Q; q, dO, lse and delta again by every column of tiles but the first
        "keys": Work(2 * tile * 2 * (D + E), tile, q * (D + E) + 2 * k * (D + E) + vectors, (W * (D + E) + 2 * LSE) * (T * m - Z * M), keys),
        # Q K^T, dO V^T, dS K
        "rows": Work(2 * tile * (2 * D + E), tile, q * (2 * D + E) + k * (D + E) + vectors, W * (D + E) * (T * n - Z / G * N), rows),
        # those of "keys" and dS K; dQ is added to in float32, once for every visible tile
        "one_pass": Work(2 * tile * (3 * D + 2 * E), tile, q * (D + E) + 2 * k * (D + E) + vectors + LSE * Z * M * D,
                         (W * (D + E) + 2 * LSE + LSE * D) * (T * m - Z * M), keys),
        # Q K^T, dO V^T: the gradient of a bias, a tile to a program
        "dense": Work(2 * tile * (D + E), tile, q * (D + E) + k * (D + E) + vectors, W * (D + E) * (T * (m + n) - Z * M - Z / G * N), rows * sympy.ceiling(N / n)),
        # delta = rowsum(dO * O), and dQ from its float32 sum: no products
        "delta": Work(sympy.Integer(0), sympy.Integer(0), 2 * Z * M * E * W + 3 * LSE * Z * M, sympy.Integer(0), rows),
        "sum": Work(sympy.Integer(0), sympy.Integer(0), Z * M * D * (2 * LSE + W), sympy.Integer(0), rows),
    }


@functools.cache
def _compiled(kernel: str):
    import sympy
    found = formulas()[kernel]
    return sympy.lambdify(sympy.symbols(SYMBOLS, positive=True, integer=True),
                          [found.products, found.exps, found.once, found.again, found.outer], "math")


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
class Rate:
    """Shares of the peak that a kind of kernel sustains, and what each turn costs beside its tiles. Measured, see `RATES`.

    matrix, special   of the matrix units and of the special functions
    turn              seconds from a program's last tile to the next one's first
    """

    matrix: float
    special: float
    turn: float


RATES = {
    # (schedule, kernel) -> Rate. H200, bf16, 16k tokens, hidden size 2048, N 512 to 16k, d 64 and 128, causal and full: least squares over
    # tests/data/h200_attention.json (the portable schedule's: four rows). A share above 1 says how much runs beside the matrix units.
    ("hopper", "forward"): Rate(0.90, 1.27, 1.9e-6),
    ("hopper", "one_pass"): Rate(0.69, 0.60, 3.9e-6),
    ("triton", "forward"): Rate(0.81, 0.96, 2.9e-6),
    ("triton", "keys"): Rate(0.60, 4.0, 1.7e-6),
    ("triton", "rows"): Rate(0.60, 4.0, 1.7e-6),
    ("triton", "dense"): Rate(0.40, 0.60, 1.7e-6),
}
BANDWIDTH, CACHE = 0.85, 2.5
"""Of the device memory's bandwidth: sustained, and what the L2 cache delivers beside it."""
LAUNCH = 3e-6
"""Seconds from one kernel's end to the next one's work."""


@dataclass(frozen=True)
class Cost:
    """Predicted time of one kernel, in seconds, by resource.

    matrix, special, memory, cache   at the rates that such kernels sustain
    turns                            prologues and epilogues of the programs that follow each other on a multiprocessor
    tail                             the last wave's idle multiprocessors, as a factor of at least 1
    """

    kernel: str
    matrix: float
    special: float
    memory: float
    cache: float
    turns: float
    tail: float

    @property
    def seconds(self) -> float:
        return max((self.matrix + self.special + self.turns) * self.tail, self.memory, self.cache) + LAUNCH

    @property
    def binds(self) -> str:
        """What binds: the largest share of the larger side."""
        if max(self.memory, self.cache) > (self.matrix + self.special + self.turns) * self.tail:
            return "device memory" if self.memory >= self.cache else "L2 cache"
        return max((self.matrix, "matrix units"), (self.special, "special functions"), (self.turns, "starting and ending programs"))[1]

    def __str__(self) -> str:
        us = lambda s: f"{s * 1e6:.0f}"
        tail = f", times {self.tail:.2f} for the last wave" if self.tail > 1.02 else ""
        return (f"{self.kernel} {self.seconds * 1e6:.0f} us, bound by {self.binds} (matrix units {us(self.matrix)}, special functions {us(self.special)}, "
                f"programs {us(self.turns)}{tail}; device memory {us(self.memory)}, L2 cache {us(self.cache)})")


def kernels(plan: Plan) -> tuple[tuple[str, Plan], ...]:
    """Names in `formulas` and plans of the kernels of a plan, in the order in which they run."""
    if plan.direction == "forward":
        return (("forward", plan),)
    dense = (("dense", plan.dense),) if plan.dense is not None and not plan.stored else ()
    if plan.rows is None:
        return ("delta", plan), ("one_pass", plan), ("sum", plan), *dense
    return ("delta", plan), ("rows", plan.rows), ("keys", plan), *dense


def predict(spec: AttentionSpec, problem: Problem, plan: Plan) -> tuple[Cost, ...]:
    """Predicted cost of each kernel of a plan, in the order in which they run.

    Tiles that only captured tensors hide count as visible. A call of a fraction of a millisecond: closed forms, no search.
    """
    return tuple(_cost(kernel, spec, problem, own) for kernel, own in kernels(plan))


def seconds(spec: AttentionSpec, problem: Problem, plan: Plan) -> float:
    """Predicted time of all kernels of a plan."""
    return sum(c.seconds for c in predict(spec, problem, plan))


def resources(costs: tuple[Cost, ...]) -> dict[str, float]:
    """Predicted seconds of some kernels by resource, as `Cost.binds` names them."""
    named = {"matrix units": "matrix", "special functions": "special", "starting and ending programs": "turns", "device memory": "memory", "L2 cache": "cache"}
    return {name: sum(getattr(c, field) for c in costs) for name, field in named.items()}


def moved(spec: AttentionSpec, problem: Problem, plan: Plan) -> int:
    """Bytes that all kernels of a plan read and write with SRAM as the only cache, as the papers count them."""
    return round(sum(sum(_evaluated(kernel, spec, problem, own)[2:4]) for kernel, own in kernels(plan)))


def _evaluated(kernel: str, spec: AttentionSpec, problem: Problem, plan: Plan) -> tuple[float, ...]:
    """The formulas' values: products, exps, bytes once, bytes again, programs. Pieces of a head count in full."""
    counts = classify(spec, plan.BLOCK_M, plan.BLOCK_N, problem.M, problem.N, (*problem.extents, *problem.sizes))
    visible = counts.visited
    head, v_head = (sum(c.width for c in chunks(d)) for d in (problem.D, problem.Dv))
    z = math.prod(problem.extents)
    own = math.prod(e for axis, e in zip(spec.axes, problem.extents) if axis in spec.k | spec.v)
    products, exps, once, again, outer = _compiled(kernel)(z, max(z // max(own, 1), 1), problem.M, problem.N, head, v_head, WIDTHS[problem.dtype],
                                                           plan.BLOCK_M, plan.BLOCK_N, visible)
    if products:
        extents = dict(zip(spec.axes, problem.extents))
        for load in spec.loads:
            if {"i", "j"} <= load.variables:  # a bias or a mask with an element for every query and key (or each j - i), of the axes that it has
                width = WIDTHS[problem.dtype] if load.kind == "float" else ELEMENT[load.kind]
                tile, whole = (plan.BLOCK_M + plan.BLOCK_N, problem.M + problem.N) if is_relative(load) else (plan.BLOCK_M * plan.BLOCK_N, problem.M * problem.N)
                own = min(visible * tile, whole * math.prod(extents[a] for a in spec.axes if a in load.variables))
                once, again = once + width * own, again + width * (visible * tile - own)
    return products, exps, once, max(again, 0), outer


def _cost(kernel: str, spec: AttentionSpec, problem: Problem, plan: Plan) -> Cost:
    gpu = plan.gpu
    products, exps, once, again, outer = _evaluated(kernel, spec, problem, plan)
    memory, cache = once / (gpu.bandwidth * BANDWIDTH), (once + again) / (gpu.bandwidth * CACHE)
    if not products or not outer:
        return Cost(kernel, 0.0, 0.0, memory, cache, 0.0, 1.0)
    rate, mean = RATES[plan.schedule, kernel], outer / (gpu.sms * _resident(kernel, problem, plan))
    matrix = products / (_matrix_rate(problem, gpu) * rate.matrix)
    special = exps * (1 + _functions(spec)) / (gpu.exp_rate * rate.special)
    return Cost(kernel, matrix, special, memory, cache, mean * rate.turn, math.ceil(mean) / mean if mean < 4 else 1.0 + 0.5 / mean)


def _matrix_rate(problem: Problem, gpu: GPU) -> float:
    """float32 products run on the ordinary units: 128 multiply-adds a clock and multiprocessor."""
    return gpu.sms * gpu.clock * 256 if "float32" in (problem.dtype, problem.v_dtype) else gpu.matrix_rate


def _functions(spec: AttentionSpec) -> float:
    """Special functions of a score's own for each element, in exponentials; a division takes two, dropout's Philox about one."""
    weights = {"mufu": 1.0, "div": 2.0}
    calls = [x for x in walk(peel(spec.score)[0]) if isinstance(x, Call) and "j" in x.variables]
    return sum(weights.get(x.row.cost, 0.05) for x in calls) + (1.0 if spec.dropout else 0.0)


def _resident(kernel: str, problem: Problem, plan: Plan) -> int:
    """Programs of a kernel that a multiprocessor holds at once, by shared memory and registers."""
    if plan.schedule == "hopper":
        return 1
    threads = 32 * plan.num_warps
    registers = min(255.0, registers_per_thread(kernel, (plan.BLOCK_M, plan.BLOCK_N, plan.num_warps, plan.num_stages), problem) + 40)
    return max(1, min(plan.gpu.shared_per_sm // max(plan.shared, 1024), int(plan.gpu.registers // (registers * threads)), 2048 // threads))
