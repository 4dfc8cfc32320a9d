"""Canonical operands: the tensors that the op receives, as views of tensors that the graph has.

`flashfx::attention` takes q (batch axes…, M, D) and so on. A leaf found by the index algebra, "element (i, h*D + d) of that
value", becomes a short list of view steps that put its dims in that order, or None if no view does.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Sequence

import torch

from flashfx.expr import Expr, Load, Var, substitute, walk
from flashfx.spec import Aux

from .index import Affine, Index, NotAffine, Size, SplitAxis, at_least, number, product, quotient, same, size
from .values import Value, ValueGraph
from .views import step_through

Step = tuple  # (method name, *arguments); sizes are Size


@dataclass(frozen=True)
class Operand:
    """`value` seen through `steps`; `dims` names the axis of each resulting dim ("" for a dim of extent 1)."""

    value: Value
    steps: tuple[Step, ...]
    dims: tuple[str, ...]


def radix(a: Affine, extents: dict[str, Size]) -> list[str] | None:
    """The axes of `a`, outermost first, if it is a mixed-radix number in them (constant aside)."""
    left = dict(a.terms)
    weight: Size = 1
    order: list[str] = []
    for name in [n for n in left if same(extents[n], 1)]:  # of extent 1, so wherever it stands
        order.append(name)
        del left[name]
    while left:
        name = next((n for n, c in left.items() if same(c, weight)), None)
        if name is None:
            return None
        order.append(name)
        weight = weight * extents[name]
        del left[name]
    return order[::-1]


def _stride(a: Affine) -> int:
    """The greatest common divisor of the coefficients; 1 where they are not all numbers."""
    return math.gcd(*(c for _, c in a.terms)) if all(isinstance(c, int) for c in (a.constant, *(c for _, c in a.terms))) else 1


def arrange(v: Value, index: Index, wanted: Sequence[str], extents: dict[str, Size], keep_missing: bool) -> Operand | None:
    """Views that turn `v` into a tensor with dims `wanted` (missing ones of extent 1 if `keep_missing`, else dropped)."""
    steps: list[Step] = []
    dims: list[str] = []
    shape = [size(s) for s in v.shape]
    for d, (a, s) in enumerate(zip(index, shape)):
        at = len(dims)
        if not a.terms:
            steps.append(("squeeze", at) if same(s, 1) else ("select", at, a.constant))  # select's gradient is a copy
            continue
        by = _stride(a)
        if by > 1 and quotient(s, by) is not None:  # every second head, say: the digits above that are a dim of their own
            s = quotient(s, by)
            steps += [("unflatten", at, (s, by)), ("select", at + 1, a.constant % by)]
            a = Affine(tuple((n, c // by) for n, c in a.terms), a.constant // by)
        order = radix(a, extents)
        if order is None or any(n in dims for n in order):
            return None
        covered = product([extents[n] for n in order])
        if not same(covered, s):
            if not (isinstance(a.constant, int) and a.constant >= 0 or at_least(a.constant, 0)):
                return None
            steps.append(("narrow", at, a.constant, covered))
        elif a.constant != 0:
            return None
        if len(order) > 1:
            steps.append(("unflatten", at, tuple(extents[n] for n in order)))
        dims.extend(order)
    if not set(dims) <= set(wanted):
        return None
    present = [n for n in wanted if n in dims]
    if dims != present:
        steps.append(("permute", tuple(dims.index(n) for n in present)))
    if keep_missing:
        for position, n in enumerate(wanted):
            if n not in present:
                steps.append(("unsqueeze", position))
        present = [n if n in present else "" for n in wanted]
    return Operand(v, tuple(steps), tuple(present))


def trace_back(v: Value, index: Index, wanted: Sequence[str], extents: dict[str, Size], vg: ValueGraph, grad: bool,
               scale: bool) -> tuple[list[Operand], float]:
    """Candidates for one operand, farthest source first, and the constant factor met on the way (1.0 if not `scale`).

    Walks up through views, copies and constant factors: k.transpose(2, 3), repeat_kv, q / sqrt(d). Not past the end of a
    gradient if one could flow (`grad`), nor past a factor that was applied in place: what it was applied to is gone.
    """
    found: list[tuple[Operand, float]] = []
    factor = 1.0
    while True:
        here = arrange(v, index, wanted, extents, keep_missing=True)
        if here is not None and all(n in here.dims or same(extents[n], 1) for n in wanted[-2:]):
            found.append((here, factor))
        if grad and v.stops_gradient:
            break
        try:
            through = step_through(v, index, extents)
        except NotAffine:
            break
        except SplitAxis as split:
            if split.axis in wanted[-2:]:
                break
            raise
        if through is None and scale and v.owner not in vg.changing and (by := constant_factor(v)) is not None:
            factor *= by
            through = (v.args[0], index)
        if through is None:
            break
        v, index = through
    if not found:
        return [], 1.0
    best = found[-1][1]
    return [operand for operand, f in reversed(found) if f == best], best


def constant_factor(v: Value) -> float | None:
    if v.name in ("mul.Tensor", "mul.Scalar", "div.Tensor", "div.Scalar") and isinstance(v.args[1], (int, float, torch.SymFloat)) \
            and not isinstance(v.args[1], bool) and v.dtype == v.args[0].dtype and (by := number(v.args[1])):
        return float(by) if v.name.startswith("mul") else 1.0 / by
    return None


_AUX_NAMES = {"bool": "mask", "int": "ids", "float": "bias"}


def captured(puller, exprs: list[Expr], batch: list[str], renamed: dict[str, str]):
    """Name the captured tensors, arrange them so that their indices are plain axes, and give the substitution."""
    axes = [*batch, "i", "j"]
    table: dict[Expr, Expr] = {Var(old): Var(new) for old, new in renamed.items()}
    aux: list[Aux] = []
    operands: list[Operand] = []
    known: dict[tuple, str] = {}
    counts: dict[str, int] = {}
    for load in _loads(exprs):
        value = puller.loads[load.name]
        index = [puller.affine(a) for a in load.index]
        operand = None
        if all(a is not None for a in index) and load.name not in puller.named:
            operand = arrange(value, tuple(index), axes, puller.extents, keep_missing=False)
        if operand is not None:
            own = tuple(Var(renamed.get(n, n)) for n in operand.dims)
        else:
            operand = Operand(value, (), ("",) * len(load.index))
            own = tuple(substitute(a, table) for a in load.index)  # positions may be read from a tensor themselves
        key = (operand.value, operand.steps)
        if key not in known:
            base = puller.named.get(load.name, _AUX_NAMES[load.kind])
            counts[base] = counts.get(base, 0) + 1
            known[key] = base if counts[base] == 1 else f"{base}{counts[base]}"
            aux.append(Aux(known[key], load.kind, len(own)))
            operands.append(operand)
        table[load] = Load(known[key], own, load.kind)
    return aux, table, operands


def _loads(exprs: list[Expr]) -> list[Load]:
    """Distinct loads in the order in which the expressions read them."""
    return list(dict.fromkeys(x for e in exprs for x in walk(e) if isinstance(x, Load)))
