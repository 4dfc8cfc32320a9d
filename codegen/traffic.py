"""Predicted traffic with device memory, in bytes, for a site as it stands in the graph and as tiled kernels.

Before: FlashAttention (Dao et al. 2022), Algorithm 0 and its backward, Algorithm 3: each M x N matrix that is written and
read again counts. After: the generated kernels with SRAM as the only cache (`cost.moved`). Caches are left out on both sides, so both are upper
bounds.
"""
from __future__ import annotations

import math
from dataclasses import dataclass

from ..region import Problem
from ..spec import AttentionSpec
from .cost import moved
from .facts import ELEMENT
from .limits import WIDTHS
from .plan import Plan

FORWARD_PASSES = 4
"""Algorithm 0: write S, read S, write P, read P."""
BACKWARD_PASSES = 7
"""Algorithm 3: read P for dV, write dP, read dP and P for dS, write dS, read dS for dQ and for dK."""


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


def duration(seconds: float) -> str:
    """0.00123 -> "1.23 ms"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def predict(spec: AttentionSpec, problem: Problem, plan: Plan, called: bool, columns: int = 0) -> Traffic:
    """Of the plan's direction. called: the site is a scaled_dot_product_attention call: its kernel is tiled too and counts as ours does, but its mask is a
    tensor, written and read. columns: how many of q's and k's the model adds to the scores as a tensor, written and read."""
    z, forward, after = math.prod(problem.extents), plan.direction == "forward", moved(spec, problem, plan)
    width, extents = WIDTHS[problem.dtype], dict(zip(spec.axes, problem.extents))
    own = lambda e: problem.M * problem.N * math.prod(extents[a] for a in spec.axes if a in e.variables)
    mask = 2 * own(spec.visible) if spec.is_masked else 0  # one for each batch index on which it depends
    terms = 2 * z * problem.M * problem.N * width if columns else 0
    if called:
        return Traffic(after + mask + terms, after)
    operands = z * (problem.M + problem.N) * (problem.D - columns + problem.Dv) * width  # q, k, v, out
    before = terms + (operands if forward else operands * 5 // 2) + mask * width  # they and dO; dq, dk, dv
    before += sum(own(load) * (width if load.kind == "float" else ELEMENT[load.kind]) for load in spec.loads if {"i", "j"} <= load.variables)
    return Traffic(before + (FORWARD_PASSES if forward else BACKWARD_PASSES) * z * problem.M * problem.N * width, after)
