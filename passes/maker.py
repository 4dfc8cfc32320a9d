"""New values for a value graph, and the paths of views, casts and dropout between its values."""
from __future__ import annotations

import torch

from .find import DROPOUTS
from .index import Affine, Index, same, size
from .softmax import is_rounding
from .values import Value, ValueGraph
from .views import VIEWS, step_through

aten = torch.ops.aten


def _matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The shape of a @ b for tensors of one rank. PyTorch's own, found by folding batch dims, is b * h // b for h with symbolic sizes."""
    batch = [y if same(size(x), 1) else x for x, y in zip(a.shape[:-2], b.shape[:-2])]
    return a.new_empty((*batch, a.shape[-2], b.shape[-1]))


class Maker:
    """Makes values that belong to the node of `owner`."""

    def __init__(self, vg: ValueGraph, owner: Value):
        self.vg, self.owner = vg, owner

    def __call__(self, op, *args, **kwargs) -> Value:
        fakes = torch.utils._pytree.tree_map_only(Value, lambda v: v.fake, (args, kwargs))
        with self.vg.looking(), torch.no_grad():
            fake = _matmul(*fakes[0]) if op is aten.matmul.default else op(*fakes[0], **fakes[1])
        v = Value(op, args, kwargs, 0, fake, self.owner.owner, len(self.vg.values), self.owner.grad)
        self.vg.values.append(v)
        return v

    def redefine(self, old: Value, new: Value) -> None:
        """`old` is computed as `new` is. Shape and dtype are the same."""
        assert old.dtype == new.dtype and len(old.shape) == len(new.shape) and all(same(size(a), size(b)) for a, b in zip(old.shape, new.shape))
        old.op, old.args, old.kwargs, old.out = new.op, new.args, new.kwargs, new.out


def spans(v, whole: Value) -> bool:
    return isinstance(v, Value) and len(v.shape) == len(whole.shape) and all(same(size(a), size(b)) for a, b in zip(v.shape, whole.shape))


def path_to(v: Value, end, linear: bool = True, dropout: bool = True) -> list[Value] | None:
    """From `v` up through views, casts and dropout to the first value for which `end` holds; None if there is none."""
    path = [v]
    while not end(path[-1]):
        x = path[-1]
        if not (x.name in VIEWS and x.name != "copy.default" or is_rounding(x) or dropout and x.name in DROPOUTS) or x.name == "detach.default":
            return None
        path.append(x.args[0])
    return path


def plain(x: Index, extents) -> Index:
    """Axes of extent 1 count for nothing."""
    return tuple(Affine(tuple((n, c) for n, c in a.terms if not same(extents[n], 1)), a.constant) for a in x)


def private(vg: ValueGraph, path: list[Value]) -> bool:
    """Does nobody else see the random numbers that are drawn on a path? What is computed again must not draw others."""
    drawn = False
    for v in reversed(path[:-1]):
        drawn = drawn or v.name in DROPOUTS
        if drawn and (v in vg.roots or len(set(vg.users().get(v, ()))) > 1):
            return False
    return True


def draws(path: list[Value]) -> bool:
    return any(x.name in DROPOUTS for x in path[:-1])


def through(path: list[Value], x: Index, extents) -> Index:
    """The index into the last value of a path, of element `x` of the first."""
    for v in path[:-1]:
        if v.name in VIEWS:
            _, x = step_through(v, x, extents)
    return x


def again(make: Maker, path: list[Value], last: Value) -> Value:
    """The first value of a path, computed from `last` in place of the path's last value."""
    for x in reversed(path[:-1]):
        op = aten.reshape.default if x.name in ("view.default", "_unsafe_view.default") else x.op
        last = make(op, last, *x.args[1:], **x.kwargs)
    return last
