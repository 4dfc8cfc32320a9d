"""Which programs start together: the grid covers each tile of each batch index once."""
from __future__ import annotations

import pytest

from flashfx.codegen.order import BALANCED, long_first


@pytest.mark.parametrize("batches, tiles, kib", [(64, 32, 4096), (16, 128, 16384), (256, 8, 1024), (8, 32, 32768), (7, 4, 100), (1, 1, 1), (0, 3, 1)])
def test_the_grid_covers_all(batches, tiles, kib):
    together, along, groups = long_first(batches, tiles, kib)
    assert together * groups == batches and along == tiles and groups <= 65535


def test_groups_balance_and_stay_few():
    together, _, _ = long_first(16, 128, 16384)  # one would fit the cache
    assert together * 128 >= BALANCED
    assert long_first(100003, 1, 10) == (100003, 1, 1)  # a prime number
    assert long_first(10 ** 6, 1, 10 ** 9)[2] <= 65535
