"""lift: Site -> spec and operands, by evaluating the graph at symbolic indices.

The output product is read at (batch…, i, j): its left operand gives the path to the softmax and so the names of the axes, its
right operand is v. The scores are pulled at the same indices; the first matrix product met is q . k. Every permute, dim,
expand and slice on the way enters the index algebra, so nothing about the layout is assumed.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from flashfx.expr import QK, TRUE, Call, Const, Expr, Load, Var, call, cast, conjunction, substitute, walk
from flashfx.ops import COMPARISONS
from flashfx.spec import AttentionSpec, EmptyRow

from .additive import additive, could_hide, terms
from .find import DROPOUTS, REORDERED, Site, carries, has_product_above
from .held import Held
from .index import Affine, Index, NotAffine, Size, Specialised, SplitAxis, broadcast, head_size, number, quotient, same, size
from .masks import Fill, contract, normal_condition, normal_score, peel, unpeeled
from .operands import Operand, captured, trace_back
from .pull import Puller, gradient_ends
from .rows import every_row_sees, refuse_nan
from .rules import PRODUCTS, Product
from .softmax import Softmax, softmax_of
from .values import Refused, Value, ValueGraph, upstream
from .weights import Dropped, LogSum, kept_keys, log_sums, sink_of, walk_weights

_AXIS = {"i": "query", "j": "key"}
BATCH_NAMES = ("b", "h", "g", "x", "y", "z")


@dataclass
class Lifted:
    """What lift found. Operand candidates are ordered from the farthest source.

    sink    a further score of each row that takes part in the softmax only (an attention sink): with w the weight exp(sink), the
            output is the spec's times sum exp(s) / (sum exp(s) + w) = sigmoid(lse - sink)
    log_sums  log-sum-exps of the scores that other parts of the graph read, and our op yields
    columns   what stands in q and k as further columns (`columns.py`): how many, at which indices read, of what; stood: is any tensor read apart for that?
    """

    spec: AttentionSpec
    q: list[Operand]
    k: list[Operand]
    v: list[Operand]
    aux: list[Operand]
    extents: dict[str, Size]
    sizes: list[Size]
    out_dims: list[list[str]]
    dims: tuple[str, ...]
    random: tuple | None = None
    product: Value | None = None
    sink: list[Operand] | None = None
    log_sums: list[LogSum] = field(default_factory=list)
    columns: list[tuple[int, str, Operand]] = field(default_factory=list)
    stood: bool = False


@dataclass
class _Frame:
    """The axes of the output: each original dim is a list of axes, refined when a view splits one.

    The rows are a dim too: heads or batches that were folded into them (`p.reshape(-1, N) @ shared_values`) come out again.
    parted, leaves and apart: as `Puller` has them.
    """

    dims: list[list[str]]
    extents: dict[str, Size] = field(default_factory=dict)
    rows: list[str] = field(default_factory=lambda: ["i"])
    parted: bool = False
    leaves: frozenset[Value] = frozenset()
    apart: bool = True

    def index(self, axes: list[str]) -> Affine:
        out = Affine()
        for name in axes:
            out = out * self.extents[name] + Affine.axis(name)
        return out

    def split(self, axis: str, inner: Size) -> None:
        outer = quotient(self.extents[axis], inner)
        names = ("r", "i") if axis == "i" and "r" not in self.extents else (f"{axis}o", f"{axis}i")
        del self.extents[axis]
        for dim in (*self.dims, self.rows):
            if axis in dim:
                at = dim.index(axis)
                dim[at: at + 1] = names
        self.extents[names[0]], self.extents[names[1]] = outer, inner

    @property
    def batch(self) -> list[str]:
        return [name for dim in (*self.dims, self.rows) for name in dim if name != "i"]


class _NoProduct(Refused):
    """The scores come from no product that is understood; if another reading was tried before, its reason says more."""


class _OtherProduct(Exception):
    """The product that was taken for the dot product decides the mask alone."""

    def __init__(self, value: Value, why: Refused):
        super().__init__(why.reason)
        self.value, self.why = value, why


def _frame_of(site: Site, apart: bool, parted: bool = False, leaves: frozenset[Value] = frozenset()) -> _Frame:
    shape = [size(s) for s in site.out.shape]
    frame = _Frame([[f"x{d}"] for d in range(len(shape) - 2)], {f"x{d}": s for d, s in enumerate(shape[:-2])}, parted=parted, leaves=leaves, apart=apart)
    frame.extents["i"] = shape[-2 if site.side == 0 else -1]
    return frame


def lift(site: Site, vg: ValueGraph, reached: list[str] | None = None, apart: bool = True) -> Lifted:
    """Raises `Refused`. `reached` gets what was understood on the way, a sentence for each step; apart: as `Puller`."""
    frame, why = _frame_of(site, apart), None
    understood = [] if reached is None else reached
    before = len(understood)
    for _ in range(16):
        del understood[before:]
        try:
            return (_lift_call if site.weights is None else _lift_products)(site, vg, frame, understood)
        except _OtherProduct as other:
            why = why or other.why
            if other.value in frame.leaves or len(frame.leaves) == 4:
                raise why from None
            frame = _frame_of(site, apart, False, frame.leaves | {other.value})
        except Refused as error:
            raise why if why is not None and isinstance(error, _NoProduct) else error from None
        except SplitAxis as split:
            splittable = split.axis in frame.extents and not (split.axis == "i" and "r" in frame.extents)
            if not splittable and not frame.parted:
                why = why or Refused(f"a view splits the {_AXIS.get(split.axis, 'head')} axis by {split.inner}", site.out,
                                     "keep positions and head channels in one dim each")
                frame = _frame_of(site, apart, True, frame.leaves)
                continue
            if not splittable:
                raise why from None
            frame.split(split.axis, split.inner)
        except Specialised:
            frame = _frame_of(site, apart, frame.parted, frame.leaves)
        except NotAffine as error:
            raise Refused(str(error), site.out, "give views the numbers of heads and channels, not sizes of other dims") from None
    raise Refused("the batch axes split without end", site.out, "please report this with the model and the log")


# ---------------------------------------------------------------------------------------------------- the two kinds of site

def _lift_products(site: Site, vg: ValueGraph, frame: _Frame, reached: list[str]) -> Lifted:
    out, side = site.out, site.side
    left, right = (out.args[p] for p in PRODUCTS[out.name])
    if out.name in ("baddbmm.default", "addmm.default") and not is_zero(out.kwargs.get("beta", 1)):
        raise Refused(f"the second product also adds a tensor ({out.name})", out, "add it after the product")
    weights, values = (left, right) if side == 0 else (right, left)
    n = size(weights.shape[-1 if side == 0 else -2])
    extents = {**frame.extents, "j": n, "e": head_size(values.shape[-1 if side == 0 else -2])}
    batch = tuple(frame.index(dim) for dim in frame.dims)
    i, j, e = frame.index(frame.rows), Affine.axis("j"), Affine.axis("e")
    weights_at = broadcast((*batch, i, j) if side == 0 else (*batch, j, i), [size(s) for s in weights.shape])
    values_at = broadcast((*batch, j, e) if side == 0 else (*batch, e, j), [size(s) for s in values.shape])
    at, dropped, kept, cleaned = walk_weights(weights, weights_at, site.weights, extents, vg, out.grad)
    reached.append(f"the second product reads the softmax through views and casts{' and one dropout' if dropped else ''} only")
    soft = softmax_of(site.weights)
    scores, dim = soft.scores, soft.dim
    over = at[dim]
    if not (over.single == "j" or same(n, 1) and not over.terms and over.constant == 0):
        if over.terms and over.single is None and "j" in over.axes and sink_of(site.weights, over, n) is None:
            raise Refused("the softmax and the second product see different keys", site.weights,
                          "weights that are cut, strided or mixed with other axes after the softmax are not supported")
        if sink_of(site.weights, over, n) is None:
            raise Refused(f"the softmax runs over dim {dim}, the second product sums over another axis", site.weights,
                          "this is attention only if the softmax normalises over the keys")
    sink = sink_of(site.weights, over, n)
    if sink is not None:
        scores, column = sink
    elif over.single == "j" and not same(own := size(site.weights.shape[dim]), n):
        raise Refused(f"the softmax normalises over {own} elements, the second product sums over {n} of them", site.weights,
                      "only one further column (an attention sink), concatenated to the scores, may take part in the softmax")
    elif any("j" in a.axes for d, a in enumerate(at) if d != dim) or not same(size(site.weights.shape[dim]), n):
        raise Refused("the softmax and the second product see different keys", site.weights,
                      "weights that are cut or mixed with other axes after the softmax are not supported")
    if sink is not None:
        at = tuple(Affine.axis("j") if d == dim else a for d, a in enumerate(at))
    reached.append(f"the softmax normalises over the {n} keys that the second product sums over")
    puller = Puller(extents, vg.constants, grad=out.grad, held=Held(vg, out.owner), parted=frame.parted, leaves=frame.leaves, apart=frame.apart)
    if out.grad and site.weights.stops_gradient:
        raise gradient_ends(site.weights)
    score = puller.pull(scores, at)
    safe = site.weights.name == "_safe_softmax.default"
    column = None if sink is None else (column, tuple(Affine() if d == dim else a for d, a in enumerate(at)))
    lifted = _finish(site, vg, frame, puller, reached, score, None, safe, values, values_at, dropped, column, kept, at, cleaned)
    lifted.out_dims = [*frame.dims, frame.rows, ["e"]] if side == 0 else [*frame.dims, ["e"], frame.rows]
    return lifted


def is_zero(x) -> bool:
    return isinstance(x, (int, float)) and x == 0


def _lift_call(site: Site, vg: ValueGraph, frame: _Frame, reached: list[str]) -> Lifted:
    call_ = site.out
    q, k, v, mask, p, causal, scale, gqa = call_.args
    extents = {**frame.extents, "j": size(k.shape[-2]), "d": head_size(q.shape[-1]), "e": head_size(v.shape[-1])}
    batch = tuple(frame.index(dim) for dim in frame.dims)
    i, j, d, e = (Affine.axis(a) for a in "ijde")

    def heads(t: Value) -> Index:
        if not gqa or same(size(t.shape[-3]), size(q.shape[-3])):
            return batch
        group = quotient(size(q.shape[-3]), size(t.shape[-3]))
        if group is None:
            raise Refused("enable_gqa with query heads that are no multiple of the key heads", call_, "keep the numbers of heads static")
        last = frame.dims[-1]
        if not same(extents[last[-1]], group):
            raise SplitAxis(last[-1], group)
        outer = Affine()
        for name in last[:-1]:
            outer = outer * extents[name] + Affine.axis(name)
        return (*batch[:-1], outer)

    puller = Puller(extents, vg.constants, grad=call_.grad, held=Held(vg, call_.owner), apart=frame.apart)
    at = lambda t, lead, *own: broadcast((*lead, *own), [size(s) for s in t.shape])
    puller.product = Product(q, at(q, batch, i, d), k, at(k, heads(k), j, d), False, None)
    score: Expr = call("mul", QK, Const(float(number(scale)) if scale is not None else 1.0 / math.sqrt(int(q.shape[-1]))))
    visible: Expr = call("le", Var("j"), Var("i")) if causal else TRUE
    if mask is not None:
        m = puller.pull(mask, at(mask, batch, i, j))
        if mask.dtype == torch.bool:
            visible = call("and", visible, cast(m, "bool"))
        else:
            score = puller.apply("add", [score, m], q.dtype)
    lifted = _finish(site, vg, frame, puller, reached, score, visible, True, v, at(v, heads(v), j, e),
                     Dropped(call_, p) if number(p) else None)
    lifted.out_dims = [*frame.dims, ["i"], ["e"]]
    return lifted


def _compared_with_its_own(score: Expr, puller: Puller) -> Value | None:
    """What a score is compared with that is made of the scores, their largest, say. Computed anew, it differs from itself by rounding."""
    product = puller.product.value
    if product is None:
        return None
    twins = lambda v: v is product or v.name == product.name and v.inputs == product.inputs
    compared = (load for x in walk(score) if isinstance(x, Call) and x.op in COMPARISONS and QK in x.leaves for load in x.loads)
    return next((v for v in (puller.loads[load.name] for load in compared) if any(map(twins, upstream(v)))), None)


def _finish(site, vg, frame, puller, reached, score, visible, safe, values, values_at, dropped, column=None, kept=(), weights_at=(), cleaned=False) -> Lifted:
    product, grad = puller.product, site.out.grad
    if product is None and puller.splits:
        raise puller.splits.get("i", puller.splits.get("j"))  # rows may fold other axes; lift refuses what it cannot unfold
    if product is None:
        stop = _obstacle(softmax_of(site.weights).scores)
        raise _NoProduct("no matrix product over queries and keys was found in the scores" if stop is None else
                      f"{'another matrix product' if stop.name in PRODUCTS else stop.name.partition('.')[0].lstrip('_')} stands between the first "
                      "product and the softmax", stop or site.weights,
                      "the scores must come from q @ k^T through views and pointwise ops")
    query, key = (product.left, product.left_at), (product.right, product.right_at)
    if product.swapped:
        query, key = key, query
    if grad and product.value is not None and product.value.stops_gradient:
        raise gradient_ends(product.value)
    if QK not in score.leaves:
        raise Refused("the scores do not depend on the matrix product", site.weights or site.out,
                      "the softmax is a constant that can be computed once")

    reached.append(f"the scores are computed element by element from the first product qk: {_shortened(score, frame, puller)}")
    masked = peel(score, puller.dtypes)
    score = masked.score
    why = None
    if any(QK in f.visible.leaves for f in masked.fills):
        why = Refused("the mask depends on the scores", site.weights or site.out, "a mask must be known before the scores")
    elif (own := _compared_with_its_own(score, puller)) is not None:
        why = Refused("the scores are compared with a tensor that is computed from them", own, "compare them with what is known before them, e.g. scores.clamp(-50, 50)")
    if why is not None:
        raise why if product.value is None else _OtherProduct(product.value, why)
    fills = [*([Fill(visible, -math.inf, False)] if visible not in (None, TRUE) else []), *masked.fills]
    if (lost := unpeeled(score)) is not None:
        raise Refused(f"a masked score goes through {lost.op}, and what becomes of the mask's constant is not known", site.weights or site.out,
                      "scale the scores before they are masked")
    hiding = [t for t in terms(score) if "j" in t.variables and could_hide(t, puller)]
    soft = None if site.weights is None else softmax_of(site.weights)
    bare = soft is not None and soft.bare  # 0 / 0 in a row that is hidden entirely, whatever hides it
    refuse_nan(site, () if cleaned else vg.blanked, score, None if hiding else [f.visible for f in fills if bare or math.isinf(f.value)], puller)
    empty, over, blocked = EmptyRow.NAN, TRUE, []
    try:
        if site.weights in vg.shifted and (hiding or len(fills) > 1 or any(math.isinf(f.value) for f in fills)):
            raise Refused("an attention sink beside scores that their largest is subtracted from: rows that a mask of -inf hides entirely are NaN, not 0",
                          site.weights, "let the sink, or 0, be the least that is subtracted")
        _empty_rows_known(site, vg, soft, bool(hiding) or any(math.isfinite(f.value) for f in fills))
        if grad:
            _no_gradient_around(masked.fills, puller, site)
        if column is None and not bare:
            empty, over, blocked = contract(fills, safe)
    except Refused:  # a row that is hidden entirely follows no rule of ours: is there one?
        if hiding or not every_row_sees(normal_condition(conjunction(f.visible for f in fills), puller), puller.extents):
            raise
    shown = conjunction(f.visible for f in fills)
    if hiding:
        dtype = puller.dtypes.get(score, torch.float64 if site.out.dtype == torch.float64 else torch.float32)
        shown, empty, over, blocked = additive(hiding, dtype, [] if bare else fills, safe, site.weights or site.out)
        shown = conjunction([shown, *(f.visible for f in fills)])
        empty, over = (EmptyRow.NAN, TRUE) if bare else (empty, over)
    for condition in blocked:  # no gradient flows into scores that were replaced
        score = call("where", condition, score, Const(0.0))
    shown = normal_condition(shown, puller)
    over = TRUE if shown == TRUE else normal_condition(over, puller)
    if kept:
        nan_stays = shown != TRUE and empty is EmptyRow.NAN and any(k.how.factor is not None for k in kept)
        if kept_keys(kept, puller) != shown or column is not None or bare or nan_stays and any(k.how.factor is None for k in kept):
            raise Refused(f"the attention weights are changed by {kept[0].of.name.partition('.')[0]} before the second product: masked, and not "
                          "normalised again", kept[0].of, "mask the scores instead, before the softmax, or divide the masked weights by their sum")
        empty, over = EmptyRow.NAN if nan_stays else EmptyRow.ZERO, TRUE  # only rows that are hidden entirely had weights to lose
    reached.append("nothing is masked" if shown == TRUE else f"the mask is a condition over indices and captured tensors: {_shortened(shown, frame, puller)}")
    extents, batch = puller.extents, frame.batch
    q, fq = trace_back(*query, [*batch, "i", "d"], extents, vg, grad, scale=True)
    k, fk = trace_back(*key, [*batch, "j", "d"], extents, vg, grad, scale=True)
    v, _ = trace_back(values, values_at, [*batch, "j", "e"], extents, vg, grad, scale=False)
    for name, found in (("query", q), ("key", k), ("value", v)):
        if not found:
            raise Refused(f"the {name} operand is no view with batch, position and head-size dims", site.out,
                          f"the {name} may depend on batch axes, its position and the head's channels")
    reached.append("q, k and v are views with batch, position and head-size dims")
    served = [] if soft is None or column is not None or hiding else \
        log_sums(soft, weights_at, vg, site.out.owner, {n: e for n, e in extents.items() if n in (*batch, "i", "j")},
                 {f.value for f in fills if math.isfinite(f.value)})
    if grad and any(puller.loads[load.name].reaches_parameters(through_stops=False) for load in score.loads):
        served = []  # no kernel yields the gradients of both
    score = normal_score(substitute(score, {QK: call("mul", QK, Const(fq * fk))}) if fq * fk != 1.0 else score, shiftable=column is None and not served)
    if shown == TRUE:
        empty = EmptyRow.NAN
    elif cleaned and empty is EmptyRow.NAN and column is None:
        empty = EmptyRow.ZERO
    sink = None
    if column is not None:
        if grad and any(puller.loads[load.name].reaches_parameters(through_stops=False) for load in score.loads):
            raise Refused("an attention sink beside a captured tensor that needs a gradient", site.weights,
                          "no kernel yields both gradients at once")
        sink, _ = trace_back(*column, [*batch, "i"], extents, vg, grad, scale=False)
        if not sink:
            raise Refused("the column beside the scores is no view with batch and query dims", site.weights,
                          "an attention sink may depend on batch axes and the query's position")
        empty, over = (EmptyRow.ZERO if shown != TRUE else EmptyRow.NAN), TRUE  # the sink takes all the weight

    renamed = {old: new for old, new in zip(batch, BATCH_NAMES)}
    if len(batch) > len(BATCH_NAMES):
        raise Refused(f"{len(batch)} batch axes, at most {len(BATCH_NAMES)} are supported", site.out, "fold some of them together")
    aux, table, operands = captured(puller, [score, shown, over], batch, renamed)
    score, shown, over = (substitute(e, table) for e in (score, shown, over))
    used = {n for e in (score, shown, over) for n in e.variables}
    sizes = [(s, name) for s, name in puller.names.items() if name in used]
    depends = lambda found: frozenset(renamed[n] for n in found[0].dims if n in renamed)
    p = 0.0 if dropped is None else number(dropped.p)
    if not 0.0 <= p < 1.0:
        raise Refused(f"dropout with p={p}", dropped.value, "p must be at least 0 and less than 1")
    spec = AttentionSpec(
        axes=tuple(renamed[n] for n in batch), q=depends(q), k=depends(k), v=depends(v), score=score, visible=shown,
        empty_row=empty, empty_over=over, dropout=float(p), aux=tuple(aux), sizes=tuple(name for _, name in sizes))
    random = None if dropped is None else (dropped.value, dropped.order({n: extents[n] for n in (*batch, "i", "j")}))
    return Lifted(spec, q, k, v, operands, extents, [s for s, _ in sizes], [], tuple(batch), random, product.value, sink, served, stood=puller.stood)


def _shortened(e: Expr, frame: _Frame, puller: Puller) -> str:
    """For people: axes by the names that the spec will give them, captured tensors by their nodes'."""
    table: dict[Expr, Expr] = {Var(old): Var(new) for old, new in zip(frame.batch, BATCH_NAMES)}
    named = lambda v: v.owner.name if v.owner is not None else "constant"
    table |= {x: Load(named(puller.loads[x.name]), tuple(substitute(i, table) for i in x.index), x.kind) for x in e.loads}
    return text if len(text := str(substitute(e, table))) <= 160 else f"{text[:157]}..."


def _empty_rows_known(site: Site, vg: ValueGraph, soft: Softmax | None, finite: bool) -> None:
    """Raises Refused where a row that finite constants hide entirely follows no rule of ours."""
    if finite and soft is not None and soft.summed:
        raise Refused("exp(scores - logsumexp(scores)) with a mask of a finite constant: the weights of a row that is hidden entirely do not sum to 1",
                      site.weights, "use softmax, or hide by -inf")
    if finite and site.weights in vg.renormalised:
        raise Refused("weights are masked and normalised again after a mask of a finite constant: rows that only both hide follow no single rule",
                      site.weights, "mask the scores once, or hide by -inf")


def _no_gradient_around(fills: list[Fill], puller: Puller, site: Site) -> None:
    for outside in (t for f in fills if not f.added and math.isfinite(f.value) for t in f.outside):
        if QK in outside.leaves or any(puller.loads[load.name].reaches_parameters(through_stops=False) for load in outside.loads):
            raise Refused("a term that needs a gradient is added after a mask that replaces scores by a finite constant: rows that are hidden entirely "
                          "have a gradient for the term alone", site.weights or site.out, "add the term before the mask, or hide by -inf")


def _obstacle(scores: Value) -> Value | None:
    """The first value above the scores that hands nothing on by itself, but depends on a product."""
    def hands_on(v: Value) -> bool:
        return carries(v) and v.name not in DROPOUTS and v.name not in REORDERED

    def through(v: Value) -> list[Value]:
        return v.inputs if v.name not in PRODUCTS and hands_on(v) else []

    found = [v for v in upstream(scores, through) if v.name in PRODUCTS or not hands_on(v)]
    return next((v for v in found if any(has_product_above(x) for x in v.inputs)), None)
