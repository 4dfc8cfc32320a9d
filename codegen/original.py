"""Is a site predicted faster as the graph has it? Then it is left alone.

The original is taken to be slower than it is likely to be, and nothing is declined that the model cannot tell: only fixed sizes, on GPUs that the cost
model was calibrated on, where matrices of all queries and keys are small, as memory is the other reason for a rewrite. What remains is float32, whose
products run on the ordinary units: there the generated backward is several times slower than the library's products.
"""
from __future__ import annotations

import math

from ..compat import tf32_allowed
from ..region import Problem
from ..spec import AttentionSpec
from . import cost, traffic
from .gpu import EXACT, GPU, units
from .limits import WIDTHS
from .plan import make_plan
from .rates import BANDWIDTH, LAUNCH

PRODUCTS = 0.6
"""Of the units' peak, what the library's products sustain at least."""
LAUNCHES = {"forward": 3, "backward": 5}
CLEARLY, SECONDS, BYTES = 1.2, 1e-3, 2 ** 28
"""How much slower a rewritten site must be, as a factor and in seconds, and the most bytes of a matrix of all queries and keys of a site that is left alone."""


def seconds(spec: AttentionSpec, problem: Problem, gpu: GPU, direction: str) -> float:
    """Of a direction with each matrix of all queries and keys in device memory (`traffic`), at rates that it should exceed."""
    moved = traffic.predict(spec, problem, make_plan(spec, problem, gpu, direction), False).before
    products = (2 if direction == "forward" else 4) * math.prod(problem.extents) * problem.M * problem.N * (problem.D + problem.Dv)
    rate = gpu.sms * gpu.clock * 256 if units(problem, gpu) in EXACT else gpu.matrix_rate
    return moved / (gpu.bandwidth * BANDWIDTH) + products / (PRODUCTS * rate) + LAUNCHES[direction] * LAUNCH


def faster(spec: AttentionSpec, problem: Problem, gpu: GPU, training: bool) -> str | None:
    """Why a site with these fixed sizes is better left alone, or None: also where the model is not sure. Both directions count in training."""
    unsure = spec.dropout or spec.visible.loads or 0 in (*problem.extents, problem.M, problem.N) or units(problem, gpu) in EXACT and tf32_allowed()
    if not gpu.measured or unsure or math.prod(problem.extents) * problem.M * problem.N * WIDTHS[problem.dtype] > BYTES:
        return None
    directions = ("forward", "backward")[: 1 + training]
    ours = sum(cost.seconds(spec, problem, make_plan(spec, problem, gpu, d), exact=False) for d in directions)
    theirs = sum(seconds(spec, problem, gpu, d) for d in directions)
    if ours < max(CLEARLY * theirs, theirs + SECONDS):
        return None
    return (f"predicted slower than it is: {traffic.duration(ours)} instead of {traffic.duration(theirs)} {'forward and backward' if training else 'forward'} "
            f"on {gpu.name}, in {problem.dtype}")
