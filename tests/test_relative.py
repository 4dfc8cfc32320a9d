"""Relative position tables: what is gathered at a function of j - i is gathered M + N - 1 times, with the very same calls."""
from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from .test_backend import agree
from .thinning import thinned

HEADS, BUCKETS = 3, 12


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def operands(M=19, N=26, dtype=torch.float32, rows=BUCKETS):
    torch.manual_seed(M)
    q, k, v = (torch.randn(2, HEADS, n, 8, dtype=dtype, requires_grad=True) for n in (M, N, N))
    return q, k, v, torch.randn(rows, HEADS, dtype=dtype, requires_grad=True)


def positions(q, k, past=0, dtype=torch.long):
    return torch.arange(q.shape[-2], dtype=dtype, device=q.device)[:, None] + past, torch.arange(k.shape[-2], dtype=dtype, device=q.device)[None]


def logarithmic(distance, exact, most, last):
    """Buckets as T5 has them: exact ones for near positions, then logarithmic ones up to `most` (arXiv:1910.10683, section 2.1)."""
    far = exact + (torch.log(distance.float() / exact) / math.log(most / exact) * (last - exact)).to(torch.long)
    return torch.where(distance < exact, distance, torch.min(far, torch.full_like(far, last - 1)))


def both_ways(relative):
    buckets = 0
    buckets += (relative > 0).to(torch.long) * (BUCKETS // 2)
    buckets += logarithmic(relative.abs(), 3, 15, BUCKETS // 2)
    return buckets


def one_way(relative):
    return logarithmic(-torch.min(relative, torch.zeros_like(relative)), 6, 20, BUCKETS)


def clipped(relative):
    return relative.clamp(-5, 5) + 5


def attention(bucket, past=0, sign=1, look_up=lambda table, at: table[at], dtype=torch.long):
    def f(q, k, v, table):
        i, j = positions(q, k, past, dtype)
        bias = look_up(table, bucket(j - i if sign == 1 else i - j)).permute(2, 0, 1).unsqueeze(0)
        return ((q @ k.mT) * 0.3 + bias).softmax(-1) @ v
    return f


LINE = "score = qk * 0.3 + bias[h, minimum(maximum(j - i + M - 1, ends[0]), ends[1])]"


def pairs(seen, M, N) -> list:
    """Nodes of the rewritten graphs that have an element for each query and key."""
    found = []
    for gm in seen.graphs:
        for n in gm.graph.nodes:
            shape = getattr(n.meta.get("example_value"), "shape", ())
            if {M, N} <= set(shape):
                found.append(n)
    return found


@pytest.mark.parametrize("bucket, dynamic, past, sign", thinned(itertools.product([both_ways, one_way, clipped], [False, True], [0, 7], [1, -1]), 5))
def test_buckets(bucket, dynamic, past, sign):
    seen = agree(attention(bucket, past, sign), *operands(), dynamic=dynamic)
    assert LINE in str(seen.regions[0].spec)
    assert dynamic or pairs(seen, 19, 26) == []


LOOK_UPS = {
    "embedding": lambda t, at: nn.functional.embedding(at, t),
    "brackets": lambda t, at: t[at],
    "index_select": lambda t, at: t.index_select(0, at.flatten()).view(*at.shape, -1),
}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("look_up", LOOK_UPS)
def test_spellings(look_up, dtype):
    seen = agree(attention(clipped, look_up=LOOK_UPS[look_up], dtype=dtype), *operands(16, 16))
    assert LINE in str(seen.regions[0].spec)


def test_same_buckets_bit_for_bit():
    """A table that tells its buckets apart, read at every difference of a long text: the short tensor holds what the model's own would."""
    q, k, v, _ = operands(300, 300)
    table = torch.arange(BUCKETS * HEADS, dtype=torch.float32).view(BUCKETS, HEADS)
    compiled, short = None, []

    class Reading(torch.fx.Interpreter):
        def run_node(self, n):
            out = super().run_node(n)
            if n.target is torch.ops.flashfx.attention.default:
                short.extend(self.fetch_args_kwargs_from_env(n)[0][3])
            return out

    def backend(gm, example_inputs):
        from flashfx.passes.pipeline import rewrite
        rewrite(gm)
        return Reading(gm).run

    with torch.no_grad():
        compiled = torch.compile(attention(both_ways), backend=backend)
        compiled(q, k, v, table)
    i, j = positions(q, k)
    ends, bias = short
    assert bias.shape == (HEADS, 599)
    assert torch.equal(bias[:, (j - i) + 299], table[both_ways(j - i)].permute(2, 0, 1))
    same = both_ways(torch.arange(-299, 300)) == both_ways(torch.tensor([[-299], [299]]))
    assert ends.dtype == torch.int32 and ends.tolist() == [int(same[0].logical_not().int().argmax()) - 1, 599 - int(same[1].flip(0).logical_not().int().argmax())]


ENDS = (lambda r: r.clamp(-2, 3) + 2), (lambda r: r.clamp(max=1) + 19), (lambda r: r.clamp(min=-3) + 3), (lambda r: r % 7), (lambda r: (r > -1000).long())


@pytest.mark.parametrize("bucket, dynamic", thinned(itertools.product(ENDS, [False, True]), 3))
def test_ends(bucket, dynamic):
    """On both sides, on one, nowhere, and where everything is one."""
    seen = agree(attention(bucket), *operands(20, 26, rows=46), dynamic=dynamic)
    assert LINE in str(seen.regions[0].spec)


def test_flipped_tables_and_more_dims():
    """The gathered dim may come last or between others; heads may be selected."""
    q, k, v, table = operands()
    wide = torch.randn(2, BUCKETS, HEADS, requires_grad=True)

    def last(q, k, v, table):
        i, j = positions(q, k)
        return (q @ k.mT + table[:, clipped(j - i)]).softmax(-1) @ v

    def layer(q, k, v, wide):
        i, j = positions(q, k)
        return (q @ k.mT + wide[:, clipped(j - i)][1].permute(2, 0, 1)).softmax(-1) @ v

    seen = agree(last, q, k, v, table.detach().t().contiguous().requires_grad_())
    assert "bias[h, minimum(maximum(j - i + M - 1, ends[0]), ends[1])]" in str(seen.regions[0].spec)
    seen = agree(layer, q, k, v, wide)
    assert "bias[1, h, minimum(maximum(j - i + M - 1, ends[0]), ends[1])]" in str(seen.regions[0].spec)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_share_one_table(dtype):
    """The first layer's bias serves all: one gather in the rewritten graph, and its gradient the sum of all layers'."""
    def layers(q, k, v, table):
        i, j = positions(q, k)
        bias = nn.functional.embedding(both_ways(j - i), table).permute(2, 0, 1)
        for _ in range(3):
            q = ((q @ k.mT) + bias).to(torch.float32).softmax(-1).to(q.dtype) @ v
        return q

    if dtype == torch.bfloat16:
        from .test_backend import Counting
        seen = Counting(verify=True)
        q, k, v, table = operands(dtype=dtype)
        torch.compile(layers, backend=seen)(q, k, v, table).sum().backward()
        assert seen.ops == 3 and table.grad is not None
    else:
        seen = agree(layers, *operands(), rewritten=3)
    gathers = [n for n in seen.graphs[0].graph.nodes if n.target is torch.ops.aten.embedding.default]
    assert len(gathers) == 1 and pairs(seen, 19, 26) == []


def test_masks_and_scales_stay_beside_it():
    def f(q, k, v, table):
        i, j = positions(q, k)
        s = q @ k.mT
        s += 2.0 * table[both_ways(j - i)].permute(2, 0, 1) + torch.where(j <= i, 0.0, torch.finfo(torch.float32).min)
        return s.softmax(-1) @ v

    spec = str(agree(f, *operands(20, 20)).regions[0].spec)
    assert "bias[h, minimum(maximum(j - i + M - 1, ends[0]), ends[1])] * 2.0" in spec and "where   j <= i" in spec


def test_allowed_by_distance():
    """Masks by a table of conditions too."""
    q, k, v, _ = operands()
    table = torch.tensor([True] * 6 + [False] * 2 + [True] * 4)

    def f(q, k, v, table):
        i, j = positions(q, k)
        return (q @ k.mT).masked_fill(~table[both_ways(j - i)], float("-inf")).softmax(-1) @ v

    assert "mask[j - i + M - 1]" in str(agree(f, q, k, v, table).regions[0].spec)


def own_positions(q, k, v, table):
    at = torch.arange(19).flip(0)[:, None]  # no affine form
    return (q @ k.mT + table[clipped(torch.arange(26) - at)].permute(2, 0, 1)).softmax(-1) @ v


def a_sum(q, k, v, table):
    i, j = positions(q, k)
    return (q @ k.mT + table[clipped(j + i)].permute(2, 0, 1)).softmax(-1) @ v


def scaled_positions(q, k, v, table):
    i, j = positions(q, k)
    return (q @ k.mT + table[clipped(2 * j - i)].permute(2, 0, 1)).softmax(-1) @ v


def with_a_row(q, k, v, table):
    i, j = positions(q, k)
    return (q @ k.mT + table[(clipped(j - i) + (i > 4)).clamp(max=11)].permute(2, 0, 1)).softmax(-1) @ v


def counted(q, k, v, table):
    i, j = positions(q, k)
    return (q @ k.mT + nn.functional.embedding(clipped(j - i), table, scale_grad_by_freq=True).permute(2, 0, 1)).softmax(-1) @ v


@pytest.mark.parametrize("f", [own_positions, a_sum, scaled_positions, with_a_row, counted])
def test_left_as_it_is(f):
    """Positions that depend on more than j - i, and gradients that depend on how often a row is read."""
    assert "bias[h, i, j]" in str(agree(f, *operands()).regions[0].spec)


def test_one_query_reads_the_model_s_own():
    seen = agree(attention(both_ways, past=25), *operands(1, 26))
    assert "M - 1" not in str(seen.regions[0].spec)


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_the_benchmark_s_table(inner):
    """Trained, as `python -m flashfx bench attention --variant t5` measures it."""
    from flashfx.bench.variants import BUCKETS as rows, t5
    from .test_backend import Counting
    q, k, v, table = operands(40, 43, rows=rows)
    seen = Counting(inner)
    found = []
    for f in (t5, torch.compile(t5, backend=seen, dynamic=False)):
        table.grad = None
        f(q, k, v, table).square().sum().backward()
        found.append(table.grad)
    assert "bias[h, minimum(maximum(j - i + M - 1, ends[0]), ends[1])]" in str(seen.regions[0].spec) and pairs(seen, 40, 43) == []
    torch.testing.assert_close(*found)
