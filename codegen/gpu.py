"""What a GPU offers a kernel: one frozen row each. Rates are for dense matrix products of 16-bit floats with float32 sums."""
from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace

import torch

from ..expr import cached_hash
from ..region import Problem

KIB = 1024


@cached_hash
@dataclass(frozen=True)
class GPU:
    """
    capability        compute capability (major, minor)
    sms               streaming multiprocessors
    shared_per_block  bytes of shared memory one block can ask for (opt-in)
    shared_per_sm     bytes of shared memory of one multiprocessor
    registers         32-bit registers of one multiprocessor
    l2                bytes of the last cache in front of device memory
    bandwidth         device memory, bytes per second
    matrix_rate       float operations per second
    clock             highest clock of a multiprocessor, Hz
    source            where the numbers come from
    vendor            "NVIDIA" or "AMD", whose compute units, local data share and gfx versions stand for the names above
    measured          was the cost model calibrated on this card? Its shares of the peak are taken for all others
    """

    name: str
    capability: tuple[int, int]
    sms: int
    shared_per_block: int
    shared_per_sm: int
    registers: int
    l2: int
    bandwidth: float
    matrix_rate: float
    clock: float
    source: str
    vendor: str = "NVIDIA"
    measured: bool = False

    def __post_init__(self):
        assert 0 < self.shared_per_block <= self.shared_per_sm <= 256 * KIB, self.name
        assert self.shared_per_block % KIB == 0 and self.shared_per_sm % KIB == 0, self.name
        assert 2 ** 20 <= self.l2 <= 2 ** 28 and self.l2 % KIB == 0, f"{self.name}: bytes of L2 cache out of any card's range"
        assert self.registers % 1024 == 0 and 1 <= self.sms <= 320, self.name
        assert 1e11 < self.bandwidth < 1e14 and 1e13 < self.matrix_rate < 1e16, self.name
        assert 20 < self.matrix_rate / self.bandwidth < 700, f"{self.name}: operations per byte out of any card's range"
        assert 1e9 < self.clock < 3.5e9, self.name
        assert self.source and self.vendor in ("NVIDIA", "AMD"), self.name

    @property
    def exp_rate(self) -> float:
        """exp2 per second: 16 special-function results a clock and multiprocessor (CUDA C++ Programming Guide, arithmetic instructions;
        on CDNA 3 a quarter of 64 lanes)."""
        return 16.0 * self.sms * self.clock

    def exact_rate(self, head: int) -> float:
        """Float32 operations per second in products as good as exact: six of bfloat16 make one (see `units`), or ordinary units do it, 128 FMAs a clock and
        multiprocessor, of which the kernels reach 2.5 times less (H200, both measured). head: the larger head size."""
        return self.matrix_rate / 6 if self.is_hopper and head <= IN_PIECES else 256.0 * self.sms * self.clock / 2.5

    @property
    def arch(self) -> str:
        return f"sm_{self.capability[0]}{self.capability[1]}" if self.vendor == "NVIDIA" else f"gfx{self.capability[0]}{self.capability[1]}2"

    @property
    def is_hopper(self) -> bool:
        """Has it the warpgroup matrix instructions and the tensor memory accelerator of compute capability 9.0?"""
        return self.vendor == "NVIDIA" and self.capability == (9, 0)


_GUIDE = "CUDA C++ Programming Guide, table of technical specifications per compute capability (shared memory, registers)"


def _row(name, capability, sms, block, sm, l2, bandwidth, rate, clock, source):
    return GPU(name, capability, sms, block * KIB, sm * KIB, 65536, l2 * KIB ** 2, bandwidth * 1e9, rate * 1e12, clock * 1e9, f"{source}; {_GUIDE}")


GPUS: tuple[GPU, ...] = (
    # name, capability, multiprocessors, KiB shared of a block and of a multiprocessor, MiB of L2 cache, GB/s, TFLOP/s, GHz
    _row("T4", (7, 5), 40, 64, 64, 4, 320, 65, 1.59, "NVIDIA T4 datasheet"),
    _row("V100", (7, 0), 80, 96, 96, 6, 900, 125, 1.53, "NVIDIA V100 datasheet (SXM2)"),
    _row("A100", (8, 0), 108, 163, 164, 40, 2039, 312, 1.41, "NVIDIA A100 datasheet (SXM 80 GB)"),
    _row("A100-SXM4-40GB", (8, 0), 108, 163, 164, 40, 1555, 312, 1.41, "NVIDIA A100 datasheet (40 GB)"),
    _row("A30", (8, 0), 56, 163, 164, 24, 933, 165, 1.44, "NVIDIA A30 datasheet"),
    _row("A10", (8, 6), 72, 99, 100, 6, 600, 125, 1.695, "NVIDIA A10 datasheet"),
    _row("RTX 3090", (8, 6), 82, 99, 100, 6, 936, 71, 1.695, "NVIDIA GA102 whitepaper, float32 accumulation"),
    _row("L4", (8, 9), 58, 99, 100, 48, 300, 121, 2.04, "NVIDIA L4 datasheet, without sparsity"),
    _row("L40S", (8, 9), 142, 99, 100, 96, 864, 362, 2.52, "NVIDIA L40S datasheet, without sparsity"),
    _row("RTX 4090", (8, 9), 128, 99, 100, 72, 1008, 165, 2.52, "NVIDIA Ada whitepaper, float32 accumulation"),
    _row("H100", (9, 0), 132, 227, 228, 50, 3350, 989, 1.98, "NVIDIA H100 datasheet (SXM), without sparsity"),
    _row("H100 PCIe", (9, 0), 114, 227, 228, 50, 2000, 756, 1.755, "NVIDIA H100 datasheet (PCIe), without sparsity"),
    replace(_row("H200", (9, 0), 132, 227, 228, 60, 4800, 989, 1.98, "NVIDIA H200 datasheet, without sparsity"), measured=True),
    _row("GH200", (9, 0), 132, 227, 228, 60, 4000, 990, 1.98, "NVIDIA GH200 datasheet (96 GB HBM3), without sparsity"),
    _row("B200", (10, 0), 148, 227, 228, 126, 8000, 2250, 1.965, "NVIDIA DGX B200 datasheet, without sparsity"),
    _row("RTX 5090", (12, 0), 170, 99, 100, 96, 1792, 209.5, 2.407, "NVIDIA RTX Blackwell whitepaper, float32 accumulation"),
    GPU("MI300X", (9, 4), 304, 64 * KIB, 64 * KIB, 131072, 256 * KIB ** 2, 5.3e12, 1307e12, 2.1e9, "AMD MI300X datasheet and CDNA 3 white paper; for reports: its kernels have never run", "AMD"),
)

BY_NAME = {row.name: row for row in GPUS}
DEFAULT = BY_NAME["H100"]
"""The row for reports on a machine without a GPU."""


EXACT = "bf16x6", "fma"
"""Units of float32 products."""
IN_PIECES = 128
"""Head size up to which sums of dK leave registers for float32 in pieces of bfloat16."""
UNITS = {9: "wgmma", 10: "tcgen05", 11: "tcgen05"}
"""By the first number of the compute capability."""


def units(problem: Problem, gpu: GPU) -> str:
    """Which units multiply: of float32 "bf16x6" (Hopper) or "fma", as if TF32 were not allowed; "wgmma" (Hopper), "tcgen05" (Blackwell's data centre
    cards), "mma" (all others)."""
    if "float32" in (problem.dtype, problem.v_dtype):
        return EXACT[not gpu.is_hopper or max(problem.D, problem.Dv) > IN_PIECES]
    return UNITS.get(gpu.capability[0], "mma") if gpu.vendor == "NVIDIA" else "mma"


def nearest(name: str, capability: tuple[int, int]) -> tuple[GPU, bool]:
    """(row, is it this card's own?): the row with the longest name in the device's, else the closest compute capability."""
    named = [row for row in GPUS if re.search(rf"\b{row.name}\b", name)]
    if named:
        return max(named, key=lambda row: len(row.name)), True
    distance = lambda row: abs((row.capability[0] - capability[0]) * 10 + row.capability[1] - capability[1])
    return min((row for row in GPUS if row.vendor == "NVIDIA"), key=distance), False


def current(device: torch.device | str | int | None = None) -> GPU:
    """The row of a CUDA device: sizes from the device itself, rates from its row or, for an unknown card, from the nearest.

    Without a CUDA device (or for a CPU device) the H100's row.
    """
    device = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    if device.type != "cuda":
        return DEFAULT
    return _current(device.index if device.index is not None else torch.cuda.current_device())


@functools.cache
def _current(index: int) -> GPU:
    found = torch.cuda.get_device_properties(index)
    capability = (found.major, found.minor)
    row, own = nearest(found.name, capability)
    block = getattr(found, "shared_memory_per_block_optin", row.shared_per_block)
    sm = getattr(found, "shared_memory_per_multiprocessor", row.shared_per_sm)
    source = row.source if own else f"sizes from the device; rates of the {row.name}, the nearest known card"
    return replace(row, name=row.name if own else found.name, capability=capability, sms=found.multi_processor_count,
                   shared_per_block=block // KIB * KIB, shared_per_sm=max(sm, block) // KIB * KIB,
                   registers=getattr(found, "regs_per_multiprocessor", row.registers),
                   l2=max(getattr(found, "L2_cache_size", row.l2), KIB ** 2) // KIB * KIB, source=source)
