"""Constant tensors recognised by value: the formula is exact on every element or there is none; inputs are never taken for constants."""
from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline

import flashfx
from flashfx.codegen import blocks as summaries, torch_tiled
from flashfx.expr import FLOAT
from flashfx.passes.constants import dim, recognised
from flashfx.reference import evaluate
from flashfx.spec import BLOCK

from .budget import assert_within
from .capture import rand
from .thinning import thinned
from .zoo.count import between, matrices

N = 320
I, J = torch.arange(N)[:, None], torch.arange(N)[None, :]
XOR = (I // 32) ^ (J // 32)
DRAWN = (torch.rand(10, 10, generator=torch.Generator().manual_seed(0)) < 0.2)[I // 32, J // 32]
PATTERNS = {
    "causal": J <= I, "strictly causal": J < I, "anticausal": J >= I, "window": (I - J).abs() <= 20, "causal window": (J <= I) & (I - J < 50),
    "dilated": (J - I) % 7 == 0, "dilated causal": ((J - I) % 7 == 0) & (J <= I), "dilated window": ((J - I) % 7 == 0) & ((J - I).abs() <= 70),
    "prefix": (J <= I) | (J < 100), "longformer": ((I - J).abs() <= 16) | (I < 4) | (J < 4), "causal longformer": (((I - J).abs() <= 16) | (J < 4)) & (J <= I),
    "strided": (J <= I) & ((I - J < 16) | ((I - J) % 16 == 0)), "fixed": (J <= I) & ((I // 32 == J // 32) | (J % 32 >= 30)), "chunks": I // 100 == J // 100,
    "documents of a length": (I // 100 == J // 100) & (J <= I), "butterfly": (XOR & (XOR - 1)) == 0, "block window": (I // 32 - J // 32).abs() <= 1,
    "big bird": ((I // 32 - J // 32).abs() <= 1) | (I // 32 == 0) | (J // 32 == 0), "some keys": (J % 32 >= 30) & (I >= 0), "first keys": (J < 200) & (I >= 0),
    "first queries": (I < 200) & (J >= 0),
}


def holds(condition, shape) -> torch.Tensor:
    env = {dim(d).name: torch.arange(s).reshape([-1 if p == d else 1 for p in range(len(shape))]) for d, s in enumerate(shape)}
    return evaluate(condition, env, {}, None, torch.float32).expand(shape)


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_are_recognised(name):
    found = recognised(PATTERNS[name].expand(N, N))
    assert found is not None and torch.equal(holds(found, (N, N)), PATTERNS[name].expand(N, N))


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("seed", range(4))
def test_one_element_off_is_seen(name, seed):
    """A pattern with one element flipped has no formula, or one that says so."""
    off = PATTERNS[name].expand(N, N).clone()
    i, j = torch.randint(0, N, (2,), generator=torch.Generator().manual_seed(seed)).tolist()
    off[i, j] = ~off[i, j]
    found = recognised(off)
    assert found is None or torch.equal(holds(found, (N, N)), off)


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (7, 1), (3, 5), (33, 65), (600, 40)])
@pytest.mark.parametrize("seed", range(6))
def test_random_tensors(shape, seed):
    t = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < (0.05, 0.5, 0.97)[seed % 3]
    found = recognised(t)
    assert found is None or torch.equal(holds(found, shape), t)


def test_formulas_read_like_the_pattern():
    show = lambda name: str(recognised(PATTERNS[name].expand(N, N)))
    assert_expected_inline(show("causal"), "dim1 - dim0 <= 0")
    assert_expected_inline(show("longformer"), "(dim0 <= 3) | (dim1 <= 3) | (dim1 - dim0 >= (-16)) & (dim1 - dim0 <= 16)")
    assert_expected_inline(show("strided"), "(dim1 - dim0 >= (-16)) & (dim1 - dim0 <= 0) | ((dim1 - dim0) % 16 <= 0) & (dim1 - dim0 <= (-32))")
    assert_expected_inline(show("fixed"), "(dim1 <= dim0) & ((dim1 % 32 >= 30) | (dim1 // 32 - dim0 // 32 >= 0))")
    assert_expected_inline(str(recognised(torch.full((1, 2, 9, 9), float("-inf")).triu(1))), "where(dim3 - dim2 <= 0, 0.0, -inf)")
    assert_expected_inline(str(recognised(torch.zeros(4, 4))), "0.0")


def test_what_has_no_formula():
    assert recognised(DRAWN) is None and recognised(torch.arange(9.0)) is None and recognised(torch.tensor([1.0, float("nan")])) is None
    assert recognised(torch.stack([PATTERNS["causal"], PATTERNS["window"]])) is None, "another pattern for each head"


def attention(q, k, v, visible):
    return (q @ k.mT * 0.25).masked_fill(~visible, float("-inf")).softmax(-1) @ v


def literal(q, k, v):
    n = q.shape[-2] // 32
    layout = torch.tensor([[abs(i - j) <= 1 or i == 0 or j == 0 for j in range(n)] for i in range(n)])
    return attention(q, k, v, layout.repeat_interleave(32, 0).repeat_interleave(32, 1))


def filled(q, k, v):
    i = torch.arange(q.shape[-2])
    visible = (i[:, None] - i).abs() <= 20
    visible[:, :8] = True
    visible[:8] = True
    return attention(q, k, v, visible)


def kronecker(q, k, v):
    n = q.shape[-2] // 32
    return attention(q, k, v, torch.kron(torch.ones(n, n).tril(), torch.ones(32, 32)).bool())


def additive(q, k, v):
    return (q @ k.mT * 0.25 + torch.full((q.shape[-2], k.shape[-2]), float("-inf")).triu(1)).softmax(-1) @ v


def exclusive(q, k, v):
    block = torch.arange(q.shape[-2]) // 32
    x = block[:, None] ^ block
    return attention(q, k, v, (x & (x - 1)) == 0)


BUILT = {"literal": literal, "filled": filled, "kronecker": kronecker, "additive": additive, "exclusive": exclusive}


def operands(length: int = N):
    return [rand(1, 2, length, 16, grad=False, seed=n) for n in range(3)]


def compiled(fn, *args):
    """(result, the graph's nodes with an element for every query and key, regions)."""
    from flashfx.backend import rewrite_graph
    from flashfx.options import Options
    torch._dynamo.reset()
    found = []

    def backend(gm, example_inputs):
        scores = between(gm)
        regions = rewrite_graph(gm, Options(verify=True))
        found.extend((sum(matrices(gm, scores, regions), []), regions))
        return gm.forward

    return torch.compile(fn, backend=backend)(*args), *found


@pytest.mark.parametrize("name", BUILT)
def test_masks_built_in_the_graph_become_predicates(name):
    args = operands()
    out, made, (region,) = compiled(BUILT[name], *args)
    assert region.fused and not region.spec.aux and made == []
    assert_within(out, BUILT[name](*args), BUILT[name](*(a.double() for a in args)))


def by_index(q, k, v, blocks):
    i = torch.arange(q.shape[-2]) // 32
    return attention(q, k, v, blocks[i[:, None], i])


def by_view(q, k, v, blocks):
    n = blocks.shape[0]
    return attention(q, k, v, blocks[:, None, :, None].expand(n, 32, n, 32).reshape(n * 32, n * 32))


def by_repeats(q, k, v, blocks):
    return attention(q, k, v, blocks.repeat_interleave(32, 0).repeat_interleave(32, 1))


@pytest.mark.parametrize("fn", [by_index, by_view, by_repeats])
def test_a_mask_of_blocks_is_read_at_the_block(fn):
    blocks = DRAWN[::32, ::32] | torch.eye(10, dtype=torch.bool)
    out, made, (region,) = compiled(fn, *operands(), blocks)
    assert str(region.spec.visible) == "mask[i // 32, j // 32]" and made == []
    assert_within(out, fn(*operands(), blocks), fn(*(a.double() for a in operands()), blocks))


def test_positions_that_may_lie_outside_are_not_read_by_the_kernel():
    def shifted(q, k, v, blocks):
        i = torch.arange(q.shape[-2]) // 32 - 1
        return attention(q, k, v, blocks[i[:, None], i])  # -1 is the last block

    blocks = DRAWN[::32, ::32] | torch.eye(10, dtype=torch.bool)
    out, _, (region,) = compiled(shifted, *operands(), blocks)
    assert str(region.spec.visible) == "mask[i, j]"
    assert_within(out, shifted(*operands(), blocks), shifted(*(a.double() for a in operands()), blocks))


def test_a_mask_given_as_an_input_is_no_constant():
    given = torch.ones(N, N, dtype=torch.bool).tril()
    args = operands()
    step = torch.compile(attention, backend="flashfx", options={"inner": "eager"})
    for mask in (given, given.T.contiguous()):
        assert_within(step(*args, mask), attention(*args, mask), attention(*(a.double() for a in args), mask))
    (region,) = compiled(attention, *args, given)[2]
    assert region.spec.visible.loads and all(load.kind != FLOAT for load in region.spec.visible.loads)


# ----------------------------------------------------------------------------------------------------- row by row

ROWS = 40
STARTS = torch.randint(0, ROWS, (ROWS,), generator=torch.Generator().manual_seed(2)).tolist()


def window_by_rows(q, k, v):
    mask = torch.full((q.shape[-2], k.shape[-2]), float("-inf"))
    for i in range(q.shape[-2]):
        mask[i, max(0, i - 7): i + 1] = 0.0
    return (q @ k.mT * 0.25 + mask).softmax(-1) @ v


def drawn_by_rows(q, k, v):
    mask = torch.full((q.shape[-2], k.shape[-2]), float("-inf"))
    for i, start in enumerate(STARTS):
        mask[i, min(i, start): i + 1] = 0.0
    return (q @ k.mT * 0.25 + mask).softmax(-1) @ v


def given_by_rows(q, k, v, kept):
    mask = kept.clone()
    for i in range(q.shape[-2]):
        mask[i, max(0, i - 7): i + 1] = True
    return (q @ k.mT * 0.25).masked_fill(~mask, -1e30).softmax(-1) @ v


@pytest.mark.parametrize("fn, visible", [(window_by_rows, "(j <= i) & (j > i - 8)"), (drawn_by_rows, "bias[i, j] > (-33554432.0)"), (given_by_rows, "mask[i, j]")])
def test_masks_that_a_loop_fills(fn, visible):
    """A formula where there is one, else the tensor: not as many conditions as there are rows."""
    args = (*operands(ROWS), *[torch.rand(ROWS, ROWS) > 0.5] * (fn is given_by_rows))
    out, _, (region,) = compiled(fn, *args)
    assert region.fused and str(region.spec.visible) == visible
    assert_within(out, fn(*args), fn(*(a.double() if a.is_floating_point() else a for a in args)))


def exclusive_or(q, k, v, flags):
    keep = flags[0]
    for f in flags[1:]:
        keep = (keep & f) | (~keep & ~f)
    return attention(q, k, v, keep | (torch.arange(q.shape[-2])[:, None] == torch.arange(k.shape[-2])))


def one_inside_the_other(q, k, v, flags):
    i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
    keep = j <= i
    for n, f in enumerate(flags):
        keep = torch.where(f, keep | (j == n), keep & (j != n))
    return attention(q, k, v, keep | (i == j))


@pytest.mark.parametrize("depth", [4, 40])
@pytest.mark.parametrize("fn", [exclusive_or, one_inside_the_other])
def test_masks_inside_of_masks(fn, depth):
    """Each uses the one before twice: written out there would be 2 ** 40 parts, and there are 40."""
    flags = torch.rand(depth, ROWS, generator=torch.Generator().manual_seed(depth)) > 0.3
    out, _, (region,) = compiled(fn, *operands(ROWS), flags)
    assert region.fused
    assert_within(out, fn(*operands(ROWS), flags), fn(*(a.double() for a in operands(ROWS)), flags))


# ----------------------------------------------------------------------------------------------------- block-sparse patterns

def _example():
    spec = importlib.util.spec_from_file_location("block_sparse", Path(__file__).parent.parent / "examples" / "09_block_sparse.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


EXAMPLE = _example()
LENGTH = 1024
BLOCKS = (torch.rand(8, 8, generator=torch.Generator().manual_seed(1)) < 0.15) | torch.eye(8, dtype=torch.bool)


def visible_of(pattern, given) -> torch.Tensor:
    """The mask as the function computes it."""
    seen = []
    original, EXAMPLE.attention = EXAMPLE.attention, lambda q, k, v, visible: seen.append(visible) or q
    try:
        pattern(*given)
    finally:
        EXAMPLE.attention = original
    return seen[0]


@pytest.mark.parametrize("pattern", thinned(EXAMPLE.PATTERNS, 2), ids=lambda p: p.__name__)
def test_block_sparse_patterns_cost_what_they_show(pattern, monkeypatch):
    """Tiles visited are those that show something (of the 128 x 128 blocks, where the range has no closed form), forward and backward."""
    args = [rand(1, 2, LENGTH, 16, grad=True, seed=n) for n in range(3)]
    given = (*args, *([BLOCKS] if pattern is EXAMPLE.block_mask else []))
    report, = flashfx.explain(pattern, *given)
    assert report.fused
    grid = visible_of(pattern, given)
    shown = int(grid.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).any(3).any(1).sum())
    visited = []
    scores = torch_tiled._Site.scores

    def counting(self, rows, cols):
        result = scores(self, rows, cols)
        visited.append((result[2] is not False) * (rows.stop - rows.start) * (cols.stop - cols.start) // BLOCK ** 2)
        return result

    if report.plan.listed:
        monkeypatch.setattr(torch_tiled._Site, "scores", counting)
    torch._dynamo.reset()
    out = torch.compile(pattern, backend="flashfx")(*given)
    g = rand(*out.shape, grad=False, seed=5)
    found = torch.autograd.grad(out, args, g)
    if report.plan.listed:
        assert sum(visited) == 2 * shown, "forward and backward"
    else:  # a closed form: its tiles are those that show something
        tiles = report.tiles()
        small = int(grid.unflatten(0, (-1, report.plan.BLOCK_M)).unflatten(2, (-1, report.plan.BLOCK_N)).any(3).any(1).sum())
        assert tiles.full + tiles.partial == 2 * small
    doubles = [a.detach().double().requires_grad_() for a in args]
    exact_out = pattern(*doubles, *given[3:])
    eager = pattern(*given)
    assert_within(out, eager, exact_out)
    exact = torch.autograd.grad(exact_out, doubles, g.double())
    for a, b, c in zip(found, torch.autograd.grad(eager, args, g), exact):
        assert_within(a, b, c, max(t.abs().max().item() for t in exact))


@pytest.mark.parametrize("pattern", EXAMPLE.PATTERNS, ids=lambda p: p.__name__)
def test_which_patterns_are_listed(pattern):
    """Windows have closed forms; the rest is summarised at run time, and the data need no part in that."""
    given = (*(rand(1, 2, LENGTH, 16, grad=False, seed=n) for n in range(3)), *([BLOCKS] if pattern is EXAMPLE.block_mask else []))
    report, = flashfx.explain(pattern, *given)
    assert summaries.pays(report.spec, report.region.problem) == report.plan.listed == (pattern.__name__ not in ("sliding_window", "dilated_window"))
