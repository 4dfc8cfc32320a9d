"""How a mask cuts the score matrix into tiles that are skipped, full or partial; the kernels cut by the same arithmetic."""
from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import dataclass
from typing import Mapping, Sequence

import torch

from ..expr import BOOL, INT, TRUE, Call, Expr, Load, Var, call, conjuncts
from ..ops import OPS
from ..reference import evaluate
from ..spec import AttentionSpec
from .ranges import bounds


@dataclass(frozen=True)
class TileCounts:
    """Tiles over all batch indices. `data` are those that captured tensors decide, which were not given: skipped, full or partial at run time; they may
    hide partial ones too, so that `exact` is False."""

    skipped: int
    full: int
    partial: int
    data: int = 0
    exact: bool = True

    @property
    def total(self) -> int:
        return self.skipped + self.full + self.partial + self.data

    @property
    def visited(self) -> int:
        """Tiles that are not skipped, or not as far as is known."""
        return self.full + self.partial + self.data

    def __str__(self) -> str:
        share = lambda n: f"{n} ({n / self.total:.0%})" if self.total else "0"
        return f"{share(self.skipped)} tiles skipped, {share(self.full)} full, {share(self.partial)} partial" + \
            f", {share(self.data)} decided by the data at run time" * (not self.exact)


def cut(lo, hi, full_lo, full_hi, block: int):
    """Tile-aligned segments of one row of tiles: (start, full_start, full_stop, stop), partial outside the full ones.

    The kernels write the same with minimum and maximum.
    """
    start = lo // block * block
    stop = max(hi, start)
    full_start = min(max(-(-full_lo // block) * block, start), stop)
    return start, full_start, max(min(full_hi // block * block, stop), full_start), stop


def classify(spec: AttentionSpec, BLOCK_M: int, BLOCK_N: int, M: int, N: int, sizes: Sequence[int] = (),
             tensors: Mapping[str, torch.Tensor] | None = None) -> TileCounts:
    """Count the forward tiles of `spec` by kind. sizes = extents of the axes, then `spec.sizes`.

    Without `tensors`, conditions on captured tensors count as unknown. Costs O(tiles of rows), never O(M * N).
    """
    extents = tuple(sizes[: len(spec.axes)]) or (1,) * len(spec.axes)
    if 0 in (*extents, M, N):
        return TileCounts(0, 0, 0)
    ends = tile_bounds(spec, BLOCK_M, M, N, sizes, tensors)
    full = partial = data = 0
    tiles = lambda a, b: max(0, -(-(b - a) // BLOCK_N))
    for *hull, sure_lo, sure_hi in ends:
        start, full_start, full_stop, stop = cut(*hull, BLOCK_N)
        _, sure_start, sure_stop, _ = cut(*hull[:2], sure_lo, sure_hi, BLOCK_N)
        known = tiles(full_start, full_stop)
        open_ = max(0, tiles(sure_start, sure_stop) - tiles(max(full_start, sure_start), min(full_stop, sure_stop)))
        full += known
        data += open_
        partial += tiles(start, full_start) + tiles(full_stop, stop) - open_
    exact = {load.name for load in spec.visible.loads} <= set(tensors or {})
    skipped = len(ends) * -(-N // BLOCK_N) - full - partial - data
    alike = math.prod(extents) * -(-M // BLOCK_M) // len(ends)
    return TileCounts(alike * skipped, alike * full, alike * partial, alike * data, exact)


def tile_bounds(spec: AttentionSpec, BLOCK_M: int, M: int, N: int, sizes: Sequence[int] = (), tensors: Mapping[str, torch.Tensor] | None = None,
                first: bool = False) -> list[tuple[int, int, int, int, int, int]]:
    """(lo, hi, full_lo, full_hi, sure_lo, sure_hi) of each row of tiles, of all batch indices on which they depend in turn, or of the first alone; the
    last two are what would be full if tensors that are not given hid nothing. Arguments as `classify`."""
    tensors, missing = dict(tensors or {}), {load.name for load in spec.visible.loads} - set(tensors or {})
    found = bounds(_optimistic(spec.visible, missing), "j")
    known = [c for c in conjuncts(spec.visible) if not {load.name for load in c.loads} & missing]
    sure = bounds(functools.reduce(lambda a, b: call("and", a, b), known, TRUE), "j") if missing else found
    ends = (found.lo, found.hi, found.full_lo, found.full_hi, sure.full_lo, sure.full_hi)
    extents = dict(zip(spec.axes, sizes))
    used = [axis for axis in spec.axes if any(axis in e.variables for e in ends)]
    shape = [1 if first else extents.get(axis, 1) for axis in used] + [-(-M // BLOCK_M)]
    env = {"M": M, "N": N, **dict(zip(spec.sizes, sizes[len(spec.axes):]))}
    for d, axis in enumerate(used):
        env[axis] = torch.arange(shape[d]).reshape([-1 if p == d else 1 for p in range(len(shape))])
    env["i0"] = torch.arange(0, M, BLOCK_M)
    env["i1"] = (env["i0"] + BLOCK_M).clamp(max=M) - 1
    tensors = {name: t.cpu() for name, t in tensors.items()}
    return list(zip(*(evaluate(e, env, tensors, None, torch.float64).expand(shape).flatten().tolist() for e in ends)))


def known_names(spec: AttentionSpec, extents: Sequence[int], sizes: Sequence[int]) -> tuple[tuple[str, int], ...]:
    """Values of what a mask reads by name beside M and N, for `estimate`: a middle index of each axis, and the sizes."""
    return (*((axis, e // 2) for axis, e in zip(spec.axes, extents)), *zip(spec.sizes, sizes))


SAMPLES = 32
"""Rows of tiles at most that `estimate` looks at."""


CUT = 0.25
"""Of tiles that captured tensors may cut, how many they are taken to: two of eight where documents of 1000 keys are packed, one at most where lengths say
an end. Which they are both schedules find out. Were it all, the portable forward would be taken at head size 64, which on an H200, N = 4096, has 397, 175
and 240 TFLOP/s under lengths, documents and an additive tensor where the Hopper one had 450, 190 and 280 in a run before."""


@functools.lru_cache(maxsize=4096)
def estimate(visible: Expr, BLOCK_M: int, BLOCK_N: int, M: int, N: int, given: tuple[tuple[str, int], ...]) -> tuple[float, float]:
    """(full, partial) tiles of one batch index: `classify` by a sample of the rows of tiles, fast enough for choosing; of those that the data decide
    `CUT` are partial.

    given: values of what the mask reads by name beside M and N: sizes, and an index of each axis.
    """
    rows, found = -(-M // BLOCK_M), _sampled(visible, BLOCK_M, M, N, given)
    seen = full = decided = 0
    for ends, times in found.items():  # `cut`, in tiles; no min and max: a choice of tiles comes here hundreds of times
        start, first, last, stop = ends[0] // BLOCK_N, -(-ends[2] // BLOCK_N), ends[3] // BLOCK_N, -(-ends[1] // BLOCK_N)
        if stop <= start:
            continue
        seen += times * (stop - start)
        known = (last if last < stop else stop) - (first if first > start else start)
        known = known if known > 0 else 0
        full += times * known
        if len(ends) > 4:
            first, last = -(-ends[4] // BLOCK_N), ends[5] // BLOCK_N
            more = (last if last < stop else stop) - (first if first > start else start) - known
            decided += times * more if more > 0 else 0
    partial = seen - full
    share, whole = rows / min(rows, SAMPLES), (1.0 - CUT) * min(partial, decided)
    return (full + whole) * share, (partial - whole) * share


@functools.lru_cache(maxsize=4096)
def _sampled(visible: Expr, BLOCK_M: int, M: int, N: int, given: tuple[tuple[str, int], ...]) -> Counter[tuple[int, ...]]:
    """`_ends` of the rows of tiles in a sample -> how many have them. Arguments as `estimate`."""
    rows = -(-M // BLOCK_M)
    count = min(rows, SAMPLES)
    first = [(2 * s + 1) * rows // (2 * count) * BLOCK_M for s in range(count)]
    return Counter(_ends(visible)([(i, min(i + BLOCK_M, M) - 1) for i in first], M=M, N=N, **dict(given)))


@functools.lru_cache(maxsize=4096)
def unevenness(visible: Expr, M: int, N: int, given: tuple[tuple[str, int], ...]) -> float:
    """How unequally many keys rows see, by a sample: 0 if all see as many, 1 if numbers from 0 to N are as likely (a causal mask). given: as `estimate`."""
    count = min(M, SAMPLES)
    rows = [(2 * s + 1) * M // (2 * count) for s in range(count)]
    seen = [max(0, hi - lo) for lo, hi, *_ in _ends(visible)([(i, i) for i in rows], M=M, N=N, **dict(given))]
    mean = sum(seen) / max(len(seen), 1)
    return min(1.0, 2 * sum(abs(n - mean) for n in seen) / (len(seen) * mean)) if mean else 0.0


_FUNCTIONS = {name: row.evaluate for name, row in OPS.items() if row.evaluate is not None} | {
    "minimum": min, "maximum": max, "where": lambda c, x, y: x if c else y}


@functools.lru_cache(maxsize=1024)
def _ends(visible: Expr):
    """(lo, hi, full_lo, full_hi) as `tile_bounds`, and sure_lo and sure_hi where data decide, as one Python function of the values of their names and of
    (i0, i1) of tiles: a list, one for each tile."""
    if visible == TRUE:
        return lambda tiles_, N, **_: [(0, N, 0, N)] * len(tiles_)
    found = bounds(_optimistic(visible, {load.name for load in visible.loads}), "j")
    ends = found.lo, found.hi, found.full_lo, found.full_hi
    if visible.loads:  # what positions alone say
        sure = bounds(functools.reduce(lambda a, b: call("and", a, b), (c for c in conjuncts(visible) if not c.loads), TRUE), "j")
        ends += sure.full_lo, sure.full_hi
    names = frozenset().union(*(e.variables for e in ends))
    whole = lambda e: f"{e}" if e.kind == INT else f"int({e})"
    text = f"({', '.join(map(whole, ends))})"
    text = f"[{text} for i0, i1 in tiles_]" if names & {"i0", "i1"} else f"[{text}] * len(tiles_)"
    return eval(f"lambda {', '.join(['tiles_', *sorted(names - {'i0', 'i1'}), '**_'])}: {text.replace('~', '1 - ')}", dict(_FUNCTIONS))


def _optimistic(visible: Expr, missing: set[str]) -> Expr:
    """Without its tensors a condition may hold or not: replace it by a load that no rule can solve."""
    if not any(load.name in missing for load in visible.loads):
        return visible
    if isinstance(visible, Call) and visible.op in ("and", "or", "not"):
        return call(visible.op, *(_optimistic(a, missing) for a in visible.args))
    return Load("unknown", (Var("i"), Var("j")), BOOL)
