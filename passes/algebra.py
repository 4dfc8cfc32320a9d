"""algebra: identities that bring a site into the form softmax(scores) @ values. They change the value graph, never the Dynamo graph.

before -> after, each exact in real arithmetic:
    (a.unsqueeze(-2) * b.unsqueeze(-3)).sum(-1)   ->  a @ b.mT                          a product written as a sum of products
    (e @ v) / e.sum(-1, keepdim=True)             ->  (e / e.sum(-1, keepdim=True)) @ v  normalised late
    (p * m) / (p * m).sum(-1, keepdim=True)       ->  softmax(where(m, scores, -inf))    p = softmax(scores) or exp(scores), m of 0 and 1
    softmax((s - s.amax(-1, keepdim=True)) * c)   ->  softmax(s * c)
and those of `passes/linear.py`, `passes/sinks.py` and `passes/side_by_side.py`. A value that is rewritten keeps its identity and its Dynamo node; what is new belongs to that node too,
which disappears if the site is fused. A site that is refused is computed as the model wrote it.
"""
from __future__ import annotations

import torch

from .index import Affine, NotAffine, SplitAxis, broadcast, same, size
from .linear import distributed
from .maker import Maker, again, draws, path_to, plain, private, through
from .side_by_side import side_by_side
from .sinks import one_more_in_the_sum, padded_column
from .operands import constant_factor
from .rules import PRODUCTS
from .softmax import is_rounding, over_its_sum, same_values, softmax_of, unshifted
from .values import Value, ValueGraph
from .zeroed import zeroed

aten = torch.ops.aten


def rearrange(vg: ValueGraph) -> None:
    """Apply the identities to `vg` in place. Nothing here is needed for correctness; what does not fit is left as it is."""
    before, known = vg.needed(), len(vg.values)
    vg.forget_users()
    for v in list(vg.values):
        for rule in (product_of_sums, normalised_late, normalised_again, shifted_first, padded_column, one_more_in_the_sum, side_by_side):
            if rule(vg, v):
                break
    vg.forget_users()
    todo = [v for v in vg.values if v.name in PRODUCTS]
    for v in todo:  # grows
        if new := distributed(vg, v):
            todo += new
            vg.forget_users()
    vg.superseded = (before | set(vg.values[known:])) - vg.needed()


# ---------------------------------------------------------------------------------------------------- products

def product_of_sums(vg: ValueGraph, v: Value) -> bool:
    """A sum over one dim of a * b, where each of both has a dim that the other has not."""
    if v.name != "sum.dim_IntList" or v.args[0].name != "mul.Tensor" or not isinstance(v.args[1], (list, tuple)) or len(v.args[1]) != 1:
        return False
    both = v.args[0]
    a, b = both.args
    if not isinstance(b, Value) or not a.dtype == b.dtype == v.dtype or not v.dtype.is_floating_point or not v.grad == both.grad:
        return False
    rank, summed = len(both.shape), v.args[1][0] % len(both.shape)
    shapes = [[1] * (rank - len(t.shape)) + [size(s) for s in t.shape] for t in (a, b)]
    if not same(shapes[0][summed], shapes[1][summed]):
        return False
    ones = [[same(s, 1) for s in shape] for shape in shapes]
    others = [d for d in range(rank) if d != summed]
    neither = [d for d in others if ones[0][d] and ones[1][d]]
    own = []
    for mine, theirs, other in ((ones[0], ones[1], b), (ones[1], ones[0], a)):
        # a dim of extent 1 is one of ours if the other operand got it for that purpose: `(p * mask).sum(-1)` is no product
        found = [d for d in others if not mine[d] and theirs[d]] \
            or [d for d in neither if other.name == "unsqueeze.default" and other.args[1] % len(other.shape) + rank - len(other.shape) == d]
        if not found or found[-1] in own:
            return False
        own.append(found[-1])
    m, n = own
    make, batch = Maker(vg, v), [d for d in others if d not in own]
    left = make(aten.select.int, make(aten.permute.default, _padded(make, a, rank), [*batch, m, summed, n]), -1, 0)
    right = make(aten.select.int, make(aten.permute.default, _padded(make, b, rank), [*batch, summed, n, m]), -1, 0)
    product, order = make(aten.matmul.default, left, right), [*batch, m, n]
    out = make(aten.permute.default, product, [order.index(d) for d in others])
    if v.argument(2, "keepdim", False):
        out = make(aten.unsqueeze.default, out, summed)
    make.redefine(v, out)
    return True


def _padded(make: Maker, t: Value, rank: int) -> Value:
    for _ in range(rank - len(t.shape)):
        t = make(aten.unsqueeze.default, t, 0)
    return t


# ---------------------------------------------------------------------------------------------------- normalising

def normalised_late(vg: ValueGraph, v: Value) -> bool:
    """(e @ values) / e.sum(-1, keepdim=True), with views anywhere."""
    if v.name != "div.Tensor" or not isinstance(v.args[1], Value):
        return False
    divisor = path_to(v.args[1], lambda x: x.name == "sum.dim_IntList")
    path = path_to(v.args[0], lambda x: x.name in PRODUCTS)
    if divisor is None or path is None or draws(divisor) or draws(path) or len(divisor[-1].args[1]) != 1:
        return False
    total = divisor[-1]
    e, dim = same_values(total.args[0]), total.args[1][0] % len(total.args[0].shape)
    if not v.grad == e.grad == total.grad:
        return False
    product = path[-1]
    if "beta" in product.kwargs or product.name in ("baddbmm.default", "addmm.default"):
        return False
    frame = [f"x{d}" for d in range(len(v.shape))]
    extents = {n: size(s) for n, s in zip(frame, v.shape)}
    x = tuple(Affine.axis(n) for n in frame)
    for side, position in enumerate(PRODUCTS[product.name]):
        inside = path_to(product.args[position], lambda y: same_values(y) is e, linear=False)
        if inside is None:
            continue
        try:
            at = through(path, x, extents)
            extents["j"] = size(product.args[position].shape[-1 if side == 0 else -2])
            j = Affine.axis("j")
            own = (*at[:-2], at[-2], j) if side == 0 else (*at[:-2], j, at[-1])
            own = through(inside, broadcast(own, [size(s) for s in product.args[position].shape]), extents)
            summed = through(divisor, broadcast(x, [size(s) for s in v.args[1].shape]), extents)
        except (SplitAxis, NotAffine):
            return False
        if len(summed) == len(own):  # the sum keeps its dim
            summed = summed[:dim] + summed[dim + 1:]
        own, summed = plain(own, extents), plain(summed, extents)
        if own[dim] not in (j, Affine()) or own[:dim] + own[dim + 1:] != summed or own[dim] != j and not same(extents["j"], 1):
            return False
        if not private(vg, inside):
            return False
        make = Maker(vg, v)
        weights = make(aten.div.Tensor, e, make(aten.sum.dim_IntList, e, [dim], True))
        normalised_again(vg, weights)
        args = list(product.args)
        args[position] = again(make, inside, weights)
        out = again(make, path, make(product.op, *args, **product.kwargs))
        make.redefine(v, out if out.dtype == v.dtype else make(aten._to_copy.default, out, dtype=v.dtype))
        return True
    return False


def normalised_again(vg: ValueGraph, v: Value) -> bool:
    """Weights that were multiplied by a mask of 0 and 1, over their sum."""
    parts = over_its_sum(v)
    if parts is None:
        return False
    top, dim = parts
    kept: list[Value] = []
    make = Maker(vg, v)
    while (soft := softmax_of(top)) is None and top.name != "exp.default":
        hidden = zeroed(vg, make, top)
        if hidden is None or not top.grad == v.grad:
            return False
        top = same_values(hidden.of)
        kept.append(hidden.condition)
    if not kept or soft is not None and soft.dim != dim or not top.grad == v.grad or top.name == "_safe_softmax.default":
        return False
    scores = unshifted(top.args[0], dim, own=True) if soft is None else soft.scores
    for condition in kept:
        scores = make(aten.where.ScalarOther, condition, scores, -float("inf"))
    out = make(aten._softmax.default, scores, dim, False)
    make.redefine(v, out if out.dtype == v.dtype else make(aten._to_copy.default, out, dtype=v.dtype))
    vg.renormalised.add(v if v.name == "_softmax.default" else out)
    return True


def shifted_first(vg: ValueGraph, v: Value) -> bool:
    """Scores that their largest is subtracted from before they are scaled."""
    if v.name != "_softmax.default":
        return False
    path = [v.args[0]]
    while is_rounding(path[-1]) or constant_factor(path[-1]) is not None:
        path.append(path[-1].args[0])
    shifted = path[-1]
    scores = unshifted(shifted, v.args[1] % max(len(v.shape), 1))
    if len(path) == 1 or scores is shifted or not all(x.grad == v.grad for x in path):
        return False
    make = Maker(vg, v)
    for x in reversed(path[:-1]):
        scores = make(x.op, scores, *x.args[1:], **x.kwargs)
    v.args = (scores, *v.args[1:])
    return True
