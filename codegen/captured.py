"""Gradients of captured tensors: from the gradient of one load, dense over the indices it depends on, to the tensor's own."""
from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Mapping, Sequence

import torch
from torch.nn.functional import pad
from torch.utils._python_dispatch import _disable_current_modes

from ..expr import FLOAT, INT, QK, Call, Const, Expr, Load, Var, call, substitute
from ..reference import evaluate
from ..spec import AttentionSpec
from .derivative import partial as derivative
from .factors import split_factor
from .ranges import linear, unlinear


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


@dataclass(frozen=True)
class Line:
    """Of a load at j - i + offset in one dim and at nothing of i and j in the others: which dim, and where positions end if they are clamped.
    All j - i + offset <= first are read at `first`, all >= last at `last`, and first <= last. place: j - i + offset as the spec has it;
    lowest, highest: of those that occur."""

    dim: int
    place: Expr
    offset: Expr
    lowest: Expr | None = None
    highest: Expr | None = None
    first: Expr | None = None
    last: Expr | None = None


def line_of(load: Load) -> Line | None:
    """before -> after: rel[h, minimum(maximum(j - i + M - 1, lo), hi)] -> Line(1, j - i + M - 1, M - 1, minimum(maximum(0, lo), hi),
    minimum(maximum(M + N - 2, lo), hi)): the ends are positions that occur."""
    dims = [d for d, a in enumerate(load.index) if {"i", "j"} & a.variables]
    if len(dims) != 1:
        return None
    place, clamped = load.index[dims[0]], None
    if isinstance(place, Call) and place.op == "minimum" and isinstance(place.args[0], Call) and place.args[0].op == "maximum":
        (place, lo), hi = place.args[0].args, place.args[1]
        if {"i", "j"} & (lo.variables | hi.variables):
            return None
        clamped = lambda x: call("minimum", call("maximum", x, lo), hi)
    if _factors(place) != (-1, 1):
        return None
    last = {"i": call("sub", Var("M"), 1), "j": call("sub", Var("N"), 1)}
    corner = lambda *zero: unlinear(*linear(substitute(place, {Var(x): Const(0) if x in zero else last[x] for x in "ij"})))
    found = corner("j"), corner("i")
    return Line(dims[0], place, corner("i", "j"), *found, *(map(clamped, found) if clamped else ()))


def ends(load: Load) -> bool:
    """Are positions far from the diagonal all the same?"""
    line = line_of(load)
    return line is not None and line.first is not None


def at(load: Load, dim: int, position: Expr) -> Load:
    """The load with another position in one dim."""
    return Load(load.name, (*load.index[:dim], position, *load.index[dim + 1:]), load.kind)


def on_line(load: Load) -> Load:
    """The load whose gradient the kernels leave: of one read along a line, that of the line's elements, where j's would stand."""
    line = line_of(load)
    return load if line is None else at(load, line.dim, Var("j"))


def skewed(tiles: torch.Tensor) -> torch.Tensor:
    """Matrices with diagonals for columns: (…, m, n) -> (…, m, m + n - 1), element j of row i at j - i + m - 1, zeros elsewhere.

    Rows padded to n + m - 1 places are read as rows of n + m: each begins a place further to the left than the one above it.
    """
    m, n = tiles.shape[-2:]
    return pad(pad(tiles, (0, m - 1)).flatten(-2), (m - 1, 1)).unflatten(-1, (m, m + n))[..., :-1]


def along_diagonals(tiles: torch.Tensor) -> torch.Tensor:
    """Sums over the diagonals of matrices: (…, m, n) -> (…, m + n - 1), the one from the lower left corner first."""
    return skewed(tiles).sum(-2)


def differences(env: Mapping) -> dict:
    """before -> after: indices of a tile (`reference.index_grid`) -> an i and j for each j - i in it, lowest first; i is 0."""
    i, j = env["i"], env["j"]
    low = j.flatten()[0] - i.flatten()[-1]
    return {**env, "i": torch.zeros_like(i[..., :1, :]), "j": low + torch.arange(i.numel() + j.numel() - 1, device=j.device).expand(*j.shape[:-1], -1)}


def positions(env: Mapping, length: int) -> dict:
    """before -> after: indices of a tile -> those of a line of so many elements, where j's stood."""
    j = env["j"]
    return {**env, "i": torch.zeros_like(env["i"][..., :1, :]), "j": torch.arange(length, device=j.device).expand(*j.shape[:-1], -1)}


def differentiable_loads(spec: AttentionSpec, needs: Mapping[str, bool]) -> list[Load]:
    """The float loads of the score whose tensor needs a gradient, in a fixed order."""
    return [load for load in spec.score.loads if load.kind == FLOAT and needs.get(load.name, False)]


@functools.lru_cache(maxsize=1024)
def _way_through(index: tuple[Expr, ...], name: str, extents: tuple[int, ...], n: int) -> str:
    """How 0 <= name < n runs through the places of dims with these extents: "once" in their order, in "runs" of each, through all in "turns", or ""."""
    places = math.prod(extents)
    if places == 0 or n % places:
        return ""
    with _disable_current_modes():  # the call may be recorded, and these are no steps of it
        all_ = torch.arange(n)
        place = torch.zeros_like(all_)
        for a, extent in zip(index, extents):
            place = place * extent + evaluate(a, {name: all_}, {}, None, torch.float64)
        found = {"once": all_ if n == places else None, "runs": all_ // (n // places), "turns": all_ % places}
        return next((kind for kind, wanted in found.items() if wanted is not None and torch.equal(place, wanted)), "")


def summed_up(spec: AttentionSpec, load: Load, dense: torch.Tensor, shape: Sequence[int]) -> torch.Tensor | None:
    """`dense`, of all indices, summed up in the shape of what `load` reads of a tensor of `shape`, where each index depends on one variable alone and goes evenly
    through the places: decomposed relative positions, `rel[b, i // 56, i % 56, j // 14]`. None elsewhere."""
    order = [*spec.axes, "i", "j"]
    dims = {name: [d for d, a in enumerate(load.index) if name in a.variables] for name in order}
    if any(len(a.variables) > 1 or not a.variables <= {*order} or not a.variables and not isinstance(a, Const) for a in load.index):
        return None
    taken: list[int] = []
    for at in reversed(range(len(order))):
        name, n = order[at], dense.shape[at]
        extents = tuple(shape[d] for d in dims[name])
        if not extents:
            if n != 1:
                return None
            dense = dense.squeeze(at)
            continue
        kind = _way_through(tuple(load.index[d] for d in dims[name]), name, extents, n)
        places = math.prod(extents)
        if not kind:
            return None
        if kind == "runs":
            dense = dense.unflatten(at, (places, n // places)).sum(at + 1)
        elif kind == "turns":
            dense = dense.unflatten(at, (n // places, places)).sum(at)
        dense = dense.unflatten(at, extents)
        taken = dims[name] + taken
    return dense.permute([taken.index(d) for d in sorted(taken)])


def accumulate(spec: AttentionSpec, load: Load, dense: torch.Tensor, into: torch.Tensor, env: Mapping, tensors: Mapping, whole: bool = False) -> None:
    """Add `dense` to `into`, the gradient of the tensor that `load` reads. Deterministic: no floating-point atomics.

    dense  rank len(axes) + 2, extent 1 along the indices on which the load does not depend
    env    index tensors of the same rank (`reference.index_grid`), possibly of a tile
    whole  are these all indices?
    """
    if whole and dense.numel() and (summed := summed_up(spec, load, dense, into.shape)) is not None:
        into[tuple(a.value if isinstance(a, Const) else slice(None) for a in load.index)] += summed.to(into.dtype)
        return
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


def grouped(spec: AttentionSpec) -> bool:
    """Do several queries' batch indices share keys and values?"""
    return not set(spec.axes) <= spec.k | spec.v


@functools.cache
def is_overfull(spec: AttentionSpec) -> bool:
    """Do a table read at j - i, dropout and a derivative of the score that differs from element to element leave no registers for sums of dK and dV both?"""
    tables = any(is_relative(load) for load in spec.score.loads)
    return tables and spec.dropout > 0 and {"i", "j"} <= split_factor(derivative(spec.score, QK))[0].variables


@functools.cache
def is_divided(spec: AttentionSpec) -> bool:
    """Do dK and dV come from kernels of their own in the portable schedule? What positions in a table with ends, dropout's random bits and the queries that
    share keys are made of leave no registers for sums of both."""
    return is_overfull(spec) or spec.dropout > 0 and any(map(ends, spec.score.loads)) and grouped(spec)
