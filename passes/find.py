"""find: ValueGraph -> candidate sites: a softmax between two matrix products, and every scaled_dot_product_attention call."""
from __future__ import annotations

from dataclasses import dataclass

import torch

from flashfx.ops import BY_ATEN

from .rules import PRODUCTS, RULES as COMPUTED
from .values import Value, ValueGraph, upstream
from .views import VIEWS

CASTS = {"_to_copy.default"}
DROPOUTS = {"dropout.default"}


@dataclass(frozen=True)
class Site:
    """`out` is the second product or the SDPA call; `weights` the softmax result (None for SDPA), operand `side` of `out`."""

    out: Value
    weights: Value | None = None
    side: int = 0


def softmax_of(v: Value) -> tuple[Value, int] | None:
    """(scores, dim) if `v` is a softmax, in PyTorch's spelling or written out as exp over its sum."""
    if v.name in ("_softmax.default", "_safe_softmax.default", "softmax.int"):
        return v.args[0], v.args[1] % max(len(v.shape), 1)
    if v.name == "exp.default" and v.args[0].name == "_log_softmax.default":
        return v.args[0].args[0], v.args[0].args[1] % len(v.shape)
    if v.name == "exp.default" and v.args[0].name == "sub.Tensor" and isinstance(v.args[0].args[1], Value):
        x, total = v.args[0].args[:2]
        if total.name == "logsumexp.default" and total.args[0] is x and total.argument(2, "keepdim", False) and len(total.args[1]) == 1 \
                and v.grad == total.grad:
            return x, total.args[1][0] % len(v.shape)
    if v.name == "div.Tensor" and isinstance(v.args[1], Value):
        top, bottom = same_values(v.args[0]), v.args[1]
        while bottom.name == "expand.default" or is_rounding(bottom):
            bottom = bottom.args[0]
        if top.name == "exp.default" and bottom.name == "sum.dim_IntList" and same_values(bottom.args[0]) is top \
                and v.grad == top.grad == bottom.grad \
                and bottom.argument(2, "keepdim", False) and len(bottom.args[1]) == 1:
            dim = bottom.args[1][0] % len(v.shape)
            return unshifted(top.args[0], dim), dim
    return None


_ROUNDED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def is_rounding(v: Value) -> bool:
    """A cast between ordinary float dtypes: it rounds and does no more."""
    return v.name in CASTS and v.dtype in _ROUNDED and v.args[0].dtype in _ROUNDED


def same_values(v: Value) -> Value:
    """`v` before copies and rounding. Not before a detach: what it yields has the value but not the gradient."""
    while v.name in ("clone.default", "alias.default") or is_rounding(v):
        v = v.args[0]
    return v


def unshifted(v: Value, dim: int) -> Value:
    """before -> after: x - amax(x, dim, keepdim=True) -> x, to which softmax is blind."""
    if v.name == "sub.Tensor" and isinstance(v.args[1], Value):
        peak = v.args[1]
        while peak.name in ("detach.default", "expand.default", "alias.default"):
            peak = peak.args[0]
        of_max = peak.name in ("amax.default", "max.dim") and peak.out == 0
        if of_max and same_values(peak.args[0]) is same_values(v.args[0]) and peak.argument(2, "keepdim", False):
            dims = peak.args[1] if isinstance(peak.args[1], (list, tuple)) else [peak.args[1]]
            if [d % len(v.shape) for d in dims] == [dim]:
                return v.args[0]
    return v


def carries(v: Value) -> bool:
    """Does `v` hand its inputs' elements on, one by one?"""
    return v.name in VIEWS or v.name in BY_ATEN or v.name in CASTS or v.name in DROPOUTS or (v.name in COMPUTED and v.name not in PRODUCTS)


_REORDERED = ("cat.default", "flip.default", "roll.default", "cumsum.default", "native_layer_norm.default", "max.dim", "amax.default", "nan_to_num.default",
              "round.default")
"""Between the two products these forbid the rewrite; the site is found all the same, to be refused with a reason."""


def has_product_above(v: Value) -> bool:
    def through(x: Value) -> list[Value]:
        return x.inputs if carries(x) or x.name in _REORDERED or softmax_of(x) is not None else []
    return any(x.name in PRODUCTS for x in upstream(v, through))


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
            elif (carries(user) or user.name in _REORDERED) and softmax_of(user) is None:
                todo.append(user)
    return sorted(set(found), key=lambda f: (f[0].number, f[1]))


def find(vg: ValueGraph) -> list[Site]:
    """Every site, in the order of its output."""
    sites = []
    for v in vg.values:
        if v.name == "sdpa.default":
            sites.append(Site(v))
        elif (soft := softmax_of(v)) is not None and has_product_above(soft[0]):
            sites.extend(Site(out, v, side) for out, side in _products_below(vg, v))
    return sorted(sites, key=lambda s: s.out.number)
