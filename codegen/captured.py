"""Gradients of captured tensors: from the gradient of one load, dense over the indices it depends on, to the tensor's own."""
from __future__ import annotations

from typing import Mapping

import torch
from torch.nn.functional import pad

from ..expr import FLOAT, INT, Call, Const, Expr, Load, Var
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


def is_relative(load: Load) -> bool:
    """Does the load's position depend on rows and keys through j - i alone? Proved by taking j - i + i for j: then no i may be left."""
    return {"i", "j"} <= load.variables and all(_is_relative(a) for a in load.index)


def _is_relative(e: Expr) -> bool:
    factors = _factors(e)
    if factors is not None:
        return sum(factors) == 0
    return isinstance(e, (Call, Load)) and all(_is_relative(a) for a in e.args_())


def _factors(e: Expr) -> tuple[int, int] | None:
    """The factors of i and j where `e` is i and j times integers, and something without them."""
    if not {"i", "j"} & e.variables:
        return 0, 0
    if isinstance(e, Var):
        return (1, 0) if e.name == "i" else (0, 1)
    if not isinstance(e, Call) or e.op not in ("add", "sub", "neg", "mul") or e.kind != INT:
        return None
    found = [_factors(a) for a in e.args]
    if None in found:
        return None
    if e.op == "mul":
        by, other = e.args if isinstance(e.args[0], Const) else e.args[::-1]
        return tuple(by.value * f for f in found[e.args.index(other)]) if isinstance(by, Const) else None
    sign = -1 if e.op in ("sub", "neg") else 1
    return tuple(sign * f for f in found[0]) if e.op == "neg" else tuple(a + sign * b for a, b in zip(*found))


def along_diagonals(tiles: torch.Tensor) -> torch.Tensor:
    """Sums over the diagonals of matrices: (…, m, n) -> (…, m + n - 1), the one from the lower left corner first.

    Rows bottom up, each behind n + m places of which m are 0, read as rows of n + m - 1: row r begins r places later.
    """
    m, n = tiles.shape[-2:]
    skewed = pad(tiles.flip(-2), (0, m)).flatten(-2)
    return skewed[..., : m * (n + m - 1)].unflatten(-1, (m, n + m - 1)).sum(-2)


def joined(tiles: torch.Tensor, M: int, N: int) -> torch.Tensor:
    """Sums over the diagonals of an M x N matrix, (…, M + N - 1), from those of its blocks: one B x B tile a diagonal of blocks, (…, rows + keys - 1, B, B)."""
    B = tiles.shape[-1]
    lines = pad(along_diagonals(tiles), (0, 1))  # each shares half of its diagonals with the next
    whole = pad(lines[..., :B].flatten(-2), (0, B)) + pad(lines[..., B:].flatten(-2), (B, 0))
    first = -M % B
    return whole[..., first: first + M + N - 1]


def differences(env: Mapping) -> dict:
    """before -> after: indices of a tile (`reference.index_grid`) -> an i and j for each j - i in it, lowest first; i is 0."""
    i, j = env["i"], env["j"]
    low = j.flatten()[0] - i.flatten()[-1]
    return {**env, "i": torch.zeros_like(i[..., :1, :]), "j": low + torch.arange(i.numel() + j.numel() - 1, device=j.device).expand(*j.shape[:-1], -1)}


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
