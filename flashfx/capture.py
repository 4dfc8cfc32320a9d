"""The graphs that Dynamo makes of a call, and `explain`, which reports what FlashFX would do with them."""
from __future__ import annotations

import copy
import inspect
import keyword
from typing import Any, Callable

import torch
from torch import fx

from .errors import FlashFXError
from .region import CALLER, Region
from .report import Report, SiteReport


class _Captured(BaseException):
    """Leaves a call whose graph was captured before anything of it runs."""


def unwrapped(fn: Callable) -> Callable:
    """The model or function behind `torch.compile`."""
    fn = getattr(fn, "_orig_mod", fn)
    return getattr(fn, "_torchdynamo_orig_callable", fn)


def graphs_of(fn: Callable, args: tuple, kwargs: dict, take: Callable[[fx.GraphModule], Any]) -> list:
    """`take(graph)` for each graph of `fn(*args, **kwargs)`, called where a backend is. `fn` may be compiled already.

    A call that is one graph is captured and not run. Where Dynamo breaks the graph the call runs once, as it is, because code between
    graphs reads their results; compiled code of this process is compiled again after that.
    """
    found: list = []

    def capture(gm, example_inputs):
        found.append(take(copy.deepcopy(gm)))
        return leave

    def leave(*_):
        raise _Captured

    def capture_and_run(gm, example_inputs):
        found.append(take(copy.deepcopy(gm)))
        return gm.forward

    target, state = unwrapped(fn), torch.random.get_rng_state()
    try:
        try:
            torch.compile(_fresh(target, args, kwargs), backend=capture, fullgraph=True)(*args, **kwargs)
        except _Captured:
            return found
        except FlashFXError:
            raise
        except Exception:
            found.clear()
        else:
            return found  # nothing for a graph to do
        try:
            with torch._dynamo.config.patch(recompile_limit=2 ** 16, accumulated_recompile_limit=2 ** 16):
                torch.compile(target, backend=capture_and_run)(*args, **kwargs)
        finally:
            torch._dynamo.reset()  # the entries just made count towards the limit of recompilations of the user's own
        return found
    finally:
        torch.random.set_rng_state(state)


def _fresh(target: Callable, args: tuple, kwargs: dict) -> Callable:
    """A caller of `target` whose compiled code is kept by nobody: entries in the cache of the target's own code count against its recompilations.

    Its parameters have the target's names, which name the inputs of the graph.
    """
    try:
        known = list(inspect.signature(target.forward if isinstance(target, torch.nn.Module) else target).parameters.values())
    except (TypeError, ValueError):
        known = []
    own = [p.name if p.kind is p.POSITIONAL_OR_KEYWORD else f"argument{n}" for n, p in enumerate(known[: len(args)])]
    own += [f"argument{n}" for n in range(len(own), len(args))]
    names = [*own, *kwargs]
    if not all(n.isidentifier() and not keyword.iskeyword(n) and n != "self" for n in names) or len(set(names)) < len(names):
        own, kwargs = [f"argument{n}" for n in range(len(args))], {}
        names = [*own, "**others"]
        given = [*own, "**others"]
    else:
        given = [*own, *(f"{n}={n}" for n in kwargs)]
    scope: dict = {}
    exec(compile(f"def outer(self):\n    def call({', '.join(names)}):\n        return self({', '.join(given)})\n    return call", CALLER, "exec"), scope)
    return scope["outer"](target)


def needs_gradients(gm: fx.GraphModule) -> bool:
    """Is this graph one of a training step?"""
    examples = [n.meta.get("example_value") for n in gm.graph.nodes if n.op == "placeholder"]
    return torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in examples)


def explain(fn: Callable, *args, gpu: str | None = None, measure: bool = False, **kwargs) -> Report:
    """What FlashFX would do with `fn(*args, **kwargs)`, a module or function, compiled or not; nothing is compiled for it.

    The call is captured and not run, unless Dynamo breaks its graph: see `graphs_of`. Gradients decide whether the report is for training, as
    in a compilation: call it under `torch.no_grad()` for inference. Arguments may be fake tensors (`FakeTensorMode`), so that a model
    needs no memory.

    gpu      name of a row of `flashfx.codegen.gpu.GPUS` to plan for, e.g. "A100", as if the tensors lay there; by default this machine's GPU, or
             the H100 where there is none.
    measure  also run each distinct site on this machine's GPU, on random data of its shapes: the calls that the model makes, one by one, and the
             generated kernels; medians of the GPU's time, forward and, in training, backward (`Region.measured`). Takes seconds for each, and
             memory for the scores of one site.
    Raises FlashFXError if `gpu` is unknown, or is not this machine's though `measure` is set, and whatever the call itself raises.
    """
    from .backend import rewrite_graph
    from .codegen.gpu import BY_NAME, current
    from .options import Options
    here = current()
    if gpu is not None and gpu not in (*BY_NAME, here.name):
        raise FlashFXError(f"unknown GPU {gpu!r}; known: {', '.join(BY_NAME)}")
    clock = _clock(gpu) if measure else None
    card = here if gpu in (None, here.name) else BY_NAME[gpu]

    def take(gm) -> tuple[list[Region], bool]:
        return rewrite_graph(gm, Options(), card if gpu is not None or clock else None, clock), needs_gradients(gm)

    found = graphs_of(fn, args, kwargs, take)
    training = any(t for _, t in found)
    return Report(tuple(SiteReport(r, card, training) for regions, _ in found for r in regions), len(found), card,
                  gpu is not None or torch.cuda.is_available(), training)


def _clock(gpu: str | None):
    """What times a site. Raises FlashFXError if the plans are not for the GPU of this machine."""
    from .bench.measure import seconds
    from .codegen.gpu import current
    if not torch.cuda.is_available():
        raise FlashFXError("measuring needs the GPU that the plans are for, and this machine has none: leave `measure` out for predictions, or run it there")
    if gpu not in (None, current().name):
        raise FlashFXError(f"measuring needs the GPU that the plans are for: that is the {gpu}, and this machine has the {current().name}; leave `gpu` out")
    return seconds
