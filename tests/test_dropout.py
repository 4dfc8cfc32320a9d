"""Dropout: the seed decides, backward sees the bits of forward, and what is recomputed drops the same weights."""
from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flashfx
from flashfx.codegen import philox

from .test_backend import causal, fresh, qkv  # noqa: F401  (fresh is a fixture)
from .thinning import thinned


@pytest.mark.parametrize("p", thinned([0.5, 0.1, 0.05, 0.01, 0.9, 0.001, 0.97, 1e-5], 3))
def test_rates_are_true(p):
    """The share that is dropped, within five standard deviations; and what is kept makes up for it exactly."""
    z, i, j = torch.arange(4)[:, None, None], torch.arange(1024)[:, None], torch.arange(1024)
    kept = philox.keep_mask(1234567890123, z, i, j, p)
    assert abs(kept.double().mean() - (1 - p)) < 5 * (p * (1 - p) / kept.numel()) ** 0.5 + 2.0 ** -10 * min(p, 1 - p)
    for half in (kept[..., ::2], kept[..., 1::2], kept[..., :8], kept[:, ::16]):  # all halves and words draw alike
        assert abs(half.double().mean() - (1 - p)) < 6 * (p * (1 - p) / half.numel()) ** 0.5 + 2.0 ** -10 * min(p, 1 - p)
    steps = 2 ** (15 if philox.is_narrow(p) else 32)
    assert philox.is_narrow(p) == (p in (0.5, 0.1, 0.05, 0.01, 0.9)) and philox.kept_scale(p) == 1 / (1 - philox.threshold(p) / steps)


@pytest.mark.parametrize("p", thinned([0.5, 0.1, 0.05, 0.01, 0.9, 2.0 ** -7, 0.96875], 6))
def test_two_rows_that_share_bits_drop_almost_independently(p):
    """Over all halves of a word: each at its exact rate. And as drawn: an element with its neighbours."""
    limit, half = philox.threshold(p), torch.arange(2 ** 16)
    first, second = (bits % 2 ** 15 < limit for bits in (half, half % 256 * 256 + half // 256))
    rate = limit / 2 ** 15
    assert philox.is_narrow(p) and first.double().mean() == second.double().mean() == rate
    assert abs((first & second).double().mean() - rate ** 2) <= philox.CORRELATION * rate * (1 - rate)
    i, j = torch.arange(2048)[:, None], torch.arange(2048)
    kept = philox.keep_mask(5, torch.tensor(0), i, j, p).double() - (1 - rate)
    for rows, columns in [(0, 1), (0, 2), (0, 3), (0, 8), (0, 16), (1, 0), (8, 0), (16, 0), (8, 8), (8, 2), (1, 1), (1, 16), (2, 0), (9, 0)]:
        found = (kept[rows:, columns:] * kept[:2048 - rows, :2048 - columns]).mean() / (rate * (1 - rate))
        assert abs(found) < philox.CORRELATION * (rows == 8 and not columns) + 5 / 2040, (rows, columns)


def dropped(**options):
    compiled = torch.compile(lambda q, k, v: causal(q, k, v, p=0.3), backend="flashfx", options=options)

    def run(seed):
        q, k, v = qkv()
        torch.manual_seed(seed)
        out = compiled(q, k, v)
        return out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))
    return run


@pytest.mark.parametrize("inner", ["inductor", "eager"])
def test_dropout_follows_the_seed(inner):
    run = dropped(inner=inner)
    for a, b in zip(run(5), run(5)):
        assert torch.equal(a, b)
    assert not torch.equal(run(5)[0], run(6)[0])


def test_dropout_backward_sees_the_bits_of_forward():
    """With v the identity the output is the dropped weights, so dv is their transpose times the output's gradient."""
    q, k, _ = qkv(1, 1, 24, 24)
    v = torch.eye(24)[None, None].requires_grad_()
    compiled = torch.compile(lambda q, k, v: causal(q, k, v, p=0.4), backend="flashfx", options={"inner": "aot_eager"})
    weights = compiled(q, k, v)
    upstream = torch.randn_like(weights)
    dv, = torch.autograd.grad(weights, v, upstream)
    torch.testing.assert_close(dv, weights.detach().transpose(-1, -2) @ upstream)
    assert (weights == 0).tril().sum() > 100, "some visible weights were dropped"


def test_seed_is_saved_when_activations_are_recomputed():
    """activation_memory_budget < 1 would draw the seed again in backward; ours is saved."""
    plain = dropped()(7)
    torch._dynamo.reset()
    with torch._functorch.config.patch(activation_memory_budget=0.3):
        saved = dropped()(7)
    for a, b in zip(plain, saved):
        torch.testing.assert_close(a, b)


def test_dropout_is_refused_at_budget_zero():
    q, k, v = qkv()
    with torch._functorch.config.patch(activation_memory_budget=0):
        report = flashfx.explain(lambda q, k, v: causal(q, k, v, p=0.3), q, k, v)
    assert report[0].refusal.reason == "dropout with activation_memory_budget = 0 would draw other random numbers in backward"


def test_checkpointed_dropout_recomputes_the_same_bits():
    def fn(q, k, v):
        return checkpoint(lambda *a: causal(*a, p=0.3), q, k, v, use_reentrant=False)
    q, k, _ = qkv(1, 1, 24, 24)
    v = torch.eye(24)[None, None].requires_grad_()
    weights = torch.compile(fn, backend="flashfx", options={"inner": "aot_eager"})(q, k, v)
    upstream = torch.randn_like(weights)
    dv, = torch.autograd.grad(weights, v, upstream)
    torch.testing.assert_close(dv, weights.detach().transpose(-1, -2) @ upstream)
