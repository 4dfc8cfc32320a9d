"""What a plan was chosen from, and what limits the kernel: for reports. Reads what `plan` and `hopper` offer; chooses nothing."""
from __future__ import annotations

import math
from dataclasses import dataclass

from ..region import Problem
from ..spec import AttentionSpec
from . import plan as planning
from .plan import Plan
from .schedules import hopper


@dataclass(frozen=True)
class Choice:
    """One step of the ladder. shared in bytes; registers of each thread, for accumulators and score tiles; verdict "chosen", "runner-up" or why not."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int
    shared: int
    registers: float
    verdict: str


def choices(spec: AttentionSpec, problem: Problem, plan: Plan) -> tuple[Choice, ...]:
    """The ladder that `plan` was taken from, best first: what did not fit, the chosen tiles, and the steps below them."""
    gpu, found, chosen = plan.gpu, [], False
    own = (plan.BLOCK_M, plan.BLOCK_N, plan.num_warps, plan.num_stages)
    for m, n, warps, stages in dict.fromkeys([*_ladder(spec, problem, plan), own]):
        if plan.schedule == "hopper":
            shared = hopper.shared_bytes(plan.kernel, spec, problem, m, n, stages, plan.tiled)
            registers, limit = hopper.registers_per_thread(plan.kernel, problem, m, n, hopper.is_heavy(spec)), hopper.register_limit(plan.kernel, m)
        else:
            shared = planning.shared_bytes(plan.kernel, (m, n, warps, stages), problem, spec, gpu)
            registers, limit = planning.registers_per_thread(plan.kernel, (m, n, warps, stages), problem), planning.REGISTER_LIMIT
        if (m, n, warps, stages) == own:
            verdict, chosen = "chosen", True
        elif shared > gpu.shared_per_block:
            verdict = f"{shared / 1024:.0f} KiB of shared memory, a block has {gpu.shared_per_block / 1024:.0f}"
        elif registers > limit:
            verdict = f"about {registers:.0f} registers, {limit} are left for tiles"
        else:
            verdict = "runner-up" if chosen else "fits, not preferred"
        found.append(Choice(m, n, warps, stages, shared, registers, verdict))
    return tuple(found)


def _ladder(spec: AttentionSpec, problem: Problem, plan: Plan) -> list[tuple[int, int, int, int]]:
    if plan.schedule == "hopper":
        return hopper.ladder(plan.kernel, spec, problem, plan.listed)
    return planning._ladder(plan.kernel, spec, problem, plan.gpu)


def compulsory(spec: AttentionSpec, problem: Problem, direction: str) -> int:
    """Bytes that any kernel has to move: each operand and result once, each captured tensor once."""
    extents = dict(zip(spec.axes, problem.extents))
    size = lambda axes: math.prod(extents[a] for a in spec.axes if a in axes)
    width, v_width = planning.WIDTHS[problem.dtype], planning.WIDTHS[problem.v_dtype]
    q, k = size(spec.q) * problem.M * problem.D * width, size(spec.k) * problem.N * problem.D * width
    v, out = size(spec.v) * problem.N * problem.Dv * v_width, size(spec.axes) * problem.M * problem.Dv * v_width
    lse = size(spec.axes) * problem.M * 4
    captured = 0
    for load in spec.loads:
        over = {**extents, "i": problem.M, "j": problem.N}
        captured += {"bool": 1, "int": 8, "float": width}[load.kind] * math.prod(over[a] for a in load.variables if a in over)
    if direction == "forward":
        return q + k + v + out + lse + captured
    return 2 * (q + k + v + out) + lse + captured
