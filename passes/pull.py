"""Pull a symbolic index through the graph: the scalar program that computes one element of a value.

`Puller.pull(value, index)` answers "what is value[index]?" by walking up through views (index maps), pointwise ops
(`flashfx.ops` rows), creations (`arange`, `full`, …) and gathers by computable indices. What it does not know is a leaf: a
load of that value at that index. A leaf is never an error; it is only a tensor that the kernel will read.
"""
from __future__ import annotations

from dataclasses import dataclass, field

import sympy
import torch

from flashfx.expr import BOOL, FALSE, FLOAT, INT, QK, TRUE, Call, Const, Expr, Load, Var, call, cast, conjunction, const, substitute
from flashfx.ops import BY_ATEN, COMPARISONS, OPS

from .classes import could_stand
from .constants import closed_form, dim
from .find import has_product_above
from .held import Held, is_computed
from .index import Affine, Index, NotAffine, Size, SplitAxis, at_least, broadcast, is_no_larger, number, quotient, same, size
from .relative import gathered
from .rounding import Rounding
from .rules import RULES, Product
from .scalars import added, cast_simplified, is_bit, kind_of, rounded, simplified
from .values import Refused, Value, upstream
from .views import step_through, within

WRITTEN = frozenset({"slice_scatter.default", "select_scatter.default", "index_put.default", "diagonal_scatter.default"})
FEW_PIECES, MOST_PIECES = 4, 16
"""Pieces of a tensor up to which nothing says what it is better than they do, and up to which the kernel asks which of them an element is in."""
DEEPEST = 100
"""Values one above the other that are looked through; each takes half a dozen of Python's stack of a thousand frames."""
MOST_NODES = 2 ** 13
"""Of a scalar program, written out: `x = x * sigmoid(x)` has twice as many each time."""


@dataclass
class Puller:
    """extents: of every axis by name, i and j included. names: Vars for symbolic sizes, filled as they are met.

    product: the matrix product that is the dot product of the site, once met.
    loads: leaf name -> value.
    dtypes: in which dtype a sum or product was formed.
    grad: is gradient mode on at the site's output?
    splits: the first view met that splits queries or keys, by axis.
    held: what can still be read where the op will stand; None: everything.
    parts: axes that are computed from others: the quotient or the remainder of one, where a view splits it, or a position clamped to a piece.
    halves: quotient axis -> (the axis, what it is divided by, its remainder). pieces: clamped axis -> (the index, where the piece starts).
    parted: may views above the scores split queries or keys? Otherwise `splits` asks for other axes of the output first.
    leaves: products that are not the site's dot product.
    named: leaf name -> what the spec calls a tensor that is read at constants.
    states: what a tensor was before pieces were written that have been met. depth: how many values are being looked through.
    apart: may a tensor of pairs that views join be read as its parts, where these can stand in q and k? stood: has one been?
    """

    extents: dict[str, Size]
    constants: dict[Value, torch.Tensor]
    names: dict[sympy.Expr, str] = field(default_factory=dict)
    product: Product | None = None
    loads: dict[str, Value] = field(default_factory=dict)
    memo: dict = field(default_factory=dict)
    dtypes: dict[Expr, torch.dtype] = field(default_factory=dict)
    rounding: Rounding = field(default_factory=Rounding)
    grad: bool = True
    held: Held | None = None
    splits: dict[str, SplitAxis] = field(default_factory=dict)
    parts: dict[str, Expr] = field(default_factory=dict)
    halves: dict[str, tuple[str, Size, str]] = field(default_factory=dict)
    pieces: dict[str, tuple[Affine, Size]] = field(default_factory=dict)
    parted: bool = False
    leaves: frozenset[Value] = frozenset()
    named: dict[str, str] = field(default_factory=dict)
    states: set[Value] = field(default_factory=set)
    depth: int = 0
    apart: bool = True
    stood: bool = False

    has_product = staticmethod(has_product_above)

    # ------------------------------------------------------------------ sizes and indices
    def size(self, s) -> Expr:
        s = size(s)
        if isinstance(s, int):
            return Const(s)
        if s in self.names:
            return Var(self.names[s])
        if isinstance(s, (sympy.Add, sympy.Mul)):
            out, *rest = map(self.size, s.args)
            for a in rest:
                out = call("add" if isinstance(s, sympy.Add) else "mul", out, a)
            return out
        self.names[s] = f"s{len(self.names)}"
        return Var(self.names[s])

    def expr(self, a: Affine) -> Expr:
        """Indices first, the constant last; `i - 3` rather than `i + -3`."""
        if any(name in self.parts for name in a.axes):
            return self._with_parts(a)
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

    def _with_parts(self, a: Affine) -> Expr:
        merged = self.merged(a)
        if merged != a:
            return self.expr(merged)
        out = self.size(a.constant)
        for name, c in a.terms:
            out = call("add", out, call("mul", self.parts.get(name, Var(name)), self.size(c)))
        return out

    def merged(self, a: Affine) -> Affine:
        """before -> after: 4 * (j / 4) + j % 4 -> j"""
        for outer, (axis, by, inner) in list(self.halves.items())[::-1]:
            terms = dict(a.terms)
            if outer in terms and same(terms[outer], terms.get(inner, 0) * by):
                left = Affine(tuple((n, c) for n, c in terms.items() if n not in (outer, inner)), a.constant)
                a = left + Affine.axis(axis) * terms[inner]
        return a

    def piece(self, a: Affine, start: Size, extent: Size) -> tuple[Expr, Affine]:
        """(is index `a` in start..start + extent? , where in that piece it is); clamped to the piece where it is not."""
        inner = a + start * -1
        if within(inner, extent, self.extents):
            return TRUE, inner
        lo, hi = inner.bounds(self.extents) or (-1, extent)
        if same(extent, 0) or at_least(lo, extent) or at_least(-1, hi):
            return FALSE, Affine()
        inside = conjunction([*([] if at_least(lo, 0) else [call("ge", self.expr(a), self.size(start))]),
                              *([] if at_least(extent - 1, hi) else [call("lt", self.expr(a), self.size(start + extent))])])
        name = f"{self.expr(inner)} of {extent}"
        clamped = self.expr(inner)
        clamped = clamped if at_least(lo, 0) else call("maximum", clamped, 0)
        self.parts[name] = clamped if at_least(extent - 1, hi) else call("minimum", clamped, self.size(extent - 1))
        self.extents[name], self.pieces[name] = extent, (a, start)
        return inside, Affine.axis(name)

    def _whole(self, a: Affine, extent: Size) -> Affine:
        """An index into a dim of `extent`: halves joined, and the position in a piece taken back to the index that it came from."""
        a = self.merged(a)
        if len(a.terms) == 1 and a.terms[0][1] == 1 and (found := self.pieces.get(a.terms[0][0])) is not None:
            index, start = found
            if same(a.constant, start) and within(index, extent, self.extents):
                return index
        return a

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
            self.depth += 1
            try:
                e = self._pull(v, x) if self.depth <= DEEPEST else None
            finally:
                self.depth -= 1
            if e is None or e.nodes > MOST_NODES:
                e = self._too_long(v, x, e)
            if not self.rounding.fits(e, v, self.extents, self.loads):
                e = self.leaf(v, x)
            self.memo[key] = e
        return self.memo[key]

    def _too_long(self, v: Value, x: Index, e: Expr | None) -> Expr:
        """In place of a program that nothing here could handle in time: the tensor, as the model computes it. e: None where too many steps lead to it."""
        scored = has_product_above(v) if e is None else QK in e.leaves
        if scored or self.held is not None and not self.held.can(v):
            found = f"more than {DEEPEST} operations one after the other" if e is None else f"{e.nodes} operations, written out, more than {MOST_NODES},"
            raise Refused(f"{found} make one element of the scores or the mask", v, "work out first, as one tensor, what does not depend on the scores, and "
                          "use fewer steps: a value that is used twice counts twice, and again in all that is made of it")
        return self.leaf(v, x)

    def leaf(self, v: Value, x: Index) -> Expr:
        return self.load(v, [self.expr(a) for a in x])

    def load(self, v: Value, index: list[Expr]) -> Expr:
        """`v` at computed positions, all within it; a constant tensor as its formula, where it has one."""
        if (closed := self._closed(v, index)) is not None:
            return closed
        name = f"v{v.number}"
        self.loads[name] = v
        return Load(name, tuple(index), kind_of(v.dtype))

    def _closed(self, v: Value, index: list[Expr]) -> Expr | None:
        """The formula of a constant tensor over queries and keys, where it has one."""
        if self.held is None or not any({"i", "j"} & e.variables for e in index):
            return None
        closed = closed_form(v, self.held.vg)
        return None if closed is None else substitute(closed, {dim(d): e for d, e in enumerate(index)})

    def _pull(self, v: Value, x: Index) -> Expr:
        x = tuple(Affine() if same(size(s), 1) else a for s, a in zip(v.shape, x))
        if self.grad and v.stops_gradient:
            e = self._element(v, x)
            if QK in e.leaves:
                raise gradient_ends(v)
            return self.leaf(v, x)
        return self._element(v, x)

    def _element(self, v: Value, x: Index) -> Expr:
        data = self.constants.get(v)
        if data is not None and data.numel() == 1 and not data.requires_grad:
            return Const(data.item())
        try:
            through = step_through(v, x, self.extents)
        except NotAffine:
            return self.leaf(v, x)
        except SplitAxis as split:
            if split.axis in ("i", "j") or split.axis in self.parts:
                beside = self._is_beside(v)
                apart = self.parted or split.axis in self.parts or beside or not has_product_above(v)
                if apart and quotient(self.extents[split.axis], split.inner) is not None:
                    e = self._element(v, self._split(x, split))
                    return self.leaf(v, x) if self._joined(v, e, beside) else e
                self.splits.setdefault(split.axis, split)
                return self.leaf(v, x)
            raise
        if through is not None:
            e = self.pull(through[0], tuple(self._whole(a, size(s)) for a, s in zip(through[1], through[0].shape)))
            return self.leaf(v, x) if (self._is_gone(e) or self._skews(v, x, e)) and self.held.can(v) else e
        if v.name in WRITTEN and (whole := self._written(v, x)) is not None:
            return whole
        rule = RULES.get(v.name)
        result = rule(self, v, x) if rule is not None else self._pointwise(v, x)
        result = result if result is not None else gathered(self, v, x)
        if result is not None and result.loads and (closed := self._closed(v, [self.expr(a) for a in x])) is not None:
            return closed
        if result is None or (v.dtype.is_floating_point and self._keeps_whole(v, result)) or self._is_gone(result) and self.held.can(v):
            return self.leaf(v, x)
        return result

    def _written(self, v: Value, x: Index) -> Expr | None:
        """A tensor that is put together of more than a few pieces: by its formula if it has one; read if there are many, a condition each (a loop over rows)."""
        if v in self.states or has_product_above(v):
            return None
        states = [v]
        while states[-1].args[0].name in WRITTEN:
            states.append(states[-1].args[0])
        self.states.update(states[1:])
        if len(states) <= FEW_PIECES:
            return None
        if (closed := self._closed(v, [self.expr(a) for a in x])) is not None:
            return closed
        return self.leaf(v, x) if len(states) > MOST_PIECES and (self.held is None or self.held.can(v)) else None

    def _is_gone(self, e: Expr) -> bool:
        """Does it read a tensor that is changed in place before the op can? (`positional *= mask`: read the product instead.)"""
        return self.held is not None and QK not in e.leaves and any(not self.held.can(self.loads[load.name]) for load in e.loads)

    def _skews(self, v: Value, x: Index, e: Expr) -> bool:
        """Does a view, of no smaller a tensor, shift rows by one another, `rel[b, i * 2047 + j + 1023]`? What it yields has a place for each pair, and a gradient."""
        mixed = self.held is not None and isinstance(e, Load) and any({"i", "j"} <= a.variables for a in e.index)
        return mixed and not any({"i", "j"} <= a.axes for a in x) and is_no_larger(v.shape, self.loads[e.name].shape)

    def _is_beside(self, v: Value) -> bool:
        """Does a product above `v` have nothing to do with the site's own, which is known?"""
        return self.apart and self.product is not None and has_product_above(v) and (self.product.value is None or self.product.value not in upstream(v))

    def _joined(self, v: Value, e: Expr, beside: bool) -> bool:
        """Is what a view joins of parts read as it joins them? An element for every pair lies as TMA wants it there. What products yield is read apart only
        where it can stand in q and k."""
        if QK in e.leaves or not e.loads or self.held is not None and not self.held.can(v):
            return False
        if any(is_no_larger(v.shape, self.loads[load.name].shape) for load in e.loads):
            return True
        self.stood |= (stands := beside and could_stand(e, self.loads, self.extents["d"], self.extents["j"], self.product.left.dtype))
        return beside and not stands

    def _keeps_whole(self, v: Value, e: Expr) -> bool:
        """Do not move float arithmetic on tensors into the kernel when reading its result is no dearer.

        Conditions on indices, or broadcasts that only the kernel can avoid, are worth moving; `16 * sigmoid(table)` is not. Of tensors with an element
        for every pair it is dear only where nothing else makes them anew: `bias * scale` of a parameter, unless there are gradients. dS is that of a
        sum that is read; what the kernel works out may need a pass over all pairs for it. And what is read then lies as TMA wants it, where relative
        positions that views shift (Transformer-XL's, Conformers') do not.
        """
        if QK in e.leaves or not isinstance(e, Call) or _names_positions(e):
            return False
        loads = e.loads
        if not loads or any(load.kind != FLOAT for load in loads):
            return False
        read = [self.loads[load.name] for load in loads]
        if not any(load.variables for load in loads):
            return any(all(same(size(a), size(b)) for a, b in zip(t.shape[::-1], v.shape[::-1]))
                       and len(t.shape) >= len([s for s in v.shape if not same(size(s), 1)]) for t in read)
        if not all({"i", "j"} <= load.variables or not load.variables for load in loads) or not (self.held is None or self.held.can(v)):
            return False
        pairs = [t for t, load in zip(read, loads) if load.variables]
        fits = all(is_no_larger(v.shape, t.shape) for t in pairs) and v.dtype.itemsize <= max(t.dtype.itemsize for t in pairs)
        return fits and (all(map(is_computed, pairs)) or self.grad and any(t.reaches_parameters(through_stops=False) for t in pairs))

    def _split(self, x: Index, split: SplitAxis) -> Index:
        """The index with i or j (or a part of it) as quotient and remainder: a mask may be told by the block of a key, `mask[i // 64, j // 64]`."""
        outer, inner = f"{split.axis}/{split.inner}", f"{split.axis}%{split.inner}"
        whole = self.parts.get(split.axis, Var(split.axis))
        self.parts[outer], self.parts[inner] = call("floordiv", whole, self.size(split.inner)), call("mod", whole, self.size(split.inner))
        self.halves[outer] = (split.axis, split.inner, inner)
        extent = self.extents[split.axis]
        self.extents[outer], self.extents[inner] = quotient(extent, split.inner), split.inner
        replaced = Affine.axis(outer) * split.inner + Affine.axis(inner)
        return tuple(Affine(tuple(t for t in a.terms if t[0] != split.axis), a.constant) + replaced * dict(a.terms)[split.axis]
                     if split.axis in a.axes else a for a in x)

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
        name = row.name
        if v.name.startswith("bitwise") and v.dtype != torch.bool:
            if name != "not" and all(map(is_bit, args)):
                return cast_simplified(simplified(name, *(cast_simplified(a, BOOL) for a in args)), INT)
            name = f"bit_{name}"
        if len(args) != row.arity or name not in OPS:
            return None
        if row.result == "bool" and any(a.kind == FLOAT for a in args) and not any(QK in a.leaves for a in args):
            args = [a if self.rounding.compares(a, args[:n] + args[n + 1:]) else self._computed(source, x) for n, (a, source) in enumerate(zip(args, v.args))]
            if None in args:
                return None
        if alpha != 1:
            args[1] = call("mul", args[1], const(alpha))
        return self.apply(name, args, v.dtype)

    def _computed(self, v: Value, x: Index) -> Expr | None:
        """One side of a comparison, which rounding would flip, read as a tensor: a vector at most."""
        at = broadcast(x, [size(s) for s in v.shape])
        return None if {"i", "j"} <= set().union(*(self.expr(a).variables for a in at)) else self.leaf(v, at)

    def apply(self, op: str, args: list[Expr], dtype: torch.dtype) -> Expr:
        """`op` with PyTorch's promotions made explicit; constants rounded to the result's dtype."""
        result = kind_of(dtype)
        if op in ("and", "or", "xor", "not"):
            return simplified(op, *(cast_simplified(a, BOOL) for a in args))
        if op in COMPARISONS:
            kind = FLOAT if any(a.kind == FLOAT for a in args) else INT
            return simplified(op, *(cast(a, kind) for a in args))
        if result == BOOL and op in ("mul", "add", "minimum", "maximum"):
            return simplified("and" if op in ("mul", "minimum") else "or", *(cast_simplified(a, BOOL) for a in args))
        skip = 1 if op == "where" else 0
        moved = list(args[:skip]) + [rounded(cast(a, result), dtype) for a in args[skip:]]
        if op == "add" and any(QK in a.leaves for a in moved):
            moved = [a if QK in a.leaves else added(a) for a in moved]
        e = simplified(op, *moved)
        if op in ("add", "sub", "mul", "truediv") and result == FLOAT:
            self.dtypes[e] = torch.promote_types(dtype, self.dtypes.get(e, dtype))
        return e


def _names_positions(e: Expr) -> bool:
    """Does it compute with positions or sizes, but to read tensors?"""
    return isinstance(e, Var) or isinstance(e, Call) and any(map(_names_positions, e.args))


def gradient_ends(v: Value) -> Refused:
    return Refused("no gradient flows through part of the attention (detach or no_grad), one would through the fused op", v,
                   "detach q, k, v or the output instead, or keep the whole attention under no_grad")
