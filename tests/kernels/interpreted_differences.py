"""The gradient of `flashfx::gather_by_difference` by its kernel, in Triton's interpreter (`test_interpreter.py`) or on a GPU (`tests/test_on_gpu.py`)."""
from __future__ import annotations

import itertools

import pytest
import torch

from flashfx import op  # noqa: F401  (registers the ops)

from ..thinning import thinned

SHAPES = ((5, 7, 4), (7, 5, 9), (1, 6, 3), (6, 1, 3), (8, 8, 16), (1, 8, 3), (130, 100, 70), (100, 200, 300), (64, 64, 64))


def scattered(width: int, count: int) -> torch.Tensor:
    return torch.randint(0, width, (count,))


def rising(width: int, count: int) -> torch.Tensor:
    return (torch.arange(count) - count // 2 + width // 2).clamp(0, width - 1)


def falling(width: int, count: int) -> torch.Tensor:
    return rising(width, count).flip(0)


def check(rows: int, columns: int, width: int, positions, dtype: torch.dtype, device: str = "cpu") -> None:
    torch.manual_seed(rows)
    at = positions(width, rows + columns - 1).to(device)
    source = torch.randn(2, 3, rows, width, dtype=dtype, device=device, requires_grad=True)
    grad = torch.randn(2, 3, columns, rows, dtype=dtype, device=device).mT  # as DeBERTa's position-to-content term has it
    exact = source.detach().double().requires_grad_()
    picks = at[torch.arange(columns, device=device) - torch.arange(rows, device=device)[:, None] + rows - 1]
    wanted = exact.gather(-1, picks.expand(2, 3, rows, columns))
    out = torch.ops.flashfx.gather_by_difference(source, at, columns)
    assert torch.equal(out.double(), wanted)
    found, = torch.autograd.grad(out, source, grad)
    added, = torch.autograd.grad(wanted, exact, grad.double().abs(), retain_graph=True)
    wanted, = torch.autograd.grad(wanted, exact, grad.double())
    sums = torch.promote_types(dtype, torch.float32)  # rounded once
    assert ((found.double() - wanted).abs() <= torch.finfo(dtype).eps * wanted.abs() + 32 * torch.finfo(sums).eps * added).all()


@pytest.mark.parametrize("shape, positions, dtype", thinned(itertools.product(SHAPES, (scattered, rising, falling), (torch.float32, torch.float16, torch.bfloat16)), 4))
def test_gradient(shape, positions, dtype):
    check(*shape, positions, dtype)
