"""columns: what a query adds to its scores class by class of keys stands in q and k as further columns.

Decomposed relative positions (MViTv2, Li et al. 2022; SAM) add to the score of a key what the query has for the key's row of the image, and for its
column: `rel[b, i, j // 64]`, the product of the query with a table. A kernel would gather an element for each pair, the model makes an N x N tensor of
them. As a product it costs what 64 more columns of q . k cost, and so do its gradients:

    q . k * a + rel[b, i, f(j)] * c  =  ([q, rel[b, i] * (c / a)] . [k, one_hot(f(j))]) * a

The columns are the model's own numbers (c / a is a power of two in them wherever it is one), the product adds zeros beside them.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from flashfx.expr import FLOAT, QK, TRUE, Call, Const, Expr, Load, Var, call
from flashfx.reference import evaluate

from .classes import class_dim, fits, of_product, padded
from .find import Site
from .held import Held
from .index import product, same, size
from .lift import Lifted
from .linear import viewed
from .maker import Maker
from .operands import Operand
from .values import Value, ValueGraph

aten = torch.ops.aten
EXPONENT = 14
"""Powers of two up to this, and down to it, are numbers of every dtype."""


@dataclass(frozen=True)
class _Term:
    """`factor * load` where both conditions hold, of the query's and of the key's position."""

    load: Load
    factor: float = 1.0
    of_row: Expr = TRUE
    of_key: Expr = TRUE


@dataclass(frozen=True)
class _Sum:
    """A score as `dot * qk`, terms and what is left."""

    dot: float = 0.0
    terms: tuple[_Term, ...] = ()
    rest: Expr = Const(0.0)

    def scaled(self, by: float) -> _Sum:
        rest = self.rest if by == 1.0 or self.rest == Const(0.0) else call("mul", self.rest, Const(by))
        return _Sum(self.dot * by, tuple(replace(t, factor=t.factor * by) for t in self.terms), rest)

    def plus(self, other: _Sum) -> _Sum:
        return _Sum(self.dot + other.dot, self.terms + other.terms, call("add", self.rest, other.rest))

    def where(self, of_row: Expr, of_key: Expr) -> tuple[_Term, ...]:
        return tuple(replace(t, of_row=call("and", of_row, t.of_row), of_key=call("and", of_key, t.of_key)) for t in self.terms)


def _taken_apart(e: Expr, wanted) -> _Sum | None:
    """`e` as a sum, loads that are `wanted` apart; None where it is none of qk.

    before -> after: where(j >= 1, qk * 0.5 + rel[b, i, (j - 1) // 8], qk * 0.5) -> 0.5, (rel[b, i, (j - 1) // 8] where j >= 1)
    """
    if e == QK:
        return _Sum(1.0)
    if isinstance(e, Load) and wanted(e):
        return _Sum(terms=(_Term(e),))
    found = None
    if isinstance(e, Call) and (QK in e.leaves or any(map(wanted, e.loads))):
        found = _apart(e, wanted)
    return found if found is not None or QK in e.leaves else _Sum(rest=e)


def _apart(e: Call, wanted) -> _Sum | None:
    if e.op in ("mul", "truediv") and isinstance(e.args[1], Const):
        by = float(e.args[1].value)
        inside = _taken_apart(e.args[0], wanted)
        return None if inside is None or by == 0 else inside.scaled(by if e.op == "mul" else 1.0 / by)
    if e.op == "neg":
        inside = _taken_apart(e.args[0], wanted)
        return None if inside is None else inside.scaled(-1.0)
    if e.op in ("add", "sub"):
        a, b = (_taken_apart(x, wanted) for x in e.args)
        return None if a is None or b is None else a.plus(b if e.op == "add" else b.scaled(-1.0))
    if e.op == "where" and not e.args[0].loads and e.args[0].variables in ({"i"}, {"j"}):
        seen, (a, b) = e.args[0], (_taken_apart(x, wanted) for x in e.args[1:])
        if a is None or b is None or a.dot != b.dot or not a.rest == b.rest == Const(0.0):
            return None
        unseen = call("not", seen)
        sides = ((seen, TRUE), (unseen, TRUE)) if seen.variables == {"i"} else ((TRUE, seen), (TRUE, unseen))
        return _Sum(a.dot, a.where(*sides[0]) + b.where(*sides[1]))
    return None


def _run(condition: Expr, name: str, n: int) -> tuple[int, int] | None:
    """Where a condition of one position holds, if in one stretch: before -> after: j >= 1 -> (1, n)"""
    if condition == TRUE:
        return 0, n
    at = evaluate(condition, {name: torch.arange(n)}, {}, None, torch.float64).nonzero().flatten().tolist()
    return (at[0], at[-1] + 1) if at and len(at) == at[-1] + 1 - at[0] else None


def _at(e: Expr, name: str, run: tuple[int, int]) -> torch.Tensor:
    return evaluate(e, {name: torch.arange(*run)}, {}, None, torch.float64).expand(run[1] - run[0])


def _ones(make: Maker, of: Expr, run: tuple[int, int], width: int, keys: int, like: Value, value: float) -> Value | None:
    """(keys, width): `value` at each key's class, 0 elsewhere; None unless classes come in turns, as `j // a % width` does."""
    classes, count = _at(of, "j", run), run[1] - run[0]
    changes = (classes != classes[:1]).nonzero().flatten().tolist()
    length = changes[0] if changes else count
    if not torch.equal(classes, torch.arange(count) // length % width):
        return None
    ones = make(aten.eye.default, width, dtype=like.dtype, device=like.fake.device)
    if value != 1.0:
        ones = make(aten.mul.Tensor, ones, value)
    turns = -(-count // (length * width))
    ones = make(aten.expand.default, make(aten.unsqueeze.default, make(aten.unsqueeze.default, ones, 1), 0), [turns, width, length, width])
    ones = make(aten.slice.Tensor, make(aten.reshape.default, ones, [turns * width * length, width]), 0, 0, count)
    return make(aten.constant_pad_nd.default, ones, [0, 0, run[0], keys - run[1]]) if count < keys else ones


def _unfolded(make: Maker, load: Load, v: Value, axes: tuple[str, ...], like: Value) -> tuple[Load, Value]:
    """Dims that run through several batch axes in order as a dim for each: before -> after: rel[h + b * 8, i, j // 14] -> rel[b, h, i, j // 14]"""
    for d in reversed(range(len(load.index))):
        names = [a for a in axes if a in load.index[d].variables]
        extents = [size(like.shape[axes.index(a)]) for a in names]
        if len(names) < 2 or load.index[d].loads or not all(isinstance(n, int) for n in extents[1:]) or not same(product(extents), size(v.shape[d])):
            continue
        counts = [n if isinstance(n, int) else 3 for n in extents]
        grid = dict(zip(names, torch.meshgrid(*map(torch.arange, counts), indexing="ij")))
        if torch.equal(evaluate(load.index[d], grid, {}, None, torch.float64).flatten(), torch.arange(math.prod(counts))):
            v = make(aten.reshape.default, v, [*v.shape[:d], *(like.shape[axes.index(a)] for a in names), *v.shape[d + 1:]])
            load = Load(load.name, (*load.index[:d], *map(Var, names), *load.index[d + 1:]), load.kind)
    return load, v


def _rows(make: Maker, load: Load, v: Value, axes: tuple[str, ...], run: tuple[int, int], rows: int, like: Value) -> Value | None:
    """What a load reads of `v` as (axes…, rows, classes), spread over the axes of `like`; None where its dims do not run through these in order."""
    load, v = _unfolded(make, load, v, axes, like)
    last = class_dim(load)
    order: list[int] = []
    shape: list = []
    for name in (*axes, "i"):
        dims = [d for d, a in enumerate(load.index) if a.variables == {name}]
        extents = [size(v.shape[d]) for d in dims]
        whole = run if name == "i" else (0, size(like.shape[axes.index(name)]))
        if not dims:
            if name == "i":
                return None
            shape.append(1)
            continue
        if not (len(dims) == 1 and load.index[dims[0]] == Var(name) and same(whole[1] - whole[0], extents[0])):
            if not all(isinstance(x, int) for x in (*whole, *extents)) or product(extents) != whole[1] - whole[0] or any(load.index[d].loads for d in dims):
                return None
            place = torch.zeros(whole[1] - whole[0], dtype=torch.int64)
            for d, extent in zip(dims, extents):
                place = place * extent + _at(load.index[d], name, whole)
            if not torch.equal(place, torch.arange(whole[1] - whole[0])):
                return None
        order += dims
        shape.append(v.shape[dims[0]] if len(dims) == 1 else math.prod(extents))
    fixed = [d for d, a in enumerate(load.index) if isinstance(a, Const)]
    if len(order) + len(fixed) + 1 != len(load.index):
        return None
    for d in reversed(fixed):
        v = make(aten.select.int, v, d, load.index[d].value)
    left = [d for d in range(len(load.index)) if d not in fixed]
    v = make(aten.permute.default, v, [left.index(d) for d in (*order, last)])
    v = make(aten.reshape.default, v, [*shape, v.shape[-1]])
    v = make(aten.expand.default, v, [*like.shape[:-2], v.shape[-2], v.shape[-1]])
    return make(aten.constant_pad_nd.default, v, [0, 0, run[0], rows - run[1]]) if run[1] - run[0] < rows else v


def _operand(make: Maker, candidates: list[Operand], held: Held) -> Value | None:
    """The operand as one tensor of the graph, of what is at hand; as `Emitter.operand` chooses."""
    alike = [o for o in candidates if o.dims == candidates[0].dims]
    chosen = next((o for o in alike if held.holder(o.value) is not None), None) or next((o for o in reversed(alike) if held.can(o.value)), None)
    return None if chosen is None else viewed(make, chosen.value, chosen.steps)


def widened(site: Site, vg: ValueGraph, lifted: Lifted, reached: list[str]) -> Lifted:
    """The site with such terms as columns of q and k; as it is where there are none, or not all that is read for every pair would be gone."""
    spec, dtype = lifted.spec, lifted.q[0].value.dtype
    rows, keys, head = (lifted.extents[n] for n in "ijd")
    operands, make = {a.name: o for a, o in zip(spec.aux, lifted.aux)}, Maker(vg, site.out)
    beside = {load.name for x in (spec.visible, spec.empty_over) for load in x.loads}

    def wanted(load: Load) -> bool:
        value, axes = operands[load.name].value, {a for x in load.index for a in x.variables} - {"i", "j"}
        return load.kind == FLOAT and "i" in load.variables and class_dim(load) is not None and load.name not in beside and axes <= spec.q and value.dtype == dtype and of_product(value)

    found = _taken_apart(spec.score, wanted) if lifted.k[0].value.dtype == dtype and isinstance(rows, int) and isinstance(keys, int) else None
    if found is None or found.dot == 0 or not found.terms or any({"i", "j"} <= load.variables for load in found.rest.loads):
        return lifted
    held = Held(vg, site.out.owner)
    q, k = (_operand(make, candidates, held) for candidates in (lifted.q, lifted.k))
    tensors = {t.load: viewed(make, o.value, o.steps) for t in found.terms for o in [operands[t.load.name]]}
    if q is None or k is None or None in tensors.values():
        return lifted
    widths = [size(tensors[t.load].shape[class_dim(t.load)]) for t in found.terms]
    if not all(isinstance(w, int) for w in widths) or not fits(sum(widths), head, keys, dtype):
        return lifted
    left, right = [q], [k]
    for term, width in zip(found.terms, widths):
        share, power = math.frexp(term.factor / found.dot)
        share, power = (share * 2, power - 1) if abs(share) == 0.5 else (share, power)
        of_rows, of_keys = _run(term.of_row, "i", rows), _run(term.of_key, "j", keys)
        if of_rows is None or of_keys is None or abs(power) > EXPONENT:
            return lifted
        of_query = _rows(make, term.load, tensors[term.load], spec.axes, of_rows, rows, q)
        of_class = _ones(make, term.load.index[class_dim(term.load)], of_keys, width, keys, k, 2.0 ** power)
        if of_query is None or of_class is None:
            return lifted
        left.append(of_query if share == 1.0 else make(aten.mul.Tensor, of_query, share))
        right.append(make(aten.expand.default, of_class, [*k.shape[:-2], keys, width]))
    wide = padded(head + sum(widths))
    join = lambda parts: make(aten.constant_pad_nd.default, make(aten.cat.default, parts, -1), [0, wide - head - sum(widths)]) \
        if wide > head + sum(widths) else make(aten.cat.default, parts, -1)
    q, k = (Operand(join(parts), (), found[0].dims) for parts, found in ((left, lifted.q), (right, lifted.k)))
    vg.forget_users()
    score = call("add", call("mul", QK, Const(found.dot)), found.rest)
    read = {load.name for x in (score, spec.visible, spec.empty_over) for load in x.loads}
    kept = [(a, o) for a, o in zip(spec.aux, lifted.aux) if a.name in read]
    used = {n for x in (score, spec.visible, spec.empty_over) for n in x.variables}
    sizes = [(name, s) for name, s in zip(spec.sizes, lifted.sizes) if name in used]
    reached.append(f"what is read at a class of the key stands in q and k as {sum(widths)} further columns: no element is gathered for a pair")
    return replace(lifted, q=[q], k=[k], aux=[o for _, o in kept], sizes=[s for _, s in sizes], extents={**lifted.extents, "d": wide},
                   spec=replace(spec, score=score, aux=tuple(a for a, _ in kept), sizes=tuple(name for name, _ in sizes)),
                   columns=[(width, ", ".join(map(str, term.load.index)), operands[term.load.name]) for term, width in zip(found.terms, widths)])
