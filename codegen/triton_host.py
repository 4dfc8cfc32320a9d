"""Run a spec through its generated Triton kernels. Everything that can be known from a call's shapes is worked out once."""
from __future__ import annotations

import functools
import math
from typing import Callable, Sequence

import torch

from .. import compat
from ..errors import PlanError
from ..region import Problem
from ..spec import AttentionSpec
from . import calls, gpu, plan
from .descriptors import describable
from .layout import empty_lse, empty_output
from .load import load
from .render import WHOLE, blocks_module, render
from .replay import watch_launches

_MODULES: dict[tuple, object] = {}


def problem_of(spec: AttentionSpec, q, k, v, sizes: Sequence[int]) -> Problem:
    n = len(spec.axes)
    name = lambda t: str(t.dtype).removeprefix("torch.")
    return Problem(tuple(int(e) for e in sizes[:n]), q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1], name(q), name(v),
                   tuple(int(s) for s in sizes[n:]))


def module_for(spec: AttentionSpec, problem: Problem, device: torch.device, needs: tuple[bool, ...], descriptors: bool,
               listed: bool = False, tiled: Sequence[str] = ()):
    """The generated module; sizes other than head sizes do not enter its text, so that new lengths compile nothing new."""
    if device.type == "cpu":
        compat.repair_interpreter()
    card = gpu.current(device)
    if _tunes(device):
        from . import tuning
        tuning.tune(spec, problem, card, device, ("forward", "backward") if any(needs) else ("forward",), descriptors=descriptors, listed=listed, needs=needs,
                    tiled=tuple(tiled))
    forward = plan.make_plan(spec, problem, card, "forward", descriptors, listed, tiled=tiled)
    backward = plan.make_plan(spec, problem, card, "backward", descriptors, listed, needs, tiled) if any(needs) else None
    key = (spec, problem.D, problem.Dv, problem.dtype, problem.v_dtype, problem.M <= problem.N, problem.N % WHOLE == 0, needs, forward.precision,
           forward.descriptors, forward.aligned, listed, forward.schedule, forward.parts, forward.packed, forward.tiled,
           backward and (backward.schedule, backward.kernel, backward.ordered, backward.tiled, backward.stored, backward.turns), card.sms,
           *(tuple(p.options.values()) for p in (forward, backward, backward and backward.rows, backward and backward.dense) if p))
    if key not in _MODULES:
        _MODULES[key] = load(render(spec, forward, problem, needs, backward).text)
        watch_launches(_MODULES[key])
    return _MODULES[key]


def _tunes(device: torch.device) -> bool:
    from . import tuning
    return tuning.enabled() and not plan.OVERRIDE and not (device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def _check(spec: AttentionSpec, aux: Sequence[torch.Tensor]) -> None:
    for a, t in zip(spec.aux, aux):
        if t.numel() >= 2 ** 31 and any({"i", "j"} <= index.variables for load in spec.loads if load.name == a.name for index in load.index):
            raise PlanError(f"{a.name} has {t.numel()} elements and is read at computed positions, which are 32-bit in the kernels")


def _describable(spec: AttentionSpec, q, k, v, grad_out=None) -> bool:
    operands = [("q", q), ("k", k), ("v", v)]
    return (all(describable(t, [not present for present in spec.present(name)]) for name, t in operands)
            and (grad_out is None or describable(grad_out)))


def _tiled(spec: AttentionSpec, aux) -> list[str]:
    """Captured tensors of which TMA can read tiles: as wide as those of q, or booleans of a mask."""
    return [a.name for a, t in zip(spec.aux, aux) if (t.element_size() == 2 or t.dtype == torch.bool) and t.dim() > 1 and describable(t)]


def _copied(spec: AttentionSpec, problem: Problem, device, needs, listed: bool, descriptors: bool, aux, tiled: list[str]) -> list[str]:
    """Which captured tensor the backward reads a copy of, since TMA cannot read it as it lies and could then store its gradient on the way. Rows of relative
    positions that views shift lie so; elements read one by one, and a pass over all pairs for the gradient, take longer than the copy."""
    loose = [a.name for a, t in zip(spec.aux, aux) if a.name not in tiled and t.element_size() == 2 and t.dim() > 1 and t.shape[-1] % 8 == 0]
    if not loose:
        return []
    found = plan.make_plan(spec, problem, gpu.current(device), "backward", descriptors, listed, needs, (*tiled, *loose))
    return [found.stored] if found.schedule == "hopper" and found.stored in loose else []


def run_forward(spec: AttentionSpec, q, k, v, aux, seed, sizes, blocks=None, outer: int = 1, key: tuple | None = None):
    """`launch.forward` on a GPU or in Triton's interpreter. key: as `calls.key` makes one, of the spec, sizes and layout if not given."""
    rows, keys, documents = blocks or (None, None, False)
    operands = (q, k, v, seed, rows, keys, *aux)
    make = functools.partial(_forward, spec, q, k, v, aux, tuple(sizes), blocks is not None, documents, outer)
    return calls.remembered(key or calls.key((spec, *sizes, documents, outer), operands), make)(operands)


def _forward(spec: AttentionSpec, q, k, v, aux, sizes, listed: bool, documents: bool, outer: int) -> Callable:
    """The function of (q, k, v, seed, row_blocks, key_blocks, *aux) for operands like these."""
    problem = problem_of(spec, q, k, v, sizes)
    _check(spec, aux)
    if math.prod(problem.extents) * problem.M * problem.N == 0:  # no keys, or no output at all
        return lambda q, k, v, *_: (empty_output(problem.extents, problem.M, v, outer).zero_(), empty_lse(problem.extents, problem.M, v).fill_(-math.inf))
    module = module_for(spec, problem, q.device, (False,) * (3 + len(aux)), _describable(spec, q, k, v), listed, _tiled(spec, aux))
    given = lambda *blocks: (blocks,) if listed else ()
    return lambda q, k, v, seed, rows, keys, *aux: module.forward(q, k, v, aux, seed, sizes, *given(rows, keys, documents), outer=outer)


def run_block_lists(mask: AttentionSpec, aux, sizes, like: torch.Tensor):
    """`blocks.block_lists` on a GPU or in Triton's interpreter."""
    return _of_mask("block_lists", mask, aux, sizes, like)


def run_document_tiles(mask: AttentionSpec, aux, sizes, like: torch.Tensor):
    """`blocks.document_tiles` on a GPU or in Triton's interpreter."""
    return _of_mask("document_tiles", mask, aux, sizes, like)


def _of_mask(name: str, mask: AttentionSpec, aux, sizes, like: torch.Tensor) -> Sequence[torch.Tensor]:
    layout = [(t.shape, t.stride(), t.dtype, t.data_ptr() % 16) for t in aux]
    make = functools.partial(_summary, name, mask, tuple(sizes), like.device)
    return calls.remembered((mask, name, *layout, like.device, *sizes), make)((like, *aux))


def _summary(name: str, mask: AttentionSpec, sizes, device) -> Callable:
    """The function of (like, *aux) for operands like these."""
    if device.type == "cpu":
        compat.repair_interpreter()
    module = blocks_module(mask)
    watch_launches(module)
    return lambda like, *aux: getattr(module, name)(aux, sizes, device)


def run_backward(spec: AttentionSpec, grad_out, q, k, v, aux, seed, out, lse, sizes, needs, grad_lse=None, blocks=None, key: tuple | None = None):
    """`launch.backward` on a GPU or in Triton's interpreter. key: as `run_forward`'s."""
    rows, keys, documents = blocks or (None, None, False)
    operands = (q, k, v, seed, grad_out, out, lse, grad_lse, rows, keys, *aux)
    needs = tuple(map(bool, needs))
    make = functools.partial(_backward, spec, grad_out, q, k, v, aux, tuple(sizes), needs, blocks is not None, documents)
    return calls.remembered(key or calls.key((spec, *sizes, *needs, documents), operands), make)(operands)


def _backward(spec: AttentionSpec, grad_out, q, k, v, aux, sizes, needs, listed: bool, documents: bool) -> Callable:
    """The function of (q, k, v, seed, grad_out, out, lse, grad_lse, row_blocks, key_blocks, *aux) for operands like these."""
    problem = problem_of(spec, q, k, v, sizes)
    empty = not any(needs) or math.prod(problem.extents) * problem.M * problem.N == 0
    described, tiled = _describable(spec, q, k, v, grad_out), _tiled(spec, aux)
    copied = [] if empty else _copied(spec, problem, q.device, needs, listed, described, aux, tiled)
    module = None if empty else module_for(spec, problem, q.device, needs, described, listed, tiled + copied)
    copies = [a.name in copied for a in spec.aux]

    def run(q, k, v, seed, grad_out, out, lse, grad_lse, rows, keys, *aux):
        aux = [t.clone(memory_format=torch.contiguous_format) if copy else t for copy, t in zip(copies, aux)]
        operands = (q, k, v, *aux)
        named = {} if grad_lse is None else {"grad_lse": grad_lse}
        if listed:
            named["blocks"] = rows, keys, documents
        grads = [None] * len(operands) if empty else module.backward(grad_out, q, k, v, aux, seed, out, lse, sizes, **named)
        result = []
        for t, need, gradient in zip(operands, needs, grads):
            if not need:
                gradient = torch.empty(0, dtype=t.dtype, device=t.device)
            elif gradient is None:  # nothing depends on it
                gradient = torch.zeros(t.shape, dtype=t.dtype, device=t.device)
            result.append(gradient)
        return result
    return run
