"""Time the kernels of a generated module one by one, on random operands."""
from __future__ import annotations

import math
import statistics
import time
from types import ModuleType
from typing import Callable

import torch

from .. import compat
from ..region import Problem
from ..spec import AttentionSpec
from .layout import empty_lse, empty_output
from .replay import Watched
from .selfcheck import captured_tensors
from .spilling import fitted, settled_here


class Operands:
    """Random inputs of a problem on a device; the log-sum-exp is about what standard normal scores have."""

    def __init__(self, spec: AttentionSpec, problem: Problem, device: torch.device):
        extents, self.device = dict(zip(spec.axes, problem.extents)), device
        of = lambda name, rows, size: torch.randn(*(e if a in getattr(spec, name) else 1 for a, e in extents.items()), rows, size, device=device)
        dtype, v_dtype = getattr(torch, problem.dtype), getattr(torch, problem.v_dtype)
        self.q, self.k = of("q", problem.M, problem.D).to(dtype), of("k", problem.N, problem.D).to(dtype)
        self.v = of("v", problem.N, problem.Dv).to(v_dtype)
        self.aux = [t.to(dtype) if t.is_floating_point() else t for t in captured_tensors(spec, problem, dtype, device)]
        self.seed, self.sizes = torch.ones(1, dtype=torch.int64, device=device), [*problem.extents, *problem.sizes]
        self.out = empty_output(problem.extents, problem.M, self.v).normal_()
        self.grad = torch.randn(self.out.shape, device=device).to(v_dtype)
        self.lse = empty_lse(problem.extents, problem.M, self.v).fill_(math.log(problem.N) + 0.5)

    def call(self, module, direction: str):
        """Run the host function of a direction."""
        if direction == "forward":
            return module.forward(self.q, self.k, self.v, self.aux, self.seed, self.sizes)
        return module.backward(self.grad, self.q, self.k, self.v, self.aux, self.seed, self.out, self.lse, self.sizes)


class _Launches:
    """Stands in for a kernel of a generated module: launches it, and keeps the launch."""

    def __init__(self, kernel, kept: list[tuple[str, Callable]]):
        self.kernel, self.kept = kernel, kept

    def __getitem__(self, grid):
        def run(*args, **options):
            more = {} if compat.interpreting() else settled_here(self.kernel, grid, args, options)
            self.kept.append((self.kernel.__name__, lambda: self.kernel[grid](*fitted(self.kernel, args, more), **options | more)))
            self.kept[-1][1]()
        return run


def launches(module: ModuleType, operands: Operands, direction: str) -> list[tuple[str, Callable[[], object]]]:
    """(name of a kernel, function that launches it again) of all that a host function launches, which it does once. The module is left as it was."""
    kept: list[tuple[str, Callable]] = []
    kernels = {name: kernel for name, kernel in vars(module).items() if name.startswith("attention_")}
    try:
        for name, kernel in kernels.items():
            setattr(module, name, _Launches(kernel.kernel if isinstance(kernel, Watched) else kernel, kept))
        operands.call(module, direction)
    finally:
        for name, kernel in kernels.items():
            setattr(module, name, kernel)
    return kept


def together(kept: list[tuple[str, Callable]]) -> Callable[[], object]:
    """A function that launches all of them again, in order."""
    return lambda: [run() for _, run in kept]


def each(kept: list[tuple[str, Callable]], clock: Clock) -> list[tuple[str, float]]:
    """(name, microseconds) of each launch. Those before it run first, in no time: alone a backward would find what its last run left, that all tiles are taken."""
    return [(name, clock.median(run, together(kept[:n]))) for n, (name, run) in enumerate(kept)]


class Clock:
    """Times kernels on a device: the cache is flushed before each run, and the queue is filled while the device waits, so that launching is not in it."""

    def __init__(self, device: torch.device, milliseconds: float = 8.0):
        self.device, self.budget = device, milliseconds
        self.flush = torch.empty(2 ** 27, dtype=torch.int8, device=device) if device.type == "cuda" else None

    def median(self, run: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
        """Microseconds, to be called after a first run. before: called each time, not measured."""
        if self.flush is None:
            before()
            start = time.perf_counter()
            run()
            return (time.perf_counter() - start) * 1e6
        first = self._times(run, before, 1)[0]
        return statistics.median(self._times(run, before, max(3, min(9, int(self.budget * 1e3 / first)))))

    def _times(self, run, before, count: int) -> list[float]:
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        torch.cuda._sleep(1_000_000 + 500_000 * count)
        for start, stop in marks:
            before()
            self.flush.zero_()
            start.record()
            run()
            stop.record()
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(stop) * 1e3 for start, stop in marks]
