"""Index algebra: where does element (b, h, i, j) of this value come from?

An index is an `Affine` form over named axes: sum of coefficient * axis + constant. A view turns a tuple of indices of its
result into a tuple of indices of its input. Where a view splits an axis of the frame (heads out of a flattened batch,
groups out of heads), `SplitAxis` asks the caller to name the two parts and start again: so merges and splits of whole axes
stay bookkeeping, and `repeat_kv` becomes the absence of an axis. Sizes are ints or sympy expressions (symbolic shapes).
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

import sympy
import torch

Size = int | sympy.Expr


def size(x) -> Size:
    """An int or a sympy expression for an int or SymInt."""
    if isinstance(x, torch.SymInt):
        e = sympy.sympify(x.node.expr)
        return int(e) if e.is_Integer else e
    if isinstance(x, sympy.Expr):
        return int(x) if x.is_Integer else x
    return int(x)


def number(x):
    """A Python number. A symbolic float (a module attribute under dynamic=True) is specialised, which guards on its value."""
    return float(x) if isinstance(x, torch.SymFloat) else x


def same(a: Size, b: Size) -> bool:
    """Provably equal."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return sympy.expand(a - b) == 0


def at_least(a: Size, b: Size) -> bool:
    """Provably a >= b, symbols being positive integers."""
    if isinstance(a, int) and isinstance(b, int):
        return a >= b
    return bool(sympy.expand(a - b).is_nonnegative)


def is_no_larger(shape: Sequence[Size], than: Sequence[Size]) -> bool:
    """Provably no more elements. Factored: s * s <= s * (2 * s - 1), of rows that a view shifts by one another."""
    a, b = (product([size(s) for s in x]) for x in (than, shape))
    return at_least(a, b) or not isinstance(a, int) and bool(sympy.factor(a - b).is_nonnegative)


def quotient(a: Size, b: Size) -> Size | None:
    """a / b where it is provably an integer."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    q = sympy.cancel(sympy.sympify(a) / b)
    if q.is_Integer:
        return int(q)
    poly = q.as_poly() if not q.as_numer_denom()[1].free_symbols and q.as_numer_denom()[1] == 1 else None
    return q if poly is not None or q.is_Symbol else None


def product(sizes: Sequence[Size]) -> Size:
    out: Size = 1
    for s in sizes:
        out = out * s
    return size(out) if isinstance(out, sympy.Expr) else out


class Specialised(Exception):
    """A symbolic head size has become a number; forms made before know it as a symbol."""


def head_size(x) -> int:
    """A head size, for which kernels are made. A symbolic one is specialised, which guards on its value: raises Specialised.

    Raises NotAffine for a size that only the data decides.
    """
    if isinstance(size(x), int):
        return size(x)
    if not x.node.has_hint():
        raise NotAffine(f"the head size {x} depends on data")
    for symbol in x.node.expr.free_symbols:  # the hidden size, where heads are a part of it
        x.node.shape_env.evaluate_expr(symbol)
    int(x)
    if isinstance(size(x), int):
        raise Specialised
    raise NotAffine(f"the head size {x} follows from other sizes")


class SplitAxis(Exception):
    """A view splits frame axis `axis` into (outer, inner) with inner extent `inner`."""

    def __init__(self, axis: str, inner: Size):
        super().__init__(f"{axis} splits by {inner}")
        self.axis, self.inner = axis, inner


class NotAffine(Exception):
    """A view mixes axes in a way that has no affine form."""


@dataclass(frozen=True)
class Affine:
    """sum(coefficient * axis) + constant; `terms` sorted by axis name, no zero coefficient."""

    terms: tuple[tuple[str, Size], ...] = ()
    constant: Size = 0

    def __str__(self) -> str:
        parts = [n if c == 1 else f"{c}*{n}" for n, c in self.terms] + [str(self.constant)] * (self.constant != 0 or not self.terms)
        return " + ".join(parts)

    @staticmethod
    def axis(name: str) -> Affine:
        return Affine(((name, 1),))

    def __add__(self, other: Affine | Size) -> Affine:
        if not isinstance(other, Affine):
            return Affine(self.terms, _simple(self.constant + other))
        table = dict(self.terms)
        for name, c in other.terms:
            table[name] = _simple(table.get(name, 0) + c)
        return Affine(tuple(sorted((n, c) for n, c in table.items() if c != 0)), _simple(self.constant + other.constant))

    def __mul__(self, factor: Size) -> Affine:
        if factor == 0:
            return Affine()
        return Affine(tuple((n, _simple(c * factor)) for n, c in self.terms), _simple(self.constant * factor))

    @property
    def axes(self) -> set[str]:
        return {n for n, _ in self.terms}

    @property
    def single(self) -> str | None:
        """The axis name if this is exactly one axis, with coefficient 1 and no constant."""
        return self.terms[0][0] if len(self.terms) == 1 and self.terms[0][1] == 1 and self.constant == 0 else None

    def bounds(self, extents: dict[str, Size]) -> tuple[Size, Size] | None:
        """Least and greatest value, or None where a coefficient's sign is unknown."""
        lo = hi = self.constant
        for name, c in self.terms:
            reach = c * (extents[name] - 1)
            if at_least(c, 0):
                hi = hi + reach
            elif at_least(0, c):
                lo = lo + reach
            else:
                return None
        return _simple(lo), _simple(hi)


def _simple(x: Size) -> Size:
    return size(sympy.expand(x)) if isinstance(x, sympy.Expr) else x


Index = tuple[Affine, ...]


def unflatten(linear: Affine, shape: Sequence[Size], extents: dict[str, Size]) -> list[Affine]:
    """The digits of `linear` in the mixed radix `shape` (row-major). Raises SplitAxis or NotAffine."""
    digits: list[Affine] = []
    for position in range(len(shape) - 1, 0, -1):
        s = shape[position]
        if same(s, 1):
            digits.append(Affine())
            continue
        high, low = [], []
        for name, c in linear.terms:
            q = quotient(c, s)
            (high if q is not None else low).append((name, c if q is None else q))
        q = quotient(linear.constant, s)
        if q is None and isinstance(s, int) and isinstance(linear.constant, int):
            q, rest = linear.constant // s, linear.constant % s
        else:
            rest = 0 if q is not None else linear.constant
            q = q if q is not None else 0
        digit = Affine(tuple(low), rest)
        bounds = digit.bounds(extents)
        if bounds is None or not (at_least(bounds[0], 0) and at_least(s - 1, bounds[1])):
            for name, c in low:
                inner = quotient(s, c)
                whole = inner is not None and (same(inner, 1) or same(inner, extents[name]))  # splits nothing
                if inner is not None and not whole and quotient(extents[name], inner) is not None:
                    raise SplitAxis(name, inner)
            raise NotAffine(f"a view mixes axes: {linear} does not split by {s}")
        digits.append(digit)
        linear = Affine(tuple(sorted(high)), q)
    digits.append(Affine() if shape and same(shape[0], 1) else linear)
    return digits[::-1] if shape else []


def through_view(index: Index, out_shape: Sequence[Size], in_shape: Sequence[Size], extents: dict[str, Size]) -> Index:
    """before -> after: an index into the result of `in.view(out_shape)` -> the index into its input.

    Equal leading and trailing dims pass untouched; the groups between are flattened and split again.
    """
    if not in_shape:
        return ()
    result: list[Affine | None] = [None] * len(in_shape)
    lo_i = lo_o = 0
    while lo_i < len(in_shape) and lo_o < len(out_shape):
        hi_i, hi_o = lo_i + 1, lo_o + 1
        a, b = in_shape[lo_i], out_shape[lo_o]
        while not same(a, b):
            if hi_i < len(in_shape) and (hi_o >= len(out_shape) or not _smaller(b, a)):
                a, hi_i = a * in_shape[hi_i], hi_i + 1
            elif hi_o < len(out_shape):
                b, hi_o = b * out_shape[hi_o], hi_o + 1
            else:
                break
        if hi_i == lo_i + 1 and hi_o == lo_o + 1 and same(a, b):
            result[lo_i] = index[lo_o]
        else:
            linear = Affine()
            for d in range(lo_o, hi_o):
                linear = linear * out_shape[d] + index[d]
            result[lo_i:hi_i] = unflatten(linear, in_shape[lo_i:hi_i], extents)
        lo_i, lo_o = hi_i, hi_o
    return tuple(Affine() if r is None else r for r in result)


def _smaller(a: Size, b: Size) -> bool:
    if isinstance(a, int) and isinstance(b, int):
        return a < b
    q = quotient(b, a)
    return q is not None and not same(a, b)


def broadcast(index: Index, shape: Sequence[Size]) -> Index:
    """The index into a tensor of `shape` that is broadcast to the dims that `index` ranges over."""
    own = index[len(index) - len(shape):]
    return tuple(Affine() if same(s, 1) else x for x, s in zip(own, shape))
