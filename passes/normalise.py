"""normalise: Dynamo graph -> ValueGraph.

The graph is run once under fake tensors, through PyTorch's own functionalisation and composite decompositions, and every
ATen call is written down with the Dynamo node that made it. So einsum, baddbmm, `@`, methods, modules and in-place spellings
become the same few functional ops without a rule of ours. Dropout and scaled_dot_product_attention are kept whole; an encoder layer
that is one op of PyTorch's is written out. A node
that cannot be run this way (a higher-order op, a custom class) is an opaque leaf, not an error.
"""
from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .spelled_out import encoder_layer
from .values import Value, ValueGraph, tensors_in

log = logging.getLogger(__name__)

_markers = torch.library.Library("flashfx_ir", "DEF")
_markers.define("dropout(Tensor x, Scalar p) -> Tensor")
_markers.define("sdpa(Tensor q, Tensor k, Tensor v, Tensor? attn_mask, Scalar dropout_p, bool is_causal, Scalar? scale, "
                "bool enable_gqa) -> Tensor")


@torch.library.impl(_markers, "dropout", "Meta")
def _dropout_shape(x, p):
    return torch.empty_like(x)


@torch.library.impl(_markers, "sdpa", "Meta")
def _sdpa_shape(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa):
    batch = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2]) if not enable_gqa else q.shape[:-2]
    return q.new_empty((*batch, q.shape[-2], v.shape[-1]))


DROPOUT = torch.ops.flashfx_ir.dropout.default
SDPA = torch.ops.flashfx_ir.sdpa.default


def _dropout(input, p=0.5, training=True, inplace=False):
    if not training or (isinstance(p, (int, float)) and p == 0):
        return input
    dropped = DROPOUT(input, p)
    return input.copy_(dropped) if inplace else dropped


def _sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    if torch.is_autocast_enabled(query.device.type):  # a call kept whole is not autocast by PyTorch
        dtype = torch.get_autocast_dtype(query.device.type)
        low = lambda t: t.to(dtype) if t is not None and t.is_floating_point() and t.dtype != torch.float64 else t
        query, key, value, attn_mask = map(low, (query, key, value, attn_mask))
    return SDPA(query, key, value, attn_mask, dropout_p, bool(is_causal), scale, bool(enable_gqa))


_RUN_AS = {
    torch.nn.functional.dropout: _dropout,
    torch.dropout: lambda input, p, train: _dropout(input, p, train),
    torch.dropout_: lambda input, p, train: _dropout(input, p, train, inplace=True),
    torch.nn.functional.scaled_dot_product_attention: _sdpa,
    torch._transformer_encoder_layer_fwd: encoder_layer,
}


_METADATA = {*FunctionalTensor.metadata_fns, torch.ops.prim.device.default}


class _RunAs(TorchFunctionMode):
    """Dropout's composite kernel fails on symbolic sizes and SDPA decomposes by backend: record both as one call. A whole layer is many.

    The mode is off inside a Python function that it has seen (F.multi_head_attention_forward), so `torch.nn.functional` itself
    is changed too while the graph runs.
    """

    def __enter__(self):
        functional = torch.nn.functional
        self.originals = {f.__name__: f for f in _RUN_AS if getattr(functional, f.__name__, None) is f}
        for name, original in self.originals.items():
            setattr(functional, name, _RUN_AS[original])
        return super().__enter__()

    def __exit__(self, *error):
        for name, original in self.originals.items():
            setattr(torch.nn.functional, name, original)
        return super().__exit__(*error)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return _RUN_AS.get(func, func)(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    """Below functionalisation: writes down each functional ATen call."""

    def __init__(self, graph: ValueGraph):
        super().__init__()
        self.graph, self.owner, self.grad = graph, None, torch.is_grad_enabled()
        self.of: dict[int, Value] = {}
        self.alive: list[torch.Tensor] = []

    def leaf(self, fake: torch.Tensor, owner: fx.Node | None) -> Value:
        return self._add(None, (), {}, 0, fake, owner)

    def value(self, t: torch.Tensor) -> Value:
        if id(t) not in self.of:  # a tensor from outside the graph
            v = self.leaf(t, None)
            if not isinstance(t, FakeTensor):
                self.graph.literals[v] = self.graph.constants[v] = t
        return self.of[id(t)]

    def _add(self, op, args, kwargs, out, t, owner) -> Value:
        v = Value(op, args, kwargs, out, t, owner, len(self.graph.values), self.grad)
        self.graph.values.append(v)
        self.of[id(t)] = v
        self.alive.append(t)
        return v

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        seen = torch.utils._pytree.tree_map_only(torch.Tensor, self.value, (args, kwargs))
        results = func(*args, **kwargs)
        outs = results if isinstance(results, (tuple, list)) else (results,)
        tensors = [t for t in outs if isinstance(t, torch.Tensor)]
        for position, t in enumerate(outs):
            if isinstance(t, torch.Tensor) and id(t) not in self.of:
                v = self._add(func, tuple(seen[0]), seen[1], position, t, self.owner)
                if getattr(t, "constant", None) is not None:
                    self.graph.constants[v] = t.constant
        if not tensors and func not in _METADATA:  # .item() and the like: the value leaves the tensor world
            for v in tensors_in(seen, Value):
                self.graph.roots.setdefault(v, self.owner)
        return results


def _functional(tree: Any) -> list[torch.Tensor]:
    return [t for t in tensors_in(tree, torch.Tensor) if torch._is_functional_tensor(t)]


class _Runner(fx.Interpreter):
    """One attempt at running the graph; `failed` are the nodes that could not be run. Their results stand in so that all are found at once."""

    def __init__(self, gm: fx.GraphModule, examples: dict, opaque: set[fx.Node], mode: FakeTensorMode):
        super().__init__(gm, garbage_collect_values=False)
        self.vg = ValueGraph(mode=mode)
        self.recorder, self.opaque = _Recorder(self.vg), opaque
        self.wrappers: dict[fx.Node, torch.Tensor] = {}
        self.autocast: list[Any] = []
        self.modes: list[bool] = []
        self.failed: list[fx.Node] = []
        self.examples = examples

    def record(self, placeholders: list[fx.Node]) -> bool:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.vg.looking())
            stack.enter_context(torch.no_grad())
            given = {n: self._detached(n) for n in [*placeholders, *self.opaque]}
            stack.enter_context(self.recorder)
            torch._enable_functionalization(reapply_views=True)
            stack.callback(torch._disable_functionalization)
            stack.enter_context(_RunAs())
            self.given = {n: self._wrap(tree, n) for n, tree in given.items()}
            try:
                outputs = self.run(*[self.given[n] for n in placeholders], enable_io_processing=False)
                last = next(n for n in reversed(self.module.graph.nodes) if n.op == "output")
                self._keep(outputs, last)
                return not self.failed
            except Exception:
                if not self.failed:
                    raise
                return False  # what stood in for a failed node may be what went wrong
            finally:
                for context in reversed(self.autocast):
                    context.__exit__(None, None, None)

    def _keep(self, outputs, last: fx.Node) -> None:
        for t in _functional(outputs):
            self.vg.roots.setdefault(self.current(t), last)
        for n, entries in self.vg.timeline.items():
            if n.op in ("placeholder", "get_attr") and len(entries) > 1:
                self.vg.roots.setdefault(entries[-1][1], last)

    def _detached(self, n: fx.Node):
        return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.detach(), self.examples[n])

    def _wrap(self, tree, n: fx.Node | None):
        def wrap(t):
            self.recorder.leaf(t, n)
            return torch._to_functional_tensor(t)
        return torch.utils._pytree.tree_map_only(torch.Tensor, wrap, tree)

    def get_attr(self, target, args, kwargs):
        found = super().get_attr(target, args, kwargs)
        if not isinstance(found, torch.Tensor) or torch._is_functional_tensor(found):
            return found
        fake = self.vg.mode.from_tensor(found, static_shapes=True)
        wrapped = self._wrap(fake, self.recorder.owner)
        self.vg.constants[self.recorder.of[id(fake)]] = found
        return wrapped

    def current(self, wrapper: torch.Tensor) -> Value:
        torch._sync(wrapper)
        return self.recorder.value(torch._from_functional_tensor(wrapper))

    def run_node(self, n: fx.Node):
        step = self.vg.steps.setdefault(n, len(self.vg.steps))
        self.recorder.owner = n
        used = [] if n.op == "output" else _functional([self.env[a] for a in n.all_input_nodes])
        before = [self.current(t) for t in used]
        if n in self.opaque:
            for v in before:
                self.vg.roots.setdefault(v, n)
            out = self.given[n]
            if _may_write(n):
                for t in used:
                    t.copy_(self._wrap(torch.empty_like(torch._from_functional_tensor(t)), n))
        elif self._sets_mode(n):
            out = None
        else:
            try:
                out = super().run_node(n)
            except Exception as error:  # whatever a user's op raises under fake tensors makes it opaque
                if self.examples[n] is None:
                    raise
                log.debug("opaque: %s (%s)", n.format_node(), error)
                self.failed.append(n)
                out = self._wrap(self._detached(n), n)
        if n.op == "call_function" and getattr(n.target, "__name__", "") == "_enter_autocast":
            self.autocast.append(out)
        elif n.op == "call_function" and getattr(n.target, "__name__", "") == "_exit_autocast":
            self.autocast.remove(self.env[n.args[0]])
        changed = {self._storage(t) for t, v in zip(used, before) if self.current(t) is not v}
        if changed:
            self.vg.changing.add(n)
            for node, t in self.wrappers.items():
                if self._storage(t) in changed and (now := self.current(t)) is not self.vg.timeline[node][-1][1]:
                    self.vg.timeline[node].append((step, now))
        if isinstance(out, torch.Tensor) and torch._is_functional_tensor(out):
            self.wrappers[n] = out
            self.vg.timeline[n] = [(step, self.current(out))]
        return out

    def _sets_mode(self, n: fx.Node) -> bool:
        """Gradient and inference mode are written down, not entered: we trace without gradients."""
        name = getattr(n.target, "__name__", "") if n.op == "call_function" else ""
        if name == "_set_grad_enabled":
            self.recorder.grad = bool(n.args[0])
        elif name == "_enter_inference_mode":
            self.modes.append(self.recorder.grad)
            self.recorder.grad = self.recorder.grad and not n.args[0]
        elif name == "_exit_inference_mode":
            self.recorder.grad = self.modes.pop()
        else:
            return False
        return True

    @staticmethod
    def _storage(t: torch.Tensor):
        return torch.multiprocessing.reductions.StorageWeakRef(t.untyped_storage())


def _may_write(n: fx.Node) -> bool:
    """May a node that we cannot run change its arguments? Higher-order ops other than a kernel's own do not."""
    return not isinstance(n.target, HigherOrderOperator) or "mutation" in n.target.name()


def _written_aliases(vg: ValueGraph, placeholders: list[fx.Node]) -> bool:
    """Is an input changed that shares its memory with another one? Whose value then changes is not written down."""
    storages: dict[int, list[fx.Node]] = {}
    for n in placeholders:
        for t in tensors_in(n.meta.get("example_value"), FakeTensor):
            storages.setdefault(t.untyped_storage()._cdata, []).append(n)
    return any(len(group) > 1 and any(len(vg.timeline.get(n, ())) > 1 for n in group) for group in storages.values())


def normalise(gm: fx.GraphModule) -> ValueGraph | None:
    """The value graph of a Dynamo graph whose placeholders carry `meta["example_value"]`; None if it has no fake tensors."""
    examples = {n: n.meta.get("example_value") for n in gm.graph.nodes}
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    first = next(tensors_in([examples[n] for n in placeholders], FakeTensor), None)
    if first is None:
        return None
    opaque = {n for n in gm.graph.nodes if n.op == "call_function" and isinstance(n.target, HigherOrderOperator)}
    random_state = torch.random.get_rng_state()
    try:
        while True:
            runner = _Runner(gm, examples, opaque, first.fake_mode)
            if runner.record(placeholders):
                if _written_aliases(runner.vg, placeholders):
                    log.info("no site is looked for: the graph changes an input that shares memory with another input")
                    return None
                return runner.vg
            opaque.update(runner.failed)
    except Exception as error:  # a graph that we cannot read is compiled as it is
        log.warning("no site is looked for: the graph cannot be run under fake tensors (%s)", error)
        return None
    finally:
        torch.random.set_rng_state(random_state)
