"""Compile all kernels of a spec for a GPU that is not here, with the plans that they were made from."""
from __future__ import annotations

import torch

from flashfx.codegen import render
from flashfx.codegen.gpu import GPU, GPUS
from flashfx.codegen.load import load
from flashfx.codegen.offline import Report, compile_launches
from flashfx.codegen.plan import make_plan
from flashfx.codegen.selfcheck import captured_tensors
from flashfx.region import Problem
from flashfx.spec import AttentionSpec

BY_ARCH = {row.arch: row for row in reversed(GPUS)}


def compile_blocks(mask: AttentionSpec, aux, sizes, gpu: GPU) -> list[Report]:
    """Compile the generated summary kernels of a mask for `gpu`."""
    module = render.blocks_module(mask)
    return compile_launches(module, gpu, lambda: module.block_lists(aux, sizes, torch.device("cpu")))


def compile_all(text: str, problem: Problem, gpu: GPU, needs: tuple[bool, ...] | None = None) -> list[tuple[Report, object]]:
    """Compile every kernel of a generated file for `gpu` by running its host functions without launching. needs: which of (q, k, v, *aux)
    get gradients; all that can unless given."""
    spec = AttentionSpec.parse(text) if isinstance(text, str) else text
    plan = make_plan(spec, problem, gpu, "forward")
    source = render.render(spec, plan, problem, needs)
    module = load(source.text)
    small = {axis: e for axis, e in zip(spec.axes, problem.extents)}
    shape = lambda o, n, d: [*(small[a] if a in getattr(spec, o) else 1 for a in spec.axes), n, d]
    dtype, v_dtype = getattr(torch, problem.dtype), getattr(torch, problem.v_dtype)
    q, k = torch.empty(shape("q", problem.M, problem.D), dtype=dtype), torch.empty(shape("k", problem.N, problem.D), dtype=dtype)
    v = torch.empty(shape("v", problem.N, problem.Dv), dtype=v_dtype)
    sizes = [*problem.extents, *problem.sizes]
    aux = captured_tensors(spec, problem, dtype=dtype)
    seed = torch.zeros(1, dtype=torch.int64)

    def run():
        out, lse = module.forward(q, k, v, aux, seed, sizes)
        module.backward(out, q, k, v, aux, seed, out, lse, sizes)
    plans = {"attention_forward": plan, "attention_backward_keys": source.backward, "attention_backward_rows": source.backward.rows,
             "attention_delta": None, "attention_reset": None, "attention_empty_rows": None}
    return [(report, plans.get(report.kernel, source.backward.dense)) for report in compile_launches(module, gpu, run)]
