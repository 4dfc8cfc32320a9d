"""Attention sinks in every spelling but a concatenated column (tests/test_spellings.py has that): fused, and right where rows are hidden entirely."""
from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from .capture import compare, keep, rand

B, H, M, N, D = 2, 3, 5, 7, 4
LOWEST = torch.finfo(torch.float32).min


def qkv(grad=True):
    return tuple(rand(B, H, n, D, grad=grad, seed=n + d) for d, n in ((1, M), (2, N), (3, N)))


def s(q, k):
    return q @ k.mT * 0.5


def by_hand(x, sink=None, least=None):
    m = x.amax(-1, keepdim=True)
    m = m if least is None else m.clamp(min=least)
    e = torch.exp(x - m)
    return e / (e.sum(-1, keepdim=True) + torch.exp(-m if sink is None else sink - m))


SPELLINGS = {
    "padded behind": lambda x: F.pad(x, (0, 1)).softmax(-1)[..., :-1],
    "padded in front": lambda x: F.pad(x, (1, 0), value=0.5).softmax(-1)[..., 1:],
    "padded, in float, dropout": lambda x: F.dropout(F.pad(x, (0, 1)).softmax(-1, dtype=torch.float32).to(x.dtype), 0.0)[..., :N],
    "by hand": by_hand,
    "by hand, shifted by 0 at least": lambda x: by_hand(x, least=0.0),
    "by hand, in another order": lambda x: (lambda m: (lambda e: e / (torch.exp(-m) + e.sum(-1).unsqueeze(-1)))((x - m).exp()))(x.detach().amax(-1, keepdim=True)),
    "by hand, a number": lambda x: by_hand(x, 2.0),
    "unshifted": lambda x: (lambda e: e / (e.sum(-1, keepdim=True) + 0.3))(x.exp()),
}


@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("name", SPELLINGS)
def test_fused_and_right(name, dynamic):
    regions = compare(lambda q, k, v: SPELLINGS[name](s(q, k)) @ v, *qkv(), dynamic=dynamic)
    assert [str(r.refusal) for r in regions if not r.fused] == [] and len(regions) == 1


@pytest.mark.parametrize("shape", [(1,), (H, 1, 1), (B, 1, M, 1)])
def test_a_sink_that_is_trained(shape):
    regions = compare(lambda q, k, v, sink: by_hand(s(q, k), sink) @ v, *qkv(), rand(*shape))
    assert [str(r.refusal) for r in regions if not r.fused] == [] and len(regions) == 1


MASKS = {
    "-inf": lambda x, a, b: x.masked_fill(~a, -math.inf),
    "lowest": lambda x, a, b: x.masked_fill(~a, LOWEST),
    "-inf twice": lambda x, a, b: x.masked_fill(~a, -math.inf).masked_fill(~b, -math.inf),
}


@pytest.mark.parametrize("masked", MASKS)
@pytest.mark.parametrize("name", SPELLINGS)
def test_rows_that_see_no_key(name, masked):
    """Their weight goes to the sink. Where -inf is subtracted from itself they are NaN: those are left alone."""
    a, b = keep(B, 1, 1, N), keep(1, H, M, N)
    a[1] = False
    region, = compare(lambda q, k, v, a, b: SPELLINGS[name](MASKS[masked](s(q, k), a, b)) @ v, *qkv(grad=False), a, b)
    if name in ("by hand", "by hand, in another order", "by hand, a number") and masked != "lowest":
        assert "rows that a mask of -inf hides entirely are NaN, not 0" in str(region.refusal)
    else:
        assert region.fused, region.refusal


def test_every_row_sees_a_key():
    regions = compare(lambda q, k, v: by_hand(s(q, k).masked_fill(torch.ones(M, N).triu(1) > 0, -math.inf)) @ v, *qkv())
    assert [r.fused for r in regions] == [True]


def held_by_the_sink(x, sink):
    m = torch.maximum(x.amax(-1, keepdim=True), sink).detach()
    e = torch.exp(x - m)
    return e / (e.sum(-1, keepdim=True) + torch.exp(sink - m))


@pytest.mark.parametrize("fill", (-math.inf, LOWEST))
def test_shifted_by_the_sink_at_least(fill):
    seen, sink = keep(B, 1, 1, N), rand(H, 1, 1)
    seen[1] = False
    regions = compare(lambda q, k, v, sink, seen: held_by_the_sink(s(q, k).masked_fill(~seen, fill), sink) @ v, *qkv(), sink, seen)
    assert [r.fused for r in regions] == [True]


LOOK_ALIKES = {
    "one more of the largest": lambda x: (lambda e: e / (1 + e.sum(-1, keepdim=True)))((x - x.amax(-1, keepdim=True)).exp()),
    "another shift": lambda x: (x - 1).exp() / ((x - 1).exp().sum(-1, keepdim=True) + (-x.amax(-1, keepdim=True)).exp()),
    "a shift that nobody knows": lambda x: (lambda m: (x - m).exp() / ((x - m).exp().sum(-1, keepdim=True) + (-m).exp()))(x.mean(-1, keepdim=True)),
    "less one": lambda x: x.exp() / (x.exp().sum(-1, keepdim=True) - 0.1),
    "summed over queries": lambda x: (lambda e: e / (e.sum(-2, keepdim=True) + 1))(x.exp()),
    "two columns padded": lambda x: F.pad(x, (0, 2)).softmax(-1)[..., :-2],
    "one column each side": lambda x: F.pad(x, (1, 1)).softmax(-1)[..., 1:-1],
    "another column cut": lambda x: F.pad(x, (0, 1)).softmax(-1)[..., 1:],
    "a column for each key": lambda x: (lambda m: (x - m).exp() / ((x - m).exp().sum(-1, keepdim=True) + (x.detach() * 0.1 - m).exp()))(x.amax(-1, keepdim=True)),
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alikes(name):
    """Right, and not fused."""
    assert not any(r.fused for r in compare(lambda q, k, v: LOOK_ALIKES[name](s(q, k)) @ v, *qkv()))
