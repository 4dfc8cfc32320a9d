"""Fit the cost model's rates to one half of a recorded sweep (`python -m flashfx bench fit`); tests judge them on the other half."""
from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from ..codegen import cost, rates
from ..codegen.candidates import Asked, ask, ranked, resident_of
from ..codegen.gpu import BY_NAME, EXACT, GPU, units
from ..codegen.limits import shared_bytes
from ..codegen.registers import registers_per_thread
from ..codegen.packing import packed_axes
from ..codegen.rates import Rate
from ..codegen.schedules import hopper, one_tile
from ..codegen.schedules.hopper_captured import copyable
from ..codegen.split import parts_of_rows
from ..region import Problem
from ..spec import AttentionSpec
from .sweep import spec_of

TERMS = Rate._fields
NEAR = 1.2
"""How much slower than the fastest tiles of "one_tile" those may be that its rates are fitted to."""
SECONDS = {"tile", "shallow", "idle", "narrow", "nested", "turn", "single", "restart", "launch"}


@dataclass(frozen=True)
class Point:
    """One spec at one shape, with the measured microseconds of each kernel with each tile."""

    variant: str
    spec: AttentionSpec
    problem: Problem
    us: dict[str, float]
    number: int

    @property
    def fitted(self) -> bool:
        """Every other point; the rest is held out."""
        return self.number % 2 == 0

    def of(self, schedule: str, kernel: str) -> dict[tuple[int, ...], float]:
        """Tiles -> seconds of one kernel; () for a kernel without tiles."""
        found = {}
        for name, us in self.us.items():
            own, *rest = name.split()
            if own == schedule and rest[0] == kernel:
                found[tuple(map(int, rest[1].split("x"))) if rest[1:] else ()] = us * 1e-6
        return found


def points(path: str | Path) -> list[Point]:
    """The points of a table that `python -m flashfx bench tiles` wrote."""
    found = []
    for number, row in enumerate(json.loads(Path(path).read_text())["points"]):
        problem = Problem(tuple(row["extents"]), *(row[k] for k in ("M", "N", "D", "Dv", "dtype", "v_dtype")))
        variant = row["variant"].split()[0]
        found.append(Point(variant, spec_of(variant, len(problem.extents) == 3), problem, row["us"], number))
    return found


def fits(point: Point, schedule: str, kernel: str, gpu: GPU) -> set[tuple[int, ...]]:
    """Tiles that the planner would consider; all of "dense", which has one, and of Hopper's backward, whose tiles differ in stages alone: those that are
    not proposed tell what waiting costs. It considers one of "one_tile" too: those not much slower than the fastest stand for it."""
    if kernel in ("dense", "one_pass"):
        return set(point.of(schedule, kernel))
    if kernel == "one_tile":
        found = point.of(schedule, kernel)
        return {tiles for tiles, seconds in found.items() if seconds <= NEAR * min(found.values())}
    return {c.tiles for c in ranked(_asked(point, schedule, kernel, gpu)) if not c.unfit}


def _asked(point: Point, schedule: str, kernel: str, gpu: GPU) -> Asked:
    """As a plan asks for the tiles of a kernel: on Hopper with all captured tensors by TMA, else with heads that share keys as rows of one tile."""
    packed = (schedule, kernel) == ("triton", "forward") and bool(packed_axes(point.spec, point.problem))
    tiled = tuple(sorted(copyable(point.spec, point.problem))) if schedule == "hopper" else ()
    return ask(schedule, {"one_pass": "keys"}.get(kernel, kernel), point.spec, point.problem, gpu, packed=packed, tiled=tiled)


def terms(point: Point, schedule: str, kernel: str, tiles: tuple[int, int, int, int], gpu: GPU) -> tuple[Rate, float]:
    """(what `cost.features` finds, seconds of memory) for one measured kernel."""
    spec, p = point.spec, point.problem
    m, n, *_ = tiles
    asked = _asked(point, schedule, kernel, gpu)
    if schedule == "hopper":
        registers, shared = hopper.registers_per_thread(asked.kernel, p, m, n, asked.score_tiles), 0
    else:
        registers, shared = registers_per_thread(kernel, tiles, p, spec), shared_bytes(kernel, tiles, p, spec, gpu, packed=asked.packed)
    programs = resident_of(asked, tiles, shared, registers)
    known = cost.facts(spec, p).packed(asked.packed)
    parts = parts_of_rows(known.z // known.share, p.M, {"BLOCK_M": m}, gpu.sms * programs) if kernel == "one_tile" and one_tile.in_parts(p) else 1
    found, device, all_bytes, waiting = cost.features(schedule, kernel, tiles, known, gpu, units(p, gpu) in EXACT, programs, registers, None, parts)
    return found, max(device / (gpu.bandwidth * rates.BANDWIDTH), all_bytes / (gpu.bandwidth * rates.CACHE), waiting)


def fit(found: list[Point], schedule: str, kernel: str, gpu: GPU) -> tuple[Rate, int]:
    """(rates with the least relative squared error, none negative, measurements used): of the fitted half; what memory binds is left out."""
    rows, wanted = [], []
    for point in (p for p in found if p.fitted):
        known = fits(point, schedule, kernel, gpu)
        for tiles, seconds in point.of(schedule, kernel).items():
            if tiles not in known:
                continue
            term, memory = terms(point, schedule, kernel, tiles, gpu)
            waits = kernel == "one_tile"  # for memory before it does anything else
            if memory < 0.7 * seconds or waits:
                rows.append([getattr(term, name) / seconds for name in TERMS])
                wanted.append(1.0 - waits * memory / seconds)
    values = nonnegative(torch.tensor(rows, dtype=torch.float64), torch.tensor(wanted, dtype=torch.float64))
    return Rate(**{name: float(f"{v:.3g}") for name, v in zip(TERMS, values.tolist())}), len(rows)


def nonnegative(A: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """x >= 0 that minimises |A x - b|, by the active set method of Lawson and Hanson, Solving Least Squares Problems, chapter 23."""
    scale = A.norm(dim=0).clamp(min=1e-300)
    A = A / scale
    x, passive = torch.zeros(A.shape[1], dtype=A.dtype), torch.zeros(A.shape[1], dtype=torch.bool)
    while True:
        gradient = A.T @ (b - A @ x)
        gradient[passive] = -math.inf
        if float(gradient.max()) < 1e-9:
            return x / scale
        passive[gradient.argmax()] = True
        while True:
            trial = torch.zeros_like(x)
            trial[passive] = torch.linalg.lstsq(A[:, passive], b[:, None], driver="gelsd").solution[:, 0]
            low = passive & (trial <= 0)
            if not low.any():
                x = trial
                break
            step = (x[low] / (x[low] - trial[low]).clamp(min=1e-300)).min()
            x = x + step * (trial - x)
            passive &= x > 1e-14


def text(path: str | Path, gpu: GPU | None = None) -> str:
    """`RATES` of `flashfx.codegen.rates`, as Python."""
    found, gpu = points(path), gpu or BY_NAME["H200"]
    lines = []
    for key in (("hopper", "forward"), ("hopper", "one_pass"), ("triton", "forward"), ("triton", "keys"), ("triton", "rows"), ("triton", "one_tile"), ("triton", "dense")):
        rate, count = fit(found, *key, gpu)
        shown = ", ".join(f"{name}={value:.3g}" for name in TERMS if (value := getattr(rate, name)))
        lines.append(f"    {key}: Rate({shown}),  # {count} measurements")
    return "\n".join(lines)
