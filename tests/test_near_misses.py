"""Functions that look like attention and are not, or cannot be fused: refused with a stated reason, results those of eager."""
from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Callable

import pytest
import torch
import torch.nn.functional as F

from .capture import compare, keep, rand

B, H, M, N, D = 2, 3, 5, 7, 4
LOWEST = torch.finfo(torch.float32).min


def qkv(grad=True):
    return rand(B, H, M, D, grad=grad, seed=1), rand(B, H, N, D, grad=grad, seed=2), rand(B, H, N, D, grad=grad, seed=3)


def square(n=4, grad=True):
    return tuple(rand(n, n, n, n, grad=grad, seed=s) for s in (1, 2, 3))


def scores(q, k):
    return q @ k.transpose(-1, -2) * 0.5


AXIS = "the softmax runs over dim {}, the second product sums over another axis"
CHANGED = "the attention weights are changed by {} before the second product"
READ = "the attention weights are also read by {}"
BETWEEN = "{} stands between the first product and the softmax"
GRADIENT = "no gradient flows through part of the attention (detach or no_grad), one would through the fused op"
CUT = "the softmax and the second product see different keys"
DEPENDS = "the mask depends on the scores"


@dataclass
class Row:
    fn: Callable
    reason: str | None  # None: not even a site
    args: Callable = qkv
    stage: str = "lift"
    sites: int = 1


ROWS: dict[str, Row] = {}


def row(reason, args=qkv, stage="lift", sites=1):
    def add(fn):
        ROWS[fn.__name__] = Row(fn, reason, args, stage, sites)
        return fn
    return add


# ------------------------------------------------------------------------------------------- the wrong axis

@row(AXIS.format(2))
def softmax_over_queries(q, k, v):
    return scores(q, k).softmax(-2) @ v


@row(AXIS.format(1))
def softmax_over_heads(q, k, v):
    return scores(q, k).softmax(1) @ v


@row(AXIS.format(2), square)
def softmax_over_queries_of_equal_sizes(q, k, v):
    return scores(q, k).softmax(2) @ v


@row(AXIS.format(3), square)
def product_over_the_query_axis(q, k, v):
    return scores(q, k).softmax(-1).transpose(-1, -2) @ v


@row(AXIS.format(0), lambda: (rand(1, H, M, D), rand(1, H, N, D), rand(1, H, N, D)))
def softmax_over_a_batch_of_one(q, k, v):
    return scores(q, k).softmax(0) @ v


@row(CUT)
def softmax_over_two_dims(q, k, v):
    return scores(q, k).flatten(-2).softmax(-1).view(B, H, M, N) @ v


@row("a view splits the key axis by 7")
def softmax_over_heads_and_keys(q, k, v):
    p = scores(q, k).transpose(1, 2).reshape(B, M, H * N).softmax(-1)
    return p @ v.reshape(B, H * N, D)


@row("a view splits the key axis by 7")
def second_product_sums_over_heads_too(q, k, v):
    return torch.einsum("bhij,bhjd->bid", scores(q, k).softmax(-1), v)


@row(CUT)
def weights_cut_after_the_softmax(q, k, v):
    return scores(q, k).softmax(-1)[..., 1:3] @ v[:, :, 1:3]


@row("the softmax normalises over 7 elements, the second product sums over 3 of them")
def first_weights_only(q, k, v):
    return scores(q, k).softmax(-1)[..., :3] @ v[:, :, :3]


@row("the softmax normalises over 9 elements, the second product sums over 7 of them",
     lambda: (*qkv(), rand(H)))
def two_sink_columns(q, k, v, sink):
    s = torch.cat([scores(q, k), sink.view(1, H, 1, 1).expand(B, H, M, 2)], -1)
    return s.softmax(-1)[..., :-2] @ v


# ------------------------------------------------------------------------------------------- weights used elsewhere

@row(READ.format("the graph's output"), stage="check")
def weights_returned(q, k, v):
    p = scores(q, k).softmax(-1)
    return p @ v, p


@row(READ.format("log"), stage="check")
def entropy_loss(q, k, v):
    p = scores(q, k).softmax(-1)
    return p @ v, (p * p.log()).sum()


@row(READ.format("the graph's output"), stage="check")
def dropped_weights_returned(q, k, v):
    p = F.dropout(scores(q, k).softmax(-1), 0.5)
    return p @ v, p


@row(READ.format("copy_"), lambda: (*qkv(False), torch.zeros(B, H, M, N)), stage="check")
def weights_logged_into_a_buffer(q, k, v, log):
    p = scores(q, k).softmax(-1)
    log.copy_(p)
    return p @ v


@row(READ.format("matmul_1"), lambda: square(), stage="check", sites=2)
def weights_times_themselves(q, k, v):
    p = scores(q, k).softmax(-1)
    return p @ p.transpose(-1, -2) + v


@row(READ.format("argmax"), stage="check")
def most_attended_key(q, k, v):
    p = scores(q, k).softmax(-1)
    return p @ v, p.argmax(-1)


# ------------------------------------------------------------------------------------------- weights changed

@row(CHANGED.format("mul"), lambda: (*qkv(), rand(B, 1, M, N)))
def weights_times_a_tensor(q, k, v, w):
    return (scores(q, k).softmax(-1) * w) @ v


@row(CHANGED.format("masked_fill") + ": masked, and not normalised again", lambda: (*qkv(), keep(B, 1, M, N)))
def mask_after_the_softmax(q, k, v, m):
    return scores(q, k).softmax(-1).masked_fill(~m, 0.0) @ v


@row(CHANGED.format("dropout"))
def two_dropouts(q, k, v):
    return F.dropout(F.dropout(scores(q, k).softmax(-1), 0.2), 0.2) @ v


@row(CHANGED.format("add"))
def weights_and_a_constant(q, k, v):
    return (scores(q, k).softmax(-1) + 0.1) @ v


@row(CHANGED.format("rsub"))
def one_minus_the_weights(q, k, v):
    return (1 - scores(q, k).softmax(-1)) @ v


@row(CHANGED.format("round"))
def weights_rounded(q, k, v):
    return (scores(q, k) * 9).softmax(-1).round() @ v


@row(CHANGED.format("_to_copy"))
def weights_truncated(q, k, v):
    return (scores(q, k) * 99).softmax(-1).int().float() @ v


@row(CHANGED.format("index"))
def weights_of_permuted_heads(q, k, v):
    return scores(q, k).softmax(-1)[:, torch.tensor([2, 0, 1])] @ v


@row(CHANGED.format("div"), lambda: (*qkv(), rand(B, 1, M, N)))
def weights_over_a_tensor(q, k, v, w):
    return (scores(q, k).softmax(-1) / w) @ v


@row(CHANGED.format("roll"))
def weights_rolled(q, k, v):
    return scores(q, k).softmax(-1).roll(1, -1) @ v


@row(CHANGED.format("nan_to_num"))
def empty_rows_filled(q, k, v):
    return scores(q, k).softmax(-1).nan_to_num(0.5) @ v


@row("one dropout is repeated along an axis of the attention", lambda: (rand(B, 1, M, D), rand(B, 1, N, D), rand(B, H, N, D)))
def dropout_shared_by_heads(q, k, v):
    return F.dropout(scores(q, k).softmax(-1), 0.5).expand(-1, H, -1, -1) @ v


# ------------------------------------------------------------------------------------------- scores

@row(DEPENDS)
def top_k_of_the_scores(q, k, v):
    s = scores(q, k)
    return s.masked_fill(s < s.topk(2, -1).values[..., -1:], float("-inf")).softmax(-1) @ v


@row(DEPENDS)
def positive_scores_only(q, k, v):
    s = scores(q, k)
    return torch.where(s > 0, s, LOWEST).softmax(-1) @ v


@row("dropout stands between the first product and the softmax")
def dropout_on_the_scores(q, k, v):
    return F.dropout(scores(q, k), 0.3).softmax(-1) @ v


@row(BETWEEN.format("softmax"))
def second_softmax(q, k, v):
    return scores(q, k).softmax(-1).softmax(-1) @ v


@row(BETWEEN.format("cumsum"))
def running_sum_of_scores(q, k, v):
    return scores(q, k).cumsum(-1).softmax(-1) @ v


@row(BETWEEN.format("native_layer_norm"))
def normalised_scores(q, k, v):
    return F.layer_norm(scores(q, k), (N,)).softmax(-1) @ v


@row(BETWEEN.format("flip"))
def keys_of_scores_flipped(q, k, v):
    return scores(q, k).flip(-1).softmax(-1) @ v


@row(None)
def scores_through_a_matrix(q, k, v):
    return (scores(q, k) @ torch.ones(N, N).triu()).log_softmax(-1).sum(-1, keepdim=True) * v[:, :, :M]


@row("no matrix product over queries and keys was found in the scores", lambda: (rand(B, H, M, D), rand(B, H, M, N, D), rand(B, H, N, D)))
def keys_of_their_own_for_each_query(q, k, v):
    return torch.einsum("bhid,bhijd->bhij", q, k).softmax(-1) @ v


# ------------------------------------------------------------------------------------------- masks that no single rule covers

def hidden_rows():
    a, b = keep(B, 1, M, N), keep(B, 1, 1, N)
    a[0, 0, 1], b[1] = False, False
    return (*qkv(), a, b)


@row("masks hide keys by different constants (-1e+09 in place of the score, -3.4e+38 in place of the score), so rows that are hidden entirely "
     "follow no single rule", hidden_rows)
def two_constants(q, k, v, a, b):
    return scores(q, k).masked_fill(~a, -1e9).masked_fill(~b, LOWEST).softmax(-1) @ v


@row("masks hide keys by different constants (-1e+09 added, -1e+09 added), so rows that are hidden entirely follow no single rule", hidden_rows)
def two_constants_that_add_up(q, k, v, a, b):
    return (scores(q, k) + (1 - a.float()) * -1e9 + (1 - b.float()) * -1e9).softmax(-1) @ v


@row("an additive tensor that may be a mask meets a mask of a finite constant, and rows that both hide follow no single rule",
     lambda: (*qkv(), rand(B, 1, M, N, grad=False), keep(B, 1, 1, N)))
def opaque_mask_and_fill(q, k, v, a, b):
    return (scores(q, k) + a).masked_fill(~b, -1e9).softmax(-1) @ v


# ------------------------------------------------------------------------------------------- gradients

@row(GRADIENT)
def scores_detached(q, k, v):
    return scores(q, k).detach().softmax(-1) @ v


@row(GRADIENT)
def weights_detached(q, k, v):
    return scores(q, k).softmax(-1).detach() @ v


@row(GRADIENT)
def scores_without_gradient(q, k, v):
    with torch.no_grad():
        s = scores(q, k)
    return s.softmax(-1) @ v


@row(GRADIENT)
def straight_through(q, k, v):
    s = scores(q, k)
    return (s.round() - s.detach() + s).softmax(-1) @ v


@row(None)
def sum_detached(q, k, v):
    e = scores(q, k).exp()
    return (e / e.detach().sum(-1, keepdim=True)) @ v


# ------------------------------------------------------------------------------------------- changed in place

IN_PLACE = "a tensor that the attention reads is changed in place before it ends"


@row(IN_PLACE, lambda: qkv(False), stage="splice")
def keys_changed_before_the_end(q, k, v):
    p = scores(q, k).softmax(-1)
    k.zero_()
    return p @ v


@row(IN_PLACE, lambda: qkv(False), stage="splice")
def queries_changed_through_a_view(q, k, v):
    p = scores(q, k).softmax(-1)
    q[:, :, 0] += 1
    return p @ v


@row(IN_PLACE, lambda: (*qkv(False), keep(B, 1, M, N)), stage="splice")
def mask_changed_before_the_end(q, k, v, m):
    p = scores(q, k).masked_fill(m, -1e9).softmax(-1)
    m.logical_not_()
    return p @ v


@row(IN_PLACE, lambda: (*qkv(False), rand(H, M, N, grad=False)), stage="splice")
def bias_changed_before_the_end(q, k, v, bias):
    p = (scores(q, k) + bias).softmax(-1)
    bias.mul_(2)
    return p @ v


@row(CHANGED.format("select_scatter"), lambda: qkv(False))
def weights_overwritten(q, k, v):
    p = scores(q, k).softmax(-1)
    p[..., 0] = 0.0
    return p @ v


# ------------------------------------------------------------------------------------------- no attention at all

@row(None, lambda: (rand(6, 8), rand(4, 8), rand(6, 8)))
def router(x, w, y):
    weights, chosen = (x @ w.t()).softmax(-1).topk(2, -1)
    return weights, chosen, y * weights.sum(-1, keepdim=True)


@row(None, lambda: (rand(2, 6, 9), rand(4, 3), rand(9, 9)))
def softmax_over_convolution_taps(x, taps, w):
    return F.conv1d((x @ w), taps.softmax(-1).view(1, 1, 12).expand(6, 1, 12)[..., :3], groups=6)


@row(None, lambda: (rand(2, 6, 8), rand(8, 8), rand(8, 5)))
def classifier(x, w, out):
    return (F.relu(x @ w) @ out).log_softmax(-1)


@row(None, lambda: (rand(B, M, D), rand(B, N, D), rand(B, N, D)))
def sigmoid_attention(q, k, v):
    return (q @ k.transpose(-1, -2)).sigmoid() @ v


@pytest.mark.parametrize("name", ROWS)
def test_refused(name):
    case = ROWS[name]
    regions = compare(case.fn, *case.args(), exactly=True)
    if case.reason is None:
        assert regions == []
        return
    assert len(regions) == case.sites
    for region in regions:
        refusal = region.refusal
        assert refusal is not None, region.spec
        assert (refusal.stage, re.sub(r" \(\S+:\d+ in .*\)$", "", refusal.reason)) == (case.stage, case.reason)
        assert refusal.hint and refusal.node
        assert refusal.source.startswith("tests/test_near_misses.py:") and (f" in {name}: " in refusal.source or " in scores: " in refusal.source)
