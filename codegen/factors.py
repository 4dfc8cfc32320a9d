"""A score as kernels compute it: constant factors that the exponent or a finished gradient takes once instead of every element, positions as vectors."""
from __future__ import annotations

import functools
import math

from ..expr import FLOAT, Call, Const, Expr, Var
from .ranges import linear, unlinear


def peel(score: Expr) -> tuple[Expr, float]:
    """score = X * c with a constant c > 0 -> (X, c): the constant moves into the exponent's, and from there into an FMA.

    before -> after: qk * 0.125 -> (qk, 0.125); qk / 8.0 -> (qk, 0.125)
    """
    factor = 1.0
    while isinstance(score, Call) and score.op in ("mul", "truediv"):
        a, b = score.args
        if isinstance(b, Const) and b.kind == FLOAT and a.kind == FLOAT and 0.0 < b.value < float("inf"):
            score, factor = a, factor * b.value if score.op == "mul" else factor / b.value
        elif score.op == "mul" and isinstance(a, Const) and a.kind == FLOAT and b.kind == FLOAT and 0.0 < a.value < float("inf"):
            score, factor = b, factor * a.value
        else:
            break
    return score, factor


def gathered(score: Expr) -> Expr:
    """The same score with a chain of constant factors as one: for 16-bit operands, which do not see float32's last digit, and only for them.

    before -> after: qk * 0.125 / 50.0 -> qk * 0.0025
    """
    if not isinstance(score, Call):
        return score
    score = Call(score.op, tuple(gathered(a) for a in score.args))
    if score.op not in ("mul", "truediv") or score.kind != FLOAT:
        return score
    a, b = score.args[::-1] if score.op == "mul" and isinstance(score.args[0], Const) else score.args
    if not isinstance(b, Const) or isinstance(a, Const) or a.kind != FLOAT or not 1e-30 < abs(b.value) < 1e30:
        return score
    factor = 1.0 / b.value if score.op == "truediv" else b.value
    if isinstance(a, Call) and a.op == "mul" and isinstance(a.args[1], Const) and a.args[0].kind == FLOAT and 1e-30 < abs(a.args[1].value * factor) < 1e30:
        a, factor = a.args[0], a.args[1].value * factor
    return Call("mul", (a, Const(factor)))


def split_factor(e: Expr) -> tuple[Expr, float]:
    """A derivative as (rest, constant): the constant multiplies the finished gradient once instead of every element."""
    factor = 1.0
    while getattr(e, "op", "") == "mul" and any(isinstance(a, Const) for a in e.args):
        a, b = e.args
        e, c = (b, a) if isinstance(a, Const) else (a, b)
        factor *= c.value
    return (Const(1.0), factor * e.value) if isinstance(e, Const) else (e, factor)


INF = math.inf
RANGES = {"tanh": (-1.0, 1.0), "erf": (-1.0, 1.0), "sin": (-1.0, 1.0), "cos": (-1.0, 1.0), "sigmoid": (0.0, 1.0)}


@functools.lru_cache(maxsize=4096)
def span(e: Expr) -> tuple[float, float]:
    """Numbers between which a float expression lies whatever its leaves are, rounding and NaN aside; infinite where that is not known.

    before -> after: tanh(qk * 0.004) * 30.0 -> (-30, 30); minimum(maximum(qk, -50.0), 50.0) -> (-50, 50); qk * 0.125 -> (-inf, inf)
    """
    if isinstance(e, Const):
        return float(e.value), float(e.value)
    if not isinstance(e, Call) or e.op in RANGES:
        return RANGES.get(getattr(e, "op", ""), (-INF, INF))
    if e.op == "where":
        (a, b), (c, d) = map(span, e.args[1:])
        return min(a, c), max(b, d)
    found = [span(a) for a in e.args]
    (a, b), (c, d) = found[0], found[-1]
    if e.op == "neg":
        return -b, -a
    if e.op == "abs":
        return max(a, -b, 0.0), max(b, -a)
    if e.op in ("minimum", "maximum"):
        pick = min if e.op == "minimum" else max
        return pick(a, c), pick(b, d)
    if e.op == "add":
        return a + c, b + d
    if e.op == "sub":
        return a - d, b - c
    if e.op == "truediv" and c == d != 0.0:
        c = d = 1.0 / c
    if e.op in ("mul", "truediv") and (e.op == "mul" or c == d) and all(map(math.isfinite, (a, b, c, d))):
        return min(ends := (a * c, a * d, b * c, b * d)), max(ends)
    return -INF, INF
