"""A site's part of the graph as `flashfx.region.Node`s: what stood there, and what stands there after the rewrite."""
from __future__ import annotations

import operator

import torch
from torch import fx

from flashfx.region import Node

from .find import DROPOUTS, Site
from .lift import Lifted
from .rules import PRODUCTS
from .values import ValueGraph, stack_of, tensors_in, upstream

LIMIT = 96
"""Nodes of one drawing; what lies farther from the output is left to an input."""


def before(site: Site, lifted: Lifted | None, vg: ValueGraph) -> tuple[Node, ...]:
    """The original nodes from the operands (of a site that was not lifted: from the first product's operands) to the output."""
    roles, ends = {site.out.owner: "output"}, set()
    if site.weights is not None:
        roles.setdefault(site.weights.owner, "softmax")
    for v in upstream(site.out, lambda v: [] if v.name in PRODUCTS and v is not site.out else v.inputs):
        if v.name in DROPOUTS:
            roles.setdefault(v.owner, "dropout")
        elif v.name in PRODUCTS and v is not site.out:
            roles.setdefault(v.owner, "scores")
            ends.add(v.owner)
    if lifted is not None:
        operands = [*zip("qkv", (lifted.q[0], lifted.k[0], lifted.v[0])), *((a.name, o) for a, o in zip(lifted.spec.aux, lifted.aux)),
                    *(("sink", o) for o in (lifted.sink or [])[:1])]
        ends = set()
        for name, operand in operands:
            for holder in [*vg.holders(operand.value), *([operand.value.owner] if operand.value.owner is not None else [])][:1]:
                roles[holder] = f"{roles[holder]}, {name}" if holder in ends else name
                ends.add(holder)
    return _drawn(site.out.owner, roles, lambda n: n in ends and n is not site.out.owner and (lifted is not None or roles.get(n) != "scores"), ends)


def after(new: fx.Node, vg: ValueGraph) -> tuple[Node, ...]:
    """What the rewrite put there, and the original nodes that it reads."""
    return _drawn(new, {}, lambda n: n in vg.steps, set(), lambda n: "" if n in vg.steps else "new")


def _drawn(last: fx.Node, roles: dict[fx.Node, str], is_end, beyond: set[fx.Node], role=None) -> tuple[Node, ...]:
    """`last` and what it is computed from, up to nodes of which `is_end` holds, nearest first; the inputs of a node in `beyond` end it too."""
    found: dict[fx.Node, tuple[str, ...]] = {}
    todo = [(last, False)]
    for n, end in todo:
        if n in found:
            continue
        end = end or is_end(n) or n.op in ("placeholder", "get_attr") or len(todo) > LIMIT
        found[n] = () if end else tuple(dict.fromkeys(x.name for x in n.all_input_nodes))
        if not end:
            todo += [(x, n in beyond) for x in n.all_input_nodes]
    return tuple(Node(n.name, _op(n) if inputs else "input", _result(n), inputs, roles.get(n) or (role(n) if role else _kind(n)),
                      next(iter(stack_of(n)[-1:]), None)) for n, inputs in found.items())


def _op(n: fx.Node) -> str:
    if n.op == "call_method":
        return n.target
    if n.target is operator.getitem:
        return "getitem"
    name = str(n.target) if isinstance(n.target, torch._ops.OpOverload) else getattr(n.target, "__name__", str(n.target))
    return name.removeprefix("aten.").removesuffix(".default")


def _kind(n: fx.Node) -> str:
    """Conditions, indices and what is made of them belong to the mask."""
    t = n.meta.get("example_value")
    return "mask" if isinstance(t, torch.Tensor) and not t.is_floating_point() else ""


def _result(n: fx.Node) -> str:
    found = list(tensors_in(n.meta.get("example_value"), torch.Tensor))
    if not found:
        return ""
    text = f"{str(found[0].dtype).removeprefix('torch.')}[{', '.join(map(str, found[0].shape))}]"
    return text if len(found) == 1 else f"{text} and {len(found) - 1} more"
