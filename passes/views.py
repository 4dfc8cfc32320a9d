"""Ops that only rename elements: for each, the index into the result -> the index into the input."""
from __future__ import annotations

from typing import Callable

import torch

from .index import Affine, Index, Size, at_least, same, size, through_view
from .values import Value

Extents = dict[str, Size]


def _shape(v: Value) -> list[Size]:
    return [size(s) for s in v.shape]


def _dim(d: int, rank: int) -> int:
    return d + rank if d < 0 else d


def _same(v: Value, x: Index, extents: Extents) -> Index:
    return x


def _view(v, x, extents):
    return through_view(x, _shape(v), _shape(v.args[0]), extents)


def _permute(v, x, extents):
    dims = [_dim(d, len(v.args[1])) for d in v.args[1]]
    out: list = [None] * len(dims)
    for position, d in enumerate(dims):
        out[d] = x[position]
    return tuple(out)


def _transpose(v, x, extents):
    a, b = (_dim(d, len(x)) for d in (v.args[1], v.args[2]))
    out = list(x)
    out[a], out[b] = out[b], out[a]
    return tuple(out)


def _t(v, x, extents):
    return x[::-1]


def _expand(v, x, extents):
    return _expanded_from(v.args[0], x)


def _expanded_from(source: Value, x: Index) -> Index:
    own = _shape(source)
    return tuple(Affine() if same(s, 1) else a for s, a in zip(own, x[len(x) - len(own):]))


def _unsqueeze(v, x, extents):
    d = _dim(v.args[1], len(x))
    return x[:d] + x[d + 1:]


def _squeeze(v, x, extents):
    own, dims = _shape(v.args[0]), v.argument(1, "dim")
    dims = range(len(own)) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = {_dim(d, len(own)) for d in dims if same(own[_dim(d, len(own))], 1)}
    left = iter(x)
    return tuple(Affine() if d in gone else next(left) for d in range(len(own)))


def _select(v, x, extents):
    own = _shape(v.args[0])
    d, at = _dim(v.args[1], len(own)), size(v.args[2])
    if isinstance(at, int) and at < 0:
        at = own[d] + at
    return x[:d] + (Affine((), at),) + x[d:]


def _slice(v, x, extents):
    own = _shape(v.args[0])
    d = _dim(v.argument(1, "dim", 0), len(own))
    start, step = v.argument(2, "start") or 0, v.argument(4, "step", 1)
    start = size(start)
    if isinstance(start, int) and start < 0:
        start = own[d] + start
        start = max(start, 0) if isinstance(start, int) else start
    return x[:d] + (x[d] * step + start,) + x[d + 1:]


def _split(v, x, extents):
    d = _dim(v.argument(2, "dim", 0), len(x))
    sections = v.args[1]
    before = sections * v.out if isinstance(sections, (int, torch.SymInt)) else sum(sections[: v.out])
    return x[:d] + (x[d] + size(before),) + x[d + 1:]


def _unbind(v, x, extents):
    d = _dim(v.argument(1, "dim", 0), len(x) + 1)
    return x[:d] + (Affine((), v.out),) + x[d:]


def _repeat(v, x, extents):
    """Each repeated dim is (repeat, size) flattened; the outer digit is dropped."""
    own, times = _shape(v.args[0]), [size(t) for t in v.args[1]]
    x = x[len(times) - len(own):]
    out = []
    for a, s, t in zip(x, own, times[len(times) - len(own):]):
        out.append(a if same(t, 1) else Affine() if same(s, 1) else through_view((a,), [s * t], [t, s], extents)[1])
    return tuple(out)


VIEWS: dict[str, Callable[[Value, Index, Extents], Index]] = {
    **{name: _same for name in ("clone.default", "alias.default", "detach.default", "lift_fresh_copy.default", "lift_fresh.default",
                                "contiguous.default", "view_as.default")},
    **{name: _view for name in ("view.default", "_unsafe_view.default", "reshape.default", "_reshape_alias.default",
                                "flatten.using_ints", "unflatten.int", "view_copy.default")},
    "permute.default": _permute, "transpose.int": _transpose, "t.default": _t, "expand.default": _expand,
    "unsqueeze.default": _unsqueeze, "squeeze.dim": _squeeze, "squeeze.default": _squeeze, "squeeze.dims": _squeeze,
    "select.int": _select, "slice.Tensor": _slice, "split.Tensor": _split, "split_with_sizes.default": _split,
    "unbind.int": _unbind, "repeat.default": _repeat, "copy.default": _same,
}


def step_through(v: Value, x: Index, extents: Extents) -> tuple[Value, Index] | None:
    """before -> after: element `x` of a view -> the same element of what it views; None if `v` is no view.

    Raises SplitAxis or NotAffine as `through_view` does.
    """
    if v.name == "copy.default":  # what an in-place copy leaves: the source, broadcast
        return (v.args[1], _expanded_from(v.args[1], x)) if v.dtype == v.args[1].dtype else None
    rule = VIEWS.get(v.name)
    return None if rule is None else (v.args[0], rule(v, x, extents))


def within(x: Affine, extent: Size, extents: Extents) -> bool:
    """Provably 0 <= x < extent."""
    bounds = x.bounds(extents)
    return bounds is not None and at_least(bounds[0], 0) and at_least(extent - 1, bounds[1])
