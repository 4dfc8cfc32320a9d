"""PyTorch's own attention: `scaled_dot_product_attention` is its written-out form; `nn.MultiheadAttention` and the Transformer layers."""
from __future__ import annotations

import itertools
import math


import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from .capture import capture, compare, keep, rand
from .test_spellings import B, GQA, GROUP, H, M, N, SCALE, Point, _triangle, build, inputs
from .thinning import thinned


def spec_of(fn, *args, **kwargs) -> str:
    region, = capture(fn, *args, **kwargs)
    assert region.fused, region.refusal
    return str(region.spec)


def plain(mask=lambda s: s, scale=SCALE, safe=False):
    """The written-out form of a scaled_dot_product_attention call."""
    soft = (lambda s: torch.ops.aten._safe_softmax(s, -1)) if safe else (lambda s: s.softmax(-1))
    return lambda q, k, v, *rest: soft(mask(q @ k.mT * scale, *rest)) @ v


BOOL = keep(B, 1, M, N)
CALLS = {
    "plain": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v), plain()),
    "scale": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.125), plain(scale=0.125)),
    "causal": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
               plain(lambda s: s.masked_fill(~_triangle(*s.shape[-2:]), -math.inf), safe=True)),
    "bool mask": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=BOOL),
                  plain(lambda s: s.masked_fill(~BOOL, -math.inf), safe=True)),
    "float mask": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=torch.where(BOOL, 0.0, -math.inf)),
                   plain(lambda s: s.masked_fill(~BOOL, -math.inf), safe=True)),
}


@pytest.mark.parametrize("name", CALLS)
def test_scaled_dot_product_attention_is_its_written_out_form(name):
    call, written = CALLS[name]
    q, k, v, _ = inputs(Point())
    assert spec_of(call, q, k, v) == spec_of(written, q, k, v)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert compare(call, q, k, v)[0].fused


@pytest.mark.parametrize("gqa", [g for g in GQA if g != "none"])
def test_enable_gqa_is_repeated_heads(gqa):
    q, k, v, _ = inputs(Point(gqa=gqa))
    called = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert spec_of(called, q, k, v) == spec_of(lambda q, k, v: F.scaled_dot_product_attention(q, GQA[gqa](k), GQA[gqa](v)), q, k, v)
    assert compare(called, q, k, v)[0].fused


def test_grouped_einsum_needs_no_repeat():
    q, k, v, _ = inputs(Point(gqa="repeat_interleave"))

    def fn(q, k, v):
        p = (torch.einsum("bhgid,bhjd->bhgij", q.unflatten(1, (H // GROUP, GROUP)), k) * SCALE).softmax(-1)
        return torch.einsum("bhgij,bhjd->bhgid", p, v).flatten(1, 2)

    assert spec_of(fn, q, k, v) == spec_of(build(Point(gqa="repeat_interleave")), q, k, v, keep(B, N))
    assert compare(fn, q, k, v)[0].fused


class Wrapped(nn.Module):
    """nn.MultiheadAttention without its second result."""

    def __init__(self, batch_first=True, need_weights=False, **options):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.need_weights = nn.MultiheadAttention(16, 4, batch_first=batch_first, **options), need_weights

    def forward(self, x, y, **masks):
        return self.inner(x, y, y, need_weights=self.need_weights, **masks)[0]


def functional(module):
    names = [n for n, _ in module.named_parameters()]

    def fn(params, *args, **kwargs):
        return torch.func.functional_call(module, dict(zip(names, params)), args, kwargs)

    return fn, [p.detach().clone().requires_grad_() for p in module.parameters()]


@pytest.mark.parametrize("need_weights, batch_first, masked", thinned(itertools.product((False, True), (False, True), ("none", "key_padding_mask", "attn_mask")), 5))
def test_multihead_attention(need_weights, batch_first, masked):
    fn, params = functional(Wrapped(batch_first, need_weights))
    x, y = rand(B, M, 16), rand(B, N, 16)
    masks = {"none": {}, "key_padding_mask": {"key_padding_mask": ~keep(B, N)}, "attn_mask": {"attn_mask": ~_triangle(M, N)}}[masked]
    if not batch_first:
        x, y = (t.detach().transpose(0, 1).requires_grad_() for t in (x, y))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        regions = compare(lambda params, x, y: fn(params, x, y, **masks), params, x, y)
    assert [r.fused for r in regions] == [True]


@pytest.mark.parametrize("training", (False, True))
def test_transformer_encoder_layer(training):
    layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True).train(training)
    fn, params = functional(layer)
    regions = compare(lambda params, x: fn(params, x, src_key_padding_mask=~keep(B, M)), params, rand(B, M, 16))
    assert [r.fused for r in regions] == [True]


class TestSpecText(expecttest.TestCase):
    """What a reader sees."""

    def test_bert_like(self):
        point = Point(mask="padding, lowest added: one minus", dropout="F.dropout")
        self.assertExpectedInline(spec_of(build(point), *inputs(point)), """\
attention[b, h, i, j]
  given   mask: bool[2]
  qk    = q[b, h, i] . k[b, h, j]
  score = qk * 0.5
  where   mask[b, j]
  empty   mean, additive
  drop    0.25
  out   = softmax_j(score) . v[b, h, j]""")

    def test_grouped_window(self):
        point = Point(mask="window, inf: distances", gqa="expand and reshape")
        self.assertExpectedInline(spec_of(build(point), *inputs(point)), """\
attention[b, h, g, i, j]
  qk    = q[b, h, g, i] . k[b, h, j]
  score = qk * 0.5
  where   (j <= i) & (j > i - 3)
  empty   nan
  out   = softmax_j(score) . v[b, h, j]""")

    def test_softcap_and_bias(self):
        def fn(q, k, v, bias):
            return ((torch.tanh(q @ k.mT * SCALE / 5.0) * 5.0) + bias).softmax(-1) @ v

        self.assertExpectedInline(spec_of(fn, *inputs(Point())[:3], nn.Parameter(rand(H, M, N, grad=False))), """\
attention[b, h, i, j]
  given   bias: float[3]
  qk    = q[b, h, i] . k[b, h, j]
  score = tanh(qk * 0.1) * 5.0 + bias[h, i, j]
  out   = softmax_j(score) . v[b, h, j]""")

    def test_cached_keys(self):
        def fn(q, k, v, pad):
            rows, columns = torch.arange(M) + (N - M), torch.arange(N)
            return (q @ k.mT * SCALE).masked_fill(columns > rows[:, None], -math.inf).softmax(-1) @ v

        self.assertExpectedInline(spec_of(fn, *inputs(Point())), """\
attention[b, h, i, j]
  qk    = q[b, h, i] . k[b, h, j]
  score = qk * 0.5
  where   j <= i + 2
  empty   nan
  out   = softmax_j(score) . v[b, h, j]""")
