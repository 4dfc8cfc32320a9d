"""Hopper's warp-specialised kernels in `gluon_simulator`; `test_simulator.py` runs this file in a process where Triton's interpreter is on."""
from __future__ import annotations

import itertools
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flashfx import op
from flashfx.codegen import calls, gpu, launch, triton_host
from flashfx.codegen.gpu import BY_NAME
from flashfx.codegen.plan import make_plan, overridden
from flashfx.codegen.schedules import hopper
from flashfx.codegen.selfcheck import inputs

from ..thinning import thinned
from . import gluon_dialect, gluon_simulator
from .cases import CORE, IDS, KINDS, MORE, PAST, Variant, problem, soft_capped, spec
from .gluon_simulator import Deadlock, Race
from .random_spec import draw
from .run import rising, run

CARD = replace(BY_NAME["H200"], sms=3)
"""Few multiprocessors, so that each program takes several tiles."""
DTYPES = ("float16", "bfloat16")
EVERY = {**CORE, **MORE}
POINTS = [(v, kind, DTYPES[n % 2], (128, 64, 80, 40, 96)[n % 5], (37, 320, 193)[n // 5 % 3]) for n, (v, kind) in enumerate(itertools.product(EVERY, KINDS))]


@pytest.fixture(autouse=True)
def simulated(monkeypatch):
    """A Hopper card whose kernels the simulator runs."""
    monkeypatch.setattr(gpu, "current", lambda device=None: CARD)
    monkeypatch.setattr(hopper, "interpreting", lambda: False)
    monkeypatch.setattr(triton_host, "load", gluon_dialect.load)
    monkeypatch.setattr(triton_host, "_MODULES", {})
    monkeypatch.setattr(calls, "CALLS", {})
    monkeypatch.setattr(gluon_simulator, "SEED", [0])
    with overridden(schedule="hopper"):
        yield


def check(variant: str, kind: str, dtype: str, head: int, length: int, **options) -> None:
    s, p = spec(EVERY[variant], kind), problem(kind, head, dtype, **{"M": length, "batch": 1 if length > 200 else 2} | options.pop("shape", {}))
    assert make_plan(s, p, CARD, "forward").schedule == "hopper"
    gluon_simulator.SEED[0] = head + length
    run(s, p, **{"gradients": make_plan(s, p, CARD, "backward").schedule == "hopper"} | options).within_budget()  # the portable backward has tests of its own


@pytest.mark.parametrize("variant, kind, dtype, head, length", thinned(POINTS, 23))
def test_cases(variant, kind, dtype, head, length):
    check(variant, kind, dtype, head, length)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_cases_of_random_specs(seed):
    s, p = draw(seed)
    if "hopper" not in [make_plan(s, p, CARD, direction).schedule for direction in ("forward", "backward")]:
        pytest.skip("another schedule takes it")
    run(s, p).within_budget()


@pytest.mark.parametrize("variant, kind, head, length", thinned([("bias", "self", 64, 328), ("bias", "gqa", 128, 256), ("padded_bias", "self", 128, 256),
                                                         ("shared_bias", "gqa", 64, 256), ("transposed_bias", "cross", 80, 328), ("scaled_bias", "self", 128, 256),
                                                         ("scaled_shared_bias", "gqa", 64, 328), ("scaled_bias", "gqa", 80, 328), ("two_biases", "self", 64, 256),
                                                         ("two_shared_biases", "gqa", 64, 328)], 4))
def test_rest_of_captured_tensors_by_tma(variant, kind, head, length):
    check(variant, kind, "bfloat16", head, length)


LISTED = [name for name in EVERY if spec(EVERY[name]).is_data_masked] + ["global"]


@pytest.mark.parametrize("variant, width, stored", thinned([("bias", 257, True), ("scaled_bias", 511, True), ("additive_mask", 257, True), ("bias", 256, True), ("alibi", 257, False)], 2))
def test_rest_of_rows_at_odd_strides(variant, width, stored):
    """As views leave them that shift rows by one another: the backward reads a copy, and stores the gradient."""
    s, p = spec(EVERY[variant], "self"), problem("self", 64, "bfloat16", M=256, batch=1)
    q, k, v, aux, seed, sizes = inputs(s, p)
    if stored:
        aux = [torch.empty(*aux[0].shape[:-1], width, dtype=aux[0].dtype)[..., : p.N].copy_(aux[0])]
    check(variant, "self", "bfloat16", 64, 256, operands=(q, k, v, aux, seed, sizes))
    texts = [Path(module.__file__).read_text() for module in triton_host._MODULES.values()]
    assert any("Captured_tiles" in text for text in texts) == stored


MASKS = {"one": "keep[b, 0, i, j]", "causal": "(j <= i) & keep[b, 0, i, j]", "across": "keep[b, 0, j, i]", "negated": "~keep[b, 0, i, j]", "either": "keep[b, h, i, j] | (j <= i)"}


@pytest.mark.parametrize("mask, kind, head, filled", thinned([("one", "self", 64, 0.5), ("causal", "gqa", 128, 0.5), ("across", "self", 128, 0.9), ("negated", "gqa", 64, "blocks"),
                                                      ("either", "self", 64, "blocks"), ("one", "gqa", 192, "blocks")], 3))
def test_rest_of_masks_by_tma(mask, kind, head, filled):
    """Of a buffer that is larger, with True behind the queries and keys. "blocks": whole tiles are visible, others hidden; nothing is copied for them."""
    s, p = spec(Variant(("keep: bool[4]",), where=MASKS[mask], empty="zero"), kind), problem(kind, head, "bfloat16", M=272, N=272, batch=1)
    q, k, v, (keep,), seed, sizes = inputs(s, p)
    whole = torch.rand(*keep.shape[:2], 320, 336, generator=torch.Generator().manual_seed(head)) < (0.5 if filled == "blocks" else filled)
    if filled == "blocks":
        whole[..., :128, 128:], whole[..., 128:, :256] = mask == "negated", mask != "negated"
    whole[..., 272:], whole[..., 272:, :] = True, True
    run(s, p, operands=(q, k, v, [whole[..., :272, :272]], seed, sizes), listed=filled == "blocks").within_budget()
    assert all("visible_0_ring" in Path(module.__file__).read_text() for module in triton_host._MODULES.values())


@pytest.mark.parametrize("variant, head", thinned([(v, (64, 128)[n % 2]) for n, v in enumerate(LISTED)] + [("documents", 128), ("documents", 80)], 7))
def test_rest_of_lists(variant, head):
    check(variant, "self", "bfloat16", head, 300, listed=True)


@pytest.mark.parametrize("variant, kind, head", thinned([("ended_dropout", "self", 88), ("ended", "gqa", 40)], 2))
def test_rest_of_heads_in_pieces(variant, kind, head):
    check(variant, kind, "bfloat16", head, 193)


@pytest.mark.parametrize("kind, head", [("self", 128), ("gqa", 64)])
def test_rest_of_rows_that_average_and_keep_the_slopes_of_their_scores(kind, head):
    check("padded_softcap", kind, "float16", head, 37)


@pytest.mark.parametrize("variant, head, most", thinned([("full", 64, 24.0), ("causal", 128, 6.0), ("padding", 128, 24.0), ("window", 64, 6.0), ("softcap", 160, 24.0), ("softcap", 64, 24.0), ("padded_softcap", 64, 24.0), ("dropout", 128, 6.0)], 4))
def test_rest_of_maxima_that_rise(variant, head, most):
    s, p = spec(EVERY[variant], "self"), problem("self", head, "bfloat16", M=700, batch=1)
    check(variant, "self", "bfloat16", head, 700, operands=rising(inputs(s, p), most))


@pytest.mark.parametrize("variant, most", [("full", 24.0), ("causal", 6.0)])
def test_rest_of_maxima_that_rise_for_three_warpgroups(variant, most):
    s, p = spec(EVERY[variant], "self"), problem("self", 64, "bfloat16", M=450, batch=1)
    with overridden(forward=(192, 128, 12, 2), schedule="hopper"):
        check(variant, "self", "bfloat16", 64, 450, operands=rising(inputs(s, p), most))


@pytest.mark.parametrize("variant, kind, head, shape", [("shared_bias", "self", 64, {"batch": 5, "heads": 3}), ("scaled_shared_bias", "gqa", 128, {"batch": 5})])
def test_rest_of_tiles_that_batches_share(variant, kind, head, shape):
    """Each batch index once, in an order of its own. Five add to the same gradient; of ten, which are no first axes, eight and two."""
    check(variant, kind, "bfloat16", head, 160, shape=shape)
    assert any("reduce_add(Captured_tiles" in Path(module.__file__).read_text() for module in triton_host._MODULES.values())


@pytest.mark.parametrize("variant, kind, head", thinned([("dropout", "self", 112), ("bias", "gqa", 104), ("documents", "self", 112), ("causal", "gqa", 176), ("alibi", "gqa", 208)], 4))
def test_rest_of_heads_that_are_padded(variant, kind, head):
    check(variant, kind, "bfloat16", head, 200)


@pytest.mark.parametrize("head, value_head", thinned([(192, 128), (64, 128), (96, 40), (112, 80)], 2))
def test_rest_of_value_heads(head, value_head):
    check("causal", "gqa", "bfloat16", head, 200, shape={"Dv": value_head})


@pytest.mark.parametrize("variant, kind, head, value_head, length", thinned([
    ("causal", "gqa", 192, 128, 193), ("full", "self", 192, 192, 193), ("dropout", "gqa", 192, 128, 130), ("softcap", "self", 192, 64, 97), ("window", "self", 176, 192, 300),
    ("full", "gqa", 64, 192, 130), ("prefix", "gqa", 192, 128, 200), ("band", "self", 192, 192, 130), ("causal", "gqa", 160, 160, 193), ("full", "self", 144, 160, 130),
    ("dropout", "gqa", 136, 128, 200)], 3))
def test_rest_of_heads_by_thirds(variant, kind, head, value_head, length):
    assert make_plan(spec(EVERY[variant], kind), problem(kind, head, "bfloat16", M=length, Dv=value_head), CARD, "backward").by_thirds
    check(variant, kind, "bfloat16", head, length, shape={"Dv": value_head})


@pytest.mark.parametrize("variant, kind, head, value_head, length", thinned([
    ("full", "self", 256, 256, 193), ("causal", "gqa", 192, 192, 200), ("dropout", "self", 256, 256, 200), ("padded_bias", "self", 160, 160, 193),
    ("documents", "gqa", 256, 128, 320), ("shared_bias", "gqa", 208, 208, 256), ("ended_dropout", "gqa", 192, 256, 200), ("mean_left_padding", "self", 256, 256, 130)], 4))
def test_rest_of_wide_heads(variant, kind, head, value_head, length):
    """Two warpgroups share the columns; one tile of dO where both heads are 256, and dQ in halves."""
    check(variant, kind, ("bfloat16", "float16")[length % 2], head, length, shape={"Dv": value_head})


@pytest.mark.parametrize("variant, kind, head", thinned([("full", "self", 64), ("causal", "gqa", 128), ("window", "self", 64), ("shared_bias", "self", 128),
                                                 ("dropout", "gqa", 64), ("prefix", "self", 128), ("causal", "self", 256), ("full", "gqa", 192)], 4))
def test_rest_of_ordered(variant, kind, head):
    torch.use_deterministic_algorithms(True)
    try:
        assert make_plan(spec(EVERY[variant], kind), problem(kind, head, "bfloat16", M=320), CARD, "backward").ordered
        check(variant, kind, "bfloat16", head, 320)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("ordered", thinned([False, True]))
def test_rest_of_gradients_that_leave_while_the_next_tile_begins(ordered):
    """dK leaves by the place of dQ, and the next tile's first step must await that."""
    s, p = spec(EVERY["full"]), problem("self", 128, "bfloat16", M=40, N=1400, batch=1, heads=2)
    torch.use_deterministic_algorithms(ordered)
    try:
        for seed in range(6):
            gluon_simulator.SEED[0] = seed
            run(s, p).within_budget()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("variant, head", thinned([("full", 64), ("causal", 128), ("window", 64), ("full", 128)], 2))
def test_rest_of_one_tile(variant, head):
    """One tile of keys in all: the program that takes it learns at once that none is left."""
    check(variant, "self", "bfloat16", head, 100, shape={"batch": 1, "heads": 1})


@pytest.mark.parametrize("variant, kind, head, ordered", thinned(((*point, ordered) for ordered in (False, True) for point in (
    ("causal", "self", 64), ("causal", "gqa", 128), ("window", "gqa", 64), ("full", "self", 128))), 5))
def test_rest_of_many_tiles(variant, kind, head, ordered):
    """Many to each program: rings and phases go round often, and the counter is as it was for the next call."""
    torch.use_deterministic_algorithms(ordered)
    try:
        check(variant, kind, "bfloat16", head, 280, shape={"batch": 2, "heads": 3})
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("variant, head, length, listed", thinned([("causal", 64, 320, False), ("causal", 128, 460, False), ("window", 64, 320, False), ("alibi", 128, 320, False),
                                                           ("dropout", 128, 300, False), ("dropout", 64, 300, False), ("bias", 64, 320, False), ("softcap", 96, 320, False),
                                                           ("documents", 64, 460, True), ("ended_causal", 64, 320, False), ("mean_left_padding", 128, 320, True)], 7))
def test_rest_of_heads_in_turn(variant, head, length, listed):
    """Whether that pays or not: rows of a tile of keys from the last to the first and, of the program's next one, from the first to the last."""
    with overridden(schedule="hopper", turns=True):
        check(variant, "gqa", "bfloat16", head, length, listed=listed)


@pytest.mark.parametrize("where, head, length", thinned([(w, (64, 64, 40)[n % 3], (320, 460, 193)[n % 3]) for n, w in enumerate(PAST)], 2))
def test_rest_of_halves_that_go_past_rows(where, head, length):
    """Rows that see no key of one half of a tile: the first ones, the last ones, or those that the mask's list has first."""
    run(soft_capped(where), problem("self", head, "bfloat16", M=length, batch=1), listed="pad" in where).within_budget()
    texts = "".join(Path(module.__file__).read_text() for module in triton_host._MODULES.values())
    assert ", ".join(name for name in ("front", "back") if f", {name})\n" in texts) == PAST[where]


@pytest.mark.parametrize("hidden, head", thinned(itertools.product(["keys", "rows", "all"], [64, 128]), 5))
def test_rest_of_empty_lists(hidden, head):
    """Tiles of keys that no row sees, and rows that see none."""
    s, p = spec(EVERY["bool_mask"]), problem("self", head, "bfloat16", M=400, batch=1)
    operands = inputs(s, p)
    keep, = operands[3]
    keep[{"keys": (..., slice(128, 256)), "rows": (..., slice(128, 256), slice(None)), "all": ...}[hidden]] = False
    run(s, p, operands=operands, listed=True).within_budget()


@pytest.mark.parametrize("head, kind, empty", thinned([(64, "self", "mean"), (64, "gqa", "mean, additive"), (128, "self", "mean, additive over j <= i"), (128, "gqa", "mean"),
                                               (80, "gqa", "mean over j < 200")], 3))
def test_rest_of_listed_empty_rows(head, kind, empty):
    """Rows that average v, in blocks of their own and beside others: gradients of all keys pass through them."""
    s, p = spec(replace(EVERY["mean_left_padding"], empty=empty), kind), problem(kind, head, "bfloat16", M=330, batch=2)
    q, k, v, (pad,), seed, sizes = inputs(s, p)
    pad[:] = torch.arange(330) >= torch.tensor([[150], [0]])
    run(s, p, operands=(q, k, v, [pad], seed, sizes), listed=True).within_budget()


@pytest.mark.parametrize("ids", thinned(IDS, 3))
def test_rest_of_ids(ids):
    s, p = spec(EVERY["documents"]), problem("self", 64, "bfloat16", M=300, batch=1)
    q, k, v, (doc,), seed, sizes = inputs(s, p)
    run(s, p, operands=(q, k, v, [IDS[ids](torch.arange(300)).expand(doc.shape[0], -1)], seed, sizes), listed=True).within_budget()


@pytest.mark.parametrize("seed", thinned(range(3)))
def test_rest_of_schedules(seed):
    """The same bits whoever goes first, but for dQ, which is a sum in no fixed order."""
    s, p = spec(EVERY["causal"]), problem("self", 64, "bfloat16", M=320, batch=1)
    q, k, v, aux, dropout, sizes = inputs(s, p)
    found = []
    for number in (0, seed + 1):
        gluon_simulator.SEED[0] = number
        out, lse = triton_host.run_forward(s, q, k, v, aux, dropout, sizes)
        found.append([out, lse, *triton_host.run_backward(s, out, q, k, v, aux, dropout, out, lse, sizes, [True] * 3)])
    for n, (a, b) in enumerate(zip(*found)):
        assert torch.equal(a, b) or n == 2 and torch.allclose(a, b, rtol=1e-2, atol=1e-2)


BROKEN = {  # a line of the kernels at head size 64, how it is broken, and which line it is, of those like it
    r"mbarrier\.wait\(q_full\.index\(q_slot\), turn // 2 & 1\)$": "pass",
    r"mbarrier\.wait\(k_full\.index\(slot\), tile // STAGES & 1\)$": "pass",
    r"mbarrier\.wait\(v_full\.index\(previous\), previous_phase\)$": "pass",
    r"mbarrier\.wait\(k_empty\.index\(slot\), phase \^ 1\)$": "pass",
    r"mbarrier\.arrive\(v_empty\.index\(previous\), count=1\)$": "pass",
    r"acc = warpgroup_mma_wait\(0, \[next_acc\]\)$": "acc = warpgroup_mma_wait(1, [next_acc])",
    r"mbarrier\.wait\(do_full\.index\(slot\), phase\)$": "pass",
    r"dk = warpgroup_mma_wait\(0, \[next_dk\]\)$": "dk = warpgroup_mma_wait(1, [next_dk])",
    r"mbarrier\.wait\(ds_full\.index\(slot\), phase\)$": "pass",
    r"mbarrier\.wait\(ds_empty\.index\(slot\), phase \^ 1\)$": "pass",
    r"fence_async_shared\(\)$": "pass",
    r"mbarrier\.wait\(kv_full\.index\(kv\), nth >> 1 & 1\)$": "pass",
    r"mbarrier\.wait\(kv_empty\.index\(kv\), \(nth >> 1 & 1\) \^ 1\)$": "pass",
    r"mbarrier\.arrive\(kv_empty\.index\(kv\), count=1\)  # their place is free$": "pass",
    r"mbarrier\.wait\(kv_done\.index\(kv\), nth >> 1 & 1\)$": "pass",
    r"mbarrier\.arrive\(kv_done\.index\(kv\), count=1\)$": "pass",
    r"tma\.store_wait\(0\)  # dV and dK have left$": "pass",
    r"mbarrier\.wait\(ds_empty\.index\(slot\), phase\)  # dQ has read the keys.*$": "pass",
    r"tell\(keys_told, kv \* 6, ": "tell(keys_told, kv, ",
    r"tell\(told_ring, q_slot \* 6 \+ 3, ": "tell(told_ring, 3, ",
    r"tell\(told_ring, q_slot \* 6, -1\)$": "pass",
    r"ds_tile\.index\(slot \* 2 \+ PART\)\.store\(ds\)\n +fence_async_shared\(\)$": "ds_tile.index(slot * 2 + PART).store(ds)",
    r"(.*)rows_told, step, (.*)$": r"\2rows_told, slot, \3",
    r"mbarrier\.wait\(ds_full\.index\(freeing\), freeing_phase \^ 1\)$": "pass",
}

BROKEN_LONG = {  # at head size 128, where one place holds the keys and gradients leave by that of dQ
    r"await_rows\(slot\)$": "pass",
    r"leave_rows\(slot\)$": "pass",
    r"hand_dq\(\)$": "pass",
    r"hand_dq\(\)  # no step is left$": "pass",
    r"await_dq\(\)$": "pass",
    r"free_place_of_dq\(\)$": "pass",
    r"await_place_of_dq\(\)$": "pass",
    r"tma\.store_wait\(0\)  # it has left its place$": "pass",
    r"mbarrier\.arrive\(kv_empty\.index\(0\), count=1\)  # the keys and values have been read$": "pass",
    r"mbarrier\.wait\(kv_empty\.index\(kv\), \(nth & 1\) \^ 1\)$": "pass",
    r"tma\.store_wait\(0\)  # dV has left its place$": "pass",
    r"tma\.store_wait\(0\)  # dK of the tile before has left the place of dQ$": "pass",
}

BROKEN_WIDE = {  # at 256, where dQ goes in halves and there is one tile of dO
    r"mbarrier\.wait\(do_empty\.index\(0\), at & 1 \^ 1\)$": "pass",
    r"mbarrier\.arrive\(do_empty\.index\(0\), count=1\)$": "pass",
    r"tma\.store_wait\(0\)  # the half before has left its place$": "pass",
    r"mbarrier\.arrive\(rows_empty\.index\(slot\), count=1\)$": "pass",
}

BROKEN_THIRDS = {  # at 192, by three warpgroups with a third of the keys each
    r"meet\(\)\n +own_do": "own_do",
    r"meet\(\)\n +mbarrier": "mbarrier",
    r"dv, dv_rest = warpgroup_mma_wait\(0, (.*)$": r"dv, dv_rest = warpgroup_mma_wait(2, \2",
    r"dk, dk_rest = warpgroup_mma_wait\(0, (.*)$": r"dk, dk_rest = warpgroup_mma_wait(2, \2",
    r"tma\.store_wait\(0\)  # dQ of the step before has left its place$": "pass",
    r"mbarrier\.arrive\(do_empty\.index\(0\), count=1\)$": "pass",
    r"mbarrier\.wait\(do_empty\.index\(0\), at & 1 \^ 1\)$": "pass",
    r"mbarrier\.arrive\(rows_empty\.index\(slot\), count=1\)$": "pass",
    r"mbarrier\.wait\(kv_empty\.index\(kv\), \(nth & 1\) \^ 1\)$": "pass",
}

BROKEN_PAST = {  # where halves go past rows
    r"ds_tile\.index\(slot \* 2 \+ PART\)\.store\(zeros\.to\(Q_tiles\.dtype\)\)$": "pass",
    r"front = gl\.minimum\(.*\).*$": "front = count",
    r"for at in range\(before \+ front \* PART, end\):$": "for at in range(before, end):",
}

BROKEN_TURNS = {  # of three warpgroups that issue products in turn
    r"await_turn\(WARPGROUP\)$": "pass",
    r"pass_turn\(WARPGROUP, 3\)$": "pass",
}

BROKEN_APART = {  # there, where a warp of its own copies the keys
    r"mbarrier\.wait\(kv_told\.index\(kv\), nth & 1\)$": "pass",
    r"mbarrier\.arrive\(kv_told\.index\(kv\), count=1\)$": "pass",
    r"mbarrier\.arrive\(kv_full\.index\(kv\), count=2\)  # no tile is left$": "pass",
    r"mbarrier\.wait\(kv_empty\.index\(kv\), \(nth & 1\) \^ 1\)$": "pass",
}


@pytest.mark.parametrize("head, variant, line", thinned([*((64, "causal", line) for line in BROKEN), *((128, "causal", line) for line in BROKEN_LONG),
                                                 *((128, "padded_bias", line) for line in BROKEN_APART),
                                                 *((64, "softcap", line) for line in BROKEN_PAST),
                                                 *((256, "causal", line) for line in BROKEN_WIDE), *((192, "causal", line) for line in BROKEN_THIRDS), *((40, "causal", line) for line in BROKEN_TURNS)], 7))
def test_rest_of_errors_that_are_found(head, variant, line, monkeypatch):
    """Each of these lines is needed, and the simulator tells what its loss does: it is what stands for the races of a card."""
    broken = []

    def load(text):
        changed, number = re.subn(rf"(?m)^( +){line}", rf"\1{(BROKEN | BROKEN_PAST | BROKEN_THIRDS | BROKEN_LONG | BROKEN_APART | BROKEN_WIDE | BROKEN_TURNS)[line]}", text)
        broken.append(number)
        return gluon_dialect.load(changed)

    monkeypatch.setattr(triton_host, "load", load)
    three = overridden(forward=(192, 64, 12, 2), schedule="hopper") if line in BROKEN_TURNS else nullcontext()
    with three, pytest.raises((Race, Deadlock, AssertionError)):
        for seed in range(4):
            gluon_simulator.SEED[0] = seed
            s, p = spec(EVERY[variant]), problem("self", head, "bfloat16", M=400, batch=1)
            run(s, p).within_budget()
    assert any(broken)


def test_rest_of_calls_of_the_op_that_are_alike():
    """The second finds what the first worked out, by the spec's text; another layout, length or need does not."""
    s = spec(CORE["padding"])

    def both(length: int, outer: int, needs: list[bool], seed: int) -> int:
        q, k, v, aux, _, sizes = inputs(s, problem(M=length, dtype="float16", D=64), seed=seed)
        out, lse = op.attention(q, k, v, aux, None, [], s.line, None, None, False, outer)
        found = op.attention_backward(out, None, q, k, v, aux, None, out, lse, [], s.line, needs, None, None, False)
        expected, _ = launch.forward(s, q, k, v, aux, None, sizes, outer=outer)
        assert torch.equal(out, expected) and out.stride() == expected.stride()
        every = launch.backward(s, out, q, k, v, aux, None, out, lse, sizes, needs)
        assert len(found) == len(every) == 4 and all(torch.equal(a, b) for a, b in zip(found, every))
        return len(calls.CALLS)

    every = [True] * 3 + [False]
    known = [both(37, 1, every, 0), both(37, 1, every, 1), both(37, 2, every, 2), both(40, 1, every, 3), both(37, 1, [True, False, True, False], 4)]
    assert known == [4, 4, 8, 12, 14]  # a call is known by the text and by the spec, forward and backward
    calls.forget()
    assert both(37, 1, every, 0) == 4
