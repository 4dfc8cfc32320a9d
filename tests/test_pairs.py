"""Tensors with an element for each pair of query and key: which of the model's is read, and how it lies in memory."""
from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from .capture import compare, rand

B, H, N, D = 2, 3, 64, 8


def qkv(n=N):
    return [rand(B, H, n, D, seed=s) for s in (1, 2, 3)]


def attend(q, k, v, bias):
    return (q @ k.mT * D ** -0.5 + bias).softmax(-1) @ v


def copies(region) -> int:
    return sum(node.role == "new" and node.op == "clone" for node in region.after)


def skewed(q, k, v, table):
    """Music Transformer: what a query has for each distance, a row further to the left for each query, by padding and views."""
    own = q @ table.mT
    flat = F.pad(F.pad(own, (0, 1)).flatten(-2), (0, N - 1))
    return attend(q, k, v, flat.view(B, H, N + 1, 2 * N - 1)[:, :, :N, N - 1:])


def shifted(q, k, v, table):
    """Transformer-XL's."""
    own = F.pad(q @ table.mT, (1, 0)).view(B, H, 2 * N, N)[:, :, 1:]
    return attend(q, k, v, own.reshape(B, H, N, 2 * N - 1)[..., :N])


def heads_last(q, k, v, edges):
    return attend(q, k, v, edges.permute(0, 3, 1, 2))


def cut_out(q, k, v, edges):
    """Rows that begin at odd places."""
    return attend(q, k, v, edges[:, :, 1:, 1:])


def places(q, k, v, bias):
    """A parameter for pairs of places: (heads, rows, columns, rows, columns)."""
    return attend(q, k, v, bias.view(H, N, N))


CASES = {skewed: ((H, 2 * N - 1, D), 1), shifted: ((H, 2 * N - 1, D), 1), heads_last: ((B, N, N, H), 1), cut_out: ((B, H, N + 1, N + 1), 1), places: ((H, 8, 8, 8, 8), 0)}
"""Spelling -> the tensor's shape, and copies that are made for the sake of its rows."""


@pytest.mark.parametrize("fn", CASES, ids=lambda f: f.__name__)
def test_read_where_each_pair_has_a_place(fn):
    shape, made = CASES[fn]
    region, = compare(fn, *qkv(), rand(*shape, seed=4))
    load, = region.spec.score.loads
    assert str(load) in ("bias[b, h, i, j]", "bias[h, i, j]") and copies(region) == made


def test_one_copy_for_all_sites():
    def twice(q, k, v, edges):
        bias = edges.permute(0, 3, 1, 2)
        return attend(attend(q, k, v, bias), k, v, bias)

    regions = compare(twice, *qkv(), rand(B, N, N, H, seed=4))
    assert [r.fused for r in regions] == [True, True]
    assert len({node.name for r in regions for node in r.after if node.op == "clone"}) == 1


def test_not_where_it_would_be_no_better():
    """Rows that TMA could not take anyway, few queries, and what lies well."""
    odd, = compare(attend, *qkv(65), rand(B, H, 65, 65, seed=4))
    few, = compare(attend, rand(B, H, 4, D, seed=1), *qkv()[1:], rand(B, 4, N, H, seed=4).detach().permute(0, 3, 1, 2).requires_grad_())
    lies, = compare(attend, *qkv(), rand(B, H, N, N, seed=4))
    assert [copies(r) for r in (odd, few, lies)] == [0, 0, 0]


def test_masks_too():
    def attention(q, k, v, seen):
        return (q @ k.mT * D ** -0.5).masked_fill(~seen.permute(0, 3, 1, 2), -math.inf).softmax(-1) @ v

    seen = torch.rand(B, N, N, H, generator=torch.Generator().manual_seed(0)) > 0.5
    seen[:, :, 0] = True
    region, = compare(attention, *qkv(), seen)
    assert copies(region) == 1
