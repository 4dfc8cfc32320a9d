"""Measure every tile that fits, kernel by kernel, over a grid of specs: the table to which the cost model's rates are fitted."""
from __future__ import annotations

import functools
import json
import multiprocessing
import time
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Callable, Sequence

import torch

from .. import compat
from ..codegen import candidates
from ..codegen.gpu import GPU
from ..codegen.limits import shared_bytes
from ..codegen.load import load
from ..codegen.plan import make_plan, overridden
from ..codegen.render import render
from ..codegen.schedules import hopper_memory, one_tile
from ..codegen.timing import Clock, Operands, each, launches, together
from ..region import Problem
from ..spec import AttentionSpec

WINDOW = 1024
VARIANTS = {
    # name -> (captured tensors, score, mask, dropout's rate, which captured tensors get gradients)
    "full": ((), "qk * 0.125", "", "", ()),
    "causal": ((), "qk * 0.125", "j <= i", "", ()),
    "window": ((), "qk * 0.125", f"(j <= i) & (i - j < {WINDOW})", "", ()),
    "bias": (("bias: float[4]",), "qk * 0.125 + bias[b, h, i, j]", "", "", (False,)),
    "trained": (("bias: float[3]",), "qk * 0.125 + bias[h, i, j]", "", "", (True,)),
    "dropout": ((), "qk * 0.125", "j <= i", "0.1", ()),
    "softcap": ((), "tanh(qk * 0.00416) * 30.0", "j <= i", "", ()),
    "mask": (("keep: bool[3]",), "qk * 0.125", "keep[b, i, j]", "", (False,)),
    "alibi": (("slope: float[1]",), "qk * 0.125 + abs(slope[h]) * to_float(j - i)", "j <= i", "", (False,)),  # slopes are positive, operands random
}


def spec_of(variant: str, grouped: bool = False) -> AttentionSpec:
    """A variant over axes b, h, or b, h, g with keys shared along g."""
    given, score, where, drop, _ = VARIANTS[variant]
    q = "b, h, g" if grouped else "b, h"
    lines = [f"attention[{q}, i, j]", *(f"  given   {g}" for g in given), f"  qk = q[{q}, i] . k[b, h, j]", f"  score = {score}"]
    lines += [f"  where {where}", "  empty nan"] if where else []
    lines += [f"  drop {drop}"] if drop else []
    return AttentionSpec.parse("\n".join([*lines, "  out = softmax_j(score) . v[b, h, j]"]))


@dataclass(frozen=True)
class Workload:
    """A spec with head sizes and a dtype, measured at several shapes; only shapes of one kind, so that kernels are compiled once."""

    variant: str
    grouped: bool
    problems: tuple[Problem, ...]

    @property
    def spec(self) -> AttentionSpec:
        """What is measured."""
        return spec_of(self.variant, self.grouped)

    def __str__(self) -> str:
        p = self.problems[0]
        head = f"{p.D}" if p.D == p.Dv else f"{p.D}:{p.Dv}"
        return f"{self.variant}{' grouped' if self.grouped else ''} d={head} {p.dtype}{' decode' if p.M == 1 else ' few' if self.has_few else ''}" \
            + (f" N<={p.N}" + " many" * one_tile.in_parts(p)) * self.is_short

    @property
    def is_short(self) -> bool:
        """May one tile hold all keys, at any of its lengths?"""
        return max(p.N for p in self.problems) <= one_tile.KEYS

    @property
    def has_few(self) -> bool:
        """Are there much fewer queries than keys? Then keys may be split in parts."""
        return self.problems[0].M * 8 <= self.problems[0].N


def shape(length: int, head: int, grouped: bool, dtype: str, queries: int | None = None, values: int | None = None) -> Problem:
    """Some 16k to 128k tokens. No extent is 1 or a multiple of 16: Triton compiles those anew. values: their head size, if another."""
    batch = {128: 36, 256: 30, 512: 12, 1024: 12, 2048: 6, 4096: 4, 8192: 2}.get(length, 2)
    heads = 12 if length <= 8192 else 2
    batch = 36 if queries else batch
    return Problem((batch, 2, heads // 2) if grouped else (batch, heads), queries or length, length, head, values or head, dtype, dtype)


def grid(quick: bool = False, only: str = "") -> list[Workload]:
    """The workloads of the recorded sweep. only: those whose name contains one of these texts, separated by commas."""
    if only:
        texts = [text.strip() for text in only.split(",") if text.strip()]
        return [w for w in grid(quick) if any(text in str(w) for text in texts)]
    if quick:
        made = lambda name, n: Problem((2, 3), n, n, 16, 16, "float16", "float16")
        return [Workload("causal", False, (made("causal", 128),)), Workload("trained", False, (made("trained", 128),))]
    usual, long = (512, 2048, 8192), (128, 2048, 8192, 65536)
    every = (128, 512, 1024, 2048, 4096, 8192, 65536)
    chosen = [("causal", 128, every), ("causal", 64, every), ("full", 64, every), ("full", 128, every), ("bias", 64, usual), ("bias", 128, usual),
              ("dropout", 64, usual), ("dropout", 128, usual), ("window", 64, long), ("window", 128, usual), ("gqa", 128, long), ("gqa", 64, usual),
              ("softcap", 64, usual), ("softcap", 128, usual), ("causal", 256, usual), ("full", 32, usual), ("causal", 80, usual), ("alibi", 64, usual),
              ("alibi", 128, usual), ("full", 192, usual), ("trained", 64, (512, 2048, 4096)),
              ("causal", 96, usual), ("trained", 128, (512, 2048, 4096))]
    found = []
    for variant, head, lengths in chosen:
        grouped = variant == "gqa"
        found.append(Workload("causal" if grouped else variant, grouped, tuple(shape(n, head, grouped, "bfloat16") for n in lengths)))
    few = lambda head: replace(shape(32768, head, True, "bfloat16", 1), extents=(3, 2, 6))  # fewer programs than a card holds
    found[8:8] = [Workload("full", True, (*(shape(n, head, True, "bfloat16", 1) for n in (2048, 32768)), few(head))) for head in (64, 128)]
    found.append(Workload("causal", False, tuple(shape(n, 64, False, "float32") for n in (512, 2048))))
    found += [Workload(variant, False, tuple(shape(n, 192, False, "bfloat16", values=128) for n in usual)) for variant in ("full", "causal")]
    found += [Workload("mask", False, tuple(shape(n, head, False, "bfloat16") for n in (512, 2048))) for head in (64, 128)]
    shapes = {32: ((9, 7, 100, 16384), (9, 7, 100, 4096), (2, 9, 100, 16384)), 64: ((9, 7, 100, 4096), (5, 13, 250, 4096), (2, 15, 500, 8192)),
              128: ((9, 14, 120, 8192), (2, 9, 500, 8192))}  # as many programs as a card holds, or fewer
    found += [Workload(variant, False, tuple(Problem((b, h), m, n, head, head, "bfloat16", "bfloat16") for b, h, m, n in sizes))
              for head, sizes in shapes.items() for variant in ("full", "mask")]
    short = (*(("full", head, (64, 49)) for head in (32, 64, 128)), *((variant, 64, (64, 49)) for variant in ("causal", "dropout", "softcap", "trained", "mask")),
             ("full", 32, (128, 100)), ("full", 64, (128, 100)), ("dropout", 64, (128, 100)), ("full", 64, (32, 17)))
    found += [Workload(variant, False, tuple(Problem((16384 // n + 1, 2048 // head + 1), n, n, head, head, "bfloat16", "bfloat16") for n in sizes))
              for variant, head, sizes in short]
    many = (("full", 64, 77, ((4, 10, 4096), (4, 21, 1030))), ("full", 40, 77, ((4, 9, 4096), (5, 9, 1030))), ("full", 80, 77, ((4, 9, 1030), (2, 9, 4096))),
            ("full", 128, 128, ((4, 17, 4096), (9, 18, 530))), ("mask", 64, 50, ((4, 10, 4096), (9, 19, 850))), ("dropout", 64, 77, ((2, 10, 4096), (17, 17, 850))))
    found += [Workload(variant, False, tuple(Problem((b, h), m, n, head, head, "bfloat16", "bfloat16") for b, h, m in sizes)) for variant, head, n, sizes in many]
    return found


SCHEDULES, DIRECTIONS = ("hopper", "triton"), ("forward", "backward")


@dataclass(frozen=True)
class Job:
    """One generated module: a direction of a workload with given tiles. parts: of the keys of a forward kernel, as `Plan.parts`."""

    workload: Workload
    direction: str
    schedule: str
    tiles: tuple[tuple[str, candidates.Tiles], ...]
    gpu: GPU
    parts: int = 1

    def __str__(self) -> str:
        return f"{self.workload} {self.schedule} {self.direction} " + ", ".join(f"{k} {name_of(t)}" for k, t in self.tiles) + " split" * (self.parts != 1)

    @property
    def needs(self) -> tuple[bool, ...]:
        """Which of (q, k, v, *aux) get gradients."""
        return job_needs(self.workload)

    @functools.cached_property
    def module(self):
        """The loaded module, or None if the schedule does not take it."""
        spec, problem, backward, needs = self.workload.spec, self.workload.problems[0], None, (False,) * len(self.needs)
        tiles = {"forward": (64, 32, 4, 2), **dict(self.tiles)}
        with overridden(schedule=self.schedule if self.direction == "forward" else "triton", parts=self.parts, **tiles):
            plan = make_plan(spec, problem, self.gpu, "forward", listed=False)
        if self.direction == "backward":
            needs = self.needs
            with overridden(schedule=self.schedule, **tiles):
                backward = make_plan(spec, problem, self.gpu, "backward", listed=False, needs=needs)
        if (backward or plan).schedule != self.schedule:
            return None
        return load(render(spec, plan, problem, needs, backward).text)


def name_of(tiles: candidates.Tiles) -> str:
    """(64, 32, 4, 2) -> "64x32x4x2"."""
    return "x".join(map(str, tiles))


def offers(workload: Workload, gpu: GPU, schedule: str, kernel: str) -> list[candidates.Tiles]:
    """Every tile of a kernel that is generated for one of its lengths and fits in shared memory, many registers or not."""
    p, spec = workload.problems[0], workload.spec
    tiled = tuple(a.name for a in spec.aux if any({"i", "j"} <= load.variables for load in spec.loads if load.name == a.name))
    needed = lambda t: hopper_memory.shared_bytes(kernel, spec, p, t[0], t[1], t[3], tiled) if schedule == "hopper" else shared_bytes(kernel, t, p, spec, gpu)
    found = (candidates.generated(candidates.ask(schedule, kernel, spec, one, gpu, tiled=tiled)) for one in workload.problems)
    return [t for t in dict.fromkeys(tiles for each in found for tiles in each) if needed(t) <= gpu.shared_per_block]


def jobs(workload: Workload, gpu: GPU, schedules: Sequence[str] = SCHEDULES) -> list[Job]:
    """Every tile that fits, each kernel's in turn; dK/dV and dQ are paired in one module, but measured alone."""
    found, decodes = [], workload.problems[0].M == 1
    if "hopper" in schedules and gpu.is_hopper and not compat.interpreting() and not decodes:
        for direction, kernel in (("forward", "forward"), ("backward", "keys")):
            found += [Job(workload, direction, "hopper", ((kernel, t),), gpu) for t in offers(workload, gpu, "hopper", kernel)]
    if "triton" not in schedules:
        return found
    found += [Job(workload, "forward", "triton", (("forward", t),), gpu, parts) for t in offers(workload, gpu, "triton", "forward") for parts in ((1, 0) if workload.has_few else (1,))]
    if not decodes:
        lists = {kernel: offers(workload, gpu, "triton", kernel) for kernel in ("keys", "rows", *(("dense",) if any(job_needs(workload)[3:]) else ()))}
        for n in range(max(map(len, lists.values()))):
            found.append(Job(workload, "backward", "triton", tuple((k, ts[n % len(ts)]) for k, ts in lists.items()), gpu))
        if all(one_tile.takes(workload.spec, p, gpu, job_needs(workload)) for p in workload.problems):
            found += [Job(workload, "backward", "triton", (("one_tile", t),), gpu) for t in one_tile.offered(workload.problems[0])]
    return found


def job_needs(workload: Workload) -> tuple[bool, ...]:
    """Which of (q, k, v, *aux) get gradients."""
    return (True, True, True, *VARIANTS[workload.variant][4])


def compiled(job: Job) -> tuple[Job, list, float, str]:
    """In a worker: (job, a report of each kernel, seconds, what went wrong)."""
    from ..codegen.offline import compile_launches
    start = time.perf_counter()
    torch.set_num_threads(1)
    try:
        spec, p, module = job.workload.spec, job.workload.problems[0], job.module
        if module is None:
            return replace(job), [], time.perf_counter() - start, "refused"
        if compat.interpreting():
            return replace(job), [], time.perf_counter() - start, ""
        arguments = Operands(spec, p, torch.device("cpu"))
        reports = compile_launches(module, job.gpu, lambda: arguments.call(module, job.direction))
        return replace(job), reports, time.perf_counter() - start, ""
    except Exception as error:  # noqa: BLE001  one kernel that does not compile must not end the sweep
        return replace(job), [], time.perf_counter() - start, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def measured(job: Job, operands: Operands, clock: Clock) -> dict[str, float]:
    """Microseconds of each kernel of a job: "schedule kernel tiles" -> time. Forward is all that its host function launches; "split" the same with keys in parts."""
    kept = launches(job.module, operands, job.direction)
    tiles = dict(job.tiles)
    if job.direction == "forward":
        return {f"{job.schedule} {'forward' if job.parts == 1 else 'split'} {name_of(tiles['forward'])}": clock.median(together(kept))}
    found = {}
    for name, us in each(kept, clock):
        kernel = ROLES[job.schedule].get(name, "dense")
        own = tiles.get({"one_pass": "keys"}.get(kernel, kernel))
        if kernel == "dense" and own is None and job.schedule == "triton":  # beside "one_tile", of which other jobs measure it
            continue
        key = f"{job.schedule} {kernel}" + (f" {name_of(own)}" if own else "")
        found[key] = us + (found.get(key, 0.0) if kernel in ("keys", "one_tile") else 0.0)  # dV may have a kernel of its own, sums of parts have
    return found


ROLES = {
    "triton": {"attention_combine": "combine", "attention_delta": "delta", "attention_backward": "one_tile", "attention_backward_at_once": "one_tile", "attention_backward_sum": "one_tile", "attention_backward_keys": "keys", "attention_backward_values": "keys",
               "attention_backward_rows": "rows"},
    "hopper": {"attention_delta": "delta", "attention_backward_keys": "one_pass", "attention_backward_rows": "sum", "attention_sum": "total"},
}
"""Names of generated kernels -> kernels of the cost model; any other is "dense"."""


class Table:
    """What a sweep found, kept on disk as it grows. again: what is there already stays, but for the kernels that are measured anew.

    points   (variant, problem) -> kernel and tiles -> microseconds
    devices  lines of the devices: the first measured all but what `remeasured` says, (variant, problem) -> kernel -> place of its line
    """

    def __init__(self, path: str, device: str, again: bool = False):
        self.path, self.devices = Path(path), [device]
        self.points: dict[tuple[str, Problem], dict[str, float]] = {}
        self.remeasured: dict[tuple[str, Problem], dict[str, int]] = {}
        self.builds: list[list] = []
        self.failed: list[str] = []
        self.fresh: set[tuple] = set()
        if again and self.path.exists():
            self._read(json.loads(self.path.read_text()), device)

    def _read(self, old: dict, device: str) -> None:
        for row in old["points"]:
            problem = Problem(tuple(row["extents"]), *(row[k] for k in ("M", "N", "D", "Dv", "dtype", "v_dtype")))
            self.points[row["variant"], problem] = row["us"]
            self.remeasured[row["variant"], problem] = row.get("remeasured", {})
        self.builds, self.failed = old["builds"], old["failed"]
        self.devices = [*old.get("devices", [old.get("device")]), device]

    def add(self, key: tuple[str, Problem], found: dict[str, float]) -> None:
        """Times of some kernels of a point; the first of a kernel takes the place of all that an earlier sweep had."""
        times = self.points.setdefault(key, {})
        for name, us in found.items():
            kernel = " ".join(name.split()[:2])
            if (key, kernel) not in self.fresh:
                self.fresh.add((key, kernel))
                for old in [n for n in times if n.split()[:2] == name.split()[:2]]:
                    del times[old]
                if len(self.devices) > 1:
                    self.remeasured.setdefault(key, {})[kernel] = len(self.devices) - 1
            times[name] = us

    def built(self, rows: list[list]) -> None:
        """Builds, [workload, schedule, arch, kernel, four numbers of tiles, shared, registers, spilled]; they take the place of the same kernel's, tile by tile."""
        new = {tuple(row[:8]) for row in rows}
        self.builds = [row for row in self.builds if tuple(row[:8]) not in new] + rows

    def write(self) -> None:
        """JSON: one line a point or build."""
        points = [{"variant": w, **{f.name: getattr(p, f.name) for f in fields(p) if f.name != "sizes"}, "us": {k: float(f"{t:.4g}") for k, t in us.items()},
                   **({"remeasured": again} if (again := self.remeasured.get((w, p))) else {})} for (w, p), us in self.points.items()]
        line = lambda rows: "[\n" + ",\n".join(json.dumps(r, separators=(",", ":")) for r in rows) + "\n]"
        text = f'{{"devices": {json.dumps(self.devices)},\n"points": {line(points)},\n"builds": {line(self.builds)},\n"failed": {line(self.failed)}}}\n'
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(text)
        temporary.replace(self.path)


def sweep(workloads: list[Workload], gpu: GPU, device: torch.device, table: Table, processes: int, seconds: float, say: Callable[[str], None],
          schedules: Sequence[str] = SCHEDULES, directions: Sequence[str] = DIRECTIONS) -> None:
    """Compile in `processes` processes, measure what is compiled as it comes; ends after `seconds` at the latest."""
    start, clock, inputs = time.perf_counter(), Clock(device), {}
    todo = [job for w in workloads for job in jobs(w, gpu, schedules) if job.direction in directions]
    written = 0.0
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        pending = {pool.submit(compiled, job) for job in todo}
        done_jobs = 0
        while pending and time.perf_counter() - start < seconds:
            done, pending = wait(pending, timeout=1.0, return_when=FIRST_COMPLETED)
            for future in done:
                job, reports, took, error = future.result()
                done_jobs += 1
                table.built([[str(job.workload), job.schedule, gpu.arch, role(job, r.kernel), *_tiles(job, r.kernel), r.shared, r.registers, r.spilled] for r in reports])
                if error or any(r.spilled > SPILLED for r in reports):
                    if error != "refused":
                        table.failed.append(f"{job}: {error or 'spills ' + str(max(r.spilled for r in reports))}")
                    continue
                for problem in job.workload.problems:
                    if time.perf_counter() - start > seconds:
                        break
                    key = (str(job.workload).split(" d=")[0], problem)
                    try:
                        if key not in inputs:
                            inputs[key] = Operands(job.workload.spec, problem, device)
                        table.add(key, measured(job, inputs[key], clock))
                    except Exception as failure:  # noqa: BLE001  one kernel that does not run must not end the sweep
                        table.failed.append(f"{job} N={problem.N}: {type(failure).__name__}: {' '.join(str(failure).split())[:300]}")
                if time.perf_counter() - written > 15:
                    written = time.perf_counter()
                    table.write()
                    say(f"{time.perf_counter() - start:4.0f} s  {done_jobs} of {len(todo)} modules, {sum(map(len, table.points.values()))} times, "
                        f"{len(table.failed)} failed  {job} ({took:.1f} s to compile)")
        for future in pending:
            future.cancel()
    table.write()
    say(f"{time.perf_counter() - start:4.0f} s  {done_jobs} of {len(todo)} modules, {sum(map(len, table.points.values()))} times, {len(table.failed)} failed")


SPILLED = 64
"""Bytes; a kernel that spills more is not measured."""


def role(job: Job, kernel: str) -> str:
    """The cost model's name of a generated kernel."""
    return ROLES[job.schedule].get(kernel, "forward" if job.direction == "forward" else "dense")


def _tiles(job: Job, kernel: str) -> list:
    own = role(job, kernel)
    return list(dict(job.tiles).get({"one_pass": "keys"}.get(own, own), ()))[:4] or [0, 0, 0, 0]
