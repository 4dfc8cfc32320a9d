"""Constant tensors: what a graph computes from nothing but numbers is computed here too, and recognised by value.

`torch.tensor(layout)`, `ones(n, n).tril()` filled by slices, tables of a Python loop: such a tensor is the same in every call, whatever
built it. `closed_form` looks for a formula over its indices and proves it on every element. A module's buffer is no constant: it
arrives as an input of the graph, its values may change between calls and no cheap guard sees that; it is summarised at run time.
"""
from __future__ import annotations

import math
from functools import reduce
from typing import Iterator

import torch

from flashfx.expr import FALSE, TRUE, Const, Expr, Var, call
from flashfx.reference import evaluate

from .normalise import DROPOUT, SDPA
from .rules import RANDOM
from .values import Value, ValueGraph

LARGEST = 2 ** 24
"""Elements up to which a tensor is computed and looked at."""
CORNER = 512
"""Rows and columns of a large pattern that are looked at first."""
PIECES = 6
"""Intervals up to which a set of positions counts as a formula."""

Family = tuple[torch.Tensor, Expr, int]


def data(v: Value, vg: ValueGraph) -> torch.Tensor | None:
    """The tensor on the CPU if it is the same in every call, else None."""
    varying: set[Value] = vg.__dict__.setdefault("_varying", set())  # kept for the next question; tensors are not
    known: dict[Value, torch.Tensor | None] = dict.fromkeys(varying)
    users = vg.users()
    todo = [v]
    while todo:
        x = todo[-1]
        if x in known:
            todo.pop()
        elif not _could_be(x):
            known[x] = vg.literals.get(x)
        elif missing := [y for y in x.inputs if y not in known]:
            stop = next((y for y in x.inputs if y in known and known[y] is None), None)
            if stop is not None:
                known[x] = None
            else:
                todo.append(missing[0])
        else:
            known[x] = None if any(known[y] is None for y in x.inputs) else _computed(x, known)
            for y in x.inputs:  # of a mask that a loop fills row by row every state is a tensor
                if known.get(y) is not None and y is not v and all(u in known for u in users[y]):
                    del known[y]
    varying.update(x for x, found in known.items() if found is None)
    return known[v]


def _could_be(v: Value) -> bool:
    sizes = torch.utils._pytree.tree_leaves((v.args, v.kwargs, v.shape))
    return (v.op is not None and v.op not in (DROPOUT, SDPA) and RANDOM not in v.op.tags and not any(isinstance(s, (torch.SymInt, torch.SymFloat)) for s in sizes)
            and math.prod(v.shape) <= LARGEST)


def _computed(v: Value, known: dict) -> torch.Tensor | None:
    args, kwargs = torch.utils._pytree.tree_map_only(Value, known.__getitem__, (v.args, dict(v.kwargs)))
    if "device" in kwargs:
        kwargs["device"] = "cpu"
    try:
        with torch.no_grad(), torch._C._DisableAutocast():  # the recorded calls stand below both
            result = v.op(*args, **kwargs)
    except (RuntimeError, NotImplementedError):  # no kernel on the CPU: then it is a tensor like any other
        return None
    result = result[v.out] if isinstance(result, (tuple, list)) else result
    return result if isinstance(result, torch.Tensor) and (tuple(result.shape), result.dtype) == (v.shape, v.dtype) else None


def dim(d: int) -> Var:
    """The index along dim `d` of a closed form."""
    return Var(f"dim{d}")


def closed_form(v: Value, vg: ValueGraph) -> Expr | None:
    """A formula over `dim(0)`, `dim(1)`, … that gives every element of a constant tensor of at most two values, or None."""
    known: dict[Value, Expr | None] = vg.__dict__.setdefault("_closed_forms", {})
    if v not in known:
        found = data(v, vg)
        known[v] = None if found is None or found.numel() < 2 else recognised(found)
    return known[v]


def recognised(t: torch.Tensor) -> Expr | None:
    """A formula for a tensor of one or two values, proved on every element.

    before -> after: ones(8, 8).tril() -> where(dim1 - dim0 <= 0, 1.0, 0.0)
    """
    least, most = t.min(), t.max()
    if least.isnan() or not ((t == least) | (t == most)).all():
        return None
    seen, kept = t == most, []
    for d in range(t.dim()):  # dims along which nothing changes
        first = seen.narrow(d, 0, 1)
        if torch.equal(seen, first.expand_as(seen)):
            seen = first
        else:
            kept.append(d)
    if len(kept) > 2:
        return None
    flat = seen.reshape([seen.shape[d] for d in kept])
    condition = TRUE if not kept else positions(flat, flat, dim(kept[0]), 0) if len(kept) == 1 else _over_two(flat, dim(kept[0]), dim(kept[1]))
    if condition is None:
        return None
    env = {dim(d).name: torch.arange(s).reshape([-1 if p == d else 1 for p in range(t.dim())]) for d, s in enumerate(t.shape)}
    if not torch.equal(evaluate(condition, env, {}, None, torch.float32).expand(t.shape), t == most):
        return None
    return condition if t.dtype == torch.bool and most else call("where", condition, Const(most.item()), Const(least.item())) \
        if t.dtype != torch.bool else FALSE


def _over_two(seen: torch.Tensor, r: Expr, c: Expr) -> Expr | None:
    """A formula over rows `r` and columns `c`, simplest kinds first. What a corner rules out is not looked for in the whole."""
    if max(seen.shape) > CORNER and _over_two(seen[:CORNER, :CORNER], r, c) is None:
        return None
    rows, columns = seen.shape
    everything = torch.ones_like(seen)
    triangles = ((TRUE, everything), (call("le", c, r), everything.tril()), (call("le", r, c), everything.triu()))
    for extra, care in [t for t in triangles if not (seen & ~t[1]).any()]:
        need, bad = seen & care, ~seen & care
        for families in _families(seen, r, c):
            found = _union(need, bad, families)
            if found is not None:
                return call("and", extra, found)
    return None


def _families(seen: torch.Tensor, r: Expr, c: Expr) -> Iterator[list[Family]]:
    """Kinds of sets to build a pattern of: (number of the set in which each element lies, that number as an expression, its offset).

    Sliding windows and dilations are sets of diagonals, global tokens rows and columns, documents of one length and block patterns
    diagonals of blocks, butterflies classes of the exclusive or.
    """
    rows, columns = seen.shape
    i, j = torch.arange(rows)[:, None], torch.arange(columns)
    diagonals = (j - i + rows - 1, call("sub", c, r), rows - 1)
    lines = [(i.expand(rows, columns), r, 0), (j.expand(rows, columns), c, 0)]
    yield [diagonals]
    yield [*lines, diagonals]
    blocks = [((j // b) - (i // b) + (rows - 1) // b, call("sub", call("floordiv", c, b), call("floordiv", r, b)), (rows - 1) // b)
              for b in _blocks(seen)]
    yield from ([*lines, diagonals, block] for block in blocks)
    yield [(i ^ j, call("bit_xor", r, c), 0), *lines]


def _blocks(seen: torch.Tensor) -> list[int]:
    """Sizes of square blocks to try: the largest that the pattern is made of, and the lengths with which the first row and column begin."""
    changes = [torch.nonzero((seen[1:] != seen[:-1]).any(1)).flatten() + 1, torch.nonzero((seen[:, 1:] != seen[:, :-1]).any(0)).flatten() + 1]
    runs = [int(torch.nonzero(line != line[0]).flatten()[:1].sum()) for line in (seen[:, 0], seen[0])]
    return [b for b in dict.fromkeys([reduce(math.gcd, torch.cat(changes).tolist(), 0), *runs]) if b > 1]


def _union(need: torch.Tensor, bad: torch.Tensor, families: list[Family]) -> Expr | None:
    """`need` as a union of sets that touch nothing `bad`, from as few families as do, or None."""
    allowed, covers = [], []
    for key, _, _ in families:
        good = torch.ones(int(key.max()) + 1, dtype=torch.bool)
        good[key[bad]] = False
        allowed.append(good)
        covers.append(good[key])
    kept = list(range(len(families)))
    without = lambda n: need & ~reduce(torch.logical_or, [covers[m] for m in kept if m != n], torch.zeros_like(need))
    if without(None).any():
        return None
    for n in list(kept):
        if not without(n).any():
            kept.remove(n)
    out: Expr = FALSE
    for n in kept:
        key, e, zero = families[n]
        needed = torch.zeros_like(allowed[n])
        needed[key[without(n)]] = True
        part = positions(needed, allowed[n], e, zero)
        if part is None:
            return None
        out = call("or", out, part)
    return out


def positions(needed: torch.Tensor, allowed: torch.Tensor, e: Expr, zero: int) -> Expr | None:
    """A condition on the integer `e` that holds at every needed position and at allowed ones only; position p is e = p - zero.

    A few intervals, or a few of every k positions, or one interval beside these.
    """
    at = torch.nonzero(needed).flatten().tolist()
    if not at:
        return FALSE
    forbidden = torch.cat([torch.zeros(1, dtype=torch.long), (~allowed).long().cumsum(0)])
    free = lambda a, b: bool(forbidden[b + 1] == forbidden[a])  # everything in a..b allowed?
    runs = [[at[0], at[0]]]
    for p in at[1:]:
        if free(runs[-1][1], p):
            runs[-1][1] = p
        else:
            runs.append([p, p])
    interval = lambda a, b: _between(e, None if free(0, a) else a - zero, None if free(b, len(allowed) - 1) else b - zero)
    if len(runs) <= PIECES:
        return reduce(lambda x, y: call("or", x, y), [interval(a, b) for a, b in runs])
    longest = max(runs, key=lambda run: run[1] - run[0])
    for rest, near in ((runs, FALSE), ([run for run in runs if run is not longest], interval(*longest))):
        period, first, last = reduce(math.gcd, (run[0] - rest[0][0] for run in rest)), rest[0][0], rest[-1][1]
        inside = torch.tensor([x for a, b in rest for x in range(a, b + 1)])
        wanted = torch.zeros(period, dtype=torch.bool)
        wanted[(inside - zero) % period] = True
        for low, high in ((0, len(allowed)), (0, last + 1), (first, len(allowed)), (first, last + 1)):  # without ends, if it may go on
            open_ = torch.ones(period, dtype=torch.bool)
            open_[(torch.nonzero(~allowed[low:high]).flatten() + low - zero) % period] = False
            if period > 1 and not (wanted & ~open_).any():
                every = positions(wanted, open_, call("mod", e, period), 0)
                ends = _between(e, low - zero if low else None, high - 1 - zero if high < len(allowed) else None)
                return None if every is None else call("or", near, call("and", every, ends))
    return None


def _between(e: Expr, low: int | None, high: int | None) -> Expr:
    if low is not None and low == high:
        return call("eq", e, low)
    return call("and", TRUE if low is None else call("ge", e, low), TRUE if high is None else call("le", e, high))
