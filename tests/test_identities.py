"""Attention that is written another way, brought into the plain form by identities: fused, with the spec of its meaning, and right."""
from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from .capture import capture, compare, keep, rand

B, H, M, N, D = 2, 3, 5, 7, 4
LOWEST = torch.finfo(torch.float32).min


def qkv(grad=True):
    return rand(B, H, M, D, grad=grad, seed=1), rand(B, H, N, D, grad=grad, seed=2), rand(B, H, N, D, grad=grad, seed=3)


def s(q, k):
    return q @ k.mT * 0.5


def late(e, v):
    return (e @ v) / e.sum(-1, keepdim=True)


def _changed_between(q, k, v):
    first, k = s(q, k), k.clone()
    k.mul_(2)
    return (first + s(q, k)).softmax(-1) @ v


def again(p):
    return p / p.sum(-1, keepdim=True)


def shifted(x):
    return torch.exp(x - x.amax(-1, keepdim=True))


def causal():
    return torch.ones(M, N).tril()


PLAIN = "score = qk * 0.5"
MASKED = "where   j <= i"

# name: (function, inputs besides q, k and v, sites, what the spec's text says)
CASES = {
    # normalised late
    "late": (lambda q, k, v: late(s(q, k).exp(), v), (), 1, PLAIN),
    "late, shifted": (lambda q, k, v: late(shifted(s(q, k)), v), (), 1, PLAIN),
    "late, einsum, heads last": (lambda q, k, v: _late_einsum(q, k, v), (), 1, PLAIN),
    "late, flat": (lambda q, k, v: late(shifted(s(q.flatten(0, 1), k.flatten(0, 1))), v.flatten(0, 1)).unflatten(0, (B, H)), (), 1, PLAIN),
    "late, masked": (lambda q, k, v: late(s(q, k).masked_fill(causal() == 0, -math.inf).exp(), v), (), 1, MASKED),
    "late, dropped": (lambda q, k, v: (lambda e: (F.dropout(e, 0.0) @ v) / e.sum(-1, keepdim=True))(shifted(s(q, k))), (), 1, PLAIN),
    "masked exp": (lambda q, k, v: again(s(q, k).exp() * causal()) @ v, (), 1, MASKED),
    "masked exp, late": (lambda q, k, v: late(shifted(s(q, k)) * causal(), v), (), 1, MASKED),
    # products as sums
    "scores by multiply and sum": (lambda q, k, v: ((q.unsqueeze(3) * k.unsqueeze(2)).sum(-1) * 0.5).softmax(-1) @ v, (), 1, PLAIN),
    "both products by multiply and sum": (lambda q, k, v: (((q[:, :, :, None] * k[:, :, None]).sum(-1) * 0.5).softmax(-1)[..., None]
                                                           * v[:, :, None]).sum(3), (), 1, PLAIN),
    "one query, by multiply and sum": (lambda q, k, v: ((q[:, :, :1].unsqueeze(3) * k.unsqueeze(2)).sum(-1) * 0.5).softmax(-1) @ v, (), 1, PLAIN),
    "shared keys, by multiply and sum": (lambda q, k, v: ((q.unsqueeze(3) * k[0, 0]).sum(-1) * 0.5).softmax(-1) @ v, (), 1, PLAIN),
    # normalised again
    "masked and normalised again": (lambda q, k, v: again(s(q, k).softmax(-1) * causal()) @ v, (), 1, MASKED),
    "filled with 0 and normalised again": (lambda q, k, v, m: again(s(q, k).softmax(-1).masked_fill(~m, 0.0)) @ v, (keep(B, 1, M, N),), 1, "mask[b, i, j]"),
    "chosen and normalised late": (lambda q, k, v, m: late(torch.where(m, s(q, k).softmax(-1), 0.0), v), (keep(B, 1, M, N),), 1, "mask[b, i, j]"),
    "two masks, normalised again": (lambda q, k, v, m: again(s(q, k).softmax(-1) * causal() * m) @ v, (keep(B, 1, M, N),), 1, "(j <= i) & mask[b, i, j]"),
    "normalised, not masked": (lambda q, k, v: again(s(q, k).softmax(-1) * torch.ones(M, N)) @ v, (), 1, PLAIN),
    # set to 0 where hidden
    "hidden weights set to 0": (lambda q, k, v, m: s(q, k).masked_fill(~m, LOWEST).softmax(-1).masked_fill(~m, 0.0) @ v, (_empty_rows := keep(B, 1, M, N) & (torch.arange(M) != 1)[:, None],), 1, "empty   zero"),
    "hidden weights times 0": (lambda q, k, v, m: (s(q, k).masked_fill(~m, LOWEST).softmax(-1) * m) @ v, (_empty_rows,), 1, "empty   zero"),
    "hidden weights set to 0 by a tensor": (lambda q, k, v, m: F.dropout(torch.masked_fill(s(q, k).masked_fill(~m, LOWEST).softmax(-1), m == torch.tensor(False), torch.tensor(0.0)), 0.0) @ v, (_empty_rows,), 1, "empty   zero"),
    "hidden weights chosen": (lambda q, k, v, m: torch.where(m, torch.where(m, s(q, k), -math.inf).softmax(-1), 0.0) @ v, (keep(B, 1, M, N),), 1, "empty   zero"),
    "hidden weights times 0, NaN where no key is seen": (lambda q, k, v, m: (s(q, k).masked_fill(~m, -math.inf).softmax(-1) * m.float()) @ v, (keep(B, 1, M, N),), 1, "empty   nan"),
    # shifted before they are scaled
    "shifted, then scaled": (lambda q, k, v: (lambda x: ((x - x.amax(-1).unsqueeze(-1)) * 32).softmax(-1) @ v)(s(q, k) / 32), (), 1, PLAIN),
    # shifted by more than a row's largest, or held from below
    "shifted by the largest of all": (lambda q, k, v: (lambda x: (x - x.max()).softmax(-1) @ v)(s(q, k)), (), 1, PLAIN),
    "shifted by each head's largest": (lambda q, k, v: (lambda x: (x - x.amax((2, 3), keepdim=True)).softmax(-1) @ v)(s(q, k)), (), 1, PLAIN),
    "shifted by each head's largest, put back": (lambda q, k, v: (lambda x: (x - x.amax((2, 3))[..., None, None]).softmax(-1) @ v)(s(q, k)), (), 1, PLAIN),
    "shifted by the largest of all, written out": (lambda q, k, v: (lambda x: again((x - x.max()).exp()) @ v)(s(q, k)), (), 1, PLAIN),
    "shifted by the logarithm of the sum": (lambda q, k, v: (lambda x: (x - x.logsumexp(-1, keepdim=True)).softmax(-1) @ v)(s(q, k)), (), 1, PLAIN),
    "shifted, then clamped": (lambda q, k, v: (lambda x: (x - x.max(-1, keepdim=True)[0]).clamp(min=-50000).clamp(max=50000).softmax(-1) @ v)(s(q, k)), (), 1, PLAIN),
    # keys in two parts
    "global and local keys": (lambda q, k, v, g, w: (lambda p: p[..., :3] @ w + p[..., 3:] @ v)(torch.cat([s(q, g), s(q, k)], -1).softmax(-1)),
                              (rand(B, H, 3, D), rand(B, H, 3, D)), 1, "softmax_j"),
    "global and local keys, in blocks": (lambda q, k, v, g, w, m: _in_blocks(q, k, v, g, w, m), (rand(B, H, 3, D), rand(B, H, 3, D), torch.tensor([N, 5])), 1, "(j <= 2) |"),
    # sums and factors
    "scaled": (lambda q, k, v: (s(q, k).softmax(-1) / 0.5) @ v, (), 1, PLAIN),
    "negative": (lambda q, k, v: -s(q, k).softmax(-1) @ v, (), 1, PLAIN),
    "gated heads": (lambda q, k, v, g: (s(q, k).softmax(-1) * g.sigmoid()[:, None, None]) @ v, (rand(H),), 1, PLAIN),
    "gated heads, einsum": (lambda q, k, v, g: torch.einsum("bhij,bhjd->bihd", s(q, k).softmax(-1) * g.view(1, H, 1, 1), v), (rand(H),), 1, PLAIN),
    "gated queries": (lambda q, k, v, g: (s(q, k).softmax(-1) * g[:, None, :, None]) @ v, (rand(B, M),), 1, PLAIN),
    "queries blanked": (lambda q, k, v, m: s(q, k).softmax(-1).masked_fill(~m[:, None, :, None], 0.0) @ v, (keep(B, M),), 1, PLAIN),
    "queries blanked that a mask hides too": (lambda q, k, v, m: F.dropout(s(q, k).masked_fill(~m, LOWEST).softmax(-1).masked_fill(~m.any(-1, keepdim=True), 0.0), 0.0) @ v,
                                              (_empty_rows,), 1, "empty   mean"),
    "queries blanked, einsum, heads last": (lambda q, k, v, m: torch.einsum("bhij,bhjd->bihd", torch.where(m[:, None, :, None], s(q, k).softmax(-1), 0.0), v), (keep(B, M),), 1, PLAIN),
    "queries blanked by the mask of the scores": (lambda q, k, v, m: s(q, k).masked_fill(~m[:, None, :, None], LOWEST).softmax(-1).masked_fill(~m[:, None, :, None], 0.0) @ v, (keep(B, M),), 1, "empty   zero"),
    "queries blanked, NaN made 0 before": (lambda q, k, v, m: s(q, k).masked_fill(~m, -math.inf).softmax(-1).nan_to_num(0.0).masked_fill(~m.any(-1, keepdim=True), 0.0) @ v, (_empty_rows,), 1, "empty   zero"),
    "queries gated, then blanked": (lambda q, k, v, m: (s(q, k).softmax(-1) * q[..., :1].sigmoid()).masked_fill(~m[:, None, :, None], 0.0) @ v, (keep(B, M),), 1, PLAIN),
    "queries blanked under a causal mask": (lambda q, k, v, m: (s(q, k) + torch.full((M, N), -math.inf).triu(1)).softmax(-1).masked_fill(~m[:, None, :, None], 0.0) @ v, (keep(B, M),), 1, "j <= i"),
    "keys weighted": (lambda q, k, v, w: (s(q, k).softmax(-1) * w[:, None, None]) @ v, (rand(B, N),), 1, PLAIN),
    "keys weighted, transposed": (lambda q, k, v, w: (v.mT @ (s(q, k).softmax(-1) * w[:, None, None]).mT).mT, (rand(B, N),), 1, PLAIN),
    "differential": (lambda q, k, v, t: (s(q, k).softmax(-1) - t.exp() * s(q, 2 * k + 1).softmax(-1)) @ v, (rand(),), 2, PLAIN),
    "differential, a factor for each head": (lambda q, k, v, t: (s(q, k).softmax(-1) - t.view(H, 1, 1) * s(q, 2 * k + 1).softmax(-1)) @ v, (rand(H),), 2, PLAIN),
    "differential, heads in pairs": (lambda q, k, v, t: (lambda p: (p[:, :, 0] - t * p[:, :, 1]) @ v)(
        s(*(x.unflatten(-1, (2, 2)).transpose(2, 3).flatten(1, 2) for x in (q, k))).softmax(-1).view(B, H, 2, M, N)), (rand(),), 2, "score = qk * 0.5"),
    "mean of two": (lambda q, k, v: ((s(q, k).softmax(-1) + s(q, 2 * k).softmax(-1)) / 2) @ v, (), 2, PLAIN),
    # several products
    "two values": (lambda q, k, v, w: (lambda p: (p @ v, p @ w))(s(q, k).softmax(-1)), (rand(B, H, N, 6),), 2, PLAIN),
    "dropout before a cast": (lambda q, k, v: F.dropout(s(q, k).float().softmax(-1), 0.0).to(v.dtype) @ v, (), 1, PLAIN),
    # a product that is written twice
    "twice, where": (lambda q, k, v, m: torch.where(m, (q @ k.mT) * 2, (q @ k.mT) - 3).softmax(-1) @ v, (keep(M, N),), 1, "score = where(mask[i, j], qk * 2.0, qk + (-3.0))"),
    "twice, a function of it": (lambda q, k, v: (s(q, k) + torch.tanh(s(q, k))).softmax(-1) @ v, (), 1, "score = qk * 0.5 + tanh(qk * 0.5)"),
    "twice, changed between": (lambda q, k, v: _changed_between(q, k, v), (), 1, "+ bias[b, h, i, j]"),
}


def _in_blocks(q, k, v, g, w, lengths):
    """Every query of a block sees the keys of that block and the global ones; the last block is padded (PEGASUS-X, Phang et al. 2022)."""
    local = [F.pad(t, (0, 0, 0, 8 - t.shape[2])).unflatten(2, (2, 4)) for t in (q, k, v)]
    hidden = F.pad(F.pad((torch.arange(N) >= lengths[:, None]).float() * LOWEST, (0, 1), value=LOWEST).view(B, 2, 4), (3, 0))
    scores = torch.cat([torch.einsum("bhnkf,bhgf->bhnkg", local[0], g), torch.einsum("bhnkf,bhnxf->bhnkx", *local[:2])], -1) + hidden[:, None, :, None]
    p = F.dropout(scores.softmax(-1), 0.0)
    return torch.einsum("bhnkg,bhgf->bhnkf", p[..., :3], w) + torch.einsum("bhnkx,bhnxf->bhnkf", p[..., 3:], local[2])


def _late_einsum(q, k, v):
    e = shifted(s(q, k))
    return torch.einsum("bhij,bhjd->bihd", e, v) / e.sum(-1).transpose(1, 2).unsqueeze(-1)


@pytest.mark.parametrize("name", CASES)
def test_fused_and_right(name):
    fn, more, sites, text = CASES[name]
    regions = compare(fn, *qkv(), *more)
    assert [str(r.refusal) for r in regions if not r.fused] == [] and len(regions) == sites
    assert any(text in str(r.spec) for r in regions), "\n".join(str(r.spec) for r in regions)


@pytest.mark.parametrize("name", ["late", "late, shifted", "late, einsum, heads last", "scores by multiply and sum",
                                  "both products by multiply and sum", "normalised, not masked", "scaled", "gated heads", "dropout before a cast"])
def test_one_spec(name):
    region, = capture(CASES[name][0], *qkv(), *CASES[name][1])
    plain, = capture(lambda q, k, v: s(q, k).softmax(-1) @ v, *qkv())
    assert str(region.spec) == str(plain.spec)


def logits(q, k, v):
    x = s(q, k).masked_fill(causal() == 0, -math.inf)
    return x.softmax(-1) @ v, x.logsumexp(-1), torch.logsumexp(x, -1, keepdim=True) * 2


def gated_by_the_sum(q, k, v):
    x = s(q, k) + 3.0
    return x.softmax(-1) @ v * x.logsumexp(-1).sigmoid()[..., None]


def gated_in_front(q, k, v, sinks):
    """The gate is ready before the second product: it moves behind it."""
    x = s(q, k) + torch.full((M, N), LOWEST).triu(1)
    lse = torch.logsumexp(x, dim=-1)
    gate = (lse - sinks.view(1, -1, 1)).to(torch.float32).sigmoid()
    out = F.dropout(x.softmax(-1), 0.0) @ v
    return (out * gate.unsqueeze(-1)).transpose(1, 2).contiguous(), gate


def weights_gated_in_front(q, k, v):
    x = s(q, k)
    gate = x.logsumexp(-1, keepdim=True).sigmoid()
    return (x.softmax(-1) * gate) @ v


@pytest.mark.parametrize("fn", (logits, gated_by_the_sum, gated_in_front, weights_gated_in_front), ids=lambda f: f.__name__)
def test_log_sum_exp_is_served(fn):
    """The scores themselves are no longer computed. A number added to all scores counts here."""
    args = (*qkv(), *([rand(H)] if fn is gated_in_front else []))
    regions = compare(fn, *args)
    assert [r.fused for r in regions] == [True]
    torch._dynamo.reset()
    torch.compile(fn, backend="flashfx", options={"inner": "eager", "verify": True})(*args)
    torch._dynamo.reset()
    graphs = []

    def backend(gm, example_inputs):
        from flashfx.passes.pipeline import rewrite
        rewrite(gm)
        graphs.append(gm)
        return gm.forward

    torch.compile(fn, backend=backend)(*args)
    names = [str(n.target) for n in graphs[0].graph.nodes]
    assert not any("matmul" in n or "logsumexp" in n or "softmax" in n for n in names), names


def second_attention_between(q, k, v):
    """What reads the log-sum-exp in front is itself attention: nothing moves past it."""
    x = s(q, k)
    inner = s(q * x.logsumexp(-1, keepdim=True).sigmoid(), k).softmax(-1) @ v
    return x.softmax(-1) @ (v + inner.mean(-2, keepdim=True))


def changed_between(q, k, v):
    x, scale = s(q, k), torch.ones(M)
    gate = x.logsumexp(-1) + scale
    scale.mul_(3.0)
    return x.softmax(-1) @ v * gate[..., None]


def gate_changed(q, k, v):
    x = s(q, k)
    gate = x.logsumexp(-1) * 0.5
    gate.add_(2.0)
    return x.softmax(-1) @ v * gate[..., None]


def gate_drawn(q, k, v):
    x = s(q, k)
    gate = F.dropout(x.logsumexp(-1), 0.5) * 0.0
    return x.softmax(-1) @ v + gate[..., None]


def gate_without_gradient(q, k, v):
    x = s(q, k)
    with torch.no_grad():
        gate = x.logsumexp(-1).sigmoid()
    return x.softmax(-1) @ v * gate[..., None]


@pytest.mark.parametrize("fn", (second_attention_between, changed_between, gate_changed, gate_drawn, gate_without_gradient), ids=lambda f: f.__name__)
def test_readers_that_must_stay(fn):
    assert all(r.fused for r in compare(fn, *qkv()))


HIDDEN_ROWS = {
    "replaced": lambda x, m: x.masked_fill(~m, LOWEST),
    "added": lambda x, m: x + torch.where(m, 0.0, LOWEST),
    "smaller": lambda x, m: x.masked_fill(~m, -1e9),  # the scores show in the digits: computed by the model itself
}


@pytest.mark.parametrize("name", HIDDEN_ROWS)
def test_log_sum_exp_of_hidden_rows(name):
    """A finite constant shows in the log-sum-exp of a row that it hides entirely."""
    mask = keep(B, 1, M, N)
    mask[0, 0, 1] = False
    fn = lambda q, k, v, m: (lambda x: (x.softmax(-1) @ v, x.logsumexp(-1), x.logsumexp(-1).sigmoid()))(HIDDEN_ROWS[name](s(q, k), m))
    assert [r.fused for r in compare(fn, *qkv(), mask)] == [True]


def test_late_and_dynamic():
    regions = compare(lambda q, k, v: late(shifted(s(q, k)), v), *qkv(), dynamic=True)
    assert [r.fused for r in regions] == [True]


def test_rows_hidden_by_a_finite_constant_without_a_shift():
    """exp(finfo.min) is 0: such a row is 0 / 0, where softmax would yield a mean."""
    mask = keep(B, 1, M, N)
    mask[0, 0, 1] = False
    fn = lambda q, k, v, m: again(s(q, k).masked_fill(~m, LOWEST).exp()) @ v
    region, = compare(fn, *qkv(grad=False), mask)
    assert region.fused and "empty   nan" in str(region.spec)


def test_shared_dropout_is_not_drawn_again():
    """A factor behind a dropout that another product reads too stays where it is."""
    def fn(q, k, v):
        p = F.dropout(s(q, k).softmax(-1) * 2.0, 0.5)
        return p @ v - p @ v

    torch._dynamo.reset()
    from .capture import Counting
    assert not torch.compile(fn, backend=Counting())(*qkv(False)).any()


def test_a_sum_whose_rows_are_taken_in_another_order(caplog):
    """No identity applies to it, and none stumbles over it (MobileViT's folding)."""
    def fn(q, k, v):
        out = (s(q, k).softmax(-1) @ v).flatten(1, 2) + q.flatten(1, 2)
        return out.unflatten(1, (3, -1)).transpose(1, 2).flatten(1, 2) + out

    (region,) = compare(fn, *qkv())
    assert region.fused and "failed" not in caplog.text


def test_both_sites_of_one_node_or_none():
    """One of two softmaxes is read elsewhere: what is left is computed as the model wrote it."""
    def fn(q, k, v):
        p = s(q, k).softmax(-1)
        return (p - s(q, 2 * k).softmax(-1)) @ v, p

    regions = compare(fn, *qkv())
    assert sorted(r.fused for r in regions) == [False, True]


# ---------------------------------------------------------------------------------------------------- no row is hidden entirely

def triangle():
    return torch.arange(N) <= torch.arange(M)[:, None]


def window():
    return torch.arange(N) > torch.arange(M)[:, None] - 3


SEEN = {
    "two constants": lambda q, k, v: s(q, k).masked_fill(~triangle(), -1e9).masked_fill(~window(), LOWEST).softmax(-1) @ v,
    "constants that add up": lambda q, k, v: (s(q, k) + (1 - triangle().float()) * -1e9 + (1 - window().float()) * -1e9).softmax(-1) @ v,
    "normalised again": lambda q, k, v: normalise(s(q, k).masked_fill(~triangle(), LOWEST).softmax(-1) * window()) @ v,
    "less logsumexp": lambda q, k, v: (lambda x: torch.exp(x - x.logsumexp(-1, keepdim=True)))(s(q, k).masked_fill(~triangle(), -1e9)) @ v,
    "bias behind": lambda q, k, v: (s(q, k).masked_fill(~triangle(), LOWEST) + k.sum(-1)[:, :, None] * 0.1).softmax(-1) @ v,
}


def normalise(p):
    return p / p.sum(-1, keepdim=True)


@pytest.mark.parametrize("name", SEEN)
def test_constants_of_many_kinds_where_every_row_sees_a_key(name):
    regions = compare(SEEN[name], *qkv())
    assert [str(r.refusal) for r in regions if not r.fused] == [] and len(regions) == 1


def test_a_row_that_sees_nothing_is_noticed():
    hidden = lambda: (torch.arange(N) <= torch.arange(M)[:, None]) & (torch.arange(N) >= 1)
    region, = compare(lambda q, k, v: s(q, k).masked_fill(~triangle(), -1e9).masked_fill(~hidden(), LOWEST).softmax(-1) @ v, *qkv())
    assert "rows that are hidden entirely follow no single rule" in str(region.refusal)
