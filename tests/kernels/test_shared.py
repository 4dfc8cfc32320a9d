"""Shared memory as predicted is what the compiler allocates: every schedule, tile and head size, on sm_80, sm_89 and sm_90, without a GPU."""
from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from flashfx.bench.sweep import Job, Workload, role, shape
from flashfx.codegen import limits
from flashfx.codegen.candidates import generated
from flashfx.codegen.load import load
from flashfx.codegen.plan import make_plan, overridden
from flashfx.codegen.render import render
from flashfx.codegen.schedules import hopper_memory
from flashfx.codegen.timing import Operands
from flashfx.compat import interpreting
from flashfx.region import Problem
from flashfx.spec import AttentionSpec

pytest.importorskip("triton.backends.nvidia.compiler")
if interpreting():
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import torch  # noqa: E402

from .compiled import BY_ARCH, shared_memory  # noqa: E402

HEADS = (16, 32, 64, 80, 96, 128, 160, 192, 256)
EVERY = [(m, n, warps, stages) for m, n in itertools.product((16, 32, 64, 128), repeat=2) for warps in (4, 8) for stages in (2, 3)]


def tiles_of(schedule: str, kernel: str, workload: Workload, gpu) -> list:
    """Tiles of a kernel that fit. On Hopper what the planner looks at, elsewhere, where it looks at few, every tile."""
    spec, p = workload.spec, workload.problems[0]
    if schedule == "hopper":
        tiles = generated("hopper", kernel, spec, p, gpu)
        return [t for t in tiles if hopper_memory.shared_bytes(kernel, spec, p, t[0], t[1], t[3], captured(spec)) <= gpu.shared_per_block]
    if gpu.is_hopper:
        tiles = [t for t in generated("triton", kernel, spec, p, gpu) if t[kernel == "keys"] >= 64 or p.D <= 128]  # few rows of long heads: an upper bound
    else:
        tiles = [t for t in EVERY if not (kernel == "keys" and t[0] == 128 and t[2] == 4 or t[kernel != "keys"] == 16 or t[kernel == "keys"] == 16)]
    return [t for t in tiles if limits.shared_bytes(kernel, t, p, spec, gpu) <= gpu.shared_per_block
            and limits.registers_per_thread(kernel, t, p, spec) <= 255]


def captured(spec) -> tuple[str, ...]:
    return tuple(a.name for a in spec.aux if a.name == "bias")


def check(arch: str, variant: str, grouped: bool, head: int, some: int = 0, length: int = 512) -> None:
    """Every tile of every kernel, or `some` of them."""
    gpu, workload = BY_ARCH[arch], Workload(variant, grouped, (replace(shape(512, head, grouped, "bfloat16"), M=length, N=length),))
    spec, p = workload.spec, workload.problems[0]
    for schedule in ("triton", "hopper") if gpu.is_hopper else ("triton",):
        offers = {kernel: tiles_of(schedule, kernel, workload, gpu) for kernel in (("forward", "keys", "rows") if schedule == "triton" else ("forward", "keys"))}
        jobs = [Job(workload, "forward", schedule, (("forward", t),), gpu) for t in offers["forward"]]
        backward = {k: ts for k, ts in offers.items() if k != "forward"}
        for n in range(max(map(len, backward.values())) if all(backward.values()) else 0):
            jobs.append(Job(workload, "backward", schedule, tuple((k, ts[n % len(ts)]) for k, ts in backward.items()), gpu))
        for job in jobs[:: max(1, len(jobs) // some)] if some else jobs:
            if job.module is None:  # the schedule does not take it
                continue
            arguments = Operands(spec, p, torch.device("cpu"))
            found = shared_memory(lambda: arguments.call(job.module, job.direction), job.module, gpu)
            for name, size in found.items():
                kernel = {"one_pass": "keys"}.get(role(job, name), role(job, name))
                if kernel not in dict(job.tiles) or name in ("attention_reset", "attention_delta"):
                    continue
                t = dict(job.tiles)[kernel]
                predicted = hopper_memory.shared_bytes(kernel, spec, p, t[0], t[1], t[3], captured(spec)) if schedule == "hopper" else \
                    limits.shared_bytes(kernel, t, p, spec, gpu)
                assert size == predicted, (str(job), kernel, size, predicted)


@pytest.mark.parametrize("arch, variant, grouped, head", [
    ("sm_80", "causal", False, 64), ("sm_80", "full", True, 128), ("sm_89", "causal", True, 80), ("sm_90", "full", False, 64), ("sm_90", "causal", False, 128),
    ("sm_90", "full", True, 96), ("sm_90", "bias", False, 64), ("sm_90", "dropout", False, 64), ("sm_80", "bias", False, 64),
    ("sm_89", "dropout", False, 32)])
def test_shared_memory_is_the_compilers(arch, variant, grouped, head):
    check(arch, variant, grouped, head, some=4)


SPECS = {  # what a spec is made of -> (axes of q, axes of k, captured tensor, score, mask)
    "two": ("b, h", "b, h", "", "qk", ""), "upper": ("b, h", "b, h", "", "qk", "i <= j"), "three": ("b, h, g", "b, h", "", "qk", "j <= i"),
    "one": ("b", "b", "", "qk", ""),
    "bias": ("b, h", "b, h", "t: float[3]", "qk + t[h, i, j]", ""), "by head": ("b, h", "b, h", "t: float[2]", "qk + t[b, h]", "j <= i")}


@pytest.mark.parametrize("kind, extents, length, head, v_head, trained", [
    ("two", (1, 1), 512, 128, 128, False), ("two", (3, 5), 500, 64, 64, False), ("upper", (1, 3), 512, 64, 32, False),
    ("three", (3, 1, 5), 512, 72, 72, False),
    ("one", (7,), 500, 128, 64, False), ("bias", (2, 5), 512, 64, 64, True), ("by head", (2, 5), 512, 64, 64, False)])
def test_what_partitions_are_handed(kind, extents, length, head, v_head, trained):
    """Extents of 1, lengths that are no multiples of tiles, unequal head sizes, stored gradients: partitions of the Hopper pair are handed more or less."""
    q, k, given, score, where = SPECS[kind]
    lines = [f"attention[{q}, i, j]", *([f"  given   {given}"] if given else []), f"  qk = q[{q}, i] . k[{k}, j]", f"  score = {score}"]
    spec = AttentionSpec.parse("\n".join([*lines, *([f"  where {where}", "  empty nan"] if where else []), f"  out = softmax_j(score) . v[{k}, j]"]))
    gpu, p = BY_ARCH["sm_90"], Problem(extents, length, length, head, v_head, "bfloat16", "bfloat16")
    needs = (True, True, True, *(trained for _ in spec.aux))
    with overridden(schedule="hopper"):
        plans = {d: make_plan(spec, p, gpu, d, listed=False, needs=needs) for d in ("forward", "backward")}
    module, arguments = load(render(spec, plans["forward"], p, needs, plans["backward"]).text), Operands(spec, p, torch.device("cpu"))
    assert bool(plans["backward"].stored) == trained
    for direction, plan in plans.items():
        found = shared_memory(lambda: arguments.call(module, direction), module, gpu)
        name = "attention_forward" if direction == "forward" else "attention_backward_keys"
        assert plan.schedule == "hopper" and found[name] == plan.shared, (direction, found, plan.shared)


@pytest.mark.parametrize("variant", ["full", "causal"])
def test_shared_memory_of_few_rows(variant):
    """Tiles of 16 and 32 rows, on Hopper by the older instruction."""
    check("sm_90", variant, False, 64, some=6, length=48)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90"])
@pytest.mark.parametrize("variant, grouped", [("full", False), ("causal", False), ("full", True), ("causal", True), ("window", False), ("dropout", False), ("softcap", False),
                                              ("alibi", False), ("bias", False), ("trained", False)])
@pytest.mark.parametrize("head", HEADS)
def test_shared_memory_everywhere(arch, variant, grouped, head):
    check(arch, variant, grouped, head)
