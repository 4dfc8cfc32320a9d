"""Weights that are set to 0 where a mask says so: filled, chosen, or multiplied by a mask of two values."""
from __future__ import annotations

from dataclasses import dataclass

import torch

from flashfx.expr import BOOL, FLOAT, Const, Expr

from .index import Affine, NotAffine, SplitAxis, size
from .maker import Maker, aten, spans
from .pull import Puller
from .scalars import choice
from .values import Refused, Value, ValueGraph


@dataclass(frozen=True)
class Zeroed:
    """`of` where `condition` holds, else 0. factor: it was multiplied by 0, so that NaN stays NaN, or by this."""

    of: Value
    condition: Value
    factor: float | None = None


def zeroed(vg: ValueGraph, make: Maker, v: Value) -> Zeroed | None:
    """What `v` sets to 0, and where it does not. The condition broadcasts to `v`."""
    if v.name in ("masked_fill.Scalar", "masked_fill.Tensor") and _zero(vg, v.args[2]) and spans(v.args[0], v):
        return Zeroed(v.args[0], make(aten.logical_not.default, v.args[1]))
    if v.name in ("where.ScalarOther", "where.self") and _zero(vg, v.args[2]) and spans(v.args[1], v):
        return Zeroed(v.args[1], v.args[0])
    if v.name in ("where.ScalarSelf", "where.self") and _zero(vg, v.args[1]) and spans(v.args[2], v):
        return Zeroed(v.args[2], make(aten.logical_not.default, v.args[0]))
    if v.name != "mul.Tensor" or not isinstance(v.args[1], Value):
        return None
    for p, m in (v.args, v.args[::-1]):
        if spans(p, v) and (factor := _other_than_zero(vg, m)) is not None:
            return Zeroed(p, make(aten.ne.Scalar, m, 0), factor)
    return None


def _element(vg: ValueGraph, v: Value) -> Expr | None:
    """The scalar program of an element of `v`."""
    extents = {f"x{d}": size(s) for d, s in enumerate(v.shape)}
    try:
        return Puller(extents, vg.constants, grad=v.grad).pull(v, tuple(Affine.axis(n) for n in extents))
    except (SplitAxis, NotAffine, Refused):
        return None


def _other_than_zero(vg: ValueGraph, m: Value) -> float | None:
    """The positive constant that every element of `m` is, where it is not 0."""
    if m.dtype == torch.bool:
        return 1.0
    e = _element(vg, m)
    values = [e] if isinstance(e, Const) else sorted(parts[1:], key=lambda c: c.value) if e is not None and (parts := choice(e)) else []
    fits = values and values[-1].kind != BOOL and values[-1].value > 0 and all(c.value == 0 for c in values[:-1])
    return float(values[-1].value) if fits else None


def _zero(vg: ValueGraph, v) -> bool:
    if not isinstance(v, Value):
        return isinstance(v, (int, float)) and not isinstance(v, bool) and v == 0
    e = _element(vg, v)
    return isinstance(e, Const) and e.kind == FLOAT and e.value == 0
