"""Which values of the graph can be read in front of a node: those that another node still holds, or that are cheap to make again."""
from __future__ import annotations

from torch import fx

from .normalise import DROPOUT, SDPA
from .rules import PRODUCTS, RANDOM
from .values import Value, ValueGraph
from .views import VIEWS

FREE_VIEWS = {"view.default", "_unsafe_view.default", "_reshape_alias.default"}


class Held:
    """The state of the graph in front of Dynamo node `before`. A tensor that was changed in place holds its old value no longer."""

    def __init__(self, vg: ValueGraph, before: fx.Node):
        self.vg, self.before, self.step = vg, before, vg.steps[before]
        self.nodes: dict[Value, fx.Node] = {}
        self._known: dict[Value, bool] = {}

    def holder(self, v: Value) -> fx.Node | None:
        """A Dynamo node in front of us that holds `v` now."""
        for node in self.vg.holders(v):
            if self.vg.steps[node] < self.step and self.vg.held(node, self.step) is v:
                return node
        return None

    def can(self, v: Value) -> bool:
        """Held, or cheap to make again from what is held: views, casts, pointwise ops."""
        if v in self.nodes:
            return True
        if v not in self._known:
            self._known[v] = self._can(v)
        return self._known[v]

    def _can(self, v: Value) -> bool:
        if self.holder(v) is not None:
            return True
        if v.op is None:
            return False
        if self._reshaped(v) is not None:
            return True
        dear = v.name in PRODUCTS or v.op in (DROPOUT, SDPA) or RANDOM in v.op.tags or "convolution" in v.name
        if dear and v.owner is not self.before:
            return False
        return all(self.can(x) for x in v.inputs)

    def _reshaped(self, v: Value) -> fx.Node | None:
        """A node that holds `v` under another shape: matmul's result is held, not that of the bmm inside."""
        for user in self.vg.users()[v]:
            if user.name in FREE_VIEWS and (held := self.holder(user)) is not None:
                return held
        return None


def is_computed(v: Value) -> bool:
    """By something that what follows is computed along with."""
    return v.op is not None and (is_computed(v.args[0]) if v.name in VIEWS else v.name not in PRODUCTS)
