"""Attention over unusual axes, sizes, masks and with in-place ops: fused (or refused), and right in values and gradients."""
from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from .capture import compare, keep, rand

B, H, M, N, D = 2, 3, 5, 7, 4
LOWEST = torch.finfo(torch.float32).min


def qkv(grad=True):
    return rand(B, H, M, D, grad=grad, seed=1), rand(B, H, N, D, grad=grad, seed=2), rand(B, H, N, D, grad=grad, seed=3)


def cube(n=4):
    return tuple(rand(n, n, n, n, seed=s) for s in (1, 2, 3))


def rows():
    return torch.arange(M)[:, None]


def columns():
    return torch.arange(N)[None, :]


def plain(q, k, v):
    return (q @ k.transpose(-1, -2)).softmax(-1) @ v


def masked(condition, fill=-math.inf):
    return lambda q, k, v, *rest: (q @ k.mT).masked_fill(~condition(*rest), fill).softmax(-1) @ v


def empty_rows():
    mask = keep(B, 1, M, N)
    mask[0, 0, 1], mask[1] = False, False
    return mask


def written_cache(q, k, v, keys, values):
    keys[:, :, 3:5], values[:, :, 3:5] = k[:, :, :2], v[:, :, :2]
    return (q @ keys.mT).masked_fill(torch.arange(N) > torch.arange(M)[:, None] + 2, -math.inf).softmax(-1) @ values


def output_changed(q, k, v):
    o = plain(q, k, v)
    o.mul_(2)
    o.transpose(1, 2)[:, 0] += 1
    return o


def sunk(first: bool, fill: float):
    """Attention with a learned sink column of each head and rows whose keys are all hidden."""
    def fn(q, k, v, sink, mask):
        s = (q @ k.mT * 0.5).masked_fill(~mask, fill)
        column = sink.view(1, H, 1, 1).expand(B, H, M, 1)
        both = torch.cat([column, s] if first else [s, column], -1)
        both = both - both.max(-1, keepdim=True).values
        weights = both.softmax(-1, dtype=both.dtype)
        return (weights[..., 1:] if first else weights[..., :-1]) @ v
    return fn


def query_scaled_in_place(q, k, v):
    q.mul_(0.5)
    return plain(q, k, v)


def scores_changed_in_place(q, k, v, m):
    s = q @ k.mT
    s /= 2
    s += m.to(s.dtype) * -3
    s.masked_fill_(m.logical_not(), -1e30)
    return s.softmax(-1) @ v


def values_changed_between(q, k, v):
    v = v * 1.0
    p = (q @ k.mT).softmax(-1)
    v[:, :, 0] = 0
    return p @ v


def keys_without_gradient(q, k, v):
    with torch.no_grad():
        k = k * 0.5
    return plain(q, k, v)


ONE = (True,)
CASES = {
    # axes
    "keys permuted (0, 2, 3, 1)": (lambda q, k, v: (q @ k.permute(0, 2, 3, 1)).softmax(-1) @ v, cube, ONE),
    "keys viewed instead of transposed": (lambda q, k, v: (q @ k.view(B, H, D, N)).softmax(-1) @ v, qkv, ONE),
    "keys not transposed": (lambda q, k, v: (q @ k).softmax(-1) @ v, cube, ONE),
    "equal sizes": (plain, cube, ONE),
    "values of another batch order": (lambda q, k, v: (q @ k.mT).softmax(-1) @ v.transpose(0, 1), cube, ONE),
    "weights of another batch order": (lambda q, k, v: (q @ k.mT).softmax(-1).transpose(0, 1) @ v, cube, ONE),
    "softmax over queries, transposed": (lambda q, k, v: (q @ k.mT).softmax(-2).mT @ v[:, :, :M], qkv, ONE),
    "keys times queries": (lambda q, k, v: (k @ q.mT).softmax(-2).mT @ v, qkv, ONE),
    "transposed output": (lambda q, k, v: v.mT @ (q @ k.mT).softmax(-1).mT, qkv, ONE),
    "transposed output by einsum": (lambda q, k, v: torch.einsum("bhij,bhjd->bdih", (q @ k.mT).softmax(-1), v), qkv, ONE),
    "no batch": (plain, lambda: (rand(M, D), rand(N, D), rand(N, D)), ONE),
    "values shared by all": (plain, lambda: (*qkv()[:2], rand(N, D)), ONE),
    "keys shared by all": (plain, lambda: (qkv()[0], rand(N, D), qkv()[2]), ONE),
    "heads folded into rows": (lambda q, k, v: ((q.transpose(1, 2).reshape(B, M * H, D) @ k.mT).view(B, M, H, N).masked_fill(
        (columns() > rows())[:, None], -1e9)).softmax(-1).view(B, M * H, N) @ v, lambda: (qkv()[0], rand(B, N, D), rand(B, N, D)), ONE),
    "windows": (lambda x: (lambda y: plain(y, y, y))(x.view(B, 2, 3, 2, 3, D).permute(0, 1, 3, 2, 4, 5).reshape(-1, 9, D)),
                lambda: (rand(B, 6, 6, D),), ONE),
    "keys of its own for each query": (lambda q, k, v: plain(q[..., None, :], k, v), lambda: (qkv()[0], rand(B, H, M, N, D), rand(B, H, M, N, D)), ONE),
    # sizes of one, broadcasting
    "one query": (plain, lambda: (rand(B, H, 1, D), *qkv()[1:]), ONE),
    "one key": (plain, lambda: (qkv()[0], rand(B, H, 1, D), rand(B, H, 1, D)), ONE),
    "all sizes one": (plain, lambda: (rand(1, 1, 1, 1),) * 3, ONE),
    "batch of one": (plain, lambda: tuple(t[:1].detach().requires_grad_() for t in qkv()), ONE),
    "one head": (plain, lambda: tuple(t[:, :1].detach().requires_grad_() for t in qkv()), ONE),
    "one key head": (plain, lambda: (qkv()[0], rand(B, 1, N, D), rand(B, 1, N, D)), ONE),
    "one query head": (plain, lambda: (rand(B, 1, M, D), *qkv()[1:]), ONE),
    "values expanded over keys": (lambda q, k, v: (q @ k.mT).softmax(-1) @ v.expand(-1, -1, N, -1), lambda: (*qkv()[:2], rand(B, H, 1, D)), ONE),
    "keys expanded": (lambda q, k, v: (q @ k.expand(-1, -1, N, -1).mT).softmax(-1) @ v, lambda: (qkv()[0], rand(B, H, 1, D), qkv()[2]), ONE),
    "queries expanded over channels": (lambda q, k, v: (q.expand(-1, -1, -1, D) @ k.mT).softmax(-1) @ v, lambda: (rand(B, H, M, 1), *qkv()[1:]), ONE),
    "head size one": (plain, lambda: (rand(B, H, M, 1), rand(B, H, N, 1), rand(B, H, N, 1)), ONE),
    "empty batch": (plain, lambda: (rand(0, H, M, D), rand(0, H, N, D), rand(0, H, N, D)), ONE),
    # slices
    "keys sliced": (lambda q, k, v: (q @ k[:, :, 1:4].mT).softmax(-1) @ v[:, :, 1:4], qkv, ONE),
    "keys and values sliced differently": (lambda q, k, v: (q @ k[:, :, -3:].mT).softmax(-1) @ v[:, :, :3], qkv, ONE),
    "every other key": (lambda q, k, v: (q @ k[:, :, ::2].mT).softmax(-1) @ v[:, :, 1::2][:, :, [0, 1, 2, 2]], qkv, ONE),
    "channels sliced": (lambda q, k, v: (q[..., :2] @ k[..., -2:].mT).softmax(-1) @ v, qkv, ONE),
    "scores sliced": (lambda q, k, v: (q @ k.mT)[..., 1:3].softmax(-1) @ v[:, :, 1:3], qkv, ONE),
    "rows of the weights sliced": (lambda q, k, v: (q @ k.mT).softmax(-1)[:, :, 1:3] @ v, qkv, ONE),
    # masks
    "cached keys, tril": (masked(lambda: torch.ones(M, N, dtype=torch.bool).tril(diagonal=N - M)), qkv, ONE),
    "cached keys, buffer": (masked(lambda b: b[N - M: N, :N]), lambda: (*qkv(), torch.ones(16, 16, dtype=torch.bool).tril()), ONE),
    "cached keys, negative slices": (masked(lambda b: b[-M:, -N:]), lambda: (*qkv(), torch.ones(16, 16, dtype=torch.bool).tril()), ONE),
    "keys before the query": (masked(lambda: torch.ones(M, N, dtype=torch.bool).tril(-1), -1e30), qkv, ONE),
    "chunks": (masked(lambda: torch.arange(M)[:, None] // 2 == columns() // 2, -1e30), qkv, ONE),
    "negative floor division": (masked(lambda: (rows() - columns()) // 2 >= -1, -1e30), qkv, ONE),
    "truncated division": (masked(lambda: torch.div(rows() - columns(), 2, rounding_mode="trunc") >= 0, -1e30), qkv, ONE),
    "negative remainder": (masked(lambda: (rows() - columns()) % 3 != 1, -1e30), qkv, ONE),
    "C remainder": (masked(lambda: torch.fmod(rows() - columns(), 3) != -1, -1e30), qkv, ONE),
    "documents": (masked(lambda d: d[:, None, :M, None] == d[:, None, None], -1e30), lambda: (*qkv(), torch.arange(B * N).view(B, N) // 3), ONE),
    "bytes": (masked(lambda m: (1 - m.byte()).bool().logical_not()), lambda: (*qkv(), keep(B, 1, 1, N)), ONE),
    "multiplied by 0": (lambda q, k, v, m: ((q @ k.mT) * m).softmax(-1) @ v, lambda: (*qkv(), keep(B, 1, 1, N)), ONE),
    "filled with 0": (masked(lambda m: m, 0.0), lambda: (*qkv(), keep(B, 1, 1, N)), ONE),
    # rows that are hidden entirely
    "empty rows, lowest": (masked(lambda m: m, LOWEST), lambda: (*qkv(), empty_rows()), ONE),
    "empty rows, -1e4": (masked(lambda m: m, -1e4), lambda: (*qkv(), empty_rows()), ONE),
    "empty rows, lowest added": (lambda q, k, v, m: (q @ k.mT + (1 - m.float()) * LOWEST).softmax(-1) @ v, lambda: (*qkv(), empty_rows()), ONE),
    "empty rows, -1e4 added": (lambda q, k, v, m: (q @ k.mT + (1 - m.float()) * -1e4).softmax(-1) @ v, lambda: (*qkv(), empty_rows()), ONE),
    "empty rows, -1e6 added": (lambda q, k, v, m: (q @ k.mT - 1e6 * (1 - m.float())).softmax(-1) @ v, lambda: (*qkv(), empty_rows()), ONE),
    "empty rows, added twice": (lambda q, k, v, m, n: (q @ k.mT + (1 - m.float()) * LOWEST + (1 - n.float()) * LOWEST).softmax(-1) @ v,
                                lambda: (*qkv(), empty_rows(), keep(B, 1, 1, N)), ONE),
    "empty rows, replaced and added": (lambda q, k, v, m, n: ((q @ k.mT).masked_fill(~n, LOWEST) + (1 - m.float()) * LOWEST).softmax(-1) @ v,
                                       lambda: (*qkv(), empty_rows(), keep(B, 1, 1, N)), ONE),
    "empty rows, before the scale": (lambda q, k, v, m: ((q @ k.mT + (1 - m.float()) * -1e30) / 8).softmax(-1) @ v, lambda: (*qkv(), empty_rows()), ONE),
    "empty rows, clamped": (lambda q, k, v, m: torch.max(q @ k.mT + (1 - m.float()) * LOWEST, torch.tensor(LOWEST)).softmax(-1) @ v,
                            lambda: (*qkv(), empty_rows()), ONE),
    "empty rows, opaque mask": (lambda q, k, v, m: (q @ k.mT + m).softmax(-1) @ v, lambda: (*qkv(), torch.where(empty_rows(), 0.0, LOWEST)), ONE),
    "empty rows, opaque mask subtracted": (lambda q, k, v, m: (q @ k.mT - m).softmax(-1) @ v, lambda: (*qkv(), torch.where(empty_rows(), 0.0, 1e30)), ONE),
    "empty rows, below a cap": (lambda q, k, v, m: torch.tanh((q @ k.mT).masked_fill(~m, -1e30)).softmax(-1) @ v, lambda: (*qkv(), empty_rows()), ONE),
    # terms of the score
    "slopes": (lambda q, k, v, s: (q @ k.mT - s.view(H, 1, 1) * (rows() - columns()).abs()).softmax(-1) @ v, lambda: (*qkv(), rand(H)), ONE),
    "a bias after a fill it shows through": (lambda q, k, v, m: ((q @ k.mT).masked_fill(~m, -1e5) - (rows() - columns()).abs()).softmax(-1) @ v,
                                             lambda: (*qkv(), torch.arange(M * N).view(M, N) >= 2 * N), ONE),
    "table of distances": (lambda q, k, v, t: (q @ k.mT + t[(rows() - columns()).clamp(-3, 3)].permute(2, 0, 1)).softmax(-1) @ v,
                           lambda: (*qkv(), rand(7, H)), ONE),
    "relative positions": (lambda q, k, v, r: (q @ r.mT + q @ k.mT).softmax(-1) @ v, lambda: (*qkv(), rand(H, N, D)), ONE),
    "temperature of each row": (lambda q, k, v, t: (q @ k.mT / t.exp()[..., None]).softmax(-1) @ v, lambda: (*qkv(), rand(B, H, M)), ONE),
    "baddbmm": (lambda q, k, v, b: torch.baddbmm(b, q, k.mT, beta=2.0, alpha=0.5).softmax(-1) @ v,
                lambda: (rand(B, M, D), rand(B, N, D), rand(B, N, D), rand(B, 1, N)), ONE),
    "standardised scores": (lambda q, k, v: (lambda s: (s - s.mean(-1, keepdim=True)) / s.std(-1, keepdim=True))(q @ k.mT).softmax(-1) @ v, qkv, ONE),
    # several readers
    "weights in two products": (lambda q, k, v: (lambda p: (p @ v, p @ (v * 2)))((q @ k.mT).softmax(-1)), qkv, ONE * 2),
    "attention of attention": (lambda q, k, v: (lambda p: p @ (p @ v))((q @ k.mT).softmax(-1)), cube, ONE * 2),
    "scores returned": (lambda q, k, v: (lambda s: (s.softmax(-1) @ v, s, s.logsumexp(-1)))(q @ k.mT), qkv, ONE),
    "one tensor for all": (lambda x: plain(x, x, x), lambda: (rand(B, H, M, D),), ONE),
    "one projection": (lambda x: plain(*x.view(B, N, 3, H, D).permute(2, 0, 3, 1, 4)), lambda: (rand(B, N, 3 * H * D),), ONE),
    # in place
    "keys written into a cache": (written_cache, lambda: (*qkv(False), rand(B, H, N, D, grad=False), rand(B, H, N, D, grad=False)), ONE),
    "output changed": (output_changed, qkv, ONE),
    "queries scaled in place": (query_scaled_in_place, lambda: qkv(False), ONE),
    "scores changed in place": (scores_changed_in_place, lambda: (*qkv(), keep(B, 1, M, N)), ONE),
    "output reshaped in place": (lambda q, k, v: plain(q, k, v).unsqueeze_(2) + 1, qkv, ONE),
    "values changed before the product": (values_changed_between, qkv, ONE),
    "written to an output": (lambda q, k, v, out: torch.matmul((q @ k.mT).softmax(-1), v, out=out) * 2,
                             lambda: (*qkv(False), torch.zeros(B, H, M, D)), (False,)),
    # ends of gradients
    "keys detached": (lambda q, k, v: plain(q, k.detach(), v), qkv, ONE),
    "values detached": (lambda q, k, v: plain(q, k, v.detach()), qkv, ONE),
    "bias detached": (lambda q, k, v, b: (q @ k.mT + (b * 2).detach()).softmax(-1) @ v, lambda: (*qkv(), rand(H, M, N)), ONE),
    "keys without gradient": (keys_without_gradient, qkv, ONE),
    "maximum detached": (lambda q, k, v: (lambda s: (s - s.amax(-1, keepdim=True).detach()).softmax(-1))(q @ k.mT) @ v, qkv, ONE),
    # transforms
    "vmap": (torch.func.vmap(plain), qkv, ONE),
    "a sink": (sunk(False, LOWEST), lambda: (*qkv(), rand(H), empty_rows()), ONE),
    "a sink before the keys": (sunk(True, -math.inf), lambda: (*qkv(), rand(H), empty_rows()), ONE),
    "a learned scalar": (lambda q, k, v, t: (q @ k.mT * t.exp()).softmax(-1) @ v, lambda: (*qkv(), rand()), ONE),
    "half precision": (lambda q, k, v: ((q @ k.mT) * 30).softmax(-1) @ v, lambda: tuple(t.detach().half().requires_grad_() for t in qkv()), ONE),
}


@pytest.mark.parametrize("name", CASES)
def test_right(name):
    fn, args, fused = CASES[name]
    regions = compare(fn, *args())
    assert tuple(r.fused for r in regions) == fused, [str(r.refusal) for r in regions if not r.fused]


def test_shared_dropout_is_one_mask():
    def fn(q, k, v):
        p = F.dropout((q @ k.mT).softmax(-1), 0.5)
        return p @ v - p @ v

    torch._dynamo.reset()
    from .capture import Counting
    backend = Counting()
    assert not torch.compile(fn, backend=backend)(*qkv(False)).any()
    assert [r.fused for r in backend.regions] == [True, True]


@pytest.mark.parametrize("constant", [-math.inf, LOWEST, -1e38, -1e30, -1e9])
def test_an_added_tensor_that_hides_and_scores_that_are_replaced(constant):
    """Rows that either hides entirely, both do together, or one of them but for a key."""
    m, n = 6, 7
    g = torch.Generator().manual_seed(0)
    added = torch.randn(2, 1, m, n, generator=g).masked_fill(torch.rand(2, 1, m, n, generator=g) < 0.4, constant)
    seen = torch.rand(2, 1, m, n, generator=g) < 0.6
    seen[0, 0, 0] = False
    added[0, 0, 1], seen[0, 0, 1] = constant, torch.arange(n) < 3
    added[1, 0, 1], seen[1, 0, 1] = constant, torch.arange(n) > 5
    added[1, 0, 2], seen[1, 0, 2] = constant if math.isfinite(constant) else LOWEST, True
    region, = compare(lambda q, k, v, a, b: (q @ k.mT * 0.5 + a).masked_fill(~b, LOWEST).softmax(-1) @ v,
                      rand(2, 3, m, 4, seed=1), rand(2, 3, n, 4, seed=2), rand(2, 3, n, 4, seed=3), added, seen)
    assert region.fused


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("constant", [0.0, LOWEST])
def test_masks_that_are_added_overflow_where_both_hide(dtype, constant):
    """Beside a tensor that may be a mask too: of rows without a visible key those have a mean over the keys that one of them hides, or are not a number."""
    m, n, least = 6, 7, torch.finfo(dtype).min
    g = torch.Generator().manual_seed(0)
    a, b = (torch.rand(m, n, generator=g) < 0.6 for _ in range(2))
    a[0], b[0] = False, False                                        # every key by both
    a[1], b[1] = torch.arange(n) < 3, torch.arange(n) >= 3           # each by one
    a[2], b[2] = torch.arange(n) < 2, False                          # some by both
    third = torch.randn(m, n, generator=g).to(dtype)
    third[3, ::2] = max(constant, least)
    hidden = lambda s, seen: s + torch.zeros_like(s).masked_fill(~seen, least)
    region, = compare(lambda q, k, v, third: hidden(hidden(q @ k.mT + third, a), b).softmax(-1) @ v,
                      *(rand(2, 3, rows, 4, seed=seed).to(dtype) for rows, seed in ((m, 1), (n, 2), (n, 3))), third)
    assert region.fused
