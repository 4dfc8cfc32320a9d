"""What a plan was chosen from, and what limits the kernel: for reports. Reads what `candidates` ranks; chooses nothing."""
from __future__ import annotations

import math
from dataclasses import dataclass

from ..region import Problem
from ..spec import AttentionSpec
from . import limits
from .candidates import ask, ranked
from .plan import Plan


@dataclass(frozen=True)
class Choice:
    """One candidate. shared in bytes; registers of each thread, predicted; seconds of this kernel at sizes as `candidates.rounded`, None where it does
    not fit; verdict "chosen", "runner-up" or why not."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int
    shared: int
    registers: float
    seconds: float | None
    verdict: str


def choices(spec: AttentionSpec, problem: Problem, plan: Plan) -> tuple[Choice, ...]:
    """The candidates that `plan` was taken from: the chosen tiles, the others that fit by predicted time, then what does not fit."""
    found = ranked(ask(plan.schedule, plan.kernel, spec, problem, plan.gpu, listed=plan.listed, tiled=plan.tiled if plan.schedule == "hopper" else (),
                       packed=bool(plan.packed), descriptors=plan.descriptors))
    best = next((c.seconds for c in found if c.tiles == plan.tiles and not c.unfit), None)
    rows = [Choice(*plan.tiles, plan.shared, plan.registers, best, "chosen")]
    for c in found:
        if c.tiles != plan.tiles:
            kind = "hardly ever the fastest where measured" if c.seldom else "runner-up"
            verdict = c.unfit or (f"{kind}, {c.seconds / best - 1:+.0%} predicted" if best else kind)
            rows.append(Choice(*c.tiles, c.shared, c.registers, None if c.unfit else c.seconds, verdict))
    return tuple(rows)


def compulsory(spec: AttentionSpec, problem: Problem, direction: str) -> int:
    """Bytes that any kernel has to move: each operand and result once, each captured tensor once."""
    extents = dict(zip(spec.axes, problem.extents))
    size = lambda axes: math.prod(extents[a] for a in spec.axes if a in axes)
    width, v_width = limits.WIDTHS[problem.dtype], limits.WIDTHS[problem.v_dtype]
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
