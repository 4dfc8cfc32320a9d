"""The backward kernel of which one tile holds all keys, in Triton's interpreter; `test_interpreter.py` runs this file in a process where that is on."""
from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace

import pytest
import torch

from flashfx.codegen import gpu, host, split, triton_host
from flashfx.codegen.plan import make_plan, overridden
from flashfx.codegen.schedules import one_tile
from flashfx.codegen.selfcheck import inputs
from flashfx.errors import PlanError
from flashfx.spec import AttentionSpec

from ..thinning import thinned
from .cases import CORE, KINDS, MORE, problem, spec
from .run import lse_gradient, run

POINTS = [(v, kind, ("float16", "bfloat16")[n % 2], (16, 40, 64, 80, 128)[n % 5], (37, 64, 21, 50)[n % 4])
          for n, (v, kind) in enumerate(itertools.product({**CORE, **MORE}, KINDS))]


@contextlib.contextmanager
def asked(s, p):
    """Both, for which this kernel is planned."""
    with overridden(one_tile=one_tile.tiles(s, p)):
        yield planned(s, p)


def planned(s, p):
    """Both, for which this kernel is planned."""
    assert make_plan(s, p, gpu.current("cpu"), "backward").kernel == "one_tile"
    return s, p


@pytest.mark.parametrize("variant, kind, dtype, head, length", thinned(POINTS, 11))
def test_gradient(variant, kind, dtype, head, length):
    head = min(head, 96) if "ended" in variant or variant == "t5_table" else head
    with asked(spec({**CORE, **MORE}[variant], kind), problem(kind, head, dtype, M=length, N=min(length + 14, 64) if kind == "cross" else None, batch=1)) as site:
        run(*site).within_budget()


@pytest.mark.parametrize("kind, M, N", [("self", 100, 128), ("gqa", 5, 100), ("cross", 150, 20), ("self", 1, 16)])
def test_gradient_of_other_sizes(kind, M, N):
    """Tiles that keys fill, one row, more rows than keys, values of another size."""
    with asked(spec(CORE["full"], kind), problem(kind, 40, "float16", M=M, N=N, batch=1, Dv=24)) as site:
        run(*site).within_budget()


PARTS = [(v, kind, ("float16", "bfloat16")[n % 2], (16, 40, 64, 32)[n % 4]) for n, (v, kind) in enumerate(itertools.product({**CORE, **MORE}, ("gqa", "cross")))]


@pytest.mark.parametrize("variant, kind, dtype, head", thinned(PARTS, 17))
def test_gradient_of_rows_in_parts(variant, kind, dtype, head, monkeypatch):
    """Few keys and many rows: programs share the rows of a batch index, another kernel adds up their dK and dV. Of sums beyond a table's ends there are no parts."""
    monkeypatch.setattr(one_tile, "ROWS", 40)
    monkeypatch.setattr(split, "LEAST", 32)
    s, p = spec({**CORE, **MORE}[variant], kind), problem(kind, head, dtype, M=130, N=45, batch=1)
    plan = make_plan(s, p, gpu.current("cpu"), "backward")
    assert (plan.kernel == "one_tile" and plan.parts == 0) == one_tile.takes(s, p, gpu.current("cpu"))
    run(s, p).within_budget()


@pytest.mark.parametrize("variant, kind", [("causal", "self"), ("padding", "cross"), ("softcap", "gqa")])  # planned without being asked for, as all that follow
def test_gradient_of_the_log_sum_exp(variant, kind):
    lse_gradient(*planned(spec(CORE[variant], kind), problem(kind, 32, "float16", M=45, batch=1))).within_budget()


@pytest.mark.parametrize("empty", ["nan", "zero", "mean", "mean, additive"])
def test_gradient_where_rows_see_no_key(empty):
    s, p = spec(replace(MORE["mean_left_padding"], empty=empty)), problem("self", 16, "bfloat16")
    q, k, v, (pad,), seed, sizes = inputs(s, p)
    pad[0, :20] = False
    pad[1] = False
    run(*planned(s, p), operands=(q, k, v, [pad], seed, sizes)).within_budget()


def test_gradient_of_scores_far_below_zero():
    """Beyond the last key a weight would be exp(0 - lse), which is no number here."""
    s, p = spec(CORE["full"]), problem("self", 16, "bfloat16", M=40)
    q, k, v, aux, seed, sizes = inputs(s, p)
    q, k = torch.full_like(q, 30.0), -torch.full_like(k, 30.0) + k / 30
    run(*planned(s, p), operands=(q, k, v, aux, seed, sizes)).within_budget()


@pytest.mark.parametrize("variant, length, drop, programs", [
    ("shared_bias", 41, "", 9), ("shared_bias", 41, "", 1), ("bias", 20, "0.25", 30), ("padded_bias", 50, "", 9), ("scaled_shared_bias", 64, "0.25", 1),
    ("scaled_shared_bias", 30, "", 30), ("two_shared_biases", 30, "", 9)])
def test_gradient_of_a_tensor_that_stays_in_registers(variant, length, drop, programs, monkeypatch):
    """A program goes through all five batch indices that share it, through some of them, or through one. Of two tensors each has a kernel of its own."""
    monkeypatch.setattr(host, "HELD_PROGRAMS", programs)
    monkeypatch.setattr(triton_host, "_MODULES", {})
    s, p = spec(replace(MORE[variant] if variant in MORE else CORE[variant], drop=drop)), problem("self", 16, "bfloat16", M=length, batch=5, heads=3)
    assert make_plan(s, p, gpu.current("cpu"), "backward").stored == ("" if variant == "two_shared_biases" else "bias")
    run(*planned(s, p)).within_budget()


@pytest.mark.parametrize("text, held", [("bias[i, j]", "bias"), ("bias[i, j] + bias[i, 0]", "")])
def test_gradient_of_a_tensor_that_all_batch_indices_share(text, held):
    """Read at rows alone too, it is summed from both reads."""
    s, p = AttentionSpec.parse(f"attention[b, h, i, j]; given bias: float[2]; qk = q[b, h, i] . k[b, h, j]; score = qk * 0.25 + {text}; out = softmax_j(score) . v[b, h, j]"), \
        problem("self", 16, "float16", M=20, batch=3)
    assert make_plan(s, p, gpu.current("cpu"), "backward").stored == held
    run(*planned(s, p)).within_budget()


def test_gradient_by_a_tile_that_is_too_small():
    with overridden(one_tile=(32, 32, 4, 1)), pytest.raises(PlanError, match="a tile of 32 keys does not hold all 40"):
        make_plan(spec(CORE["full"]), problem("self", 16, "bfloat16", M=40), gpu.current("cpu"), "backward")
