"""Sites that are predicted faster as the graph has them are left alone, with both times; never where the model is not sure."""
from __future__ import annotations

import re

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import flashfx
from flashfx.backend import _no_kernel
from flashfx.codegen.gpu import BY_NAME
from flashfx.region import Problem
from flashfx.spec import AttentionSpec


def test_a_site_that_is_predicted_faster_as_it_is_is_left_alone():
    """Training in float32 on a card that the model knows, heads so wide that products are on the ordinary units. Not in 16 bits, narrow heads, as a call, where
    matrices are large, if it is not sure."""
    def region(fn, dtype=torch.float32, gpu="H200", length=512, head=256):
        with FakeTensorMode():
            return flashfx.explain(fn, *(torch.empty(12, 12, length, head, dtype=dtype, requires_grad=True) for _ in range(3)), gpu=gpu)[0]
    attention = lambda q, k, v: (q @ k.mT * 0.125).softmax(-1) @ v
    call = lambda q, k, v: F.scaled_dot_product_attention(q, k, v)
    refusal = region(attention).refusal
    assert refusal.stage == "plan" and 'options={"decline": False}' in refusal.hint
    assert re.fullmatch(r"predicted slower than it is: [\d.]+ ms instead of [\d.]+ (ms|us) forward and backward on H200, in float32", refusal.reason)
    for kept in (region(attention, torch.bfloat16), region(attention, head=64), region(attention, gpu="A100"), region(call), region(attention, length=2048), region(attention, length=48)):
        assert kept.fused, kept.refusal


def test_nothing_is_declined_with_symbolic_sizes_or_if_so_asked():
    spec = AttentionSpec.parse("attention[b, h, i, j]; qk = q[b, h, i] . k[b, h, j]; score = qk * 0.125; out = softmax_j(score) . v[b, h, j]")
    asked = lambda fixed, training: _no_kernel(spec, Problem((12, 12), 512, 512, 256, 256, "float32", "float32"), torch.device("cuda"), fixed, BY_NAME["H200"], training)
    assert asked(True, True) is not None and asked(False, True) is None and asked(True, None) is None
