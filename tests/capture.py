"""Compile a function with the rewrite alone (no Inductor), and compare it with eager: results, changed arguments, gradients."""
from __future__ import annotations

import torch

from flashfx import op  # noqa: F401  registers flashfx::attention
from flashfx.passes.pipeline import rewrite
from flashfx.region import Region

from .budget import assert_within, largest


def rand(*shape, grad: bool = True, dtype=torch.float32, seed: int | None = None) -> torch.Tensor:
    g = torch.Generator().manual_seed(sum(shape) * 31 + len(shape) if seed is None else seed)
    return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_(grad)


def keep(*shape, p: float = 0.7) -> torch.Tensor:
    """A random condition; every row of keys keeps its first."""
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(sum(shape))) < p
    mask[..., 0] = True
    return mask


def capture(fn, *args, dynamic: bool | None = False, grad: bool | None = None) -> list[Region]:
    """The Regions of `fn` compiled for `args`. The rewritten graph is not run."""
    torch._dynamo.reset()
    regions: list[Region] = []

    def backend(gm, example_inputs):
        regions.extend(rewrite(gm))
        return lambda *inputs: [n.meta["example_value"] if isinstance(n, torch.fx.Node) else n for n in gm.graph.output_node().args[0]]

    try:
        torch.compile(fn, backend=backend, dynamic=dynamic)(*args)
    except Exception:  # code after a graph break meets fake results
        if not regions:
            raise
    return regions


class Counting:
    """A backend: rewrites, runs the graph as it stands, keeps the regions."""

    def __init__(self):
        self.regions: list[Region] = []

    def __call__(self, gm, example_inputs):
        self.regions += rewrite(gm)
        return gm.forward


def tensors(tree) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def run(fn, args, double: bool = False, perturb: int = 0) -> list[torch.Tensor | None]:
    """Results, arguments as they are afterwards, and gradients of every argument that requires one.

    `perturb`, a seed, moves every float argument by at most one rounding step.
    """
    def fresh(t):
        new = t.detach().clone(memory_format=torch.preserve_format)
        if perturb and t.is_floating_point():
            new *= 1 + torch.finfo(t.dtype).eps * torch.randint(-1, 2, t.shape, generator=torch.Generator().manual_seed(t.numel() * perturb))
        return (new.double() if double and t.is_floating_point() else new).requires_grad_(t.requires_grad)

    args = torch.utils._pytree.tree_map_only(torch.Tensor, fresh, args)
    torch.manual_seed(0)
    results = tensors(fn(*args))
    found: list[torch.Tensor | None] = [t.detach() for t in (*results, *tensors(args))]
    wanted = [a for a in tensors(args) if a.requires_grad]
    outputs = [t for t in results if t.requires_grad]
    if outputs and wanted:
        seeds = [torch.randn(t.shape, generator=torch.Generator().manual_seed(n), dtype=torch.float64).to(t.dtype) for n, t in enumerate(outputs)]
        found += torch.autograd.grad(outputs, wanted, seeds, allow_unused=True)
    return found


def compare(fn, *args, exactly: bool = False, dynamic: bool | None = False, exact_fn=None, backend=None) -> list[Region]:
    """Assert that compiled and eager agree: bit for bit if `exactly`, else within the budget. Returns the Regions."""
    torch._dynamo.reset()
    backend = backend or Counting()
    compiled = run(torch.compile(fn, backend=backend, dynamic=dynamic), args)
    eager = run(fn, args)
    exact = eager if exactly else run(exact_fn or fn, args, double=True)
    assert len(compiled) == len(eager)
    perturbed = eager if exactly else run(fn, args, perturb=1)
    scale = max([largest(t) for t in exact if t is not None and t.is_floating_point()], default=0.0)
    for n, (a, b, c, d) in enumerate(zip(compiled, eager, exact, perturbed)):
        if a is None or b is None:  # an unused argument: no gradient, or one of zeros
            assert (a is None or not a.any()) and (b is None or not b.any()), f"only one of both has gradient {n}"
        elif exactly or not b.is_floating_point():
            assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) if b.is_floating_point() else torch.equal(a, b), f"result {n} differs"
        else:
            assert_within(a, b, c, scale, d, f"result {n}")
    return getattr(backend, "regions", [])
