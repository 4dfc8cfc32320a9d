"""Relative positions that depend on the query or the key too: `torch.gather` along a row at a function of j - i, as DeBERTa has it."""
from __future__ import annotations

import itertools

import pytest
import torch

import flashfx

from .capture import compare
from .kernels import interpreted_differences as kernel
from .test_backend import Counting
from .test_relative import both_ways, clipped, logarithmic
from .thinning import thinned

WIDTH = 12


def operands(M=21, N=21, dtype=torch.bfloat16, requires_grad=True):
    torch.manual_seed(N)
    return [torch.randn(*shape, dtype=dtype, requires_grad=requires_grad) for shape in ((2, 3, M, 8), (2, 3, N, 8), (2, 3, N, 8), (3, WIDTH, 8))]


def disentangled(bucket, own=lambda at, q: at.expand(*q.shape[:-1], at.shape[-1])):
    """He et al., DeBERTa (arXiv:2006.03654), section 3.1: content to position and position to content. Where lengths agree the second is looked up at
    its own row's distance, as transformers does it; else at the query's."""
    def f(q, k, v, table):
        i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])[None]
        c2p = torch.gather(q @ table.mT, -1, own(bucket(i - j), q))
        p2c = torch.gather(k @ table.mT, -1, own(bucket(i - j).mT if q.shape[-2] != k.shape[-2] else bucket(i - j), k)).mT
        return ((q @ k.mT) * 0.2 + c2p / 1.7 + p2c / 1.7).softmax(-1) @ v
    return f


def agree(fn, *args, **options) -> Counting:
    seen = Counting(verify=True)
    compare(fn, *args, backend=seen, **options)
    return seen


def gathers(seen) -> tuple[int, int]:
    """(gathers of the model's left, gathers by difference) in the rewritten graphs"""
    names = [str(n.target) for gm in seen.graphs for n in gm.graph.nodes if n.op in ("call_function", "call_method")]
    ours = sum("gather_by_difference" in name for name in names)
    return sum("gather" in name for name in names) - ours, ours


@pytest.mark.parametrize("shape, positions, dtype", itertools.product(kernel.SHAPES, (kernel.scattered, kernel.falling), (torch.float64, torch.bfloat16)))
def test_the_gradient_without_a_kernel(shape, positions, dtype):
    kernel.check(*shape, positions, dtype)


@pytest.mark.parametrize("bucket, M, N, dynamic", thinned(((bucket, M, N, dynamic) for bucket in (both_ways, clipped, lambda at: logarithmic(at.abs(), 6, 20, WIDTH))
                                                           for M, N in ((21, 21), (19, 26)) for dynamic in (False, True)), 5))
def test_both_terms(bucket, M, N, dynamic):
    seen = agree(disentangled(bucket), *operands(M, N), dynamic=dynamic)
    assert str(seen.regions[0].spec.score) == "qk * 0.2 + bias[b, h, i, j] + bias2[b, h, i, j]", "terms are added to the scores one after the other"
    assert gathers(seen) == (0, 2)


def test_what_is_added_up_first_is_read_as_one_tensor():
    def f(q, k, v, table):
        i, j = torch.arange(21)[:, None], torch.arange(21)[None]
        at = clipped(i - j).expand(2, 3, 21, 21)
        bias = torch.gather(q @ table.mT, -1, at) / 1.7 + torch.gather(k @ table.mT, -1, at).mT / 1.7
        return ((q @ k.mT) * 0.2 + bias).softmax(-1) @ v
    seen = agree(f, *operands())
    assert str(seen.regions[0].spec.score) == "qk * 0.2 + bias[b, h, i, j]"
    assert gathers(seen) == (0, 2)


def test_without_a_gradient_the_models_own_stays():
    q, k, v, table = operands(requires_grad=False)
    seen = agree(disentangled(clipped), q, k, v.requires_grad_(), table)
    assert seen.regions[0].fused and gathers(seen) == (2, 0)


@pytest.mark.parametrize("other", [
    lambda at, q: (at * torch.arange(1, 3)[:, None, None, None] % WIDTH).expand(2, 3, *at.shape),  # of the batch too
    lambda at, q: ((at * torch.arange(at.shape[-2])[:, None]) % WIDTH).expand(*q.shape[:-1], at.shape[-1]),  # of the row
], ids=["batch", "row"])
def test_other_positions_keep_the_models_own(other):
    seen = agree(disentangled(clipped, other), *operands())
    assert seen.regions[0].fused and gathers(seen) == (2, 0)


def test_a_site_that_is_left_alone_keeps_its_own():
    def f(q, k, v, table):
        i, j = torch.arange(21)[:, None], torch.arange(21)[None]
        scores = q @ k.mT + torch.gather(q @ table.mT, -1, clipped(i - j).expand(2, 3, 21, 21))
        weights = scores.softmax(-1)
        return weights @ v + weights.amax()
    seen = agree(f, *operands())
    assert seen.ops == 0 and gathers(seen) == (1, 0)


def test_float32_keeps_the_models_own():
    seen = agree(disentangled(clipped), *operands(dtype=torch.float32))
    assert seen.regions[0].fused and gathers(seen) == (2, 0)


@pytest.mark.parametrize("dynamic", thinned([True, False]))
def test_through_inductor(dynamic):
    """The op is worked out with what reads it; its gradient is called as a function."""
    compare(disentangled(clipped), *operands(19, 26), backend="flashfx", dynamic=dynamic)


@pytest.mark.parametrize("trained, score", [(True, "qk + bias[h, i, j]"), (False, "qk + bias[h, i, j] * 0.5")])
def test_a_scaled_parameter_is_read_scaled_where_it_has_a_gradient(trained, score):
    """dS is then the gradient of what is read; without one nothing is made of N x N elements."""
    bias = torch.nn.Parameter(torch.randn(3, 21, 21), requires_grad=trained)
    q, k, v, _ = operands(dtype=torch.float32)

    def f(q, k, v):
        return (q @ k.mT + bias * 0.5).softmax(-1) @ v
    assert str(flashfx.explain(f, q, k, v)[0].spec.score) == score


def shifted(x):
    """Row i moved i places to the left, by views: Dai et al., Transformer-XL (arXiv:1901.02860), appendix B."""
    *lead, rows, places = x.shape
    return torch.nn.functional.pad(x, (1, 0)).view(*lead, places + 1, rows)[..., 1:, :].reshape(x.shape)


@pytest.mark.parametrize("scaled_before", [True, False])
def test_rows_that_views_shift(scaled_before):
    """What the model scales lies as a kernel reads it best; where it adds first, the backward's own copy does."""
    def f(q, k, v, positions):
        by_position = shifted(q @ positions.mT)[..., :k.shape[-2]]
        return ((q @ k.mT) * 0.25 + by_position * 0.25 if scaled_before else (q @ k.mT + by_position) * 0.25).softmax(-1) @ v
    q, k, v, _ = operands(24, 24)
    seen = agree(f, q, k, v, torch.randn(3, 47, 8, dtype=torch.bfloat16, requires_grad=True))
    assert str(seen.regions[0].spec.score) == ("qk * 0.25 + bias[b, h, i, j]" if scaled_before else "(qk + bias[b, h, i, j]) * 0.25")
    assert seen.regions[0].captured[0].endswith("[2, 3, 24, 24]" if scaled_before else "[2, 3, 24, 47]")
