"""FlashAttention's Figure 2 on this machine: accesses of device memory decide the time."""
from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Callable, Iterator, Sequence

import torch

from ..codegen import cost, launch, traffic
from ..codegen.gpu import GPU
from ..codegen.limits import shared_bytes
from ..codegen.load import load
from ..codegen.plan import Plan, make_plan, overridden
from ..codegen.render import render
from ..codegen.timing import Clock, Operands, launches, together
from ..region import Problem
from ..spec import AttentionSpec
from .counters import watch
from .sweep import spec_of

HELD = (True, True, True)
NOTHING = (False, False, False)
HEADS, SIZE = 16, 64
"""Heads, and the size of each."""


@dataclass(frozen=True)
class Line:
    """One line of a table; None where there is no number.

    gflop      operations of the matrix products
    alone      GB of device memory with SRAM as the only cache, as the papers count them
    moved      GB that the model expects a profiler to count
    counted    GB that Nsight Compute counted
    predicted  milliseconds by the model
    measured   milliseconds on the device
    """

    name: str
    gflop: float
    alone: float
    moved: float
    predicted: float
    counted: float | None = None
    measured: float | None = None

    def __str__(self) -> str:
        cell = lambda x, form: f"{x:{form}}" if x is not None else "-"
        return (f"{self.name:<28}{self.gflop:>10.1f}{self.alone:>16.3f}{self.moved:>12.3f}{cell(self.counted, '.3f'):>13}{self.predicted:>12.3f}"
                f"{cell(self.measured, '.3f'):>14}")


HEAD = f"{'':<28}{'GFLOP':>10}{'SRAM alone, GB':>16}{'model, GB':>12}{'counted, GB':>13}{'model, ms':>12}{'measured, ms':>14}"
Case = tuple[Line, Callable[[], object] | None]
"""A line as the model has it, and what runs it once on the device, if there is one."""


def _line(name: str, spec: AttentionSpec, problem: Problem, plans: Sequence[Plan]) -> Line:
    known = cost.facts(spec, problem)
    tiles = lambda own: known.tiles(own.BLOCK_M, own.BLOCK_N)[0]
    products = sum(cost.traffic(k, known, own.BLOCK_M, own.BLOCK_N, tiles(own)).products for plan in plans for k, own in cost.kernels(plan))
    total = lambda of: sum(of(spec, problem, plan) for plan in plans)
    return Line(name, products / 1e9, total(cost.moved) / 1e9, total(cost.profiled) / 1e9, total(cost.seconds) * 1e3)


def _both(name: str, spec: AttentionSpec, problem: Problem, gpu: GPU, device: torch.device | None) -> Case:
    """Forward and backward, as the compiled graph calls them."""
    line = _line(name, spec, problem, [make_plan(spec, problem, gpu, direction) for direction in ("forward", "backward")])
    if device is None:
        return line, None
    o = Operands(spec, problem, device)

    def run():
        out, lse = launch.forward(spec, o.q, o.k, o.v, o.aux, o.seed, o.sizes)
        launch.backward(spec, o.grad, o.q, o.k, o.v, o.aux, o.seed, out, lse, o.sizes, HELD)
    return line, run


def _standard(spec: AttentionSpec, problem: Problem, gpu: GPU, device: torch.device | None) -> Case:
    """Forward and backward with every product and the softmax a kernel of its own, as the paper's Algorithm 0."""
    pairs = math.prod(problem.extents) * problem.M * problem.N
    before = sum(traffic.predict(spec, problem, make_plan(spec, problem, gpu, direction), called=False).before for direction in ("forward", "backward"))
    line = Line("standard", 12 * pairs * problem.D / 1e9, before / 1e9, before / 1e9, before / gpu.bandwidth * 1e3 / cost.BANDWIDTH)
    if device is None:
        return line, None
    o = Operands(spec, problem, device)
    q, k, v = (t.requires_grad_() for t in (o.q, o.k, o.v))
    return line, lambda: torch.autograd.grad((q * 0.125 @ k.transpose(-1, -2)).softmax(-1) @ v, (q, k, v), o.grad.reshape(q.shape))


def left(problem: Problem, gpu: GPU, device: torch.device | None) -> Iterator[Case]:
    """Standard attention against the tiled kernels, forward and backward: the paper's 1024 keys, head size 64, 16 heads, batch 64."""
    spec = spec_of("full")
    yield _standard(spec, problem, gpu, device)
    yield _both("tiled", spec, problem, gpu, device)


def middle(problem: Problem, gpu: GPU, device: torch.device | None) -> Iterator[Case]:
    """The portable forward kernel against the size of its tiles."""
    spec = spec_of("full")
    for block in (16, 32, 64, 128):
        tiles = (block, block, 8 if block == 128 else 4, 2)
        if shared_bytes("forward", tiles, problem, spec, gpu) > gpu.shared_per_block:
            continue
        with overridden(schedule="triton", forward=tiles):
            plan = make_plan(spec, problem, gpu, "forward")
        run = None
        if device is not None:
            run = together(launches(load(render(spec, plan, problem, NOTHING).text), Operands(spec, problem, device), "forward"))
        yield _line(f"{block} x {block}", spec, problem, [plan]), run


def right(problem: Problem, gpu: GPU, device: torch.device | None) -> Iterator[Case]:
    """Forward and backward against the share of the pairs that a block-diagonal mask leaves."""
    chunk, full = problem.N, spec_of("full").line
    while chunk >= max(problem.N // 32, 16):
        hidden = f"score = qk * 0.125; where i // {chunk} == j // {chunk}; empty nan"
        spec = AttentionSpec.parse(full.replace("score = qk * 0.125", hidden) if chunk < problem.N else full)
        yield _both(f"1/{problem.N // chunk} visible", spec, problem, gpu, device)
        chunk //= 2


def tables(gpu: GPU, device: torch.device | None, batch: int, length: int) -> Iterator[tuple[str, Iterator[Case]]]:
    """The three parts, what each is and its lines. The right one is four times as long."""
    for name, part, b, n in (("standard and tiled, forward and backward", left, batch, length), ("size of tiles, forward", middle, batch, length),
                             ("sparsity, forward and backward", right, max(1, batch // 16), 4 * length)):
        yield f"{name}, N={n}, batch {b}, {HEADS} heads, head size {SIZE}", part(Problem((b, HEADS), n, n, SIZE, SIZE, "bfloat16", "bfloat16"), gpu, device)


def watched(gpu: GPU, device: torch.device, batch: int, length: int) -> None:
    """Run each line once, for a profiler that watches this process."""
    for _, cases in tables(gpu, device, batch, length):
        for _, run in cases:
            run()
            watch(run)


def measured(cases: Iterator[Case], clock: Clock | None, groups: Iterator[Sequence[tuple[str, float]]]) -> Iterator[Line]:
    """Each line with what the device took. groups: of `count`, one for each line as far as there are any."""
    for line, run in cases:
        if (group := next(groups, None)) is not None:
            line = replace(line, counted=sum(size for _, size in group) / 1e9)
        if clock is not None:
            run()
            line = replace(line, measured=clock.median(run) / 1e3)
        yield line


def draw(tables: dict[str, Sequence[Line]], path: str, title: str) -> None:
    """The three pictures side by side, model and measurement in each. Needs matplotlib (the `report` extra)."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(1, len(tables), figsize=(5 * len(tables), 4.2), squeeze=False)
    for axis, (name, lines) in zip(axes[0], tables.items()):
        places, other = list(range(len(lines))), axis.twinx()
        values = lambda field: [getattr(line, field) for line in lines]
        for field, offset in (("predicted", -0.2), ("measured", 0.2)):
            if None not in values(field):
                axis.bar([p + offset for p in places], values(field), 0.4, label=f"{field}, ms")
        for field, style, label in (("alone", "k.:", "SRAM alone, GB"), ("moved", "k.--", "model, GB"), ("counted", "rx", "counted, GB")):
            if None not in values(field):
                other.plot(places, values(field), style, label=label)
        axis.set_xticks(places, [line.name for line in lines], fontsize=7, rotation=20)
        axis.set_ylabel("ms")
        other.set_ylabel("GB of device memory")
        other.set_ylim(bottom=0)
        axis.set_title(name.replace(", N=", "\nN="), fontsize=9)
    marks, names = zip(*(found for a in (axis, other) for found in zip(*a.get_legend_handles_labels())))
    figure.legend(marks, names, ncols=len(names), fontsize=8, loc="lower center")
    figure.suptitle(title, fontsize=9)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
