"""FlashAttention's Figure 2 on this machine: accesses of device memory decide the time."""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Sequence

import torch

from ..codegen import cost, launch, traffic
from ..codegen.gpu import GPU
from ..codegen.limits import shared_bytes
from ..codegen.load import load
from ..codegen.plan import make_plan, overridden
from ..codegen.render import render
from ..codegen.timing import Clock, Operands, each, launches
from ..region import Problem
from ..spec import AttentionSpec
from .sweep import spec_of

HELD = (True, True, True)
NOTHING = (False, False, False)


@dataclass(frozen=True)
class Line:
    """One line of a table: what it is, GFLOP and GB of device memory by the model, predicted and measured milliseconds; None where there is no number."""

    name: str
    gflop: float | None
    gb: float
    predicted: float | None
    measured: float | None

    def __str__(self) -> str:
        cell = lambda x, form: f"{x:{form}}" if x is not None else "-"
        return f"{self.name:<28}{cell(self.gflop, '.1f'):>10}{self.gb:>10.3f}{cell(self.predicted, '.3f'):>14}{cell(self.measured, '.3f'):>14}"


HEAD = f"{'':<28}{'GFLOP':>10}{'GB':>10}{'model, ms':>14}{'measured, ms':>14}"


def _both(spec: AttentionSpec, problem: Problem, gpu: GPU):
    return [make_plan(spec, problem, gpu, direction) for direction in ("forward", "backward")]


def _products(spec: AttentionSpec, problem: Problem, plans) -> float:
    known = cost.facts(spec, problem)
    tiles = lambda own: known.tiles(own.BLOCK_M, own.BLOCK_N)[0]
    return sum(cost.traffic(k, known, own.BLOCK_M, own.BLOCK_N, tiles(own)).products for plan in plans for k, own in cost.kernels(plan))


def _ours(spec: AttentionSpec, problem: Problem, clock: Clock | None) -> float | None:
    """Milliseconds of forward and backward."""
    if clock is None:
        return None
    o = Operands(spec, problem, clock.device)

    def run():
        out, lse = launch.forward(spec, o.q, o.k, o.v, o.aux, o.seed, o.sizes)
        launch.backward(spec, o.grad, o.q, o.k, o.v, o.aux, o.seed, out, lse, o.sizes, HELD)
    run()
    return clock.median(run) / 1e3


def left(gpu: GPU, clock: Clock | None, problem: Problem) -> list[Line]:
    """Standard attention against the tiled kernels, forward and backward: the paper's 1024 keys, head size 64, 16 heads, batch 64."""
    spec = spec_of("full")
    plans = _both(spec, problem, gpu)
    moved = [traffic.predict(spec, problem, plan, called=False) for plan in plans]
    pairs, measured = math.prod(problem.extents) * problem.M * problem.N, None
    if clock is not None:
        o = Operands(spec, problem, clock.device)
        q, k, v = (t.requires_grad_() for t in (o.q, o.k, o.v))
        eager = lambda: torch.autograd.grad((q @ k.transpose(-1, -2) * 0.125).softmax(-1) @ v, (q, k, v), o.grad.reshape(q.shape))
        eager()
        measured = clock.median(eager) / 1e3
    before, after = (sum(getattr(m, name) for m in moved) / 1e9 for name in ("before", "after"))
    return [Line("standard", 12 * pairs * problem.D / 1e9, before, before / gpu.bandwidth * 1e12 / cost.BANDWIDTH, measured),
            Line("tiled", _products(spec, problem, plans) / 1e9, after, sum(cost.seconds(spec, problem, p) for p in plans) * 1e3, _ours(spec, problem, clock))]


def middle(gpu: GPU, clock: Clock | None, problem: Problem) -> list[Line]:
    """Accesses of device memory and time of the forward kernel against the size of its tiles."""
    spec, found = spec_of("full"), []
    for block in (16, 32, 64, 128):
        tiles = (block, block, 8 if block == 128 else 4, 2)
        if shared_bytes("forward", tiles, problem, spec, gpu) > gpu.shared_per_block:
            continue
        with overridden(schedule="triton", forward=tiles):
            plan = make_plan(spec, problem, gpu, "forward")
        measured = None
        if clock is not None:
            runs = launches(load(render(spec, plan, problem, NOTHING).text), Operands(spec, problem, clock.device), "forward")
            measured = sum(us for _, us in each(runs, clock)) / 1e3
        found.append(Line(f"{block} x {block}", _products(spec, problem, [plan]) / 1e9, cost.moved(spec, problem, plan) / 1e9, cost.seconds(spec, problem, plan) * 1e3, measured))
    return found


def right(gpu: GPU, clock: Clock | None, problem: Problem) -> list[Line]:
    """Time of forward and backward against the share of the pairs that a block-diagonal mask leaves."""
    found, chunk = [], problem.N
    while chunk >= max(problem.N // 32, 16):
        text = spec_of("full").line.replace("score = qk * 0.125", f"score = qk * 0.125; where i // {chunk} == j // {chunk}; empty nan") if chunk < problem.N else spec_of("full").line
        spec = AttentionSpec.parse(text)
        plans = _both(spec, problem, gpu)
        found.append(Line(f"1/{problem.N // chunk} visible", _products(spec, problem, plans) / 1e9, sum(cost.moved(spec, problem, p) for p in plans) / 1e9,
                          sum(cost.seconds(spec, problem, p) for p in plans) * 1e3, _ours(spec, problem, clock)))
        chunk //= 2
    return found


def draw(tables: dict[str, Sequence[Line]], path: str, title: str) -> None:
    """The three pictures side by side, model and measurement in each. Needs matplotlib (the `report` extra)."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(1, len(tables), figsize=(5 * len(tables), 3.6), squeeze=False)
    for axis, (name, lines) in zip(axes[0], tables.items()):
        places = range(len(lines))
        for field, offset in (("predicted", -0.2), ("measured", 0.2)):
            values = [getattr(line, field) for line in lines]
            if any(v is not None for v in values):
                axis.bar([p + offset for p in places], [v or 0.0 for v in values], 0.4, label=f"{field}, ms")
        axis.set_xticks(list(places), [line.name for line in lines], fontsize=7, rotation=20)
        axis.set_ylabel("ms")
        other = axis.twinx()
        other.plot(list(places), [line.gb for line in lines], "k.--", label="model, GB")
        other.set_ylabel("GB of device memory")
        other.set_ylim(bottom=0)
        axis.set_title(name, fontsize=9)
        axis.legend(fontsize=7, loc="upper left")
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
