"""Take the masks out of a score: what remains is arithmetic on visible scores, a condition, and what hidden rows yield.

A mask is whatever drives a score to a huge negative number: `where(c, s, K)`, `s + where(c, 0, K)`, products and sums of
these. Where a key is visible the masked score *is* the remaining score; where it is hidden its weight is exactly zero
unless the whole row is hidden, which `EmptyRow` records.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Iterator, Mapping, Sequence

import torch

from flashfx.expr import FALSE, FLOAT, INT, QK, TRUE, Call, Const, Expr, Var, call, conjunction, walk
from flashfx.spec import HIDING_FILL, EmptyRow

from .index import Affine, at_least
from .pull import Puller
from .scalars import round_to
from .values import Refused


@dataclass(frozen=True)
class Fill:
    """Where `visible` is false the score was given `value`, by addition or by replacement.

    bound   least finite value at the addition, scaled like `value`: sums below it were -inf
    outside terms that were added after the score was replaced: they get a gradient where the score gets none
    """

    visible: Expr
    value: float
    added: bool
    bound: float = -math.inf
    outside: tuple[Expr, ...] = ()


@dataclass(frozen=True)
class Masked:
    score: Expr
    fills: tuple[Fill, ...] = ()

    def map(self, fn, scale: float, dtype: torch.dtype) -> Masked | None:
        """The masked score under score -> fn(score), value -> scale * value in `dtype`; None if a fill no longer hides."""
        fills = tuple(replace(f, value=round_to(f.value * scale, dtype), bound=f.bound * scale) for f in self.fills)
        return Masked(fn(self.score), fills) if all(f.value <= HIDING_FILL for f in fills) else None


def hiding_sum(dtype: torch.dtype) -> float:
    """Constants at or below this swallow a score that they are added to: the sum keeps fewer than two bits of it.

    Above, as -1e6 in float32, a row that is hidden entirely still is the softmax of its scores.
    """
    return min(HIDING_FILL, -4.0 / torch.finfo(dtype).eps)


def _hides(e: Expr) -> bool:
    return isinstance(e, Const) and e.kind == FLOAT and e.value <= HIDING_FILL


def peel(e: Expr, dtypes: Mapping[Expr, torch.dtype]) -> Masked:
    """Split a score (or an additive term of it) into arithmetic and fills. `dtypes` says in which dtype a sum or product was formed."""
    whole = Masked(e)
    if not isinstance(e, Call):
        return whole
    if e.op == "where":
        c, a, b = e.args
        replaced = QK in e.leaves
        for kept, fill, visible in ((a, b, c), (b, a, call("not", c))):
            if _hides(fill) and not _hides(kept):
                inner = peel(kept, dtypes)
                if inner.fills and not replaced:  # inside one term the outer constant replaces the inner one
                    return whole
                return Masked(_where_holds(inner.score, visible), (*inner.fills, Fill(visible, fill.value, not replaced)))
        return whole
    if e.op == "add":
        a, b = (peel(x, dtypes) for x in e.args)
        dtype = dtypes.get(e, torch.float32)
        for term in (a, b):
            if QK not in term.score.leaves and any(f.value > hiding_sum(dtype) for f in term.fills):
                return whole
        _check_added(e.op, a.fills, b.score, dtype)
        _check_added(e.op, b.fills, a.score, dtype)
        if _told_apart(a.fills, b.score, dtype) or _told_apart(b.fills, a.score, dtype):
            return whole
        if a.fills or b.fills:
            score, other = (a.score, b.score) if QK in a.score.leaves or QK not in b.score.leaves else (b.score, a.score)
            least = torch.finfo(dtype).min
            fills = tuple(replace(f, bound=least) if f.added else replace(f, outside=(*f.outside, more))
                          for one, more in ((a, b.score), (b, a.score)) for f in one.fills)
            return Masked(call("add", score, other), fills)
        return whole
    if e.op == "sub":
        a = peel(e.args[0], dtypes)
        _check_added(e.op, a.fills, e.args[1], dtypes.get(e, torch.float32))
        if _told_apart(a.fills, e.args[1], dtypes.get(e, torch.float32)):
            return whole
        fills = tuple(f if f.added else replace(f, outside=(*f.outside, e.args[1])) for f in a.fills)
        return Masked(call("sub", a.score, e.args[1]), fills) if fills else whole
    if e.op in ("mul", "truediv"):
        a, c = e.args
        if isinstance(a, Const) and e.op == "mul":
            a, c = c, a
        if isinstance(c, Const) and c.value > 0:
            a = peel(a, dtypes)
            if a.fills:
                return a.map(lambda s: call(e.op, s, c), c.value if e.op == "mul" else 1 / c.value,
                             dtypes.get(e, torch.float32)) or whole
        return whole
    if e.op == "minimum" and QK in e.leaves:
        a, b = (peel(x, dtypes) for x in e.args)
        if len(a.fills + b.fills) != 1:
            return whole
        return Masked(call("minimum", a.score, b.score), tuple(replace(f, added=False) for f in a.fills + b.fills))
    if e.op == "maximum" and any(_hides(x) for x in e.args):
        a, c = e.args if _hides(e.args[1]) else e.args[::-1]
        inner = peel(a, dtypes)
        fills = inner.fills
        if not fills or len(fills) > 2 or any(f.value > c.value for f in fills):
            return whole
        clamped = Fill(conjunction(f.visible for f in fills), c.value, any(f.added for f in fills))
        if not clamped.added or all(f.value < c.value for f in fills):
            return Masked(inner.score, (replace(clamped, added=False),))
        # where both sides are equal, maximum hands on half of the gradient; where two constants overflowed, nothing
        half = call("mul", inner.score, Const(0.5))
        if len(fills) == 2:
            half = call("where", call("or", fills[0].visible, fills[1].visible), half, Const(0.0))
        return Masked(call("where", clamped.visible, inner.score, half), (clamped,))
    return whole


def _told_apart(fills: Sequence[Fill], term: Expr, dtype: torch.dtype) -> bool:
    """Does a term added after scores were replaced by a finite constant still tell the hidden keys of a row apart?"""
    return "j" in term.variables and any(not f.added and math.isfinite(f.value) and f.value > hiding_sum(dtype) for f in fills)


def _check_added(op: str, fills: Sequence[Fill], term: Expr, dtype: torch.dtype) -> None:
    """A constant that float16 added swallowed the scores; a term that float32 adds behind it tells hidden keys apart, without them. And one more constant may
    make it infinite."""
    added, shift = [f.value for f in fills if f.added and math.isfinite(f.value)], _shift(term)
    swallowed = "j" in term.variables and any(value > hiding_sum(dtype) for value in added)
    overflows = math.isfinite(shift) and any(math.isinf(round_to(value + shift, dtype)) for value in added)
    if swallowed or overflows:
        raise Refused(f"a masked score goes through {op}, and what becomes of the mask's constant is not known", hint="add the mask last, or in float32")


def _shift(e: Expr) -> float:
    """The constants that a score adds."""
    if isinstance(e, Const):
        return e.value
    if not isinstance(e, Call) or e.op not in ("add", "sub"):
        return 0.0
    a, b = map(_shift, e.args)
    return a + b if e.op == "add" else a - b


def unpeeled(e: Expr) -> Expr | None:
    """The product or quotient in which a hiding constant is left: it may overflow, or hide no longer."""
    def held(x: Expr) -> bool:
        return isinstance(x, Call) and (x.op == "where" and any(_hides(a) for a in x.args[1:]) or
                                        x.op in ("add", "sub", "neg", "where") and any(held(a) for a in x.args))
    return next((x for x in walk(e) if isinstance(x, Call) and x.op in ("mul", "truediv") and QK in x.leaves and any(held(a) for a in x.args)), None)


def _where_holds(e: Expr, condition: Expr) -> Expr:
    """before -> after, given c: where(c, x, y) -> x; where(~c, x, y) -> y"""
    if isinstance(e, Call) and e.op == "where":
        if e.args[0] == condition:
            return e.args[1]
        if call("not", e.args[0]) == condition:
            return e.args[2]
    return e


def contract(fills: Sequence[Fill], safe: bool) -> tuple[EmptyRow, Expr, list[Expr]]:
    """What a row without a visible key yields, over which keys the mean goes, and conditions under which alone gradients flow there.

    Raises Refused where no rule says it.

    Every way in which fills can hide a key together gives it one value: the sum of added constants, or the last that replaced.
    In a row where all keys are hidden, those with the largest value share the weight.
    """
    if not fills:
        return EmptyRow.NAN, TRUE, []
    if len(fills) > 4:
        raise Refused(f"{len(fills)} masks with constants of their own", hint="combine the masks before they are applied")
    ways: dict[float, list[tuple[Fill, ...]]] = {}
    flows: set[bool] = set()
    for chosen in _subsets(fills):
        value, added = None, True
        for f in chosen:
            value, added = (value + f.value, added) if f.added and value is not None else (f.value, f.added)
            value = -math.inf if value < f.bound else value
        ways.setdefault(value, []).append(chosen)
        if math.isfinite(value):
            flows.add(added)
    finite = sorted(value for value in ways if math.isfinite(value))
    if not finite:
        return (EmptyRow.ZERO if safe else EmptyRow.NAN), TRUE, []
    if len(finite) > 1 or (safe and -math.inf in ways):
        how = ", ".join(f"{f.value:.3g} {'added' if f.added else 'in place of the score'}" for f in fills)
        raise Refused(f"masks hide keys by different constants ({how}), so rows that are hidden "
                      "entirely follow no single rule", hint="combine the masks into one, or hide by -inf")
    infinite = [f for f in fills if math.isinf(f.value)]
    others = [w for w in ways.get(-math.inf, []) if not any(f in infinite for f in w)]
    over = conjunction(f.visible for f in infinite)
    if others:  # two added finfo.min overflow: the mean goes over keys that one of them hides
        over = FALSE
        for w in ways[finite[0]]:
            one = conjunction([*(call("not", f.visible) for f in w), *(f.visible for f in fills if f not in w)])
            over = call("or", over, one)
    blocked = [f.visible for f in fills if not f.added] if len(flows) > 1 else []
    return (EmptyRow.MEAN_ADD if True in flows else EmptyRow.MEAN), over, blocked


def _subsets(fills: Sequence[Fill]) -> Iterator[tuple[Fill, ...]]:
    """Every way in which some of the fills hide a key; fills with one condition hide together."""
    conditions = list(dict.fromkeys(f.visible for f in fills))
    for bits in range(1, 2 ** len(conditions)):
        hidden = {c for n, c in enumerate(conditions) if bits >> n & 1}
        yield tuple(f for f in fills if f.visible in hidden)


# ---------------------------------------------------------------------------------------------------- normal form

def normal_condition(e: Expr, puller: Puller, known: dict[Expr, Expr] | None = None) -> Expr:
    """One text per meaning: integer comparisons solved for j (else i), trivial ones decided, conjuncts sorted.

    known: normal forms found on the way. Each part of an expression is wanted many times, itself and its opposite, and without them
    a few masks inside of each other took for ever.
    """
    known = {} if known is None else known
    if e not in known:
        known[e] = _normal(e, puller, known)
    return known[e]


def _normal(e: Expr, puller: Puller, known: dict[Expr, Expr]) -> Expr:
    if isinstance(e, Call) and e.op in ("and", "or"):
        parts = sorted(set(_flat(e, e.op)), key=str)
        parts = sorted({normal_condition(p, puller, known) for p in parts}, key=_order)
        if (fewer := _absorbed(parts, e.op, puller, known)) != parts:
            return normal_condition(_joined(e.op, fewer), puller, known)
        return _joined(e.op, parts)
    if isinstance(e, Call) and e.op == "not":
        inner = e.args[0]
        if isinstance(inner, Call) and inner.op in ("and", "or"):
            parts = [normal_condition(call("not", p), puller, known) for p in _flat(inner, inner.op)]
            return normal_condition(_joined("or" if inner.op == "and" else "and", parts), puller, known)
        return call("not", normal_condition(inner, puller, known))
    if isinstance(e, Call) and e.op == "to_bool" and e.args[0].kind == INT:
        return call("ne", e.args[0], Const(0))
    if isinstance(e, Call) and e.op in _FLIPPED and all(a.kind == INT for a in e.args):
        return _comparison(e, puller)
    return e


def _flat(e: Expr, op: str) -> list[Expr]:
    return [x for a in e.args for x in _flat(a, op)] if isinstance(e, Call) and e.op == op else [e]


def _joined(op: str, parts: Sequence[Expr]) -> Expr:
    out = parts[0]
    for p in parts[1:]:
        out = call(op, out, p)
    return out


def _absorbed(parts: list[Expr], op: str, puller: Puller, known: dict[Expr, Expr]) -> list[Expr]:
    """before -> after: (a | b) & a -> a; (a | ~b) & b -> a & b; a & ~a -> False; and so with & and | exchanged"""
    other, found = "or" if op == "and" else "and", []
    opposites = {normal_condition(call("not", p), puller, known) for p in parts}
    if not opposites.isdisjoint(parts):
        return [Const(op == "or")]
    for p in parts:
        inside = _flat(p, other)
        if len(inside) > 1 and any(x in parts for x in inside):
            continue
        left = [x for x in inside if x not in opposites] if len(inside) > 1 else inside
        found.append(_joined(other, left) if left else Const(op == "or"))
    return found


def _order(e: Expr):
    return (len(e.loads) > 0, str(e))


_FLIPPED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "eq": "eq", "ne": "ne"}


def _comparison(e: Expr, puller: Puller) -> Expr:
    """before -> after: i >= j -> j <= i; j < i + 1 -> j <= i; i - j < 4 -> j > i - 4; 0 <= i -> True"""
    left, right = (puller.affine(a) for a in e.args)
    if left is None or right is None:
        # a load on one side: keep the load on the right
        if e.args[0].loads and not e.args[1].loads:
            return call(_FLIPPED[e.op], e.args[1], e.args[0])
        return e
    difference, op = left + right * -1, e.op
    bounds = difference.bounds(puller.extents)
    if bounds is not None:
        lo, hi = bounds
        decided = {"lt": (at_least(-1, hi), at_least(lo, 0)), "le": (at_least(0, hi), at_least(lo, 1)),
                   "gt": (at_least(lo, 1), at_least(0, hi)), "ge": (at_least(lo, 0), at_least(-1, hi)),
                   "eq": (lo == hi == 0, at_least(lo, 1) or at_least(-1, hi)), "ne": (at_least(lo, 1) or at_least(-1, hi), lo == hi == 0)}
        true, false = decided[op]
        if true or false:
            return TRUE if true else FALSE
    subject = next((name for name in ("j", "i", *sorted(difference.axes)) if name in difference.axes), None)
    coefficient = dict(difference.terms).get(subject)
    if coefficient not in (1, -1):
        return e
    rest = (difference + Affine.axis(subject) * -coefficient) * -coefficient  # subject op rest
    if coefficient == -1:
        op = _FLIPPED[op]
    if op == "lt":
        op, rest = "le", rest + -1
    elif op == "ge":
        op, rest = "gt", rest + -1
    return call(op, Var(subject), puller.expr(rest))


def _tidy(c: float) -> float:
    """The short decimal, or the inverse root of an integer, that `c` is but for rounding: d**-0.25 twice is d**-0.5."""
    if not 1e-150 < abs(c) < 1e150:
        return c
    near = (float(f"{c:.12g}"), math.copysign(round(c ** -2) ** -0.5, c) if abs(c) < 1 and round(c ** -2) < 2 ** 40 else c)
    return next((x for x in near if abs(x - c) <= 8 * math.ulp(c)), c)


def normal_score(e: Expr, shiftable: bool = True) -> Expr:
    """One text per meaning: constant factors of qk merged into one, qk first in sums."""
    def go(x: Expr) -> Expr:
        if not isinstance(x, Call):
            return x
        args = [go(a) for a in x.args]
        if x.op in ("add", "mul") and QK not in args[0].leaves and QK in args[1].leaves:
            args.reverse()
        if QK not in args[0].leaves:
            return call(x.op, *args)
        if x.op == "truediv" and isinstance(args[1], Const) and args[1].value and not math.isinf(args[1].value):
            return scaled(args[0], 1.0 / args[1].value)
        if x.op == "neg":
            return scaled(args[0], -1.0)
        if x.op == "mul" and isinstance(args[1], Const):
            return scaled(args[0], args[1].value)
        if x.op == "sub" and isinstance(args[1], Const):
            return call("add", args[0], Const(-args[1].value))
        return call(x.op, *args)

    def scaled(x: Expr, c: float) -> Expr:
        if isinstance(x, Call) and x.op == "mul" and isinstance(x.args[1], Const):
            x, c = x.args[0], x.args[1].value * c
        return call("mul", x, Const(_tidy(float(c))))

    e = go(e)
    return _drop_row_constants(e) if shiftable else e


def _drop_row_constants(e: Expr) -> Expr:
    """softmax does not see a number added to a whole row, unless it swallows the scores.

    before -> after: score + 3.0 -> score
    """
    while isinstance(e, Call) and e.op == "add" and isinstance(e.args[1], Const) and math.isfinite(e.args[1].value):
        if abs(e.args[1].value) > 1e30:
            raise Refused("the scores do not depend on the matrix product", hint="a constant that is added to all of them leaves nothing of them: mask only what is to be hidden")
        if abs(e.args[1].value) > -HIDING_FILL:
            break
        e = e.args[0]
    return e

