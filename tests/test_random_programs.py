"""Twenty random programs in the suite; `python -m tests.random_programs` runs two thousand. hypothesis makes the choices here, and shrinks."""
from __future__ import annotations

import random

from hypothesis import HealthCheck, Phase, given, settings, strategies

from .random_programs import check, write


@settings(max_examples=20, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck),
          phases=(Phase.generate, Phase.shrink))
@given(strategies.integers(0, 2 ** 40))
def test_right(seed):
    check(write(random.Random(seed)))


def test_most_are_fused():
    """And the generator writes what the rewrite should take, and what it should not."""
    programs = [write(random.Random(seed)) for seed in range(50)]  # the first of `python -m tests.random_programs`
    valid = [p for p in programs if p.valid]
    assert 25 <= len(valid) <= 45
    assert sum(check(p).fused for p in valid) >= 0.9 * len(valid)


def test_a_seed_says_the_whole_program():
    a, b = (write(random.Random(11)) for _ in range(2))
    assert a.source == b.source and all(a.inputs[n].equal(b.inputs[n]) for n in a.inputs)
