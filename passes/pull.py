"""Pull a symbolic index through the graph: the scalar program that computes one element of a value.

`Puller.pull(value, index)` answers "what is value[index]?" by walking up through views (index maps), pointwise ops
(`flashfx.ops` rows), creations (`arange`, `full`, …) and gathers by computable indices. What it does not know is a leaf: a
load of that value at that index. A leaf is never an error; it is only a tensor that the kernel will read.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, field

import sympy
import torch

from flashfx.expr import BOOL, FLOAT, INT, QK, Call, Const, Expr, Load, Var, call, cast, const
from flashfx.ops import BY_ATEN

from .index import Affine, Index, NotAffine, Size, SplitAxis, broadcast, number, same, size
from .values import Value
from .views import step_through, within

RANDOM = torch.Tag.nondeterministic_seeded


def kind_of(dtype: torch.dtype) -> str:
    return BOOL if dtype == torch.bool else FLOAT if dtype.is_floating_point else INT


def round_to(c: float, dtype: torch.dtype) -> float:
    """The constant as a tensor of `dtype` would hold it, where that is infinite: float32's finfo.min is -inf in bfloat16.

    Ordinary constants stay as they are; kernels compute in float32 whatever the dtype.
    """
    if not dtype.is_floating_point:
        return c
    held = float(torch.tensor(c, dtype=torch.float64).to(dtype))
    return held if math.isinf(held) else float(c)


@dataclass
class Puller:
    """extents: of every axis by name, i and j included. names: Vars for symbolic sizes, filled as they are met.

    products: the matrix product that is the dot product of the site, once met: (left, left index, right, right index, the product).
    loads: leaf name -> value.
    """

    extents: dict[str, Size]
    constants: dict[Value, torch.Tensor]
    names: dict[sympy.Expr, str] = field(default_factory=dict)
    product: tuple | None = None
    loads: dict[str, Value] = field(default_factory=dict)
    memo: dict = field(default_factory=dict)

    # ------------------------------------------------------------------ sizes and indices
    def size(self, s) -> Expr:
        s = size(s)
        if isinstance(s, int):
            return Const(s)
        if s in self.names:
            return Var(self.names[s])
        if isinstance(s, sympy.Add):
            out = self.size(s.args[0])
            for a in s.args[1:]:
                out = call("add", out, self.size(a))
            return out
        if isinstance(s, sympy.Mul):
            out = self.size(s.args[0])
            for a in s.args[1:]:
                out = call("mul", out, self.size(a))
            return out
        self.names[s] = f"s{len(self.names)}"
        return Var(self.names[s])

    def expr(self, a: Affine) -> Expr:
        """Indices first, the constant last; `i - 3` rather than `i + -3`."""
        out: Expr = Const(0)
        for name, c in sorted(a.terms, key=lambda t: isinstance(t[1], int) and t[1] < 0):
            if isinstance(c, int) and c < 0:
                term = call("mul", Var(name), Const(-c))
                out = call("neg", term) if out == Const(0) else call("sub", out, term)
            else:
                out = call("add", out, call("mul", Var(name), self.size(c)))
        if isinstance(a.constant, int) and a.constant < 0 and out != Const(0):
            return call("sub", out, Const(-a.constant))
        return call("add", out, self.size(a.constant))

    def affine(self, e: Expr) -> Affine | None:
        """The affine form of an integer expression, or None."""
        if isinstance(e, Const) and e.kind == INT:
            return Affine((), e.value)
        if isinstance(e, Var):
            if e.name in self.extents:
                return Affine.axis(e.name)
            return next((Affine((), s) for s, name in self.names.items() if name == e.name), None)
        if isinstance(e, Call) and e.op in ("add", "sub", "mul", "neg"):
            parts = [self.affine(a) for a in e.args]
            if any(p is None for p in parts):
                return None
            if e.op == "neg":
                return parts[0] * -1
            if e.op == "add":
                return parts[0] + parts[1]
            if e.op == "sub":
                return parts[0] + parts[1] * -1
            a, b = parts if not parts[1].terms else parts[::-1]
            return a * b.constant if not b.terms else None
        return None

    # ------------------------------------------------------------------ values
    def pull(self, v: Value, x: Index) -> Expr:
        key = (v, x)
        if key not in self.memo:
            self.memo[key] = self._pull(v, x)
        return self.memo[key]

    def leaf(self, v: Value, x: Index) -> Expr:
        name = f"v{v.number}"
        self.loads[name] = v
        return Load(name, tuple(self.expr(a) for a in x), kind_of(v.dtype))

    def _pull(self, v: Value, x: Index) -> Expr:
        x = tuple(Affine() if same(size(s), 1) else a for s, a in zip(v.shape, x))
        data = self.constants.get(v)
        if data is not None and data.numel() == 1:
            return Const(data.item())
        try:
            through = step_through(v, x, self.extents)
        except NotAffine:
            return self.leaf(v, x)
        except SplitAxis as split:
            if split.axis in ("i", "j"):
                return self.leaf(v, x)
            raise
        if through is not None:
            return self.pull(*through)
        rule = _RULES.get(v.name)
        result = rule(self, v, x) if rule is not None else self._pointwise(v, x)
        if result is None or (v.dtype.is_floating_point and self._keeps_whole(v, result)):
            return self.leaf(v, x)
        return result

    def _keeps_whole(self, v: Value, e: Expr) -> bool:
        """Do not move float arithmetic on tensors into the kernel when reading its result is no dearer.

        Conditions on indices, or broadcasts that only the kernel can avoid, are worth moving; `16 * sigmoid(table)` is not.
        """
        if QK in e.leaves or not isinstance(e, Call):
            return False
        loads = e.loads
        if not loads or any(isinstance(leaf, Var) for leaf in e.leaves) or any(load.kind != FLOAT for load in loads):
            return False
        return any(all(same(size(a), size(b)) for a, b in zip(self.loads[load.name].shape[::-1], v.shape[::-1]))
                   and len(self.loads[load.name].shape) >= len([s for s in v.shape if not same(size(s), 1)]) for load in loads)

    def operand(self, v, x: Index) -> Expr:
        """An argument of a pointwise op: a value broadcast to the result, or a number."""
        if isinstance(v, Value):
            return self.pull(v, broadcast(x, [size(s) for s in v.shape]))
        if isinstance(v, (torch.SymInt, sympy.Expr)):
            return self.size(v)
        if isinstance(v, (bool, int, float, torch.SymFloat)):
            return Const(number(v))
        raise NotAffine(f"{v!r} is no scalar")

    def _pointwise(self, v: Value, x: Index) -> Expr | None:
        row = BY_ATEN.get(v.name)
        if row is None:
            return None
        alpha = v.kwargs.get("alpha", 1)
        try:
            args = [self.operand(a, x) for a in v.args[: row.arity]]
        except NotAffine:
            return None
        if len(args) != row.arity or (v.name.startswith("bitwise") and v.dtype != torch.bool):
            return None
        if alpha != 1:
            args[1] = call("mul", args[1], const(alpha))
        return self.apply(row.name, args, v.dtype)

    def apply(self, op: str, args: list[Expr], dtype: torch.dtype) -> Expr:
        """`op` with PyTorch's promotions made explicit; constants rounded to the result's dtype."""
        result = kind_of(dtype)
        if op in ("and", "or", "xor", "not"):
            return simplified(op, *(cast(a, BOOL) for a in args))
        if op in ("lt", "le", "gt", "ge", "eq", "ne"):
            kind = FLOAT if any(a.kind == FLOAT for a in args) else INT
            return simplified(op, *(cast(a, kind) for a in args))
        if result == BOOL and op in ("mul", "add", "minimum", "maximum"):
            return simplified("and" if op in ("mul", "minimum") else "or", *(cast(a, BOOL) for a in args))
        skip = 1 if op == "where" else 0
        moved = list(args[:skip]) + [_rounded(cast(a, result), dtype) for a in args[skip:]]
        return simplified(op, *moved)


def _rounded(e: Expr, dtype: torch.dtype) -> Expr:
    return Const(round_to(e.value, dtype)) if isinstance(e, Const) and e.kind == FLOAT else e


def _choice(e: Expr) -> tuple[Expr, Const, Const] | None:
    """(condition, then, else) where `e` is one of two constants by a condition."""
    if isinstance(e, Call) and e.op == "where" and isinstance(e.args[1], Const) and isinstance(e.args[2], Const):
        return e.args
    if isinstance(e, Call) and e.op in ("to_float", "to_int") and e.args[0].kind == BOOL:
        one, zero = (Const(1.0), Const(0.0)) if e.op == "to_float" else (Const(1), Const(0))
        return e.args[0], one, zero
    return None


def simplified(op: str, *args: Expr) -> Expr:
    """`call`, with an op on one of two constants made a choice of two results.

    before -> after: (1.0 - to_float(c)) * C -> where(c, 0.0, C); to_bool(where(c, 0.0, 1.0)) -> ~c
    """
    open_ = [a for a in args if not isinstance(a, Const)]
    if len(open_) == 1 and op != "where" and (parts := _choice(open_[0])) and not (op.startswith("to_") and parts[1].kind == BOOL):
        branch = [call(op, *(parts[k] if a is open_[0] else a for a in args)) for k in (1, 2)]
        if all(isinstance(b, Const) for b in branch):
            if branch[0].kind == BOOL:
                if branch[0] == branch[1]:
                    return branch[0]
                return parts[0] if branch[0].value else call("not", parts[0])
            return call("where", parts[0], *branch)
    return call(op, *args)


# ---------------------------------------------------------------------------------------------------- rules by op

def _constant(value) -> callable:
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


def _to_copy(p: Puller, v: Value, x: Index) -> Expr:
    e = cast_simplified(p.operand(v.args[0], x), kind_of(v.dtype))
    if (parts := _choice(e)) and v.dtype.is_floating_point:
        return call("where", parts[0], _rounded(parts[1], v.dtype), _rounded(parts[2], v.dtype))
    return _rounded(e, v.dtype)


def cast_simplified(e: Expr, kind: str) -> Expr:
    return e if e.kind == kind else simplified(f"to_{kind}", e)


def _masked_fill(p, v, x):
    fill = p.operand(v.args[2], x)
    return p.apply("where", [cast(p.operand(v.args[1], x), BOOL), fill, p.operand(v.args[0], x)], v.dtype)


def _where(p, v, x):
    c, a, b = (p.operand(a, x) for a in v.args)
    return p.apply("where", [cast(c, BOOL), a, b], v.dtype)


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
    for op, bound in (("maximum", v.argument(1, "min")), ("minimum", v.argument(2, "max"))):
        if bound is not None:
            e = p.apply(op, [e, p.operand(bound, x)], v.dtype)
    return e


def _pow(p, v, x):
    if not v.dtype.is_floating_point or not isinstance(v.args[1], (int, float)):
        return None
    e = p.operand(v.args[0], x)
    by = {2: lambda: call("mul", e, e), 3: lambda: call("mul", call("mul", e, e), e), 0.5: lambda: call("sqrt", e), 1: lambda: e,
          -1: lambda: call("reciprocal", e), -0.5: lambda: call("rsqrt", e)}.get(v.args[1])
    return by() if by else None


def _unary(build):
    return lambda p, v, x: build(p.operand(v.args[0], x)) if v.dtype.is_floating_point else None


def _triangle(op: str):
    def rule(p: Puller, v: Value, x: Index) -> Expr:
        row, col = p.expr(x[-2]), p.expr(x[-1])
        keep = call("le" if op == "tril" else "ge", call("sub", col, row), p.size(v.argument(1, "diagonal", 0)))
        zero = {BOOL: Const(False), INT: Const(0), FLOAT: Const(0.0)}[kind_of(v.dtype)]
        e = p.operand(v.args[0], x)
        return call("and", keep, e) if e.kind == BOOL else call("where", keep, e, zero)
    return rule


def _gather(p: Puller, source: Value, positions: dict[int, Expr], rest: list[Affine]) -> Expr | None:
    """source[...] with index expressions at some dims; pulled on where those are affine and provably in range."""
    index, free = [], iter(rest)
    for d, s in enumerate(source.shape):
        a = p.affine(positions[d]) if d in positions else next(free)
        if a is None or (d in positions and not within(a, size(s), p.extents)):
            return None
        index.append(a)
    return p.pull(source, tuple(index))


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
    """The first matrix product met is the site's dot product; any other is a leaf."""
    left, right = (v.args[0], v.args[1]) if v.name in ("bmm.default", "mm.default") else (v.args[1], v.args[2])
    if {x[-2].single, x[-1].single} != {"i", "j"}:
        return None
    d = Affine.axis("d")
    found = (left, (*x[:-2], x[-2], d), right, (*x[:-2], d, x[-1]), v)
    if p.product is not None and p.product != found:
        return None
    p.product = found
    p.extents["d"] = size(left.shape[-1])
    if v.name in ("bmm.default", "mm.default"):
        return QK
    beta, alpha = number(v.kwargs.get("beta", 1)), number(v.kwargs.get("alpha", 1))
    dot = call("mul", QK, const(float(alpha)))
    if beta == 0:
        return dot
    return call("add", dot, call("mul", p.operand(v.args[0], x), const(float(beta))))


_RULES = {
    "full.default": _constant(lambda v: v.args[1]), "full_like.default": _constant(lambda v: v.args[1]),
    "new_full.default": _constant(lambda v: v.args[2]), "scalar_tensor.default": _constant(lambda v: v.args[0]),
    **{f"{n}.default": _constant(lambda v: 0) for n in ("zeros", "zeros_like", "new_zeros")},
    **{f"{n}.default": _constant(lambda v: 1) for n in ("ones", "ones_like", "new_ones")},
    "arange.default": _arange, "arange.start": _arange, "arange.start_step": _arange,
    "_to_copy.default": _to_copy, "masked_fill.Scalar": _masked_fill, "masked_fill.Tensor": _masked_fill,
    "where.self": _where, "where.ScalarSelf": _where, "where.ScalarOther": _where, "where.Scalar": _where,
    "rsub.Scalar": _rsub, "rsub.Tensor": _rsub, "div.Tensor_mode": _div_mode, "div.Scalar_mode": _div_mode,
    "clamp.default": _clamp, "clamp_min.default": _clamp,
    "pow.Tensor_Scalar": _pow, "square.default": _unary(lambda e: call("mul", e, e)),
    "relu.default": _unary(lambda e: call("maximum", e, Const(0.0))),
    "silu.default": _unary(lambda e: call("mul", e, call("sigmoid", e))),
    "tril.default": _triangle("tril"), "triu.default": _triangle("triu"),
    "index.Tensor": _index, "index_select.default": _index_select,
    "bmm.default": _product, "mm.default": _product, "baddbmm.default": _product, "addmm.default": _product,
}
