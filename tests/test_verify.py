"""`flashfx.verify` and options={"verify": True}: right rewrites pass, planted wrong ones are named with their site and source line."""
from __future__ import annotations

import pytest
import torch

import flashfx
from flashfx.backend import rewrite_graph
from flashfx.capture import graphs_of
from flashfx.codegen import launch
from flashfx.codegen.gpu import DEFAULT
from flashfx.expr import TRUE
from flashfx.options import Options
from flashfx.passes import splice
from flashfx.report import Report, SiteReport


def causal(q, k, v, bias):
    scores = q @ k.transpose(-1, -2) * 0.5 + bias
    at = torch.arange(q.shape[-2])
    return scores.masked_fill(at > at[:, None], float("-inf")).softmax(-1) @ v


def full(q, k, v):
    return (q @ k.transpose(-1, -2) * 0.5).softmax(-1) @ v


def two(q, k, v, bias):
    return causal(full(q, k, v), k, v, bias)


def operands(dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    made = [torch.randn(2, 3, 40, 8, generator=g).to(dtype).requires_grad_() for _ in range(3)]
    return (*made, torch.randn(3, 40, 40, generator=g).to(dtype).requires_grad_())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_output_and_gradient_is_compared(dtype):
    found = flashfx.verify(two, *operands(dtype))
    assert found and not found.wrong and not found.unchecked and len(found) == 2
    kinds = {"float64", str(dtype).removeprefix("torch.")}
    assert {(c.what, c.dtype) for c in found.regions[1].checked} == {
        (what, kind) for kind in kinds for what in ("out", "gradient of q", "gradient of k", "gradient of v", "gradient of bias")}
    assert "2 rewritten sites, 2 agree with their originals, 0 differ, 0 not compared; 0 left alone" in str(found)


def test_a_tensor_without_dims_is_drawn_too():
    found = flashfx.verify(lambda q, k, v, factor: ((q @ k.mT).softmax(-1) - factor * (q @ k.mT * 0.5).softmax(-1)) @ v, *operands()[:3], torch.tensor(0.5))
    assert found and not found.wrong and not found.unchecked


def test_a_sum_of_exponentials_that_vanish_says_nothing():
    """Without a shift, weights of scores far below 0 are 0 / 0."""
    def attention(q, k, v):
        e = (-(q @ k.mT).abs()).exp()
        return e / e.sum(-1, keepdim=True) @ v
    found = flashfx.verify(attention, *operands()[:3])
    assert found and not found.wrong and not found.unchecked and len(found) == 1


def test_inference_compares_outputs():
    with torch.no_grad():
        found = flashfx.verify(two, *operands())
    assert {c.what for r in found for c in r.checked} == {"out"}


def without_mask(monkeypatch):
    """The planted wrong rewrite: the op that is put into the graph has lost its mask."""
    right = splice._attention

    def wrong(emit, site, lifted, *rest):
        from dataclasses import replace
        return right(emit, site, replace(lifted, spec=replace(lifted.spec, visible=TRUE)), *rest)
    monkeypatch.setattr(splice, "_attention", wrong)


def test_a_dropped_mask_is_named_with_its_line(monkeypatch):
    without_mask(monkeypatch)
    with pytest.raises(flashfx.VerifyError) as caught:
        flashfx.verify(two, *operands())
    text = str(caught.value)
    assert text.startswith("site matmul_3 at tests/test_verify.py:21 in causal: return scores.masked_fill(at > at[:, None], float(\"-inf\")).softmax(-1) @ v: "
                           "out differs from its original by")
    assert "where   j <= i" in text
    found = flashfx.verify(two, *operands(), check=False)
    assert not found and [r.site for r in found.wrong] == ["matmul_3"] and "[1] DIFFERS: matmul_3 at tests/test_verify.py:21" in str(found)
    assert "[0] ok: matmul_1" in str(found)


def test_the_option_catches_it_while_compiling(monkeypatch):
    without_mask(monkeypatch)
    compiled = torch.compile(two, backend="flashfx", options={"inner": "eager", "verify": True})
    with pytest.raises(Exception, match=r"VerifyError: site matmul_3 at tests/test_verify.py:21 in causal"):
        compiled(*operands())


def test_a_wrong_gradient_is_caught(monkeypatch):
    """A kernel whose output is right and whose dK is not."""
    right = launch.backward

    def wrong(*args, **kwargs):
        dq, dk, *rest = right(*args, **kwargs)
        return [dq, dk * 1.01, *rest]
    monkeypatch.setattr(launch, "backward", wrong)
    found = flashfx.verify(causal, *operands(), check=False)
    assert {c.what for c in found.regions[0].checked if not c.good} == {"gradient of k"}


def test_a_kernel_wrong_in_the_models_dtype_alone_is_caught(monkeypatch):
    right = launch.forward

    def wrong(spec, q, *rest, **kwargs):
        out, lse = right(spec, q, *rest, **kwargs)
        return (out if q.dtype == torch.float64 else out * 1.25), lse
    monkeypatch.setattr(launch, "forward", wrong)
    found = flashfx.verify(causal, *operands(torch.bfloat16), check=False)
    assert {(c.what, c.dtype) for c in found.regions[0].checked if not c.good} >= {("out", "bfloat16")}
    assert all(c.good for c in found.regions[0].checked if c.dtype == "float64")


def test_nothing_to_verify_is_an_error():
    with pytest.raises(flashfx.FlashFXError, match="contains no attention site"):
        flashfx.verify(lambda q, k: q @ k.mT, *operands()[:2])


def test_sites_that_were_left_alone_are_said_to_be():
    def returned(q, k, v, bias):
        weights = (causal(q, k, v, bias) @ k.transpose(-1, -2)).softmax(-1)
        return weights @ v, weights
    found = flashfx.verify(returned, *operands())
    assert found and len(found) == 2 and "1 left alone" in str(found)


def test_both_sides_are_timed_on_the_same_data():
    """Equal sites once; each side is asked for its results and gradients, from the same numbers, and gives the same; a machine without the card is told so."""
    sides: list = []

    def clock(forward, leaves, device):
        results = forward()
        again = forward()
        assert all(torch.equal(a, b) for a, b in zip(results, again)) and results[0] is not again[0]
        grads = torch.autograd.grad(results, leaves, [torch.ones_like(r) for r in results], allow_unused=True)
        sides.append((results, [g for g in grads if g is not None]))
        return {"forward": 2.0 / len(sides), "backward": 4.0 / len(sides)}

    def layers(q, k, v, bias):
        return causal(causal(q, k, v, bias), k, v, bias)

    with pytest.raises(flashfx.FlashFXError, match="this machine has none" if not torch.cuda.is_available() else "leave `gpu` out"):
        flashfx.explain(layers, *operands(), torch.zeros(40, 40), gpu="T4", measure=True)
    (regions,) = graphs_of(layers, operands(), {}, lambda gm: rewrite_graph(gm, Options(), clock=clock))
    report = Report(tuple(SiteReport(r, DEFAULT, True) for r in regions), 1, DEFAULT, True, True)
    (before, theirs), (after, ours) = sides
    torch.testing.assert_close(after, before)
    assert len(theirs) == len(ours) == 4
    torch.testing.assert_close(sorted(g.sum() for g in ours), sorted(g.sum() for g in theirs), atol=1e-3, rtol=1e-3)
    assert report.totals()["measured"] == {"before": 12.0, "after": 6.0, "sites": 2}
    assert "clock   forward 2 s -> 1 s measured (2.0x faster)" in str(report) and "12 s → 6 s" in report.to_html()
