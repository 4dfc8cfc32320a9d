"""Public lists of attention functions, as plain PyTorch in our own words: each fused, and right in values and gradients.

The 30 forms of Inductor's attention fusion (tested in its test_fused_attention.py), the score and mask functions that FlexAttention's
documentation and attention-gym show, and the variants that Flashlight's paper compiles.
"""
from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from .capture import capture, compare, keep, rand

B, H, M, D = 2, 4, 6, 8
LOWEST = torch.finfo(torch.float32).min


def bhmd(*more):
    return lambda: (*(rand(B, H, M, D, seed=s) for s in (1, 2, 3)), *more)


def bmhd(*more):
    return lambda: (*(rand(B, M, H, D, seed=s) for s in (1, 2, 3)), *more)


def heads(*tensors):
    return tuple(t.permute(0, 2, 1, 3) for t in tensors)


def drop(x, p):
    return F.dropout(x, p)


PAD = keep(B, M)
ADDED = torch.where(keep(B, 1, 1, M), 0.0, -math.inf)
ROWS: dict[str, tuple] = {}


def row(args):
    def add(fn):
        ROWS[fn.__name__] = (fn, args)
        return fn
    return add


# ---------------------------------------------------------------------------------------------------- Inductor's forms; p is dropout's

def simple(scale, dropped):
    def fn(q, k, v, p):
        w = scale(q @ k.transpose(-2, -1)).softmax(-1)
        return (drop(w, p) if dropped else w) @ v
    return fn


for number, (scale, dropped) in enumerate(((lambda s: s / 3.0, False), (lambda s: s * 0.4, False), (lambda s: s / 3.0, True), (lambda s: s * 0.4, True)), 1):
    ROWS[f"inductor_{number}"] = (simple(scale, dropped), bhmd())


@row(bhmd(ADDED))
def inductor_5(q, k, v, mask, p):
    return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(D) + mask, dim=-1) @ v


@row(bhmd(ADDED))
def inductor_6(q, k, v, mask, p):
    return drop(torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(D) + mask, dim=-1), p) @ v


def in_float(dropped, queries_first):
    def fn(q, k, v, p):
        q, k, v = heads(q, k, v)
        s = (q / math.sqrt(D)) @ k.transpose(-2, -1) if queries_first else q @ k.transpose(-2, -1) / math.sqrt(D)
        w = torch.softmax(s.float(), -1)
        return (drop(w, p) if dropped else w).to(v.dtype) @ v
    return fn


for number, how in ((7, (True, False)), (8, (False, False)), (9, (True, True)), (10, (False, True))):
    ROWS[f"inductor_{number}"] = (in_float(*how), bmhd())


@row(bmhd())
def inductor_11(q, k, v, p):
    q, k, v = heads(q, k, v)
    return q.matmul(k.transpose(-2, -1)).div(math.sqrt(D)).softmax(dim=-1).matmul(v)


@row(bmhd())
def inductor_12(q, k, v, p):
    q, k, v = heads(q, k, v)
    return drop(q.matmul(k.transpose(-2, -1)).div(math.sqrt(D)).softmax(dim=-1), p).matmul(v)


@row(lambda: tuple(rand(B * H, M, D, seed=s) for s in (1, 2, 3)))
def inductor_13(q, k, v, p):
    return torch.bmm(drop(torch.bmm(q, k.transpose(1, 2)).softmax(-1), p), v)


@row(bmhd(ADDED))
def inductor_14(q, k, v, mask, p):
    q, k, v = heads(q, k, v)
    return (q.matmul(k.transpose(-2, -1)).div(3.0) + mask).softmax(-1).matmul(v)


@row(bmhd(PAD))
def inductor_15(q, k, v, pad, p):
    q, k, v = heads(q, k, v)
    s = q @ k.transpose(-2, -1) / 3.0
    return s.masked_fill((pad == 0).view(B, 1, 1, M).expand_as(s), -math.inf).softmax(-1) @ v


@row(bmhd(ADDED))
def inductor_16(q, k, v, mask, p):
    q, k, v = heads(q, k, v)
    return drop((q.matmul(k.transpose(-2, -1)).div(3.0) + mask).softmax(-1), p).to(v.dtype).matmul(v)


@row(bmhd(PAD))
def inductor_17(q, k, v, pad, p):
    q, k, v = heads(q, k, v)
    s = q @ k.transpose(-2, -1) / 3.0
    return drop(s.masked_fill((pad == 0).view(B, 1, 1, M).expand_as(s), -math.inf).softmax(-1), p) @ v


def gpt(returned, added):
    def fn(q, k, v, causal, mask, p):
        q, k, v = heads(q, k, v)
        s = q.matmul(k.permute(0, 1, 3, 2)).div(torch.full([], math.sqrt(D)))
        s = torch.where(causal, s, torch.full((), LOWEST))
        out = drop((s + mask if added else s).softmax(-1), p).matmul(v)
        return (out, k, v) if returned else out
    return fn


ROWS["inductor_18"] = (gpt(True, False), bmhd(torch.ones(M, M, dtype=torch.bool).tril(), ADDED))
ROWS["inductor_19"] = (lambda q, k, v, causal, pad, p: drop((torch.where(causal, q @ k.mT / torch.full([], math.sqrt(D)), torch.full((), LOWEST))
                                                             + torch.where(pad[:, None, None], 0.0, LOWEST)).softmax(-1).to(v.dtype), p) @ v,
                       bhmd(torch.ones(M, M, dtype=torch.bool).tril(), PAD))


@row(bmhd(PAD))
def inductor_20(q, k, v, pad, p):
    q, k, v = heads(q, k, v)
    s = q.div(math.sqrt(D)) @ k.transpose(-2, -1)
    return drop(s.masked_fill((pad == 0).view(B, 1, 1, M).expand_as(s), torch.full((), -math.inf)).softmax(-1), p) @ v


def t5(bias, dropped, returned):
    def fn(q, k, v, table, p):
        q, k, v = heads(q, k, v)
        s = q.matmul(k.permute(0, 1, 3, 2))
        if bias:
            s += table
        w = s.float().softmax(-1).type_as(q)
        out = (drop(w, p) if dropped else w).matmul(v)
        return (out, k, v) if returned else out
    return fn


for number, how in ((21, (True, False, False)), (22, (True, False, True)), (23, (False, False, True)),
                    (25, (True, True, False)), (26, (True, True, True)), (27, (False, True, True))):
    ROWS[f"inductor_{number}"] = (t5(*how), bmhd(rand(1, H, M, M)))


@row(bhmd(ADDED))
def inductor_24(q, k, v, mask, p):
    q, k, v = (t.reshape(B * H, -1, D) for t in (q, k, v))
    s = (torch.bmm(q, k.transpose(1, 2)).view(B, H, M, -1) + mask).view(B * H, M, -1)
    return torch.bmm(F.softmax(s, -1), v).view(B, H, M, D)


ROWS["inductor_28"] = (lambda q, k, v, p: simple(lambda s: s * 0.4, True)(*(t.permute(0, 2, 1, 3) for t in (q, k, v)), p), bmhd())


@row(bmhd(ADDED))
def inductor_29(q, k, v, mask, p):
    q, k, v = heads(q, k, v)
    return torch.ops.aten._safe_softmax((q * D ** -0.25) @ (k.transpose(-2, -1) * D ** -0.25) + mask, -1) @ v


@row(bmhd())
def inductor_30(q, k, v, p):
    q, k, v = heads(q, k, v)
    return torch.ops.aten._safe_softmax((q * D ** -0.25) @ (k.transpose(-2, -1) * D ** -0.25), -1) @ v


# ---------------------------------------------------------------------------------------------------- score and mask functions

def i():
    return torch.arange(M)[:, None]


def j():
    return torch.arange(M)[None, :]


def h():
    return torch.arange(H)[:, None, None]


def scored(change):
    return lambda q, k, v, *rest: change(q @ k.mT * D ** -0.5, *rest[:-1]).softmax(-1) @ v


def seen(condition):
    return scored(lambda s, *rest: s.masked_fill(~condition(*rest), -math.inf))


WIDTH = 3  # of images whose rows are folded into positions: 2 x 3
DOCS = torch.tensor([0, 0, 0, 1, 1, 2])
CLEAN = M // 2  # block diffusion: noisy tokens, then the clean ones
SCORES = {
    "unchanged": (lambda s: s, ()),
    "relative position": (lambda s: s + (i() - j()), ()),
    "checkerboard": (lambda s: torch.where((i() + j()) % 2 == 0, s * 0.5, s * 2.0), ()),
    "causal": (lambda s: torch.where(j() <= i(), s, -math.inf), ()),
    "table of relative positions": (lambda s, t: s + t[i() - j() + M - 1], (rand(2 * M - 1),)),
    "tables of heads": (lambda s, t: s + t[h(), i() - j() + M - 1], (rand(H, 2 * M - 1),)),
    "bias of each pair": (lambda s, t: s + t, (rand(H, M, M),)),
    "bias of each head": (lambda s, t: s + t[:, None, None], (rand(H),)),
    "bias of each batch": (lambda s, t: s + t[:, None, None, None] * j(), (rand(B),)),
    "slopes (ALiBi)": (lambda s: s + torch.exp2(-(h() + 1) * 8.0 / H) * (j() - i()), ()),
    "slopes as a tensor": (lambda s, t: s + t[:, None, None] * (j() - i()), (rand(H),)),
    "softcap": (lambda s: torch.tanh(s / 20.0) * 20.0, ()),
    "softcap and causal": (lambda s: torch.where(j() <= i(), torch.tanh(s / 20.0) * 20.0, -math.inf), ()),
    "latent attention: rotary part": (lambda s, qr, kr: s + qr @ kr.mT, (rand(B, H, M, 4), rand(B, 1, M, 4))),
    "graph distances (Graphormer)": (lambda s, t, d: s + t[d][:, None], (rand(8), torch.randint(0, 8, (B, M, M), generator=torch.Generator().manual_seed(0)))),
    "sandwich": (lambda s: s + torch.cos((i() - j()).float() / 10.0) + torch.cos((i() - j()).float() / 100.0), ()),
    "natural logarithm of lengths": (lambda s: s * torch.log(i() + 2.0), ()),
    "activation": (lambda s: F.relu(s), ()),
    "squared": (lambda s: s * s, ()),
}
MASKS = {
    "causal": (lambda: j() <= i(), ()),
    "sliding window": (lambda: (j() <= i()) & (i() - j() <= 2), ()),
    "two-sided window": (lambda: (i() - j()).abs() <= 2, ()),
    "dilated window": (lambda: (j() <= i()) & ((i() - j()) % 2 == 0) & (i() - j() <= 4), ()),
    "global and window": (lambda: ((i() - j()).abs() <= 1) | (j() < 2) | (i() < 2), ()),
    "prefix": (lambda: (j() < 3) | (j() <= i()), ()),
    "prefix of each batch": (lambda n: (j() < n[:, None, None, None]) | (j() <= i()), (torch.tensor([2, 4]),)),
    "documents": (lambda d: d[:, None] == d[None, :], (DOCS,)),
    "documents and causal": (lambda d: (d[:, None] == d[None, :]) & (j() <= i()), (DOCS,)),
    "padding": (lambda pad: pad[:, None, None, :], (PAD,)),
    "lengths": (lambda n: j() < n[:, None, None, None], (torch.tensor([4, 6]),)),
    "neighbours in an image (natten)": (lambda: ((i() // WIDTH - j() // WIDTH).abs() <= 1) & ((i() % WIDTH - j() % WIDTH).abs() <= 1), ()),
    "tiles of an image": (lambda: (i() // WIDTH == j() // WIDTH), ()),
    "strided": (lambda: (j() <= i()) & (((i() - j()) % 3 == 0) | (i() - j() < 3)), ()),
    "transfusion": (lambda m: (j() <= i()) | (m[:, None] == m[None, :]) & (m[None, :] > 0), (torch.tensor([0, 1, 1, 0, 2, 2]),)),
    "block diffusion": (lambda: torch.where(i() < CLEAN, (j() < CLEAN) & (i() == j()) | (j() >= CLEAN) & (j() - CLEAN < i()),
                                            (j() >= CLEAN) & (j() <= i())), ()),
    "shared prefix": (lambda o: (j() < 2) | (o[:, None] == o[None, :]) & (j() <= i()), (torch.tensor([0, 0, 1, 1, 2, 2]),)),
    "some heads local": (lambda: (h() % 2 == 0) | ((i() - j()).abs() <= 1), ()),
    "cached queries": (lambda: j() <= i() + 0, ()),
    "blocks": (lambda layout: layout[i() // 2, j() // 2], (torch.ones(3, 3, dtype=torch.bool).tril(),)),
}
ROWS |= {f"score: {n}": (scored(fn), bhmd(*more)) for n, (fn, more) in SCORES.items()}
ROWS |= {f"mask: {n}": (seen(fn), bhmd(*more)) for n, (fn, more) in MASKS.items()}


# ---------------------------------------------------------------------------------------------------- Flashlight's variants

@row(bhmd(rand()))
def differential(q, k, v, factor, p):
    (q1, q2), (k1, k2) = q.chunk(2, -1), k.chunk(2, -1)
    first, second = ((a @ b.mT * (D // 2) ** -0.5).softmax(-1) for a, b in ((q1, k1), (q2, k2)))
    return (first - factor * second) @ v


@row(lambda: (*(rand(B, 3, M, H, D, seed=s) for s in (1, 2, 3)), rand(B, 3, M, H, D, seed=4), rand(B, 1, H, M, M), keep(B, 3, M)))
def evoformer_row(q, k, v, gate, pair, mask, p):
    """Attention along the rows of an alignment, with a bias from the pair representation and a gate."""
    s = torch.einsum("brihd,brjhd->brhij", q * D ** -0.5, k) + (mask.float() - 1.0)[:, :, None, None, :] * 1e9 + pair
    return torch.einsum("brhij,brjhd->brihd", s.softmax(-1), v) * gate.sigmoid()


@row(lambda: (*(rand(B, H, M, D, seed=s) for s in (1, 2, 3)), rand(B, H, M, 2, 3), rand(B, H, M, 2, 3), rand(B, H, M, M), rand(H)))
def invariant_points(q, k, v, points_q, points_k, pair, weight, p):
    """AlphaFold's invariant point attention: scores from scalars, pairs, and distances of points."""
    distance = (points_q.flatten(3).square().sum(-1)[..., None] + points_k.flatten(3).square().sum(-1)[..., None, :]
                - 2 * points_q.flatten(3) @ points_k.flatten(3).mT)
    s = q @ k.mT * (3 * D) ** -0.5 + pair - 0.5 * F.softplus(weight)[:, None, None] * distance
    return (s * 3 ** -0.5).softmax(-1) @ v


@row(bmhd(rand(H, M, M), rand(B, H, M)))
def gated_with_a_bias(q, k, v, bias, gate, p):
    q, k, v = heads(q, k, v)
    return ((q @ k.mT * D ** -0.5 + bias).softmax(-1) @ v) * gate.sigmoid()[..., None]


@pytest.mark.parametrize("name", ROWS)
def test_fused_and_right(name):
    fn, args = ROWS[name]
    regions = compare(lambda *a: fn(*a, 0.0), *args())
    assert regions and [str(r.refusal) for r in regions if not r.fused] == []


@pytest.mark.parametrize("name", [n for n in ROWS if n.startswith("inductor")])
def test_fused_with_dropout(name):
    fn, args = ROWS[name]
    regions = capture(lambda *a: fn(*a, 0.4), *args())
    assert regions and [str(r.refusal) for r in regions if not r.fused] == []


def test_every_form_is_here():
    assert {f"inductor_{n}" for n in range(1, 31)} <= ROWS.keys() and len(ROWS) >= 70
