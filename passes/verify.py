"""Translation validation: one site's original calls against `spec.reference()`, both in float64 on sampled data.

The original is what stands between the operands and the output in the value graph, run call by call; the data includes
batches whose boolean masks are all false, and scores large enough for exp to underflow.
"""
from __future__ import annotations

import math
from dataclasses import replace
from typing import Callable

import torch

from flashfx.errors import VerifyError
from flashfx.compat import size_hint
from flashfx.reference import log_sum_exp, reference
from flashfx.spec import HIDING_FILL

from .find import Site
from .lift import Lifted
from .normalise import DROPOUT, SDPA
from .operands import Operand
from .values import Value, ValueGraph, source_line

LARGEST = 2 ** 25
"""Scores per site up to which verification runs; float64 attention beyond would take minutes."""


def verify(site: Site, lifted: Lifted, vg: ValueGraph) -> str | None:
    """None if the site computes what its spec says; a sentence if it was too large to check. Raises VerifyError."""
    number = lambda s: int(s) if isinstance(s, int) else size_hint(vg.shape_env, s.node.expr if isinstance(s, torch.SymInt) else s)
    extents = {name: number(s) for name, s in lifted.extents.items()}
    scores = math.prod(extents[n] for n in lifted.dims) * extents["i"] * extents["j"]
    if scores > LARGEST:
        return f"not verified: {scores} scores, more than {LARGEST}"
    operands = [lifted.q[0], lifted.k[0], lifted.v[0], *lifted.aux, *(lifted.sink or [])[:1]]
    spec = replace(lifted.spec, dropout=0.0)
    sizes = [*(extents[n] for n in lifted.dims), *(number(s) for s in lifted.sizes)]
    for trial, scale in enumerate((1.0, 1.0, 60.0)):
        overflows: list[Value] = []
        generator = torch.Generator().manual_seed(trial)
        data = {o.value: _sample(o.value, number, generator, scale, hide=trial == 1) for o in operands}
        expected = _run(site.out, dict(data), vg, number, generator, overflows)
        if overflows:  # exp without a shift, say: then what the model yields says nothing about the rewrite
            continue
        views = [_view(data[o.value], o, number) for o in operands]
        aux, sink = views[3: 3 + len(lifted.aux)], views[3 + len(lifted.aux):]
        got = reference(spec, *views[:3], aux, sizes)
        if sink:
            got = got * torch.sigmoid(log_sum_exp(spec, *views[:2], aux, sizes) - sink[0]).unsqueeze(-1)
        if trial == 2 and spec.is_masked:  # scores as large as this show through a mask's constant where all keys are hidden
            empty = log_sum_exp(spec, *views[:2], aux, sizes).isneginf().unsqueeze(-1).expand(got.shape)
            got = got.masked_fill(empty, 0.0)
            expected = expected.masked_fill(_shape_out(empty, lifted, expected.shape), 0.0)
        got = _shape_out(got, lifted, expected.shape)
        worst = _difference(got, expected)
        if not worst <= 1e-9 * max(1.0, _magnitude(expected)):
            where = source_line(site.out.owner)
            raise VerifyError(f"site {site.out.owner.name}{' at ' + where if where else ''} differs from its original by {worst:.3g} "
                              f"(float64, trial {trial}); lifted as\n{lifted.spec}\nPlease report this; options={{'disable': True}} avoids it.")
    return None


def _sample(v: Value, number: Callable, g: torch.Generator, scale: float, hide: bool) -> torch.Tensor:
    shape = [number(s) for s in v.shape]
    if v.dtype == torch.bool or not v.dtype.is_floating_point:
        data = torch.rand(shape, generator=g) < 0.7
        if hide and shape:
            data[0] = False
        return data.to(v.dtype)
    return torch.randn(shape, generator=g, dtype=torch.float64) * scale


def _view(t: torch.Tensor, o: Operand, number: Callable) -> torch.Tensor:
    for name, *args in o.steps:
        args = [tuple(number(a) for a in arg) if isinstance(arg, tuple) else number(arg) for arg in args]
        t = getattr(t, name)(*args)
    return t


def _shape_out(out: torch.Tensor, lifted: Lifted, shape) -> torch.Tensor:
    axes = [*lifted.dims, "i", "e"]
    flat = [n for group in lifted.out_dims for n in group]
    return out.permute([axes.index(n) for n in flat]).reshape(shape)


def _run(v: Value, known: dict[Value, torch.Tensor], vg: ValueGraph, number: Callable, generator: torch.Generator, overflows: list[Value]) -> torch.Tensor:
    """The value of `v` in float64 on the CPU, from the values in `known`; `overflows` gets what exceeds its dtype (masks apart, which are negative)."""
    todo = [v]
    while todo:
        x = todo[-1]
        if x in known:
            todo.pop()
        elif x in vg.constants:
            known[x] = _double(vg.constants[x].detach().cpu())
        elif x.op is None:  # a mask that hides nothing: read by the original, not by the spec
            known[x] = _sample(x, number, generator, 1.0, hide=False)
        elif missing := [y for y in x.inputs if y not in known]:
            todo.extend(missing)
        else:
            known[x] = _call(x, known, number)
            if x.dtype.is_floating_point and (known[x] == math.inf).any() and not any((known[y] == math.inf).any() for y in x.inputs):
                overflows.append(x)
            todo.pop()
    return known[v]


def _double(t):
    return t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t


def _call(x: Value, known: dict[Value, torch.Tensor], number: Callable) -> torch.Tensor:
    def convert(a):
        if isinstance(a, Value):
            return known[a]
        if isinstance(a, torch.SymFloat):
            return float(a)
        return number(a)

    args, kwargs = torch.utils._pytree.tree_map_only((Value, torch.SymInt, torch.SymFloat), convert, (x.args, dict(x.kwargs)))
    if x.op is DROPOUT:
        return args[0]
    if x.op is SDPA:
        q, k, v, mask, _, causal, scale, gqa = args
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=gqa)
    if "device" in kwargs:
        kwargs["device"] = "cpu"
    if isinstance(kwargs.get("dtype"), torch.dtype) and kwargs["dtype"].is_floating_point:
        kwargs["dtype"] = torch.float64
    if x.name == "_softmax.default":
        args = (*args[:2], False)
    result = x.op(*args, **kwargs)
    result = _double(result[x.out] if isinstance(result, (tuple, list)) else result)
    if x.dtype.is_floating_point:  # what overflows in the model's dtype: two added finfo.min are -inf
        result = torch.where(result.to(x.dtype).isinf(), result.sign() * math.inf, result)
        result = torch.where(result <= HIDING_FILL, result.to(x.dtype).double(), result)  # finfo.min swallows a score, in float16 too
    return result


def _magnitude(t: torch.Tensor) -> float:
    return t.nan_to_num().abs().max().item() if t.numel() else 0.0


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    if not torch.equal(a.isnan(), b.isnan()):
        return math.inf
    return _magnitude(a - b)


