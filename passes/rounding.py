"""Where a dtype does not hold what a model makes of positions: a comparison of rounded numbers is true elsewhere than of the numbers themselves, integers wrap.

before: torch.arange(n, dtype=torch.bfloat16)[:, None] >= torch.arange(n, dtype=torch.bfloat16)    259 and 260 are both 260: row 259 sees key 260
after:  the vectors are read, or the mask; up to 256 positions, which bfloat16 tells apart: i >= j
before: torch.arange(n).to(torch.int8)    128 is -128
after:  read; up to 128 positions: i
"""
from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Mapping, Sequence

import torch

from flashfx.expr import BOOL, FLOAT, INT, QK, Call, Const, Expr, Load, Var, nonnegative, walk
from flashfx.ops import COMPARISONS

from .index import Size
from .scalars import choice, is_bit, kind_of
from .values import Value

UNKNOWN = 2.0 ** 22
"""What a size, or a number that a tensor of integers holds, is taken to be at most where nobody knows: all of them are told apart by float32."""
_EXACT = {"add", "sub", "neg", "abs", "minimum", "maximum", "where", "floor", "ceil", "to_float", "to_int", "to_bool", "and", "or", "xor", "not", *COMPARISONS}
_ROUNDING = {"to_float", "add", "sub", "mul", "truediv"}


@dataclass
class Rounding:
    """rounded: values that their dtype may have rounded. grains: as `grain`."""

    rounded: set[Expr] = field(default_factory=set)
    grains: dict[Expr, tuple[float, float]] = field(default_factory=dict)

    def fits(self, e: Expr, v: Value, extents: Mapping[str, Size], loads: Mapping[str, Value]) -> bool:
        """A value of the graph, and what it has been lifted to: do the dtypes of both hold it? Of a float that they may round a note is taken.
        extents: of every axis by name. loads: of every tensor."""
        if isinstance(e, Load) and e.kind == INT == kind_of(v.dtype):
            (least, most), (low, high) = (_limits(d) for d in (loads[e.name].dtype, v.dtype))
            return low <= least and most <= high
        if not isinstance(e, (Call, Var)) or kind_of(v.dtype) != e.kind or e.kind == BOOL or QK in e.leaves or choice(e) or e in self.rounded:
            return True
        read = [loads[load.name].dtype for load in e.loads if load.kind == INT]
        if not (found := any(isinstance(x, Var) for x in e.leaves)) and not read:
            return True
        if e.kind == INT:
            own = max([32] * found + [d.itemsize * 8 for d in read])  # of a kernel: positions have 32 bits
            same = not found and {v.dtype} == {*read}  # both wrap
            low, high = _limits(v.dtype)
            return same or self.grain(e, extents, loads)[0] <= min(2.0 ** (own - 1) - 1, high) and (low < 0 or nonnegative(e))
        if e.op in _ROUNDING and is_exact(e):
            most, unit = self.grain(e, extents, loads)
            if most > unit * integers_of(v.dtype):
                self.rounded.add(e)
        return True

    def exact(self, e: Expr) -> bool:
        """Is it the number that the model has, bit for bit?"""
        return is_exact(e) and not self._rounds(e)

    def casts(self, e: Expr, kind: str) -> bool:
        """Is it still that number when it is cast? Nothing but 0 is rounded to 0, but a difference of what was rounded may be."""
        return kind == FLOAT or (self.exact(e) if kind == INT else not self._rounds(e) or self.compares(e, ()))

    def compares(self, e: Expr, others: Sequence[Expr]) -> bool:
        """Has a comparison of it the result that the model has? An integer is on the same side of a constant that every dtype holds, rounded or not."""
        if e in self.rounded and e.op == "to_float":
            return all(isinstance(x, Const) and float(x.value).is_integer() and abs(x.value) <= integers_of(torch.bfloat16) for x in others)
        return self.exact(e)

    def _rounds(self, e: Expr) -> bool:
        return bool(self.rounded) and any(x in self.rounded for x in walk(e))

    def grain(self, e: Expr, extents: Mapping[str, Size], loads: Mapping[str, Value]) -> tuple[float, float]:
        """(largest magnitude, a power of two that divides it) of a number that `is_exact`."""
        if e not in self.grains:
            self.grains[e] = self._grain(e, extents, loads)
        return self.grains[e]

    def _grain(self, e: Expr, extents: Mapping[str, Size], loads: Mapping[str, Value]) -> tuple[float, float]:
        if isinstance(e, Const):
            return abs(float(e.value)), _lowest(float(e.value))
        if is_bit(e):
            return 1.0, 1.0
        if isinstance(e, Var):
            extent = extents.get(e.name)
            return (float(extent - 1) if isinstance(extent, int) else UNKNOWN), 1.0
        if isinstance(e, Load):
            return (min(UNKNOWN, _limits(loads[e.name].dtype)[1] + 1.0) if e.kind == INT else UNKNOWN), 1.0
        parts = [self.grain(a, extents, loads) for a in (e.args[1:] if e.op == "where" else e.args)]
        (most, unit), *rest = parts
        if e.op in ("add", "sub"):
            return most + rest[0][0], min(unit, rest[0][1])
        if e.op == "mul":
            return most * rest[0][0], unit * rest[0][1]
        if e.op == "truediv":  # by a power of two
            return most / rest[0][0], unit / rest[0][0]
        if e.op == "mod":
            return rest[0][0], min(unit, rest[0][1])
        if e.op in ("floordiv", "floor", "ceil"):
            return most + 1, 1.0
        return (max(m for m, _ in parts), min(u for _, u in parts)) if e.op in ("where", "minimum", "maximum", "neg", "abs", "to_float", "to_int") else (UNKNOWN, 1.0)


def integers_of(dtype: torch.dtype) -> float:
    """Up to this, all integers are numbers of that dtype."""
    return 2.0 / torch.finfo(dtype).eps


def _limits(dtype: torch.dtype) -> tuple[int, int]:
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


def _lowest(c: float) -> float:
    """The largest power of two that divides a constant."""
    if not math.isfinite(c) or c == 0:
        return math.inf
    mantissa, exponent = math.frexp(c)
    whole = int(mantissa * 2 ** 53)
    return math.ldexp(float(whole & -whole), exponent - 53)


def is_exact(e: Expr) -> bool:
    """Is it computed from small integers, or read, without rounding? Kernels divide, and contract products and sums, in ways of their own."""
    if isinstance(e, Load) or e.kind != FLOAT:
        return True

    def halves(c: Expr) -> bool:
        return isinstance(c, Const) and c.value and abs(math.frexp(c.value)[0]) == 0.5

    return all(x.kind == INT or x.op in _EXACT or x.op == "truediv" and halves(x.args[1]) or x.op == "mul" and any(map(halves, x.args)) if isinstance(x, Call)
               else not (isinstance(x, Load) and x.kind == FLOAT) for x in walk(e))
