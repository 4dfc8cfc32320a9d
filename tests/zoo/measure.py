"""Run one model of the zoo in eager mode, compiled, and in float64, and compare outputs and gradients of all parameters."""
from __future__ import annotations

import copy
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from flashfx.options import Options
from flashfx.passes.values import source_line
from flashfx.region import Region

from tests.budget import excess, largest

from .count import between, count_sites, matrices
from .entry import Entry


@dataclass
class Compiled:
    """A backend that counts sites before and after the rewrite."""

    inner: str = "eager"
    before: int = 0
    after: int = 0
    regions: list[Region] = field(default_factory=list)
    matrices: list[str] = field(default_factory=list)
    biases: int = 0
    own: int = 0

    def __call__(self, gm, example_inputs):
        from flashfx.backend import compile_rewritten
        self.before += count_sites(gm)
        scores = between(gm)
        run, regions = compile_rewritten(gm, example_inputs, Options(inner=self.inner), {})
        self.after += count_sites(gm)
        self.regions += regions
        made, biases, own = matrices(gm, scores, regions)
        self.matrices += [f"{n.name} {tuple(n.meta['example_value'].shape)} {source_line(n)}" for n in made]
        self.biases += len(biases)
        self.own += len(own)
        return run

    @property
    def fused(self) -> int:
        return self.before - self.after

    @property
    def refusals(self) -> list:
        return [r.refusal for r in self.regions if r.refusal is not None]


def float_leaves(tree) -> list[torch.Tensor]:
    values = tree.values() if hasattr(tree, "values") else tree if isinstance(tree, (list, tuple)) else [tree]
    found = []
    for v in values:
        if isinstance(v, torch.Tensor):
            found += [v] if v.is_floating_point() else []
        elif isinstance(v, (list, tuple, dict)) or hasattr(v, "values"):
            found += float_leaves(v)
    return found


def loss_of(outputs: list[torch.Tensor]) -> torch.Tensor:
    """A weighted mean of every output that has a gradient; the weights depend on the shapes alone."""
    g = torch.Generator().manual_seed(0)
    terms = [(o.double() * torch.randn(o.shape, generator=g, dtype=torch.float64)).mean() for o in outputs if o.requires_grad and o.numel()]
    return torch.stack(terms).sum()


def run(model, call, kwargs, backward: bool = True) -> dict[str, torch.Tensor]:
    """Outputs, loss and gradients by name. Seeded, because mixtures of experts jitter and BigBird draws blocks with NumPy."""
    torch.manual_seed(0)
    np.random.seed(0)
    outputs = float_leaves(call(**kwargs))
    found = {f"output {n}": o.detach() for n, o in enumerate(outputs)}
    if backward and any(o.requires_grad for o in outputs):
        loss = loss_of(outputs)
        loss.backward()
        found["loss"] = loss.detach().to(torch.float32)
        found |= {f"gradient of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    return found


class InDouble(TorchFunctionMode):
    """float32 asked for by name becomes float64: models take their softmax in float32 whatever they are cast to."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        double = lambda x: torch.float64 if x is torch.float32 else x
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(*map(double, args), **{k: double(v) for k, v in (kwargs or {}).items()})


def exactly(model, kwargs, call) -> dict[str, torch.Tensor] | None:
    """The float64 run, or None for a model that has no float64 form (NaN from finfo.min of another dtype, say)."""
    move = lambda v: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
    model = copy.deepcopy(model).double()
    if getattr(model.config, "_experts_implementation", None):
        model.set_experts_implementation("eager")  # grouped_mm knows no float64
    torch.set_default_dtype(torch.float64)  # for the masks and tables that models make
    try:
        with InDouble():
            found = run(model, call(model), {k: move(v) for k, v in kwargs.items()})
    except (RuntimeError, TypeError):
        return None
    finally:
        torch.set_default_dtype(torch.float32)
    return found if all(t.isfinite().all() for t in found.values()) else None


def off_by_rounding(model, seed: int = 0):
    """The same model, every parameter off by at most one rounding step: its results differ as much as rounding makes them."""
    model = copy.deepcopy(model)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point():
                p.mul_(1 + torch.finfo(p.dtype).eps * torch.randint(-1, 2, p.shape, generator=g))
    return model


def compare(entry: Entry, attn: str = "eager", train: bool = False, dynamic: bool | None = None, inner: str = "eager",
            captured: bool = False):
    """(backend, compiled, eager, exact, perturbed): dictionaries as `run` gives them, several of perturbed. Dropout is 0.

    With `captured` eager is the graph that Dynamo captures, run as it stands: a few models compute something else while they are traced
    (umt5 with SDPA is causal only then).
    """
    model, kwargs = entry.build(attn=attn, train=train, dropout=0.0)
    torch._dynamo.reset()
    call = (lambda m: torch.compile(m, backend="eager")) if captured else (lambda m: m)
    eager_model = copy.deepcopy(model)
    try:
        eager = run(eager_model, call(eager_model), kwargs)
    except AssertionError:  # a model that takes gradients only in training
        for m in (model, eager_model):
            m.requires_grad_(False)
        eager = run(eager_model, call(eager_model), kwargs)
    exact = exactly(model, kwargs, call) or eager
    perturbed = [run(other, call(other), kwargs) for other in (off_by_rounding(model, seed) for seed in range(3))]
    torch._dynamo.reset()
    backend = Compiled(inner)
    compiled = run(model, torch.compile(model, backend=backend, dynamic=dynamic), kwargs)
    return backend, compiled, eager, exact, perturbed


def shapes(entry: Entry, attn: str = "eager", train: bool = False, inner: str = "eager") -> Compiled:
    """One compiled forward pass, for what the rewritten graphs hold."""
    model, kwargs = entry.build(attn=attn, train=train, dropout=0.0)
    torch._dynamo.reset()
    backend = Compiled(inner)
    with torch.set_grad_enabled(train):
        torch.compile(model, backend=backend)(**kwargs)
    return backend


def captured_at_all(entry: Entry, attn: str = "eager", train: bool = False, dynamic: bool | None = None) -> bool:
    """Does PyTorch compile the entry without us?"""
    model, kwargs = entry.build(attn=attn, train=train, dropout=0.0)
    torch._dynamo.reset()
    try:
        run(model, torch.compile(model, backend="eager", dynamic=dynamic), kwargs)
    except Exception:
        return False
    return True


def dropped_out(entry: Entry, attn: str = "eager", dynamic: bool | None = None, inner: str = "eager"):
    """(backend, two runs with one seed) of a training step with dropout 0.1."""
    runs = []
    for _ in range(2):
        model, kwargs = entry.build(attn=attn, train=True, dropout=0.1)
        torch._dynamo.reset()
        backend = Compiled(inner)
        runs.append(run(model, torch.compile(model, backend=backend, dynamic=dynamic), kwargs))
    return backend, *runs


def worst(compiled, eager, exact, perturbed: list[dict]) -> tuple[float, str]:
    """The largest excess over the budget in rounding bands, and where. A band is taken at the largest output, or gradient, and at how far
    rounding of the parameters moves a result, in the worst of a few draws.

    Gradients of key biases, say, are 0 but for rounding: sums of large terms that cancel.
    """
    kind = lambda name: name.startswith("gradient")
    scale = {k: max([largest(t) for name, t in exact.items() if kind(name) == k], default=0.0) for k in (True, False)}
    found = [(0.0, "")]
    for name in exact:
        if name not in compiled:
            found.append((float("inf"), f"{name} is missing"))
        else:
            found.append((min(excess(compiled[name], eager[name], exact[name], scale[kind(name)], moved[name]) for moved in perturbed), name))
    return max(found)
