"""Run a spec through its generated Triton kernels. Everything that can be known from a call's shapes is worked out once."""
from __future__ import annotations

import contextlib
import math
from typing import Sequence

import torch

from .. import compat
from ..errors import PlanError
from ..region import Problem
from ..spec import AttentionSpec
from . import gpu, plan
from .descriptors import describable
from .layout import empty_lse, empty_output
from .load import load
from .render import WHOLE, render
from .repeat import group, repeat_launches

_FORWARD: dict[tuple, object] = {}
_BACKWARD: dict[tuple, object] = {}
_MODULES: dict[tuple, object] = {}


def problem_of(spec: AttentionSpec, q, k, v, sizes: Sequence[int]) -> Problem:
    n = len(spec.axes)
    name = lambda t: str(t.dtype).removeprefix("torch.")
    return Problem(tuple(int(e) for e in sizes[:n]), q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1], name(q), name(v),
                   tuple(int(s) for s in sizes[n:]))


def module_for(spec: AttentionSpec, problem: Problem, device: torch.device, needs: tuple[bool, ...], descriptors: bool):
    """The generated module; sizes other than head sizes do not enter its text, so that new lengths compile nothing new."""
    if device.type == "cpu":
        compat.repair_interpreter()
    card = gpu.current(device)
    forward = plan.make_plan(spec, problem, card, "forward", descriptors)
    backward = plan.make_plan(spec, problem, card, "backward", descriptors) if any(needs) else None
    key = (spec, problem.D, problem.Dv, problem.dtype, problem.v_dtype, problem.M <= problem.N, problem.N % WHOLE == 0, needs, forward.precision, forward.descriptors,
           *(tuple(p.options.values()) for p in (forward, backward, backward and backward.rows, backward and backward.dense) if p))
    if key not in _MODULES:
        _MODULES[key] = load(render(spec, forward, problem, needs, backward).text)
        repeat_launches(_MODULES[key])
    return _MODULES[key]


def _check(spec: AttentionSpec, aux: Sequence[torch.Tensor]) -> None:
    for a, t in zip(spec.aux, aux):
        if t.numel() >= 2 ** 31 and any({"i", "j"} <= index.variables for load in spec.loads if load.name == a.name for index in load.index):
            raise PlanError(f"{a.name} has {t.numel()} elements and is read at computed positions, which are 32-bit in the kernels")


def _key(spec, sizes, *operands: torch.Tensor) -> tuple:
    layout = [(t.shape, t.stride(), t.dtype, t.data_ptr() % 16 == 0) for t in operands]
    return (spec, *layout, operands[0].device, tuple(sizes), plan.matmul_precision(), tuple(plan.OVERRIDE.items()))


def _given(seed: torch.Tensor | None) -> tuple:
    return () if seed is None else (seed,)


def _describable(spec: AttentionSpec, q, k, v, grad_out=None) -> bool:
    operands = [("q", q), ("k", k), ("v", v)]
    return (all(describable(t, [not present for present in spec.present(name)]) for name, t in operands)
            and (grad_out is None or describable(grad_out)))


def _remember(table: dict, key: tuple, run) -> object:
    """Keep what was worked out for a call's shapes, with its compiled kernels; dynamic shapes must not fill the memory."""
    if len(table) >= 4096:
        table.clear()
    table[key] = run, {}
    return table[key]


def _on(device: torch.device):
    """Kernels launch on the current device: make it the operands'."""
    other = device.type == "cuda" and device.index is not None and device.index != torch.cuda.current_device()
    return torch.cuda.device(device) if other else contextlib.nullcontext()


def run_forward(spec: AttentionSpec, q, k, v, aux, seed, sizes):
    """`launch.forward` on a GPU or in Triton's interpreter."""
    key = _key(spec, sizes, q, k, v, *aux, *_given(seed))
    found = _FORWARD.get(key)
    if found is None:
        problem = problem_of(spec, q, k, v, sizes)
        _check(spec, aux)
        empty = math.prod(problem.extents) * problem.M * problem.N == 0
        run = _nothing if empty else module_for(spec, problem, q.device, (False,) * (3 + len(aux)), _describable(spec, q, k, v)).forward
        found = _remember(_FORWARD, key, run)
    run, known = found
    with _on(q.device), group(known):
        return run(q, k, v, aux, seed, sizes)


def _nothing(q, k, v, aux, seed, sizes):
    """No keys, or no output at all."""
    extents = sizes[: q.dim() - 2]
    return empty_output(extents, q.shape[-2], v).zero_(), empty_lse(extents, q.shape[-2], v).fill_(-math.inf)


def _no_gradients(grad_out, q, k, v, aux, seed, out, lse, sizes, grad_lse=None):
    return [None] * (3 + len(aux))


def run_backward(spec: AttentionSpec, grad_out, q, k, v, aux, seed, out, lse, sizes, needs, grad_lse=None):
    """`launch.backward` on a GPU or in Triton's interpreter."""
    operands = (q, k, v, *aux)
    needs = tuple(bool(n) for n in needs)
    key = (needs, *_key(spec, sizes, q, k, v, grad_out, *aux, *_given(seed)))
    found = _BACKWARD.get(key)
    if found is None:
        problem = problem_of(spec, q, k, v, sizes)
        empty = not any(needs) or math.prod(problem.extents) * problem.M * problem.N == 0
        run = None if empty else module_for(spec, problem, q.device, needs, _describable(spec, q, k, v, grad_out)).backward
        found = _remember(_BACKWARD, key, run or _no_gradients)
    run, known = found
    with _on(q.device), group(known):
        grads = run(grad_out, q, k, v, aux, seed, out, lse, sizes, *([] if grad_lse is None else [grad_lse]))
    result = []
    for t, need, gradient in zip(operands, needs, grads):
        if not need:
            gradient = torch.empty(0, dtype=t.dtype, device=t.device)
        elif gradient is None:  # nothing depends on it
            gradient = torch.zeros(t.shape, dtype=t.dtype, device=t.device)
        result.append(gradient)
    return result
