"""Random specs through the tiled schedule; `python -m tests.gpu.stress` runs more of them through both kernel schedules on a GPU."""
from __future__ import annotations

import pytest

from ..thinning import thinned
from .random_spec import draw
from .run import run


@pytest.mark.parametrize("seed", thinned(range(40), 4))
def test_random_specs(seed):
    run(*draw(seed)).within_budget()


def test_the_seed_is_the_spec_and_specs_differ():
    assert draw(7) == draw(7) and len({draw(seed) for seed in range(100)}) > 95
