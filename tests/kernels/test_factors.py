"""A score as kernels compute it: constant factors apart, positions as vectors, and how large it can be."""
from __future__ import annotations

import math

import pytest

from flashfx.codegen.factors import gathered, peel, span
from flashfx.codegen.gpu import BY_NAME
from flashfx.codegen.plan import make_plan, overridden
from flashfx.codegen.render import render
from flashfx.expr import parse

from .cases import MORE, Variant, problem, spec

INF = math.inf


def test_peel():
    show = lambda text: tuple(map(str, peel(parse(text, {"u": "float"}))))
    assert show("qk * 0.125") == ("qk", "0.125") and show("qk / 8.0") == ("qk", "0.125") and show("2.0 * (qk * 0.5)") == ("qk", "1.0")
    assert show("qk * -1.0") == ("qk * (-1.0)", "1.0") and show("qk * u[0]") == ("qk * u[0]", "1.0")


def test_gathered():
    show = lambda text: str(gathered(parse(text, {"u": "float"})))
    assert show("tanh(qk * 0.125 / 50.0) * 50.0") == "tanh(qk * 0.0025) * 50.0" and show("qk / 8.0") == "qk * 0.125"
    assert show("(qk + u[0]) / 4.0 * 2.0") == "(qk + u[0]) * 0.5" and show("2.0 / qk") == "2.0 / qk" and show("qk / u[0]") == "qk / u[0]"


@pytest.mark.parametrize("text, low, high", [
    ("tanh(qk * 0.004) * 30.0", -30, 30), ("minimum(maximum(qk, -50.0), 40.0)", -50, 40), ("-(sigmoid(qk) * 8.0)", -8, 0), ("qk * 0.125", -INF, INF),
    ("tanh(qk) * 20.0 + sin(qk) / 4.0", -20.25, 20.25), ("tanh(qk) * tanh(u[0])", -1, 1), ("tanh(qk) * u[0]", -INF, INF), ("abs(tanh(qk) - 0.5)", 0, 1.5),
    ("where(j <= i, tanh(qk), -9.0)", -9, 1), ("exp(tanh(qk))", -INF, INF), ("maximum(qk, 0.0)", 0, INF), ("2.0 / tanh(qk)", -INF, INF),
    ("tanh(qk) + to_float(j - i)", -INF, INF), ("qk * 0.0", -INF, INF)])
def test_span(text, low, high):
    assert span(parse(text, {"u": "float"})) == (low, high)


CAP = "tanh(qk * 0.125 / {0}) * {0}"


@pytest.mark.parametrize("score, head, dtype, drop, bounded", [
    (CAP.format(50.0), 64, "bfloat16", 0.0, True), (CAP.format(60.0), 64, "bfloat16", 0.0, False), (CAP.format(50.0), 256, "bfloat16", 0.0, True),
    (CAP.format(30.0), 64, "float16", 0.0, False), (CAP.format(5.0), 64, "float16", 0.0, True), (CAP.format(30.0), 64, "bfloat16", 0.1, True),
    (CAP.format(30.0), 256, "bfloat16", 0.1, False), ("qk * 0.125", 64, "bfloat16", 0.0, False)])
def test_a_bounded_score_needs_no_maximum(score, head, dtype, drop, bounded):
    """Weights up to 2 ** 80 in bfloat16, 2 ** 10 in float16; under dropout wide heads count on weights of at most 1."""
    s, p = spec(Variant(score=score, where="j <= i", drop=drop)), problem("self", head, dtype, M=2048, batch=4, heads=8)
    with overridden(schedule="hopper"):
        text = render(s, make_plan(s, p, BY_NAME["H200"], "forward"), p, (False,) * 3).text
    assert ("scores are bounded" in text) is bounded and ("anchor" in text) is not bounded
