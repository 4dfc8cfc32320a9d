"""Gradients of captured tensors: from the gradient of one load, dense over the indices it depends on, to the tensor's own."""
from __future__ import annotations

from typing import Mapping

import torch

from ..expr import FLOAT, INT, Const, Load, Var
from ..reference import evaluate
from ..spec import AttentionSpec


def dims_of(spec: AttentionSpec, load: Load) -> tuple[str, ...]:
    """The indices (of the axes, "i", "j") on which the load's position depends, in the spec's order."""
    return tuple(d for d in (*spec.axes, "i", "j") if d in load.variables)


def is_plain(spec: AttentionSpec, load: Load) -> bool:
    """Is every index an index variable of its own, or a constant? Then the load reads each element once: no scatter is needed."""
    names = [a.name for a in load.index if isinstance(a, Var)]
    known = {*spec.axes, "i", "j"}
    return (all(isinstance(a, Var) or (isinstance(a, Const) and a.kind == INT) for a in load.index)
            and len(set(names)) == len(names) and set(names) <= known)


def differentiable_loads(spec: AttentionSpec, needs: Mapping[str, bool]) -> list[Load]:
    """The float loads of the score whose tensor needs a gradient, in a fixed order."""
    return [load for load in spec.score.loads if load.kind == FLOAT and needs.get(load.name, False)]


def accumulate(spec: AttentionSpec, load: Load, dense: torch.Tensor, into: torch.Tensor, env: Mapping, tensors: Mapping) -> None:
    """Add `dense` to `into`, the gradient of the tensor that `load` reads. Deterministic: no floating-point atomics.

    dense  rank len(axes) + 2, extent 1 along the indices on which the load does not depend
    env    index tensors of the same rank (`reference.index_grid`), possibly of a tile
    """
    if dense.numel() == 0:
        return
    if is_plain(spec, load):
        order = (*spec.axes, "i", "j")
        index, source = [], []
        for a in load.index:
            if isinstance(a, Const):
                index.append(a.value)
            else:
                first = int(env[a.name].flatten()[0])
                index.append(slice(first, first + env[a.name].numel()))
                source.append(order.index(a.name))
        absent = [d for d in range(dense.dim()) if d not in source]
        moved = dense.permute(*source, *absent)
        into[tuple(index)] += moved.reshape(moved.shape[: len(source)]).to(into.dtype)
        return
    position = torch.zeros((), dtype=torch.int64, device=into.device)
    for a, extent, stride in zip(load.index, into.shape, into.stride()):
        where = evaluate(a, env, tensors, None, torch.float64).to(torch.int64)
        position = position + torch.where(where < 0, where + extent, where) * stride
    position = position.expand(dense.shape).flatten()
    flat, values = into.view(-1), dense.flatten().to(into.dtype)
    if into.device.type == "cpu":
        flat.index_add_(0, position, values)  # one dimension: a serial loop
    else:
        flat.index_put_((position,), values, accumulate=True)  # sorts, then adds in order
