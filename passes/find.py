"""find: ValueGraph -> candidate sites: a softmax between two matrix products, every scaled_dot_product_attention call, and flex_attention's, to be refused by name."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator

import torch
from torch._ops import HigherOrderOperator

from flashfx.ops import BY_ATEN

from .rules import PRODUCTS, RULES as COMPUTED
from .softmax import CASTS, softmax_of
from .values import Value, ValueGraph, upstream
from .views import VIEWS

DROPOUTS = {"dropout.default"}


@dataclass(frozen=True)
class Site:
    """`out` is the second product or the call; `weights` the softmax result (None for a call), operand `side` of `out`."""

    out: Value
    weights: Value | None = None
    side: int = 0


def is_flex(v: Value) -> bool:
    """A result of a flex_attention call, which stays as it is: PyTorch traces its functions into graphs of their own."""
    return v.op is None and v.owner is not None and isinstance(v.owner.target, HigherOrderOperator) and v.owner.target.name() == "flex_attention"


def carries(v: Value) -> bool:
    """Does `v` hand its inputs' elements on, one by one?"""
    return v.name in VIEWS or v.name in BY_ATEN or v.name in CASTS or v.name in DROPOUTS or (v.name in COMPUTED and v.name not in PRODUCTS)


REORDERED = ("cat.default", "flip.default", "roll.default", "cumsum.default", "native_layer_norm.default", "max.dim", "amax.default", "nan_to_num.default",
              "round.default", "constant_pad_nd.default", "index_fill.int_Scalar")
"""Between the two products these forbid the rewrite; the site is found all the same, to be refused with a reason."""


def _in_the_way(v: Value) -> bool:
    """An op that forbids the rewrite: one of `REORDERED`, or a pointwise op that no row of `flashfx/ops.py` knows."""
    return v.name in REORDERED or v.op is not None and torch.Tag.pointwise in getattr(v.op, "tags", ())


def _products_above(v: Value) -> Iterator[Value]:
    def through(x: Value) -> list[Value]:
        return x.inputs if carries(x) or _in_the_way(x) or softmax_of(x) is not None else []
    return (x for x in upstream(v, through) if x.name in PRODUCTS)


def has_product_above(v: Value) -> bool:
    return next(_products_above(v), None) is not None


def is_of_layers(site: Site) -> bool:
    """Are both products those of layers with their parameters, and the softmax a gate or a router between them? Where it can be fused it may be: it is
    attention over what a model has learned. Where it cannot, nobody asked for it."""
    if site.weights is None:
        return False
    values = site.out.args[PRODUCTS[site.out.name][1 - site.side]]
    return _is_parameter(values) and all(any(_is_parameter(x.args[p]) for p in PRODUCTS[x.name]) for x in _products_above(softmax_of(site.weights).scores))


def _is_parameter(v: Value) -> bool:
    while v.name in VIEWS or v.name in CASTS:
        v = v.args[0]
    return v.op is None and v.owner is not None and isinstance(v.owner.meta.get("example_value"), torch.nn.Parameter)


def _products_below(vg: ValueGraph, v: Value) -> list[tuple[Value, int]]:
    found, seen, todo = [], set(), [v]
    while todo:
        x = todo.pop()
        if x in seen:
            continue
        seen.add(x)
        for user in vg.users()[x]:
            if user.name in PRODUCTS:
                for side, position in enumerate(PRODUCTS[user.name]):
                    if user.args[position] is x:
                        found.append((user, side))
            elif (carries(user) or _in_the_way(user)) and softmax_of(user) is None:
                todo.append(user)
    return sorted(set(found), key=lambda f: (f[0].number, f[1]))


def find(vg: ValueGraph) -> list[Site]:
    """Every site, in the order of its output."""
    sites = []
    for v in vg.values:
        if v in vg.superseded:
            continue
        if v.name == "sdpa.default" or is_flex(v) and all(v.owner is not s.out.owner for s in sites):  # the first of its results is the output
            sites.append(Site(v))
        elif (soft := softmax_of(v)) is not None and has_product_above(soft.scores):
            sites.extend(Site(out, v, side) for out, side in _products_below(vg, v) if out not in vg.superseded)
    return sorted(sites, key=lambda s: s.out.number)
