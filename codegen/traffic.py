"""Predicted traffic with device memory, in bytes, for a site as it stands in the graph and as tiled kernels.

Before: FlashAttention (Dao et al. 2022), Algorithm 0 and its backward, Algorithm 3: each M x N matrix that is written and
read again counts. After: Algorithm 1 with the loops of FlashAttention-2, whose count is that paper's Theorem 2: q and out
once, k and v once for each row of visible tiles. Caches are left out on both sides, so both are upper bounds.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..region import Problem
from ..spec import AttentionSpec
from .plan import WIDTHS, Plan
from .tiles import classify

FORWARD_PASSES = 4
"""Algorithm 0: write S, read S, write P, read P."""
BACKWARD_PASSES = 7
"""Algorithm 3: read P for dV, write dP, read dP and P for dS, write dS, read dS for dQ and for dK."""
ELEMENT = {"bool": 1, "int": 8, "float": 4}


@dataclass(frozen=True)
class Traffic:
    """Bytes of one call."""

    before: int
    after: int

    def __str__(self) -> str:
        ratio = f" ({self.before / self.after:.1f}x less)" if self.after and self.before > self.after else ""
        return f"{human(self.before)} -> {human(self.after)}{ratio}"


def human(count: float) -> str:
    """1536 -> "1.5 kB"; powers of 1000, as bandwidths are given."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _dense(spec: AttentionSpec, problem: Problem) -> int:
    """Bytes of the captured tensors that have an element for every query and key."""
    extents = dict(zip(spec.axes, problem.extents))
    total = 0
    for load in spec.loads:
        if {"i", "j"} <= load.variables:
            total += ELEMENT[load.kind] * problem.M * problem.N * math.prod(extents[a] for a in spec.axes if a in load.variables)
    return total


def forward(spec: AttentionSpec, problem: Problem, plan: Plan, called: bool) -> Traffic:
    """called: the site is a scaled_dot_product_attention call, which materialises its mask but not the scores."""
    return _traffic(spec, problem, ((plan, "q"),), FORWARD_PASSES, called, 2)


def backward(spec: AttentionSpec, problem: Problem, plan: Plan, called: bool) -> Traffic:
    if plan.rows is None:  # one pass, and dQ in float32: set to 0, added to at least once, read
        found = _traffic(spec, problem, ((plan, "k"),), BACKWARD_PASSES, called, 5)
        return replace(found, after=found.after + 16 * math.prod(problem.extents) * problem.M * problem.D)
    return _traffic(spec, problem, ((plan, "k"), (plan.rows, "q")), BACKWARD_PASSES, called, 5)


def _traffic(spec: AttentionSpec, problem: Problem, kernels, passes: int, called: bool, operands: int) -> Traffic:
    z = math.prod(problem.extents)
    width, v_width = WIDTHS[problem.dtype], WIDTHS[problem.v_dtype]
    sizes = (*problem.extents, *problem.sizes)
    once = z * (problem.M + problem.N) * (problem.D * width + problem.Dv * v_width) * operands // 2
    scores = z * problem.M * problem.N
    mask = 0
    if spec.is_masked:  # written once and read here; one for each batch index on which it depends
        extents = dict(zip(spec.axes, problem.extents))
        own = math.prod(extents[a] for a in spec.axes if a in spec.visible.variables)
        mask = 2 * own * problem.M * problem.N * (1 if called else width)
    before = once + mask + _dense(spec, problem) + (0 if called else passes * scores * width)
    after = once
    for plan, outer in kernels:
        tiles = classify(spec, plan.BLOCK_M, plan.BLOCK_N, problem.M, problem.N, sizes)
        visited = tiles.full + tiles.partial
        inner = plan.BLOCK_N if outer == "q" else plan.BLOCK_M
        after += visited * inner * (problem.D * width + problem.Dv * v_width)
        after += sum(visited * plan.BLOCK_M * plan.BLOCK_N * ELEMENT[x.kind] for x in spec.loads if {"i", "j"} <= x.variables)
    return Traffic(before, after)
