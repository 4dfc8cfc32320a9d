"""Compile generated kernels for any NVIDIA GPU on a machine without one: shared memory, registers and spills as the compiler reports."""
from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime import driver

from flashfx.codegen import render
from flashfx.codegen.gpu import GPU, GPUS
from flashfx.codegen.load import load
from flashfx.codegen.plan import make_plan
from flashfx.codegen.replay import without_spilling
from flashfx.codegen.selfcheck import captured_tensors
from flashfx.region import Problem
from flashfx.spec import AttentionSpec

BY_ARCH = {row.arch: row for row in reversed(GPUS)}


class _Driver:
    """What `JITFunction.warmup` asks a driver."""

    def __init__(self, capability: int):
        self.capability = capability

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return self.capability

    def get_current_stream(self, device):
        return 0


@dataclass(frozen=True)
class Report:
    kernel: str
    shared: int
    registers: int
    spilled: int
    serialised: bool


class _Recorder:
    """Compiles what is launched, as `replay.Watched` does."""

    def __init__(self, function, gpu: GPU, found: list):
        self.function, self.gpu, self.found = function, gpu, found

    def __getitem__(self, grid):
        def run(*args, **options):
            compiled = self.function.warmup(*args, grid=grid, **options)
            figures = _assembled(compiled, self.gpu)
            more = without_spilling(figures[1], options)
            if more:
                compiled = self.function.warmup(*args, grid=grid, **options, **more)
                figures = _assembled(compiled, self.gpu)
            self.found.append((self.function.__name__, compiled.metadata.shared, *figures))
        return run


def _assembled(kernel, gpu: GPU) -> tuple[int, int, bool]:
    """(registers, bytes spilled, are asynchronous matrix products run one by one?) by ptxas."""
    arch = gpu.capability[0] * 10 + gpu.capability[1]
    ptx = kernel.asm["ptx"]
    target = re.search(r"\.target (\w+)", ptx).group(1)
    with tempfile.TemporaryDirectory() as directory:
        source = os.path.join(directory, "kernel.ptx")
        with open(source, "w") as file:
            file.write(ptx)
        log = subprocess.run([get_ptxas(arch).path, "-v", f"--gpu-name={target}", source, "-o", os.path.join(directory, "kernel.cubin")],
                             capture_output=True, text=True, check=True).stderr
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", log))
    return int(re.search(r"Used (\d+) registers", log).group(1)), spilled, "wgmma.mma_async instructions are serialized" in log


def compile_blocks(mask: AttentionSpec, aux, sizes, gpu: GPU) -> list[Report]:
    """Compile the generated summary kernels of a mask for `gpu`."""
    module, found, before = render.blocks_module(mask), [], driver._active
    kernels = module.attention_blocks, module.attention_lists
    driver.set_active(_Driver(gpu.capability[0] * 10 + gpu.capability[1]))
    try:
        module.attention_blocks, module.attention_lists = (_Recorder(k, gpu, found) for k in kernels)
        module.block_lists(aux, sizes, torch.device("cpu"))
    finally:
        module.attention_blocks, module.attention_lists = kernels
        driver._active = before
    return [Report(*figures) for figures in found]


def compile_all(text: str, problem: Problem, gpu: GPU, needs: tuple[bool, ...] | None = None) -> list[tuple[Report, object]]:
    """Compile every kernel of a generated file for `gpu` by running its host functions without launching. needs: which of (q, k, v, *aux)
    get gradients; all that can unless given."""
    spec = AttentionSpec.parse(text) if isinstance(text, str) else text
    plan = make_plan(spec, problem, gpu, "forward")
    source = render.render(spec, plan, problem, needs)
    module = load(source.text)
    found: list = []
    kernels = {name: f for name, f in vars(module).items() if name.startswith("attention_")}
    before = driver._active
    driver.set_active(_Driver(gpu.capability[0] * 10 + gpu.capability[1]))
    try:
        for name, function in kernels.items():
            setattr(module, name, _Recorder(function, gpu, found))
        small = {axis: e for axis, e in zip(spec.axes, problem.extents)}
        shape = lambda o, n, d: [*(small[a] if a in getattr(spec, o) else 1 for a in spec.axes), n, d]
        dtype, v_dtype = getattr(torch, problem.dtype), getattr(torch, problem.v_dtype)
        q, k = torch.empty(shape("q", problem.M, problem.D), dtype=dtype), torch.empty(shape("k", problem.N, problem.D), dtype=dtype)
        v = torch.empty(shape("v", problem.N, problem.Dv), dtype=v_dtype)
        sizes = [*problem.extents, *problem.sizes]
        aux = captured_tensors(spec, problem, dtype=dtype)
        seed = torch.zeros(1, dtype=torch.int64)
        out, lse = module.forward(q, k, v, aux, seed, sizes)
        module.backward(out, q, k, v, aux, seed, out, lse, sizes)
    finally:
        for name, function in kernels.items():
            setattr(module, name, function)
        driver._active = before
    plans = {"attention_forward": plan, "attention_backward_keys": source.backward, "attention_backward_rows": source.backward.rows,
             "attention_delta": None, "attention_reset": None, "attention_empty_rows": None}
    return [(Report(name, *figures), plans.get(name, source.backward.dense)) for name, *figures in found]
