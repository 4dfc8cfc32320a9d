"""splice: put `flashfx::attention` where the regions were and remove what nobody reads any more.

before -> after:
    scores = q @ k.transpose(-1, -2) * s; p = dropout(softmax(scores + mask)); out = p @ v
    seed = randint(...); out = flashfx::attention(q, k, v, aux, seed, sizes, spec)[0]
"""
from __future__ import annotations

import contextlib
import operator
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from flashfx.spec import MEAN_ROW

from .behind import move
from .emit import Emitter, follow_views
from .find import Site, carries
from .index import same, size
from .lift import Lifted
from .operands import Operand
from .rules import PRODUCTS
from .softmax import softmax_of
from .values import Refused, Value, ValueGraph, upstream
from .weights import LogSum

_aten = torch.ops.aten
SEED_RANGE = 2 ** 62


def still_read(vg: ValueGraph, cut: dict[Value, list[Value]]) -> dict[Value, Value | fx.Node]:
    """Every value that is needed when the values in `cut` come from elsewhere (reading the listed ones): value -> a reader."""
    needed: dict[Value, Value | fx.Node] = {}
    todo: list[tuple[Value, Value | fx.Node]] = list(vg.roots.items())
    while todo:
        v, reader = todo.pop()
        if v in needed:
            continue
        needed[v] = reader
        todo.extend((x, v) for x in (cut[v] if v in cut else v.inputs))
    return needed


def splice(gm: fx.GraphModule, vg: ValueGraph, sites: dict[Site, Lifted], seeds: dict,
           summaries: dict[Site, tuple[dict, str]]) -> dict[fx.Node, fx.Node]:
    """Emit the op for all sites of one Dynamo node. Returns old node -> new node, for the nodes that held values computed from their outputs.

    summaries: for each site whose mask is worth some, those emitted so far, and the op that makes its own. Raises `Refused`; what it emitted before that is dead and is removed by `sweep`.
    """
    first = next(iter(sites))
    owner = first.out.owner
    emit = Emitter(gm, vg, owner, first.out.grad)
    if any(at == vg.steps[owner] and n is not owner and (n.op in ("placeholder", "get_attr") or any(vg.steps[u] > at for u in n.users))
           for n in vg.timeline for at, _ in vg.timeline[n]):
        raise Refused("the last step of the attention writes into a tensor that is read under another name", first.out,
                      "write it out of place: out = out / total, out = weights @ values")
    holders = [n for n in vg.timeline if (n is owner or owner in n.all_input_nodes) and vg.timeline[n][0][1].owner is owner]
    changed = any(len(vg.timeline[n]) > 1 for n in holders)
    outputs = [_attention(emit, site, lifted, seeds, summaries.get(site), changed) for site, lifted in sites.items()]
    below = _descendants(vg, [o.site.out for o in outputs])

    def anchor(value: Value) -> None:
        """Seed the emitter with the views of the sites' outputs from which `value` is computed."""
        if value in emit.nodes or value not in below:
            return
        direct = next((node for o in outputs if (node := o.view(value)) is not None), None)
        if direct is not None:
            emit.nodes[value] = direct
        else:
            for x in value.inputs:
                anchor(x)

    sums = {s.value: o.log_sum(s) for o in outputs for s in o.lifted.log_sums}
    emit.nodes |= sums
    replaced = {vg.holders(value)[0]: node for value, node in sums.items()}
    move(vg, [n for o in outputs for s in o.lifted.log_sums for n in s.early], owner)
    for holder in holders:
        value = vg.timeline[holder][0][1]
        if holder.users:
            anchor(value)
            replaced[holder] = emit.value(value)
    return replaced


@dataclass
class _Output:
    """The results of one site's `op`: `node` is the attention, with one dim per axis of `axes`."""

    emit: Emitter
    site: Site
    lifted: Lifted
    op: fx.Node
    node: fx.Node
    axes: list[str]

    def view(self, value: Value) -> fx.Node | None:
        """A node that holds `value`, a view of the site's output (or that itself); None if it is no such thing."""
        lifted, emit = self.lifted, self.emit
        dims = follow_views(value, self.site.out, lifted.out_dims, lifted.extents)
        if dims is None:
            return self._cast(emit.result(self.node, self.axes, lifted.out_dims, lifted.extents)) if value is self.site.out else None
        # axes of extent 1 that the view dropped
        present = [n for group in dims for n in group]
        node, left = self.node, list(self.axes)
        for n in [n for n in self.axes if n not in present]:
            node = emit.method("squeeze", node, left.index(n))
            left.remove(n)
        return self._cast(emit.result(node, left, dims, lifted.extents))

    def log_sum(self, wanted: LogSum) -> fx.Node:
        """The op's log-sum-exp in the shape that the model reads."""
        lse = self.emit.call(operator.getitem, self.op, 1)
        if wanted.fill is not None:  # a row that sees nothing: the constant, with the gradient of the mean that its weights are
            rest = self.emit.call(_aten.sub.Tensor, lse, self.emit.call(_aten.detach.default, lse))
            lse = self.emit.call(_aten.where.self, self.emit.call(_aten.ge.Scalar, lse, MEAN_ROW), self.emit.call(_aten.add.Scalar, rest, wanted.fill), lse)
        node = self.emit.result(lse, self.axes[:-1], [list(d) for d in wanted.dims], self.lifted.extents)
        return node if node.meta["example_value"].dtype == wanted.value.dtype else self.emit.method("to", node, wanted.value.dtype)

    def _cast(self, node: fx.Node) -> fx.Node:
        return node if self.lifted.v[0].value.dtype == self.site.out.dtype else self.emit.method("to", node, self.site.out.dtype)


def _attention(emit: Emitter, site: Site, lifted: Lifted, seeds: dict, summaries: tuple[dict, str] | None, changed: bool) -> _Output:
    """changed: is the output changed in place later? Our backward still reads the op's own."""
    q, k, v = (emit.operand(candidates)[0] for candidates in (lifted.q, lifted.k, lifted.v))
    aux = [_with_rows(emit, a, emit.operand([a])[0]) for a in lifted.aux]
    sizes = [emit.size(s) for s in lifted.sizes]
    seed = None
    if lifted.spec.dropout:
        # products that share one dropout must see the same bits
        drawn, _ = lifted.random
        if any(d is drawn and key != lifted.random for key in seeds for d in key[:1]):
            raise Refused("two products share one dropout and read it in different orders", drawn, "use one layout for both products")
        if lifted.random not in seeds:
            seeds[lifted.random] = emit.call(torch.randint, 0, SEED_RANGE, (1,), dtype=torch.int64, device=site.out.fake.device)
        seed = seeds[lifted.random]
    made, name = summaries or ({}, "")
    rows, keys = _summary(emit, lifted, aux, made, getattr(torch.ops.flashfx, name).default) if name else (None, None)
    op = emit.call(torch.ops.flashfx.attention.default, q, k, v, aux, seed, sizes, lifted.spec.line, rows, keys, name == "document_tiles",
                   _outer(emit, site, lifted, q))
    out = emit.call(operator.getitem, op, 0)
    if lifted.sink is not None:
        out = _with_sink(emit, op, out, emit.operand(lifted.sink)[0], lifted.v[0].value.dtype)
    if changed:
        out = emit.call(torch.ops.aten.clone.default, out)
    return _Output(emit, site, lifted, op, out, [*lifted.dims, "i", "e"])


SHORT = 64
"""Queries from which on a copy of a tensor of pairs pays."""


def _with_rows(emit: Emitter, operand: Operand, node: fx.Node) -> fx.Node:
    """A tensor of pairs as TMA can copy it, whose rows lie in one piece and begin at multiples of 16 bytes: element by element it is several times slower to
    read. One copy for all sites; what makes the tensor writes it so where Inductor compiles both.

    before -> after: bias = edges.permute(0, 3, 1, 2) -> bias = edges.permute(0, 3, 1, 2).clone(contiguous)
    """
    t = node.meta["example_value"]
    if operand.dims[-2:] != ("i", "j") or not all(isinstance(n, int) for n in (*t.shape, *t.stride(), t.storage_offset())) or t.shape[-2] < SHORT:
        return node
    width, (*leading, within) = t.element_size(), t.stride()
    if any(n > 1 and not stride for n, stride in zip(t.shape, t.stride())) or within == 1 and t.shape[-1] * width % 16:
        return node
    if within == 1 and not any(n > 1 and stride * width % 16 for n, stride in zip(t.shape, leading)) and not t.storage_offset() * width % 16:
        return node
    copies = emit.vg.__dict__.setdefault("_copies", {})
    key = operand.value, operand.steps, emit.grad
    if key not in copies or copies[key][0] > emit.step:
        copies[key] = emit.step, emit.call(_aten.clone.default, node, memory_format=torch.contiguous_format)
    return copies[key][1]


def _outer(emit: Emitter, site: Site, lifted: Lifted, q: fx.Node) -> int:
    """How many axes lie outside of the output's rows (`codegen/layout.py`). before -> after: (B, H, M, D) -> 1; (1, H, M, D), whose batch is no axis -> 0;
    returned with its rows behind the heads, of a q that is so in memory too -> all."""
    vg = emit.vg
    stored = q.meta["example_value"]
    if all(statically_known_true(stride >= stored.stride(-2)) for extent, stride in zip(stored.shape[:-2], stored.stride()) if not same(size(extent), 1)):
        held = [vg.timeline[n][-1][1] for n in emit.gm.graph.output_node().all_input_nodes if vg.timeline.get(n)]
        views = [follow_views(value, site.out, lifted.out_dims, lifted.extents) for value in held]
        wanted = [n for n in (*lifted.dims, "i", "e") if not same(lifted.extents[n], 1)]
        if any(dims is not None and [n for group in dims for n in group] == wanted for dims in views):
            return len(lifted.dims)
    example = site.out.owner.meta.get("example_value")
    alone = isinstance(example, torch.Tensor) and example.dim() > 3 and same(size(example.shape[0]), 1)
    is_axis = bool(lifted.dims) and same(lifted.extents[lifted.dims[0]], 1)
    return 0 if alone and not is_axis else 1


def _summary(emit: Emitter, lifted: Lifted, aux: list[fx.Node], summaries: dict, op) -> tuple[fx.Node | None, fx.Node | None]:
    """What `op` makes of the mask, one pair (rows, keys) for all sites that read the same mask and do alike with rows that it leaves empty; Nones if a size
    is not at hand.

    before -> after: attention(q, k, v, [pad], …) -> lists = flashfx::block_lists(pad, [pad], [B, M, N], mask); attention(q, k, v, [pad], …, *lists)
    """
    spec, mask = lifted.spec, lifted.spec.mask()
    read = {a.name: (operand, node) for a, operand, node in zip(spec.aux, lifted.aux, aux)}
    named = dict(zip(spec.axes, lifted.dims)) | {"M": "i", "N": "j"}
    table = {n: lifted.extents[own] for n, own in named.items()} | dict(zip(spec.sizes, lifted.sizes))
    wanted = [table[n] for n in (*mask.axes, "M", "N", *mask.sizes)]
    key = (op, str(mask), tuple((read[a.name][0].value, read[a.name][0].steps) for a in mask.aux), tuple(wanted))
    if key in summaries and summaries[key][0] <= emit.step:
        return summaries[key][1]
    try:
        sizes = [emit.size(s) for s in wanted]
    except Refused:
        return None, None
    tensors = [read[a.name][1] for a in mask.aux]
    tensors = [emit.call(torch.ops.aten.detach.default, t) if t.meta["example_value"].is_floating_point() else t for t in tensors]
    like = tensors[0] if tensors else emit.call(torch.ops.aten.empty.memory_format, [0], device=lifted.q[0].value.fake.device)
    found = emit.call(op, like, tensors, sizes, mask.line)
    found = emit.call(operator.getitem, found, 0), emit.call(operator.getitem, found, 1)
    summaries[key] = emit.step, found
    return found


def _with_sink(emit: Emitter, op: fx.Node, out: fx.Node, sink: fx.Node, dtype: torch.dtype) -> fx.Node:
    """before -> after: out -> out * sigmoid(lse - sink), the share of the softmax's weight that its keys keep from the sink."""
    aten = torch.ops.aten
    lse = emit.call(operator.getitem, op, 1)
    kept = emit.call(aten.sigmoid.default, emit.call(aten.sub.Tensor, lse, sink))
    scaled = emit.call(aten.mul.Tensor, out, emit.method("unsqueeze", kept, -1))
    return emit.method("to", scaled, dtype)


def differences_read(vg: ValueGraph, lifted: Lifted) -> list[Value]:
    """Of `vg.differences`, those that the site's captured tensors are made of."""
    inside = lambda v: [] if v in vg.differences or v.name in PRODUCTS else v.inputs
    return [v for v in dict.fromkeys(v for a in lifted.aux for v in upstream(a.value, inside)) if v in vg.differences] if vg.differences else []


def with_differences(gm: fx.GraphModule, vg: ValueGraph, found: list[Lifted]) -> None:
    """Gathers by differences that the sites' captured tensors are made of, and whose values a node holds, become the op that has a better gradient.

    before -> after: bias = gather(table, -1, buckets) -> bias = flashfx::gather_by_difference(table, line, N)
    """
    met = {v for lifted in found for v in differences_read(vg, lifted)}
    for v, (source, line) in vg.differences.items():
        node = v.owner
        if v in met and vg.timeline.get(node, [(0, None)])[0][1] is v:
            emit = Emitter(gm, vg, node, v.grad)
            with contextlib.suppress(Refused):  # a size is not at hand: the model's own is as good, and slower
                new = emit.call(torch.ops.flashfx.gather_by_difference.default, emit.value(source), emit.value(line), emit.size(size(v.shape[-1])))
                node.replace_all_uses_with(new)


def _descendants(vg: ValueGraph, sources: list[Value]) -> set[Value]:
    below, todo = set(sources), list(sources)
    while todo:
        for user in vg.users()[todo.pop()]:
            if user not in below:
                below.add(user)
                todo.append(user)
    return below


def sweep(gm: fx.GraphModule, vg: ValueGraph, needed: dict[Value, object], unread: set[fx.Node]) -> None:
    """Erase what the rewrite left without readers: emitted nodes, original nodes, and in-place changes that nobody sees.

    unread: nodes without users before the rewrite; those are the model's own business unless they change a tensor in place, or hold scores or
    weights (`attn_weights.view(…)`, handed to a caller who drops them).
    """
    for node in reversed(list(gm.graph.nodes)):
        if node.users or node.op in ("placeholder", "output"):
            continue
        emitted = node not in vg.steps
        owned = _owned(vg).get(node, [])
        if node in vg.changing:
            dead = not any(v in needed for v in owned)
        else:
            read_only = bool(owned) and all(carries(v) or v.name in PRODUCTS or softmax_of(v) is not None for v in owned)
            dead = (node not in unread or read_only) and (node in vg.timeline or bool(owned))
        if emitted or dead:
            gm.graph.erase_node(node)


def _owned(vg: ValueGraph) -> dict[fx.Node, list[Value]]:
    if "_owned" not in vg.__dict__:
        table: dict[fx.Node, list[Value]] = {}
        for v in vg.values:
            if v.op is not None:
                table.setdefault(v.owner, []).append(v)
        vg.__dict__["_owned"] = table
    return vg.__dict__["_owned"]

