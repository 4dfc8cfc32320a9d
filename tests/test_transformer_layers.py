"""`nn.TransformerEncoder`, `nn.TransformerDecoder` and `nn.Transformer` with every way to mask them: each attention fused, and right.

Eval without gradients is the layer that is one op of PyTorch's (`torch._transformer_encoder_layer_fwd`).
"""
from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

import flashfx.backend  # noqa: F401  Dynamo then traces the layers in one graph

from .capture import Counting, capture, compare, rand
from .thinning import thinned

B, M, N, WIDTH, HEADS = 2, 6, 9, 8, 2
OPTIONS = dict(dim_feedforward=12, dropout=0.0)


def triangle(n):
    return nn.Transformer.generate_square_subsequent_mask(n)


def padding(n):
    hidden = torch.zeros(B, n, dtype=torch.bool)
    hidden[1, -2:] = True
    return hidden


def added(hidden):
    return torch.zeros(hidden.shape).masked_fill(hidden, -math.inf)


MASKS = {
    "none": lambda n: {},
    "float": lambda n: {"mask": triangle(n)},
    "bool": lambda n: {"mask": triangle(n) < 0},
    "float, each head its own": lambda n: {"mask": added(torch.rand(B * HEADS, n, n, generator=torch.Generator().manual_seed(0)) < 0.3).tril(-1)},
    "causal hint": lambda n: {"mask": triangle(n), "is_causal": True},
    "no causal hint": lambda n: {"mask": triangle(n), "is_causal": False},
    "padding": lambda n: {"src_key_padding_mask": padding(n)},
    "float and float padding": lambda n: {"mask": triangle(n), "src_key_padding_mask": added(padding(n))},
    "bool and padding": lambda n: {"mask": triangle(n) < 0, "src_key_padding_mask": padding(n)},
    "hint and padding": lambda n: {"mask": triangle(n) < 0, "is_causal": True, "src_key_padding_mask": padding(n)},
}
MODES = ("training", "eval", "eval without gradients")


def called(module, mode: str, *args, **masks):
    """Regions and comparison of `module(*args, **masks)`, its parameters among the arguments."""
    module.train(mode == "training")
    names = [n for n, _ in module.named_parameters()]

    def fn(params, args, masks):
        with torch.set_grad_enabled(mode != "eval without gradients"):
            return torch.func.functional_call(module, dict(zip(names, params)), args, masks)

    return compare(fn, [p.detach().clone().requires_grad_() for p in module.parameters()], args, masks)


def tokens(n, batch_first=True, seed=0):
    x = rand(B, n, WIDTH, seed=seed)
    return x if batch_first else x.detach().transpose(0, 1).requires_grad_()


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("masks, mode, batch_first, norm_first", thinned(((masks, *how) for masks, how in itertools.product(MASKS, [
    ("training", True, False), ("training", False, True), ("eval", True, True), ("eval without gradients", True, False), ("eval without gradients", True, True)])), 7))
def test_encoder(masks, mode, batch_first, norm_first):
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, batch_first=batch_first, norm_first=norm_first, **OPTIONS)
    model = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)
    regions = called(model, mode, tokens(N, batch_first), **MASKS[masks](N))
    assert [str(r.refusal) for r in regions if not r.fused] == [] and len(regions) == 2


@pytest.mark.parametrize("masks", ("none", "float", "bool and padding"))
@pytest.mark.parametrize("activation", ("gelu", "relu"))
def test_layer_that_is_one_op(masks, activation):
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, activation=activation, batch_first=True, **OPTIONS)
    masks = MASKS[masks](N)
    if "mask" in masks:
        masks["src_mask"] = masks.pop("mask")
    assert [r.fused for r in called(layer, "eval without gradients", tokens(N), **masks)] == [True]


def test_rows_that_see_nothing_are_nan_in_the_op():
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, batch_first=True, **OPTIONS)
    hidden = torch.zeros(B, N, dtype=torch.bool)
    hidden[1] = True
    regions = called(layer, "eval without gradients", tokens(N), src_key_padding_mask=hidden)
    assert [r.fused for r in regions] == [True] and "empty   nan" in str(regions[0].spec)


@pytest.mark.parametrize("masks, mode, batch_first, norm_first", thinned((
    (masks, mode, both, both) for masks, mode, both in itertools.product(("float", "causal hint", "bool and padding"), MODES, (True, False))), 5))
def test_decoder(masks, mode, batch_first, norm_first):
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS, batch_first=batch_first, norm_first=norm_first, **OPTIONS)
    given = {{"mask": "tgt_mask", "is_causal": "tgt_is_causal"}.get(k, "tgt_key_padding_mask"): m for k, m in MASKS[masks](M).items()}
    if "padding" in masks:
        given["memory_key_padding_mask"] = padding(N)
    regions = called(nn.TransformerDecoder(layer, 1), mode, tokens(M, batch_first), tokens(N, batch_first, seed=1), **given)
    assert [str(r.refusal) for r in regions if not r.fused] == [] and len(regions) == 2


@pytest.mark.parametrize("mode, batch_first, masked", thinned(((mode, *rest) for n, mode in enumerate(MODES) for rest in ((n % 2 == 0, False), (n % 2 == 1, True))), 5))
def test_transformer(mode, batch_first, masked):
    model = nn.Transformer(WIDTH, HEADS, 1, 1, batch_first=batch_first, **OPTIONS)
    masks = dict(src_mask=triangle(N), tgt_mask=triangle(M) < 0, memory_mask=torch.ones(M, N).triu(4) > 0, src_key_padding_mask=added(padding(N)),
                 tgt_key_padding_mask=padding(M), memory_key_padding_mask=padding(N)) if masked else {}
    if mode == "eval without gradients":
        model.encoder.enable_nested_tensor = model.encoder.use_nested_tensor = False
    regions = called(model, mode, tokens(N, batch_first), tokens(M, batch_first, seed=1), **masks)
    assert [str(r.refusal) for r in regions if not r.fused] == [] and len(regions) == 3


@pytest.mark.parametrize("masked", (False, True))
def test_dropout_in_training(masked):
    model = nn.Transformer(WIDTH, HEADS, 2, 1, 12, dropout=0.1, batch_first=True)
    masks = dict(src_mask=triangle(N), tgt_mask=triangle(M)) if masked else {}
    regions = capture(lambda x, y: model(x, y, **masks), tokens(N), tokens(M))
    assert [r.fused and r.spec.dropout == 0.1 for r in regions] == [True] * 4


def test_a_mask_that_is_trained_keeps_its_gradient():
    """Where it is exactly causal PyTorch does not read it, and gives it none."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, batch_first=True, **OPTIONS), 1, enable_nested_tensor=False)
    for mask in (triangle(N), triangle(N) + torch.eye(N)):
        called(model, "eval", tokens(N), mask=mask.detach().requires_grad_())


def test_one_graph_for_a_masked_encoder():
    torch._dynamo.reset()
    model, backend = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, batch_first=True, **OPTIONS), 2), Counting()
    torch.compile(model, backend=backend, fullgraph=True)(tokens(N), mask=triangle(N))
    assert len(backend.regions) == 2
