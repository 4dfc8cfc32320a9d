"""Tiles for one spec on one GPU: the first ladder step that fits in shared memory and registers.

The ladder starts at tiles measured to be good on a card of that generation and shrinks; a plan that does not fit is never proposed.
"""
from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Sequence

import torch

from ..compat import tf32_allowed
from ..errors import PlanError
from ..expr import Call, Var, walk
from ..region import Problem
from ..spec import BLOCK, AttentionSpec
from .blocks import pays
from .captured import is_relative
from .gpu import GPU
from .factors import peel
from .parts import chunks
from .ranges import bounds
from .schedules import hopper, hopper_captured

WIDTHS = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
DIRECTIONS = ("forward", "backward")
SCHEDULES = ("triton", "hopper")
OVERRIDE: dict[str, tuple[int, int, int, int] | str] = {}
"""Kernel -> (BLOCK_M, BLOCK_N, num_warps, num_stages), and "schedule" -> one of SCHEDULES; set by `overridden`."""


@dataclass(frozen=True)
class Plan:
    """One kernel's tiles. `rows` and `dense` belong to a backward plan: the dQ kernel's and the N x N gradients' tiles.

    schedule   "triton", the portable one, or "hopper", warp-specialised
    shared     bytes of shared memory, an upper bound of what the compiler takes
    precision  of float32 matrix products: "ieee" or "tf32"
    descriptors  tiles are read by the tensor memory accelerator
    listed     tiles to visit come from the mask's run-time summary
    tiled      captured tensors of which the Hopper schedules read tiles by TMA
    stored     captured tensor whose gradient their backward stores as it goes
    ordered    their backward adds dQ up in a fixed order
    reason     why these tiles
    """

    schedule: str
    direction: str
    kernel: str
    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int
    shared: int
    gpu: GPU
    precision: str
    descriptors: bool
    reason: str
    rows: Plan | None = None
    dense: Plan | None = None
    listed: bool = False
    tiled: tuple[str, ...] = ()
    stored: str = ""
    ordered: bool = False

    @property
    def options(self) -> dict[str, int]:
        if self.schedule == "hopper":
            return hopper.options(self.kernel, self.BLOCK_M, self.BLOCK_N, self.num_warps, self.num_stages)
        return {"BLOCK_M": self.BLOCK_M, "BLOCK_N": self.BLOCK_N, "num_warps": self.num_warps, "num_stages": self.num_stages}

    def __str__(self) -> str:
        own = (f"{self.kernel} {self.BLOCK_M}x{self.BLOCK_N}, {self.num_warps} warps, {self.num_stages} stages, "
               f"{self.shared / 1024:.0f} KiB shared{', TMA' if self.descriptors else ''}")
        if self.listed:
            own += f", tiles from a list of {BLOCK}x{BLOCK} blocks made at run time"
        parts = [own, *(str(p).split(": ", 1)[1].split(" (")[0] for p in (self.rows, self.dense) if p)]
        return f"{self.schedule} on {self.gpu.name}: {'; '.join(parts)} ({self.reason})"


@contextlib.contextmanager
def overridden(schedule: str | None = None, **tiles: tuple[int, int, int, int]):
    """For tests and sweeps: overridden(forward=(64, 32, 4, 2), keys=…, rows=…, dense=…) while the block runs.

    schedule  "triton": the portable schedule everywhere; "hopper": the Hopper schedule wherever it can run, short rows too. Without it,
              tiles are the portable schedule's.
    """
    unknown = set(tiles) - {"forward", "keys", "rows", "dense"}
    if unknown:
        raise ValueError(f"unknown kernels {sorted(unknown)}; known: forward, keys, rows, dense")
    if schedule not in (None, *SCHEDULES):
        raise ValueError(f"schedule must be one of {SCHEDULES}, not {schedule!r}")
    before = dict(OVERRIDE)
    OVERRIDE.update(tiles | ({"schedule": schedule} if schedule else {}))
    try:
        yield
    finally:
        OVERRIDE.clear()
        OVERRIDE.update(before)


def matmul_precision() -> str:
    """How float32 matrix products may be computed: "tf32" where PyTorch allows it for its own."""
    return "tf32" if tf32_allowed() else "ieee"


def padded(size: int) -> int:
    return sum(c.width for c in chunks(size))


START = {
    # (matrix units, kernel, head size up to) -> (BLOCK_M, BLOCK_N, num_warps, num_stages) for simple scores, and for heavy ones.
    # "wgmma" with TMA: the best of a sweep on an H200 (bf16, 16k tokens, N = 4096) that do not spill. The others: largest that do not.
    ("wgmma", "forward", 64): ((64, 64, 4, 3), (64, 64, 4, 2)),
    ("wgmma", "forward", 128): ((64, 64, 4, 3), (64, 64, 4, 3)),
    ("wgmma", "forward", 256): ((128, 32, 8, 3), (64, 32, 4, 2)),
    ("wgmma", "keys", 64): ((64, 64, 4, 3), (64, 64, 4, 2)),
    ("wgmma", "keys", 128): ((64, 64, 4, 2), (32, 64, 4, 3)),
    ("wgmma", "keys", 256): ((64, 32, 8, 3), (64, 32, 8, 2)),
    ("wgmma", "rows", 64): ((64, 64, 4, 2), (64, 64, 4, 2)),
    ("wgmma", "rows", 128): ((128, 64, 8, 3), (64, 32, 4, 3)),
    ("wgmma", "rows", 256): ((64, 32, 4, 2), (64, 32, 8, 2)),
    ("tcgen05", "forward", 64): ((64, 64, 4, 3), (64, 64, 8, 2)),
    ("tcgen05", "forward", 128): ((64, 64, 4, 3), (64, 64, 8, 2)),
    ("tcgen05", "forward", 256): ((128, 32, 8, 3), (64, 32, 8, 2)),
    ("tcgen05", "keys", 64): ((64, 64, 4, 2), (64, 64, 8, 2)),
    ("tcgen05", "keys", 128): ((64, 64, 4, 2), (64, 64, 8, 2)),
    ("tcgen05", "keys", 256): ((64, 32, 8, 2), (64, 32, 8, 2)),
    ("tcgen05", "rows", 64): ((64, 64, 4, 2), (64, 64, 8, 2)),
    ("tcgen05", "rows", 128): ((64, 64, 8, 2), (64, 64, 8, 2)),
    ("tcgen05", "rows", 256): ((64, 32, 8, 2), (64, 32, 8, 2)),
    ("mma", "forward", 64): ((64, 64, 4, 3), (64, 64, 4, 3)),
    ("mma", "forward", 128): ((64, 64, 4, 2), (64, 64, 8, 2)),
    ("mma", "forward", 256): ((64, 32, 8, 2), (32, 32, 4, 2)),
    ("mma", "keys", 64): ((64, 64, 8, 2), (32, 64, 4, 1)),
    ("mma", "keys", 128): ((64, 64, 8, 2), (32, 64, 8, 1)),
    ("mma", "keys", 256): ((32, 32, 8, 2), (32, 32, 8, 2)),
    ("mma", "rows", 64): ((64, 64, 4, 2), (64, 64, 8, 2)),
    ("mma", "rows", 128): ((64, 64, 8, 2), (64, 32, 8, 2)),
    ("mma", "rows", 256): ((32, 32, 8, 2), (32, 32, 8, 2)),
    ("fma", "forward", 64): ((64, 32, 8, 1), (64, 32, 8, 1)),
    ("fma", "forward", 128): ((64, 32, 8, 1), (64, 32, 8, 1)),
    ("fma", "forward", 256): ((32, 32, 8, 1), (32, 32, 8, 1)),
    ("fma", "keys", 64): ((16, 32, 4, 1), (16, 16, 4, 1)),
    ("fma", "keys", 128): ((16, 32, 4, 1), (16, 16, 4, 1)),
    ("fma", "keys", 256): ((16, 16, 4, 1), (16, 16, 4, 1)),
    ("fma", "rows", 64): ((32, 16, 4, 1), (32, 16, 4, 1)),
    ("fma", "rows", 128): ((32, 16, 4, 1), (32, 16, 4, 1)),
    ("fma", "rows", 256): ((32, 16, 4, 1), (32, 16, 4, 1)),
}


def grouped(spec: AttentionSpec) -> bool:
    """Do several queries' batch indices share keys and values?"""
    return not set(spec.axes) <= spec.k | spec.v


def is_heavy(spec: AttentionSpec, kernel: str) -> bool:
    """Does the score need many registers beside q . k: dropout's random words, functions, N x N loads, a mask with two edges, or (over
    rows) a mask and an outer loop over the queries that share the keys?"""
    if spec.dropout or any(isinstance(x, Call) and x.row.cost in ("mufu", "div") and "j" in x.variables for x in walk(peel(spec.score)[0])):
        return True
    if any({"i", "j"} <= load.variables for load in spec.score.loads):
        return True
    if kernel == "keys" and spec.is_masked and grouped(spec):
        return True
    over = "i" if kernel == "keys" else "j"
    found = bounds(spec.visible, over)
    return found.has_full and not (found.full_hi == Var("M") if over == "i" else found.starts_full)


def has_relative(spec: AttentionSpec) -> bool:
    """Does the score read a tensor at j - i?"""
    return any(is_relative(load) for load in spec.score.loads)


def units(problem: Problem, gpu: GPU) -> str:
    """Which units multiply: "fma" (float32, exact), "wgmma" (Hopper), "tcgen05" (Blackwell's data centre cards), "mma" (all others)."""
    if "float32" in (problem.dtype, problem.v_dtype):
        return "fma"
    return {9: "wgmma", 10: "tcgen05", 11: "tcgen05"}.get(gpu.capability[0], "mma")


def _ladder(kernel: str, spec: AttentionSpec, problem: Problem, gpu: GPU) -> list[tuple[int, int, int, int]]:
    """Tiles to try, best first."""
    head, found = max(padded(problem.D), padded(problem.Dv)), units(problem, gpu)
    step = 64 if head <= 64 else 128 if head <= 128 else 256
    several = len(chunks(max(problem.D, problem.Dv))) > 1
    if kernel == "dense":
        by_rows = not several and all(load.index[-2:] == (Var("i"), Var("j")) for load in spec.score.loads if {"i", "j"} <= load.variables)
        wide = {"mma": (64, 32, 4, 1), "wgmma": (128, 64, 8, 1) if by_rows else (64, 64, 8, 1)}  # others have addresses of their own
        start = (32, 32, 4, 1) if found == "fma" or head > 128 else (64, 32, 4, 1) if spec.is_data_masked else wide.get(found, (64, 64, 4, 1)) if head > 64 else (64, 64, 4, 1)
        if has_relative(spec):  # every tile of a diagonal of tiles has the same diagonals; they are added up in registers
            start = (min(start[:2]), min(start[:2]), *((4 if head <= 64 else 8, 2) if found == "wgmma" else (start[2] if found == "fma" else 8, 1)))
    else:
        tiled = any({"i", "j"} <= load.variables for load in spec.visible.loads)  # addresses of a mask's tile
        heavy = is_heavy(spec, kernel) or found == "mma" and kernel != "forward" and tiled
        start = START[found, kernel, step][heavy or found == "mma" and kernel == "keys" and (grouped(spec) or several or gpu.capability[0] == 12)]
        if several and found == "mma":  # an accumulator for each piece of the head: registers run out earlier
            start = {("keys", True): (16, 64, 8, 1), ("rows", True): (64, 32, 8, 2), ("forward", True): (64, 32, 8, 2),
                     ("forward", False): (32, 32, 4, 2)}.get((kernel, head <= 128), start)
        elif several and found == "tcgen05" and kernel == "keys" and heavy and head <= 128:
            start = (32, 64, 4 if head <= 80 else 8, 2)
        if kernel == "rows" and found == "mma" and heavy and spec.is_data_masked:
            start = (min(start[0], 64), min(start[1], 32), *start[2:])
        if kernel == "keys" and spec.dropout and grouped(spec):  # random words in a loop over the queries that share the keys
            masked = max(problem.D, problem.Dv) % 16 > 0  # the last piece has columns to hide
            start = {("mma", 128): (32, 32, 8, 1) if masked else start, ("mma", 256): (16, 32, 8, 2),
                     ("tcgen05", 128): (32, 64, 8, 2)}.get((found, step), start)
    if found == "wgmma" and kernel == "forward" and head <= 128 and not spec.is_masked and not is_heavy(spec, kernel):
        long = head == 128 and problem.N % 128 == 0 and problem.N >= 2048  # half the passes over k and v: sustained, less power
        start = (64, 128, 4, 2) if head <= 64 else (128, 64, 4, 2) if long else start
    tried = [start]
    m, n, warps, stages = start
    while True:
        if stages > 2:
            stages -= 1
        elif m > 16 or n > 16:
            if m > n or n == 16:
                m //= 2
            else:
                n //= 2
            warps = min(warps, 4 if m * n <= 2048 and padded(max(problem.D, problem.Dv)) <= 128 else 8)
        elif stages > 1:
            stages -= 1
        else:
            return tried
        tried.append((m, n, warps, stages))


def shared_bytes(kernel: str, tiles: tuple[int, int, int, int], problem: Problem, spec: AttentionSpec, gpu: GPU) -> int:
    """An upper bound of the shared memory that Triton's compiler takes for a kernel."""
    m, n, _, stages = tiles
    d, dv = padded(problem.D) * WIDTHS[problem.dtype], padded(problem.Dv) * WIDTHS[problem.v_dtype]
    width = max(WIDTHS[problem.dtype], WIDTHS[problem.v_dtype])
    depth = max(1, stages - 1 if units(problem, gpu) == "mma" else stages)
    tiled_loads = sum(WIDTHS["float32"] * m * n * depth for load in spec.loads if {"i", "j"} <= load.variables)
    scratch = 4 * m * n + 4096
    staged = {"keys": 2 * n, "rows": 2 * m}.get(kernel, 0) * max(d, dv) if gpu.capability[0] in (10, 11) else 0  # tensor memory is filled through it
    if kernel == "forward":
        return depth * n * (d + dv) + m * max(d, dv * 2) + tiled_loads + scratch * (width == 4 or spec.dropout > 0) + m * n * width + 2048
    if kernel == "keys":
        return depth * m * (d + dv) + n * (d + dv) + tiled_loads + m * n * width * 2 + scratch * (width == 4 or spec.dropout > 0) + depth * 8 * m + staged + 2048
    if kernel == "rows":
        return depth * n * (d + dv) + m * (d + dv) + tiled_loads + m * n * width * 2 + scratch * (width == 4 or spec.dropout > 0) + staged + 2048
    return depth * (m + n) * (d + dv) + tiled_loads + scratch + m * n * width + 2048


def registers_per_thread(kernel: str, tiles: tuple[int, int, int, int], problem: Problem) -> float:
    """Accumulators and score tiles, in 32-bit registers of each thread."""
    m, n, warps, _ = tiles
    d, dv = padded(problem.D), padded(problem.Dv)
    accumulators = {"forward": m * dv, "keys": n * (d + dv), "rows": m * d, "dense": m * n}[kernel]
    scores = {"forward": 1, "keys": 2, "rows": 2, "dense": 2}[kernel] * m * n
    return (accumulators + scores) / (32 * warps)


REGISTER_LIMIT = 208
"""Of 255, for accumulators and score tiles; addresses, row vectors and the pipeline need the rest."""


def _plan(kernel: str, direction: str, spec: AttentionSpec, problem: Problem, gpu: GPU, descriptors: bool) -> Plan:
    square = kernel == "dense" and has_relative(spec)  # so that every tile of a diagonal of tiles has the same diagonals
    if kernel in OVERRIDE:
        tiles, reason = OVERRIDE[kernel], "tiles given by the caller"
        tiles = (min(tiles[:2]), min(tiles[:2]), *tiles[2:]) if square else tiles
        return Plan("triton", direction, kernel, *tiles, shared_bytes(kernel, tiles, problem, spec, gpu), gpu, matmul_precision(), descriptors, reason)
    for dtype in (problem.dtype, problem.v_dtype):
        if dtype not in ("float16", "bfloat16", "float32"):
            raise PlanError(f"the generated kernels take float16, bfloat16 and float32, not {dtype}; float64 runs in the tiled PyTorch schedule")
        if dtype == "bfloat16" and gpu.capability < (8, 0):
            raise PlanError(f"{gpu.name} (compute capability {gpu.capability[0]}.{gpu.capability[1]}) has no bfloat16 matrix unit: use float16")
    ladder = [tiles for tiles in _ladder(kernel, spec, problem, gpu) if not square or tiles[0] == tiles[1]]
    for step, tiles in enumerate(ladder):
        shared = shared_bytes(kernel, tiles, problem, spec, gpu)
        registers = registers_per_thread(kernel, tiles, problem)
        if shared <= gpu.shared_per_block and registers <= REGISTER_LIMIT:
            reason = f"{shared / 1024:.0f} of {gpu.shared_per_block // 1024} KiB shared memory, about {registers:.0f} of 255 registers"
            return Plan("triton", direction, kernel, *tiles, shared, gpu, matmul_precision(), descriptors, reason if not step else f"{reason}, step {step} of the ladder")
    raise PlanError(f"head sizes {problem.D} and {problem.Dv} in {problem.dtype}: even 16x16 tiles need {shared} bytes of shared memory and "
                    f"{registers:.0f} registers per thread in the {kernel} kernel; {gpu.name} has {gpu.shared_per_block} bytes and 255 registers")


def has_descriptors(spec: AttentionSpec, problem: Problem, gpu: GPU) -> bool:
    """Does the card have a tensor memory accelerator that its matrix units read after, and can it index these operands?"""
    return gpu.capability[0] in (9, 10, 11) and len(spec.axes) <= 3 and "float32" not in (problem.dtype, problem.v_dtype)


def all_needs(spec: AttentionSpec) -> tuple[bool, ...]:
    """Which of (q, k, v, *aux) can have gradients: all floats that the score reads."""
    in_score = {load.name for load in spec.score.loads if load.kind == "float"}
    return (True, True, True, *(a.kind == "float" and a.name in in_score for a in spec.aux))


def why_not_hopper(spec: AttentionSpec, problem: Problem, gpu: GPU, direction: str, descriptors: bool = True, listed: bool = False,
                   needs: tuple[bool, ...] | None = None, tiled: Sequence[str] = ()) -> str | None:
    """Why this does not run in the Hopper schedule on `gpu`, or None. Arguments as `make_plan`."""
    wanted = OVERRIDE.get("schedule")
    if gpu.capability != (9, 0) or wanted == "triton" or wanted is None and set(OVERRIDE):
        return f"{gpu.name} is no Hopper card" if gpu.capability != (9, 0) else "the portable schedule was asked for"
    reason = hopper.refusal(spec, problem, direction, descriptors, listed, all_needs(spec) if needs is None else needs, deterministic())
    return reason or (hopper.preferred_elsewhere(spec, problem, direction, deterministic(), tiled) if wanted is None else None)


def deterministic() -> bool:
    """Must gradients be the same bits in every run?"""
    return torch.are_deterministic_algorithms_enabled()


def _hopper(kernel: str, direction: str, spec: AttentionSpec, problem: Problem, gpu: GPU, listed: bool, tiled: tuple[str, ...]) -> Plan | None:
    """The Hopper schedule's tiles, or None if they do not fit."""
    given, heavy = kernel in OVERRIDE, hopper.is_heavy(spec)
    for m, n, warps, stages in [OVERRIDE[kernel]] if given else hopper.ladder(kernel, spec, problem, listed):
        shared, registers = hopper.shared_bytes(kernel, spec, problem, m, n, stages, tiled), hopper.registers_per_thread(kernel, problem, m, n, heavy)
        if listed and BLOCK % m:  # a tile of rows lies in one block of the summary
            continue
        if given or shared <= gpu.shared_per_block and registers <= hopper.register_limit(kernel, m):
            reason = "tiles given by the caller" if given else f"{shared / 1024:.0f} of {gpu.shared_per_block // 1024} KiB shared memory, about {registers:.0f} registers"
            dense = _dense(direction, spec, problem, gpu) if direction == "backward" else None
            return Plan("hopper", direction, kernel, m, n, warps, stages, shared, gpu, matmul_precision(), True, reason, dense=dense, listed=listed, tiled=tiled)
    return None


def make_plan(spec: AttentionSpec, problem: Problem, gpu: GPU, direction: str, descriptors: bool | None = None,
              listed: bool | None = None, needs: tuple[bool, ...] | None = None, tiled: Sequence[str] | None = None) -> Plan:
    """Tiles for "forward", or for "backward": the plan of the dK/dV kernel with `rows` and `dense` beside it.

    descriptors  False if the operands' strides rule out TMA; by default it is used where the card has it
    listed       is there a run-time summary of the mask? By default where it pays
    needs        which of (q, k, v, *aux) get gradients; all that can unless given
    tiled        captured tensors of which TMA can read tiles; all that are read so unless given
    Raises PlanError naming the limit if nothing fits.
    """
    if direction not in DIRECTIONS:
        raise ValueError(f"direction must be one of {DIRECTIONS}, not {direction!r}")
    use = has_descriptors(spec, problem, gpu) and descriptors is not False
    listed = pays(spec, problem) if listed is None else listed
    names = {load.name for load in hopper_captured.candidates(spec)}
    tiled = tuple(sorted(names if tiled is None else names & {*tiled}))
    why = why_not_hopper(spec, problem, gpu, direction, use, listed, needs, tiled)
    if why is None:
        found = _hopper("forward" if direction == "forward" else "keys", direction, spec, problem, gpu, listed, tiled)
        if found is not None:
            if direction == "forward":
                return found
            stored = hopper_captured.storable(spec, problem, tiled, all_needs(spec) if needs is None else needs)
            return replace(found, stored=stored, ordered=deterministic())
        why = "no tile fits its registers and shared memory"
    plan = _portable(spec, problem, gpu, direction, use, listed)
    return plan if gpu.capability != (9, 0) else replace(plan, reason=f"{plan.reason}; not warp-specialised: {why}")


def _portable(spec: AttentionSpec, problem: Problem, gpu: GPU, direction: str, use: bool, listed: bool) -> Plan:
    if direction == "forward":
        return replace(_plan("forward", direction, spec, problem, gpu, use), listed=listed)
    rows = _plan("rows", direction, spec, problem, gpu, use)
    return replace(_plan("keys", direction, spec, problem, gpu, use), rows=rows, dense=_dense(direction, spec, problem, gpu), listed=listed)


def _dense(direction: str, spec: AttentionSpec, problem: Problem, gpu: GPU) -> Plan | None:
    """Tiles of the kernel for gradients of loads over rows and keys, if there are any."""
    needed = any({"i", "j"} <= load.variables for load in spec.score.loads if load.kind == "float")
    return _plan("dense", direction, spec, problem, gpu, False) if needed else None


def why_not(spec: AttentionSpec, problem: Problem, gpu: GPU) -> str | None:
    """Why no kernel can run this on `gpu`, or None. Asked at compile time: no PlanError may wait for the first call."""
    try:
        for direction in DIRECTIONS:
            make_plan(spec, problem, gpu, direction)
    except PlanError as error:
        return str(error)
    return None
