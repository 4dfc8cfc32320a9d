"""Which programs start together: the grid covers each tile of each batch index once."""
from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from flashfx.codegen import render
from flashfx.codegen.gpu import BY_NAME
from flashfx.codegen.order import BALANCED, EVEN, KEYS_KIB, grouped, long_first, row_groups
from flashfx.codegen.plan import make_plan, overridden

from .cases import CORE, problem, spec


@pytest.mark.parametrize("batches, tiles, kib", [(64, 32, 4096), (16, 128, 16384), (256, 8, 1024), (8, 32, 32768), (7, 4, 100), (1, 1, 1), (0, 3, 1)])
def test_the_grid_covers_all(batches, tiles, kib):
    together, along, groups = long_first(batches, tiles, kib)
    assert together * groups == batches and along == tiles and groups <= 65535


def test_groups_balance_and_stay_few():
    together, _, _ = long_first(16, 128, 16384)  # one would fit the cache
    assert together * 128 >= BALANCED
    assert long_first(100003, 1, 10) == (100003, 1, 1)  # a prime number
    assert long_first(10 ** 6, 1, 10 ** 9)[2] <= 65535


@pytest.mark.parametrize("batches, tiles, kib", [(64, 32, 2048), (16, 128, 8192), (8, 128, 16384), (256, 8, 512), (512, 6, 64), (40, 32, 3072), (1, 1, 1), (0, 3, 1)])
def test_groups_of_rows_balance_and_share_keys(batches, tiles, kib):
    """Those that the cache holds may be more; else four programs read the same keys, or a group has four tiles for each of them."""
    groups = row_groups(batches, tiles, kib, 132)
    each = -(-batches // groups)
    assert row_groups(batches, tiles, kib, 0) == max(1, min(batches, -(-batches * kib // KEYS_KIB))) >= groups >= 1
    assert groups == 1 or each * kib > KEYS_KIB / 2 and (each * tiles > 132 * EVEN / 2 or each <= 33)
    assert each <= max(33, KEYS_KIB // kib)
    if kib * each > KEYS_KIB:
        assert each <= min(33, -(-EVEN * 132 // tiles))


def test_the_kernel_counts_groups_alike():
    """It works them out itself, since documents say on the card how many tiles there are."""
    s, p = spec(CORE["causal"]), problem("self", 128, "bfloat16", M=4096)
    with overridden(schedule="hopper"):
        text = render.render(s, make_plan(s, p, BY_NAME["H200"], "forward"), p, (False,) * 3).text
    formula = re.sub(r"\s+", " ", re.search(r"groups = (.*?)\n    group = ", text, re.S)[1])
    gl = SimpleNamespace(minimum=min, cdiv=lambda a, b: -(-a // b))
    for batches, tiles in ((64, 32), (16, 128), (7, 4), (512, 4), (1, 1), (40, 16)):
        found = eval(formula, {"gl": gl, "all": batches, "tiles": tiles, "N": 128 * tiles})
        assert found == row_groups(batches, tiles, 128 * tiles * 512 / 1024, 132)


@pytest.mark.parametrize("batches, tiles, kib, together", [(64, 32, 1024, 16), (40, 64, 1024, 10), (16, 32, 1024, 16), (7, 4, 100, 7), (10 ** 6, 1, 1, 12500), (1, 5, 1, 1), (0, 3, 1, 0)])
def test_groups_of_a_grid_are_as_large(batches, tiles, kib, together):
    found, along, groups = grouped(batches, tiles, kib, 132)
    assert (found, found * groups) == (together, batches) and along == tiles and groups <= 65535
