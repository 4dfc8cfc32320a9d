"""lift: Site -> spec and operands, by evaluating the graph at symbolic indices.

The output product is read at (batch…, i, j): its left operand gives the path to the softmax and so the names of the axes, its
right operand is v. The scores are pulled at the same indices; the first matrix product met is q . k. Every permute, dim,
expand and slice on the way enters the index algebra, so nothing about the layout is assumed.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from flashfx.expr import FLOAT, QK, TRUE, Const, Expr, Load, Var, call, cast, conjunction, substitute, walk
from flashfx.spec import AttentionSpec, Aux, EmptyRow

from .find import CASTS, DROPOUTS, PRODUCTS, Site, softmax_of
from .index import Affine, Index, NotAffine, Size, SplitAxis, broadcast, number, quotient, same, size
from .masks import contract, normal_condition, normal_score, peel
from .operands import Operand, arrange, trace_back
from .pull import Puller
from .values import Value, ValueGraph
from .views import step_through

BATCH_NAMES = ("b", "h", "g", "x", "y", "z")


class Refused(Exception):
    """Raised inside a stage; becomes a `Refusal`."""

    def __init__(self, reason: str, at: Value | None = None, hint: str = ""):
        super().__init__(reason)
        self.reason, self.at, self.hint = reason, at, hint


@dataclass
class Lifted:
    """What lift found. Operand candidates are ordered from the farthest source; `transposed`: out is (…, Dv, M)."""

    spec: AttentionSpec
    q: list[Operand]
    k: list[Operand]
    v: list[Operand]
    aux: list[Operand]
    extents: dict[str, Size]
    sizes: list[Size]
    out_dims: list[list[str]]
    dims: tuple[str, ...]
    random: Value | None = None
    product: Value | None = None


@dataclass
class _Frame:
    """The axes of the output: each original dim is a list of axes, refined when a view splits one."""

    dims: list[list[str]]
    extents: dict[str, Size] = field(default_factory=dict)

    def index(self, d: int) -> Affine:
        out = Affine()
        for name in self.dims[d]:
            out = out * self.extents[name] + Affine.axis(name)
        return out

    def split(self, axis: str, inner: Size) -> None:
        outer = quotient(self.extents[axis], inner)
        names = (f"{axis}o", f"{axis}i")
        for dim in self.dims:
            if axis in dim:
                at = dim.index(axis)
                dim[at: at + 1] = names
        self.extents[names[0]], self.extents[names[1]] = outer, inner
        del self.extents[axis]

    @property
    def batch(self) -> list[str]:
        return [name for dim in self.dims for name in dim]


def lift(site: Site, vg: ValueGraph) -> Lifted:
    """Raises `Refused`."""
    shape = [size(s) for s in site.out.shape]
    frame = _Frame([[f"x{d}"] for d in range(len(shape) - 2)], {f"x{d}": s for d, s in enumerate(shape[:-2])})
    for _ in range(16):
        try:
            return (_lift_call if site.weights is None else _lift_products)(site, vg, frame)
        except SplitAxis as split:
            if split.axis not in frame.batch:
                raise Refused(f"a view splits the {'query' if split.axis == 'i' else 'key' if split.axis == 'j' else 'head'} "
                              f"axis by {split.inner}", site.out, "keep query and key positions in one dim each") from None
            frame.split(split.axis, split.inner)
        except NotAffine as error:
            raise Refused(f"a view mixes axes: {error}", site.out) from None
    raise Refused("the batch axes split without end", site.out)


# ---------------------------------------------------------------------------------------------------- the two kinds of site

def _lift_products(site: Site, vg: ValueGraph, frame: _Frame) -> Lifted:
    out, side = site.out, site.side
    left, right = (out.args[p] for p in PRODUCTS[out.name])
    if out.name in ("baddbmm.default", "addmm.default") and not is_zero(out.kwargs.get("beta", 1)):
        raise Refused(f"the second product also adds a tensor ({out.name})", out, "add it after the product")
    weights, values = (left, right) if side == 0 else (right, left)
    n = size(weights.shape[-1 if side == 0 else -2])
    m = size(weights.shape[-2 if side == 0 else -1])
    extents = {**frame.extents, "i": m, "j": n, "e": size(values.shape[-1 if side == 0 else -2])}
    batch = tuple(frame.index(d) for d in range(len(frame.dims)))
    i, j, e = (Affine.axis(a) for a in "ije")
    weights_at = (*batch, i, j) if side == 0 else (*batch, j, i)
    values_at = (*batch, j, e) if side == 0 else (*batch, e, j)
    at, dropped = _walk_weights(weights, weights_at, site.weights, extents)
    scores, dim = softmax_of(site.weights)
    if at[dim].single != "j":
        raise Refused(f"the softmax runs over dim {dim}, the second product sums over another axis", site.weights,
                      "this is attention only if the softmax normalises over the keys")
    if any("j" in a.axes for d, a in enumerate(at) if d != dim) or not same(size(site.weights.shape[dim]), n):
        raise Refused("the softmax and the second product see different keys", site.weights)
    puller = Puller(extents, vg.constants)
    score = puller.pull(scores, at)
    safe = site.weights.name == "_safe_softmax.default"
    lifted = _finish(site, vg, frame, puller, score, None, safe, values, values_at, dropped)
    lifted.out_dims = [*frame.dims, ["i"], ["e"]] if side == 0 else [*frame.dims, ["e"], ["i"]]
    return lifted


def is_zero(x) -> bool:
    return isinstance(x, (int, float)) and x == 0


def _walk_weights(v: Value, at: Index, weights: Value, extents) -> tuple[Index, Value | None]:
    """From the second product up to the softmax: views, casts and one dropout."""
    dropped = None
    while v is not weights:
        through = step_through(v, at, extents)
        if through is not None:
            v, at = through
        elif v.name in CASTS:
            v = v.args[0]
        elif v.name in DROPOUTS and dropped is None:
            dropped, v = v, v.args[0]
        else:
            raise Refused(f"the attention weights are changed by {v.name.partition('.')[0]} before the second product", v,
                          "only casts, views and one dropout may stand between softmax and the second product")
    return at, dropped


def _lift_call(site: Site, vg: ValueGraph, frame: _Frame) -> Lifted:
    call_ = site.out
    q, k, v, mask, p, causal, scale, gqa = call_.args
    extents = {**frame.extents, "i": size(q.shape[-2]), "j": size(k.shape[-2]), "d": size(q.shape[-1]), "e": size(v.shape[-1])}
    batch = tuple(frame.index(d) for d in range(len(frame.dims)))
    i, j, d, e = (Affine.axis(a) for a in "ijde")

    def heads(t: Value) -> Index:
        if not gqa or same(size(t.shape[-3]), size(q.shape[-3])):
            return batch
        group = quotient(size(q.shape[-3]), size(t.shape[-3]))
        if group is None:
            raise Refused("enable_gqa with query heads that are no multiple of the key heads", call_)
        last = frame.dims[-1]
        if not same(extents[last[-1]], group):
            raise SplitAxis(last[-1], group)
        outer = Affine()
        for name in last[:-1]:
            outer = outer * extents[name] + Affine.axis(name)
        return (*batch[:-1], outer)

    puller = Puller(extents, vg.constants)
    at = lambda t, lead, *own: broadcast((*lead, *own), [size(s) for s in t.shape])
    puller.product = (q, at(q, batch, i, d), k, None, None)
    score: Expr = call("mul", QK, Const(float(number(scale)) if scale is not None else 1.0 / math.sqrt(int(q.shape[-1]))))
    visible: Expr = call("le", Var("j"), Var("i")) if causal else TRUE
    if mask is not None:
        m = puller.pull(mask, at(mask, batch, i, j))
        if mask.dtype == torch.bool:
            visible = call("and", visible, cast(m, "bool"))
        else:
            score = call("add", score, cast(m, FLOAT))
    # the product's right operand read as (…, d, j)
    lifted = _finish(site, vg, frame, puller, score, visible, True, v, at(v, heads(v), j, e),
                     call_ if number(p) else None, key=(k, at(k, heads(k), j, d)))
    lifted.out_dims = [*frame.dims, ["i"], ["e"]]
    return lifted


# ---------------------------------------------------------------------------------------------------- common part

def _finish(site, vg, frame, puller, score, visible, safe, values, values_at, dropped, key=None) -> Lifted:
    if puller.product is None:
        raise Refused("no matrix product over queries and keys was found in the scores", site.weights or site.out,
                      "the scores must come from q @ k^T through views and pointwise ops")
    left, left_at, right, right_at, _ = puller.product
    if key is not None:
        query, key = (left, left_at), key
    elif left_at[-2].single == "i":
        query, key = (left, left_at), (right, right_at)
    else:
        query, key = (right, right_at), (left, left_at)
    if QK not in score.leaves:
        raise Refused("the scores do not depend on the matrix product", site.weights or site.out)

    masked = peel(score)
    fills = masked.fills
    score = masked.score
    for f in fills:
        if QK in f.visible.leaves:
            raise Refused("the mask depends on the scores", site.weights or site.out, "a mask must be known before the scores")
    shown = conjunction([visible or TRUE, *(f.visible for f in fills)])
    empty, over = contract(fills, safe)
    if visible is not None and visible != TRUE and not fills:
        empty = EmptyRow.ZERO
    for load in [x for x in score.loads if _hides_rows(x, puller, vg)]:
        hidden = -math.inf if safe else -1.0e30
        shown = call("and", shown, call("gt", load, Const(hidden)))
        if not safe and empty is EmptyRow.NAN:
            empty, over = EmptyRow.MEAN_ADD, call("gt", load, Const(-math.inf))
    shown = normal_condition(shown, puller)
    over = TRUE if shown == TRUE else normal_condition(over, puller)
    extents, batch = puller.extents, frame.batch
    q, fq = trace_back(*query, [*batch, "i", "d"], extents, scale=True)
    k, fk = trace_back(*key, [*batch, "j", "d"], extents, scale=True)
    v, _ = trace_back(values, values_at, [*batch, "j", "e"], extents, scale=False)
    for name, found in (("query", q), ("key", k), ("value", v)):
        if not found:
            raise Refused(f"the {name} operand is no view with batch, position and head-size dims", site.out)
    score = normal_score(substitute(score, {QK: call("mul", QK, Const(fq * fk))}) if fq * fk != 1.0 else score)
    if shown == TRUE:
        empty = EmptyRow.NAN

    renamed = {old: new for old, new in zip(batch, BATCH_NAMES)}
    if len(batch) > len(BATCH_NAMES):
        raise Refused(f"{len(batch)} batch axes, at most {len(BATCH_NAMES)} are supported", site.out)
    aux, table, operands = _captured(puller, [score, shown, over], batch, renamed)
    score, shown, over = (substitute(e, table) for e in (score, shown, over))
    used = {n for e in (score, shown, over) for n in e.variables}
    sizes = [(s, name) for s, name in puller.names.items() if name in used]
    depends = lambda found: frozenset(renamed[n] for n in found[0].dims if n in renamed)
    p = 0.0 if dropped is None else number(dropped.args[1] if site.weights is not None else dropped.args[4])
    if not 0.0 <= p < 1.0:
        raise Refused(f"dropout with p={p}", dropped)
    spec = AttentionSpec(
        axes=tuple(renamed[n] for n in batch), q=depends(q), k=depends(k), v=depends(v), score=score, visible=shown,
        empty_row=empty, empty_over=over, dropout=float(p), aux=tuple(aux), sizes=tuple(name for _, name in sizes))
    return Lifted(spec, q, k, v, operands, extents, [s for s, _ in sizes], [], tuple(batch), dropped,
                  puller.product[-1])


def _hides_rows(load: Load, puller: Puller, vg: ValueGraph) -> bool:
    """A float tensor over keys into which no gradient flows may hold huge negative numbers: an opaque additive mask."""
    return load.kind == FLOAT and "j" in load.variables and not learned(puller.loads[load.name])


def learned(v: Value) -> bool:
    """Can a gradient flow into `v`?"""
    seen, todo = set(), [v]
    while todo:
        x = todo.pop()
        if x in seen:
            continue
        seen.add(x)
        if x.op is None and x.owner is not None:
            example = x.owner.meta.get("example_value")
            grads = [t.requires_grad for t in torch.utils._pytree.tree_leaves(example) if isinstance(t, torch.Tensor)]
            if any(grads) and x.dtype.is_floating_point:
                return True
        if x.name not in ("detach.default",):
            todo.extend(y for y in x.inputs if y.dtype.is_floating_point)
    return False


_AUX_NAMES = {"bool": "mask", "int": "ids", "float": "bias"}


def _captured(puller: Puller, exprs: list[Expr], batch: list[str], renamed: dict[str, str]):
    """Name the captured tensors, arrange them so that their indices are plain axes, and give the substitution."""
    axes = [*batch, "i", "j"]
    final = {Var(old): Var(new) for old, new in renamed.items()}
    table: dict[Expr, Expr] = dict(final)
    aux: list[Aux] = []
    operands: list[Operand] = []
    known: dict[tuple, str] = {}
    counts: dict[str, int] = {}
    for load in _loads(exprs):
        value = puller.loads[load.name]
        index = [puller.affine(a) for a in load.index]
        operand = None
        if all(a is not None for a in index):
            operand = arrange(value, tuple(index), axes, puller.extents, keep_missing=False)
        if operand is not None:
            own = tuple(Var(renamed.get(n, n)) for n in operand.dims)
        else:
            operand = Operand(value, (), ("",) * len(load.index))
            own = tuple(substitute(a, final) for a in load.index)
        key = (operand.value, operand.steps)
        if key not in known:
            base = _AUX_NAMES[load.kind]
            counts[base] = counts.get(base, 0) + 1
            known[key] = base if counts[base] == 1 else f"{base}{counts[base]}"
            aux.append(Aux(known[key], load.kind, len(own)))
            operands.append(operand)
        table[load] = Load(known[key], own, load.kind)
    return aux, table, operands


def _loads(exprs: list[Expr]) -> list[Load]:
    """Distinct loads in the order in which the expressions read them."""
    return list(dict.fromkeys(x for e in exprs for x in walk(e) if isinstance(x, Load)))

