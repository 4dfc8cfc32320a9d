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
        return Softmax(unshifted(_unclamped(v.args[0], dim), dim), dim)
    if v.name == "exp.default" and v.args[0].name == "_log_softmax.default":
        return Softmax(v.args[0].args[0], v.args[0].args[1] % len(v.shape))
    if v.name == "exp.default" and v.args[0].name == "sub.Tensor" and isinstance(v.args[0].args[1], Value):
        x, total = v.args[0].args[:2]
        found = summed_over(total, ("logsumexp.default",))
        if found is not None and found[0] is x and v.grad == found[2].grad:
            return Softmax(x, found[1], summed=True)
    if v.name == "div.Tensor" and (parts := over_its_sum(v)) is not None and parts[0].name == "exp.default":
        top, dim = parts
        power = _unclamped(top.args[0], dim)
        return Softmax(unshifted(power, dim), dim, bare=unshifted(power, dim, own=True) is power)
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


def unshifted(v: Value, dim: int, own: bool = False) -> Value:
    """What softmax over `dim` cannot tell from `v`: scores that a number of each row, made of them, is subtracted from.

    before -> after: x - amax(x, dim, keepdim=True) -> x; also logsumexp, or the largest of more rows than one, but for own: then exp does not
    underflow in every column of a row
    """
    found = _less_its_largest(v, dim, own)
    return v if found is None else found


def _unclamped(v: Value, dim: int) -> Value:
    """before -> after: clamp(x - amax(x, dim, keepdim=True), min=-50000) -> x - amax(x, dim, keepdim=True), of the same weights."""
    x = v
    while x.name in ("clamp.default", "clamp_min.default", "clamp_max.default") and _is_blunt(x):
        x = x.args[0]
    return v if _less_its_largest(x, dim, own=True) is None else x


def _is_blunt(v: Value) -> bool:
    """Does a clamp change no weight of scores less their largest, or less the logarithm of their sum? They are 0 at most, and exp is 0 from some point on."""
    least = -750.0 if v.dtype == torch.float64 else -110.0
    lo, hi = (None, v.args[1]) if v.name == "clamp_max.default" else (v.argument(1, "min"), v.argument(2, "max"))
    number = lambda x: isinstance(x, (int, float))
    return (lo is None or number(lo) and lo <= least) and (hi is None or number(hi) and hi >= 0)


def _less_its_largest(v: Value, dim: int, own: bool) -> Value | None:
    """`unshifted`, or None."""
    if v.name != "sub.Tensor" or v.kwargs or not isinstance(v.args[1], Value):
        return None
    peak, put_back = v.args[1], []
    while peak.name in ("detach.default", "expand.default", "alias.default", "clone.default", "unsqueeze.default"):
        if peak.name == "unsqueeze.default":
            put_back.insert(0, peak.args[1] % len(peak.shape))
        peak = peak.args[0]
    if peak.name not in ("amax.default", "max.dim", "max.default", "logsumexp.default") or peak.out or _number(peak.args[0]) is not _number(v.args[0]):
        return None
    axes, dims = range(len(v.shape)), peak.argument(1, "dim", []) if peak.name != "max.default" else []
    dims = {d % len(v.shape) for d in (dims if isinstance(dims, (list, tuple)) else [dims])} or {*axes}
    if dim not in dims or own and dims != {dim}:
        return None
    kept = peak.name != "max.default" and peak.argument(2, "keepdim", False)
    placed: list[int | None] = [None if a in dims else a for a in axes if kept or a not in dims]
    for position in put_back:
        placed.insert(position, None)
    return v.args[0] if not any(a is not None for a in placed) or placed == [None if a in dims else a for a in axes] else None
