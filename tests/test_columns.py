"""Terms that a query has for classes of keys stand in q and k as further columns (`passes/columns.py`), wherever that is the same; elsewhere they are read."""
from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from flashfx import explain

from .capture import compare, rand

B, H, D = 2, 3, 8
TALL, WIDE = 5, 6
N = TALL * WIDE


def qkv(n=N, heads=H, dtype=torch.float32):
    return [rand(B, h, n, D, seed=s, dtype=dtype) for s, h in enumerate((H, heads, heads), 1)]


def tables(dtype=torch.float32):
    return [rand(n, n, D, seed=n, dtype=dtype) for n in (TALL, WIDE)]


def terms(q, high, wide):
    """What each query of an image has for rows and columns of keys: (…, rows, columns, classes) both."""
    grid = q.unflatten(-2, (TALL, WIDE))
    return torch.einsum("...hwc,hkc->...hwk", grid, high), torch.einsum("...hwc,wkc->...hwk", grid, wide)


def scores(q, k):
    return q @ k.mT * D ** -0.5


def joined(q, k, v, high, wide):
    """Hugging Face's SAM: one tensor with an element for each pair."""
    rows, columns = terms(q, high, wide)
    both = rows[..., None] + columns[..., None, :]
    s = scores(q, k)
    return (s + both.reshape_as(s)).softmax(-1) @ v


def called(q, k, v, high, wide):
    rows, columns = terms(q, high, wide)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(rows[..., None] + columns[..., None, :]).reshape(B, H, N, N))


def viewed(q, k, v, high, wide):
    """SAM's own: scores seen as pairs of places."""
    rows, columns = terms(q, high, wide)
    s = scores(q, k).view(B, H, TALL, WIDE, TALL, WIDE) + rows[..., None] + columns[..., None, :]
    return s.view(B, H, N, N).softmax(-1) @ v


def scaled(q, k, v, high, wide):
    """Not by powers of two, and one of them subtracted."""
    rows, columns = terms(q, high, wide)
    s = (q @ k.mT).view(B, H, TALL, WIDE, TALL, WIDE) - 0.7 * rows[..., None]
    return ((s + columns[..., None, :] / 3.0) * 0.3).view(B, H, N, N).softmax(-1) @ v


def masked(q, k, v, high, wide):
    rows, columns = terms(q, high, wide)
    s = scores(q, k).view(B, H, TALL, WIDE, TALL, WIDE) + rows[..., None] + columns[..., None, :]
    hidden = torch.arange(N)[:, None] < torch.arange(N)
    return F.dropout(s.view(B, H, N, N).masked_fill(hidden, -math.inf).softmax(-1), 0.0) @ v


def sloped(q, k, v, high, wide):
    """Beside what is computed from positions."""
    rows, _ = terms(q, high, wide)
    s = scores(q, k).view(B, H, TALL, WIDE, TALL, WIDE) + rows[..., None]
    return (s.view(B, H, N, N) + 0.1 * (torch.arange(N) - torch.arange(N)[:, None]).float()).softmax(-1) @ v


def grouped(q, k, v, high, wide):
    """Heads that share keys: the ones are of all, the terms of each query's own."""
    return joined(q, k.repeat_interleave(H, 1), v.repeat_interleave(H, 1), high, wide)


def repeated(q, k, v, high, wide):
    """Classes that come again and again."""
    rows, _ = terms(q, high, wide)
    return (scores(q, k) + rows.flatten(-3, -2).repeat_interleave(2, -1).repeat(1, 1, 1, 3)).softmax(-1) @ v


FUSED = {joined: 2, called: 2, viewed: 2, scaled: 2, masked: 2, sloped: 1, repeated: 1}
"""Spelling -> how many terms of it are columns."""


@pytest.mark.parametrize("fn", FUSED, ids=lambda f: f.__name__)
def test_right_and_no_tensor_is_read(fn):
    region, = compare(fn, *qkv(), *tables())
    assert region.fused and not region.spec.loads and len(region.columns) == FUSED[fn]
    assert region.problem.D % 8 == 0 and region.problem.D >= D + sum(n for n, *_ in region.columns)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fn", [joined, viewed, scaled], ids=lambda f: f.__name__)
def test_sixteen_bits(fn, dtype):
    region, = compare(fn, *(t.detach().to(dtype).requires_grad_() for t in (*qkv(), *tables())))
    assert region.fused and region.columns


def test_grouped_queries():
    region, = compare(grouped, *qkv(heads=1), *tables())
    assert region.columns and region.spec.q > region.spec.k


def folded(qkv, high, wide):
    """Heads are folded into the batch, as SAM has them, and come from one projection: the term's one dim runs through both."""
    q, k, v = qkv.reshape(B, N, 3, H, D).permute(2, 0, 3, 1, 4).reshape(3, B * H, N, D).unbind(0)
    out = joined(q, k, v, high, wide)
    return out.reshape(B, H, N, D).transpose(1, 2).reshape(B, N, H * D)


def test_heads_folded_into_the_batch():
    region, = compare(folded, rand(B, N, 3 * H * D, seed=1), *tables())
    assert not region.spec.loads and [(n, at) for n, at, _ in region.columns] == [
        (TALL, "h + b * 3, i // 6, i % 6, j // 6, 0"), (WIDE, "h + b * 3, i // 6, i % 6, j % 6, 0")]


@pytest.mark.parametrize("beside", ["a tensor of pairs", "a factor that is read"])
def test_read_joined_where_they_cannot_stand(beside):
    """They were read apart for nothing: gathered element by element they would be slower than the tensor that the model makes of them."""
    def attention(q, k, v, high, wide, more):
        rows, columns = terms(q, high, wide)
        s = scores(q, k) * more.exp() if beside == "a factor that is read" else scores(q, k) + more
        return (s + (rows[..., None] + columns[..., None, :]).reshape_as(s)).softmax(-1) @ v

    more = rand(H, 1, 1, seed=9) if beside == "a factor that is read" else rand(B, H, N, N, seed=9)
    region, = compare(attention, *qkv(), *tables(), more)
    assert not region.columns and "bias2[b, h, i, j]" in str(region.spec.score) and "//" not in str(region.spec.score), region.spec
    assert not any("further columns" in step for step in region.reached)


def test_a_batch_of_any_size():
    def attention(q, k, v, high, wide):
        rows, columns = terms(q, high, wide)
        s = scores(q, k)
        return (s + (rows[..., None] + columns[..., None, :]).reshape_as(s)).softmax(-1) @ v

    args = [*qkv(), *tables()]
    for t in args[:3]:
        torch._dynamo.maybe_mark_dynamic(t, 0)
    region, = compare(attention, *args, dynamic=None)
    assert region.fused and region.columns


@pytest.mark.parametrize("without", ["a product", "few classes", "a sum"])
def test_others_are_read(without):
    """What may be infinite would be NaN times zero; as many classes as keys are no fewer numbers; and a function of the score is no sum."""
    def attention(q, k, v, high, wide):
        rows, columns = terms(q, high, wide)
        s = scores(q, k)
        if without == "a product":
            rows = rows.masked_fill(rows > 1.5, -math.inf)
        if without == "few classes":
            return (s + rows.flatten(-3, -2).repeat_interleave(WIDE, -1)[..., torch.arange(N).roll(1)]).softmax(-1) @ v
        if without == "a sum":
            return (torch.tanh(s + (rows[..., None] + columns[..., None, :]).reshape_as(s)) * 4.0).softmax(-1) @ v
        return (s + (rows[..., None] + columns[..., None, :]).reshape_as(s)).softmax(-1) @ v

    regions = compare(attention, *qkv(), *tables())
    assert not any(r.columns for r in regions if r.fused)


def test_digits_that_q_has_not_are_not_lost():
    """Terms in float32 beside q and k in bfloat16."""
    def attention(q, k, v, high, wide):
        rows, columns = terms(q.to(high.dtype), high, wide)
        s = scores(q, k).to(high.dtype)
        return (s + (rows[..., None] + columns[..., None, :]).reshape_as(s)).softmax(-1).to(v.dtype) @ v

    region, = compare(attention, *(t.detach().bfloat16().requires_grad_() for t in qkv()), *tables())
    assert region.fused and not region.columns


def test_more_columns_than_a_head_may_have():
    """Then one tensor is read as the model joins it: gathered element by element it would be slower."""
    q, k, v = (torch.randn(2, 32 * 32, 120, dtype=torch.float64) for _ in range(3))

    def attention(q, k, v, high, wide):
        grid = q.unflatten(1, (32, 32))
        rows, columns = torch.einsum("bhwc,hkc->bhwk", grid, high), torch.einsum("bhwc,wkc->bhwk", grid, wide)
        s = q @ k.mT
        return (s + (rows[..., None] + columns[..., None, :]).reshape_as(s)).softmax(-1) @ v

    site, = explain(attention, q, k, v, *(torch.randn(32, 32, 120, dtype=torch.float64) for _ in range(2)))
    load, = site.spec.score.loads
    assert not site.region.columns and str(load) == "bias[b, i, j]"


def test_explained():
    site, = explain(joined, *qkv(), *tables())
    lines = [line for line in site.lines() if "of q and k add" in line]
    assert lines[0].startswith("columns 5 of q and k add ") and lines[0].endswith("read at [b, h, i // 6, i % 6, j // 6, 0]")
    assert lines[1].strip().startswith("6 of q and k add ") and lines[1].endswith("read at [b, h, i // 6, i % 6, j % 6, 0]")
    assert any("11 further columns" in step for step in site.region.reached)
    assert site.traffic().before > site.traffic().after
