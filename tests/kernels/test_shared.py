"""Shared memory as predicted is what the compiler allocates: every tile that the planner can propose, of every schedule, head size and
variant, on sm_80, sm_89 and sm_90, without a GPU."""
from __future__ import annotations

import functools
import itertools
import re
from dataclasses import dataclass, replace

import pytest

from flashfx.codegen.candidates import Tiles, ask, ranked
from flashfx.codegen.limits import has_relative
from flashfx.codegen.load import load
from flashfx.codegen.plan import Plan, make_plan, overridden
from flashfx.codegen.render import render
from flashfx.codegen.schedules import hopper_captured
from flashfx.codegen.schedules.hopper_memory import names_length
from flashfx.codegen.timing import Operands
from flashfx.compat import interpreting
from flashfx.region import Problem
from flashfx.spec import AttentionSpec

from ..thinning import thinned
from .cases import CORE, MORE, problem, spec as spec_of

pytest.importorskip("triton.backends.nvidia.compiler")
if interpreting():
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import torch  # noqa: E402

from .compiled import BY_ARCH, shared_memory  # noqa: E402

HEADS = (16, 32, 64, 80, 96, 128, 160, 192, 256)
ALL = {**CORE, **MORE}
SPECS = {  # name -> (variant, kind, are captured tensors trained?, one of how many tiles is built, which one first)
    "full": ("full", "self", False, 1, 0), "causal": ("causal", "self", False, 1, 0), "dropout": ("dropout", "self", False, 1, 0),
    "bias": ("bias", "self", False, 1, 0),
    # three that differ in registers alone, and two: together they have every tile
    "window": ("window", "self", False, 3, 0), "softcap": ("softcap", "self", False, 3, 1), "alibi": ("alibi", "self", False, 3, 2),
    "full grouped": ("full", "gqa", False, 2, 0), "causal grouped": ("causal", "gqa", False, 2, 1), "trained": ("bias", "self", True, 2, 0)}
ROLES = {"forward": "attention_forward", "keys": "attention_backward_keys", "rows": "attention_backward_rows"}


@dataclass(frozen=True)
class Case:
    """What is built: a variant of `cases` at head sizes and a length, for an architecture. listed: tiles come from a list."""

    arch: str
    variant: str
    kind: str = "self"
    head: int = 64
    length: int = 512
    trained: bool = False
    listed: bool = False
    v_head: int = 0
    dtype: str = "bfloat16"

    @functools.cached_property
    def spec(self) -> AttentionSpec:
        return spec_of(ALL[self.variant], self.kind)

    @property
    def problem(self) -> Problem:
        """No extent is 1 or a multiple of 16: Triton compiles those anew."""
        return Problem((3, 2, 5) if self.kind == "gqa" else (3, 5), self.length, self.length, self.head, self.v_head or self.head, self.dtype, self.dtype)

    @property
    def needs(self) -> tuple[bool, ...]:
        return (True, True, True, *(self.trained for _ in self.spec.aux))

    @property
    def tiled(self) -> tuple[str, ...]:
        return tuple(sorted({load.name for load in hopper_captured.candidates(self.spec)}))

    def offers(self, schedule: str, kernel: str) -> list[Tiles]:
        """What the planner can propose."""
        tiled = self.tiled if schedule == "hopper" else ()
        found = ranked(ask(schedule, kernel, self.spec, self.problem, BY_ARCH[self.arch], listed=self.listed, tiled=tiled))
        return sorted(c.tiles for c in found if not c.unfit)

    def plan(self, direction: str, schedule: str, tiles: dict[str, Tiles]) -> Plan:
        with overridden(schedule=schedule, parts=1, packed=False, **{"forward": (64, 32, 4, 2), **tiles}):
            return make_plan(self.spec, self.problem, BY_ARCH[self.arch], direction, listed=self.listed, needs=self.needs)

    def check(self, schedule: str, tiles: dict[str, Tiles], exact: bool = True) -> None:
        """Build kernels of one direction, name -> tiles. exact: else as much as predicted at most."""
        gpu, direction = BY_ARCH[self.arch], "forward" if "forward" in tiles else "backward"
        backward = self.plan("backward", schedule, tiles) if direction == "backward" else None
        forward = self.plan("forward", "triton" if backward else schedule, tiles)
        plan = backward or forward
        if plan.schedule != schedule:  # which does not take it
            return
        module = load(render(self.spec, forward, self.problem, self.needs if backward else (False,) * len(self.needs), backward).text)
        arguments = _operands(self.spec, self.problem)
        found = shared_memory(lambda: arguments.call(module, direction), module, gpu, {ROLES[kernel] for kernel in tiles})
        for kernel, t in tiles.items():
            predicted = (plan.rows if kernel == "rows" else plan).shared
            size = found[ROLES[kernel]]
            assert size <= predicted <= gpu.shared_per_block and (size == predicted or not exact), (self, schedule, kernel, t, size, predicted)

    def builds(self) -> list[tuple[str, dict[str, Tiles]]]:
        """(schedule, tiles) of all that the planner can propose; kernels of backward in pairs, since one module has both."""
        found = []
        for schedule in ("triton", "hopper") if BY_ARCH[self.arch].is_hopper else ("triton",):
            found += [(schedule, {"forward": t}) for t in self.offers(schedule, "forward")]
            if schedule == "hopper":
                found += [(schedule, {"keys": t}) for t in self.offers(schedule, "keys")]
                continue
            keys, rows = self.offers(schedule, "keys"), self.offers(schedule, "rows")
            for pair in itertools.zip_longest(keys, rows):
                found.append((schedule, {kernel: t for kernel, t in zip(("keys", "rows"), pair) if t}))
        return found


@functools.lru_cache(maxsize=4)
def _operands(spec: AttentionSpec, problem: Problem) -> Operands:
    return Operands(spec, problem, torch.device("cpu"))


def case(arch: str, name: str, head: int, **more) -> Case:
    variant, kind, trained, *_ = SPECS[name]
    return Case(arch, variant, kind, head, trained=trained, **more)


def check_some(found: Case, number: int, turn: int, schedules: tuple[str, ...] = ("triton", "hopper"), exact: bool = True) -> None:
    """So many builds, others in every turn."""
    builds = [build for build in found.builds() if build[0] in schedules]
    for n in range(min(number, len(builds))):
        found.check(*builds[(n * len(builds) // number + 5 * turn) % len(builds)], exact)


@pytest.mark.parametrize("arch, number", [("sm_80", 1), ("sm_89", 1), ("sm_90", 3)])
@pytest.mark.parametrize("turn, name", thinned(enumerate(SPECS), 5))
def test_shared_memory_is_the_compilers(arch, number, turn, name):
    """Some tiles of every variant, at another head size for each variant and architecture."""
    check_some(case(arch, name, HEADS[(4 * turn + int(arch[-2:])) % len(HEADS)]), number, turn)


@pytest.mark.parametrize("turn, name", enumerate(("full", "dropout", "alibi", "bias")))
def test_shared_memory_of_few_rows(turn, name):
    """Tiles of 16 and 32 rows, on Hopper by the older instruction."""
    check_some(case("sm_90", name, HEADS[(5 * turn + 2) % len(HEADS)], length=48), 2, turn)


FURTHER = [
    # the portable schedule alone: masks that are loaded, with and without lists; vectors; unequal head sizes, and one that is no multiple of 16
    Case("sm_90", "documents", "gqa", 64, listed=True), Case("sm_80", "documents", head=128), Case("sm_90", "lengths", head=80, listed=True),
    Case("sm_90", "padding", head=192, listed=True), Case("sm_90", "bool_mask", "gqa", 80), Case("sm_80", "bool_mask", "gqa", 128, listed=True),
    Case("sm_90", "column_bias", head=128), Case("sm_80", "two_reads", "gqa", 64), Case("sm_80", "full", head=128, v_head=64),
    Case("sm_90", "causal", head=64, v_head=128), Case("sm_90", "causal", head=72),
    # heads of which 16 bytes are copied at a time where strides are known to be multiples of that
    Case("sm_80", "causal", head=72), Case("sm_80", "dropout", "gqa", 88), Case("sm_80", "bias", head=104), Case("sm_90", "window", "gqa", 168),
    # a stage reads places of listed tiles, or none does; rows average v in a loop of its own
    Case("sm_80", "padding", head=32, listed=True), Case("sm_80", "dropout_padding", "gqa", 64, listed=True),
    Case("sm_90", "dropout_padding", head=128, listed=True), Case("sm_90", "mean_left_padding", head=64, listed=True),
    Case("sm_90", "dropout_padding", "gqa", 64, listed=True), Case("sm_80", "padding", head=32)]


@pytest.mark.parametrize("turn, found", thinned(enumerate(FURTHER), 5), ids=str)
def test_shared_memory_of_further_specs(turn, found):
    check_some(found, 2, turn, ("triton",))


@pytest.mark.parametrize("turn, found", enumerate([Case("sm_90", "t5_table", "gqa"), Case("sm_80", "relative", head=80), Case("sm_80", "causal", head=76),
                                                   Case("sm_80", "full", dtype="float32"), Case("sm_80", "bool_mask", head=32, length=500),
                                                   Case("sm_90", "bool_mask", "gqa", 64, length=500, listed=True), Case("sm_90", "bias", length=500),
                                                   Case("sm_90", "additive_mask", length=500)]), ids=str)
def test_no_more_shared_memory_than_predicted(turn, found):
    """Where the figure is an upper bound."""
    check_some(found, 2, turn, ("triton",), exact=False)


def test_tables_of_wide_heads_take_no_more_than_predicted():
    """Eight warps share 32 rows: two of each four hold the same, and all of it lies there."""
    Case("sm_90", "ended", head=256).check("triton", {"keys": (64, 32, 8, 3), "rows": (32, 64, 8, 3)}, exact=False)


PAIR = [
    # the warp-specialised pair: lists, vectors that one warp reads for the others, rows that average v, tensors read element by element, tables
    Case("sm_90", "documents", head=128, listed=True), Case("sm_90", "documents", "gqa", 64), Case("sm_90", "padding", "gqa", 128, listed=True),
    Case("sm_90", "bool_mask", head=64, length=500), Case("sm_90", "temperature", "gqa", 96), Case("sm_90", "padded_bias", head=64, listed=True),
    Case("sm_90", "ended", head=64, trained=True), Case("sm_90", "relative", "gqa", 128)]


def check_pair(found: Case, number: int, turn: int) -> None:
    """So many forward and backward kernels of the warp-specialised pair, others in every turn."""
    for kernel in ("forward", "keys"):
        offers = found.offers("hopper", kernel)
        assert offers, (found, kernel)
        for n in range(min(number, len(offers))):
            found.check("hopper", {kernel: offers[(turn + n) % len(offers)]})


@pytest.mark.parametrize("turn, found", thinned(enumerate(PAIR), 5), ids=str)
def test_shared_memory_of_the_pair(turn, found):
    check_pair(found, 1, turn)


@pytest.mark.parametrize("turn, found", enumerate([Case("sm_90", "causal", "gqa", 128), Case("sm_90", "causal", "gqa", 64), Case("sm_90", "dropout_padding", "gqa", 128, listed=True),
                                                   Case("sm_90", "mean_left_padding", "gqa", 64, listed=True)]), ids=str)
def test_shared_memory_where_heads_take_turns(turn, found):
    with overridden(turns=True):
        check_pair(found, 1, turn)


MADE_OF = {  # what a spec is made of -> (axes of q, axes of k, captured tensor, score, mask)
    "two": ("b, h", "b, h", "", "qk", ""), "upper": ("b, h", "b, h", "", "qk", "i <= j"), "three": ("b, h, g", "b, h", "", "qk", "j <= i"),
    "one": ("b", "b", "", "qk", ""),
    "bias": ("b, h", "b, h", "t: float[3]", "qk + t[h, i, j]", ""), "by head": ("b, h", "b, h", "t: float[2]", "qk + t[b, h]", "j <= i"),
    "shared": ("b, h, g", "b, h", "t: float[3]", "qk + t[h, i, j]", ""), "of all": ("b, h", "b, h", "t: float[2]", "qk + t[i, j]", "j <= i")}


@pytest.mark.parametrize("kind, extents, length, head, v_head, trained", thinned([
    ("two", (1, 1), 512, 128, 128, False), ("two", (3, 5), 500, 64, 64, False), ("upper", (1, 3), 512, 64, 32, False),
    ("three", (3, 1, 5), 512, 72, 72, False),
    ("one", (7,), 500, 128, 64, False), ("bias", (2, 5), 512, 64, 64, True), ("by head", (2, 5), 512, 64, 64, False),
    ("one", (7,), 500, 192, 192, False), ("by head", (2, 5), 512, 192, 128, False), ("three", (3, 1, 5), 512, 128, 192, False),
    ("shared", (3, 2, 5), 512, 64, 64, True), ("shared", (3, 2, 5), 512, 128, 128, True), ("of all", (2, 5), 512, 64, 64, True), ("of all", (1, 5), 512, 96, 96, True)], 2))
def test_what_partitions_are_handed(kind, extents, length, head, v_head, trained):
    """Extents of 1, lengths that are no multiples of tiles, unequal head sizes, stored gradients: partitions of the Hopper pair are handed more or less."""
    q, k, given, score, where = MADE_OF[kind]
    lines = [f"attention[{q}, i, j]", *([f"  given   {given}"] if given else []), f"  qk = q[{q}, i] . k[{k}, j]", f"  score = {score}"]
    spec = AttentionSpec.parse("\n".join([*lines, *([f"  where {where}", "  empty nan"] if where else []), f"  out = softmax_j(score) . v[{k}, j]"]))
    gpu, p = BY_ARCH["sm_90"], Problem(extents, length, length, head, v_head, "bfloat16", "bfloat16")
    needs = (True, True, True, *(trained for _ in spec.aux))
    with overridden(schedule="hopper"):
        plans = {d: make_plan(spec, p, gpu, d, listed=False, needs=needs) for d in ("forward", "backward")}
    module, arguments = load(render(spec, plans["forward"], p, needs, plans["backward"]).text), Operands(spec, p, torch.device("cpu"))
    assert bool(plans["backward"].stored) == trained
    for direction, plan in plans.items():
        name = ROLES["forward" if direction == "forward" else "keys"]
        found = shared_memory(lambda: arguments.call(module, direction), module, gpu, {name})
        assert plan.schedule == "hopper" and found[name] == plan.shared, (direction, found, plan.shared)


@pytest.mark.parametrize("variant", [name for name, found in ALL.items() if found.where])
def test_the_number_of_keys_is_handed_where_it_is_named(variant):
    """Of forwards that take tiles from lists."""
    for kind, head, length in itertools.product(("self", "gqa"), (64, 80), (512, 504)):
        found = Case("sm_90", variant, kind, head, length, has_relative(spec_of(ALL[variant], kind)), listed=True)
        if not (tiles := found.offers("hopper", "forward")):
            continue
        plan = found.plan("forward", "hopper", {"forward": tiles[0]})
        text = render(found.spec, plan, found.problem, (False,) * len(found.needs)).text
        named = any(re.search(rf"def {name}\([^)]*\bN\b", text) for name in ("attend", "load_tiles"))
        assert named == names_length(found.spec, found.problem, plan.tiled), (variant, kind, head, length)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90"])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("head", HEADS)
def test_shared_memory_everywhere(arch, name, head):
    """Every tile that the planner can propose, for many rows and for few."""
    *_, step, first = SPECS[name]
    seen, todo = set(), []
    for length in (512, 48):
        found = case(arch, name, head, length=length)
        for schedule, tiles in found.builds():
            new = {kernel: t for kernel, t in tiles.items() if (schedule, kernel, t) not in seen}
            seen |= {(schedule, *item) for item in new.items()}
            todo += [(found, schedule, new)] * bool(new)
    for found, schedule, tiles in todo[first::step] if len(todo) > step else todo:
        found.check(schedule, tiles)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["self", "gqa"])
@pytest.mark.parametrize("turn, variant", enumerate(ALL))
@pytest.mark.parametrize("head", [64, 80, 128])
def test_shared_memory_of_the_pair_everywhere(head, turn, variant, kind):
    """With and without lists, of lengths that tiles divide and others; gradients of tables alone, since those of other tensors may rule out the pair."""
    for listed, length in itertools.product((False, True) if ALL[variant].where else (False,), (512, 504)):
        check_pair(Case("sm_90", variant, kind, head, length, has_relative(spec_of(ALL[variant], kind)), listed), 2, turn)


@pytest.mark.slow
@pytest.mark.parametrize("turn, found", enumerate(FURTHER), ids=str)
def test_shared_memory_of_further_specs_everywhere(turn, found):
    for at, head in enumerate((found.head, *HEADS)):
        check_some(replace(found, head=head), 6, turn + at, ("triton",))


@pytest.mark.parametrize("batch, length, ordered, stored", [(64, 4096, False, True), (65, 4096, False, False), (512, 256, False, True), (8, 4096, True, True), (9, 4096, True, False)])
def test_copies_of_a_gradient_that_batch_indices_share(batch, length, ordered, stored):
    """Eight at most, or as many as take no more memory than q, k, v and dO; in a fixed order each batch index has its own."""
    torch.use_deterministic_algorithms(ordered)
    try:
        plan = make_plan(spec_of(MORE["shared_bias"]), problem("self", 64, "bfloat16", M=length, batch=batch), BY_ARCH["sm_90"], "backward")
    finally:
        torch.use_deterministic_algorithms(False)
    assert bool(plan.stored) == stored
