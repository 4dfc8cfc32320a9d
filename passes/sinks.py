"""Attention sinks that are no column beside the scores yet: one more element of the softmax, padded on or added to the sum.

before -> after, each exact in real arithmetic:
    softmax(pad(s, (0, 1), value=c))[..., :-1]                                -> softmax(cat([s, c]))[..., :-1]
    e / (e.sum(-1, keepdim=True) + exp(c - m)), e = exp(s - m)                -> softmax(cat([s, c]))[..., :-1]
    e / (e.sum(-1, keepdim=True) + c), e = exp(s)                             -> softmax(cat([s, log(c)]))[..., :-1]

Such a softmax is blind to m, its gradient too; exp(-m) stands for c = 0. A row of scores of -inf is NaN if m is their largest, else 0: m is that, or
held from below by a number or by c.
"""
from __future__ import annotations

import math

import torch

from .find import DROPOUTS
from .index import same, size
from .maker import Maker
from .softmax import is_rounding, same_values, softmax_of, summed_over, unshifted
from .values import Value, ValueGraph

aten = torch.ops.aten


def padded_column(vg: ValueGraph, v: Value) -> bool:
    """A softmax over scores that a constant column is padded to, and cut off afterwards."""
    soft = softmax_of(v)
    if soft is None:
        return False
    padded = same_values(unshifted(same_values(soft.scores), soft.dim))
    if padded.name != "constant_pad_nd.default" or len(padded.args[1]) != 2 or soft.dim != len(v.shape) - 1 or not _cut(vg, v):
        return False
    before, after = padded.args[1]
    if sorted(map(size, (before, after)), key=str) != [0, 1]:
        return False
    x, make = padded.args[0], Maker(vg, padded)
    column = _column(make, x, soft.dim, float(padded.argument(2, "value", 0.0) or 0.0))
    make.redefine(padded, make(aten.cat.default, [column, x] if size(before) == 1 else [x, column], soft.dim))
    return True


def _cut(vg: ValueGraph, v: Value) -> bool:
    users = vg.users().get(v, [])
    return any(u.name == "slice.Tensor" or (u.name in DROPOUTS or is_rounding(u)) and _cut(vg, u) for u in users)


def one_more_in_the_sum(vg: ValueGraph, v: Value) -> bool:
    """exp(s) over its sum and one more element."""
    if v.name != "div.Tensor" or not isinstance(v.args[1], Value):
        return False
    e, whole = same_values(v.args[0]), v.args[1]
    while whole.name in ("expand.default", "clone.default", "alias.default") or is_rounding(whole):
        whole = whole.args[0]
    if e.name != "exp.default" or whole.name != "add.Tensor" or whole.kwargs:
        return False
    for total, more in (whole.args, whole.args[::-1]):
        found = summed_over(total) if isinstance(total, Value) else None
        if found is None or same_values(found[0]) is not e or not v.grad == e.grad == whole.grad == found[2].grad:
            continue
        parts, dim = _column_of(e, more, found[1]), found[1]
        if parts is None or parts[1] is not None and unshifted(e.args[0], dim, own=True) is e.args[0] and not _bounded(*parts[1:]):
            continue
        (scores, shift, column), make = parts, Maker(vg, v)
        joined = make(aten.cat.default, [scores, _column(make, scores, dim, column)], dim)
        soft = make(aten._softmax.default, joined, dim, False)
        out = make(aten.slice.Tensor, soft, dim, 0, scores.shape[dim])
        make.redefine(v, out if out.dtype == v.dtype else make(aten._to_copy.default, out, dtype=v.dtype))
        if shift is not None and not _bounded(shift, column):
            vg.shifted.add(soft)
        return True
    return False


def _column_of(e: Value, more, dim: int) -> tuple[Value, Value | None, Value | float] | None:
    """(scores, shift, column) where e = exp(scores - shift) and more = exp(column - shift)."""
    scores = e.args[0]
    if not isinstance(more, Value):  # with scores less their largest it is exp(c - m), a column that hangs on the scores
        constant = isinstance(more, (int, float)) and 0 < more < math.inf and unshifted(scores, dim) is scores
        return (scores, None, math.log(more)) if constant else None
    more = same_values(more)
    if scores.name != "sub.Tensor" or scores.kwargs or not isinstance(scores.args[1], Value) or more.name != "exp.default" or more.grad != e.grad:
        return None
    x, shift = scores.args
    power = more.args[0]
    if not isinstance(x, Value) or len(x.shape) != len(shift.shape) or not same(size(shift.shape[dim]), 1) or power.grad != e.grad or scores.grad != e.grad:
        return None
    if power.name == "neg.default" and same_values(power.args[0]) is same_values(shift):
        return x, shift, 0.0
    if power.name == "rsub.Scalar" and len(power.args) == 2 and same_values(power.args[0]) is same_values(shift):
        return x, shift, float(power.args[1])
    if power.name == "sub.Tensor" and not power.kwargs and isinstance(power.args[1], Value) and same_values(power.args[1]) is same_values(shift):
        column = power.args[0]
        from_back = len(x.shape) - dim
        fits = not isinstance(column, Value) or len(column.shape) < from_back or same(size(column.shape[-from_back]), 1)
        return (x, shift, column if isinstance(column, Value) else float(column)) if fits else None
    return None


def _bounded(shift: Value, column: Value | float) -> bool:
    """Is it finite where all scores are -inf?"""
    def plain(v: Value) -> Value:
        while v.name in ("detach.default", "expand.default", "alias.default") or is_rounding(v):
            v = v.args[0]
        return v

    shift = plain(shift)
    if shift.name == "maximum.default":
        return isinstance(column, Value) and any(plain(v) is plain(column) for v in shift.args)
    least = shift.argument(1, "min") if shift.name in ("clamp.default", "clamp_min.default") else None
    return isinstance(least, (int, float)) and math.isfinite(least)


def _column(make: Maker, x: Value, dim: int, column: Value | float) -> Value:
    """One column beside `x`."""
    shape = [1 if d == dim else s for d, s in enumerate(x.shape)]
    if not isinstance(column, Value):
        column = make(aten.full.default, [1] * len(shape), column, dtype=x.dtype, device=x.fake.device)
    elif column.dtype != x.dtype:
        column = make(aten._to_copy.default, column, dtype=x.dtype)
    return make(aten.expand.default, column, shape)
