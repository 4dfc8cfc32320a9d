"""Positions in a dtype that does not tell them all apart: a mask of them is lifted where it is the mask that the model computes, else it is read."""
from __future__ import annotations

import math

import pytest
import torch

from .capture import capture, compare, rand

POSITIONS = {
    "made": lambda n, dtype: torch.arange(n, dtype=dtype),
    "cast": lambda n, dtype: torch.arange(n).to(dtype),
    "scaled": lambda n, dtype: torch.arange(0, 2 * n, 2).to(dtype) / 2,
}
MASKS = {
    "compared": lambda i, j: i[:, None] >= j,
    "difference": lambda i, j: i[:, None] - j >= 0,
    "other places": lambda i, j: (i[:, None] - j).bool(),
    "window": lambda i, j: (i[:, None] - j).abs() < 100,
}


def attention(position, mask, dtype):
    def fn(q, k, v):
        n = q.shape[-2]
        hidden = ~MASKS[mask](POSITIONS[position](n, dtype), POSITIONS[position](n, dtype))
        return (q @ k.mT).masked_fill(hidden, -math.inf).softmax(-1) @ v
    return fn


def operands(n, dtype=torch.float32):
    return [rand(1, n, 4, seed=s, dtype=dtype) for s in (1, 2, 3)]


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype, n, told_apart", [(torch.bfloat16, 256, True), (torch.bfloat16, 280, False), (torch.float32, 280, True)])
def test_a_mask_of_positions(position, mask, dtype, n, told_apart):
    """q, k and v in float32, where one key more or less shows."""
    region, = compare(attention(position, mask, dtype), *operands(n))
    if position != "scaled":
        assert told_apart == (not region.spec.aux), region.spec


@pytest.mark.parametrize("n, told_apart", [(2048, True), (2060, False)])
def test_a_mask_of_positions_in_float16(n, told_apart):
    region, = capture(attention("cast", "compared", torch.float16), *operands(n))
    assert told_apart == (not region.spec.aux), region.spec


def test_a_product_of_positions_that_float32_rounds():
    """Beyond 2 ** 24 it is even, and a row sees its own key where that makes up for the 1."""
    def fn(q, k, v):
        place = (torch.arange(q.shape[-2]) * 100_000).float()
        return (q @ k.mT).masked_fill(place[:, None] + 1 <= place, -math.inf).softmax(-1) @ v
    compare(fn, *operands(300))


WRAPPING = {
    "int8": lambda n: torch.arange(n).to(torch.int8),
    "uint8": lambda n: torch.arange(n).to(torch.uint8) + 1,
    "int16": lambda n: torch.arange(n, dtype=torch.int16) * 200,
    "int32": lambda n: torch.arange(n, dtype=torch.int32) * 20_000_000,
    "int64": lambda n: torch.arange(n) * 20_000_000,
}


@pytest.mark.parametrize("place", WRAPPING)
def test_integers_that_wrap(place):
    def fn(q, k, v):
        at = WRAPPING[place](q.shape[-2])
        return (q @ k.mT).masked_fill(at[:, None] < at, -math.inf).softmax(-1) @ v
    region, = compare(fn, *operands(300))
    assert {a.kind for a in region.spec.aux} == {"int"} or place == "int64", region.spec  # which wraps in kernels alone; a formula is found for it
    region, = compare(fn, *operands(60))
    assert not region.spec.aux, region.spec


def test_a_rounded_integer_beside_a_constant():
    """However it is rounded it is on the same side of a constant that the dtype has: the integers are read, not the comparison."""
    def fn(q, k, v, pad):
        return (q @ k.mT).masked_fill((pad.to(torch.bfloat16) > 0)[:, None, :], -math.inf).softmax(-1) @ v
    region, = compare(fn, *operands(40), (torch.arange(40) % 3 * 1001)[None])
    assert [a.kind for a in region.spec.aux] == ["int"], region.spec


def test_numbers_of_regions_beside_each_other():
    """Swin's mask of shifted windows, in the model's dtype: small whole numbers, so that what it says of two places is a condition on positions."""
    def fn(q, k, v):
        h = torch.arange(8)
        row = (h >= 4).long() + (h >= 6).long()
        region = (row[:, None] * 3 + row).to(q.dtype).view(2, 4, 2, 4).permute(0, 2, 1, 3).reshape(4, 16)
        mask = region[:, None, :] - region[:, :, None]
        mask = mask.masked_fill(mask != 0, -100.0).masked_fill(mask == 0, 0.0)
        return (q @ k.mT + mask[None, :, None]).softmax(-1) @ v
    region, = compare(fn, *(rand(2, 4, 3, 16, 8, seed=s, dtype=torch.bfloat16) for s in (1, 2, 3)))
    assert not region.spec.aux and str(region.spec.score).endswith("== 0.0, 0.0, -100.0)"), region.spec


@pytest.mark.parametrize("constant", [-1e9, 1e7, 3.0])
def test_a_number_that_is_added_to_all_scores(constant):
    """Softmax does not see it, unless it is so large that little or nothing is left of the scores."""
    region, = compare(lambda q, k, v: (q @ k.mT + constant).softmax(-1) @ v, *operands(20), exact_fn=lambda q, k, v: (
        (q @ k.mT).float() + constant).double().softmax(-1) @ v)
    assert (str(region.spec.score) == "qk") == (constant == 3.0)


@pytest.mark.parametrize("shift, fused", [(-3.0, True), (-1000.0, False)])
def test_a_number_that_makes_the_constant_of_a_mask_infinite(shift, fused):
    """float16 ends at -65504: a row that is hidden entirely is then not a number."""
    def fn(q, k, v, keep):
        hidden = torch.where(keep, 0.0, torch.finfo(torch.float16).min).to(torch.float16)
        return (q @ k.mT + shift + hidden[:, None]).softmax(-1) @ v
    q, k, v = (rand(2, 10, 8, seed=s, dtype=torch.float16) for s in (1, 2, 3))
    region, = compare(fn, q, k, v, torch.arange(10) + torch.tensor([[0], [-20]]) > 3)
    assert region.fused == fused, region.refusal
