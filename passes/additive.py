"""Terms of a score that may be masks: added tensors whose elements nobody knows before they are there."""
from __future__ import annotations

import math
from typing import Mapping

import torch

from flashfx.expr import FLOAT, QK, TRUE, Call, Const, Expr, call, conjunction, walk
from flashfx.spec import HIDING_FILL, EmptyRow

from .masks import Fill, hiding_sum
from .pull import Puller
from .rules import PRODUCTS
from .scalars import simplified
from .values import Refused, Value, upstream
from .views import VIEWS


def terms(score: Expr) -> list[Expr]:
    """What is added to the dot product's term.

    before -> after: (qk - a) * 0.5 + b -> -a * 0.5, b
    """
    if not isinstance(score, Call) or QK not in score.leaves:
        return []
    if score.op in ("add", "sub"):
        a, b = score.args
        b = call("neg", b) if score.op == "sub" else b
        return [y for x in (a, b) for y in (terms(x) if QK in x.leaves else [x])]
    if score.op in ("mul", "truediv") and isinstance(score.args[1], Const) and score.args[1].value > 0:
        return [call(score.op, t, score.args[1]) for t in terms(score.args[0])]
    return []


def above(term: Expr, bound: float) -> Expr:
    """before -> after: minimum(a, where(c, 0.0, -inf)) > bound -> (a > bound) & c"""
    if isinstance(term, Call) and term.op == "minimum":
        return call("and", above(term.args[0], bound), above(term.args[1], bound))
    return simplified("gt", term, Const(bound))


def could_hide(term: Expr, puller: Puller) -> bool:
    """May a term be so negative for some keys that it hides them? A slope per head, times a distance, hides none."""
    return any(isinstance(x, Const) and x.kind == FLOAT and abs(x.value) >= -HIDING_FILL for x in term.leaves) \
        or any(isinstance(x, Call) and x.op in ("log", "log2", "log1p", "reciprocal") and any(load.kind != FLOAT for load in x.loads)
               for x in walk(term)) \
        or any(load.kind == FLOAT and "j" in load.variables and _could_hold_fills(puller.loads[load.name], puller.constants)
               for load in term.loads)


def _could_hold_fills(v: Value, constants: Mapping[Value, torch.Tensor]) -> bool:
    """Not if it is a parameter, or computed from parameters, integers and ordinary constants, as ALiBi is."""
    def through(x: Value) -> list[Value]:  # what a product yields is no mask
        return [] if x.name in PRODUCTS else [y for y in x.inputs if y.dtype.is_floating_point]

    for x in upstream(v, through):
        if x in constants:
            data = constants[x]
            if data.is_floating_point() and data.numel() and data.min().item() <= HIDING_FILL:
                return True
        elif x.op is None:
            example = x.owner.meta.get("example_value") if x.owner is not None else None
            learned = isinstance(example, torch.Tensor) and (isinstance(example, torch.nn.Parameter) or example.requires_grad and example.is_leaf)
            if x.dtype.is_floating_point and not learned:
                return True
        elif x.name in PRODUCTS:
            continue
        elif x.name.startswith(("log", "reciprocal")) and _depends_on_inputs(x) or x.name.startswith("div.Tensor") and not _is_ordinary(x.args[1], constants):
            return True
        elif x.name not in VIEWS and any(isinstance(a, (int, float)) and abs(a) >= -HIDING_FILL for a in x.args):
            return True
    return False


def _is_ordinary(divisor: Value | float, constants: Mapping[Value, torch.Tensor]) -> bool:
    """Does nothing that is divided by this become huge?"""
    if not isinstance(divisor, Value):
        return abs(divisor) * -HIDING_FILL > 1
    if divisor in constants:
        return bool((constants[divisor].abs() * -HIDING_FILL > 1).all())
    return not _depends_on_inputs(divisor)


def _depends_on_inputs(v: Value) -> bool:
    return any(x.op is None and x.owner is not None and x.owner.op != "get_attr" for x in upstream(v))


LOWEST = -3.3e38
"""Scores replaced by this or less, the lowest numbers of float32 and bfloat16, are the largest of a row only where none is visible."""
LOST = -2e38
"""Beside those, what is added hides up to here; sums above, of -1e30 say, are scores like any other. Base 2 takes them further down, to -inf from -2.4e38 on."""


FINITE = {torch.float16: -65519.9, torch.bfloat16: -3.3961e38, torch.float32: -3.40282356e38, torch.float64: torch.finfo(torch.float64).min}
"""The least sums that a dtype's rounding leaves finite."""


def _overflows(value: float, dtype: torch.dtype) -> bool:
    return bool(torch.tensor(value, dtype=torch.float64).to(dtype).isinf())


def additive(hiding: list[Expr], dtype: torch.dtype, fills: list[Fill], safe: bool, at: Value) -> tuple[Expr, EmptyRow, Expr, list[Expr]]:
    """(visible, empty row, mean over, conditions under which alone gradients flow there) where terms of the score may be additive masks.

    Sums in `dtype` up to `hiding_sum` hide their key.
    """
    shown = conjunction(f.visible for f in fills)
    total = hiding[0]
    for t in hiding[1:]:
        total = call("add", total, t)
    finite = [f for f in fills if math.isfinite(f.value)]
    over = conjunction([*(f.visible for f in fills if math.isinf(f.value)), above(total, -math.inf)])
    if any(safe or not f.added for f in finite):
        later = {load for f in finite for t in f.outside for load in t.loads}
        if safe or dtype == torch.float64 or any(f.added or f.value > LOWEST for f in finite) or len({f.value for f in finite}) > 1 \
                or not later.isdisjoint(load for t in hiding for load in t.loads):
            raise Refused("an additive tensor that may be a mask meets a mask of a finite constant, and rows that both hide follow no single rule",
                          at, "combine the masks before they are applied, or hide by -inf")
        kept = conjunction(f.visible for f in finite)  # a hidden key of a row is as low as those of the other kind, or -inf
        over = conjunction([*(f.visible for f in fills if math.isinf(f.value)), call("or", call("not", kept), above(total, -math.inf))])
        return call("and", shown, above(total, LOST)), EmptyRow.MEAN_ADD, over, [kept]
    if safe:
        return call("and", shown, above(total, -math.inf)), EmptyRow.ZERO, TRUE, []
    for f in finite:
        total = call("add", total, call("where", f.visible, Const(0.0), Const(f.value)))
    if finite and _overflows(torch.finfo(dtype).min + sum(f.value for f in finite), dtype):  # what hides by both is -inf, and has no share in the mean
        over = conjunction([*(f.visible for f in fills if math.isinf(f.value)), simplified("ge", total, Const(FINITE[dtype]))])
    return call("and", shown, above(total, hiding_sum(dtype))), EmptyRow.MEAN_ADD, over, []
