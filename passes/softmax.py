"""Softmax in its spellings: PyTorch's own, and written out as exp over its sum."""
from __future__ import annotations

from dataclasses import dataclass

import torch

from .values import Value

CASTS = {"_to_copy.default"}


@dataclass(frozen=True)
class Softmax:
    """softmax(scores) over `dim`.

    bare     exp without a shift over its sum: a row that is hidden entirely by finite constants is 0 / 0 there
    summed   exp(s - logsumexp(s)): in such a row the sum's logarithm is lost in the constant, so the weights are no mean
    """

    scores: Value
    dim: int
    bare: bool = False
    summed: bool = False


def softmax_of(v: Value) -> Softmax | None:
    """What `v` is the softmax of, if it is one."""
    if v.name in ("_softmax.default", "_safe_softmax.default", "softmax.int"):
        dim = v.args[1] % max(len(v.shape), 1)
        return Softmax(unshifted(v.args[0], dim), dim)
    if v.name == "exp.default" and v.args[0].name == "_log_softmax.default":
        return Softmax(v.args[0].args[0], v.args[0].args[1] % len(v.shape))
    if v.name == "exp.default" and v.args[0].name == "sub.Tensor" and isinstance(v.args[0].args[1], Value):
        x, total = v.args[0].args[:2]
        found = summed_over(total, ("logsumexp.default",))
        if found is not None and found[0] is x and v.grad == found[2].grad:
            return Softmax(x, found[1], summed=True)
    if v.name == "div.Tensor" and (parts := over_its_sum(v)) is not None and parts[0].name == "exp.default":
        top, dim = parts
        scores = unshifted(top.args[0], dim)
        return Softmax(scores, dim, bare=scores is top.args[0])
    return None


def over_its_sum(v: Value) -> tuple[Value, int] | None:
    """before -> after: e / e.sum(dim, keepdim=True) -> e, dim"""
    if v.name != "div.Tensor" or not isinstance(v.args[1], Value):
        return None
    top, found = same_values(v.args[0]), summed_over(v.args[1])
    if found is None or same_values(found[0]) is not top or not v.grad == top.grad == found[2].grad:
        return None
    return top, found[1]


def summed_over(v: Value, names: tuple[str, ...] = ("sum.dim_IntList",)) -> tuple[Value, int, Value] | None:
    """(x, dim, the sum) where `v` is x summed over `dim` that is kept, or taken away and put back; rounding and expands aside."""
    put_back = None
    while v.name in ("expand.default", "clone.default", "alias.default") or is_rounding(v) or v.name == "unsqueeze.default" and put_back is None:
        if v.name == "unsqueeze.default":
            put_back = v.args[1] % len(v.shape)
        v = v.args[0]
    if v.name not in names or not isinstance(v.args[1], (list, tuple)) or len(v.args[1]) != 1:
        return None
    x, kept = v.args[0], bool(v.argument(2, "keepdim", False))
    dim = v.args[1][0] % max(len(x.shape), 1)
    return (x, dim, v) if kept and put_back is None or not kept and put_back == dim else None


_ROUNDED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def is_rounding(v: Value) -> bool:
    """A cast between ordinary float dtypes: it rounds and does no more."""
    return v.name in CASTS and v.dtype in _ROUNDED and v.args[0].dtype in _ROUNDED


def same_values(v: Value) -> Value:
    """`v` before copies and rounding. Not before a detach: what it yields has the value but not the gradient."""
    while v.name in ("clone.default", "alias.default") or is_rounding(v):
        v = v.args[0]
    return v


def _number(v: Value) -> Value:
    """`v` before copies, rounding and detaches: a shift matters to neither value nor gradient."""
    while (x := same_values(v)).name == "detach.default":
        v = x.args[0]
    return x


def unshifted(v: Value, dim: int) -> Value:
    """before -> after: x - amax(x, dim, keepdim=True) -> x, to which softmax is blind."""
    if v.name == "sub.Tensor" and isinstance(v.args[1], Value):
        peak, put_back = v.args[1], None
        while peak.name in ("detach.default", "expand.default", "alias.default", "clone.default") or peak.name == "unsqueeze.default" and put_back is None:
            if peak.name == "unsqueeze.default":
                put_back = peak.args[1] % len(peak.shape)
            peak = peak.args[0]
        of_max = peak.name in ("amax.default", "max.dim") and peak.out == 0
        if of_max and _number(peak.args[0]) is _number(v.args[0]):
            dims = peak.args[1] if isinstance(peak.args[1], (list, tuple)) else [peak.args[1]]
            kept = bool(peak.argument(2, "keepdim", False))
            if [d % len(v.shape) for d in dims] == [dim] and put_back == (None if kept else dim):
                return v.args[0]
    return v
