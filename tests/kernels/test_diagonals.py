"""Gradients of captured tensors read at j - i: which loads those are, and sums over diagonals."""
from __future__ import annotations

import pytest
import torch

from flashfx.codegen import captured, render, torch_tiled
from flashfx.codegen.gpu import BY_NAME
from flashfx.codegen.plan import make_plan, overridden
from flashfx.codegen.selfcheck import inputs
from flashfx.expr import Load, parse
from flashfx.reference import evaluate, index_grid
from flashfx.spec import AttentionSpec

from .cases import MORE, problem, spec

def diagonals(x):
    return torch.stack([x.diagonal(d, -2, -1).sum(-1) for d in range(1 - x.shape[-2], x.shape[-1])], -1)


@pytest.mark.parametrize("M, N", [(5, 7), (7, 5), (4, 4), (1, 6), (6, 1), (9, 17)])
def test_sums_over_diagonals(M, N):
    x = torch.randn(2, M, N, dtype=torch.float64)
    torch.testing.assert_close(captured.along_diagonals(x), diagonals(x))


@pytest.mark.parametrize("index, relative", [
    ("j - i + M - 1", True), ("minimum(maximum(j - i + 4, 0), 8)", True), ("abs(i - j) // 2 + N", True), ("2 * j - (i + i) + 3", True),
    ("(j - i) * N", True), ("t[j - i + M]", True), ("where(j - i > 0, j - i, 0)", True), ("j - (i - (j - j))", True),
    ("j", False), ("j + i", False), ("2 * j - i", False), ("j // 2 - i // 2", False), ("abs(j) - abs(i)", False), ("t[j] - t[i]", False), ("j - i + i", False),
    ("i * j - j * i", False), ("where(j > 4, j - i, 0)", False), ("h", False)])
def test_what_depends_on_the_difference_alone(index, relative):
    e = parse(index, {"t": "int"})
    assert captured.is_relative(Load("x", (e,), "float")) is relative
    if relative:  # and so it does
        env = {"i": torch.arange(6)[:, None] + 1, "j": torch.arange(9)[None] + 2, "M": 6, "N": 9}
        values = evaluate(e, env, {"t": torch.arange(40) ** 2 % 37}, None, torch.float64)
        assert all(values.diagonal(d).unique().numel() == 1 for d in range(-5, 9))


@pytest.mark.parametrize("index", ["j - i + M - 1", "minimum(maximum(j - i + M - 1, ends[0]), ends[1])", "minimum(maximum(j - i + 4, 0), 8)",
                                   "minimum(maximum(j - i - 40, 3), 6)", "minimum(maximum(j - i + 5, 9), 2)"])
@pytest.mark.parametrize("ends", [(3, 9), (9, 3), (-4, 90)])
@pytest.mark.parametrize("M, N", [(6, 9), (9, 4)])
def test_positions_end_at_ones_that_occur(index, ends, M, N):
    line = captured.line_of(Load("x", (parse("h", {}), parse(index, {"ends": "int"})), "float"))
    env = {"i": torch.arange(M)[:, None], "j": torch.arange(N)[None], "M": M, "N": N}
    value = lambda e: evaluate(e, env, {"ends": torch.tensor(ends)}, None, torch.float64)
    difference, positions = env["j"] - env["i"] + value(line.offset), value(parse(index, {"ends": "int"}))
    assert line.dim == 1 and torch.equal(value(line.place), difference)
    if line.first is None:
        assert torch.equal(positions, difference)
    else:
        first, last = value(line.first), value(line.last)
        assert first == positions.min() and last == positions.max()
        assert torch.equal(positions, difference.clamp(first, last))


@pytest.mark.parametrize("index", ["minimum(maximum(j - i, 0), j)", "minimum(maximum(2 * j - i, 0), 8)", "minimum(maximum(i - j, 0), 8)", "abs(i - j)"])
def test_what_has_no_ends(index):
    assert captured.line_of(Load("x", (parse(index, {}),), "float")) is None


def test_indices_of_differences():
    env = index_grid(spec(MORE["relative"]), (2, 2), 9, 11, "cpu", slice(4, 9), slice(2, 8))
    found = captured.differences(env)
    assert found["j"].flatten().tolist() == list(range(2 - 8, 7 - 4 + 1)) and found["i"].tolist() == [[[[0]]]]


@pytest.mark.parametrize("variant", ["relative", "relative_causal", "t5_table"])
def test_no_gradient_of_every_pair(variant):
    """The generated backward stores tiles of diagonals; its tiles are square whatever the caller asks for."""
    s, p = spec(MORE[variant]), problem("self", 64, "bfloat16", M=512)
    for gpu in (BY_NAME["H100"], BY_NAME["A100"]):
        with overridden(dense=(32, 16, 4, 1)):
            plan = make_plan(s, p, gpu, "backward")
        assert (plan.dense.BLOCK_M, plan.dense.BLOCK_N) == (16, 16)
        plan = make_plan(s, p, gpu, "backward")
        assert plan.dense.BLOCK_M == plan.dense.BLOCK_N
        text = render.render(s, make_plan(s, p, gpu, "forward"), p).text
        assert "lines_of_d_" in text and "M, N), dtype" not in text


def test_the_tiled_schedule_adds_up_diagonals():
    """Tiles of any size give the gradient that autograd does."""
    s, p = spec(MORE["relative"]), problem("self", 16, "float32", M=37, N=51)
    q, k, v, (rel,), seed, sizes = inputs(s, p)
    rel = rel.double().requires_grad_()
    out = s.reference(q, k, v, [rel], sizes)
    g = torch.randn_like(out)
    expected, = torch.autograd.grad(out, rel, g)
    for tiles in ((37, 51), (16, 16), (5, 51), (37, 7)):
        got, lse = torch_tiled.forward(s, q.double(), k.double(), v.double(), [rel.detach()], seed, sizes, tiles)
        grads = torch_tiled.backward(s, g, q.double(), k.double(), v.double(), [rel.detach()], seed, got, lse, sizes, (False,) * 3 + (True,), tiles)
        torch.testing.assert_close(grads[3], expected)


@pytest.mark.parametrize("card", ["A100", "H200"])
@pytest.mark.parametrize("index", ["i - j + N - 1", "abs(i - j)"])
def test_other_differences_have_the_kernel_of_all_diagonals(card, index):
    from flashfx.spec import AttentionSpec
    s = AttentionSpec.parse(f"attention[b, h, i, j]\n given rel: float[2]\n qk = q[b, h, i] . k[b, h, j]\n score = qk + rel[h, {index}]\n out = softmax_j(score) . v[b, h, j]")
    p = problem("self", 64, "bfloat16", M=256)
    source = render.render(s, make_plan(s, p, BY_NAME[card], "forward"), p, (True,) * 4).text
    compile(source, "kernels", "exec")
    assert source.count("def attention_backward_") > 2  # keys, rows and the sums along diagonals


@pytest.mark.parametrize("index, shape, evenly", [
    ("b, 0, i // 4, i % 4, j // 3, 0", (2, 1, 5, 4, 6, 1), True), ("b, 0, i // 4, i % 4, j % 6, 0", (2, 1, 5, 4, 6, 1), True), ("j % 6, b, i", (6, 2, 20), True),
    ("h, i // 4, j // 3", (3, 5, 6), True), ("h, i // 4, j // 3", (3, 5, 7), False), ("h, i // 4, (i + j) % 3", (3, 5, 3), False), ("i % 4, h, i // 4, j", (4, 3, 5, 18), False)])
def test_sums_of_what_is_read_evenly(index, shape, evenly):
    """Decomposed relative positions, of an image's rows and columns: their gradients are sums, not scattered element by element."""
    text = f"attention[b, h, i, j]\n  given rel: float[{len(shape)}]\n  qk = q[b, h, i] . k[b, h, j]\n  score = qk + rel[{index}]\n  out = softmax_j(score) . v[b, h, j]"
    s, M, N = AttentionSpec.parse(text), 20, 18
    load, = s.score.loads
    extents = {"b": 2, "h": 3, "i": M, "j": N}
    dense = torch.randn([extents[n] if n in load.variables else 1 for n in "bhij"], dtype=torch.float64)
    env = index_grid(s, (2, 3), M, N, "cpu")
    env = {n: x if n in load.variables or not isinstance(x, torch.Tensor) else x[:1] for n, x in env.items()}
    found, wanted = torch.zeros(2, *shape, dtype=torch.float64)
    captured.accumulate(s, load, dense, found, env, {}, whole=True)
    captured.accumulate(s, load, dense, wanted, env, {})
    torch.testing.assert_close(found, wanted)
    assert wanted.any() and (captured.summed_up(s, load, dense, shape) is not None) == evenly
