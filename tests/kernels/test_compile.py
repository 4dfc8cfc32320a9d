"""Generated kernels compile for GPUs that are not here, within the shared memory that the plan said and without spilling registers."""
from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from flashfx.bench.sweep import grid, job_needs
from flashfx.codegen import loops, philox, render
from flashfx.codegen.plan import make_plan, overridden
from flashfx.codegen.schedules import documents, hopper, one_tile
from flashfx.codegen.spilling import FEW
from flashfx.compat import interpreting
from flashfx.region import Problem
from flashfx.spec import EmptyRow

from ..thinning import thinned
from .cases import CORE, KINDS, MORE, problem, spec
from .test_families import FAMILIES, spec as family, tensors

pytest.importorskip("triton.backends.nvidia.compiler")
if interpreting():
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from .compiled import BY_ARCH, compile_all, compile_blocks  # noqa: E402

ALL = {**CORE, **MORE}


SAMPLE = [
    ("sm_80", "bfloat16", 64, "causal", "self"), ("sm_80", "float16", 128, "full", "gqa"), ("sm_80", "float32", 64, "causal", "self"),
    ("sm_80", "bfloat16", 80, "dropout", "self"), ("sm_80", "float16", 256, "causal", "self"),
    ("sm_80", "bfloat16", 72, "dropout", "gqa"), ("sm_80", "bfloat16", 32, "softcap", "gqa"), ("sm_86", "bfloat16", 96, "dropout", "gqa"), ("sm_100", "bfloat16", 80, "softcap", "self"),
    ("sm_86", "float16", 128, "causal", "self"), ("sm_86", "bfloat16", 64, "dropout", "self"), ("sm_86", "bfloat16", 256, "full", "self"),
    ("sm_89", "bfloat16", 64, "bias", "self"), ("sm_89", "float16", 80, "softcap", "self"),
    ("sm_90", "bfloat16", 64, "full", "self"), ("sm_90", "bfloat16", 128, "causal", "self"), ("sm_90", "float16", 128, "dropout", "self"),
    ("sm_90", "float16", 64, "dropout", "self"), ("sm_90", "bfloat16", 64, "causal", "self"), ("sm_90", "float16", 192, "window", "self"),
    ("sm_90", "bfloat16", 128, "additive_left_padding", "gqa"), ("sm_90", "bfloat16", 64, "documents", "self"), ("sm_90", "bfloat16", 96, "documents", "self"), ("sm_90", "bfloat16", 128, "alibi", "gqa"),
    ("sm_90", "bfloat16", 80, "causal", "gqa"), ("sm_90", "bfloat16", 256, "causal", "self"), ("sm_90", "bfloat16", 64, "padding", "self"),
    ("sm_90", "bfloat16", 128, "shared_bias", "self"), ("sm_90", "float32", 64, "full", "self"), ("sm_90", "bfloat16", 64, "softcap", "self"),
    ("sm_120", "bfloat16", 64, "padding", "self"), ("sm_120", "bfloat16", 128, "dropout", "gqa"),
    ("sm_80", "bfloat16", 64, "bool_mask", "self"),
    ("sm_90", "bfloat16", 128, "additive_mask", "self"), ("sm_90", "bfloat16", 64, "padded_bias", "self"), ("sm_80", "bfloat16", 64, "padded_bias", "gqa"), ("sm_90", "bfloat16", 128, "padded_bias", "self"),
    ("sm_80", "bfloat16", 64, "relative", "self"), ("sm_80", "float16", 128, "relative", "self"), ("sm_90", "bfloat16", 64, "relative", "gqa"),
    ("sm_90", "bfloat16", 128, "relative", "self"), ("sm_80", "float16", 64, "ended", "gqa"), ("sm_90", "bfloat16", 64, "ended", "self"),
    ("sm_90", "bfloat16", 128, "ended", "self"), ("sm_90", "bfloat16", 64, "ended", "gqa"),
    ("sm_100", "bfloat16", 128, "causal", "gqa"), ("sm_100", "float16", 64, "dropout", "self"),
    ("sm_90", "float32", 64, "t5_table", "self"), ("sm_90", "float32", 128, "causal", "self"), ("sm_80", "float32", 128, "padding", "gqa"), ("sm_90", "float32", 256, "causal", "gqa"),
    ("sm_90", "bfloat16", 40, "dropout", "gqa"), ("sm_90", "bfloat16", 256, "dropout", "gqa"), ("sm_90", "bfloat16", 256, "full", "gqa"),
]


@pytest.mark.parametrize("variant, kind, head, length", thinned(
    [(v, kind, *((64, 64), (32, 100), (128, 49), (16, 32), (64, 114), (40, 64))[n % 6]) for n, (v, kind) in enumerate(itertools.product(ALL, KINDS))], 19))
def test_one_tile_of_all_keys_builds(variant, kind, head, length):
    s, p = spec(ALL[variant], kind), problem(kind, head, "bfloat16", M=length, heads=4)
    if not one_tile.takes(s, p, BY_ARCH["sm_90"]):  # tables that end, of wide heads
        p = replace(p, D=64, Dv=64)
    with overridden(one_tile=one_tile.tiles(s, p)):
        reports = [(report, plan) for report, plan in compile_all(s, p, BY_ARCH["sm_90"], forward=False) if report.kernel in ("attention_backward", "attention_backward_at_once")]
    assert [report.spilled <= FEW for report, _ in reports] == [True] and reports[0][0].shared <= reports[0][1].shared, reports


@pytest.mark.parametrize("variant, kind, head, rows, keys", thinned(
    [(v, kind, *((64, 1024, 77), (40, 4096, 77), (128, 700, 50), (80, 1024, 77), (64, 2048, 32), (128, 1000, 128), (128, 128, 128))[n % 7]) for n, (v, kind) in enumerate(itertools.product(ALL, KINDS))], 19))
def test_rows_in_parts_and_tiles_of_many_elements_build(variant, kind, head, rows, keys):
    s, p = spec(ALL[variant], kind), problem(kind, head, "bfloat16", M=rows, N=keys, heads=4)
    if not one_tile.takes(s, p, BY_ARCH["sm_90"]) or make_plan(s, p, BY_ARCH["sm_90"], "backward").kernel != "one_tile":
        return  # sums beyond the ends of a table, tensors whose tiles have no room
    reports = [(report, plan) for report, plan in compile_all(s, p, BY_ARCH["sm_90"], forward=False) if report.kernel.startswith("attention_backward")]
    assert all(report.spilled <= FEW for report, _ in reports) and reports[0][0].shared <= reports[0][1].shared, reports


def builds(arch, dtype, head, variant, kind, M=1024, most=0):
    p = problem(kind, head, dtype, M=M, heads=4)
    for report, plan in compile_all(spec(ALL[variant], kind), p, BY_ARCH[arch]):
        if plan is not None:
            assert report.shared <= plan.shared <= BY_ARCH[arch].shared_per_block, report
        assert report.spilled <= most, report
        assert not (plan is not None and plan.schedule == "hopper" and report.serialised), report


@pytest.mark.parametrize("arch, dtype, head, variant, kind", thinned(SAMPLE, 11))
def test_builds_without_spilling(arch, dtype, head, variant, kind):
    builds(arch, dtype, head, variant, kind)


@pytest.mark.parametrize("arch, dtype, head, variant, M", thinned([
    ("sm_80", "bfloat16", 128, "full", 1), ("sm_86", "float16", 64, "padding", 5), ("sm_90", "bfloat16", 128, "full", 1),
    ("sm_90", "bfloat16", 64, "softcap", 5), ("sm_90", "float16", 80, "padding", 3), ("sm_90", "float16", 112, "full", 1),
    ("sm_90", "bfloat16", 256, "full", 16), ("sm_100", "bfloat16", 128, "bias", 2), ("sm_90", "float32", 64, "full", 1)]))
def test_heads_as_rows_of_a_tile_build_without_spilling(arch, dtype, head, variant, M):
    p = Problem((2, 3, 8), M, 4096, head, head, dtype, dtype)
    (report, plan), *_ = compile_all(spec(ALL[variant], "gqa"), p, BY_ARCH[arch], (False,) * 4)
    assert plan.packed == ("g",) and report.shared <= plan.shared <= BY_ARCH[arch].shared_per_block and not report.spilled, (report, plan)


@pytest.mark.parametrize("head, aligned, told", [(72, None, True), (72, False, False), (64, None, False), (76, None, False)])
def test_strides_are_said_to_be_multiples_of_16_bytes_only_where_they_are(head, aligned, told):
    """And only for heads of which Triton, which asks for multiples of 16 elements, does not see it."""
    s, p = spec(CORE["causal"]), problem("self", head, "bfloat16")
    plans = [make_plan(s, p, BY_ARCH["sm_80"], direction, aligned) for direction in ("forward", "backward")]
    assert ("stride_q_m // 8 * 8" in render.render(s, plans[0], p, None, plans[1]).text) == told


@pytest.mark.parametrize("arch, head, variant, kind", thinned([
    ("sm_90", 88, "shared_bias", "self"), ("sm_80", 88, "shared_bias", "gqa"), ("sm_80", 72, "transposed_bias", "gqa"), ("sm_90", 72, "padded_bias", "gqa"),
    ("sm_100", 104, "bias", "gqa"), ("sm_80", 88, "bias", "gqa"), ("sm_90", 120, "bias", "gqa"), ("sm_90", 160, "ended_dropout", "gqa"),
    ("sm_90", 40, "bias", "gqa"), ("sm_90", 144, "ended_causal", "gqa")]))
def test_heads_that_are_multiples_of_eight_build_without_spilling(arch, head, variant, kind):
    """Trained tensors, whose kernels go through batches: without 16 bytes at a time each element had an address in registers."""
    for report, plan in compile_all(spec(ALL[variant], kind), problem(kind, head, "bfloat16", M=1000, heads=4), BY_ARCH[arch]):
        assert not report.spilled and (plan is None or report.shared <= plan.shared), report


@pytest.mark.parametrize("arch, head, variant, kind", thinned([
    ("sm_80", 144, "causal", "gqa"), ("sm_80", 136, "bool_mask", "gqa"), ("sm_80", 160, "softcap", "gqa"), ("sm_80", 144, "dropout", "self"), ("sm_80", 160, "bias", "self"),
    ("sm_100", 160, "causal", "self"), ("sm_100", 144, "dropout", "gqa"), ("sm_100", 136, "documents", "self"), ("sm_100", 256, "mean_left_padding", "self"),
    ("sm_89", 160, "full", "gqa"), ("sm_120", 144, "padding", "self"), ("sm_90", 144, "full", "gqa"), ("sm_90", 144, "prefix", "gqa")], 13))
def test_wide_heads_of_uneven_pieces_build_without_spilling(arch, head, variant, kind):
    s, p = spec(ALL[variant], kind), problem(kind, head, "bfloat16", M=1000, heads=4)
    for report, plan in compile_all(s, p, BY_ARCH[arch], (True,) * 3 + (False,) * len(s.aux)):
        assert not report.spilled and (plan is None or report.shared <= plan.shared), report


@pytest.mark.parametrize("head, variant, kind", thinned([
    (128, "transposed_bias", "self"), (128, "padded_bias", "gqa"), (128, "additive_mask", "gqa"), (128, "softcap", "self"), (128, "softcap", "gqa"), (128, "dropout_padding", "gqa"),
    (128, "bias", "self"), (128, "bias", "gqa"), (128, "transposed_bias", "gqa"), (128, "relative", "gqa"), (128, "ended", "self"),
    (128, "documents", "gqa"), (128, "dropout", "self"), (128, "dropout", "gqa"), (128, "t5_table", "gqa"), (128, "padding", "self"),
    (128, "bool_mask", "gqa"), (128, "shared_bias", "self"), (128, "temperature", "self"), (128, "mean_left_padding", "self"), (128, "alibi", "self"),
    (128, "additive_left_padding", "self"), (96, "bias", "self"), (96, "dropout_padding", "self"), (64, "bias", "self"),
    (64, "causal", "self"), (64, "bool_mask", "self"), (256, "full", "self"), (256, "causal", "gqa"), (256, "documents", "gqa"), (256, "dropout", "self"),
    (256, "bool_mask", "self"), (256, "ended_dropout", "self"), (256, "softcap", "gqa"), (256, "bias", "self"), (192, "dropout_padding", "gqa"), (192, "t5_table", "self"),
    (160, "documents", "self"), (144, "causal", "gqa"), (208, "bias", "gqa")]))
def test_the_hopper_backward_does_not_spill(head, variant, kind):
    """The worst of all variants; captured tensors get no gradient, so that this schedule takes every one."""
    s, p = spec(ALL[variant], kind), problem(kind, head, "bfloat16", M=1024, heads=4)
    report, plan = hopper_kernel("attention_backward_keys", s, p, (True,) * 3 + (False,) * len(s.aux))
    assert report.shared <= plan.shared and not report.spilled and not report.serialised, report


def hopper_kernel(name, s, p, needs):
    """A kernel of the Hopper pair, compiled, and its plan."""
    with overridden(schedule="hopper"):
        report, plan = next(found for found in compile_all(s, p, BY_ARCH["sm_90"], needs, forward=name == "attention_forward") if found[0].kernel == name)
    assert plan.schedule == "hopper"
    return report, plan


@pytest.mark.parametrize("head, variant, kind", thinned([
    (64, "bool_mask", "self"), (128, "bool_mask", "self"), (128, "causal", "self"), (128, "documents", "self"), (64, "padding", "self"), (128, "lengths", "self"),
    (128, "alibi", "self"), (64, "bias", "self"), (128, "column_bias", "self"), (128, "two_reads", "self"), (64, "t5_table", "self"), (64, "ended", "gqa"),
    (64, "relative", "self"), (64, "ended_causal", "gqa"), (128, "ended_causal", "self"), (64, "ended_dropout", "self"), (128, "additive_mask", "self"), (64, "shared_bias", "gqa"),
    (256, "dropout_padding", "gqa"), (192, "documents", "gqa"), (40, "ended", "gqa"), (40, "ended_dropout", "self"), (256, "ended_dropout", "gqa")]))
def test_hopper_forwards_of_lengths_that_no_tile_divides_do_not_spill(head, variant, kind):
    s, p = spec(ALL[variant], kind), problem(kind, head, "bfloat16", M=1000, heads=4)
    report, plan = hopper_kernel("attention_forward", s, p, (False,) * (3 + len(s.aux)))
    assert report.shared <= plan.shared and not report.spilled and not report.serialised, report


@pytest.mark.parametrize("head, variant, kind", thinned([
    (128, "bool_mask", "self"), (128, "bool_mask", "gqa"), (128, "full", "self"), (128, "documents", "self"), (128, "t5_table", "self"),
    (128, "column_bias", "self"), (64, "causal", "self"), (64, "full", "self"), (64, "ended_dropout", "self"), (64, "ended_dropout", "gqa"),
    (64, "documents", "self"), (64, "dropout_padding", "self"), (64, "padded_bias", "gqa"), (64, "two_reads", "gqa"), (64, "global", "self"),
    (128, "padding", "gqa"), (128, "dropout_padding", "self"), (128, "dropout_padding", "gqa"), (128, "ended_dropout", "self"), (128, "padded_bias", "self"),
    (128, "padded_bias", "gqa"), (128, "two_reads", "gqa"), (128, "padded_softcap", "gqa"), (40, "column_bias", "self"), (40, "full", "gqa"), (40, "bias", "self"),
    (256, "causal", "self"), (256, "dropout_padding", "gqa"), (192, "full", "gqa"), (160, "two_reads", "self"), (256, "padding", "self")]))
def test_hopper_backwards_of_lengths_that_no_tile_divides_do_not_spill(head, variant, kind):
    s, p = spec(ALL[variant], kind), problem(kind, head, "bfloat16", M=1000, heads=4)
    report, plan = hopper_kernel("attention_backward_keys", s, p, (True,) * 3 + (False,) * len(s.aux))
    assert report.shared <= plan.shared and not report.spilled and not report.serialised, report


@pytest.mark.parametrize("head, variant, kind", thinned([
    (64, "ended", "self"), (64, "ended", "gqa"), (128, "ended", "gqa"), (64, "ended_dropout", "self"), (128, "ended_dropout", "self"), (128, "ended_dropout", "gqa"),
    (88, "ended_dropout", "gqa"), (96, "ended_dropout", "self"), (96, "ended", "gqa")]))
def test_gradients_of_tables_that_end_do_not_spill(head, variant, kind):
    s, p = spec(ALL[variant], kind), problem(kind, head, "bfloat16", M=1000, heads=4)
    report, plan = hopper_kernel("attention_backward_keys", s, p, None)
    assert report.shared <= plan.shared and not report.spilled and not report.serialised, report


@pytest.mark.parametrize("head, variant, kind", thinned([
    (64, "softcap", "self"), (64, "softcap", "gqa"), (40, "softcap", "self"), (64, "causal", "gqa"), (32, "window", "self"), (56, "band", "gqa")]))
def test_three_warpgroups_build(head, variant, kind):
    """Lengths that are no multiple of a tile too, and heads of several pieces."""
    s, p = spec(ALL[variant], kind), problem(kind, head, "bfloat16", M=1000, heads=4)
    assert hopper.takes_three(s)
    with overridden(schedule="hopper", forward=(192, 128, 12, 3)):
        report, plan = next(found for found in compile_all(s, p, BY_ARCH["sm_90"], (False,) * 3) if found[0].kernel == "attention_forward")
    assert plan.schedule == "hopper" and report.shared <= plan.shared and not report.spilled and not report.serialised, report


@pytest.mark.parametrize("head, variant, kind", thinned([
    (128, "documents", "self"), (128, "documents", "gqa"), (128, "padding", "self"), (128, "lengths", "gqa"), (128, "bool_mask", "self"),
    (128, "dilated", "self"), (64, "padding", "self"), (128, "alibi", "self"), (128, "bias", "gqa"), (64, "dropout", "self"), (96, "t5_table", "self"), (192, "dropout", "self"),
    (128, "additive_mask", "gqa"), (128, "dropout_padding", "self"), (96, "documents", "gqa"), (64, "documents", "self"), (128, "bool_mask", "gqa"),
    (128, "ended_causal", "self"), (256, "dropout_padding", "self")]))
def test_the_hopper_forward_does_not_spill(head, variant, kind):
    """Masks that read data or divide, and what takes weights ahead of their maximum."""
    s, p = spec(ALL[variant], kind), problem(kind, head, "bfloat16", M=1024, heads=4)
    with overridden(schedule="hopper"):
        found = compile_all(s, p, BY_ARCH["sm_90"], (False,) * (3 + len(s.aux)))
    report, plan = next((report, plan) for report, plan in found if report.kernel == "attention_forward")
    assert plan.schedule == "hopper" and not report.spilled and not report.serialised, report


@pytest.mark.parametrize("variant, head, values, length", thinned([("full", 192, 128, 4096), ("causal", 192, 128, 4096), ("padding", 192, 128, 512), ("full", 144, 80, 4000), ("full", 160, 128, 1000),
                                                                   ("alibi", 192, 128, 8192), ("full", 256, 128, 4096)], 3))
def test_the_hopper_forward_of_values_of_fewer_columns_does_not_spill(variant, head, values, length):
    """Heads above 128 with tiles of 128 keys, for which values of up to 128 leave registers."""
    s, p = spec(ALL[variant]), Problem((4, 4), length, length, head, values, "bfloat16", "bfloat16")
    with overridden(schedule="hopper"):
        report, plan = compile_all(s, p, BY_ARCH["sm_90"], (False,) * (3 + len(s.aux)))[0]
    assert report.kernel == "attention_forward" and report.shared <= plan.shared and not report.spilled and not report.serialised, report


@pytest.mark.parametrize("variant, kind, head, values, length", thinned([
    ("full", "self", 192, 192, 4096), ("causal", "gqa", 192, 128, 4096), ("softcap", "gqa", 192, 192, 1000), ("dropout", "self", 192, 192, 1000), ("dropout", "gqa", 192, 128, 4096),
    ("window", "self", 176, 192, 1000), ("full", "gqa", 128, 192, 1000), ("softcap", "self", 192, 64, 4096), ("alibi", "gqa", 192, 128, 1000), ("column_bias", "self", 192, 192, 1000),
    ("causal", "gqa", 144, 160, 4096), ("dropout", "self", 160, 160, 1000), ("softcap", "gqa", 136, 136, 1000)], 4))
def test_the_hopper_backward_by_thirds_does_not_spill(variant, kind, head, values, length):
    """More than 16 bytes, under dropout or of a soft cap."""
    s, p = spec(ALL[variant], kind), replace(problem(kind, head, "bfloat16", M=length, heads=4), Dv=values)
    report, plan = hopper_kernel("attention_backward_keys", s, p, (True,) * 3 + (False,) * len(s.aux))
    assert plan.by_thirds and report.shared <= plan.shared and report.spilled <= 16 and not report.serialised, report


@pytest.mark.parametrize("head, mask", thinned([(head, mask) for mask in ("causal pairs", "pairs") for head in (64, 96, 128)], 2))
def test_a_mask_read_for_every_query_and_key_does_not_spill_on_hopper(head, mask):
    """By itself and beside comparisons."""
    s, p = family(FAMILIES[mask]), problem("self", head, "bfloat16", M=4096, heads=4)
    with overridden(schedule="hopper"):
        found = compile_all(s, p, BY_ARCH["sm_90"], (True, True, True, False))
    assert [plan.schedule for _, plan in found if plan] == ["hopper"] * 2
    assert not any(report.spilled or report.serialised for report, _ in found), found


SWEEP = [(workload, p) for workload in grid() for p in workload.problems]


@pytest.mark.parametrize("arch, number", [pytest.param(arch, number, marks=() if (number + 9 * n) % every == 0 else pytest.mark.slow)
                                          for n, (arch, every) in enumerate((("sm_80", 81), ("sm_89", 81), ("sm_90", 27))) for number in range(len(SWEEP))])
def test_what_is_planned_for_the_sweep_does_not_spill(arch, number):
    """The workloads of `python -m flashfx bench tiles`, planned for their batches and heads, as kernels are built when they are first launched."""
    workload, p = SWEEP[number]
    small = replace(p, extents=(2, 3, 2)[: len(p.extents)])
    for report, plan in compile_all(workload.spec, small, BY_ARCH[arch], job_needs(workload), batches=p.extents):
        assert not report.spilled, report
        assert plan is None or report.instead or report.shared <= plan.shared <= BY_ARCH[arch].shared_per_block, report


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90"])
@pytest.mark.parametrize("head, variant, kind, M", thinned([(64, "causal", "gqa", 1024), (128, "padding", "self", 1000), (128, "full", "self", 1024), (112, "t5_table", "self", 1024),
                                                   (64, "dropout_padding", "self", 57)]))
def test_float32_where_tf32_is_allowed_builds(arch, head, variant, kind, M):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        builds(arch, "float32", head, variant, kind, M)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("head, variant, kind", thinned([(128, "causal", "self"), (128, "window", "gqa"), (64, "full", "self"), (64, "causal", "gqa"), (80, "bias", "self")], 2))
def test_an_ordered_backward_builds(head, variant, kind):
    torch.use_deterministic_algorithms(True)
    try:
        builds("sm_90", "bfloat16", head, variant, kind, most=4)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("head, variant", thinned([(128, "causal"), (64, "causal"), (128, "dropout"), (96, "alibi"), (128, "softcap"), (80, "causal"), (64, "prefix")], 3))
def test_a_backward_with_heads_in_turn_builds(head, variant):
    with overridden(schedule="hopper", turns=True):
        builds("sm_90", "bfloat16", head, variant, "gqa", most=16)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("dtype, head, variant, kind, M", thinned([
    ("bfloat16", 128, "full", "gqa", 1), ("float16", 64, "prefix", "self", 5), ("bfloat16", 80, "padding", "gqa", 1), ("bfloat16", 256, "full", "self", 1),
    ("bfloat16", 64, "dropout", "self", 512), ("float32", 64, "full", "self", 1), ("bfloat16", 128, "documents", "self", 64)]))
def test_keys_in_parts_build_without_spilling(arch, dtype, head, variant, kind, M):
    s, p = spec(ALL[variant], kind), problem(kind, head, dtype, M=M, N=16384, batch=1)
    with overridden(schedule="triton", parts=0):
        found = compile_all(s, p, BY_ARCH[arch], (False,) * (3 + len(s.aux)))
    assert [report.kernel for report, _ in found] == ["attention_forward", "attention_combine"]
    assert found[0][0].shared <= found[0][1].shared and not any(report.spilled for report, _ in found), found


PORTABLE_ON_HOPPER = [("bfloat16", 64, "full", "self"), ("bfloat16", 128, "causal", "self"), ("float16", 128, "dropout", "self"),
                      ("bfloat16", 80, "causal", "gqa"), ("bfloat16", 64, "padding", "self"), ("bfloat16", 64, "softcap", "self"),
                      # wide heads in pieces of which some are narrow
                      ("bfloat16", 160, "softcap", "gqa"), ("bfloat16", 176, "dropout", "gqa"), ("bfloat16", 224, "causal", "gqa")]


@pytest.mark.parametrize("dtype, head, variant, kind", thinned(PORTABLE_ON_HOPPER))
def test_the_portable_schedule_builds_for_hopper(dtype, head, variant, kind):
    with overridden(schedule="triton"):
        builds("sm_90", dtype, head, variant, kind)


@pytest.mark.parametrize("arch, variant, kind", [("sm_80", "bool_mask", "self"), ("sm_89", "bias", "self"), ("sm_80", "bias", "gqa")])
def test_tensors_are_read_element_by_element_without_spilling(arch, variant, kind):
    """Their rows are of no multiple of 16 elements."""
    builds(arch, "bfloat16", 128, variant, kind, 1000)


@pytest.mark.parametrize("head, variant, kind", thinned([
    (128, "bias", "self"), (128, "bool_mask", "self"), (64, "shared_bias", "gqa"), (128, "shared_bias", "gqa"), (256, "padding", "self"),
    (256, "full", "gqa")]))
def test_the_portable_schedule_builds_for_hopper_at_lengths_that_no_tile_divides(head, variant, kind):
    """Tensors are read across element by element, and what waits for the last tile needs shared memory."""
    with overridden(schedule="triton"):
        builds("sm_90", "bfloat16", head, variant, kind, 1000)


UNEVEN = [
    *(("sm_89", head, variant, "self") for head in (64, 128) for variant in ("full", "causal", "alibi", "lengths", "temperature", "sigmoid_gate", "documents")),
    ("sm_89", 128, "bool_mask", "gqa"), ("sm_89", 128, "padded_bias", "self"), ("sm_89", 64, "transposed_bias", "self"), ("sm_80", 64, "dilated", "self"),
    ("sm_80", 64, "column_bias", "gqa"), ("sm_80", 256, "padded_bias", "self"), ("sm_100", 128, "bool_mask", "self"),
    *((arch, 64, variant, "gqa") for arch in ("sm_80", "sm_90", "sm_100") for variant in ("relative_causal", "ended_dropout", "ended_causal")),
    ("sm_90", 128, "temperature", "gqa"), ("sm_90", 256, "column_bias", "self"), ("sm_90", 256, "bool_mask", "gqa"), ("sm_90", 256, "t5_table", "gqa"),
    ("sm_90", 40, "shared_bias", "self"), ("sm_90", 80, "shared_bias", "gqa"), ("sm_90", 40, "t5_table", "gqa"), ("sm_90", 64, "prefix", "self")]


@pytest.mark.parametrize("arch, head, variant, kind", thinned(UNEVEN, 11))
def test_the_portable_schedule_does_not_spill_at_lengths_that_no_tile_divides(arch, head, variant, kind):
    """The planned tiles of many of these would: they are compiled with more warps, or with half of the inner tile, where they spilled more than a few bytes (`spilling`)."""
    with overridden(schedule="triton"):
        found = compile_all(spec(ALL[variant], kind), problem(kind, head, "bfloat16", M=1000, heads=4), BY_ARCH[arch])
    assert all(report.spilled <= FEW for report, _ in found), found
    assert all(plan is None or report.shared <= (BY_ARCH[arch].shared_per_block if report.instead else plan.shared) for report, plan in found), found


BOOLS = {  # masks of bytes beside dropout: 64 rows of the mask, a vector, and beside a table whose kernels over keys have small tiles
    "pair": "given pair: bool[3]\nqk = q[b, h, i] . k[b, h, j]\nscore = qk * 0.125\nwhere pair[b, i, j]",
    "shared": "given pair: bool[3]\nqk = q[b, h, i] . k[h, j]\nscore = qk * 0.125\nwhere pair[b, i, j] & (j <= i)",
    "ends": "given pad: bool[2]\ngiven rel: float[2]\nqk = q[b, h, i] . k[b, h, j]\n"
            "score = qk * 0.125 + rel[h, minimum(maximum(j - i + M - 1, 10), M + 20)]\nwhere pad[b, j]",
    "documents": "given ids: int[2]\nqk = q[b, h, i] . k[b, h, j]\nscore = qk * 0.125\nwhere ids[b, i] == ids[b, j]",
}


DEEP = [("pair", 80, 57), ("shared", 80, 57), ("shared", 128, 1000), ("ends", 64, 37), ("ends", 128, 1024), ("documents", 80, 57)]


@pytest.mark.parametrize("name, head, M, arch", thinned((*point, arch) for point in DEEP for arch in ("sm_80", "sm_89", "sm_90", "sm_100")))
def test_products_are_as_deep_as_their_operands(name, head, M, arch):
    """Checked by `compile_all`."""
    s = f"attention[b, h, i, j]\n{BOOLS[name]}\nempty zero\ndrop 0.1\nout = softmax_j(score) . v[{'h' if name == 'shared' else 'b, h'}, j]"
    with overridden(schedule="triton"):
        found = compile_all(s, Problem((2, 4), M, M, head, head, "bfloat16", "bfloat16"), BY_ARCH[arch])
    assert not any(report.spilled for report, _ in found), found


def test_operands_that_are_too_wide_are_found(monkeypatch):
    """A kernel over keys with 16 rows, and random bits that are joined: gradients of k and v were off by 10 on an H200."""
    s = f"attention[b, h, i, j]\n{BOOLS['pair']}\nempty zero\ndrop 0.1\nout = softmax_j(score) . v[b, h, j]"
    joined = philox.KEEP_TILE.replace("tl.where(tl.arange(0, 2) == 0, tl.expand_dims(a, -1), tl.expand_dims(b, -1))", "tl.join(a, b)")
    monkeypatch.setattr(render, "KEEP_TILE", joined)
    with overridden(schedule="triton", keys=(16, 16, 4, 1), rows=(16, 32, 4, 1)):
        found = compile_all(s, Problem((2, 4), 57, 57, 80, 80, "bfloat16", "bfloat16"), BY_ARCH["sm_90"], wrong=True)
    assert {report.kernel: report.shallow for report, _ in found if report.kernel != "attention_forward"} == {
        "attention_delta": False, "attention_backward_rows": False, "attention_backward_keys": True}


def test_products_that_nothing_waits_for_are_found(monkeypatch):
    """Rows that average v, with copies ahead: outputs were off by hundreds on an H200 (stress seed 70051)."""
    monkeypatch.setattr(loops, "AT_ONCE", "num_stages=3")
    with overridden(schedule="triton", forward=(64, 32, 4, 3)), pytest.raises(AssertionError, match="outrun=True"):
        compile_all(spec(ALL["mean_left_padding"]), problem("self", 128, "float16", M=524), BY_ARCH["sm_90"], (False,) * 4)


@pytest.mark.parametrize("name", thinned(name for name, text in FAMILIES.items() if text != "True"))
def test_summaries_build_without_spilling(name):
    s, given = family(FAMILIES[name]), tensors(257, 300, 0)
    aux, sizes = [given[a.name] for a in s.mask().aux], [*(2 for _ in s.mask().axes), 257, 300]
    for mask in (s.mask(), replace(s.mask(), empty_row=EmptyRow.MEAN)):
        found = compile_blocks(mask, aux, sizes, BY_ARCH["sm_90"])
        assert [report.spilled for report in found] == [0] * (6 if documents.pairs(mask) else 3)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("dtype, head", [*(("bfloat16", d) for d in (32, 40, 64, 72, 80, 96, 128, 192, 256)), ("float32", 64), ("float32", 128)])
@pytest.mark.parametrize("variant, kind", [("full", "gqa"), ("causal", "self"), ("bias", "self"), ("dropout", "gqa"), ("softcap", "gqa"), ("padding", "self")])
def test_builds_everywhere(arch, dtype, head, variant, kind):
    builds(arch, dtype, head, variant, kind)
