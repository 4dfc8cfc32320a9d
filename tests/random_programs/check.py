"""check: compile a program with the rewrite, and compare outputs, changed inputs and gradients with eager."""
from __future__ import annotations

from dataclasses import dataclass

import torch

from flashfx.errors import VerifyError
from flashfx.region import Region

from ..budget import excess, largest
from ..capture import run
from ..zoo.measure import InDouble
from .writer import Program


class Wrong(AssertionError):
    """The compiled program does not compute what eager computes, or compiling it failed."""


@dataclass
class Outcome:
    """regions, and whether every product below a softmax came from our op."""

    regions: list[Region]

    @property
    def fused(self) -> bool:
        return bool(self.regions) and all(r.fused for r in self.regions)

    @property
    def why(self) -> str:
        return "; ".join(r.refusal.reason for r in self.regions if r.refusal is not None) or "no site was found"


class _Backend:
    def __init__(self, inner: str):
        self.inner, self.regions = inner, []

    def __call__(self, gm, example_inputs):
        from flashfx.backend import compile_rewritten
        from flashfx.options import Options
        run, regions = compile_rewritten(gm, example_inputs, Options(inner=self.inner, verify=True), {})
        self.regions += regions
        return run


def check(program: Program, inner: str = "eager") -> Outcome:
    """Raises Wrong, whose text shows the program."""
    torch._dynamo.reset()
    fn, args = program.function(), tuple(program.inputs.values())
    try:
        eager = run(fn, args)
    except Exception as error:
        raise ValueError(f"no program: {error}\n{program}") from error
    backend = _Backend(inner)
    try:
        compiled = run(torch.compile(fn, backend=backend, dynamic=program.dynamic), args)
    except VerifyError as error:
        raise Wrong(f"{error}\n{program}") from error
    except Exception as error:
        raise Wrong(f"compiling failed: {type(error).__name__}: {error}\n{program}") from error
    for r in backend.regions:
        if r.refusal is not None and "internal error" in r.refusal.reason:
            raise Wrong(f"{r.refusal}\n{program}")
    exact = _exactly(fn, args)
    wanted = [n for n, t in program.inputs.items() if t.requires_grad]
    results = len(eager) - len(args) - (len(wanted) if len(eager) > len(args) + 1 else 0)
    # eager's rows without any visible key are NaN and make every gradient of k and v NaN; ours pass none on
    poisoned = any(t is not None and t.is_floating_point() and t.isnan().any() for t in eager[: max(results, 1)])
    scale = max([largest(t) for t in exact if t is not None and t.is_floating_point()], default=0.0)
    for n, (a, b, c) in enumerate(zip(compiled, eager, exact, strict=True)):
        if n >= results + len(args) and poisoned:
            break
        if a is None or b is None:
            if (a is not None and a.any()) or (b is not None and b.any()):
                raise Wrong(f"only one of both has gradient {n}\n{_shown(backend, program)}")
        elif not b.is_floating_point():
            if not torch.equal(a, b):
                raise Wrong(f"result {n} differs\n{_shown(backend, program)}")
        elif b.numel() and excess(a, b, c, scale) > 1.0 and (over := _over(n, compiled, eager, exact, scale, fn, args)) > _bands(b, eager):
            raise Wrong(f"result {n} of {len(eager)} ({results} outputs) is over the budget by {over:.3g} rounding bands\n{_shown(backend, program)}")
    return Outcome(backend.regions)


def _over(n: int, compiled, eager, exact, scale: float, fn, args) -> float:
    """The excess of result n over the budget, beside eager for inputs that are off by rounding."""
    moved = [run(fn, args, perturb=seed)[n] for seed in (1, 2, 3)]
    return min(excess(compiled[n], e, exact[n], scale, d) for d in moved for e in (eager[n], d))


def _bands(t: torch.Tensor, results: list[torch.Tensor | None]) -> float:
    """Rounding errors of n terms that are summed up grow as their root; float64 has no more exact run to compare with."""
    terms = max(r.numel() * max(r.shape, default=1) for r in results if r is not None) / t.numel()  # each sums over rows or keys too
    return max(terms, 1.0) ** 0.5 * (16.0 if t.dtype == torch.float64 else 1.0)


def _exactly(fn, args) -> list[torch.Tensor | None]:
    """The float64 run, of the constants and casts to float32 in the text too."""
    torch.set_default_dtype(torch.float64)
    try:
        with InDouble():
            return run(fn, args, double=True)
    finally:
        torch.set_default_dtype(torch.float32)


def _shown(backend: _Backend, program: Program) -> str:
    return "\n".join([str(program), *(str(r.spec or r.refusal) for r in backend.regions)])
