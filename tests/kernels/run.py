"""Run one spec through launch, in float64 and in plain eager PyTorch of the same dtype, and hold the errors against the budget."""
from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from flashfx.codegen import launch, plan
from flashfx.codegen.blocks import lists_for, tiles_for
from flashfx.codegen.derivative import partial
from flashfx.codegen.layout import output_strides
from flashfx.codegen.schedules import documents
from flashfx.codegen.selfcheck import inputs, kept
from flashfx.codegen.torch_tiled import MEAN_ROW
from flashfx.expr import QK
from flashfx.reference import evaluate, index_grid, log_sum_exp, reference
from flashfx.region import Problem
from flashfx.spec import AttentionSpec
from tests.budget import assert_within


@dataclass
class Run:
    """Results by name ("out", "q", "k", "v", captured tensors)."""

    actual: dict[str, torch.Tensor] = field(default_factory=dict)
    eager: dict[str, torch.Tensor] = field(default_factory=dict)
    exact: dict[str, torch.Tensor] = field(default_factory=dict)
    scale: dict[str, float] = field(default_factory=dict)
    perturbed: dict[str, torch.Tensor] = field(default_factory=dict)

    def within_budget(self) -> None:
        for name in self.actual:
            assert_within(self.actual[name], self.eager[name], self.exact[name], self.scale.get(name), self.perturbed.get(name), name)


def cancelling(spec: AttentionSpec, q, k, v, aux, sizes, grad_out, lse) -> dict[str, float]:
    """Size of the terms that cancel. In dS = P * (dP - delta): dP times what multiplies dS. In P = exp(S - lse), which dV sees: lse."""
    exact = q.dtype == torch.float32
    q, k, v, grad_out = (t.double() for t in (q, k, v, grad_out))
    M, N = q.shape[-2], k.shape[-2]
    dot = q @ k.mT
    env, tensors = index_grid(spec, sizes, M, N, q.device), {a.name: t for a, t in zip(spec.aux, aux)}
    size = lambda t: t.abs().max().item() if t.numel() else 0.0
    slope = lambda wrt: size(evaluate(partial(spec.score, wrt), env, tensors, dot, torch.float64).nan_to_num(0.0))
    real = lse[lse.isfinite() & (lse < MEAN_ROW)].double()
    digits = max(1.0, size(real)) if exact else 1.0  # a float32 of that size stands for the row's sum
    dp = size(grad_out @ v.mT) * digits
    scales = {"q": dp * size(k) * slope(QK), "k": dp * size(q) * slope(QK), "v": 0.0}
    if exact:  # a key's weights are rounded row by row: a random walk of at most sqrt(their sum), which is the gradient of sum(out)
        v = v.clone().requires_grad_()
        out = reference(replace(spec, dropout=0.0), q, k, v, aux, sizes, None, torch.float64)
        weight = size(torch.autograd.grad(torch.where(out.isnan(), 0.0, out).sum(), v)[0].nan_to_num(0.0))
        scales["v"] = size(grad_out) * digits * max(1.0, weight) ** 0.5
    for load in spec.score.loads:  # weights of a row sum to one: one such term per row, and the rounding of rows adds up as a random walk
        rows_summed = lse.numel() / max(1, tensors[load.name].numel())
        scales[load.name] = max(scales.get(load.name, 0.0), dp * slope(load) * max(1.0, rows_summed) ** 0.5)
    return scales


def rising(operands, most: float):
    """Operands whose later keys are longer, up to `most` times: a row's maximum grows tile by tile, now a little, now by many powers of two."""
    q, k, *rest = operands
    return q, k * torch.linspace(0.25, most, k.shape[-2], device=k.device)[:, None].to(k.dtype), *rest


def in_runs(spec: AttentionSpec, operands, mean: int = 150, seed: int = 0):
    """Operands whose ids, which a mask compares, come in runs of so many rows or keys on average, some of one, and come back later."""
    q, k, v, aux, dropout_seed, sizes = operands
    g = torch.Generator().manual_seed(seed)
    names = {load.name for _, *sides in documents.pairs(spec.mask()) for e in sides for load in e.loads}
    ids = lambda t: ((torch.rand(t.shape, generator=g) < 1 / mean).cumsum(-1) * 7 % 11).to(t)
    return q, k, v, [ids(t) if a.name in names else t for a, t in zip(spec.aux, aux)], dropout_seed, sizes


def summary(spec: AttentionSpec, aux, sizes, q, k):
    """The mask's run-time summary as the rewritten graph gives it to the pinned schedule."""
    if plan.OVERRIDE.get("schedule") != "hopper" or not documents.takes(spec):
        return lists_for(spec, aux, sizes, q, k)
    return tiles_for(spec, aux, sizes, q, k)


def run(spec: AttentionSpec, problem: Problem, device: str = "cpu", seed: int = 0, operands=None, gradients: bool = True,
        listed: bool = False) -> Run:
    """Forward and every gradient; `listed`: with the mask's run-time summary, as the rewritten graph gives it. How many axes lie outside of
    the output's rows goes by the length. Rows that are NaN in the exact output are left out of the loss."""
    q, k, v, aux, dropout_seed, sizes = operands or inputs(spec, problem, device, seed)
    keep = kept(spec, problem, dropout_seed, device)
    names = ("q", "k", "v", *(a.name for a in spec.aux))
    result = Run()

    def compute(dtype):
        """(out, gradients) of the reference in `dtype`."""
        leaves = [t.detach().to(dtype or t.dtype).requires_grad_() if t.is_floating_point() else t for t in (q, k, v, *aux)]
        out = reference(spec, *leaves[:3], leaves[3:], sizes, keep, dtype or torch.promote_types(q.dtype, v.dtype))
        if not gradients:
            return out.detach(), {}
        wanted = {n: t for n, t in zip(names, leaves) if t.requires_grad}
        loss = (torch.where(out.isnan(), 0.0, out) * grad_out.to(out.dtype)).sum()
        found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
        return out.detach(), {n: torch.zeros_like(t) if g is None else g for (n, t), g in zip(wanted.items(), found)}

    shape = (*problem.extents, problem.M, problem.Dv)
    grad_out = torch.randn(shape, generator=torch.Generator().manual_seed(seed + 7)).to(device, v.dtype)
    out, exact = compute(torch.float64)
    eager_out, eager = compute(None)
    if q.dtype == torch.float32:  # a score of 50 has steps of 4e-6, by which its weight is off
        nudged = q * (1 + torch.finfo(q.dtype).eps)
        result.perturbed["out"] = reference(spec, nudged, k, v, aux, sizes, keep, torch.promote_types(q.dtype, v.dtype)).to(v.dtype)
    lists = summary(spec, aux, sizes, q, k) if listed else None
    outer = problem.M % (1 + len(problem.extents))
    result.actual["out"], lse = launch.forward(spec, q, k, v, aux, dropout_seed, sizes, lists, outer)
    result.exact["out"], result.eager["out"] = out, eager_out.to(v.dtype)
    assert result.actual["out"].stride() == output_strides(problem.extents, problem.M, problem.Dv, outer)
    assert lse.shape == shape[:-1] and lse.is_contiguous()
    if gradients:
        result.scale = cancelling(spec, q, k, v, aux, sizes, grad_out, lse)
        needs = [t.is_floating_point() for t in (q, k, v, *aux)]
        found = launch.backward(spec, grad_out, q, k, v, aux, dropout_seed, result.actual["out"], lse, sizes, needs, None, lists)
        for name, t, need, g in zip(names, (q, k, v, *aux), needs, found):
            if not need:
                assert g.numel() == 0 and g.dtype == t.dtype
                continue
            assert g.shape == t.shape and g.dtype == t.dtype and g.is_contiguous(), name
            if exact[name].isnan().any():  # softmax of a row without keys: eager spreads its NaN, we pass nothing on
                assert not g.isnan().any()
                continue
            result.actual[name], result.eager[name], result.exact[name] = g, eager[name].to(g.dtype), exact[name]
    return result


def lse_gradient(spec: AttentionSpec, problem: Problem, device: str = "cpu") -> Run:
    """Backward where the log-sum-exp is read too: a gradient reaches both results of forward."""
    q, k, v, aux, seed, sizes = inputs(spec, problem, device)
    g = torch.Generator().manual_seed(3)
    grad_out = torch.randn((*problem.extents, problem.M, problem.Dv), generator=g).to(device, v.dtype)
    grad_lse = torch.randn((*problem.extents, problem.M), generator=g).to(device)
    out, lse = launch.forward(spec, q, k, v, aux, seed, sizes)
    needs = [True] * 3 + [False] * len(aux)
    result = Run(scale=cancelling(spec, q, k, v, aux, sizes, grad_out, lse))
    found = launch.backward(spec, grad_out, q, k, v, aux, seed, out, lse, sizes, needs, grad_lse.to(lse.dtype))
    result.actual = dict(zip("qkv", found))

    def compute(dtype):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
        loss = (reference(spec, *leaves, aux, sizes, None, dtype) * grad_out.to(dtype)).sum()
        loss = loss + (log_sum_exp(spec, *leaves[:2], aux, sizes, dtype) * grad_lse.to(dtype)).sum()
        return dict(zip("qkv", torch.autograd.grad(loss, leaves)))

    result.exact, result.eager = compute(torch.float64), compute(q.dtype)
    return result
