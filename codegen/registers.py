"""Registers of a thread of the portable kernels on Hopper, predicted: elsewhere tiles are those that were compiled (`largest`, `exact`)."""
from __future__ import annotations

import functools

from ..expr import QK, Var
from ..region import Problem
from ..spec import BLOCK, AttentionSpec
from .captured import grouped, is_overfull
from .derivative import partial as derivative
from .gpu import GPU
from .limits import has_steps, is_uneven, padded
from .parts import chunks
from .reads import ROW, across

REGISTERS = {
    # kernel -> (fixed, of accumulators, of a tile of scores, of its further steps, of a tensor with an element for each, of dropout for each, of a
    # mask, of queries that share keys, of eight warps, of the inner operands, of several pieces). Least squares over 880 builds for sm_90, rms 11.
    "forward": (2, 1.03, 1.79, 0.36, 0.52, 0.63, 21, 0, 9, 0.11, 0),
    "rows": (0, 1.51, 2.12, 0.71, 0.48, 1.29, 7, 0, 4, 0.0, 0),
    "keys": (16, 1.12, 2.36, 1.13, 0.07, 1.81, 1, 37, 3, 0.0, 7),
    "one_tile": (60, 1.0, 1.2, 1.13, 0.5, 1.81, 1, 37, 3, 0.0, 7),
    "dense": (115, 1.03, 1.03, 0.0, 1.03, 0.63, 0, 0, 0, 0.05, 0),
}
LIMIT = {"forward": 246, "rows": 237, "keys": 262, "one_tile": 262, "dense": 216}
"""Predictions from which on some kernel for sm_90 spilled."""
ONE_BY_ONE = 96
"""Elements of output and scores in a thread, from which on forward and rows spill where tensors are read across one by one, up to 3 KB in 64 builds."""


@functools.lru_cache(maxsize=1024)
def _by_spec(kernel: str, spec: AttentionSpec) -> tuple[float, float, float, bool]:
    """By the spec alone: of `REGISTERS`, for each element of scores, and for queries that share keys; more of any tile; are tensors read across in order?"""
    _, _, scores, steps, loads, random, masked, shared, *_ = REGISTERS[kernel]
    tiled = across(spec)
    addresses = any(load.index[-1] != Var("j") for load in tiled)  # of each element
    bits = 0.7 * (kernel == "keys" and any(load.kind == "bool" for load in tiled))  # a byte each
    each = scores + steps * has_steps(spec) + loads * bool(tiled) + 4 * addresses + bits + random * (spec.dropout > 0)
    more = masked * spec.is_masked + 6 * bool(spec.visible.loads)
    if kernel == "rows":  # a slope of each row, read again for dS
        more += 50 * any({"i", "j"} & load.variables == {"i"} for load in derivative(spec.score, QK).loads)
    if kernel == "keys":
        two = spec.is_masked and not spec.visible.loads and not grouped(spec)  # loops
        more += 26 * (two and len(across(spec, False)) > 0)  # a tensor's tile in each
        more += (44 + 60 * is_overfull(spec)) * (spec.dropout > 0 and any(x.loads for load in spec.score.loads for x in load.index))  # a table that ends
    return each, shared * (spec.is_masked and grouped(spec)), more, any(load.index[-1] == Var("j") for load in tiled)


def registers_per_thread(kernel: str, tiles: tuple[int, int, int, int], problem: Problem, spec: AttentionSpec) -> float:
    """Predicted registers of a thread, as if there were no limit of 255."""
    m, n, warps, _ = tiles
    d, dv, threads = padded(problem.D), padded(problem.Dv), 32 * warps
    fixed, accumulators, scores, _, _, _, masked, _, wide, operands, pieces = REGISTERS[kernel]
    each, shared, more, one_by_one = _by_spec(kernel, spec)
    one_by_one &= problem.N % ROW > 0
    each += 0.8 * (one_by_one and kernel == "keys")
    held = m * dv if kernel == "forward" else n * (d + dv) if kernel in ("keys", "one_tile") else m * d if kernel == "rows" else m * n
    inner, rows = (m, n) if kernel in ("keys", "one_tile") else (n, m)
    found = (fixed + (accumulators * held + each * m * n + operands * inner * (d + dv)) / threads + more
             + shared + wide * (warps == 8) + pieces * (len(chunks(max(problem.D, problem.Dv))) > 1))
    found += _wide(kernel, spec, d + dv, problem.N % BLOCK > 0) if d + dv > 256 else 0
    if kernel == "keys" and d != dv and spec.is_masked:  # 8 bytes spilled at (192, 128), by 32 keys
        found += 17 + 40 * (m > 64)
    found += 100 * (one_by_one and kernel in ("forward", "rows") and held + m * n >= ONE_BY_ONE * threads)  # beyond any limit
    if kernel == "forward" and m == 16:  # decoding: twelve builds, within 6; eighteen with pieces of a head of 16 columns, within 40
        widths = [c.width for size in (problem.D, problem.Dv) for c in chunks(size)]
        narrow = 20 + 0.0185 * n * max(d, dv) if min(widths) == 16 and max(widths) > 16 else 0
        return 44 + (1.15 * (held + m * n) + (each - scores) * m * n) / threads + masked * spec.is_masked + narrow
    if kernel in ("keys", "rows") and is_uneven(problem):
        divided = 20 + 24 * (spec.dropout > 0) + (12 + 12 * has_steps(spec)) * (inner > 16) + 40 * (inner > 32)  # warps divide the columns
        return found + 20 * len(chunks(max(problem.D, problem.Dv))) + divided * (rows < 16 * warps)
    if kernel == "dense" or rows >= 16 * warps and rows >= 64:
        return found
    if rows >= 64:  # warps that divide the columns: what belongs to a row is there several times
        return 1.45 * found + (20 if spec.is_masked or grouped(spec) else 5)
    return found + 80 + 2 * (m * n / threads - 8) + 40 * (spec.dropout > 0 and grouped(spec))  # operands of the older instruction lie in registers


@functools.lru_cache(maxsize=1024)
def _wide(kernel: str, spec: AttentionSpec, columns: int, uneven: bool) -> float:
    """More registers of backward where heads are wide: over rows behind the last tile, which keys do not fill, and of a score that reads numbers; over
    keys of rows that end where data say, and where queries share keys and nothing is masked."""
    if kernel == "rows":
        return 12 * uneven + 4 * any(not {"i", "j"} <= load.variables for load in spec.score.loads)
    if kernel == "forward":
        return 0
    data_ends = any(not {"i", "j"} & load.variables for load in spec.visible.loads)
    return 32 * data_ends + 40 * (columns > 448 and grouped(spec) and not spec.is_masked)


def resident(gpu: GPU, warps: int, shared: int, registers: float) -> int:
    """Programs that a multiprocessor holds at once, by shared memory (of which the driver takes 1 KiB a program), registers and threads."""
    own = 32 * warps * (min(int(registers) + 8, 255) // 8 * 8)
    return max(1, min(gpu.shared_per_sm // (shared + 1024), gpu.registers // own, 2048 // (32 * warps)))
