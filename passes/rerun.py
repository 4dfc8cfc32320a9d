"""Run values of the original graph, and nodes that the rewrite put in its place, on sampled data: in float64 on the CPU, or as the model computes.

Both sides read the same leaves: the operands of a site, and whatever else either of them turns out to read.
"""
from __future__ import annotations

import contextlib
from typing import Any, Callable

import torch
from torch import fx

from flashfx.compat import size_hint
from flashfx.spec import HIDING_FILL, AttentionSpec

from .normalise import DROPOUT, SDPA
from .values import Value, ValueGraph, upstream


_PRODUCTS = ("mul", "div", "mm", "bmm", "matmul")
_HELD = ("add", "sub", "rsub", "baddbmm", "addmm", "scalar_tensor", "full", "full_like", "new_full")
"""What a mask's constant comes out of as the model's dtype holds it: sums that it swallows, and what makes it."""


class Rerun:
    """One run of both sides.

    data     value -> its sampled data in float64; a value that is not in it and has no inputs is sampled when it is met
    double   compute in float64 on the CPU, where a result that overflows in the model's dtype is infinite; else as the model does, where it does
    rounded  round the data to the model's dtypes first
    moved    then move each number by at most one rounding step: results differ as much as rounding makes them
    gradients of what is read are recorded for `leaves`
    device   where to compute in the model's dtype; None: where the model does
    timed    run it as the model would, dropout and PyTorch's choice of an SDPA kernel included: to look at the clock, not at the result
    """

    def __init__(self, vg: ValueGraph, data: dict[Value, torch.Tensor], sample: Callable[[Value], torch.Tensor], *, double: bool, rounded: bool,
                 leaves: list[Value], moved: bool = False, device: torch.device | None = None, timed: bool = False):
        self.vg, self.double, self.rounded, self.sample, self.moved, self.timed = vg, double, rounded, sample, moved, timed
        self.device = torch.device("cpu") if double else device
        self.overflows: list[Value] = []
        self.vanishes: list[Value] = []
        self.given = set(data)
        self.values: dict[Value, Any] = {}
        self.nodes: dict[fx.Node, Any] = {}
        self.leaves = {v: self._placed(v, data[v]).requires_grad_() for v in leaves}
        self.values |= {v: self.leaves[v] if v in self.leaves else self._placed(v, t) for v, t in data.items()}

    def number(self, s) -> int:
        return int(s) if isinstance(s, int) else size_hint(self.vg.shape_env, s.node.expr if isinstance(s, torch.SymInt) else s)

    def _placed(self, v: Value, t: torch.Tensor) -> torch.Tensor:
        if not t.is_floating_point():
            return t.to(self.device or v.fake.device)
        t = t.to(v.dtype) if self.rounded else t
        if self.moved:
            t = t * (1 + torch.finfo(t.dtype).eps * torch.randint(-1, 2, t.shape, generator=torch.Generator().manual_seed(v.number))).to(t.dtype)
        return t.double().clone() if self.double else t.to(self.device or v.fake.device).clone()

    def shared(self, moving: set[Value], step: int) -> list[torch.Tensor]:
        """Forget what was computed from `moving`; what is left was computed once, as if for all layers. Returns the tensors that take gradients."""
        for v in self.values:  # in the order in which they were computed
            if any(x in moving for x in v.inputs):
                moving.add(v)
        dependent: set[fx.Node] = set()
        for n in self.nodes:
            if n in self.vg.steps and self.vg.held(n, step) in moving or n not in self.vg.steps and dependent & set(n.all_input_nodes):
                dependent.add(n)
        leaf = lambda t: t.detach().requires_grad_(t.requires_grad)
        self.values = {v: t if v in self.leaves else leaf(t) for v, t in self.values.items() if v in self.given or v not in moving}
        self.nodes = {n: torch.utils._pytree.tree_map_only(torch.Tensor, leaf, t) for n, t in self.nodes.items() if n not in dependent and n not in self.vg.steps}
        found = [t for t in torch.utils._pytree.tree_leaves([list(self.values.values()), list(self.nodes.values())]) if isinstance(t, torch.Tensor)]
        return [t for t in found if t.requires_grad]

    # ------------------------------------------------------------------ the original
    def value(self, v: Value) -> torch.Tensor:
        """What the original calls make of the leaves."""
        todo = [v]
        while todo:
            x = todo[-1]
            if x in self.values:
                todo.pop()
            elif x in self.vg.constants:
                constant = self.vg.constants[x].detach().to(self.device or x.fake.device)
                self.values[x] = _double(constant) if self.double else constant
            elif x.op is None:  # a mask that hides nothing: read by the original, not by the spec
                self.values[x] = self._placed(x, self.sample(x))
            elif missing := [y for y in x.inputs if y not in self.values]:
                todo.extend(missing)
            else:
                with torch.set_grad_enabled(x.grad and torch.is_grad_enabled()):
                    self.values[x] = self._as_rounded(x) if self.double and self._is_made(x) else self._call(x)
                if self.double and x.dtype.is_floating_point and self._overflows(x):
                    self.overflows.append(x)
                if self.double and x.name.startswith("div.") and self._vanishes(x):
                    self.vanishes.append(x)
                todo.pop()
        return self.values[v]

    def _is_made(self, x: Value) -> bool:
        """Is it a comparison, or an integer, of floats that the graph makes of nothing but numbers and integers? Their dtype decides it."""
        floats = lambda values: [y for y in values if y.dtype.is_floating_point]
        return not x.dtype.is_floating_point and bool(floats(x.inputs)) and not any(y.op is None or y in self.given for y in floats(upstream(x)))

    def _as_rounded(self, x: Value) -> torch.Tensor:
        """As the model computes it."""
        integers = {y: self.values[y] for y in upstream(x) if not y.dtype.is_floating_point and y in self.values and (y.op is None or y in self.given)}
        return Rerun(self.vg, integers, self.sample, double=False, rounded=False, leaves=[], device=self.device).value(x)

    def _overflows(self, x: Value) -> bool:
        """Is it infinite where its inputs are not? Sums are -inf by design, where two masks of finfo.min meet; products are not."""
        infinite = torch.isinf if x.name.partition(".")[0] in _PRODUCTS else torch.isposinf
        of = lambda v: v.dtype.is_floating_point and bool(infinite(self.values[v]).any())
        return of(x) and not any(of(y) for y in x.inputs)

    def _vanishes(self, x: Value) -> bool:
        """Is a quotient not a number somewhere, where what is divided and the divisor are?"""
        of = lambda v: bool(self.values[v].isnan().any())
        return of(x) and not any(of(y) for y in x.inputs)

    def _call(self, x: Value) -> torch.Tensor:
        def convert(a):
            if isinstance(a, Value):
                return self.values[a]
            return float(a) if isinstance(a, torch.SymFloat) else self.number(a)

        args, kwargs = torch.utils._pytree.tree_map_only((Value, torch.SymInt, torch.SymFloat), convert, (x.args, dict(x.kwargs)))
        if x.op is DROPOUT:
            return torch.nn.functional.dropout(*args) if self.timed else args[0]
        if x.op is SDPA:
            q, k, v, mask, p, causal, scale, gqa = args
            with contextlib.nullcontext() if self.timed else torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p if self.timed else 0.0, is_causal=causal,
                                                                        scale=scale, enable_gqa=gqa)
        args, kwargs = self._elsewhere(args, kwargs)
        if self.double and x.name == "masked_fill.Scalar" and x.dtype.is_floating_point:
            args = (*args[:2], torch.tensor(args[2], dtype=x.dtype).item())
        if self.double and x.name == "_softmax.default":
            args = (*args[:2], False)
        result = self._run(x.op, args, kwargs)
        result = result[x.out] if isinstance(result, (tuple, list)) else result
        if not self.double:
            return result
        result = _double(result)
        return _overflowing(result, x.dtype, x.name.partition(".")[0] in _HELD) if x.dtype.is_floating_point else result

    # ------------------------------------------------------------------ the rewritten graph
    def node(self, node: fx.Node, step: int) -> Any:
        """What an emitted node yields; original nodes that it reads hold what they held before Dynamo node number `step`. Dropout is left out."""
        if not isinstance(node, fx.Node):
            return node
        if node in self.nodes:
            return self.nodes[node]
        if node in self.vg.steps:
            held = self.vg.held(node, step)
            example = node.meta.get("example_value")
            found = self.value(held) if held is not None else float(example) if isinstance(example, torch.SymFloat) else self.number(example)
        else:
            args, kwargs = fx.node.map_aggregate((node.args, dict(node.kwargs)), lambda a: self.node(a, step))
            found = self._emitted(node.target, args, kwargs)
        self.nodes[node] = found
        return found

    def _emitted(self, target, args, kwargs):
        if target is torch.nn.functional.dropout and not self.timed:
            return args[0]
        if target is torch.ops.flashfx.attention.default and not self.timed:
            spec = AttentionSpec.parse(args[6])
            if spec.dropout:
                from dataclasses import replace
                args = (*args[:4], None, args[5], replace(spec, dropout=0.0).line, *args[7:])
        return self._run(target, *self._elsewhere(args, kwargs))

    def _elsewhere(self, args, kwargs):
        """Casts to a floating type become casts to float64, devices that of this run."""
        wide = lambda a: torch.float64 if self.double and isinstance(a, torch.dtype) and a.is_floating_point else a
        here = lambda name, a: self.device if name == "device" and a is not None and self.device is not None else wide(a)
        return tuple(map(wide, args)), {name: here(name, a) for name, a in kwargs.items()}

    def _run(self, target, args, kwargs):
        """Integers meet floats in float64, where the model computes in its default dtype."""
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64 if self.double else default)
        try:
            return target(*args, **kwargs)
        finally:
            torch.set_default_dtype(default)


def _overflowing(t: torch.Tensor, dtype: torch.dtype, held: bool) -> torch.Tensor:
    """float64 `t` with what the model's dtype makes of huge numbers: two added finfo.min are -inf; finfo.min swallows a score that is added, in float16 too.

    Gradients pass as through the unrounded value.
    """
    rounded = t.detach().to(dtype).double()
    off = rounded.isinf() & ~t.detach().isinf()
    low = (t.detach() <= HIDING_FILL) & t.detach().isfinite() & ~off & held
    if off.any():
        t = torch.where(off, rounded, t)
    return t + torch.where(low, rounded - t.detach(), 0.0) if low.any() else t


def _double(t):
    return t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t
