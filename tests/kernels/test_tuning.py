"""Autotuning picks what was fastest, keeps it on disk, and leaves results and random numbers alone; a pin overrules the model."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashfx.codegen import plan, tuning
from flashfx.codegen.gpu import BY_NAME
from flashfx.codegen.plan import make_plan
from flashfx.codegen.schedules import hopper_memory

from .cases import CORE, problem, spec

RUN = """
import sys
import torch
from flashfx.codegen import launch, plan, tuning
from flashfx.codegen.gpu import DEFAULT
from flashfx.codegen.plan import make_plan
from flashfx.codegen.schedules import hopper_memory
from flashfx.codegen.selfcheck import inputs
from flashfx.reference import reference
from tests.kernels.cases import CORE, problem, spec
tuning.enable()
s, p = spec(CORE["causal"]), problem("self", 16, "float16", M=20, batch=1, heads=1)
q, k, v, aux, seed, sizes = inputs(s, p)
state = torch.get_rng_state()
out, lse = launch.forward(s, q, k, v, aux, seed, sizes)
launch.backward(s, torch.ones_like(out), q, k, v, aux, seed, out, lse, sizes, (True,) * 3)
assert torch.equal(state, torch.get_rng_state())
exact = reference(s, q.double(), k.double(), v.double(), aux, sizes)
assert float((out.double() - exact).norm() / exact.norm()) < 2e-3
assert {direction for _, _, direction in plan.TUNED} == {"forward", "backward"}
assert all("measured by autotune" in make_plan(s, p, DEFAULT, direction).reason for direction in plan.DIRECTIONS)
"""


def test_tuning_is_done_once(tmp_path):
    """In Triton's interpreter, where the times mean nothing and all else is as on a GPU."""
    root = Path(__file__).parent.parent.parent
    environment = os.environ | {"TRITON_INTERPRET": "1", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(root)}
    run = lambda: subprocess.run([sys.executable, "-c", RUN], cwd=root, env=environment, capture_output=True, text=True)
    first = run()
    assert first.returncode == 0, first.stderr
    assert "to pin it: flashfx.codegen.tuning.pin('attention" in first.stderr and "3 of 3" in first.stderr
    assert len(json.loads((tmp_path / "flashfx" / "tuned.json").read_text())) == 2
    again = run()
    assert again.returncode == 0 and "autotune" not in again.stderr, again.stderr


@pytest.mark.parametrize("direction, names", [("forward", ["attention_forward", "attention_empty_rows"]), ("backward", ["attention_delta", "attention_backward_keys", "attention_backward_rows"])])
def test_a_kernel_is_measured_behind_those_before_it(monkeypatch, direction, names):
    """Hopper's backward takes tiles by a counter that the kernel before it resets: alone, it would find none left."""
    log, timed = [], []

    class Clock:
        def __init__(self, device):
            pass

        def median(self, run, before):
            del log[:]
            before()
            at = len(log)
            run()
            timed.append((log[:at], log[at:]))
            return 5.0

    monkeypatch.setattr(tuning, "Clock", Clock)
    monkeypatch.setattr(tuning, "Operands", lambda *a: None)
    monkeypatch.setattr(tuning, "load", lambda text: None)
    monkeypatch.setattr(tuning, "launches", lambda *a: [(name, lambda name=name: log.append(name)) for name in names])
    given = dict(descriptors=True, listed=False, needs=(direction == "backward",) * 3, tiled=())
    found = tuning._measured(spec(CORE["causal"]), problem("self", 64, "bfloat16", M=2048), BY_NAME["H100"], torch.device("cpu"), direction,
                             lambda text: None, given)
    assert found["schedule"] in ("hopper", "triton") and len(timed) > 2
    assert all(before + own == names[:len(before) + 1] for before, own in timed)


def test_the_fastest_kernels_together():
    hopper, triton = (("schedule", "hopper"),), (("schedule", "triton"),)
    times = {(hopper, "keys", (64, 128, 8, 2)): 5.0, (triton, "keys", (64, 64, 4, 2)): 2.0, (triton, "keys", (32, 64, 4, 2)): 3.0,
             (triton, "rows", (64, 64, 4, 2)): 2.5, (triton, "rows", (64, 32, 4, 2)): 2.0}
    assert tuning.fastest(times) == {"schedule": "triton", "keys": (64, 64, 4, 2), "rows": (64, 32, 4, 2)}
    assert tuning.fastest({**times, (triton, "one_tile", (32, 64, 4, 1)): 3.8}) == {"schedule": "triton", "one_tile": (32, 64, 4, 1)}
    assert tuning.fastest({**times, (triton, "one_tile", (32, 64, 4, 1)): 4.2})["keys"] == (64, 64, 4, 2)
    assert tuning.fastest({**times, (hopper, "keys", (64, 128, 8, 1)): 3.9}) == {"schedule": "hopper", "keys": (64, 128, 8, 1)}
    turns = *hopper, ("turns", True)
    assert tuning.fastest({**times, (turns, "keys", (64, 128, 8, 2)): 3.5}) == {"schedule": "hopper", "turns": True, "keys": (64, 128, 8, 2)}


def test_heads_that_share_keys_are_measured_in_turn_and_one_after_the_other():
    given, card, p = dict(descriptors=True, listed=False, needs=(True,) * 3, tiled=()), BY_NAME["H200"], problem("gqa", 64, "bfloat16", M=2048)
    offers = lambda kind, direction: [o for o in tuning._offers(spec(CORE["causal"], kind), problem(kind, 64, "bfloat16", M=2048), card, direction, given) if o["schedule"] == "hopper"]
    found = offers("gqa", "backward")
    assert {o["turns"] for o in found} == {True, False}
    for offer in found:
        with plan.overridden(**offer):
            assert make_plan(spec(CORE["causal"], "gqa"), p, card, "backward").turns == offer["turns"]
    assert not any("turns" in o for o in offers("self", "backward") + offers("gqa", "forward"))


def test_a_pin_overrules_the_model(monkeypatch):
    monkeypatch.setattr(plan, "PINNED", {})
    s, p = spec(CORE["full"]), problem("self", 64, "bfloat16", M=4096, heads=16)
    tuning.pin(s.line, "forward", "hopper", forward=(128, 64, 8, 2))
    found = make_plan(s, p, BY_NAME["H200"], "forward")
    assert (found.schedule, found.tiles) == ("hopper", (128, 64, 8, 2)) and "pinned" in found.reason
    assert "pinned" not in make_plan(s, p, BY_NAME["H200"], "backward").reason
    shared, few = spec(CORE["causal"], "gqa"), problem("gqa", 64, "bfloat16", M=4096)
    tuning.pin(shared, "backward", "hopper", turns=True)
    assert make_plan(shared, few, BY_NAME["H200"], "backward").turns
    with pytest.raises(ValueError, match="unknown kernels"):
        tuning.pin(s, "forward", "hopper", fwd=(128, 64, 8, 2))


def test_keys_by_thirds_are_for_what_has_neither_an_order_nor_a_list():
    """Nor where they were tuned or pinned before."""
    card, s = BY_NAME["H200"], spec(CORE["causal"])
    for head, values, by_thirds in ((192, 192, True), (192, 128, True), (128, 192, True), (160, 160, True), (144, 136, True), (256, 256, False), (192, 64, False)):
        assert make_plan(s, problem("self", head, "bfloat16", M=4096, Dv=values, batch=4, heads=12), card, "backward").by_thirds == by_thirds
    p = problem("self", 192, "bfloat16", M=4096, batch=4, heads=12)
    with plan.overridden(schedule="hopper", keys=(64, 96, 12, 2)):
        assert make_plan(s, p, card, "backward").by_thirds
        listed = make_plan(spec(CORE["padding"]), p, card, "backward", listed=True)
        torch.use_deterministic_algorithms(True)
        try:
            ordered = make_plan(s, p, card, "backward")
        finally:
            torch.use_deterministic_algorithms(False)
    assert [(x.schedule, x.tiles[:2], x.ordered) for x in (listed, ordered)] == [("hopper", (64, 64), False), ("hopper", (64, 64), True)]


def test_what_is_offered_fits_with_the_captured_tiles():
    """Also where the model prefers the portable schedule, whose plan reads none."""
    s, given, card = spec(CORE["bias"]), dict(descriptors=True, listed=False, needs=(False,) * 4, tiled=("bias",)), BY_NAME["H200"]
    p = problem("self", 32, "bfloat16", M=160, batch=300)
    assert make_plan(s, p, card, "forward", descriptors=True, tiled=("bias",)).schedule == "triton"
    found = [offer["forward"] for offer in tuning._offers(s, p, card, "forward", given) if offer["schedule"] == "hopper"]
    assert found and all(hopper_memory.shared_bytes("forward", s, p, *t[:2], t[3], ("bias",)) <= card.shared_per_block for t in found)
