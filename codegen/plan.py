"""The plan of one spec on one GPU: schedule, tiles, warps and stages, by the cost model's predicted time among all that fit.

What does not fit in shared memory and registers is never proposed.
"""
from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace
from typing import Iterator, Sequence

import torch

from ..compat import tf32_allowed
from ..errors import PlanError
from ..expr import conjuncts
from ..region import Problem
from ..spec import BLOCK, FINE, AttentionSpec
from . import cost
from .blocks import pays
from .candidates import ORDERED, Asked, Candidate, ask, bounded, chosen, fits, predicted, representative, resident_of, rounded
from .captured import grouped
from .gpu import EXACT, GPU, units
from .override import OVERRIDE, PINNED, TUNED, overridden
from .packing import packed_axes
from .limits import has_relative, shared_bytes
from .registers import registers_per_thread, resident
from .schedules import hopper, hopper_captured, hopper_locate, hopper_memory, one_tile

DIRECTIONS = ("forward", "backward")
MARGIN = 1.05
"""How much faster the portable schedule must be predicted than the Hopper one: the model's own error."""


@dataclass(frozen=True)
class Plan:
    """One kernel's tiles. `rows` and `dense` belong to a backward plan: the dQ kernel's and the N x N gradients' tiles.

    schedule   "triton", the portable one, or "hopper", warp-specialised
    shared     bytes of shared memory, at least what the compiler takes
    registers  of a thread, predicted
    precision  of float32 matrix products, see `matmul_precision`
    descriptors  tiles are read by the tensor memory accelerator
    aligned    strides of q, k, v and dO are multiples of 16 bytes
    listed     tiles to visit come from the mask's run-time summary
    documents  and tiles of rows, in backward of keys too, begin where long runs of one id do
    tiled      captured tensors of which the Hopper schedules read tiles by TMA
    queries    tiles of query rows that the Hopper forward holds: while the output leaves from the place of one there is another for the next
    stored     captured tensor whose gradient their backward stores as it goes, or one tile of all keys and queries keeps
    ordered    their backward adds dQ up in a fixed order
    turns      it goes through the heads that share keys in turn, tile of rows by tile of rows
    parts      into how many parts the forward kernel's keys, or the rows of one tile of all keys, are split, a program for each: 1, or 0 for as many as `flashfx.codegen.split` says
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
    documents: bool = False
    tiled: tuple[str, ...] = ()
    queries: int = 1
    stored: str = ""
    ordered: bool = False
    turns: bool = False
    parts: int = 1
    packed: tuple[str, ...] = ()
    aligned: bool = True

    @property
    def tiles(self) -> tuple[int, int, int, int]:
        """(BLOCK_M, BLOCK_N, num_warps, num_stages)."""
        return self.BLOCK_M, self.BLOCK_N, self.num_warps, self.num_stages

    @property
    def resident(self) -> int:
        """Programs that a multiprocessor holds at once."""
        return 1 if self.schedule == "hopper" else resident(self.gpu, self.num_warps, self.shared, self.registers)

    @property
    def by_thirds(self) -> bool:
        """As `Site.thirds`."""
        return self.schedule == "hopper" and self.kernel == "keys" and self.BLOCK_N == hopper.BY_THIRDS

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
            own += f", tiles from a list of {self.listed_rows}x{BLOCK} blocks made at run time" + ", from where documents begin" * self.documents
        if self.packed:
            own += ", heads that share keys in one tile"
        if self.parts != 1:
            own += f", {'rows' if self.kernel == 'one_tile' else 'keys'} in parts"
        if self.turns:
            own += ", heads that share keys in turn"
        if self.kernel == "one_tile":
            own += f", which holds all keys{f' and queries, and the gradient of {self.stored}' * bool(self.stored)}: all gradients by one kernel"
        parts = [own, *(str(p).split(": ", 1)[1].split(" (")[0] for p in (self.rows, self.dense) if p)]
        return f"{self.schedule} on {self.gpu.name}: {'; '.join(parts)} ({self.reason})"


def matmul_precision(problem: Problem, gpu: GPU) -> str:
    """How float32 matrix products are computed: "ieee" or, as good as that where it was measured (Hopper), "bf16x6": each float32 is the sum of three
    bfloat16, and of their nine products six are more than rounding, with half of an FMA's error. Where PyTorch allows TF32 for its own: "tf32", of which
    Triton truncates operands; instead of "bf16x6" then "bf16x3", of two bfloat16 each, whose products are good to 2 ** -16 where TF32's are to 2 ** -11."""
    exact, faster = ("bf16x6", "bf16x3") if units(problem, gpu) == "bf16x6" else ("ieee", "tf32")
    return faster if tf32_allowed() else exact


def _check_types(problem: Problem, gpu: GPU) -> None:
    for dtype in (problem.dtype, problem.v_dtype):
        if dtype not in ("float16", "bfloat16", "float32"):
            raise PlanError(f"the generated kernels take float16, bfloat16 and float32, not {dtype}; float64 runs in the tiled PyTorch schedule")
        if dtype == "bfloat16" and gpu.capability < (8, 0):
            raise PlanError(f"{gpu.name} (compute capability {gpu.capability[0]}.{gpu.capability[1]}) has no bfloat16 matrix unit: use float16")


def _divided(plan: Plan) -> Plan:
    """A plan whose tiles divide the blocks of the list that they come from."""
    if plan.listed and (plan.listed_rows % plan.BLOCK_M or BLOCK % plan.BLOCK_N):
        raise PlanError(f"tiles of {plan.BLOCK_M}x{plan.BLOCK_N} do not divide the blocks of {plan.listed_rows}x{BLOCK} of the mask's run-time summary")
    return plan


def _reason(best: Candidate, compared: bool, gpu: GPU, predictable: bool) -> str:
    """best, compared: of `chosen`. Nothing in it depends on lengths: it stands in the generated file, and Triton compiles a kernel anew whose line moved."""
    registers = f"about {min(best.registers, 255):.0f} of 255 registers" if predictable else "the largest tiles that compile without spilling"
    what = f"{best.shared / 1024:.0f} of {gpu.shared_per_block // 1024} KiB shared memory, {registers}"
    return f"{what}, predicted fastest of those that fit" if compared else what


def has_descriptors(spec: AttentionSpec, problem: Problem, gpu: GPU) -> bool:
    """Does the card have a tensor memory accelerator that its matrix units read after, and can it index these operands?"""
    after = found == "bf16x6" if (found := units(problem, gpu)) in EXACT else gpu.vendor == "NVIDIA" and gpu.capability[0] in (9, 10, 11)
    return after and len(spec.axes) <= 3


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
    return reason or (hopper.unmeasured(spec, problem, direction, deterministic(), listed) if wanted is None else None)


def deterministic() -> bool:
    """Must gradients be the same bits in every run?"""
    return torch.are_deterministic_algorithms_enabled()


def make_plan(spec: AttentionSpec, problem: Problem, gpu: GPU, direction: str, descriptors: bool | None = None,
              listed: bool | None = None, needs: tuple[bool, ...] | None = None, tiled: Sequence[str] | None = None) -> Plan:
    """Tiles for "forward", or for "backward": the plan of the dK/dV kernel with `rows` and `dense` beside it.

    descriptors  False if the operands' strides rule out TMA, and copies of 16 bytes; by default it is used where the card has it
    listed       is there a run-time summary of the mask? By default where it pays
    needs        which of (q, k, v, *aux) get gradients; all that can unless given
    tiled        captured tensors of which TMA can read tiles; all that are read so unless given
    Raises PlanError naming the limit if nothing fits.
    """
    if direction not in DIRECTIONS:
        raise ValueError(f"direction must be one of {DIRECTIONS}, not {direction!r}")
    kept = None if OVERRIDE else PINNED.get((spec, direction)) or TUNED and TUNED.get((spec, representative(problem), direction))
    if kept:
        with overridden(**kept):
            return replace(make_plan(spec, problem, gpu, direction, descriptors, listed, needs, tiled), reason="pinned, or measured by autotune")
    use = has_descriptors(spec, problem, gpu) and descriptors is not False
    listed = pays(spec, problem) if listed is None else listed
    names = hopper_captured.copyable(spec, problem)
    asked = _Asked(spec, problem, gpu, direction, use, listed, needs, tuple(sorted(names if tiled is None else names & {*tiled})))
    why = why_not_hopper(spec, problem, gpu, direction, use, listed, needs) or asked.why_portable()
    if why is None:
        return asked.hopper
    reason = f"{asked.portable.reason}; not warp-specialised: {why}" if gpu.is_hopper else asked.portable.reason
    return replace(asked.portable, reason=reason, aligned=descriptors is not False)


@dataclass(frozen=True)
class _Asked:
    """For what a plan is wanted: arguments of `make_plan`, each known. Plans of both schedules are made when they are looked at."""

    spec: AttentionSpec
    problem: Problem
    gpu: GPU
    direction: str
    descriptors: bool
    listed: bool
    needs: tuple[bool, ...] | None
    tiled: tuple[str, ...]

    def why_portable(self) -> str | None:
        """Why the portable schedule is taken where the Hopper one can run, or None. What is bound to be slower is not planned to the end."""
        slower, none = "the portable schedule is predicted faster", "no tile fits its registers and shared memory"
        forced = OVERRIDE.get("schedule") == "hopper"
        beaten = lambda seconds: not self.surely_wins(seconds) and seconds > MARGIN * self.seconds(self.portable)
        if not forced and beaten(self.least_hopper):
            return slower if fits(self.hopper_tiles) else none
        if self.hopper_kernel not in OVERRIDE and chosen(self.hopper_tiles)[0].unfit:
            return none
        return slower if not forced and beaten(self.seconds(self.hopper)) else None

    def seconds(self, plan: Plan) -> float:
        """Predicted, of all its kernels."""
        return cost.seconds(self.spec, rounded(self.problem), plan, exact=False)

    def surely_wins(self, seconds: float) -> bool:
        """Is a Hopper plan of so many seconds taken whatever tiles the portable schedule gets? Looks at as many of its kernels as that takes."""
        return any(seconds <= MARGIN * total for total in itertools.accumulate(self.least_portable()))

    def least_portable(self) -> Iterator[float]:
        """Seconds below which kernels of the portable schedule are not predicted, one after the other."""
        if self.direction == "forward":
            yield bounded(self.tiles("forward"))[0].seconds
            return
        if self.one_tile is not None:
            yield self.seconds(self.one_tile)
            return
        yield self.beside("delta") + self.beside("dense")
        for kernel in ("keys", "rows"):
            yield bounded(self.tiles(kernel))[0].seconds

    @functools.cached_property
    def least_hopper(self) -> float:
        """Seconds below which no plan of the Hopper schedule is predicted."""
        least = bounded(self.hopper_tiles)[0].seconds
        if self.direction == "forward":
            return least
        return self.beside("reset") + least + self.beside("sum") + (0.0 if self.dense is None or self.stored else self.beside("dense"))

    def beside(self, kernel: str) -> float:
        """Seconds of a kernel whose tiles do not depend on the schedule, if there is one."""
        known = cost.facts(self.spec, rounded(self.problem))
        if kernel in cost.PASSING:
            return cost.passing(kernel, known, self.gpu).seconds
        scalar, plan = units(self.problem, self.gpu) in EXACT, self.dense
        return cost.kernel_cost("triton", kernel, plan.tiles, known, self.gpu, scalar, plan.resident, plan.registers, None, 1).seconds if plan else 0.0

    # the Hopper schedule

    @property
    def hopper_kernel(self) -> str:
        return "forward" if self.direction == "forward" else "keys"

    @functools.cached_property
    def hopper_tiles(self) -> Asked:
        return ask("hopper", self.hopper_kernel, self.spec, self.problem, self.gpu, listed=self.listed, tiled=self.tiled,
                   ordered=self.direction == "backward" and deterministic())

    @functools.cached_property
    def stored(self) -> str:
        """As `Plan.stored`."""
        needs = all_needs(self.spec) if self.needs is None else self.needs
        return hopper_captured.storable(self.spec, self.problem, self.tiled, needs, deterministic()) if self.direction == "backward" else ""

    @functools.cached_property
    def hopper(self) -> Plan:
        """Where tiles fit."""
        spec, problem, gpu, kernel = self.spec, self.problem, self.gpu, self.hopper_kernel
        given = OVERRIDE.get(kernel)
        if given and kernel == "keys" and given[1] == hopper.BY_THIRDS and not hopper.takes_thirds(spec, problem, self.listed, deterministic()):
            given = None  # tuned before an order was asked for, or a list came
        if given:
            best, reason = Candidate(given, 0, 0.0), "tiles given by the caller"
        else:
            best, compared = chosen(self.hopper_tiles)
            reason = _reason(best, compared, gpu, True)
        m, n, _, stages = best.tiles
        ordered = kernel == "keys" and deterministic()  # whose turn it is lies in shared memory too
        turns = kernel == "keys" and OVERRIDE.get("turns", not ordered and self.takes_turns(m, n)) and grouped(spec)
        where = spec, self.tiled, max(problem.D, problem.Dv), self.listed
        documents = hopper_locate.takes_row_tiles(*where) if kernel == "forward" else hopper_locate.takes_key_tiles(*where, bool(self.stored))
        # of these lengths; the tiles are for a range of them
        shared = hopper_memory.shared_bytes(kernel, spec, problem, m, n, stages, self.tiled, self.listed, self.stored, turns)
        return _divided(Plan("hopper", self.direction, kernel, *best.tiles, shared + ORDERED * ordered, gpu, matmul_precision(problem, gpu), True, reason,
                             best.registers, dense=self.dense, listed=self.listed, documents=documents, tiled=self.tiled, stored=self.stored, ordered=ordered, turns=turns,
                             queries=resident_of(self.hopper_tiles, best.tiles, shared, best.registers)))

    def takes_turns(self, m: int, n: int) -> bool:
        """As `Plan.turns`. Where data decide which rows see which keys, as ids of documents do, nobody knows beforehand which tiles of keys most rows see."""
        if self.listed and any({"i", "j"} <= c.variables for c in conjuncts(self.spec.visible) if c.loads):
            return False
        return cost.takes_turns(self.hopper_tiles.known, m, n, self.gpu)

    # the portable schedule

    @functools.cached_property
    def portable(self) -> Plan:
        if self.direction == "forward":
            return self.plan("forward")
        return self.by_two if self.one_tile is None else self.one_tile

    @functools.cached_property
    def by_two(self) -> Plan:
        """Backward by a kernel over keys and one over rows."""
        rows = self.plan("rows")
        return replace(self.plan("keys"), rows=rows, dense=self.dense)

    @functools.cached_property
    def one_tile(self) -> Plan | None:
        """Backward by one kernel, where all keys fit in a tile of it: of the sweep's 24 points it takes 4 to 58 % less time than two at each."""
        if OVERRIDE.keys() & {"keys", "rows"} or self.listed or not one_tile.takes(self.spec, self.problem, self.gpu, self.needs or ()):
            return None
        if "one_tile" not in OVERRIDE and chosen(self.tiles("one_tile"))[0].unfit:
            return None
        found = self.plan("one_tile")
        held = one_tile.holds(self.spec, self.problem, all_needs(self.spec) if self.needs is None else self.needs, found.BLOCK_M)
        return replace(found, dense=None if held else self.dense, stored=held, parts=0 if one_tile.in_parts(self.problem) else 1)

    @functools.cached_property
    def dense(self) -> Plan | None:
        """Of the kernel for gradients of loads over rows and keys, if there are any."""
        needed = any({"i", "j"} <= load.variables for load in self.spec.score.loads if load.kind == "float")
        return self.plan("dense") if needed and self.direction == "backward" else None

    def tiles(self, kernel: str) -> Asked:
        """For the tiles of one kernel."""
        listed, descriptors = self.listed and kernel != "dense", self.descriptors and kernel not in ("dense", "one_tile")
        packed = kernel == "forward" and not listed and OVERRIDE.get("packed", True) and bool(packed_axes(self.spec, self.problem))
        return ask("triton", kernel, self.spec, self.problem, self.gpu, listed=listed, packed=packed, descriptors=descriptors)

    def plan(self, kernel: str) -> Plan:
        """Of one kernel."""
        asked, spec, problem, gpu = self.tiles(kernel), self.spec, self.problem, self.gpu
        if kernel in OVERRIDE:
            tiles, reason = OVERRIDE[kernel], "tiles given by the caller"
            if kernel == "dense" and has_relative(spec):  # so that every tile of a diagonal of tiles has the same diagonals
                tiles = (min(tiles[:2]), min(tiles[:2]), *tiles[2:])
            if kernel == "one_tile" and tiles[1] < problem.N:
                raise PlanError(f"a tile of {tiles[1]} keys does not hold all {problem.N}")
            shared = shared_bytes(kernel, tiles, problem, spec, gpu, asked.listed, asked.packed, asked.descriptors)
            best = Candidate(tiles, shared, registers_per_thread(kernel, tiles, problem, spec))
            if kernel == "forward":
                best = replace(best, parts=predicted(asked, tiles, resident(gpu, tiles[2], shared, best.registers), best.registers)[1])
        else:
            _check_types(problem, gpu)
            best, compared = chosen(asked)
            if best.unfit:
                raise PlanError(f"head sizes {problem.D} and {problem.Dv} in {problem.dtype}: even {best.tiles[0]}x{best.tiles[1]} tiles need "
                                f"{best.shared} bytes of shared memory in the {kernel} kernel; {gpu.name} has {gpu.shared_per_block} bytes")
            reason = _reason(best, compared, gpu, asked.units == "wgmma" and kernel != "dense")
        parts = OVERRIDE.get("parts", best.parts) if kernel == "forward" else 1
        return _divided(Plan("triton", self.direction, kernel, *best.tiles, best.shared, gpu, matmul_precision(problem, gpu), asked.descriptors, reason,
                             best.registers, listed=asked.listed, parts=parts, packed=packed_axes(spec, problem) if asked.packed else ()))


def why_not(spec: AttentionSpec, problem: Problem, gpu: GPU) -> str | None:
    """Why no kernel can run this on `gpu`, or None. Asked at compile time: no PlanError may wait for the first call."""
    try:
        for direction in DIRECTIONS:
            make_plan(spec, problem, gpu, direction)
    except PlanError as error:
        return str(error)
    return None
