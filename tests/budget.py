"""The error budget: at most twice eager's own error against float64, plus a rounding band. No tolerance is chosen by hand."""
from __future__ import annotations

import torch


def largest(t: torch.Tensor) -> float:
    """The largest finite magnitude."""
    return t.double().nan_to_num(0.0, 0.0, 0.0).abs().max().item() if t.numel() else 0.0


def error(t: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest difference. Infinite where NaNs or infinities do not agree."""
    a, b = t.double(), exact.double()
    if not torch.equal(a.isnan(), b.isnan()) or not torch.equal(a.isinf(), b.isinf()) or not torch.equal(a[a.isinf()], b[b.isinf()]):
        return float("inf")
    return largest(torch.where(a == b, 0.0, a - b))


def excess(actual: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, scale: float | None = None,
           perturbed: torch.Tensor | None = None) -> float:
    """By how many rounding bands the error is over twice eager's; at most 1 is within the budget.

    The band is one rounding step of eager's dtype at the largest magnitude of `exact` (or at `scale`, where a small tensor is a sum of
    large terms that cancel). Where a result amplifies rounding more than that, pass `perturbed`: eager's result for inputs that are off by
    one rounding step; how far it moves is added.
    """
    assert actual.shape == eager.shape and actual.dtype == eager.dtype, (actual.shape, eager.shape, actual.dtype, eager.dtype)
    wrong, allowed = error(actual, exact), 2.0 * error(eager, exact)
    if allowed == float("inf"):  # eager overflowed: then so may we
        wrong, allowed = error(actual, eager), 0.0
    if wrong <= allowed:
        return 0.0
    dtype = eager.dtype if eager.dtype.is_floating_point else torch.float32
    band = torch.finfo(dtype).eps * max(largest(exact), scale or 0.0)
    if perturbed is not None:
        band += error(perturbed, eager)
    return (wrong - allowed) / band if band else float("inf")


def assert_within(actual: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, scale: float | None = None,
                  perturbed: torch.Tensor | None = None, what: str = "") -> None:
    over = excess(actual, eager, exact, scale, perturbed)
    assert over <= 1.0, (f"{what or 'the result'} is over the budget by {over:.3g} rounding bands: error {error(actual, exact):.3g}, "
                         f"eager's {error(eager, exact):.3g}")
