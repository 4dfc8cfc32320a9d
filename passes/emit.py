"""Write values back into a Dynamo graph: reuse the node that holds a value, or emit the ATen call that makes it."""
from __future__ import annotations

import operator

import sympy
import torch
from torch import fx

from .held import FREE_VIEWS, Held
from .index import Affine, NotAffine, Size, SplitAxis, product, same, size
from .normalise import DROPOUT, SDPA
from .operands import Operand, radix
from .values import Refused, Value, ValueGraph
from .views import VIEWS, step_through

_aten = torch.ops.aten
_METHODS = {
    "select": _aten.select.int, "narrow": _aten.narrow.default, "unflatten": _aten.unflatten.int, "permute": _aten.permute.default,
    "unsqueeze": _aten.unsqueeze.default, "squeeze": _aten.squeeze.dim, "flatten": _aten.flatten.using_ints,
    "reshape": _aten.reshape.default, "to": _aten.to.dtype, "size": _aten.sym_size.int,
}


class Emitter(Held):
    """Emits in front of Dynamo node `before`, which disappears: its own values may be emitted whatever they cost."""

    def __init__(self, gm: fx.GraphModule, vg: ValueGraph, before: fx.Node, grad: bool):
        super().__init__(vg, before)
        self.gm, self.grad = gm, grad
        self.calls: dict[tuple, fx.Node] = {}

    # ------------------------------------------------------------------ nodes
    def call(self, target, *args, **kwargs) -> fx.Node:
        with self.gm.graph.inserting_before(self.before):
            node = self.gm.graph.call_function(target, args, kwargs)
        for key in ("stack_trace", "nn_module_stack"):
            if key in self.before.meta:
                node.meta[key] = self.before.meta[key]
        node.meta["example_value"] = self._example(target, args, kwargs)
        return node

    def _example(self, target, args, kwargs):
        """The call under fake tensors: caches and later passes expect every node to say what it yields."""
        table = lambda a: a.meta["example_value"] if isinstance(a, fx.Node) else a
        args, kwargs = torch.fx.node.map_arg((args, kwargs), table)
        with self.vg.looking():
            return target(*args, **kwargs)

    def method(self, name: str, *args) -> fx.Node:
        """A view step as an ATen call: the AOTAutograd cache takes those without metadata."""
        return self.call(_METHODS[name], *args)

    def _described(self, node: fx.Node) -> fx.Node:
        for key in ("stack_trace", "nn_module_stack"):
            if key in self.before.meta:
                node.meta[key] = self.before.meta[key]
        return node

    # ------------------------------------------------------------------ sizes
    def size(self, s: Size):
        """An int, or a node that yields the symbolic size."""
        if isinstance(s, int):
            return s
        for node, step in self.vg.steps.items():
            example = node.meta.get("example_value")
            if step < self.step and isinstance(example, torch.SymInt) and same(size(example), s):
                return node
        for node in self.vg.steps:
            held = self.vg.held(node, self.step) if self.vg.steps[node] < self.step else None
            if held is not None:
                for d, extent in enumerate(held.shape):
                    if not isinstance(size(extent), int) and same(size(extent), s):
                        return self.method("size", node, d)
        if isinstance(s, (sympy.Add, sympy.Mul)):
            parts = [self.size(size(a)) for a in s.args]
            fold = operator.add if isinstance(s, sympy.Add) else operator.mul
            out = parts[0]
            for p in parts[1:]:
                out = self.call(fold, out, p)
            return out
        if isinstance(s, sympy.Pow) and s.exp.is_Integer and s.exp > 1:
            return self.call(operator.pow, self.size(size(s.base)), int(s.exp))
        raise Refused(f"no node of the graph holds the size {s}", hint="compile with dynamic=False, or keep that size static")

    def number(self, x: torch.SymFloat) -> fx.Node:
        for node, step in self.vg.steps.items():
            example = node.meta.get("example_value")
            if step < self.step and isinstance(example, torch.SymFloat) and example.node.expr == x.node.expr:
                return node
        raise Refused(f"no node of the graph holds the number {x}", hint="make it a Python constant, or a tensor")

    # ------------------------------------------------------------------ values
    def value(self, v: Value) -> fx.Node:
        """A node that holds `v`. Raises `Refused` where that needs a value that was changed in place."""
        if v not in self.nodes:
            found = self.holder(v)
            if found is None and any(v in ours for ours in self.vg.relative.values() if ours is not None):
                found = self._shared(v)
            elif found is None:
                found = self._make(v)
                if self.grad and v.stops_gradient:  # made again where gradients flow
                    found = self.call(_aten.detach.default, found)
            self.nodes[v] = found
        return self.nodes[v]

    def _shared(self, v: Value) -> fx.Node:
        """A tensor that is ours, emitted once for all layers."""
        known = self.vg.__dict__.setdefault("_shared", {})
        if (v, self.grad) not in known or known[v, self.grad][0] > self.step:
            known[v, self.grad] = self.step, self._make(v)
        return known[v, self.grad][1]

    def _make(self, v: Value) -> fx.Node:
        if (held := self._reshaped(v)) is not None:
            return self.method("reshape", held, tuple(self.size(size(s)) for s in v.shape))
        if not self.can(v):
            raise Refused("a tensor that the attention reads is changed in place before it ends", v,
                          "move the in-place change behind the attention, or make it out of place")
        inputs = {x: self.value(x) for x in v.inputs}
        convert = lambda a: inputs[a] if isinstance(a, Value) else self.number(a) if isinstance(a, torch.SymFloat) else self.size(size(a))
        args, kwargs = torch.utils._pytree.tree_map_only((Value, torch.SymInt, torch.SymFloat), convert, (v.args, v.kwargs))
        if v.op is DROPOUT:
            return self.call(torch.nn.functional.dropout, args[0], args[1], True)
        if v.op is SDPA:
            q, k, val, mask, p, causal, scale, gqa = args
            return self.call(torch.nn.functional.scaled_dot_product_attention, q, k, val, attn_mask=mask, dropout_p=p,
                             is_causal=causal, scale=scale, enable_gqa=gqa)
        if v.name in FREE_VIEWS:  # the input's strides may now be others
            return self.call(_aten.reshape.default, *args)
        if len(v.op._schema.returns) == 1 and not str(v.op._schema.returns[0].type).startswith("List"):
            return self.call(v.op, *args, **kwargs)
        key = (v.op, str(v.args), str(v.kwargs))
        if key not in self.calls:
            self.calls[key] = self.call(v.op, *args, **kwargs)
        return self.call(operator.getitem, self.calls[key], v.out)

    def operand(self, candidates: list[Operand]) -> tuple[fx.Node, Operand]:
        """The farthest source that a node holds; else the nearest one, emitted."""
        chosen = next((o for o in candidates if self.holder(o.value) is not None or o.value in self.nodes), None)
        if chosen is None:
            chosen = next((o for o in reversed(candidates) if self.can(o.value)), candidates[-1])
        node = self.value(chosen.value)
        later = any(at >= self.step for holder in self.vg.holders(chosen.value) for at, _ in self.vg.timeline[holder])
        if later and self.grad:  # our backward will still read it; the original saved what it made of it
            node = self.call(_aten.clone.default, node)
        for name, *args in chosen.steps:
            args = [tuple(self.size(a) for a in arg) if isinstance(arg, tuple) else self.size(arg) for arg in args]
            node = self.method(name, node, *args)
        return node, chosen

    # ------------------------------------------------------------------ results
    def result(self, node: fx.Node, dims: list[str], out_dims: list[list[str]], extents: dict[str, Size]) -> fx.Node:
        """before -> after: a tensor with one dim per axis (`dims`) -> dims `out_dims`, each a product of axes ([]: extent 1)."""
        flat = [n for group in out_dims for n in group]
        if flat != dims:
            node = self.method("permute", node, tuple(dims.index(n) for n in flat))
        at = 0
        for group in out_dims:
            if not group:
                node = self.method("unsqueeze", node, at)
            elif len(group) > 1:
                node = self.method("flatten", node, at, at + len(group) - 1)
            at += 1
        return node


def follow_views(target: Value, source: Value, out_dims: list[list[str]], extents: dict[str, Size]) -> list[list[str]] | None:
    """The axes of each dim of `target`, a chain of views of `source` whose dims are `out_dims`; None if it is no such thing."""
    own = {f"t{d}": size(s) for d, s in enumerate(target.shape)}
    v, index = target, tuple(Affine.axis(f"t{d}") if not same(s, 1) else Affine() for d, s in enumerate(own.values()))
    try:
        while v is not source:
            through = step_through(v, index, own) if v.name in VIEWS else None
            if through is None:
                return None
            v, index = through
    except (NotAffine, SplitAxis):
        return None
    result: dict[str, list[str]] = {name: [] for name in own}
    for a, axes in zip(index, out_dims):
        axes = [n for n in axes if not same(extents[n], 1)]
        order = radix(a, own) if a.constant == 0 else None
        if order is None:
            return None
        for name in order:
            while axes and not same(product([extents[n] for n in result[name]]), own[name]):
                result[name].append(axes.pop(0))
            if not same(product([extents[n] for n in result[name]]), own[name]):
                return None
        if axes:
            return None
    return list(result.values())
