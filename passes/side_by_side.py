"""Keys in several parts, global and local ones say, each with products of its own and one softmax over all of them (ETC, Ainslie et al. 2020).

before -> after, exact in real arithmetic:
    p = softmax(cat([q @ k1.mT, q @ k2.mT], -1)); p[..., :n] @ v1 + p[..., n:] @ v2   ->   softmax(q @ cat([k1, k2], -2).mT) @ cat([v1, v2], -2)
"""
from __future__ import annotations

from .find import carries
from .index import Affine, Index, NotAffine, Size, SplitAxis, broadcast, same, size
from .linear import viewed
from .maker import Maker, aten, path_to, spans, through
from .operands import Operand, arrange, constant_factor, trace_back
from .rules import PRODUCTS
from .softmax import softmax_of
from .values import Value, ValueGraph, upstream
from .views import step_through

_CUTS = ("slice.Tensor", "split.Tensor", "split_with_sizes.default")
Part = tuple[Value, Index, dict[str, Size]]  # a value, the index at which it is read, and the axes of that


def side_by_side(vg: ValueGraph, v: Value) -> bool:
    """A sum of products whose weights are all of a softmax, cut in parts; and the scores in front of it."""
    if v.name != "add.Tensor" or v.kwargs or not v.dtype.is_floating_point:
        return False
    weights = None
    try:
        weights = _values_joined(vg, v, _addends(v))
        if weights is None:
            return False
        above = softmax_of(weights).scores
        for x in list(upstream(above, lambda x: x.inputs if carries(x) and x.name not in PRODUCTS else [])):
            if x.name == "cat.default":
                _scores_joined(vg, x)
    except (SplitAxis, NotAffine):
        return weights is not None
    return True


def _addends(v: Value) -> list:
    """What a sum is made of; sums in place are seen through views that undo each other."""
    found = []
    for a in v.args:
        path = path_to(a, lambda y: y.name == "add.Tensor" and not y.kwargs, dropout=False) if isinstance(a, Value) else None
        inner = path is not None and spans(path[-1], a) and through(path, (x := _frame(a))[2], x[1]) == x[2]
        found += _addends(path[-1]) if inner else [a]
    return found


def _frame(v: Value) -> tuple[list[str], dict[str, Size], Index]:
    names = [f"x{d}" for d in range(len(v.shape))]
    return names, {n: size(s) for n, s in zip(names, v.shape)}, tuple(Affine.axis(n) for n in names)


def _values_joined(vg: ValueGraph, v: Value, addends: list) -> Value | None:
    """Makes `v` one product of the whole weights and all values. Returns their softmax."""
    frame, sizes, x = _frame(v)
    values: dict[int, Part] = {}
    whole: set[tuple[Value, Index, int]] = set()
    for a in addends:
        path = path_to(a, lambda y: y.name in ("bmm.default", "mm.default", "matmul.default"), dropout=False) if spans(a, v) else None
        if path is None or path[-1].grad != v.grad:
            return None
        product, at = path[-1], through(path, x, sizes)
        for side, position in enumerate(PRODUCTS[product.name]):
            cut = path_to(product.args[position], lambda y: y.name in _CUTS, dropout=False)
            if cut is None or (soft := path_to(cut[-1].args[0], lambda y: softmax_of(y) is not None)) is None:
                continue
            other = product.args[PRODUCTS[product.name][1 - side]]
            extents, j = {**sizes, "j": size(other.shape[-2 if side == 0 else -1])}, Affine.axis("j")
            weights_at, other_at = ((*at[:-1], j), (*at[:-2], j, at[-1])) if side == 0 else ((*at[:-2], j, at[-1]), (*at[:-1], j))
            inside = through(cut, broadcast(weights_at, [size(s) for s in product.args[position].shape]), extents)
            base, index = step_through(cut[-1], inside, extents)
            dim = softmax_of(soft[-1]).dim
            if len(base.shape) != len(soft[-1].shape) or index[dim].terms != j.terms or not isinstance(index[dim].constant, int):
                return None
            values[index[dim].constant] = other, broadcast(other_at, [size(s) for s in other.shape]), extents
            whole.add((base, tuple(Affine() if d == dim else a for d, a in enumerate(index)), dim))
            break
    if len(whole) != 1 or len(values) != len(addends):
        return None
    (base, index, dim), = whole
    parts = [values[start] for start in sorted(values)]
    if [sum(p[2]["j"] for p in parts[:n]) for n in range(len(parts))] != sorted(values) or not same(sum(p[2]["j"] for p in parts), size(base.shape[dim])):
        return None
    make, extents = Maker(vg, v), {**sizes, "j": size(base.shape[dim])}
    left = arrange(base, tuple(Affine.axis("j") if d == dim else a for d, a in enumerate(index)), [*frame[:-1], "j"], extents, keep_missing=True)
    right = _joined(make, parts, [*frame[:-2], "j", frame[-1]])
    left = None if left is None else viewed(make, base, left.steps)
    if left is None or right is None or left.dtype != right.dtype:
        return None
    make.redefine(v, make(aten.matmul.default, left, right))
    vg.forget_users()
    return path_to(base, lambda y: softmax_of(y) is not None)[-1]


def _scores_joined(vg: ValueGraph, v: Value) -> bool:
    """Makes a concatenation of products of one left operand one product."""
    frame, sizes, x = _frame(v)
    dim = v.argument(1, "dim", 0) % len(x)
    key = frame[dim]
    keys: list[Part] = []
    queries: list[Part] = []
    factors = set()
    for part in v.args[0]:
        factor, source = 1.0, part
        while (by := constant_factor(source)) is not None:
            factor, source = factor * by, source.args[0]
        factors.add(factor)
        path = path_to(source, lambda y: y.name in ("bmm.default", "mm.default", "matmul.default"), dropout=False)
        if path is None or path[-1].grad != v.grad:
            return False
        product = path[-1]
        extents = {**sizes, key: size(part.shape[dim]), "d": size(product.args[0].shape[-1])}
        at, d = through(path, x, extents), Affine.axis("d")
        ends = [(t, broadcast(i, [size(s) for s in t.shape]), extents) for t, i in zip(product.args, ((*at[:-1], d), (*at[:-2], d, at[-1])))]
        if key in ends[0][1][-2].axes:
            ends.reverse()
        queries.append(ends[0])
        keys.append(ends[1])
    reach = lambda part: set().union(*(a.axes for a in part[1]))
    rows = [n for n in frame if n != key and not any(n in reach(k) for k in keys)]
    if not rows or len(factors) != 1 or any(key in reach(q) for q in queries):
        return False
    row = rows[-1]
    batch = [n for n in frame if n not in (row, key)]
    left = {_source(vg, q, [*batch, row, "d"]) for q in queries}
    make = Maker(vg, v)
    right = _joined(make, keys, [*batch, key, "d"])
    if len(left) != 1 or None in left or right is None:
        return False
    found, = left
    query = viewed(make, found.value, found.steps)
    if query is None or query.dtype != right.dtype:
        return False
    out, order, (by,) = make(aten.matmul.default, query, make(aten.transpose.int, right, -1, -2)), [*batch, row, key], factors
    out = out if by == 1.0 else make(aten.mul.Tensor, out, by)
    make.redefine(v, make(aten.permute.default, out, [order.index(n) for n in frame]))
    vg.forget_users()
    return True


def _source(vg: ValueGraph, part: Part, wanted: list[str]) -> Operand | None:
    v, at, extents = part
    found, _ = trace_back(v, at, wanted, extents, vg, v.grad, scale=False)
    return found[0] if found else None


def _joined(make: Maker, parts: list[Part], wanted: list[str]) -> Value | None:
    """The parts one after the other in the last dim but one, which is theirs alone; an axis that one part lacks is expanded for it."""
    found = []
    for v, at, extents in parts:
        operand = arrange(v, at, wanted, extents, keep_missing=True)
        if operand is None or operand.dims[-2:] != tuple(wanted[-2:]) or (seen := viewed(make, v, operand.steps)) is None:
            return None
        found.append(seen)
    shape = [max((t.shape[d] for t in found), key=lambda s: not same(size(s), 1)) for d in range(len(wanted) - 2)]
    return make(aten.cat.default, [make(aten.expand.default, t, [*shape, *t.shape[-2:]]) for t in found], -2)
