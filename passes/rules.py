"""Ops that have a meaning of their own at an index, one rule each: `rule(puller, value, index)` is the element, None if it cannot say."""
from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Callable

import torch

from flashfx.expr import BOOL, FLOAT, INT, QK, TRUE, Call, Const, Expr, call, cast, const
from flashfx.spec import HIDING_FILL

from .index import Affine, Index, broadcast, head_size, number, same, size
from .scalars import cast_simplified, kind_of, narrowed, replaced, round_to, rounded
from .values import Value, alike
from .views import within

if TYPE_CHECKING:
    from .pull import Puller

RANDOM = torch.Tag.nondeterministic_seeded
PRODUCTS = {"bmm.default": (0, 1), "mm.default": (0, 1), "baddbmm.default": (1, 2), "addmm.default": (1, 2), "matmul.default": (0, 1)}


@dataclass(frozen=True)
class Product:
    """left @ right at (…, i, d) and (…, d, j), or at (…, j, d) and (…, d, i) if `swapped`. `value` is None for SDPA."""

    left: Value
    left_at: Index
    right: Value
    right_at: Index
    swapped: bool
    value: Value | None

def _constant(value):
    def rule(p: Puller, v: Value, x: Index) -> Expr:
        c = number(value(v))
        if isinstance(c, torch.SymInt):
            return cast(p.size(c), kind_of(v.dtype))
        return cast(Const(round_to(float(c), v.dtype) if v.dtype.is_floating_point else c), kind_of(v.dtype))
    return rule


def _arange(p: Puller, v: Value, x: Index) -> Expr | None:
    start, step = {"arange.default": (0, 1), "arange.start": (v.args[0], 1)}.get(v.name, (v.args[0], (*v.args, 1, 1)[2]))
    if any(isinstance(c, float) for c in (start, step)):
        return None
    return cast(p.expr(x[0] * size(step) + size(start)), kind_of(v.dtype))


def _to_copy(p: Puller, v: Value, x: Index) -> Expr | None:
    if any(t.is_floating_point and t.itemsize == 1 for t in (v.dtype, v.args[0].dtype)):
        return None  # float8 keeps three bits at most: a cast to it is no rounding to overlook
    inside = p.operand(v.args[0], x)
    if inside.kind == FLOAT and not p.rounding.casts(inside, kind_of(v.dtype)):
        return None  # a rounding difference would be another integer
    e = cast_simplified(inside, kind_of(v.dtype))
    return narrowed(e, v.dtype) if v.dtype.is_floating_point else e


def _rounded_to_integer(op: str):
    def rule(p: Puller, v: Value, x: Index) -> Expr | None:
        e = p.operand(v.args[0], x)
        return call(op, e) if QK in e.leaves or p.rounding.exact(e) else None
    return rule


def _masked_fill(p, v, x):
    fill = p.operand(v.args[2], x)
    return p.apply("where", [cast_simplified(p.operand(v.args[1], x), BOOL), fill, p.operand(v.args[0], x)], v.dtype)


def _where(p, v, x):
    c, a, b = (p.operand(a, x) for a in v.args)
    return p.apply("where", [cast_simplified(c, BOOL), a, b], v.dtype)


def _rsub(p, v, x):
    a, b = p.operand(v.args[0], x), p.operand(v.args[1], x)
    return None if v.kwargs.get("alpha", 1) != 1 else p.apply("sub", [b, a], v.dtype)


def _div_mode(p, v, x):
    a, b = p.operand(v.args[0], x), p.operand(v.args[1], x)
    mode = v.kwargs.get("rounding_mode")
    return p.apply("truediv" if mode is None else "floordiv", [a, b], v.dtype) if mode in (None, "floor") and \
        (mode is None or not v.dtype.is_floating_point) else None


def _clamp(p, v, x):
    e = p.operand(v.args[0], x)
    for op, beyond, bound in (("maximum", "lt", v.argument(1, "min")), ("minimum", "gt", v.argument(2, "max"))):
        if bound is None:
            continue
        b = p.operand(bound, x)
        if QK in e.leaves and isinstance(b, Const) and abs(b.value) < -HIDING_FILL:  # the whole gradient at the ends, where maximum has half
            e = p.apply("where", [call(beyond, e, b), b, e], v.dtype)
        else:
            e = p.apply(op, [e, b], v.dtype)
    return e


def _hardtanh(p, v, x):
    e, low, high = p.operand(v.args[0], x), Const(float(v.argument(1, "min_val", -1.0))), Const(float(v.argument(2, "max_val", 1.0)))
    return call("where", call("le", e, low), low, call("where", call("ge", e, high), high, e))  # no gradient at the ends


def _nan_to_num(p: Puller, v: Value, x: Index) -> Expr | None:
    """Infinities become the largest numbers: a clamp; hidden scores become a huge finite fill."""
    if not v.dtype.is_floating_point:
        return None
    nan, high, low = v.argument(1, "nan"), v.argument(2, "posinf"), v.argument(3, "neginf")
    most = torch.finfo(v.dtype).max
    if high is not None or low is not None:
        return None

    def finite(e: Expr) -> Expr:
        if isinstance(e, Const):
            return Const(0.0 if nan is None else float(nan)) if math.isnan(e.value) else Const(min(max(e.value, -most), most))
        if isinstance(e, Call) and e.op == "where":
            return call("where", e.args[0], finite(e.args[1]), finite(e.args[2]))
        clamped = call("minimum", call("maximum", e, Const(-most)), Const(most))
        return call("where", call("ne", e, e), Const(0.0 if nan is None else float(nan)), clamped)

    return finite(p.operand(v.args[0], x))


def _pow(p, v, x):
    if not v.dtype.is_floating_point or not isinstance(v.args[1], (int, float)):
        return None
    e = p.operand(v.args[0], x)
    by = {2: lambda: call("mul", e, e), 3: lambda: call("mul", call("mul", e, e), e), 0.5: lambda: call("sqrt", e), 1: lambda: e,
          -1: lambda: call("reciprocal", e), -0.5: lambda: call("rsqrt", e)}.get(v.args[1])
    return by() if by else None


def _unary(build):
    return lambda p, v, x: build(p.operand(v.args[0], x)) if v.dtype.is_floating_point else None


def _leaky_relu(p: Puller, v: Value, x: Index) -> Expr:
    e = p.operand(v.args[0], x)
    return call("where", call("gt", e, Const(0.0)), e, call("mul", e, Const(float(v.argument(1, "negative_slope", 0.01)))))


def _elu(p: Puller, v: Value, x: Index) -> Expr | None:
    e = p.operand(v.args[0], x)
    above = call("gt", e, Const(0.0))
    below = call("sub", call("exp", call("where", above, Const(0.0), e)), Const(1.0))  # no overflow in the branch that is not taken
    return call("where", above, e, call("mul", below, Const(float(v.argument(1, "alpha", 1.0))))) if len(v.args) <= 2 else None


def _softplus(p: Puller, v: Value, x: Index) -> Expr:
    e, beta, most = p.operand(v.args[0], x), float(v.argument(1, "beta", 1.0)), float(v.argument(2, "threshold", 20.0))
    scaled = call("mul", e, Const(beta))
    above = call("gt", scaled, Const(most))
    soft = call("truediv", call("log1p", call("exp", call("where", above, Const(most), scaled))), Const(beta))
    return call("where", above, e, soft)


def _gelu(p: Puller, v: Value, x: Index) -> Expr:
    e = p.operand(v.args[0], x)
    if v.kwargs.get("approximate", "none") == "none":
        inner = call("erf", call("mul", e, Const(0.5 ** 0.5)))
    else:
        cubed = call("mul", call("mul", call("mul", e, e), e), Const(0.044715))
        inner = call("tanh", call("mul", call("add", e, cubed), Const((2.0 / math.pi) ** 0.5)))
    return call("mul", call("mul", e, Const(0.5)), call("add", inner, Const(1.0)))


def _triangle(op: str):
    def rule(p: Puller, v: Value, x: Index) -> Expr:
        row, col = p.expr(x[-2]), p.expr(x[-1])
        keep = call("le" if op == "tril" else "ge", call("sub", col, row), p.size(v.argument(1, "diagonal", 0)))
        zero = {BOOL: Const(False), INT: Const(0), FLOAT: Const(0.0)}[kind_of(v.dtype)]
        e = p.operand(v.args[0], x)
        return call("and", keep, e) if e.kind == BOOL else call("where", keep, e, zero)
    return rule


def _gather(p: Puller, source: Value, positions: dict[int, Expr], rest: list[Affine]) -> Expr | None:
    """source[...] with index expressions at some dims, all provably in range.

    Pulled on where those are affine; where they are quotients, as in `mask[i // 64, j // 64]`, a mask or ids are read there.
    """
    index, free = [], iter(rest)
    for d, s in enumerate(source.shape):
        e = positions[d] if d in positions else next(free)
        index.append((p.affine(e) or e) if isinstance(e, Expr) else e)
        if d in positions and not _in_range(index[-1], size(s), p):
            return None
    if all(isinstance(a, Affine) for a in index):
        return p.pull(source, tuple(index))
    if source.dtype.is_floating_point or any(QK in a.leaves for a in index if isinstance(a, Expr)):
        return None
    return p.load(source, [p.expr(a) if isinstance(a, Affine) else a for a in index])


def _in_range(a: Affine | Expr, extent, p: Puller) -> bool:
    """Provably 0 <= a < extent."""
    if isinstance(a, Affine):
        return within(a, extent, p.extents)
    if not isinstance(a, Call) or a.op not in ("floordiv", "mod") or not isinstance(a.args[1], Const) or a.kind != INT or a.args[1].value <= 0:
        return False
    by = a.args[1].value
    if a.op == "mod":
        return isinstance(extent, int) and by <= extent
    inner = p.affine(a.args[0])
    return inner is not None and isinstance(extent, int) and within(inner, extent * by, p.extents)


def _index(p: Puller, v: Value, x: Index) -> Expr | None:
    source, picks = v.args[0], v.args[1]
    given = [d for d, t in enumerate(picks) if t is not None]
    if any(picks[d].dtype == torch.bool for d in given):
        return None
    rank = max(len(picks[d].shape) for d in given)
    front = 0 if given != list(range(given[0], given[-1] + 1)) else given[0]
    own = x[front: front + rank]
    rest = list(x[:front] + x[front + rank:])
    return _gather(p, source, {d: p.operand(picks[d], own) for d in given}, rest)


def _index_select(p, v, x):
    d = v.args[1] % len(v.shape)
    return _gather(p, v.args[0], {d: p.pull(v.args[2], (x[d],))}, list(x[:d] + x[d + 1:]))


def _product(p: Puller, v: Value, x: Index) -> Expr | None:
    """The first product of something over queries with something over keys is the site's dot product; any other is a leaf.

    Neither need vary along its axis: there may be one query only, in decoding.
    """
    left, right = (v.args[position] for position in PRODUCTS[v.name])
    d = Affine.axis("d")
    left_at = broadcast((*x[:-2], x[-2], d), [size(s) for s in left.shape])
    right_at = broadcast((*x[:-2], d, x[-1]), [size(s) for s in right.shape])
    of_left, of_right = (set().union(*(a.axes for a in at)) for at in (left_at, right_at))
    if v in p.leaves or (of_left | of_right) & p.parts.keys():
        return None
    swapped = "j" in of_left or "i" in of_right
    if swapped and ("i" in of_left or "j" in of_right):
        return None
    found = Product(left, left_at, right, right_at, swapped, v)
    if p.product is not None and alike(p.product.value, v):  # the same product, written twice
        found = replace(found, left=p.product.left, right=p.product.right, value=p.product.value)
    if p.product is not None and p.product != found:
        return None
    p.product = found
    p.extents["d"] = head_size(left.shape[-1])
    if v.name not in ("baddbmm.default", "addmm.default"):
        return QK
    beta, alpha = number(v.kwargs.get("beta", 1)), number(v.kwargs.get("alpha", 1))
    dot = call("mul", QK, const(float(alpha)))
    return dot if beta == 0 else p.apply("add", [dot, call("mul", p.operand(v.args[0], x), const(float(beta)))], v.dtype)


def _chosen(p: Puller, v: Value, inside: Expr, there: Callable[[], Expr | None], elsewhere: Callable[[], Expr | None]) -> Expr | None:
    """`there` where `inside` holds, else `elsewhere`; what is nowhere read is not pulled."""
    if isinstance(inside, Const):
        return there() if inside.value else elsewhere()
    a, b = there(), elsewhere()
    return None if a is None or b is None else p.apply("where", [inside, a, b], v.dtype)


def _in_piece(p: Puller, source: Value, at: Index) -> Expr:
    """An element of a piece, read where the index is known to be in it: only loads need the clamp."""
    e = p.pull(source, at)
    for name in (a.single for a in at):
        if name in p.pieces:
            index, start = p.pieces[name]
            e = replaced(e, p.parts[name], p.expr(index + start * -1))
    return e


def _slice_scatter(p: Puller, v: Value, x: Index) -> Expr | None:
    """Written by `t[..., a:b] = source`: the source inside the slice, what was there outside."""
    base, source = v.args[0], v.args[1]
    d = v.argument(2, "dim", 0) % len(v.shape)
    start, step = v.argument(3, "start"), v.argument(5, "step", 1)
    start = 0 if start is None else size(start)
    if step != 1 or not isinstance(start, int):
        return None
    start = size(max(start + v.shape[d], 0)) if start < 0 else start
    inside, at = p.piece(x[d], start, size(source.shape[d]))
    return _chosen(p, v, inside, lambda: _in_piece(p, source, x[:d] + (at,) + x[d + 1:]), lambda: p.pull(base, x))


def _select_scatter(p: Puller, v: Value, x: Index) -> Expr | None:
    """Written by `t[..., k] = source`."""
    d, k = v.args[2] % len(v.shape), size(v.args[3])
    if isinstance(k, int) and k < 0:
        k = size(v.shape[d]) + k
    inside, _ = p.piece(x[d], k, 1)
    return _chosen(p, v, inside, lambda: p.pull(v.args[1], x[:d] + x[d + 1:]), lambda: p.pull(v.args[0], x))


def _index_put(p: Puller, v: Value, x: Index) -> Expr | None:
    """Written by `t[mask] = number` with a Boolean mask over some dims, or by `t[..., rows, rows + 1] = number` with ranges of positions."""
    base, picks, value = v.args[:3]
    given = [d for d, t in enumerate(picks) if t is not None]
    if v.argument(3, "accumulate", False) or any(not same(size(s), 1) for s in value.shape):
        return None
    if len(given) == 1 and picks[given[0]].dtype == torch.bool:
        mask = picks[given[0]]
        inside = cast_simplified(p.pull(mask, x[given[0]: given[0] + len(mask.shape)]), BOOL)
    elif all(picks[d].dtype != torch.bool and len(picks[d].shape) == 1 and same(size(picks[d].shape[0]), size(picks[given[0]].shape[0])) for d in given):
        step = f"step of {v.number}"
        p.extents[step] = size(picks[given[0]].shape[0])
        at = [p.affine(p.pull(picks[d], (Affine.axis(step),))) for d in given]
        if any(a is None or a.terms != Affine.axis(step).terms or not within(a, size(base.shape[d]), p.extents) for a, d in zip(at, given)):
            return None
        inside, first = p.piece(x[given[0]], at[0].constant, p.extents[step])[0], x[given[0]] + at[0].constant * -1
        for a, d in zip(at[1:], given[1:]):
            inside = call("and", inside, call("eq", p.expr(x[d] + a.constant * -1), p.expr(first)))
    else:
        return None
    return p.apply("where", [inside, p.pull(value, (Affine(),) * len(value.shape)), p.pull(base, x)], v.dtype)


def _diagonal_dims(v: Value, first: int) -> tuple[int, int, int]:
    """(dim of rows, dim of columns, column minus row)"""
    rank = len(v.args[0].shape)
    return v.argument(first + 1, "dim1", 0) % rank, v.argument(first + 2, "dim2", 1) % rank, v.argument(first, "offset", 0)


def _diagonal(p: Puller, v: Value, x: Index) -> Expr:
    row, column, offset = _diagonal_dims(v, 1)
    at = list(x[:-1])
    for d in sorted((row, column)):
        at.insert(d, x[-1] + (max(offset, 0) if d == column else max(-offset, 0)))
    return p.pull(v.args[0], tuple(at))


def _diagonal_scatter(p: Puller, v: Value, x: Index) -> Expr | None:
    """Written by `t.diagonal(…).fill_(number)` and the like."""
    base, source = v.args[:2]
    row, column, offset = _diagonal_dims(v, 2)
    inside, at = p.piece(x[row], max(-offset, 0), size(source.shape[-1]))
    inside = call("and", inside, call("eq", p.expr(x[column] + max(-offset, 0)), p.expr(x[row] + max(offset, 0))))
    rest = tuple(a for d, a in enumerate(x) if d not in (row, column))
    return _chosen(p, v, inside, lambda: _in_piece(p, source, (*rest, at)), lambda: p.pull(base, x))


def _fill(p: Puller, v: Value, x: Index) -> Expr:
    return rounded(cast(p.operand(v.args[1], ()), kind_of(v.dtype)), v.dtype)


def _cat(p: Puller, v: Value, x: Index) -> Expr | None:
    """Tensors side by side; what is computed by products, or reads float tensors, stays one tensor."""
    d = v.argument(1, "dim", 0) % len(v.shape)
    if len(v.args[0]) > 4 or v.dtype.is_floating_point and p.has_product(v):
        return None

    def pick(tensors, start) -> Expr | None:
        here = size(tensors[0].shape[d])
        inside, at = p.piece(x[d], start, here)
        there = lambda: _in_piece(p, tensors[0], x[:d] + (at,) + x[d + 1:])
        return there() if len(tensors) == 1 else _chosen(p, v, inside, there, lambda: pick(tensors[1:], start + here))

    e = pick([t for t in v.args[0] if not same(size(t.shape[d]), 0)], 0)
    return None if e is None or any(load.kind == FLOAT for load in e.loads) else e


def _pad(p: Puller, v: Value, x: Index) -> Expr | None:
    """A constant around a tensor."""
    source, widths = v.args[0], [size(w) for w in v.args[1]]
    inside, at = TRUE, list(x)
    for n in range(len(widths) // 2):
        d = len(x) - 1 - n
        here, at[d] = p.piece(x[d], widths[2 * n], size(source.shape[d]))
        inside = call("and", inside, here)
    fill = cast(const(v.argument(2, "value", 0)), kind_of(v.dtype))
    return _chosen(p, v, inside, lambda: _in_piece(p, source, tuple(at)), lambda: fill)


RULES = {
    "full.default": _constant(lambda v: v.args[1]), "full_like.default": _constant(lambda v: v.args[1]),
    "new_full.default": _constant(lambda v: v.args[2]), "scalar_tensor.default": _constant(lambda v: v.args[0]),
    **{f"{n}.default": _constant(lambda v: 0) for n in ("zeros", "zeros_like", "new_zeros", "zero")},
    **{f"{n}.default": _constant(lambda v: 1) for n in ("ones", "ones_like", "new_ones")},
    "arange.default": _arange, "arange.start": _arange, "arange.start_step": _arange,
    "_to_copy.default": _to_copy, "masked_fill.Scalar": _masked_fill, "masked_fill.Tensor": _masked_fill,
    "where.self": _where, "where.ScalarSelf": _where, "where.ScalarOther": _where, "where.Scalar": _where,
    "rsub.Scalar": _rsub, "rsub.Tensor": _rsub, "div.Tensor_mode": _div_mode, "div.Scalar_mode": _div_mode,
    "clamp.default": _clamp, "clamp_min.default": _clamp,
    "floor.default": _rounded_to_integer("floor"), "ceil.default": _rounded_to_integer("ceil"),
    "pow.Tensor_Scalar": _pow, "square.default": _unary(lambda e: call("mul", e, e)),
    "nan_to_num.default": _nan_to_num, "leaky_relu.default": _leaky_relu, "elu.default": _elu, "softplus.default": _softplus, "gelu.default": _gelu, "hardtanh.default": _hardtanh,
    "relu.default": _unary(lambda e: call("where", call("gt", e, Const(0.0)), e, Const(0.0))),
    "silu.default": _unary(lambda e: call("mul", e, call("sigmoid", e))),
    "slice_scatter.default": _slice_scatter, "select_scatter.default": _select_scatter, "index_put.default": _index_put,
    "diagonal.default": _diagonal, "diagonal_scatter.default": _diagonal_scatter, "fill.Scalar": _fill, "fill.Tensor": _fill,
    "cat.default": _cat, "constant_pad_nd.default": _pad,
    "tril.default": _triangle("tril"), "triu.default": _triangle("triu"),
    "index.Tensor": _index, "index_select.default": _index_select,
    **{name: _product for name in PRODUCTS},
}
