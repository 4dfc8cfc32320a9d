"""What a kernel of the portable schedule needs: shared memory and registers, by tiles, and which specs need more than others."""
from __future__ import annotations

import functools

from ..expr import QK, Call, Load, Var, walk
from ..region import Problem
from ..spec import BLOCK, AttentionSpec
from .captured import is_relative
from .gpu import GPU
from .factors import peel
from .parts import chunks
from .ranges import bounds

WIDTHS = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@functools.cache
def padded(size: int) -> int:
    """A head size as the sum of its pieces."""
    return sum(c.width for c in chunks(size))


def grouped(spec: AttentionSpec) -> bool:
    """Do several queries' batch indices share keys and values?"""
    return not set(spec.axes) <= spec.k | spec.v


@functools.lru_cache(maxsize=1024)
def _across(spec: AttentionSpec) -> tuple[Load, ...]:
    """Reads of tensors with an element for every query and key."""
    return tuple(load for load in spec.loads if {"i", "j"} <= load.variables)


@functools.lru_cache(maxsize=1024)
def has_steps(spec: AttentionSpec) -> bool:
    """Does the score need registers beside q . k: functions, a mask with two edges?"""
    if any(isinstance(x, Call) and x.row.cost in ("mufu", "div") and "j" in x.variables for x in walk(peel(spec.score)[0])):
        return True
    found = bounds(spec.visible, "j")
    return found.has_full and not found.starts_full


def is_heavy(spec: AttentionSpec, kernel: str) -> bool:
    """Does a kernel need many registers beside q . k: its steps, N x N loads, or (over rows) a mask and a loop over the queries that share keys?"""
    if has_steps(spec) or spec.dropout or any({"i", "j"} <= load.variables for load in spec.score.loads) or kernel == "keys" and spec.is_masked and grouped(spec):
        return True
    found = bounds(spec.visible, "i")
    return kernel == "keys" and found.has_full and found.full_hi != Var("M")


def has_relative(spec: AttentionSpec) -> bool:
    """Does the score read a tensor at j - i?"""
    return any(is_relative(load) for load in spec.score.loads)


UNITS = {9: "wgmma", 10: "tcgen05", 11: "tcgen05"}
"""By the first number of the compute capability."""


def units(problem: Problem, gpu: GPU) -> str:
    """Which units multiply: "fma" (float32, exact), "wgmma" (Hopper), "tcgen05" (Blackwell's data centre cards), "mma" (all others)."""
    if "float32" in (problem.dtype, problem.v_dtype):
        return "fma"
    return UNITS.get(gpu.capability[0], "mma") if gpu.vendor == "NVIDIA" else "mma"


def shared_bytes(kernel: str, tiles: tuple[int, int, int, int], problem: Problem, spec: AttentionSpec, gpu: GPU) -> int:
    """Shared memory that Triton's compiler takes for a kernel: its figure where `is_exact`, in 16 bits and without loaded masks, else an upper bound."""
    m, n, warps, stages = tiles
    inner, outer = (m, n) if kernel == "keys" else (n, m)
    found, across = units(problem, gpu), _across(spec)
    exact = kernel != "dense" and _is_known(spec, problem, gpu, outer, stages)
    if exact and found == "wgmma":
        return _stacked(kernel, tiles, problem, spec, sum([_staged(load, kernel, tiles, problem) for load in across]))
    d, dv = padded(problem.D) * WIDTHS[problem.dtype], padded(problem.Dv) * WIDTHS[problem.v_dtype]
    width = max(WIDTHS[problem.dtype], WIDTHS[problem.v_dtype])
    loaded = stages if found != "mma" else max(1, stages - 1)  # tiles of the inner loop: asynchronous products read theirs while the next is copied
    tiled_loads = sum(_staged(load, kernel, tiles, problem) if exact or found == "wgmma" else WIDTHS["float32"] * m * n * loaded for load in across)
    exchanged = width == 4 or spec.dropout > 0 and not exact and (found != "wgmma" or kernel == "keys" or tiles[0] < 64)  # among threads
    more = tiled_loads + (4 * m * n + 4096) * exchanged
    if kernel == "dense":
        return loaded * (m + n) * (d + dv) + tiled_loads + 4 * m * n + m * n * width + 6144
    held = outer * (d + dv) if kernel != "forward" else outer * (d if problem.D == problem.Dv else max(d, 2 * dv))
    total = loaded * inner * (d + dv) + held + more
    if kernel == "keys":  # the log-sum-exps of the rows to come, and a second vector where a thread has one element
        total += 4 * m * (max(1, stages - 1) + (warps * 32 == m and (found == "wgmma" or stages > 2)))
    if found == "mma" and gpu.capability < (8, 0):  # no copies past the registers: both operands of every product pass through shared memory
        total += (inner + outer) * max(d, dv) + 2 * m * n
    elif found == "mma" and stages == 1:  # so they do where nothing is copied ahead
        total += inner * max(d, dv)
    elif found == "mma" and exact:
        narrowest = min(c.width for size in (problem.D, problem.Dv) for c in chunks(size))
        passing = 2 * m * n * (outer < narrowest)  # weights on their way to an operand, unless that lies where q came through
        if kernel == "keys" and spec.dropout:
            passing = max(passing, _random_bits(m, n, warps))
            total += 4 * m * max(1, stages - 1)  # then delta is copied ahead too
        return total - tiled_loads + max(tiled_loads, passing) if kernel == "keys" else total + passing
    elif found == "wgmma" and outer >= 64:
        return total + 2048
    staged = {"keys": 2 * n, "rows": 2 * m}.get(kernel, 0) * max(d, dv) if gpu.capability[0] in (10, 11) else 0  # tensor memory is filled through it
    return total + m * n * width * (2 if kernel != "forward" else 1) + (m * dv if kernel == "forward" and problem.D == problem.Dv else 0) + staged + 2048


def _is_known(spec: AttentionSpec, problem: Problem, gpu: GPU, outer: int, stages: int) -> bool:
    """Is the compiler's figure known of a kernel that holds so many rows of the outer operand?"""
    found = units(problem, gpu)
    if found == "wgmma" and outer < 64:
        one_piece = padded(problem.D) * WIDTHS[problem.dtype] == padded(problem.Dv) * WIDTHS[problem.v_dtype] <= 256 and len(chunks(problem.D)) == 1
        return one_piece and is_exact(spec, problem)
    if found == "wgmma":
        return is_exact(spec, problem, False)
    return found == "mma" and gpu.vendor == "NVIDIA" and gpu.capability >= (8, 0) and stages > 1 and is_exact(spec, problem, False)


@functools.lru_cache(maxsize=4096)
def _loop(kernel: str, spec: AttentionSpec, problem: Problem) -> tuple[list[int], list[int], bool, bool]:
    """(bytes of a row of each piece of a head of q or k, and of v; are there two loops, over full tiles and over those that a mask cuts?; are tensors read across?)."""
    rows = [[c.width * WIDTHS[dtype] for c in chunks(head)] for head, dtype in ((problem.D, problem.dtype), (problem.Dv, problem.v_dtype))]
    found = bounds(spec.visible, "i" if kernel == "keys" else "j")
    two = found.has_full and not (found.is_total and (kernel == "keys" or problem.N % BLOCK == 0))
    return *rows, two, bool(_across(spec))


def _stacked(kernel: str, tiles: tuple[int, int, int, int], problem: Problem, spec: AttentionSpec, staged: int) -> int:
    """On Hopper: a loop's buffers by size, the largest first, as Triton's allocator (lib/Analysis/Allocation.cpp) places them. Where there are two loops,
    each has its own in the same place, and what the program holds throughout lies in front of them or behind. staged: bytes of tensors read across."""
    m, n, warps, stages = tiles
    q, v, two, across = _loop(kernel, spec, problem)
    keys = kernel == "keys"
    inner, outer = (m, n) if keys else (n, m)
    older = outer < 64  # products whose operands come from registers: a tile is free when it has been read, and weights are exchanged through shared memory
    copies = stages - 1 if older else stages
    held = sorted(((outer * row, 16 if older else min(1024, 8 * row)) for row in (q if kernel == "forward" else q + v)), reverse=True)
    ring = [(copies * inner * row, 16 if older else min(1024, 8 * row)) for row in q + v]
    ring += [(_random_bits(m, n, warps), 16)] * (keys and spec.dropout > 0)
    largest = max(ring)[0]
    ring += [(8 * copies, 16)] * 2 + [(2 * m * n, 16)] * older + [(staged, 16)] * across  # barriers, weights
    if keys:  # the log-sum-exps of the rows to come, and a second vector where a thread has one element
        second = 4 * m * (warps * 32 == m and not older and not across)
        if spec.dropout:  # then delta is copied ahead too
            second = 4 * m * max(1, stages - 1)
        ring += [(4 * m * max(1, stages - 1), 16)] + [(second, 16)] * (second > 0)
    if two and older and kernel != "rows":
        held = []  # read into registers before the first
    parts = [b for b in held if b[0] >= largest], sorted(ring, reverse=True), [b for b in held if b[0] < largest]
    top = 0
    for part in parts if two else (sorted(held + ring, reverse=True),):
        for size, place in part:
            top = -(-top // place) * place + size
    return top


def _random_bits(m: int, n: int, warps: int) -> int:
    """Of dropout in the kernel over keys, whose tile is drawn as other kernels see it, then transposed: what the warps, 16 keys each, have at once."""
    return 2 * m * min(n, 16 * warps)


def _staged(load: Load, kernel: str, tiles: tuple[int, int, int, int], problem: Problem, width: int = 0) -> int:
    """Of a tensor with an element for every query and key: tiles in flight, or what exchanges them among threads, 16 bytes of each at a time.
    width: of an element in bytes, that of q's unless given."""
    m, n, warps, stages = tiles
    if load.kind != "float" or load.index[-1] != Var("j"):
        return WIDTHS["float32"] * m * n * stages
    width = width or WIDTHS[problem.dtype]
    return min(512 * warps, width * m * n) if kernel == "keys" else width * m * n * max(1, stages - 1)


def wider_bytes(kernel: str, tiles: tuple[int, int, int, int], problem: Problem, spec: AttentionSpec) -> int:
    """What more is needed if captured tensors are float32, which a plan is not told."""
    return 0 if kernel == "dense" else sum(_staged(load, kernel, tiles, problem, 4) - _staged(load, kernel, tiles, problem) for load in _across(spec))


@functools.lru_cache(maxsize=4096)
def is_exact(spec: AttentionSpec, problem: Problem, older: bool = True) -> bool:
    """Does `shared_bytes` know what the compiler takes? older: for products whose operands come from registers; Hopper's take captured tensors and dropout too."""
    if spec.visible.loads or "float32" in (problem.dtype, problem.v_dtype) or problem.D % 16 or problem.Dv % 16:
        return False
    if older:
        return peel(spec.score)[0] == QK and not spec.dropout
    tiled = lambda load: {"i", "j"} <= load.variables and load.kind == "float" and load.index[-1] == Var("j")
    return all(tiled(load) or not {"i", "j"} & load.variables for load in spec.loads)


REGISTERS = {
    # kernel -> (fixed, of accumulators, of a tile of scores, of its further steps, of a tensor with an element for each, of dropout for each, of a
    # mask, of queries that share keys, of eight warps, of the inner operands, of several pieces). Least squares over 880 builds for sm_90, rms 11.
    "forward": (2, 1.03, 1.79, 0.36, 0.52, 0.63, 21, 0, 9, 0.11, 0),
    "rows": (0, 1.51, 2.12, 0.71, 0.48, 1.29, 7, 0, 4, 0.0, 0),
    "keys": (16, 1.12, 2.36, 1.13, 0.07, 1.81, 1, 37, 3, 0.0, 7),
    "dense": (115, 1.03, 1.03, 0.0, 1.03, 0.63, 0, 0, 0, 0.05, 0),
}
LIMIT = {"forward": 246, "rows": 237, "keys": 262, "dense": 216}
"""Predictions from which on some kernel for sm_90 spilled."""


@functools.lru_cache(maxsize=1024)
def _element(kernel: str, spec: AttentionSpec) -> tuple[float, float]:
    """Of `REGISTERS`, by the spec alone: for each element of a tile of scores, and for queries that share keys."""
    _, _, scores, steps, loads, random, _, shared, *_ = REGISTERS[kernel]
    across = _across(spec)
    addresses = any(load.index[-1] != Var("j") for load in across)  # of each element
    each = scores + steps * has_steps(spec) + loads * bool(across) + 4 * addresses + random * (spec.dropout > 0)
    return each, shared * (spec.is_masked and grouped(spec))


def registers_per_thread(kernel: str, tiles: tuple[int, int, int, int], problem: Problem, spec: AttentionSpec) -> float:
    """Predicted registers of a thread, as if there were no limit of 255."""
    m, n, warps, _ = tiles
    d, dv, threads = padded(problem.D), padded(problem.Dv), 32 * warps
    fixed, accumulators, scores, _, _, _, masked, _, wide, operands, pieces = REGISTERS[kernel]
    each, shared = _element(kernel, spec)
    held = m * dv if kernel == "forward" else n * (d + dv) if kernel == "keys" else m * d if kernel == "rows" else m * n
    inner, rows = (m, n) if kernel == "keys" else (n, m)
    found = (fixed + (accumulators * held + each * m * n + operands * inner * (d + dv)) / threads + masked * spec.is_masked
             + shared + wide * (warps == 8) + pieces * (len(chunks(max(problem.D, problem.Dv))) > 1))
    found += 6 * bool(spec.visible.loads)
    if kernel == "forward" and m == 16:  # decoding: twelve builds, within 6; eighteen with pieces of a head of 16 columns, within 40
        widths = [c.width for size in (problem.D, problem.Dv) for c in chunks(size)]
        narrow = 20 + 0.0185 * n * max(d, dv) if min(widths) == 16 and max(widths) > 16 else 0
        return 44 + (1.15 * (held + m * n) + (each - scores) * m * n) / threads + masked * spec.is_masked + narrow
    if kernel == "dense" or rows >= 16 * warps and rows >= 64:
        return found
    if rows >= 64:  # warps that divide the columns: what belongs to a row is there several times
        return 1.45 * found + (20 if spec.is_masked or grouped(spec) else 5)
    return found + 80 + 2 * (m * n / threads - 8) + 40 * (spec.dropout > 0 and grouped(spec))  # operands of the older instruction lie in registers


def resident(gpu: GPU, warps: int, shared: int, registers: float) -> int:
    """Programs that a multiprocessor holds at once, by shared memory (of which the driver takes 1 KiB a program), registers and threads."""
    own = 32 * warps * (min(int(registers) + 8, 255) // 8 * 8)
    return max(1, min(gpu.shared_per_sm // (shared + 1024), gpu.registers // own, 2048 // (32 * warps)))
