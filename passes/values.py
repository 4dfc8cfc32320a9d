"""The value graph: a Dynamo graph as functional ATen calls, each value knowing the Dynamo node that owns it."""
from __future__ import annotations

import contextlib
import os
import re
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Callable, Iterable, Iterator

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import tracing

from flashfx.region import CALLER, Frame


class Refused(Exception):
    """Raised inside a stage; becomes a `Refusal`."""

    def __init__(self, reason: str, at: Value | None = None, hint: str = ""):
        super().__init__(reason)
        self.reason, self.at, self.hint = reason, at, hint


@dataclass(eq=False)
class Value:
    """One tensor: output `out` of `op(*args, **kwargs)`, or a leaf (`op is None`): a placeholder, constant or opaque result.

    args hold Values where the call took tensors; sizes are ints or SymInts. `fake` carries shape, dtype, strides, device.
    `grad`: was gradient mode on where the call stood?
    """

    op: Any
    args: tuple
    kwargs: dict
    out: int
    fake: torch.Tensor
    owner: fx.Node | None
    number: int
    grad: bool = True

    @property
    def name(self) -> str:
        """The op without its namespace: "bmm.default"; "" for a leaf."""
        return "" if self.op is None else str(self.op).partition(".")[2]

    @property
    def shape(self) -> tuple:
        return tuple(self.fake.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.fake.dtype

    @property
    def inputs(self) -> list[Value]:
        return list(tensors_in((self.args, self.kwargs), Value))

    def reaches_parameters(self, through_stops: bool) -> bool:
        """Is this computed from anything that requires a gradient (past `detach` and `no_grad`, if `through_stops`)?"""
        seen, todo = set(), [self]
        while todo:
            v = todo.pop()
            if v in seen or not v.dtype.is_floating_point:
                continue
            seen.add(v)
            if v.op is None:
                example = v.owner.meta.get("example_value") if v.owner is not None else None
                if any(t.requires_grad for t in tensors_in(example, torch.Tensor)):
                    return True
            elif through_stops or v.grad and v.name != "detach.default":
                todo.extend(v.inputs)
        return False

    @property
    def stops_gradient(self) -> bool:
        """Computed by `detach`, or under no_grad, from something that a gradient could reach."""
        return self.op is not None and self.dtype.is_floating_point and (not self.grad or self.name == "detach.default") \
            and self.reaches_parameters(through_stops=True)

    def argument(self, position: int, name: str, default=None):
        """A call's argument, given by position or by name."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    def __repr__(self) -> str:
        return f"%{self.number}:{self.name or (self.owner.name if self.owner else 'const')}"


def upstream(start: Value, through: Callable[[Value], Iterable[Value]] = lambda v: v.inputs) -> Iterator[Value]:
    """`start` and what it is computed from, nearest first, each once; `through` says to which inputs of a value the walk goes on."""
    seen, todo = {start}, deque([start])
    while todo:
        v = todo.popleft()
        yield v
        for x in through(v):
            if x not in seen:
                seen.add(x)
                todo.append(x)


ALIKE = 64
"""Pairs of values that `alike` looks at: what is written twice is a product with its views and scales, not a network."""


def alike(a: Any, b: Any, pairs: set | None = None) -> bool:
    """Are two values the same by construction: the same operations on the same values, nothing random? Their arguments likewise. pairs: met on the way."""
    pairs = set() if pairs is None else pairs
    if isinstance(a, Value) and isinstance(b, Value):
        if a is b or (a, b) in pairs:
            return True
        pairs.add((a, b))
        return len(pairs) <= ALIKE and a.op is not None and a.op is b.op and (a.out, a.grad) == (b.out, b.grad) and a.op.namespace == "aten" \
            and torch.Tag.nondeterministic_seeded not in a.op.tags and alike((a.args, a.kwargs), (b.args, b.kwargs), pairs)
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(alike(x, y, pairs) for x, y in zip(a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(alike(a[k], b[k], pairs) for k in a)
    if isinstance(a, (torch.SymInt, torch.SymFloat)):  # to ask for equality would be a guard
        return type(a) is type(b) and a.node.expr == b.node.expr
    return type(a) is type(b) and not isinstance(a, (Value, torch.Tensor)) and a == b


def tensors_in(tree: Any, kind: type) -> Iterator:
    if isinstance(tree, kind):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for x in tree:
            yield from tensors_in(x, kind)
    elif isinstance(tree, dict):
        for x in tree.values():
            yield from tensors_in(x, kind)


@dataclass
class ValueGraph:
    """What `normalise` returns.

    values     every value, in order of computation
    timeline   for each Dynamo node with one tensor result: [(step, Value)], the value it holds from that step on;
               more than one entry means that the tensor was changed in place
    steps      the order of the Dynamo nodes
    roots      values that outlive the graph (outputs, changed inputs) or are read by something opaque
    readers    for each root value, the Dynamo nodes that read it
    constants  data of tensor constants
    literals   data of tensors that the code spells out, `torch.tensor([...])`: nobody else can change them
    superseded what the model computes and, after `algebra`, nobody needs
    renormalised  softmaxes that the model wrote as weights times a mask, over their sum
    shifted    softmaxes beside a sink that the model shifted by their largest score, which is -inf in a row that is hidden entirely
    blanked    products behind which queries are set to 0 that the model blanks in front of them
    changing   Dynamo nodes that change a tensor in place
    relative   what `passes/relative.py` made for what the model gathers: tensors with one element for each j - i, and where they end
    differences  gathers whose gradient `flashfx::gather_by_difference` has without atomic additions: (its source, its positions)
    mode       the fake mode of the graph's example values
    """

    values: list[Value] = field(default_factory=list)
    timeline: dict[fx.Node, list[tuple[int, Value]]] = field(default_factory=dict)
    steps: dict[fx.Node, int] = field(default_factory=dict)
    roots: dict[Value, fx.Node] = field(default_factory=dict)
    constants: dict[Value, torch.Tensor] = field(default_factory=dict)
    literals: dict[Value, torch.Tensor] = field(default_factory=dict)
    superseded: set[Value] = field(default_factory=set)
    renormalised: set[Value] = field(default_factory=set)
    shifted: set[Value] = field(default_factory=set)
    blanked: set[Value] = field(default_factory=set)
    changing: set[fx.Node] = field(default_factory=set)
    relative: dict[tuple, tuple[Value, Value | None] | None] = field(default_factory=dict)
    differences: dict[Value, tuple[Value, Value]] = field(default_factory=dict)
    mode: Any = None

    @property
    def shape_env(self):
        """Where symbolic sizes live; None if all are static."""
        return self.mode.shape_env

    @contextlib.contextmanager
    def looking(self):
        """Run ops on example values: under their fake mode, outside the compile in progress, adding no guard."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(tracing(None))
            if self.shape_env is not None:
                stack.enter_context(self.shape_env.suppress_guards())
                stack.enter_context(self.shape_env.ignore_fresh_unbacked_symbols())
            stack.enter_context(self.mode)
            stack.enter_context(enable_python_dispatcher())  # symbolic sizes in meta functions
            yield

    def held(self, node: fx.Node, step: int) -> Value | None:
        """The value of `node`'s tensor just before Dynamo node number `step` runs."""
        current = None
        for at, value in self.timeline.get(node, ()):
            if at < step or (at == self.steps[node] and self.steps[node] < step):
                current = value
        return current

    def holders(self, value: Value) -> list[fx.Node]:
        return self._holders().get(value, [])

    def _holders(self) -> dict[Value, list[fx.Node]]:
        if "_holder_index" not in self.__dict__:
            index: dict[Value, list[fx.Node]] = {}
            for node, entries in self.timeline.items():
                for _, v in entries:
                    index.setdefault(v, []).append(node)
            self.__dict__["_holder_index"] = index
        return self.__dict__["_holder_index"]

    def needed(self) -> set[Value]:
        """The roots and all they are computed from."""
        found, todo = set(self.roots), list(self.roots)
        while todo:
            for x in todo.pop().inputs:
                if x not in found:
                    found.add(x)
                    todo.append(x)
        return found

    def forget_users(self) -> None:
        """Call it after changing what values are computed from."""
        self.__dict__.pop("_users", None)

    def users(self) -> dict[Value, list[Value]]:
        if "_users" not in self.__dict__:
            table: dict[Value, list[Value]] = {v: [] for v in self.values}
            for v in self.values:
                for x in v.inputs:
                    table[x].append(v)
            self.__dict__["_users"] = table
        return self.__dict__["_users"]


_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)(?:\n(?!\s*File ")[ \t]*(?P<code>[^\n]*))?')


def stack_of(node: fx.Node | None) -> tuple[Frame, ...]:
    """The user's stack at the line that made `node`, innermost last. Paths are given from the package or the working directory on."""
    trace = (node.meta.get("stack_trace") or "") if node is not None else ""
    return tuple(Frame(f["file"].rpartition("site-packages/")[2].removeprefix(os.getcwd() + os.sep), int(f["line"]), f["function"], (f["code"] or "").strip())
                 for f in _FRAME.finditer(trace) if f["file"] != CALLER)


def source_line(node: fx.Node | None) -> str:
    """The user's line that made `node`, the innermost that is not PyTorch's own if there is one: "file:line in function: code", or ""."""
    frames = stack_of(node)
    return str(next((f for f in reversed(frames) if not f.file.startswith("torch" + os.sep)), frames[-1])) if frames else ""
