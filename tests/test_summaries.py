"""Masks that only the data decides, through torch.compile: one summary per mask, in every mode, and results that do not depend on it."""
from __future__ import annotations

import itertools

import pytest
import torch
from torch import fx

import flashfx
from flashfx import op  # noqa: F401  registers the ops
from flashfx.backend import rewrite_graph
from flashfx.codegen import blocks
from flashfx.options import Options
from flashfx.spec import AttentionSpec

from .budget import assert_within
from .capture import rand
from .thinning import thinned

MIN = torch.finfo(torch.float32).min


@pytest.fixture(autouse=True)
def always(monkeypatch):
    monkeypatch.setattr(blocks, "SUMMARISED_FROM", 0)
    torch._dynamo.reset()


def attention(q, k, v, bias):
    return (q @ k.transpose(-1, -2) * 0.25 + bias).softmax(-1) @ v


def padded(q, k, v, pad):
    """Three layers of causal attention with one padding mask, the last through SDPA, of which rows without a visible key are no averages."""
    i = torch.arange(q.shape[-2])
    visible = (i[None, :] <= i[:, None])[None, None] & pad[:, None, None, :].bool()
    bias = torch.where(visible, 0.0, MIN)
    x = attention(attention(q, k, v, bias), k, v, bias)
    return torch.nn.functional.scaled_dot_product_attention(x, k, v, attn_mask=visible)


def packed(q, k, v, doc):
    same = doc[:, None, :, None] == doc[:, None, None, :]
    return attention(q, k, v, torch.zeros(same.shape).masked_fill(~same, float("-inf")))


def given(q, k, v, mask):
    """A mask that the caller made: boolean, N x N."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def additive(q, k, v, mask):
    """One that the caller made of 0 and -inf."""
    return attention(q, k, v, mask)


N = 300
PAD = torch.ones(2, N, dtype=torch.long)
PAD[1, 200:] = 0
PAD[0, :140] = 0  # left padding: rows that average v
DOC = torch.stack([torch.arange(N) // 90, torch.arange(N) // 150])
PAIRS = (DOC[:, None, :, None] == DOC[:, None, None, :])
CASES = {"padded": (padded, PAD), "packed": (packed, DOC), "given": (given, PAIRS),
         "additive": (additive, torch.zeros(2, 1, N, N).masked_fill(~PAIRS, float("-inf")))}


def operands(length: int = N, grad: bool = True):
    return [rand(2, 3, length, 16, grad=grad, seed=n) for n in range(3)]


def calls(gm: fx.GraphModule, name: str) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.op == "call_function" and str(n.target) == f"flashfx.{name}.default"]


def rewritten(fn, *args, dynamic=False) -> fx.GraphModule:
    found = []

    def backend(gm, example_inputs):
        rewrite_graph(gm, Options())
        found.append(gm)
        return gm.forward

    torch.compile(fn, backend=backend, dynamic=dynamic)(*args)
    return found[0]


def check(fn, compiled, args):
    q, k, v, mask = args
    out, expected = compiled(*args), fn(*args)
    exact = fn(*(t.double() if t.is_floating_point() else t for t in args))
    assert_within(out, expected, exact)
    if out.requires_grad:
        g = rand(*out.shape, grad=False, seed=9)
        found, eager = (torch.autograd.grad(o, (q, k, v), g) for o in (out, expected))
        doubles = [t.detach().double().requires_grad_() for t in (q, k, v)]
        exact = torch.autograd.grad(fn(*doubles, mask.double() if mask.is_floating_point() else mask), doubles, g.double())
        scale = max(t.abs().max().item() for t in exact)
        for a, b, c in zip(found, eager, exact):
            assert_within(a, b, c, scale)


@pytest.mark.parametrize("name, inner, dynamic", thinned(itertools.product(CASES, ["eager", "aot_eager", "inductor"], [False, True]), 5))
def test_training(name, inner, dynamic):
    fn, mask = CASES[name]
    check(fn, torch.compile(fn, backend="flashfx", dynamic=dynamic, options={"inner": inner}), (*operands(), mask))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference(name, mode):
    fn, mask = CASES[name]
    with mode():
        check(fn, torch.compile(fn, backend="flashfx"), (*operands(grad=False), mask))


@pytest.mark.parametrize("name, summaries, sites", [("padded", 2, 3), ("packed", 1, 1), ("given", 1, 1), ("additive", 1, 1)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_sites_share_one_summary(name, summaries, sites, dynamic):
    """Those whose empty rows average v one, and others one."""
    fn, mask = CASES[name]
    gm = rewritten(fn, *operands(), mask, dynamic=dynamic)
    assert len(calls(gm, "block_lists")) == summaries and len(calls(gm, "attention")) == sites
    shared = {}
    for node in calls(gm, "attention"):
        rows, keys = (n.args[0] for n in node.args[7:9])
        assert rows is keys is shared.setdefault(AttentionSpec.parse(node.args[6]).mask(), rows)
    assert [*shared.values()] == calls(gm, "block_lists")


def test_the_summary_runs_once_for_forward_and_backward(monkeypatch):
    """Each of the two: saved, not made again, even where the partitioner recomputes much."""
    made = []
    original = blocks.block_lists
    monkeypatch.setattr(blocks, "block_lists", lambda *a: made.append(1) or original(*a))
    q, k, v = operands()
    torch.compile(padded, backend="flashfx")(q, k, v, PAD).sum().backward()
    assert len(made) == 2


def test_a_summary_is_made_again_when_the_mask_was_changed_in_place():
    def fn(q, k, v, pad):
        first = padded(q, k, v, pad)
        pad[:, 50:60] = 0
        return first + padded(q, k, v, pad)

    gm = rewritten(fn, *operands(), PAD.clone())
    assert len(calls(gm, "block_lists")) == 4
    torch._dynamo.reset()
    q, k, v = operands()
    out = torch.compile(fn, backend="flashfx", options={"inner": "aot_eager"})(q, k, v, PAD.clone())
    exact = fn(q.double(), k.double(), v.double(), PAD.clone())
    assert_within(out, fn(q, k, v, PAD.clone()), exact)


def test_new_values_of_a_mask_are_seen():
    """The mask's value belongs to the call, not to the compiled graph."""
    compiled = torch.compile(given, backend="flashfx")
    args = operands(grad=False)
    for seed in range(3):
        mask = torch.rand(2, 1, N, N, generator=torch.Generator().manual_seed(seed)) < 0.02
        mask[..., :128 * seed, :] = False
        mask[..., 0] = True
        check(given, compiled, (*args, mask))


class Buffered(torch.nn.Module):
    """GPT-Neo's kind: a registered buffer that a user may change."""

    def __init__(self):
        super().__init__()
        self.register_buffer("causal", torch.ones(N, N, dtype=torch.bool).tril()[None, None])

    def forward(self, q, k, v):
        n = q.shape[-2]
        scores = (q @ k.transpose(-1, -2)).masked_fill(~self.causal[:, :, :n, :n], MIN)
        return scores.softmax(-1) @ v


def test_a_buffer_is_summarised_and_its_changes_are_seen():
    model, args = Buffered(), operands(grad=False)
    compiled = torch.compile(model, backend="flashfx")
    for change in (lambda: None, lambda: model.causal.data.logical_and_(torch.ones(N, N, dtype=torch.bool).triu(-20)),
                   lambda: model.causal.zero_(), lambda: model.register_buffer("causal", torch.ones(1, 1, N, N, dtype=torch.bool))):
        change()
        assert_within(compiled(*args), model(*args), model(*[a.double() for a in args]))
    assert len(calls(rewritten(model, *args), "block_lists")) == 1


def test_short_sequences_get_no_summary(monkeypatch):
    monkeypatch.undo()
    assert calls(rewritten(padded, *operands(), PAD), "block_lists") == []
    report = flashfx.explain(padded, *operands(), PAD)
    assert "; too short for a list of what the data hide" in str(report)


def test_explain_says_so():
    text = str(flashfx.explain(packed, *operands(), DOC))
    assert "; blocks of 128 that the data hide are skipped too, fully visible ones read without the mask" in text
    assert "tiles from a list of 128x128 blocks made at run time" in text


def test_export_keeps_the_ops():
    class Rewritten(torch.nn.Module):
        def __init__(self, gm):
            super().__init__()
            self.gm = gm

        def forward(self, *args):
            return self.gm(*args)

    args = (*operands(grad=False), DOC)
    gm = rewritten(packed, *args)
    named = dict(zip(("L_q_", "L_k_", "L_v_", "L_doc_"), args))
    inputs = tuple(named[n.target] for n in gm.graph.nodes if n.op == "placeholder")
    program = torch.export.export(Rewritten(gm), inputs)
    assert [str(n.target) for n in program.graph.nodes if "flashfx" in str(n.target)] == ["flashfx.block_lists.default", "flashfx.attention.default"]
    assert_within(program.module()(*inputs)[0], packed(*args), packed(*(a.double() if a.is_floating_point() else a for a in args)))


def test_op_checks():
    mask = flashfx.AttentionSpec.parse("attention[b, i, j]\n given pad: bool[2]\n qk = q[b, i] . k[b, j]\n score = qk\n where pad[b, j]\n"
                                       " empty nan\n out = softmax_j(score) . v[b, j]").mask()
    torch.library.opcheck(torch.ops.flashfx.block_lists.default, (PAD, [PAD.bool()], [2, N, N], str(mask)),
                          test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"))


def test_checkpointed():
    def fn(q, k, v, pad):
        return torch.utils.checkpoint.checkpoint(padded, q, k, v, pad, use_reentrant=False)

    check(fn, torch.compile(fn, backend="flashfx", options={"inner": "aot_eager"}), (*operands(), PAD))


def test_in_float64_and_with_a_mask_that_needs_a_gradient():
    """An additive mask that hides by -inf and is learned too."""
    mask = CASES["additive"][1].clone().requires_grad_()
    q, k, v = operands()
    compiled = torch.compile(additive, backend="flashfx", options={"inner": "aot_eager"})
    g = rand(2, 3, N, 16, grad=False)
    found = torch.autograd.grad(compiled(q, k, v, mask), (q, mask), g)
    eager = torch.autograd.grad(additive(q, k, v, mask), (q, mask), g)
    doubles = [t.detach().double().requires_grad_() for t in (q, k, v, mask)]
    exact = torch.autograd.grad(additive(*doubles), (doubles[0], doubles[3]), g.double())
    for a, b, c in zip(found, eager, exact):
        assert_within(a, b, c, max(t.abs().max().item() for t in exact))


def lengths(q, k, v, pad):
    visible = pad[:, None, None, :].expand(-1, 1, q.shape[-2], -1)
    return attention(q, k, v, torch.zeros(visible.shape).masked_fill(~visible, float("-inf")))


def test_one_compilation_serves_many_shapes():
    """Lengths around a block's, other lengths of queries than of keys, one query, one key, no batch."""
    compiled = torch.compile(lengths, backend="flashfx", dynamic=True, options={"inner": "aot_eager"})
    for batch, M, keys in ((2, 200, 300), (3, 257, 513), (2, 300, 128), (1, 129, 127), (2, 1, 300), (2, 300, 1), (0, 130, 140)):
        q, k, v = rand(batch, 3, M, 16), rand(batch, 3, keys, 16), rand(batch, 3, keys, 16)
        pad = torch.rand(batch, keys, generator=torch.Generator().manual_seed(M)) < 0.02
        pad[:, keys // 2] = True
        if batch:
            check(lengths, compiled, (q, k, v, pad))
        else:
            assert compiled(q, k, v, pad).shape == (0, 3, M, 16)


@pytest.mark.parametrize("budget", [0.0, 0.5])
def test_recomputed_under_a_memory_budget(budget):
    from torch._functorch import config
    with config.patch(activation_memory_budget=budget):
        check(packed, torch.compile(packed, backend="flashfx"), (*operands(), DOC))
