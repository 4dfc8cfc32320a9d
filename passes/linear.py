"""linear: the second product is linear in the weights, so sums and factors of weights can be taken out of it.

before -> after:
    (p1 - c * p2) @ v        ->  p1 @ v - c * (p2 @ v)         c the same for all keys (differential attention)
    (p * m) @ v              ->  p @ (m.unsqueeze(-1) * v)     m the same for all queries
    p.masked_fill(m, 0) @ v  ->  where(~m, p @ v, 0)           m the same for all keys: queries that are blanked after the softmax
"""
from __future__ import annotations

from typing import Callable

import torch

from .find import DROPOUTS
from .index import Affine, NotAffine, SplitAxis, broadcast, same, size
from .maker import Maker, again, draws, path_to, private, spans, through
from .operands import arrange
from .rules import PRODUCTS
from .softmax import is_rounding, softmax_of
from .values import Value, ValueGraph, upstream
from .views import VIEWS
from .zeroed import zeroed

aten = torch.ops.aten

LINEAR = {"mul.Tensor", "mul.Scalar", "div.Tensor", "div.Scalar", "add.Tensor", "sub.Tensor", "neg.default"}
FILLS = {"masked_fill.Scalar", "masked_fill.Tensor", "where.self", "where.ScalarOther", "where.ScalarSelf"}


def distributed(vg: ValueGraph, v: Value) -> list[Value]:
    """Take sums and factors out of the weights of one product; the products that this makes."""
    found = _distributed(vg, v)
    if v in vg.blanked:
        vg.blanked.update(found)
    return found


def _distributed(vg: ValueGraph, v: Value) -> list[Value]:
    if v.name not in PRODUCTS or v.name in ("baddbmm.default", "addmm.default"):
        return []
    for side, position in enumerate(PRODUCTS[v.name]):
        inside = path_to(v.args[position], lambda x: x.name in LINEAR or x.name in FILLS or softmax_of(x) is not None, dropout=True)
        if inside is None or softmax_of(inside[-1]) is not None or not private(vg, inside):
            continue
        changed, make = inside[-1], Maker(vg, v)
        if changed.name in FILLS:
            if new := _blanked(vg, v, side, position, inside, changed):
                return new
            continue
        weights = [a for a in changed.args[:2] if isinstance(a, Value) and _softmax_above(a)]
        if not weights or changed.grad != v.grad or any(p.dtype != changed.dtype for p in weights):
            continue

        def product(p: Value) -> Value:
            args = list(v.args)
            args[position] = again(make, inside, p)
            return make(v.op, *args, **v.kwargs)

        if changed.name in ("add.Tensor", "sub.Tensor"):
            if len(weights) != 2 or changed.kwargs.get("alpha", 1) != 1 or not all(spans(p, changed) for p in weights) or draws(inside):
                continue
            below = [v, *_views_below(vg, v)]
            make = Maker(vg, below[-1])
            new = [product(p) for p in weights]
            make.redefine(below[-1], make(changed.op, *(again(make, below[::-1], p) for p in new)))
            return new
        if changed.name == "neg.default":
            new = product(weights[0])
            make.redefine(v, make(aten.neg.default, new))
            return [new]
        if changed.name in ("mul.Tensor", "mul.Scalar", "div.Tensor", "div.Scalar") and len(weights) == 1:
            p, factor = weights[0], changed.args[1] if changed.args[0] is weights[0] else changed.args[0]
            if not spans(p, changed) or changed.name.startswith("div") and changed.args[0] is not p:
                continue
            if not isinstance(factor, Value) or all(same(size(s), 1) for s in factor.shape):
                if isinstance(factor, Value) and factor.shape:
                    for _ in factor.shape:
                        factor = make(aten.select.int, factor, 0, 0)
                new = product(p)
                make.redefine(v, make(changed.op, new, factor))
                return [new]
            if new := _factored(vg, v, side, position, inside, p, factor, lambda make, x, f: make(changed.op, x, f)):
                return new
    return []


def _blanked(vg: ValueGraph, v: Value, side: int, position: int, inside: list[Value], changed: Value) -> list[Value]:
    """Queries whose weights are all set to 0 have an output of 0. Where the scores' own mask says so too, it is left to `weights.kept_keys`, which makes one of both."""
    found = zeroed(vg, Maker(vg, v), changed)
    vg.forget_users()
    if found is None or changed.grad != v.grad or found.of.dtype != changed.dtype or not _softmax_above(found.of):
        return []
    mask = changed.args[1 if changed.name.startswith("masked_fill") else 0]
    while mask.name in VIEWS and mask.name not in ("slice.Tensor", "select.int") or mask.name in ("logical_not.default", "bitwise_not.default"):
        mask = mask.args[0]
    if mask in upstream(found.of):
        return []
    new = _factored(vg, v, side, position, inside, found.of, found.condition, lambda make, x, seen: make(aten.where.ScalarOther, seen, x, 0.0), for_keys=False)
    vg.blanked.update(new)
    return new


def _factored(vg: ValueGraph, v: Value, side: int, position: int, inside: list[Value], p: Value, factor: Value,
              apply: Callable[[Maker, Value, Value], Value], for_keys: bool = True) -> list[Value]:
    """A factor that is the same for all keys goes behind the product, one that is the same for all queries to the values, if it may (`for_keys`). apply: by it.

    Written at the first of the product's views whose dims the weights have too: (B, H, M, N) rather than (B * H, M, N).
    """
    values = v.args[PRODUCTS[v.name][1 - side]]
    j = Affine.axis("j")
    for below in (v, *_views_below(vg, v)):
        frame = [f"x{d}" for d in range(len(below.shape))]
        extents = {**{n: size(s) for n, s in zip(frame, below.shape)}, "j": size(values.shape[-2 if side == 0 else -1])}
        path = path_to(below, lambda x: x is v)
        try:
            at = through(path, tuple(Affine.axis(n) for n in frame), extents)
            row, column = (at[-2], at[-1]) if side == 0 else (at[-1], at[-2])
            weights_at = (*at[:-2], row, j) if side == 0 else (*at[:-2], j, row)
            values_at = (*at[:-2], j, column) if side == 0 else (*at[:-2], column, j)
            weights_at = broadcast(weights_at, [size(s) for s in v.args[position].shape])
            values_at = broadcast(values_at, [size(s) for s in values.shape])
            of_factor = broadcast(through(inside, weights_at, extents), [size(s) for s in factor.shape])
        except (SplitAxis, NotAffine):
            continue
        axes = set().union(*(a.axes for a in of_factor))
        make = Maker(vg, below)
        if "j" not in axes:
            found = arrange(factor, of_factor, frame, extents, keep_missing=True)
            if found is None or (scale := viewed(make, factor, found.steps)) is None:
                return []
            args = list(v.args)
            args[position] = again(make, inside, p)
            new = make(v.op, *args, **v.kwargs)
            make.redefine(below, apply(make, again(make, path, new), scale))
            return [new]
        if not for_keys or values.dtype == torch.float16 and factor.dtype != torch.bool:
            return []  # small weights times large factors may fit where values times large factors overflow
        if row.axes & axes or draws(inside) or (row.single, column.single) not in ((frame[-2], frame[-1]), (frame[-1], frame[-2])):
            continue
        batch = frame[:-2]
        operands = [(factor, of_factor, [*batch, "j", column.single]), (values, values_at, [*batch, "j", column.single]),
                    (v.args[position], weights_at, [*batch, row.single, "j"])]
        found = [arrange(*o, extents, keep_missing=True) for o in operands]
        if any(o is None for o in found):
            continue
        sources = (factor, values, again(make, inside, p))
        scale, right, left = (viewed(make, source, o.steps) for source, o in zip(sources, found))
        if scale is None or right is None or left is None:
            return []
        new = product = make(aten.matmul.default, left, apply(make, right, scale))
        if row.single == frame[-1]:
            new = make(aten.transpose.int, product, -1, -2)
        if not spans(new, below) or new.dtype != below.dtype:
            return []
        make.redefine(below, new)
        return [below if new is product else product]
    return []


_STEPS = {"select": aten.select.int, "narrow": aten.narrow.default, "unflatten": aten.unflatten.int, "permute": aten.permute.default,
          "unsqueeze": aten.unsqueeze.default, "squeeze": aten.squeeze.dim}


def viewed(make: Maker, v: Value, steps) -> Value | None:
    """`v` through the steps of an operand; None where that needs a symbolic size."""
    if any(not isinstance(a, int) for _, *args in steps for arg in args for a in (arg if isinstance(arg, tuple) else (arg,))):
        return None
    for name, *args in steps:
        if name == "narrow":
            v = make(aten.slice.Tensor, v, args[0], args[1], args[1] + args[2])
        elif name == "unflatten":
            shape = list(v.shape)
            v = make(aten.reshape.default, v, shape[: args[0]] + list(args[1]) + shape[args[0] + 1:])
        else:
            v = make(_STEPS[name], v, *args)
    return v


def _views_below(vg: ValueGraph, v: Value) -> list[Value]:
    """The views of `v`, as long as each is the only reader of the one before."""
    found = []
    while v not in vg.roots and len(users := vg.users()[v]) == 1 and users[0].name in VIEWS and users[0].name != "copy.default":
        v = users[0]
        found.append(v)
    return found


def _softmax_above(v: Value) -> bool:
    """Does `v` come from a softmax through views, casts, dropout, NaN made 0 and what is linear in the weights?"""
    def through(x: Value) -> list[Value]:
        if softmax_of(x) is not None or not (x.name in VIEWS or is_rounding(x) or x.name in DROPOUTS or x.name in LINEAR or x.name == "nan_to_num.default"):
            return []
        return x.inputs
    return any(softmax_of(x) is not None for x in upstream(v, through))
