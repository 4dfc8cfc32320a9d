"""In which order warpgroups of the Hopper forward visit keys, and which tiles they go past, in `gluon_simulator`. `test_simulator.py` runs this file too."""
from __future__ import annotations

import re

import pytest

from flashfx.codegen.plan import make_plan, overridden
from flashfx.codegen.render import render

from ..thinning import thinned
from .cases import Variant, problem, spec
from .run import run
from .simulated import CARD, check, simulated  # noqa: F401  a fixture


@pytest.mark.parametrize("variant, kind, head, keys", thinned([("softcap", "self", 64, 128), ("causal", "gqa", 40, 128), ("causal", "cross", 64, 64),
                                                       ("window", "self", 64, 64), ("band", "self", 64, 32), ("full", "self", 32, 64),
                                                       ("window", "cross", 40, 64)], 3))
def test_three_warpgroups(variant, kind, head, keys):
    """Of which each goes past the tiles of keys that only the others see."""
    with overridden(forward=(192, keys, 12, 2), schedule="hopper"):
        check(variant, kind, "bfloat16", head, 300)


@pytest.mark.parametrize("prefix, head, tiles, drop", thinned([(192, 192, (128, 64, 8, 2), "0.1"), (128, 64, (192, 128, 12, 2), ""), (64, 128, (128, 64, 8, 2), ""), (0, 128, (128, 128, 8, 2), "0.1"),
                                                            (100, 192, (128, 64, 8, 2), "0.1"), (384, 64, (192, 64, 12, 2), ""), (0, 64, (128, 128, 8, 2), "0.1"), (100, 80, (128, 64, 8, 2), ""),
                                                            (64, 64, (128, 64, 8, 2), "0.1"), (0, 48, (128, 128, 8, 2), "")], 3))
def test_keys_that_go_round(prefix, head, tiles, drop):
    """What is cut first, then from the first key on; of some warpgroups' rows a prefix may end where a tile does, and nothing is cut."""
    where = "(j <= i) | (j < " + str(prefix) + ")" if prefix else "j <= i"
    s, p = spec(Variant(score="qk * 0.125" if drop else "tanh(qk * 0.125 / 3.0) * 3.0", where=where, drop=drop)), problem("self", head, "bfloat16", M=500, batch=1, heads=1)
    with overridden(forward=tiles, schedule="hopper"):
        plan = make_plan(s, p, CARD, "forward")
        assert re.search(r"where\(t (< cut|== 0), ", render(s, plan, p, (False,) * 3).text)
        run(s, p, gradients=False).within_budget()


@pytest.mark.parametrize("score, head, N", [("qk * 0.125", 64, 300), ("qk * 0.125", 48, 256), ("tanh(qk * 0.125 / 3.0) * 3.0", 80, 300)])
def test_bits_drawn_first(score, head, N):
    """Dropout's bits ahead of the softmax, where nothing is asked of a mask in the loop: the tile that reaches beyond the last key comes before it."""
    s, p = spec(Variant(score=score, drop="0.1")), problem("self", head, "bfloat16", M=130, N=N, batch=1, heads=1)
    with overridden(forward=(128, 128, 8, 2), schedule="hopper"):
        text = render(s, make_plan(s, p, CARD, "forward"), p, (False,) * 3).text
        loop = text[text.index("for t in range(1, "):]
        assert loop.index("bits = random_bits(") < loop.index("p = " if "tanh" in score else "= weighed(")
        run(s, p, gradients=False).within_budget()
