"""Translation validation: what stands in the rewritten graph against what stood there, site by site, outputs and gradients.

Both sides run on the same sampled data, in float64 and in the model's dtype (`flashfx.passes.rerun`): the original calls from the operands
to the output, and the nodes that the rewrite put there, the op and so the kernels included. The data have batches whose boolean masks are
all false, and scores large enough for exp to underflow. Dropout is left out on both sides: they draw different random numbers.
"""
from __future__ import annotations

import math

import torch
from torch import fx

from flashfx.reference import log_sum_exp
from flashfx.region import Checked

from .find import Site, carries
from .lift import Lifted
from .operands import Operand
from .rerun import Rerun
from .rules import PRODUCTS
from .values import Value, ValueGraph, upstream

LARGEST = 2 ** 25
"""Scores per site up to which verification runs; float64 attention beyond would take minutes."""
TRIALS = ((1.0, False), (1.0, True), (60.0, False))
"""(scale of the floats, is the first batch of every boolean mask false?)"""


def verify(site: Site, lifted: Lifted, vg: ValueGraph, replaced: dict[fx.Node, fx.Node]) -> tuple[tuple[Checked, ...], str]:
    """(what was compared, why it was not). `replaced` are the pairs of old and new nodes of the site's Dynamo node."""
    first = Rerun(vg, {}, None, double=True, rounded=False, leaves=[])
    extents = {name: first.number(s) for name, s in lifted.extents.items()}
    scores = math.prod(extents[n] for n in lifted.dims) * extents["i"] * extents["j"]
    if scores > LARGEST:
        return (), f"not verified: {scores} scores, more than {LARGEST}"
    operands = [lifted.q[0], lifted.k[0], lifted.v[0], *lifted.aux, *(lifted.sink or [])[:1]]
    pairs = [(vg.timeline[old][0][1], new) for old, new in replaced.items()]
    step = vg.steps[site.out.owner]
    sources = sources_of(pairs, vg, step)
    names = names_of(sources, lifted)
    leaves = list(names)
    found: list[Checked] = []

    def compare(what, dtype, ours, theirs, exact, allowed):
        found.append(Checked(what, dtype, _error(ours, exact), allowed))

    with torch.enable_grad() if site.out.grad and leaves else torch.no_grad():
        hides = any(not v.dtype.is_floating_point for v in sources)
        for trial, (scale, hide) in enumerate(TRIALS):
            if hide and not hides:
                continue
            sample = Sampler(first, trial, {o.value for o in operands}, scale, hide)
            data = {v: sample(v) for v in sources}
            runs = lambda **how: Rerun(vg, data, sample, leaves=leaves if torch.is_grad_enabled() and trial < 2 else [], **how)
            double = runs(double=True, rounded=False)
            expected = [double.value(v) for v, _ in pairs]
            # exp without a shift, say, or a sum of such that all vanish: then what the model yields says nothing about the rewrite
            if double.overflows or trial == 2 and double.vanishes:
                continue
            ours = [double.node(n, step) for _, n in pairs]
            if trial == 2 and lifted.spec.is_masked and (empty := _empty_rows(lifted, operands, double, extents)).any():
                # scores as large as this show through a mask's constant where all keys are hidden
                rows = [_fitting(empty, lifted, v, site) for v, _ in pairs]
                if any(r is None for r in rows):
                    continue
                ours, expected = ([t.masked_fill(r, 0.0) for t, r in zip(side, rows)] for side in (ours, expected))
            for n, (a, b) in enumerate(zip(ours, expected)):
                compare("out" if n == 0 else f"result {n}", "float64", a, b, b, 1e-9 * max(1.0, _largest(b)))
            for name, a, b in _gradients(double, ours, expected, names):
                compare(f"gradient of {name}", "float64", a, b, b, 1e-8 * max(1.0, _largest(b)))
            if trial == 0 and site.out.dtype != torch.float64:
                found += _in_model_dtype(site, runs, pairs, step, names, scores)
    return _worst(found), ""


def _in_model_dtype(site, runs, pairs, step, names, scores: int) -> list[Checked]:
    """As the model computes, where it does, against the original in float64 on the same rounded data: at most twice the original's own error, rounding, and how
    far the original moves when its data move by a rounding step."""
    dtype, found = str(site.out.dtype).removeprefix("torch."), []
    exact, low, near = runs(double=True, rounded=True), runs(double=False, rounded=True), runs(double=False, rounded=True, moved=True)
    outs, theirs, ours = [exact.value(v) for v, _ in pairs], [low.value(v) for v, _ in pairs], [low.node(n, step) for _, n in pairs]
    shaken = [near.value(v) for v, _ in pairs]
    moves = {"out" if n == 0 else f"result {n}": _error(a, b) for n, (a, b) in enumerate(zip(shaken, theirs))}
    beside = {name: g for name, g, _ in _gradients(near, shaken, shaken, names)}
    rows = [("out" if n == 0 else f"result {n}", a, t, e) for n, (a, t, e) in enumerate(zip(ours, theirs, outs))]
    of_exact = {name: e for name, _, e in _gradients(exact, outs, outs, names)}
    for name, a, t in _gradients(low, ours, theirs, names):
        if name in of_exact:
            rows.append((f"gradient of {name}", a, t, of_exact[name]))
            moves[f"gradient of {name}"] = _error(beside[name], t) if name in beside else 0.0
    scale = max([_largest(e) for what, *_, e in rows if what.startswith("gradient")], default=0.0)
    for what, a, t, e in rows:
        # rounding of sums over the scores grows as the root of their number; of a difference of two sites it is that of both
        steps = max(4.0, math.sqrt(scores / max(e.numel(), 1)))
        band = steps * torch.finfo(site.out.dtype).eps * max(_largest(e), scale if what.startswith("gradient") else 0.0)
        own = _error(t, e)
        if own < math.inf:  # the original overflows: no measure
            found.append(Checked(what, dtype, _error(a, e), 2 * own + band + (moves[what] if moves[what] < math.inf else 0.0)))
    return found


def sources_of(pairs: list[tuple[Value, fx.Node]], vg: ValueGraph, step: int) -> list[Value]:
    """The values that both sides start from: those that the emitted nodes read and that the original passes through, but for those that are made of others,
    by views say."""
    read, seen, todo = [], set(), [new for _, new in pairs]
    while todo:
        n = todo.pop()
        if n in seen:
            continue
        seen.add(n)
        if n not in vg.steps:  # what is asked for its size alone is not read
            todo.extend(n.all_input_nodes if n.target is not torch.ops.aten.sym_size.int else ())
        elif (held := vg.held(n, step)) is not None and held not in vg.constants:
            read.append(held)
    made = lambda v: v.inputs if carries(v) and v.name not in PRODUCTS else []
    read = [v for v in dict.fromkeys(read) if not any(x in read for x in upstream(v, made) if x is not v)]
    passed = {v for old, _ in pairs for v in upstream(old, lambda v: [] if v in read else v.inputs)}
    return [v for v in read if v in passed]


def names_of(sources: list[Value], lifted: Lifted) -> dict[Value, str]:
    """Those of the sources that take gradients, each with what it is to the site."""
    known = [*zip("qkv", (lifted.q, lifted.k, lifted.v)), *((a.name, [o]) for a, o in zip(lifted.spec.aux, lifted.aux)), ("the sink", lifted.sink or [])]
    return {v: " and ".join(name for name, candidates in known if any(o.value is v for o in candidates)) or v.owner.name
            for v in sources if v.dtype.is_floating_point and v.reaches_parameters(through_stops=False)}


class Sampler:
    """value -> float64 (or integer, boolean) data on the CPU, the same whenever it is asked for."""

    def __init__(self, sizes: Rerun, trial: int, scaled: set[Value], scale: float, hide: bool):
        self.sizes, self.trial, self.scaled, self.scale, self.hide = sizes, trial, scaled, scale, hide
        self.known: dict[Value, torch.Tensor] = {}

    def __call__(self, v: Value) -> torch.Tensor:
        if v not in self.known:
            g = torch.Generator().manual_seed(self.trial * 1_000_003 + v.number)
            shape = [self.sizes.number(s) for s in v.shape]
            if v.dtype.is_floating_point:
                scale = self.scale if v in self.scaled else max((1, *shape[-1:])) ** -0.5  # weights in front of q, k and v must not blow them up
                self.known[v] = torch.randn(shape, generator=g, dtype=torch.float64) * scale
            else:
                data = torch.rand(shape, generator=g) < 0.7
                if self.hide and shape:
                    data[0] = False
                self.known[v] = data.to(v.dtype)
        return self.known[v]


def _gradients(run: Rerun, ours: list[torch.Tensor], theirs: list[torch.Tensor], names: dict[Value, str]):
    """(name, ours, theirs) for each leaf; nothing where an output is not finite: eager's NaN rows poison every gradient, ours pass none on."""
    floats = [(a, b) for a, b in zip(ours, theirs) if b.is_floating_point() and b.requires_grad]
    if not floats or not run.leaves or not all(b.isfinite().all() for _, b in floats):
        return
    leaves = list(run.leaves.values())
    seeds = [torch.randn(b.shape, generator=torch.Generator().manual_seed(n), dtype=torch.float64).to(b) for n, (_, b) in enumerate(floats)]
    take = lambda outs: torch.autograd.grad([o for o in outs if o.requires_grad], leaves, [s for s, o in zip(seeds, outs) if o.requires_grad],
                                            allow_unused=True, retain_graph=True)
    none = [None] * len(leaves)
    first, second = (take(side) if any(o.requires_grad for o in side) else none for side in zip(*floats))
    for v, a, b in zip(run.leaves, first, second):
        zero = torch.zeros_like(run.leaves[v])
        yield names[v], zero if a is None else a, zero if b is None else b


def _empty_rows(lifted: Lifted, operands: list[Operand], run: Rerun, extents: dict[str, int]) -> torch.Tensor:
    views = [_view(run.value(o.value).detach(), o, run) for o in operands]
    sizes = [*(extents[n] for n in lifted.dims), *(run.number(s) for s in lifted.sizes)]
    lse = log_sum_exp(lifted.spec, *views[:2], views[3: 3 + len(lifted.aux)], sizes)
    return lse.isneginf().unsqueeze(-1).expand(*lse.shape, extents["e"])


def _view(t: torch.Tensor, o: Operand, run: Rerun) -> torch.Tensor:
    for name, *args in o.steps:
        args = [tuple(run.number(a) for a in arg) if isinstance(arg, tuple) else run.number(arg) for arg in args]
        t = getattr(t, name)(*args)
    return t


def _fitting(rows: torch.Tensor, lifted: Lifted, v: Value, site: Site) -> torch.Tensor | None:
    """`rows` (one dim per axis) as the site's output is laid out, for views that keep its number of elements in order; None for others."""
    from .emit import follow_views
    dims = follow_views(v, site.out, lifted.out_dims, lifted.extents)
    if dims is None:
        return None
    axes = [*lifted.dims, "i", "e"]
    flat = [n for group in dims for n in group]
    missing = [n for n in axes if n not in flat]
    rows = rows.permute([axes.index(n) for n in (*missing, *flat)]).reshape([rows.shape[axes.index(n)] for n in flat])
    out, at = [], 0
    for group in dims:
        out.append(math.prod(rows.shape[at: at + len(group)]))
        at += len(group)
    return rows.reshape(out)


def _worst(found: list[Checked]) -> tuple[Checked, ...]:
    """One row for each tensor and dtype: the trial that came nearest to what is allowed."""
    table: dict[tuple[str, str], Checked] = {}
    for c in found:
        share = lambda x: x.error / x.allowed if x.allowed else x.error
        if (key := (c.what, c.dtype)) not in table or not share(c) <= share(table[key]):
            table[key] = c
    return tuple(table.values())


def _largest(t: torch.Tensor) -> float:
    return t.detach().double().nan_to_num(0.0, 0.0, 0.0).abs().max().item() if t.numel() else 0.0


def _error(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, on b's device; infinite where the shapes, or NaNs and infinities, do not agree."""
    a, b = a.detach().to(b.device).double(), b.detach().double()
    if a.shape != b.shape or not torch.equal(a.isnan(), b.isnan()) or not torch.equal(a.isinf(), b.isinf()):
        return math.inf
    return _largest(torch.where(a == b, 0.0, a - b))
