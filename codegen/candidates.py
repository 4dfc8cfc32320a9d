"""Tiles that a kernel could have: what fits in shared memory and registers, for the cost model to choose from."""
from __future__ import annotations

from ..region import Problem
from ..spec import AttentionSpec
from .gpu import GPU
from .plan import padded, registers_per_thread, shared_bytes, units

Tiles = tuple[int, int, int, int]
"""(BLOCK_M, BLOCK_N, num_warps, num_stages)."""


def portable(kernel: str, spec: AttentionSpec, problem: Problem, gpu: GPU, limit: float = 208) -> list[Tiles]:
    """Of the portable schedule. limit: registers for accumulators and score tiles."""
    found = units(problem, gpu)
    outer = problem.N if kernel == "keys" else problem.M  # rows of the first product: what a program holds
    big = max(padded(problem.D), padded(problem.Dv)) > 128
    least = (32 if big else 64) if found == "wgmma" and outer >= 64 else 16
    most = 128 if outer > 64 else max(16, 1 << (outer - 1).bit_length())
    tiles = []
    for first in (16, 32, 64, 128):
        if not least <= first <= most:
            continue
        for second in (16, 32, 64, 128):
            if second < 32 and found == "wgmma":
                continue
            m, n = (second, first) if kernel == "keys" else (first, second)
            for warps in (4, 8):
                if warps == 8 and (m * n < 2048 or found == "wgmma" and not big and first < 128 and m * n < 64 * 64):
                    continue
                fits = [s for s in ((1,) if found == "fma" or kernel == "dense" else (2, 3))
                        if shared_bytes(kernel, (m, n, warps, s), problem, spec, gpu) <= gpu.shared_per_block
                        and registers_per_thread(kernel, (m, n, warps, s), problem) <= limit]
                tiles += [(m, n, warps, s) for s in fits]
    return tiles


def hopper(kernel: str, problem: Problem) -> list[Tiles]:
    head = max(padded(problem.D), padded(problem.Dv))
    if kernel == "keys":
        return [(64, 128, 12, s) for s in (1, 2)] if head <= 64 else [(64, 128, 8, 2), (64, 128, 8, 1)]
    return [(m, n, m // 64 * 4, s) for m in (128, 192) for n in (32, 64, 128) for s in (2, 3) if m == 128 or head <= 64]
