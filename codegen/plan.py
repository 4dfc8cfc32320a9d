"""The plan of one spec on one GPU: schedule, tiles, warps and stages, by the cost model's predicted time among all that fit.

What does not fit in shared memory and registers is never proposed.
"""
from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Sequence

import torch

from ..compat import tf32_allowed
from ..errors import PlanError
from ..region import Problem
from ..spec import BLOCK, FINE, AttentionSpec
from . import candidates, cost
from .blocks import pays
from .candidates import Candidate, fitting, predicted, rounded
from .gpu import GPU
from .packing import packed_axes
from .limits import has_relative, registers_per_thread, resident, shared_bytes, units
from .schedules import hopper, hopper_captured, hopper_memory

DIRECTIONS = ("forward", "backward")
SCHEDULES = ("triton", "hopper")
OVERRIDE: dict[str, tuple[int, int, int, int] | str | int] = {}
"""Kernel -> (BLOCK_M, BLOCK_N, num_warps, num_stages), "schedule" -> one of SCHEDULES, "parts" -> as in `Plan`, "packed" -> may heads be rows; set by
`overridden`."""

PINNED: dict[tuple[AttentionSpec, str], dict] = {}
"""(spec, direction) -> what `overridden` takes; set by `tuning.pin`."""
TUNED: dict[tuple[AttentionSpec, Problem, str], dict] = {}
"""(spec, rounded problem, direction) -> what `overridden` takes; set by `tuning.tune`."""


@dataclass(frozen=True)
class Plan:
    """One kernel's tiles. `rows` and `dense` belong to a backward plan: the dQ kernel's and the N x N gradients' tiles.

    schedule   "triton", the portable one, or "hopper", warp-specialised
    shared     bytes of shared memory, at least what the compiler takes
    registers  of a thread, predicted
    precision  of float32 matrix products: "ieee" or "tf32"
    descriptors  tiles are read by the tensor memory accelerator
    listed     tiles to visit come from the mask's run-time summary
    tiled      captured tensors of which the Hopper schedules read tiles by TMA
    stored     captured tensor whose gradient their backward stores as it goes
    ordered    their backward adds dQ up in a fixed order
    parts      into how many parts the forward kernel's keys are split, a program for each: 1, or 0 for as many as `split.number` says
    packed     axes that k and v lack, whose heads are rows of the forward kernel's tiles
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
    registers: float = 0.0
    rows: Plan | None = None
    dense: Plan | None = None
    listed: bool = False
    tiled: tuple[str, ...] = ()
    stored: str = ""
    ordered: bool = False
    parts: int = 1
    packed: tuple[str, ...] = ()

    @property
    def tiles(self) -> tuple[int, int, int, int]:
        """(BLOCK_M, BLOCK_N, num_warps, num_stages)."""
        return self.BLOCK_M, self.BLOCK_N, self.num_warps, self.num_stages

    @property
    def resident(self) -> int:
        """Programs that a multiprocessor holds at once."""
        return 1 if self.schedule == "hopper" else resident(self.gpu, self.num_warps, self.shared, self.registers)

    @property
    def listed_rows(self) -> int:
        """Rows of the blocks of the list that the kernel reads, if it reads one."""
        return FINE if self.kernel == "keys" else BLOCK

    @property
    def slots(self) -> int:
        """Programs that the card holds at once."""
        return self.gpu.sms * self.resident

    @property
    def options(self) -> dict[str, int]:
        if self.schedule == "hopper":
            return hopper.options(self.kernel, self.BLOCK_M, self.BLOCK_N, self.num_warps, self.num_stages)
        return {"BLOCK_M": self.BLOCK_M, "BLOCK_N": self.BLOCK_N, "num_warps": self.num_warps, "num_stages": self.num_stages}

    def __str__(self) -> str:
        own = (f"{self.kernel} {self.BLOCK_M}x{self.BLOCK_N}, {self.num_warps} warps, {self.num_stages} stages, "
               f"{self.shared / 1024:.0f} KiB shared{', TMA' if self.descriptors else ''}")
        if self.listed:
            own += f", tiles from a list of {self.listed_rows}x{BLOCK} blocks made at run time"
        if self.packed:
            own += ", heads that share keys in one tile"
        if self.parts != 1:
            own += ", keys in parts"
        parts = [own, *(str(p).split(": ", 1)[1].split(" (")[0] for p in (self.rows, self.dense) if p)]
        return f"{self.schedule} on {self.gpu.name}: {'; '.join(parts)} ({self.reason})"


@contextlib.contextmanager
def overridden(schedule: str | None = None, parts: int | None = None, packed: bool | None = None, **tiles: tuple[int, int, int, int]):
    """For tests and sweeps: overridden(forward=(64, 32, 4, 2), keys=…, rows=…, dense=…) while the block runs.

    schedule  "triton": the portable schedule everywhere; "hopper": the Hopper schedule wherever it can run, short rows too. Without it,
              tiles are the portable schedule's.
    parts     of the keys in the portable forward kernel: 1 for none, 0 for as many as fill the card, else that many
    packed    False: each head has tiles of its own in it
    """
    unknown = set(tiles) - {"forward", "keys", "rows", "dense"}
    if unknown:
        raise ValueError(f"unknown kernels {sorted(unknown)}; known: forward, keys, rows, dense")
    if schedule not in (None, *SCHEDULES):
        raise ValueError(f"schedule must be one of {SCHEDULES}, not {schedule!r}")
    before = dict(OVERRIDE)
    OVERRIDE.update(tiles | {name: value for name, value in (("schedule", schedule), ("parts", parts), ("packed", packed)) if value is not None})
    try:
        yield
    finally:
        OVERRIDE.clear()
        OVERRIDE.update(before)


def matmul_precision() -> str:
    """How float32 matrix products may be computed: "tf32" where PyTorch allows it for its own."""
    return "tf32" if tf32_allowed() else "ieee"


def _check_types(problem: Problem, gpu: GPU) -> None:
    for dtype in (problem.dtype, problem.v_dtype):
        if dtype not in ("float16", "bfloat16", "float32"):
            raise PlanError(f"the generated kernels take float16, bfloat16 and float32, not {dtype}; float64 runs in the tiled PyTorch schedule")
        if dtype == "bfloat16" and gpu.capability < (8, 0):
            raise PlanError(f"{gpu.name} (compute capability {gpu.capability[0]}.{gpu.capability[1]}) has no bfloat16 matrix unit: use float16")


def _plan(kernel: str, direction: str, spec: AttentionSpec, problem: Problem, gpu: GPU, descriptors: bool, listed: bool = False) -> Plan:
    """One kernel of the portable schedule."""
    packed = packed_axes(spec, problem) if kernel == "forward" and not listed and OVERRIDE.get("packed", True) else ()
    if kernel in OVERRIDE:
        tiles, reason = OVERRIDE[kernel], "tiles given by the caller"
        if kernel == "dense" and has_relative(spec):  # so that every tile of a diagonal of tiles has the same diagonals
            tiles = (min(tiles[:2]), min(tiles[:2]), *tiles[2:])
        shared = shared_bytes(kernel, tiles, problem, spec, gpu, listed, bool(packed), descriptors)
        chosen = Candidate(tiles, shared, registers_per_thread(kernel, tiles, problem, spec))
        if kernel == "forward":
            known = cost.facts(spec, rounded(problem)).packed(bool(packed))
            chosen = replace(chosen, parts=predicted("triton", kernel, tiles, known, gpu, units(problem, gpu) == "fma",
                                                     resident(gpu, tiles[2], chosen.shared, chosen.registers), chosen.registers)[1])
    else:
        _check_types(problem, gpu)
        offers = fitting("triton", kernel, spec, rounded(problem), gpu, listed, packed=bool(packed), descriptors=descriptors)
        chosen = offers[0]
        if chosen.unfit:
            raise PlanError(f"head sizes {problem.D} and {problem.Dv} in {problem.dtype}: even {chosen.tiles[0]}x{chosen.tiles[1]} tiles need {chosen.shared} bytes of shared "
                            f"memory in the {kernel} kernel; {gpu.name} has {gpu.shared_per_block} bytes")
        reason = _reason(offers, gpu, units(problem, gpu) == "wgmma" and kernel != "dense")
    parts = OVERRIDE.get("parts", chosen.parts) if kernel == "forward" else 1
    return _divided(Plan("triton", direction, kernel, *chosen.tiles, chosen.shared, gpu, matmul_precision(), descriptors, reason, chosen.registers,
                         listed=listed, parts=parts, packed=packed))


def _divided(plan: Plan) -> Plan:
    """A plan whose tiles divide the blocks of the list that they come from."""
    if plan.listed and (plan.listed_rows % plan.BLOCK_M or BLOCK % plan.BLOCK_N):
        raise PlanError(f"tiles of {plan.BLOCK_M}x{plan.BLOCK_N} do not divide the blocks of {plan.listed_rows}x{BLOCK} of the mask's run-time summary")
    return plan


def _reason(offers: tuple[Candidate, ...], gpu: GPU, predictable: bool) -> str:
    """offers: of `fitting`. Nothing in it depends on lengths: it stands in the generated file, and Triton compiles a kernel anew whose line moved."""
    best, fit = offers[0], len(offers)
    registers = f"about {min(best.registers, 255):.0f} of 255 registers" if predictable else "the largest tiles that compile without spilling"
    what = f"{best.shared / 1024:.0f} of {gpu.shared_per_block // 1024} KiB shared memory, {registers}"
    return f"{what}, predicted fastest of {fit} that fit" if fit > 1 else what


def has_descriptors(spec: AttentionSpec, problem: Problem, gpu: GPU) -> bool:
    """Does the card have a tensor memory accelerator that its matrix units read after, and can it index these operands?"""
    return gpu.vendor == "NVIDIA" and gpu.capability[0] in (9, 10, 11) and len(spec.axes) <= 3 and "float32" not in (problem.dtype, problem.v_dtype)


def all_needs(spec: AttentionSpec) -> tuple[bool, ...]:
    """Which of (q, k, v, *aux) can have gradients: all floats that the score reads."""
    in_score = {load.name for load in spec.score.loads if load.kind == "float"}
    return (True, True, True, *(a.kind == "float" and a.name in in_score for a in spec.aux))


def why_not_hopper(spec: AttentionSpec, problem: Problem, gpu: GPU, direction: str, descriptors: bool = True, listed: bool = False,
                   needs: tuple[bool, ...] | None = None) -> str | None:
    """Why this cannot run in the Hopper schedule on `gpu`, or None. Arguments as `make_plan`."""
    wanted = OVERRIDE.get("schedule")
    if not gpu.is_hopper or wanted == "triton" or wanted is None and set(OVERRIDE):
        return f"{gpu.name} is no Hopper card" if not gpu.is_hopper else "the portable schedule was asked for"
    needs = all_needs(spec) if needs is None else needs
    reason = hopper.refusal(spec, problem, direction, descriptors, listed, needs, deterministic())
    return reason or (hopper.unmeasured(spec, problem, direction, deterministic()) if wanted is None else None)


def deterministic() -> bool:
    """Must gradients be the same bits in every run?"""
    return torch.are_deterministic_algorithms_enabled()


def _hopper(kernel: str, direction: str, spec: AttentionSpec, problem: Problem, gpu: GPU, listed: bool, tiled: tuple[str, ...]) -> Plan | None:
    """The Hopper schedule's tiles, or None if none fit."""
    if kernel in OVERRIDE:
        m, n, _, stages = OVERRIDE[kernel]
        chosen, reason = Candidate(OVERRIDE[kernel], hopper_memory.shared_bytes(kernel, spec, problem, m, n, stages, tiled, listed), 0.0), "tiles given by the caller"
    else:
        offers = fitting("hopper", kernel, spec, rounded(problem), gpu, listed, tiled)
        chosen, reason = offers[0], _reason(offers, gpu, True)
    if chosen.unfit:
        return None
    dense = _dense(direction, spec, problem, gpu) if direction == "backward" else None
    return _divided(Plan("hopper", direction, kernel, *chosen.tiles, chosen.shared, gpu, matmul_precision(), True, reason, chosen.registers, dense=dense,
                         listed=listed, tiled=tiled))


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
    kept = None if OVERRIDE else PINNED.get((spec, direction)) or TUNED and TUNED.get((spec, rounded(problem), direction))
    if kept:
        with overridden(**kept):
            return replace(make_plan(spec, problem, gpu, direction, descriptors, listed, needs, tiled), reason="pinned, or measured by autotune")
    use = has_descriptors(spec, problem, gpu) and descriptors is not False
    listed = pays(spec, problem) if listed is None else listed
    names = {load.name for load in hopper_captured.candidates(spec)}
    tiled = tuple(sorted(names if tiled is None else names & {*tiled}))
    why, found = why_not_hopper(spec, problem, gpu, direction, use, listed, needs), None
    if why is None:
        found = _hopper("forward" if direction == "forward" else "keys", direction, spec, problem, gpu, listed, tiled)
        why = "no tile fits its registers and shared memory" if found is None else "the portable schedule is predicted faster"
        if found is not None and direction == "backward":
            stored = hopper_captured.storable(spec, problem, tiled, all_needs(spec) if needs is None else needs)
            found = replace(found, stored=stored, ordered=deterministic())
        if found is not None:  # of these lengths; the tiles are for a range of them
            m, n, stages = found.BLOCK_M, found.BLOCK_N, found.num_stages
            shared = hopper_memory.shared_bytes(found.kernel, spec, problem, m, n, stages, tiled, listed, bool(found.stored))
            found = replace(found, shared=shared + 256 * found.ordered)  # whose turn it is
        if found is not None and OVERRIDE.get("schedule") == "hopper":
            return found
    plan = _portable(spec, problem, gpu, direction, use, listed)
    if found is not None and _seconds(spec, problem, found) <= 1.05 * _seconds(spec, problem, plan):
        return found
    return plan if not gpu.is_hopper else replace(plan, reason=f"{plan.reason}; not warp-specialised: {why}")


def _seconds(spec: AttentionSpec, problem: Problem, plan: Plan) -> float:
    return cost.seconds(spec, rounded(problem), plan, exact=False)


def _portable(spec: AttentionSpec, problem: Problem, gpu: GPU, direction: str, use: bool, listed: bool) -> Plan:
    if direction == "forward":
        return _plan("forward", direction, spec, problem, gpu, use, listed)
    rows = _plan("rows", direction, spec, problem, gpu, use, listed)
    return replace(_plan("keys", direction, spec, problem, gpu, use, listed), rows=rows, dense=_dense(direction, spec, problem, gpu))


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
