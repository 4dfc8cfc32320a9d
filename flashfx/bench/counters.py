"""Bytes of device memory as Nsight Compute's DRAM counters see them; `python -m flashfx bench bytes`: the model's beside them."""
from __future__ import annotations

import csv
import io
import json
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Callable, Sequence

import torch

from ..codegen import cost
from ..codegen.gpu import GPU
from ..codegen.limits import shared_bytes
from ..codegen.registers import registers_per_thread, resident
from ..codegen.load import load
from ..codegen.plan import Plan, make_plan
from ..codegen.render import render
from ..codegen.timing import Operands, launches, together
from .sweep import shape, spec_of

KERNELS = [("full", False, 64, 2048, "forward"), ("full", False, 128, 2048, "forward"), ("causal", False, 64, 8192, "forward"), ("causal", False, 128, 8192, "forward"),
           ("causal", True, 128, 8192, "forward"), ("bias", False, 64, 2048, "forward"), ("window", False, 64, 8192, "forward"), ("full", False, 64, 2048, "backward"),
           ("causal", False, 128, 2048, "backward"), ("causal", True, 64, 8192, "backward")]
"""(variant, grouped, head size, length, direction) of which the counters are read; of backward, its longest kernel."""
NAMES = {"forward": "attention_forward", "one_pass": "attention_backward_keys", "keys": "attention_backward_keys"}
COUNTERS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
COUNTS, WARM = 5, 0.2
"""Launches that are counted, of which the median is taken, and seconds of launches before them: programs that go through several heads drift apart
farther the faster the card's clock runs beside its memory's, and an idle card takes a while to reach it (356 to 479 MB of one kernel in four launches)."""
SOURCE = f"Nsight Compute, {' + '.join(COUNTERS)}, caches flushed before each kernel, medians of {COUNTS} launches at the clock under load"
WITHIN = 1.15
"""How far prediction and counters may differ, as a factor."""
MARK = "spin_kernel"
"""The kernel of `torch.cuda._sleep`: it ends what is counted together."""


def watch(run: Callable[[], object]) -> None:
    """Run it where a profiler counts (`count`), and mark its end. Its kernels were compiled and its operands made before."""
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    run()
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def count(*arguments: str) -> list[list[tuple[str, float]]]:
    """(kernel, bytes read and written) of all launches of each `watch` of `python -m flashfx bench` with these arguments.

    Raises RuntimeError where there is no `ncu` or it may not read the counters.
    """
    if shutil.which("ncu") is None:
        raise RuntimeError("ncu (Nsight Compute) is not on the PATH")
    done = subprocess.run(["ncu", "--csv", "--print-units", "base", "--clock-control", "none", "--profile-from-start", "off", "--metrics", ",".join(COUNTERS),
                           sys.executable, "-m", "flashfx", "bench", *arguments], capture_output=True, text=True)
    if done.returncode or '"ID"' not in done.stdout:
        raise RuntimeError(f"ncu: {(done.stderr + done.stdout)[-500:]}")
    groups: list[list[tuple[str, float]]] = [[]]
    for name, size in counted(done.stdout):
        groups.append([]) if MARK in name else groups[-1].append((name, size))
    if groups.pop():
        raise RuntimeError("ncu: launches were counted behind the last mark")
    return groups


def counted(text: str) -> list[tuple[str, float]]:
    """(kernel, bytes read and written) of each launch, in order, from what `ncu --csv` printed."""
    rows = list(csv.DictReader(io.StringIO(text[text.index('"ID"'):])))
    found: dict[str, tuple[str, float]] = {}
    for row in rows:
        if row.get("Metric Name") in COUNTERS:
            name, total = found.get(row["ID"], (row["Kernel Name"], 0.0))
            found[row["ID"]] = name, total + float(row["Metric Value"].replace(",", ""))
    return list(found.values())


@dataclass(frozen=True)
class Row:
    """One kernel: what ran, and the bytes that the L2 cache reads from and writes to device memory while it runs, as counted."""

    variant: str
    grouped: bool
    head_size: int
    length: int
    direction: str
    schedule: str
    kernel: str
    tiles: tuple[int, int, int, int]
    counted: float

    def predicted(self, gpu: GPU) -> tuple[float, float, float]:
        """(bytes with an infinite L2 cache, with SRAM alone, as the counters should see them)."""
        spec, p = spec_of(self.variant, self.grouped), shape(self.length, self.head_size, self.grouped, "bfloat16")
        known, (m, n, *_) = cost.facts(spec, p), self.tiles
        work = cost.traffic(self.kernel, known, m, n, known.tiles(m, n)[0])
        programs = 1
        if self.schedule == "triton":
            shared, registers = shared_bytes(self.kernel, self.tiles, p, spec, gpu), registers_per_thread(self.kernel, self.tiles, p, spec)
            programs = resident(gpu, self.tiles[2], shared, registers)
        return work.once, work.once + work.again, cost.device_bytes(self.schedule, self.kernel, work, known, gpu, programs)[1]

    def __str__(self) -> str:
        kernel = f" ({self.kernel})" if self.direction == "backward" else ""
        return f"{self.variant}{' grouped' if self.grouped else ''} d={self.head_size} N={self.length} {self.direction}{kernel}"


def _plan(given: tuple, gpu: GPU, direction: str = "") -> Plan:
    """Of one of KERNELS, or of another direction of it."""
    variant, grouped, head, length, own = given
    spec = spec_of(variant, grouped)
    return make_plan(spec, shape(length, head, grouped, "bfloat16"), gpu, direction or own, listed=False, needs=(True,) * 3 + (False,) * len(spec.aux))


def run_kernels(gpu: GPU, device: torch.device) -> None:
    """Launch each of KERNELS, with those in front of it, `COUNTS` times for a profiler that watches this process."""
    for given in KERNELS:
        variant, grouped, head, length, direction = given
        spec, p = spec_of(variant, grouped), shape(length, head, grouped, "bfloat16")
        backward = _plan(given, gpu) if direction == "backward" else None
        needs = (bool(backward),) * 3 + (False,) * len(spec.aux)
        module = load(render(spec, _plan(given, gpu, "forward"), p, needs, backward).text)
        run = together(launches(module, Operands(spec, p, device), direction))
        run()  # what it takes to build a kernel is no warming up
        ready = time.perf_counter() + WARM
        while time.perf_counter() < ready:
            run()
            torch.cuda.synchronize()
        for _ in range(COUNTS):
            watch(run)


def rows(groups: Sequence[Sequence[tuple[str, float]]], gpu: GPU) -> list[Row]:
    """What was counted of each of KERNELS. groups: of `count`."""
    if len(groups) != len(KERNELS) * COUNTS:
        raise RuntimeError(f"ncu counted {len(groups)} launches, not {COUNTS} of each of {len(KERNELS)} kernels")
    made = []
    for first, given in zip(range(0, len(groups), COUNTS), KERNELS):
        kernel, own = next((k, o) for k, o in cost.kernels(_plan(given, gpu)) if k in NAMES)
        found = [sum(size for name, size in group if name.startswith(NAMES[kernel])) for group in groups[first:first + COUNTS]]
        made.append(Row(*given, own.schedule, kernel, own.tiles, statistics.median(found)))
    return made


def table(found: Sequence[Row], gpu: GPU) -> list[str]:
    """Lines: predicted and counted bytes of each row, and a verdict."""
    lines, ratios = [f"{'':<50}{'L2 endless':>12}{'SRAM alone':>12}{'predicted':>12}{'counted, MB':>13}{'ratio':>8}"], {}
    for row in found:
        once, alone, predicted = row.predicted(gpu)
        ratios[str(row)] = ratio = predicted / max(row.counted, 1)
        lines.append(f"{row!s:<50}{once / 1e6:>12.1f}{alone / 1e6:>12.1f}{predicted / 1e6:>12.1f}{row.counted / 1e6:>13.1f}{ratio:>8.2f}")
    worst = max(ratios, key=lambda name: max(ratios[name], 1 / max(ratios[name], 1e-9)))
    good = sum(1 / WITHIN <= r <= WITHIN for r in ratios.values())
    return [*lines, f"{good} of {len(ratios)} within {WITHIN - 1:.0%} of the counters; the worst is {worst}: {ratios[worst]:.2f}"]


def as_json(found: Sequence[Row], device: str) -> str:
    """One line a row."""
    return f'{{"device": {json.dumps(device)},\n"source": {json.dumps(SOURCE)},\n"rows": [\n' + ",\n".join(json.dumps(asdict(r)) for r in found) + "\n]}\n"


def read(path: str | Path) -> list[Row]:
    """The rows of a file that `--json` wrote."""
    return [Row(**{**row, "tiles": tuple(row["tiles"])}) for row in json.loads(Path(path).read_text())["rows"]]
