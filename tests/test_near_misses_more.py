"""More functions that are refused, each with its exact stage and reason: weights, masks and gradients that only look right."""
from __future__ import annotations

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention

from .capture import compare, keep, rand
from .test_near_misses import B, CHANGED, D, DEPENDS, GRADIENT, LOWEST, M, N, READ, ROWS as FIRST, Row, hidden_rows, qkv, scores

ROWS: dict[str, Row] = {}
OWN = "the scores are compared with a tensor that is computed from them"
LAYERS = [torch.nn.Linear(D, D) for _ in range(2)]
MASKED = ": masked, and not normalised again"
AGAIN = "weights are masked and normalised again after a mask of a finite constant: rows that only both hide follow no single rule"


def row(reason, args=qkv, stage="lift", sites=1):
    def add(fn):
        ROWS[fn.__name__] = Row(fn, reason, args, stage, sites)
        return fn
    return add


# ----------------------------------------------------------------------------------------- kernels of PyTorch's

@row("flex_attention is kept: Inductor has kernels of its own for it, and its block mask may hide more than its functions say", lambda: qkv(False))
def flex_attention_with_a_score_function(q, k, v):
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: torch.where(i >= j, s * 0.5, -math.inf))


# ------------------------------------------------------------------------- scores compared with their own

@row(OWN)
def top_k_by_a_constant_that_does_not_hide(q, k, v):
    s = scores(q, k)
    return s.masked_fill(s < s.topk(2, -1).values[..., -1:], -1e4).softmax(-1) @ v


@row(OWN)
def largest_score_doubled(q, k, v):
    s = scores(q, k)
    return torch.where(s == s.amax(-1, keepdim=True), s * 2.0, s).softmax(-1) @ v


@row(OWN)
def clamped_less_the_largest_of_all(q, k, v):
    s = scores(q, k)
    return (s - s.max()).clamp(min=-50000).softmax(-1) @ v


@row(OWN)
def clamped_near_the_largest(q, k, v):
    s = scores(q, k)
    return (s - s.amax(-1, keepdim=True)).clamp(min=-5).softmax(-1) @ v


# ------------------------------------------------------------------------------------------- layers

@row("the second product also adds a tensor (addmm.default)")
def gate_between_a_layer_and_a_product(q, k, v):
    return LAYERS[0](q * scores(q, k)[..., :D].softmax(-1)) + v.mean()


# ------------------------------------------------------------------------------------------- weights

@row(CHANGED.format("mul"))
def weights_squared(q, k, v):
    p = scores(q, k).softmax(-1)
    return (p * p) @ v


@row(CHANGED.format("pow"))
def weights_cubed(q, k, v):
    return scores(q, k).softmax(-1).pow(3) @ v


@row(CHANGED.format("triu"))
def weights_of_later_keys(q, k, v):
    return scores(q, k).softmax(-1).triu() @ v


@row(CHANGED.format("clamp"))
def weights_clamped(q, k, v):
    return scores(q, k).softmax(-1).clamp(max=0.5) @ v


@row(CHANGED.format("log"))
def weights_logged(q, k, v):
    return scores(q, k).softmax(-1).log() @ v


@row(CHANGED.format("mul") + MASKED)
def weights_times_a_mask(q, k, v):
    return (scores(q, k).softmax(-1) * (torch.arange(N) <= torch.arange(M)[:, None])) @ v


@row(CHANGED.format("masked_fill") + MASKED, hidden_rows)
def masked_before_and_after_by_different_masks(q, k, v, a, b):
    return scores(q, k).masked_fill(~a, -math.inf).softmax(-1).masked_fill(~b, 0.0) @ v


@row("queries are blanked after the softmax, and a mask may hide all keys of one by -inf: its weights are NaN then", hidden_rows)
def queries_blanked_where_no_key_is_seen(q, k, v, a, b):
    return scores(q, k).masked_fill(~a, -math.inf).softmax(-1).masked_fill(~a.any(-1, keepdim=True), 0.0) @ v


@row("queries are blanked after the softmax, and a mask may hide all keys of one by -inf: its weights are NaN then", hidden_rows)
def queries_gated_and_blanked_where_no_key_is_seen(q, k, v, a, b):
    return (scores(q, k).masked_fill(~a, -math.inf).softmax(-1) * q[..., :1].sigmoid()).masked_fill(~a.any(-1, keepdim=True), 0.0) @ v


@row(CHANGED.format("where"), hidden_rows)
def hidden_weights_set_to_a_constant(q, k, v, a, b):
    return torch.where(a, scores(q, k).softmax(-1), 0.5) @ v


@row(CHANGED.format("mul"), lambda: (*qkv(), keep(B, 1, M, N).float()))
def normalised_again_by_numbers_nobody_knows(q, k, v, m):
    p = scores(q, k).softmax(-1) * m
    return p / p.sum(-1, keepdim=True) @ v


@row(READ.format("p"), stage="check")
def normalised_with_an_epsilon(q, k, v):
    p = scores(q, k).softmax(-1) * (torch.arange(N) < 5)
    return (p / (p.sum(-1, keepdim=True) + 1e-3)) @ v


@row(READ.format("sum_1"), stage="check")
def normalised_over_the_queries(q, k, v):
    p = scores(q, k).softmax(-1)
    return (p / p.sum(-2, keepdim=True)) @ v


@row(AGAIN, hidden_rows)
def masked_by_a_constant_and_normalised_again(q, k, v, a, b):
    p = scores(q, k).masked_fill(~a, LOWEST).softmax(-1) * b
    return p / p.sum(-1, keepdim=True) @ v


@row("exp(scores - logsumexp(scores)) with a mask of a finite constant: the weights of a row that is hidden entirely do not sum to 1", hidden_rows)
def weights_by_logsumexp_under_a_finite_mask(q, k, v, a, b):
    s = scores(q, k).masked_fill(~a, -1e9)
    return torch.exp(s - s.logsumexp(-1, keepdim=True)) @ v


@row(READ.format("sum_1"), stage="check")
def attention_received(q, k, v):
    p = scores(q, k).softmax(-1)
    return p @ v, p.sum(-2)


@row(READ.format("topk"), stage="check")
def strongest_weights(q, k, v):
    p = scores(q, k).softmax(-1)
    return p @ v, p.topk(2, -1).values


@row(READ.format("var"), stage="check")
def spread_of_the_weights(q, k, v):
    p = scores(q, k).softmax(-1)
    return p @ v * p.var(-1, keepdim=True)


# ------------------------------------------------------------------------------------------- scores and masks

@row("a masked score goes through mul, and what becomes of the mask's constant is not known", lambda: (*qkv(), rand()))
def temperature_behind_the_mask(q, k, v, t):
    return (scores(q, k).masked_fill(torch.ones(M, N).triu(1).bool(), LOWEST) * t).softmax(-1) @ v


@row(DEPENDS)
def scores_above_their_mean(q, k, v):
    s = scores(q, k)
    return s.masked_fill(s < s.mean(-1, keepdim=True), -math.inf).softmax(-1) @ v


@row("roll stands between the first product and the softmax")
def scores_rolled(q, k, v):
    return scores(q, k).roll(1, -1).softmax(-1) @ v


@row("nan_to_num stands between the first product and the softmax")
def scores_repaired(q, k, v):
    return scores(q, k).nan_to_num(posinf=1.0).softmax(-1) @ v


@row("an attention sink beside scores that their largest is subtracted from: rows that a mask of -inf hides entirely are NaN, not 0",
     lambda: tuple(t.detach() for t in hidden_rows()))
def one_more_in_the_sum_and_hidden_rows(q, k, v, a, b):
    s = scores(q, k).masked_fill(~a, -math.inf)
    m = s.amax(-1, keepdim=True)
    e = torch.exp(s - m)
    return e / (e.sum(-1, keepdim=True) + torch.exp(-m)) @ v


@row("the softmax normalises over 9 elements, the second product sums over 7 of them", lambda: (*qkv(), rand(1)))
def two_padded_columns(q, k, v, c):
    return F.pad(scores(q, k), (0, 2)).softmax(-1)[..., :-2] @ v


@row("the last step of the attention writes into a tensor that is read under another name", lambda: qkv(False), stage="splice")
def normalised_late_in_place(q, k, v):
    e = scores(q, k).exp()
    out = e @ v
    out.div_(e.sum(-1, keepdim=True))
    return out


# ------------------------------------------------------------------------------------------- gradients

@row(GRADIENT)
def output_weights_straight_through(q, k, v):
    p = scores(q, k).softmax(-1)
    with torch.no_grad():
        hard = p * 1.0
    return hard @ v


@row("a term that needs a gradient is added after a mask that replaces scores by a finite constant: rows that are hidden entirely have a "
     "gradient for the term alone", lambda: (*hidden_rows(), rand(B, 1, M, N)))
def bias_added_after_the_mask(q, k, v, a, b, bias):
    return (scores(q, k).masked_fill(~a, LOWEST) + bias).softmax(-1) @ v


@row("5 masks with constants of their own", lambda: (*qkv(), *(keep(B, 1, 1, N) for _ in range(5))))
def five_masks(q, k, v, *masks):
    s = scores(q, k)
    for n, m in enumerate(masks):
        s = s.masked_fill(~m if n else m, -1e9 * (n + 1))
    return s.softmax(-1) @ v


@row("10238 operations, written out, more than 8192, make one element of the scores or the mask")
def a_score_function_of_itself(q, k, v):
    s = scores(q, k)
    for _ in range(40):
        s = s * torch.sigmoid(s)
    return s.softmax(-1) @ v


@row("more than 100 operations one after the other make one element of the scores or the mask", lambda: (*qkv(), rand(120, N)))
def a_hundred_and_twenty_terms(q, k, v, terms):
    s = scores(q, k)
    for term in terms:
        s = s + term
    return s.softmax(-1) @ v


@pytest.mark.parametrize("name", ROWS)
def test_refused(name):
    case = ROWS[name]
    regions = compare(case.fn, *case.args(), exactly=True)
    assert len(regions) == case.sites
    for region in regions:
        refusal = region.refusal
        assert refusal is not None, region.spec
        assert (refusal.stage, re.sub(r" \(\S+:\d+ in .*\)$", "", refusal.reason)) == (case.stage, case.reason)
        assert refusal.node and refusal.source.startswith("tests/test_near_misses")


def test_enough_rows():
    assert sum(r.reason is not None for r in (*FIRST.values(), *ROWS.values())) >= 60


def test_attention_without_a_softmax_is_no_site():
    def linear_attention(q, k, v):
        return q.relu() @ (k.relu().transpose(-1, -2) @ v)
    assert compare(linear_attention, *qkv(), exactly=True) == []


def test_a_gate_between_two_layers_is_no_site():
    assert compare(lambda q: LAYERS[1](q * LAYERS[0](q).softmax(-1)), qkv()[0], exactly=True) == []
