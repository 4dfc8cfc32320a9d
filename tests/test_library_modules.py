"""Attention as other libraries and the masks of attention-gym write it, in our own words: each fused, and right in values and gradients.

Masks set by slices, padded and concatenated are predicates: `reads` says how many tensors the fused op captures.
"""
from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from .capture import compare, keep, rand

B, H, N, D = 2, 3, 24, 8
ROWS: dict[str, tuple] = {}


def row(args, reads: int = 0):
    def add(fn):
        ROWS[fn.__name__] = (fn, args, reads)
        return fn
    return add


def qkv(*more, n=N, m=None):
    return lambda: (rand(B, H, n, D, seed=1), rand(B, H, m or n, D, seed=2), rand(B, H, m or n, D, seed=3), *(t() for t in more))


def scores(q, k):
    return q @ k.mT * D ** -0.5


def attend(q, k, v, seen):
    return scores(q, k).masked_fill(~seen, -math.inf).softmax(-1) @ v


def i(n=N):
    return torch.arange(n)[:, None]


def j(n=N):
    return torch.arange(n)


def causal(n=N):
    return j(n) <= i(n)


# ---------------------------------------------------------------------------------------------------- attention-gym

TREE = (-1, 0, 1, 1, 3, 3, 0, 6)


@row(qkv(lambda: torch.eye(len(TREE), dtype=torch.bool)), reads=1)
def speculative_tree(q, k, v, ancestors):
    """JetSpec: a verified prefix, then the nodes of a tree that see their ancestors (arXiv:2606.18394)."""
    nodes = len(TREE)
    rows = [ancestors[0]]
    for node, parent in enumerate(TREE[1:], 1):
        rows.append(rows[parent] | ancestors[node])
    tree, prefix = torch.stack(rows), N - nodes
    at = (j() - prefix).clamp(0, nodes - 1)
    return attend(q[:, :, :nodes], k, v, (j() < prefix) | tree[i(nodes), at])


@row(qkv(n=18, m=N))
def speculative_training(q, k, v):
    """JetSpec: sampled blocks behind one prefix, causal inside."""
    block, prefix = 6, N - 18
    return attend(q, k, v, (j() < prefix) | (j() >= prefix) & (i(18) // block == (j() - prefix) // block) & ((j() - prefix) % block <= i(18) % block))


@row(qkv())
def sliding_tiles(q, k, v):
    """STA: a window of tiles over a 4 x 4 canvas of 2 x 2 tiles, then text (arXiv:2502.04507)."""
    tile, across, vision = 2 * 2, 2, 16
    center = lambda t: t.clamp(0, across - 1)
    rows, columns = ((x // tile // across, x // tile % across) for x in (i(), j()))
    near = (columns[0] >= center(rows[0])) & (columns[0] <= center(rows[0])) & (columns[1] >= center(rows[1]) - 1) & (columns[1] <= center(rows[1]))
    return attend(q, k, v, (i() < vision) & (j() < vision) & near | (i() < vision) & (j() >= vision) | (i() >= vision))


@row(qkv())
def sparse_video_spatial(q, k, v):
    """SVG: frames near in time, behind a prompt (arXiv:2502.01776)."""
    return attend(q, k, v, (j() < 4 + 5) | (i() < 4) | ((i() - j()).abs() < 10))


@row(qkv())
def sparse_video_temporal(q, k, v):
    """SVG: the same place in every frame."""
    return attend(q, k, v, (j() < 4) | (i() < 4) | (((i() - 4) % 5 - (j() - 4) % 5).abs() < 2))


@row(qkv(), reads=1)
def video_sparse(q, k, v):
    """VSA: tiles of keys chosen for each tile of queries by products of their means."""
    means = lambda x: x.detach().unflatten(2, (-1, 6)).mean(3)
    best = (means(q) @ means(k).mT).topk(2, -1).indices
    chosen = torch.zeros(B, H, 4, 4, dtype=torch.bool).scatter(-1, best, True)
    return attend(q, k, v, chosen[:, :, i() // 6, j() // 6])


@row(qkv())
def exclusive(q, k, v):
    """Exclusive self-attention: what a token's own value says is taken out of its output."""
    out = attend(q, k, v, causal())
    return out - (out * v).sum(-1, keepdim=True) / (v * v).sum(-1, keepdim=True) * v


@row(qkv())
def activation_for_softmax(q, k, v):
    """gelu(scores) @ v from a softmax of logarithms and its sum."""
    s = torch.log(F.gelu(scores(q, k)) + 1.0)
    return (s.softmax(-1) @ v) * s.logsumexp(-1, keepdim=True).exp() - v.sum(-2, keepdim=True)


def with_zeros():
    """Scores of exactly 0, where activations bend, in one row."""
    q, k, v = qkv()()
    with torch.no_grad():
        q[:, :, 3] = 0.0
    return q, k, v


def clamped(x):
    return x.clamp(0.0, 1.0)


for act in (clamped, F.relu, F.leaky_relu, F.elu, F.softplus, F.gelu, F.relu6, F.hardtanh, F.silu):
    ROWS[f"scores through {act.__name__}"] = (lambda q, k, v, act=act: act(scores(q, k)).softmax(-1) @ v, with_zeros, 0)


# ---------------------------------------------------------------------------------------------------- masks put together

@row(qkv())
def global_by_slices(q, k, v):
    seen = causal().clone()
    seen[:, :4] = True
    seen[:2] = True
    seen[:, -1] = True
    return attend(q, k, v, seen)


@row(qkv(lambda: keep(B, N)), reads=1)
def padding_by_slices(q, k, v, pad):
    added = torch.zeros(B, 1, N, N)
    added[..., 8:] = torch.where(pad[:, None, None, 8:], 0.0, -math.inf)
    return (scores(q, k) + added).softmax(-1) @ v


@row(qkv(lambda: torch.rand(8, 8, generator=torch.Generator().manual_seed(0)) > 0.5, n=8, m=N), reads=1)
def tree_of_drafts(q, k, v, tree):
    added = torch.zeros(8, N)
    added[:, -8:] = torch.where(tree, 0.0, torch.finfo(torch.float32).min)
    return (scores(q, k) + added).softmax(-1) @ v


@row(qkv(lambda: keep(B, N), m=N + 5), reads=1)
def memories_in_front(q, k, v, pad):
    hidden = torch.cat([torch.zeros(B, N, 5, dtype=torch.bool), ~causal() | ~pad[:, None]], -1)
    return scores(q, k).masked_fill(hidden[:, None], -math.inf).softmax(-1) @ v


@row(qkv(lambda: keep(B, N), m=N + 5), reads=1)
def clamp_of_the_models_own(q, k, v, pad):
    """The clamp outside of the piece is no artefact of reading the piece."""
    near = (j(N + 5) - 5).clamp(min=0) <= i() - 3
    seen = F.pad(pad, (5, 0), value=True)[:, None, None] & near | (j(N + 5) == 0)
    return scores(q, k).masked_fill(~seen, -math.inf).softmax(-1) @ v


@row(qkv(lambda: keep(B, N)), reads=1)
def scores_set_where_a_mask_says(q, k, v, pad):
    s = scores(q, k)
    s[~pad[:, None, None].expand(B, H, N, N)] = -math.inf
    s[:, :, ~causal()] = -math.inf
    return s.softmax(-1) @ v


@row(qkv())
def scores_set_on_diagonals(q, k, v):
    at = torch.arange(N - 2)
    s = scores(q, k)
    s.diagonal(dim1=-2, dim2=-1).fill_(-math.inf)
    s[:, :, at, at + 2] = -math.inf
    s.diagonal(-3, 2, 3).zero_()
    return s.softmax(-1) @ v


@row(qkv())
def scores_set_in_slices(q, k, v):
    s = scores(q, k)
    s[..., N - 4:] = -math.inf
    s[:, :, 2] = 0.0
    return s.softmax(-1) @ v


@row(qkv(lambda: torch.tensor([17, N])), reads=2)
def lengths_by_float_arithmetic(q, k, v, length):
    """By twos in the kernel, by threes in the graph, where the rounding is the model's."""
    seen = (j() < torch.floor((length.float() - 1) / 2 + 1).long()[:, None]) & (j() < torch.floor(length.float() / 3 * 2).long()[:, None])
    return attend(q, k, v, seen[:, None, None])


@row(qkv(m=N + 5))
def added_mask_in_two_parts(q, k, v):
    added = torch.cat([torch.zeros(N, 5), torch.full((N, N), -math.inf).triu(1)], -1)
    return (scores(q, k) + added).softmax(-1) @ v


@row(qkv(lambda: keep(B, N - 1)), reads=1)
def class_token_padded(q, k, v, pad):
    seen = F.pad(pad[:, None, :] & causal(N - 1), (1, 0, 1, 0), value=True)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None])


@row(qkv(lambda: torch.randint(0, 3, (B, N), generator=torch.Generator().manual_seed(0))), reads=1)
def product_of_one_hots(q, k, v, ids):
    kinds = F.one_hot(ids, 3).float()
    return scores(q, k).masked_fill((kinds @ kinds.mT)[:, None] == 0, -math.inf).softmax(-1) @ v


@row(qkv(lambda: keep(B, N).index_fill(0, torch.tensor(1), False)), reads=1)
def empty_rows_cleaned(q, k, v, pad):
    return torch.nan_to_num(scores(q, k).masked_fill(~pad[:, None, None], -math.inf).softmax(-1)) @ v


# ---------------------------------------------------------------------------------------------------- modules

@row(lambda: (*(rand(B * H, 30, D, seed=s) for s in (1, 2, 3)), rand(5, 5, D), rand(6, 6, D)))
def decomposed_positions(q, k, v, high, wide):
    """SAM and MViT: height and width terms added to scores seen as (queries, height, width)."""
    grid = q.unflatten(1, (5, 6))
    rows, columns = torch.einsum("bhwc,hkc->bhwk", grid, high), torch.einsum("bhwc,wkc->bhwk", grid, wide)
    s = scores(q, k).view(-1, 5, 6, 5, 6) + rows[..., None] + columns[..., None, :]
    return s.view(-1, 30, 30).softmax(-1) @ v


@row(lambda: (*(rand(B, H, 31, D, seed=s) for s in (1, 2, 3)), rand(5, 5, D), rand(6, 6, D)))
def decomposed_positions_behind_a_class_token(q, k, v, high, wide):
    """The same, added in place to the scores of all but the first token."""
    grid = q[:, :, 1:].unflatten(2, (5, 6))
    rows, columns = torch.einsum("byhwc,hkc->byhwk", grid, high), torch.einsum("byhwc,wkc->byhwk", grid, wide)
    s = scores(q, k)
    s[:, :, 1:, 1:] = (s[:, :, 1:, 1:].view(B, H, 5, 6, 5, 6) + rows[..., None] + columns[..., None, :]).view(B, H, 30, 30)
    return s.softmax(-1) @ v


@row(lambda: (rand(B, 2 * H, N, D, seed=1), rand(B, 2 * H, N, D, seed=2), rand(B, H, N, D, seed=3), rand(1)))
def differential_by_pairs_of_heads(q, k, v, factor):
    s = torch.nan_to_num(scores(q, k))
    s += torch.zeros(N, N).fill_(-math.inf).triu(1)
    p = s.softmax(-1, dtype=torch.float32).view(B, H, 2, N, N)
    return (p[:, :, 0] - factor * p[:, :, 1]) @ v


@pytest.mark.parametrize("name", ROWS)
def test_fused_and_right(name):
    fn, args, reads = ROWS[name]
    regions = compare(fn, *args())
    assert regions and [str(r.refusal) for r in regions if not r.fused] == []
    assert all(len(r.spec.aux) == reads for r in regions), [str(r.spec) for r in regions]


@pytest.mark.parametrize("name", ["sliding_tiles", "global_by_slices", "decomposed_positions", "memories_in_front"])
def test_fused_in_bfloat16(name):
    fn, args, _ = ROWS[name]
    low = [a.detach().bfloat16().requires_grad_() if a.is_floating_point() else a for a in args()]
    assert [r.fused for r in compare(fn, *low)] == [True]
