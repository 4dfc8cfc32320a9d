"""The spec as a value: text and back, what it refuses, and two oracles that agree."""
from __future__ import annotations

import dataclasses
import math
import pickle

import pytest
import torch
from expecttest import TestCase
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from flashfx.errors import SpecError
from flashfx.expr import QK, TRUE, Const, Var, call, conjuncts, parse
from flashfx.reference import reference
from flashfx.spec import AttentionSpec, Aux, EmptyRow

KINDS = {"pad": "bool", "bias": "float", "slope": "float", "ids": "int"}
EXPRESSIONS = [
    "qk", "qk * 0.125", "tanh(qk * 0.125 / 30.0) * 30.0 + bias[h, i, j]", "qk - slope[h * 4 + g] * to_float(i - j)",
    "-(qk - 1.0) - (2.0 - qk)", "qk - (qk - (qk - 1.0))", "qk / (qk / 2.0)", "where(j <= i, qk, (-10000.0))", "qk * (-inf)",
    "(j <= i + (N - M)) & pad[b, j]", "(j > i) | (i // 4 == j // 4) & pad[b, j]", "~(pad[b, j] ^ (ids[b, i] == ids[b, j]))",
    "abs(i - j) <= 8", "j % 4 == (i + 1) % 4", "maximum(qk, 0.0) * sigmoid(qk)",
]


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_expressions_print_and_parse_back(text):
    e = parse(text, KINDS)
    assert parse(str(e), KINDS) == e
    assert str(parse(str(e), KINDS)) == str(e)


def spec_of(score="qk * 0.25", visible="True", aux=(), axes=("b", "h"), k=None, **rest):
    kinds = {a.name: a.kind for a in aux}
    k = frozenset(axes if k is None else k)
    return AttentionSpec(axes, frozenset(axes), k, k, parse(score, kinds), parse(visible, kinds), aux=tuple(aux), **rest)


PAD, BIAS, SLOPE = Aux("pad", "bool", 2), Aux("bias", "float", 3), Aux("slope", "float", 1)
SPECS = [
    spec_of(),
    spec_of(axes=()),
    spec_of(axes=("b", "h", "g"), k=("b", "h"), visible="(j <= i + (N - M)) & pad[b, j]", aux=[PAD], empty_row=EmptyRow.MEAN_ADD),
    spec_of("tanh(qk / 5.0) * 5.0 + bias[h, i, j]", "j <= i", [BIAS], dropout=0.1),
    spec_of("qk + slope[h] * to_float(j - i)", "(j <= i) & (j > i - s0)", [SLOPE], sizes=("s0",), empty_row=EmptyRow.ZERO),
    spec_of(visible="(j <= i) | pad[b, j]", aux=[PAD], empty_row=EmptyRow.MEAN, empty_over=parse("pad[b, j]", KINDS)),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_specs_print_and_parse_back(spec):
    assert AttentionSpec.parse(str(spec)) == spec
    assert hash(AttentionSpec.parse(str(spec))) == hash(spec)
    assert AttentionSpec.parse(spec.line) == spec and "\n" not in spec.line
    assert "_hash" in spec.__dict__ and "_hash" not in pickle.loads(pickle.dumps(spec)).__dict__, "hashes are of one process"


@pytest.mark.parametrize("make, text", [
    (lambda: spec_of(visible="qk > 0.0"), "a mask may not depend on the scores"),
    (lambda: spec_of("qk + bias[h, i]", aux=[BIAS]), "does not fit the declared captured tensors"),
    (lambda: spec_of("qk * to_float(x)"), r"uses \['x'\]; known indices and sizes"),
    (lambda: spec_of(dropout=1.0), r"dropout must be in \[0, 1\), got 1.0"),
    (lambda: spec_of(k=("z",)), r"k depends on \['z'\], which are not batch axes"),
    (lambda: spec_of(axes=("b", "i")), "may not be named M, N, i or j"),
    (lambda: AttentionSpec.parse("attention[b, i, j]\n  colour = red"), "line 2 of the spec does not read: 'colour = red'"),
    (lambda: AttentionSpec.parse("attention[b, i, j]"), r"the spec text lacks \['k', 'q', 'v'\]"),
    (lambda: parse("frobnicate(qk)", {}), "cannot read 'frobnicate\\(qk\\)' .* known functions: .*tanh"),
    (lambda: parse("bias[i]", {}), "reads 'bias', which the spec does not declare"),
    (lambda: call("and", QK, TRUE), "and takes conditions, got qk"),
])
def test_contradictions_are_refused(make, text):
    with pytest.raises(SpecError, match=text):
        make()


def test_folds_are_exact():
    i, j = Var("i"), Var("j")
    assert call("add", i, 0) == i and call("mul", i, 1) == i and call("not", call("lt", i, j)) == call("ge", i, j)
    assert str(call("not", call("lt", QK, Const(1.0)))) == "~(qk < 1.0)", "NaN: not (x < 1) is not x >= 1"
    assert str(call("minimum", 2.0, 3.0)) == "minimum(2.0, 3.0)", "no rule, no fold"
    assert call("mul", QK, Const(0.0)) != Const(0.0), "0 * inf is NaN"
    assert conjuncts(call("and", call("and", call("le", i, j), TRUE), call("gt", i, j))) == [call("le", i, j), call("gt", i, j)]


class Text(TestCase):
    def test_a_spec_reads_as_mathematics(self):
        self.assertExpectedInline(str(SPECS[2]), """\
attention[b, h, g, i, j]
  given   pad: bool[2]
  qk    = q[b, h, g, i] . k[b, h, j]
  score = qk * 0.25
  where   (j <= i + (N - M)) & pad[b, j]
  empty   mean, additive
  out   = softmax_j(score) . v[b, h, j]""")


def operands(spec, M=20, N=28, D=16):
    """Operands on which every axis has its own extent."""
    g = torch.Generator().manual_seed(0)
    extents = [{"b": 2, "h": 3, "g": 2}[a] for a in spec.axes]
    shape = lambda kept, rows: [n if p else 1 for n, p in zip(extents, spec.present(kept))] + [rows, D]
    q, k, v = (torch.randn(shape(n, rows), generator=g) for n, rows in (("q", M), ("k", N), ("v", N)))
    known = {"pad": torch.rand(2, N, generator=g) < 0.7, "bias": torch.randn(3, M, N, generator=g), "slope": torch.rand(3, generator=g)}
    return q, k, v, [known[a.name] for a in spec.aux], [*extents, *(7 for _ in spec.sizes)]


@pytest.mark.parametrize("spec", [s for s in SPECS if not s.dropout], ids=str)
def test_flex_attention_agrees_with_the_reference(spec):
    """Two independent readings of one spec; rows without a visible key are left out, FlexAttention has no contract for them."""
    q, k, v, aux, sizes = operands(spec)
    M, N = q.shape[-2], k.shape[-2]
    expected = spec.reference(q, k, v, aux, sizes)
    score_mod, mask_mod = spec.to_flex(aux, sizes)(M, N)
    B = sizes[0] if spec.axes else 1
    H = math.prod(sizes[1: len(spec.axes)])
    flat = lambda t, rows: t.expand(*sizes[: len(spec.axes)], rows, t.shape[-1]).reshape(B, H, rows, t.shape[-1])
    block = create_block_mask(mask_mod, B, H, M, N, device="cpu") if mask_mod else None
    found = flex_attention(flat(q, M), flat(k, N), flat(v, N), score_mod=score_mod, block_mask=block, scale=1.0)
    empty = torch.zeros(B, H, M, dtype=torch.bool)
    if spec.is_masked:
        plain = dataclasses.replace(spec, score=QK, empty_row=EmptyRow.ZERO, empty_over=TRUE)
        seen = reference(plain, q * 0, k, torch.ones_like(v), aux, sizes)
        empty = (seen[..., 0] == 0).reshape(B, H, M)
    difference = (found - expected.reshape(found.shape)).masked_fill(empty[..., None], 0.0)
    assert difference.abs().max() < 1e-5


def test_flex_has_no_dropout():
    with pytest.raises(SpecError, match="FlexAttention has no dropout"):
        SPECS[3].to_flex()


@pytest.mark.parametrize("row, expected", [(EmptyRow.NAN, math.nan), (EmptyRow.ZERO, 0.0), (EmptyRow.MEAN, 2.0), (EmptyRow.MEAN_ADD, 2.0)])
def test_rows_without_a_visible_key(row, expected):
    spec = spec_of(visible="j > i", empty_row=row)
    v = torch.arange(1.0, 4.0).reshape(1, 1, 3, 1).expand(1, 1, 3, 4)
    q = torch.randn(1, 1, 3, 4, requires_grad=True)
    out = reference(spec, q, torch.randn(1, 1, 3, 4), v, sizes=[1, 1])
    last = out[0, 0, 2]
    assert torch.equal(last, torch.full_like(last, expected)) or (math.isnan(expected) and last.isnan().all())
    if row is not EmptyRow.NAN:
        grad, = torch.autograd.grad(last.sum(), q)
        assert bool(grad[0, 0, 2].any()) == (row is EmptyRow.MEAN_ADD)
