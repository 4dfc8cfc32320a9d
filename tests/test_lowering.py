"""Code that Inductor generates calls our functions directly, and computes the same; C++ wrappers keep the ops."""
from __future__ import annotations

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import flashfx.lowering

from .test_backend import Counting


def attention(q, k, v, bias):
    return (q @ k.mT * 0.25 + bias).softmax(-1) @ v


@pytest.fixture
def leaves():
    torch.manual_seed(0)
    return [torch.randn(shape, requires_grad=True) for shape in ((2, 3, 40, 16), (2, 3, 50, 16), (2, 3, 50, 8), (3, 40, 50))]


def both(function, leaves):
    out = function(*leaves)
    return [out, *torch.autograd.grad(out.square().sum(), leaves)]


def test_generated_code_calls_our_functions(leaves):
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        found, codes = run_and_get_code(both, torch.compile(attention, backend="flashfx"), leaves)
    text = "\n".join(line for code in codes for line in code.splitlines() if not line.lstrip().startswith("#"))
    assert "= flashfx.op.attention(" in text and "= flashfx.op.attention_backward(" in text
    assert "import flashfx.op" in text and "torch.ops.flashfx.attention.default(" not in text
    torch.testing.assert_close(found, both(attention, leaves))


def test_summaries_are_called_directly_too():
    mask = "attention[b, i, j]; given doc: int[2]; qk = q[b, i] . k[b, j]; score = qk; where (doc[b, i] == doc[b, j]) & (j <= i); out = softmax_j(score) . v[b, j]"
    doc = torch.arange(300).expand(2, -1).contiguous() // 140

    def function(doc):
        rows, keys = torch.ops.flashfx.block_lists(doc, [doc], [2, 300, 300], mask)
        return rows + 1, keys + 1, torch.ops.flashfx.document_tiles(doc, [doc], [2, 300, 300], mask)[1] + 1

    flashfx.lowering.register()
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        found, codes = run_and_get_code(torch.compile(function), doc)
    assert all(f"= flashfx.op.{name}(" in "".join(codes) for name in ("block_lists", "document_tiles"))
    torch.testing.assert_close(found, function(doc))


def test_the_ops_called_by_themselves_keep_autograd(leaves):
    text = ("attention[b, h, i, j]; given bias: float[3]; qk = q[b, h, i] . k[b, h, j]; score = qk * 0.25 + bias[h, i, j]; "
            "out = softmax_j(score) . v[b, h, j]")
    op = lambda q, k, v, bias: torch.ops.flashfx.attention(q, k, v, [bias], None, [], text, None, None, False, 1)[0]
    torch.testing.assert_close(both(op, leaves), both(attention, leaves))


@pytest.mark.parametrize("rows_first, joined, outer", [(False, False, 2), (True, False, 1), (False, True, 1)])
@pytest.mark.parametrize("batch, dynamic", [(2, False), (1, False), (2, True)])
def test_an_output_lies_as_it_is_read(rows_first, joined, outer, batch, dynamic):
    """Rows outside of the heads, which the graph joins; heads outside where it returns them so: the gradient comes in that layout, and is not copied."""
    def function(q, k, v):
        if rows_first:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = (q @ k.mT * 0.25).softmax(-1) @ v
        return out.transpose(1, 2).flatten(2) if joined else out

    torch._dynamo.reset()
    backend = Counting("aot_eager")
    q, k, v = (torch.randn(batch, *((10, 3) if rows_first else (3, 10)), 16, requires_grad=True) for _ in range(3))
    out = torch.compile(function, backend=backend, dynamic=dynamic)(q, k, v)
    torch.testing.assert_close(out, function(q, k, v))
    seen = [n.args[-1] for gm in backend.graphs for n in gm.graph.nodes if n.target is torch.ops.flashfx.attention.default]
    assert seen == [outer - (batch == 1)]  # a batch of one is no axis
    assert (out.transpose(1, 2) if rows_first else out).is_contiguous()
