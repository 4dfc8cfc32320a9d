"""What a generated file does when it is run: rebuild inputs of its shapes, compare with the reference, time on a GPU."""
from __future__ import annotations

import math
from dataclasses import replace
from types import ModuleType

import torch

from ..expr import BOOL, FLOAT
from .. import compat
from ..reference import evaluate, index_grid, reference
from ..region import Problem
from ..spec import AttentionSpec
from .philox import keep_mask, kept_scale


def captured_tensors(spec: AttentionSpec, problem: Problem, dtype=torch.float32, device="cpu", generator=None) -> list[torch.Tensor]:
    """Random captured tensors just large enough for every position that the spec reads.

    Integers are in [0, N], so that they can serve as lengths; sorted along the last dimension, so that they can serve as document ids.
    """
    sizes = (*problem.extents, *problem.sizes)
    found: dict[str, torch.Tensor] = {}
    for _ in spec.aux:  # a position may itself be read from a captured tensor: repeat until all are known
        for a in spec.aux:
            reads = [load for load in spec.loads if load.name == a.name]
            if a.name in found or any(x.name not in found for load in reads for index in load.index for x in index.loads):
                continue
            shape = [1] * a.rank
            env = index_grid(spec, sizes, problem.M, problem.N, "cpu")
            for load in reads:
                for d, index in enumerate(load.index):
                    positions = evaluate(index, env, found, None, torch.float64)
                    shape[d] = max(shape[d], int(positions.max()) + 1 if positions.numel() else 1)
            if a.kind == FLOAT:
                found[a.name] = torch.randn(shape, generator=generator, dtype=dtype, device=None if generator else device)
            elif a.kind == BOOL:
                found[a.name] = torch.rand(shape, generator=generator) < 0.8
            else:
                found[a.name] = torch.randint(0, problem.N + 1, shape, generator=generator).sort(-1).values if shape else \
                    torch.randint(0, problem.N + 1, (), generator=generator)
    return [found[a.name].to(device) for a in spec.aux]


def inputs(spec: AttentionSpec, problem: Problem, device="cpu", seed: int = 0):
    """Random (q, k, v, aux, seed tensor, sizes) of the problem's shapes."""
    generator = torch.Generator().manual_seed(seed)
    extents = dict(zip(spec.axes, problem.extents))

    def operand(name: str, rows: int, head: int, dtype: str) -> torch.Tensor:
        shape = [*(e if a in getattr(spec, name) else 1 for a, e in extents.items()), rows, head]
        return torch.randn(shape, generator=generator).to(getattr(torch, dtype)).to(device)

    q, k = operand("q", problem.M, problem.D, problem.dtype), operand("k", problem.N, problem.D, problem.dtype)
    v = operand("v", problem.N, problem.Dv, problem.v_dtype)
    aux = captured_tensors(spec, problem, getattr(torch, problem.dtype), device, generator)
    return q, k, v, aux, torch.tensor([seed + 1], dtype=torch.int64, device=device), [*problem.extents, *problem.sizes]


def kept(spec: AttentionSpec, problem: Problem, seed: torch.Tensor, device="cpu") -> torch.Tensor | None:
    """What dropout multiplies each weight by (*extents, M, N): 0, or one over the share that is kept; None without dropout."""
    if not spec.dropout:
        return None
    z = torch.arange(math.prod(problem.extents), device=device).reshape(*problem.extents, 1, 1)
    i, j = torch.arange(problem.M, device=device), torch.arange(problem.N, device=device)
    return keep_mask(int(seed), z, i[:, None], j[None, :], spec.dropout).double() * kept_scale(spec.dropout)


def relative(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Norm of the difference over the norm of the exact value, where that is finite."""
    exact = exact.double()
    finite = exact.isfinite()
    difference = torch.where(finite, actual.double() - exact, 0.0).norm()
    return float(difference / torch.where(finite, exact, 0.0).norm().clamp(min=1e-30))


ON_CPU = 2 ** 22
"""Scores up to which a check on a CPU runs whole; larger ones drop batch indices, to end in seconds."""


def fewer(problem: Problem) -> Problem:
    """The same problem with batch extents cut until a CPU is done in seconds."""
    extents = list(problem.extents)
    while math.prod(extents) * problem.M * problem.N > ON_CPU and max(extents, default=1) > 1:
        extents[extents.index(max(extents))] = max(extents) // 2
    return replace(problem, extents=tuple(extents))


def check(module: ModuleType, device: str | None = None) -> dict[str, float]:
    """Compare a generated module with the float64 reference; prints relative errors and, on a GPU, times. Raises on a large error."""
    from . import launch
    spec, problem = module.SPEC, module.PROBLEM
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cpu" and (problem := fewer(problem)) != module.PROBLEM:
        print(f"on the CPU: extents {list(problem.extents)} instead of {list(module.PROBLEM.extents)}")
    q, k, v, aux, seed, sizes = inputs(spec, problem, device)
    on_gpu = launch.uses_triton(q, k, v) and (device != "cpu" or not hasattr(module, "gluon"))  # the interpreter does not run Gluon
    if on_gpu:
        if compat.interpreting():
            compat.repair_interpreter()
        run_forward, run_backward = module.forward, getattr(module, "backward", None)
    else:
        print("no GPU, and Triton's interpreter is off (TRITON_INTERPRET=1): checking the tiled PyTorch schedule instead")
        run_forward = lambda *a: launch.forward(spec, *a)
        run_backward = (lambda *a: launch.backward(spec, *a, needs=module.NEEDS)) if any(module.NEEDS) else None
    operands = [t.double().requires_grad_() if t.is_floating_point() else t for t in (q, k, v, *aux)]
    exact = reference(spec, *operands[:3], operands[3:], sizes, kept(spec, problem, seed, device))
    out, lse = run_forward(q, k, v, aux, seed, sizes)
    errors = {"out": relative(out, exact.detach())}
    if run_backward is not None:
        grad = torch.randn(exact.shape, generator=torch.Generator().manual_seed(2)).to(device, v.dtype)
        wanted = [t for t, need in zip(operands, module.NEEDS) if need]
        names = [name for name, need in zip(("q", "k", "v", *(a.name for a in spec.aux)), module.NEEDS) if need]
        loss = (torch.where(exact.isfinite(), exact, 0.0) * grad.double()).sum()
        expected = torch.autograd.grad(loss, wanted, allow_unused=True)
        found = [g for g, need in zip(run_backward(grad, q, k, v, aux, seed, out, lse, sizes), module.NEEDS) if need]
        errors |= {f"d{n}": relative(g, e) for n, g, e in zip(names, found, expected) if e is not None and e.isfinite().all()}
    print("relative errors: " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items()))
    if device == "cuda":
        from triton.testing import do_bench
        print(f"forward {do_bench(lambda: run_forward(q, k, v, aux, seed, sizes)):.3f} ms a call, the host's part included")
        if run_backward is not None:
            print(f"backward {do_bench(lambda: run_backward(grad, q, k, v, aux, seed, out, lse, sizes)):.3f} ms a call, the host's part included")
    limit = 1e-4 if problem.dtype == problem.v_dtype == "float32" and "tf32" not in str(getattr(module, "__doc__", "")) else 2e-2
    if not all(error <= limit for error in errors.values()):
        raise AssertionError(f"errors above {limit}: {errors}")
    return errors
