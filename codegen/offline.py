"""Compile generated kernels for any NVIDIA GPU on a machine without one: shared memory, registers and spills as the compiler reports them.

A module's host functions run on CPU tensors that nothing reads, while its kernels are replaced by recorders that compile what is launched.
"""
from __future__ import annotations

import contextlib
import itertools
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from types import ModuleType
from typing import Callable

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime import driver

from .gpu import GPU
from .spilling import fitted, settled


@dataclass(frozen=True)
class Report:
    """One kernel: bytes of shared memory, registers of a thread, bytes spilled, whether asynchronous matrix products run one by one, whether a product's
    operand is laid out by more elements than the product goes over (`is_shallow`), whether a product's operand may be overwritten while it runs (`is_outrun`),
    and options that it took in place of the plan's, which would have spilled."""

    kernel: str
    shared: int
    registers: int
    spilled: int
    serialised: bool
    shallow: bool
    outrun: bool
    instead: tuple[tuple[str, int | str], ...] = ()


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


class _Recorder:
    """Compiles what is launched, as `replay.Watched` does."""

    def __init__(self, function, gpu: GPU, found: list[Report]):
        self.function, self.gpu, self.found = function, gpu, found

    def __getitem__(self, grid):
        def run(*args, **options):
            built = {}

            def spilled(more: dict[str, int | str]) -> int:
                compiled = self.function.warmup(*fitted(self.function, args, more), grid=grid, **options | more)
                found = Report(self.function.__name__, compiled.metadata.shared, *assembled(compiled, self.gpu),
                               is_shallow(text := compiled.asm.get("ttgir", "")), is_outrun(text), tuple(more.items()))
                built[found.instead] = found
                return found.spilled
            self.found.append(built[tuple(settled(spilled, self.function, options).items())])
        return run


def assembled(kernel, gpu: GPU) -> tuple[int, int, bool]:
    """(registers, bytes spilled, are asynchronous matrix products run one by one?) of a compiled kernel, by ptxas."""
    arch = gpu.capability[0] * 10 + gpu.capability[1]
    ptx = kernel.asm["ptx"]
    target = re.search(r"\.target (\w+)", ptx).group(1)
    with tempfile.TemporaryDirectory() as directory:
        source = os.path.join(directory, "kernel.ptx")
        with open(source, "w") as file:
            file.write(ptx)
        options = (kernel.metadata.ptx_options or "").split()
        log = subprocess.run([get_ptxas(arch).path, "-v", *options, f"--gpu-name={target}", source, "-o", os.path.join(directory, "kernel.cubin")],
                             capture_output=True, text=True, check=True).stderr
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", log))
    return int(re.search(r"Used (\d+) registers", log).group(1)), spilled, "wgmma.mma_async instructions are serialized" in log


def is_shallow(text: str) -> bool:
    """Is an operand of the older matrix instructions laid out by more elements than its product goes over? Triton 3.6 and 3.7 do not ask, and the product
    comes out wrong (`philox.KEEP_TILE`). text: a kernel in Triton's GPU dialect."""
    older = set(re.findall(r"^(#\w+) = #ttg\.nvidia_mma<\{versionMajor = 2", text, re.M))
    operands = re.findall(r"tensor<(\d+)x(\d+)x\w+, #ttg\.dot_op<\{opIdx = (\d), parent = (#\w+), kWidth = (\d+)", text)
    return any(layout in older and 4 * int(width) > int(rows if operand == "1" else columns) for rows, columns, operand, layout, width in operands)


def is_outrun(text: str) -> bool:
    """Does a loop multiply from registers and never wait for all products? They may then still run, and read, when the next step's operand comes into the same
    registers. Triton 3.6 and 3.7 let it happen where nothing else in the loop waits. text: as `is_shallow`; what warp-specialised kernels wait for they say themselves."""
    lines = [] if "ttg.warp_specialize" in text else text.splitlines()
    depth = lambda line: len(line) - len(line.lstrip())
    for n, line in enumerate(lines):
        if "scf.for " in line:
            body = "\n".join(itertools.takewhile(lambda later: not later.strip() or depth(later) > depth(line), lines[n + 1:]))
            if re.search(r"ttng\.warp_group_dot .*isAsync = true.*: tensor<", body) and "pendings = 0" not in body:
                return True
    return False


@contextlib.contextmanager
def standing_in(gpu: GPU):
    """While the block runs, Triton compiles for `gpu`, whatever there is."""
    before = driver._active
    driver.set_active(_Driver(gpu.capability[0] * 10 + gpu.capability[1]))
    try:
        yield
    finally:
        driver._active = before


def compile_launches(module: ModuleType, gpu: GPU, run: Callable[[], object]) -> list[Report]:
    """Compile for `gpu` what `run` launches of a generated module's kernels; none is launched. In the order of the launches."""
    found: list[Report] = []
    kernels = {name: f for name, f in vars(module).items() if name.startswith("attention_")}
    with standing_in(gpu):
        try:
            for name, function in kernels.items():
                setattr(module, name, _Recorder(function, gpu, found))
            run()
        finally:
            for name, function in kernels.items():
                setattr(module, name, function)
    return found
