"""Compile all kernels of a spec for a GPU that is not here, with the plans that they were made from."""
from __future__ import annotations

from dataclasses import replace
from typing import Collection

import torch
from triton import knobs
from triton._C.libtriton import ir, nvidia, passes

from flashfx.codegen import render
from flashfx.codegen.gpu import GPU, GPUS
from flashfx.codegen.load import load
from flashfx.codegen.offline import Report, compile_launches, standing_in
from flashfx.codegen.plan import make_plan
from flashfx.codegen.selfcheck import captured_tensors
from flashfx.region import Problem
from flashfx.spec import AttentionSpec

BY_ARCH = {row.arch: row for row in reversed(GPUS)}


def compile_blocks(mask: AttentionSpec, aux, sizes, gpu: GPU) -> list[Report]:
    """Compile the generated summary kernels of a mask for `gpu`."""
    module = render.blocks_module(mask)
    made = [getattr(module, name) for name in ("block_lists", "document_tiles") if hasattr(module, name)]
    return compile_launches(module, gpu, lambda: [make(aux, sizes, torch.device("cpu")) for make in made])


def compile_all(text: str, problem: Problem, gpu: GPU, needs: tuple[bool, ...] | None = None, forward: bool = True,
                wrong: bool = False, batches: tuple[int, ...] = ()) -> list[tuple[Report, object]]:
    """Compile every kernel of a generated file for `gpu` by running its host functions without launching. needs: which of (q, k, v, *aux)
    get gradients; all that can unless given. forward: its kernels too. wrong: may Triton lay out operands so that products are wrong?
    batches: extents that plans are made for, where the problem's own are for the compilation alone."""
    spec = AttentionSpec.parse(text) if isinstance(text, str) else text
    planned = replace(problem, extents=batches or problem.extents)
    plan = make_plan(spec, planned, gpu, "forward")
    backward = make_plan(spec, planned, gpu, "backward", needs=needs) if batches else None
    source = render.render(spec, plan, problem, needs, backward)
    module, backward = load(source.text), source.backward
    small = {axis: e for axis, e in zip(spec.axes, problem.extents)}
    shape = lambda o, n, d: [*(small[a] if a in getattr(spec, o) else 1 for a in spec.axes), n, d]
    dtype, v_dtype = getattr(torch, problem.dtype), getattr(torch, problem.v_dtype)
    q, k = torch.empty(shape("q", problem.M, problem.D), dtype=dtype), torch.empty(shape("k", problem.N, problem.D), dtype=dtype)
    v = torch.empty(shape("v", problem.N, problem.Dv), dtype=v_dtype)
    sizes, results = [*problem.extents, *problem.sizes], (*problem.extents, problem.M, problem.Dv)
    aux = captured_tensors(spec, problem, dtype=dtype)
    seed = torch.zeros(1, dtype=torch.int64)

    def run():
        out, lse = module.forward(q, k, v, aux, seed, sizes) if forward else (torch.empty(results, dtype=v_dtype), torch.empty(results[:-1]))
        if backward is not None:
            module.backward(out, q, k, v, aux, seed, out, lse, sizes)
    plans = {"attention_forward": plan, "attention_backward": backward, "attention_backward_at_once": backward, "attention_backward_keys": backward, "attention_backward_values": backward, "attention_backward_rows": backward and backward.rows,
             "attention_delta": None, "attention_empty_rows": None, "attention_combine": None}
    found = compile_launches(module, gpu, run)
    assert wrong or not any(report.shallow or report.outrun for report in found), found
    return [(report, plans.get(report.kernel, backward and backward.dense)) for report in found]


class _Allocated(Exception):
    """Ends a compilation: the bytes of shared memory are known."""


def _allocate(backend, stages, options, language, capability):
    """A hook for Triton's stages: behind the layouts of tensors, allocate shared memory as the compiler does, and stop."""
    def allocate(module, metadata):
        manager = ir.pass_manager(module.context)
        passes.ttgpuir.add_combine_tensor_select_and_if(manager)
        passes.ttgpuir.add_allocate_warp_groups(manager)
        passes.convert.add_scf_to_cf(manager)
        passes.gluon.add_inliner(manager)
        nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, capability, 80)
        manager.run(module, "allocate_shared_memory")
        raise _Allocated(module.get_int_attr("ttg.shared"))
    stages["llir"] = allocate


def shared_memory(run, module, gpu: GPU, names: Collection[str]) -> dict[str, int]:
    """Name of a kernel -> bytes of shared memory that the compiler allocates, for those of `names` that `run` launches:
    a third of a compilation's time."""
    found = {}

    class Recorder:
        def __init__(self, function):
            self.function = function

        def __getitem__(self, grid):
            def launch(*args, **options):
                if self.function.__name__ not in names:
                    return
                try:
                    self.function.warmup(*args, grid=grid, **options)
                except _Allocated as size:
                    found[self.function.__name__] = size.args[0]
            return launch

    before = knobs.runtime.add_stages_inspection_hook
    knobs.runtime.add_stages_inspection_hook = lambda *a: _allocate(*a) if a else ("allocate", "allocate")
    kernels = {name: f for name, f in vars(module).items() if name.startswith("attention_")}
    try:
        with standing_in(gpu):
            for name, function in kernels.items():
                setattr(module, name, Recorder(function))
            run()
    finally:
        knobs.runtime.add_stages_inspection_hook = before
        for name, function in kernels.items():
            setattr(module, name, function)
    return found
