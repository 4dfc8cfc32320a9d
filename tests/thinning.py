"""What of many parameters the default run takes: on two slow cores all of them take hours, and it shall take minutes. `make test-slow` takes all."""
from __future__ import annotations

from typing import Iterable

import pytest


def thinned(points: Iterable, every: int = 8) -> list:
    """Every `every`-th, the first among them; the others are marked slow. Tuples are the values of several arguments. Of a product, a number
    without a common divisor with the lengths of its factors takes each value of each."""
    single = lambda point: point if isinstance(point, tuple) else (point,)
    return [pytest.param(*single(point), marks=[pytest.mark.slow] * (n % every > 0)) for n, point in enumerate(points)]
