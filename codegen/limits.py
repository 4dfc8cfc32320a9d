"""What a kernel of the portable schedule needs of shared memory, by tiles, and which specs need more than others, of registers too (`registers`)."""
from __future__ import annotations

import functools

from ..expr import Call, Load, Var, walk
from ..region import Problem
from ..spec import BLOCK, AttentionSpec
from .captured import grouped, is_relative
from .gpu import GPU, units
from .factors import peel
from .parts import APART, chunks
from .ranges import bounds
from .reads import across, averages, is_exchanged, is_gathered, told, vectors

WIDTHS = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@functools.cache
def padded(size: int, thirds: bool = False) -> int:
    """A head size as the sum of its pieces. thirds: as `Site.thirds`, where each has 64 columns."""
    return -(-size // 64) * 64 if thirds else sum(c.width for c in chunks(size))


@functools.lru_cache(maxsize=1024)
def has_steps(spec: AttentionSpec) -> bool:
    """Does the score need registers beside q . k: functions, a mask with two edges?"""
    if any(isinstance(x, Call) and x.row.cost in ("mufu", "div") and "j" in x.variables for x in walk(peel(spec.score)[0])):
        return True
    found = bounds(spec.visible, "j")
    return found.has_full and not found.starts_full


def is_heavy(spec: AttentionSpec, kernel: str) -> bool:
    """Does a kernel need many registers beside q . k: its steps, N x N loads, or (over rows) a mask and a loop over the queries that share keys?"""
    if has_steps(spec) or spec.dropout or across(spec, False) or kernel == "keys" and spec.is_masked and grouped(spec):
        return True
    found = bounds(spec.visible, "i")
    return kernel == "keys" and found.has_full and found.full_hi != Var("M")


def is_uneven(problem: Problem) -> bool:
    """Are heads wide, and in pieces of which some are narrow? On Hopper, backward's tiles of fewer than 64 rows then spill thousands of bytes."""
    head = max(problem.D, problem.Dv)
    return head > 128 and padded(head) % 64 > 0


def has_relative(spec: AttentionSpec) -> bool:
    """Does the score read a tensor at j - i?"""
    return any(is_relative(load) for load in spec.score.loads)


def shared_bytes(kernel: str, tiles: tuple[int, int, int, int], problem: Problem, spec: AttentionSpec, gpu: GPU, listed: bool = False,
                 packed: bool = False, descriptors: bool = True) -> int:
    """Bytes of shared memory that Triton's compiler takes for a kernel: its figure in 16 bits on NVIDIA cards from sm_80 on but sm_100, integers
    taken to have 64 bits and captured floats q's width. An upper bound for float32, tables that are gathered, tensors of integers for every query
    and key, transposed ones, any such tensor whose rows are no multiples of 16 elements, biases where rows average v, values four times as wide as q
    and k, one stage (but in the kernel over keys on sm_80 and sm_89), other head sizes than multiples of 16 where TMA does not read them, and the
    kernels "dense" and "one_tile".

    listed       tiles come from the mask's run-time summary
    packed       heads that share keys are rows of one tile, whose q TMA does not read
    descriptors  on Hopper: TMA reads tiles
    """
    m, n, warps, stages = tiles
    if kernel == "one_tile":  # operands, and what warps exchange, weights and dQ among it
        d, dv = padded(problem.D), padded(problem.Dv)
        ahead = 2 * m * (d + 2 * dv) * (stages > 1) + (2 * m * (d + dv) + 256) * max(0, stages - 2)
        return ahead + 2 * (m + n) * (d + dv) + max(4 * m * max(d, dv), 5 * m * n) + 4 * m * n * (len(across(spec)) + (spec.dropout > 0)) + 1024
    inner, outer = (m, n) if kernel == "keys" else (n, m)
    found, exact = units(problem, gpu), kernel != "dense" and _is_known(spec, problem)
    copies_ahead = found == "mma" and gpu.vendor == "NVIDIA" and gpu.capability >= (8, 0)
    exact &= found == "wgmma" and stages > 1 or copies_ahead and (stages > 1 or kernel == "keys")
    odd = problem.D % 16 or problem.Dv % 16  # TMA fills what lies beyond a head's end; else it is copied ahead where 16 bytes can be (`parts.multiples`)
    exact &= not odd or (descriptors if found == "wgmma" else problem.D % 8 == problem.Dv % 8 == 0)
    if exact and found == "wgmma":
        narrow = kernel == "forward" and max(problem.D, problem.Dv) < 64 and any(map(is_gathered, across(spec)))
        passing = 2 * m * n * narrow  # elements of a table, for which other buffers of such heads have no room
        return max(_stacked(kernel, tiles, problem, spec, listed, packed, descriptors) + passing, _behind_loops(kernel, tiles, problem, spec, hopper=True))
    if exact and listed and stages > 2 and all(told(kernel, spec, problem, cut, warps * 32 == inner) for cut in (False, True)):
        # the first stage reads where the tile is
        return max(shared_bytes(kernel, (m, n, warps, stages - 1), problem, spec, gpu) + 4, _behind_loops(kernel, tiles, problem, spec))
    if found == "bf16x6" and kernel != "dense":
        return _of_float32(kernel, tiles, problem, spec)
    d, dv = padded(problem.D) * WIDTHS[problem.dtype], padded(problem.Dv) * WIDTHS[problem.v_dtype]
    width = max(WIDTHS[problem.dtype], WIDTHS[problem.v_dtype])
    loaded = stages if found != "mma" else max(1, stages - 1)  # tiles of the inner loop: asynchronous products read theirs while the next is copied
    tiled = across(spec)
    tiled_loads = sum(_staged(load, kernel, tiles, problem) if exact or found == "wgmma" else WIDTHS["float32"] * m * n * loaded for load in tiled)
    exchanged = width == 4 or spec.dropout > 0 and not exact and (found != "wgmma" or kernel == "keys" or tiles[0] < 64)  # among threads
    more = tiled_loads + (4 * m * n + 4096) * exchanged
    if kernel == "dense":
        return loaded * (m + n) * (d + dv) + tiled_loads + 4 * m * n + m * n * width + 6144
    held = outer * (d + dv) if kernel != "forward" else outer * (d if problem.D == problem.Dv or exact else max(d, 2 * dv))
    total = loaded * inner * (d + dv) + held + more
    if kernel == "keys":  # the log-sum-exps of the rows to come, and a second vector where a thread has one element
        total += 4 * m * (max(1, stages - 1) + (warps * 32 == m and (found == "wgmma" or stages > 2)))
    total += sum(_vectors(kernel, tiles, problem, spec)[:1 + (not exact)])
    if found == "mma" and gpu.capability < (8, 0):  # no copies past the registers: both operands of every product pass through shared memory
        total += (inner + outer) * max(d, dv) + 2 * m * n
    elif found == "mma" and exact and stages == 1:
        return _in_turn(tiles, problem, spec, tiled_loads)
    elif found == "mma" and stages == 1:  # so they do where nothing is copied ahead
        total += inner * max(d, dv)
    elif found == "mma" and exact:
        gathered = sum(_staged(load, kernel, tiles, problem) for load in tiled if is_exchanged(load, kernel, problem))
        tiled_loads, total = tiled_loads - gathered, total - gathered
        passing = max(2 * m * n * (outer < _narrowest(kernel, problem)), gathered)
        if kernel == "keys" and spec.dropout:
            alike = outer == _narrowest(kernel, problem) == 32  # warps lie over products with queries as over those with rows
            passing = max(passing, m * n * (m * n < 128 * warps and not alike))  # threads share what one Philox call decides
            total += 4 * m * max(1, stages - 1)  # then delta is copied ahead too
        if kernel == "keys":
            return total - tiled_loads + max(tiled_loads, passing)
        return max(total + passing, _behind_loops(kernel, tiles, problem, spec))
    elif found == "wgmma" and outer >= 64:
        return total + 2048
    staged = {"keys": 2 * n, "rows": 2 * m}.get(kernel, 0) * max(d, dv) if gpu.capability[0] in (10, 11) else 0  # tensor memory is filled through it
    return total + m * n * width * (2 if kernel != "forward" else 1) + (m * dv if kernel == "forward" and problem.D == problem.Dv else 0) + staged + 2048


def _of_float32(kernel: str, tiles: tuple[int, int, int, int], problem: Problem, spec: AttentionSpec) -> int:
    """On Hopper, at most: three bfloat16 for each number of what is held and of a piece of the inner tile, which is copied ahead as it is."""
    m, n, warps, stages = tiles
    inner, outer, d, dv = *((m, n) if kernel == "keys" else (n, m)), *(-(-size // 32) * 32 for size in (problem.D, problem.Dv))
    total = 6 * (outer * (d if kernel == "forward" else d + dv) + inner * min(APART["bf16x6"], max(d, dv))) + 4 * (stages - 1) * inner * (d + dv)
    total += sum(4 * m * n * stages for _ in across(spec)) + sum(_vectors(kernel, tiles, problem, spec)) + 8 * m * stages * (kernel == "keys")
    return max(total, 4 * m * dv * (kernel == "forward")) + 4 * m * n + 4096


@functools.lru_cache(maxsize=4096)
def _loop(kernel: str, spec: AttentionSpec, problem: Problem) -> tuple[list[int], list[int], bool]:
    """(bytes of a row of each piece of a head of q or k, and of v; are there two loops, over full tiles and over those that a mask cuts?)."""
    rows = [[c.width * WIDTHS[dtype] for c in chunks(head)] for head, dtype in ((problem.D, problem.dtype), (problem.Dv, problem.v_dtype))]
    found = bounds(spec.visible, "i" if kernel == "keys" else "j")
    two = found.has_full and not (found.is_total and (kernel == "keys" or problem.N % BLOCK == 0))
    return *rows, two


def _vectors(kernel: str, tiles: tuple[int, int, int, int], problem: Problem, spec: AttentionSpec, cut: bool = True,
             width: int = 0) -> tuple[int, int]:
    """Of vectors that a loop reads: bytes that are copied ahead, integers, taken to have 64 bits, and floats; and bytes that exchange among
    threads what cannot be copied, where each has one element of less than four bytes. width: of a float in bytes, that of q's unless given."""
    kinds, width, (m, n, warps, stages) = vectors(kernel, spec, cut), width or WIDTHS[problem.dtype], tiles
    if not kinds:
        return 0, 0
    inner = m if kernel == "keys" else n
    one = warps * 32 == inner
    ahead = 8 * kinds.count("int") + width * kinds.count("float") * (width == 4 or not one)
    return inner * ahead * (stages - 1), inner * one * (width if "float" in kinds and width < 4 else "bool" in kinds)


def _behind_loops(kernel: str, tiles: tuple[int, int, int, int], problem: Problem, spec: AttentionSpec, hopper: bool = False) -> int:
    """At most, when nothing else is needed any more: results on their way to memory; in the forward kernel also the loop, without a list, in which
    rows that see no key average v: its tiles, and the weights where it divides tiles among warps in another way."""
    m, n, warps, stages = tiles
    widest, width = max(c.width for c in chunks(problem.Dv)), WIDTHS[problem.v_dtype]
    stored = m * widest * width * (kernel != "keys")
    if kernel != "forward" or not averages(spec, problem.M <= problem.N):
        return stored
    older = not hopper or m < 64
    weights = 2 * m * n * (older and 2 * m <= warps * widest)
    read = sum(_staged(load, kernel, tiles, problem) for load in spec.empty_over.loads if {"i", "j"} <= load.variables)
    return max(stored, weights + (stages - older) * (n * padded(problem.Dv) * width + 8 * hopper) + read)


def _stacked(kernel: str, tiles: tuple[int, int, int, int], problem: Problem, spec: AttentionSpec, listed: bool, packed: bool,
             descriptors: bool) -> int:
    """On Hopper: the buffers of the loops, over full tiles and over those that a mask cuts, and what the program holds throughout."""
    m, n, warps, stages = tiles
    q, v, two = _loop(kernel, spec, problem)
    keys = kernel == "keys"
    outer = n if keys else m
    older = outer < 64  # products whose operands come from registers
    two |= listed

    def ring(where: bool) -> list[tuple[int, int]]:
        places = listed and stages > 2 and told(kernel, spec, problem, where, warps * 32 == (m if keys else n))  # read by the first stage
        return _ring(kernel, (m, n, warps, stages - places), problem, spec, where, descriptors) + [(4, 16)] * places

    cut = ring(True)
    full = ring(False) if listed or two and spec.visible.loads else cut
    held = [(outer * row, 16 if older else min(1024, 8 * row)) for row in (q if kernel == "forward" else q + v)]
    if two and older and descriptors and not packed and kernel != "rows" and not (keys and max(problem.D, problem.Dv) > 128):
        held = []  # what TMA reads, as `backward.keys_kernel` says, is in registers before the first
    if two and full is not cut:
        return _placed(held, full, cut)
    held.sort(reverse=True)
    if not two:
        return _behind(sorted(held + cut, reverse=True))
    largest = max(cut)[0]  # loops alike lie in one place
    return _behind([*(b for b in held if b[0] >= largest), *sorted(cut, reverse=True), *(b for b in held if b[0] < largest)])


def _behind(buffers: list[tuple[int, int]]) -> int:
    """Bytes that buffers, (bytes, alignment), take one behind the other."""
    top = 0
    for size, place in buffers:
        top = -(-top // place) * place + size
    return top


def _ring(kernel: str, tiles: tuple[int, int, int, int], problem: Problem, spec: AttentionSpec, cut: bool,
          descriptors: bool) -> list[tuple[int, int]]:
    """On Hopper: (bytes, alignment) of a loop's buffers. cut: is the mask evaluated in it?"""
    m, n, warps, stages = tiles
    q, v, _ = _loop(kernel, spec, problem)
    ahead, exchanged = _vectors(kernel, tiles, problem, spec, cut)
    keys = kernel == "keys"
    inner, outer = (m, n) if keys else (n, m)
    older = outer < 64
    copies = stages - 1 if older else stages  # a tile is free when it has been read
    ring = [(copies * inner * row, 16 if older else min(1024, 8 * row)) for row in q + v]
    divided = older and outer < _narrowest(kernel, problem)
    exchanged = [2 * m * n * divided, exchanged]  # one after the other
    for load in across(spec, cut):
        staged = _staged(load, kernel, tiles, problem)
        if is_gathered(load) and older and warps == 8 and kernel != "forward":
            staged *= 2  # warps share rows, and each has all of them there
        if keys or is_exchanged(load, kernel, problem):
            exchanged.append(staged)
        else:
            ring.append((staged, 16))
    if keys and not spec.dropout:  # delta
        exchanged.append(4 * m * (warps * 32 == m))
    # pieces of an operand that is read transposed are awaited one by one
    barriers = 2 if not older else len(q) + (len(v) if kernel != "forward" else 1)
    ring += [(max(exchanged), 16)] + [(8 * copies, 16)] * (barriers * descriptors) + [(ahead, 16)]
    if keys:  # the log-sum-exps of the rows to come; with dropout delta too
        ring += [(4 * m * max(1, stages - 1), 16)] * (1 + (spec.dropout > 0))
    return [b for b in ring if b[0]]


def _placed(held: list[tuple[int, int]], *loops: list[tuple[int, int]]) -> int:
    """Bytes that buffers, (bytes, alignment), take: those of loops that run one after the other, and those held in all of them. As
    calculateStarts in Triton's lib/Analysis/Allocation.cpp: into the lowest free place goes the largest buffer that no other place could take."""
    every = (1 << len(loops)) - 1
    todo = [(size, place, every) for size, place in held] + [(size, place, 1 << number) for number, ring in enumerate(loops) for size, place in ring]
    todo.sort(key=lambda b: -b[0])
    free, top = [(0, every)], 0  # place -> in which loops it is free
    while todo:
        start, when = free.pop(0)
        elsewhere = 0
        for _, others in free:
            elsewhere |= others
        for chosen in todo:
            size, place, used = chosen
            if used & when and not used & elsewhere:
                break
        else:
            continue
        todo.remove(chosen)
        end = -(-start // place) * place + size
        top = max(top, end)
        free.append((end, when & used))
        if when & ~used:
            free.append((start, when & ~used))
        free.sort()
    return top


def _in_turn(tiles: tuple[int, int, int, int], problem: Problem, spec: AttentionSpec, staged: int) -> int:
    """The kernel over keys with one stage, on matrix units that take operands from registers: a tile of q lies there for two products, then one
    of dO, each exchanged among threads besides, as the transposed operand. staged: bytes that exchange tensors read across."""
    m, n, warps, _ = tiles
    q, v, _ = _loop("keys", spec, problem)
    divided = n < _narrowest("keys", problem)  # then each warp holds few rows of such an operand, and weights are exchanged too
    # rows that a thread holds before as after are exchanged in two halves
    exchanged = lambda row: m * row // (2 if not divided and 32 * warps * 16 // row < m else 1)
    weights = 2 * m * n * divided
    at_q = max(m * sum(q[:piece + 1]) + max(exchanged(row), staged) for piece, row in enumerate(q))
    at_v = max(m * sum(v[:piece + 1]) + exchanged(row) for piece, row in enumerate(v))
    at_v = max(at_v, m * sum(v) + weights)
    return n * sum(q + v) + max(at_q, m * sum(q) + at_v)


def _narrowest(kernel: str, problem: Problem) -> int:
    """Narrowest piece of the output, or of dK or dQ. Where a tile has fewer rows, warps divide its columns, and weights pass through shared
    memory on their way to an operand in registers."""
    return min(c.width for c in chunks(problem.Dv if kernel == "forward" else problem.D))


def _staged(load: Load, kernel: str, tiles: tuple[int, int, int, int], problem: Problem, width: int = 0) -> int:
    """Of a tensor with an element for every query and key: tiles in flight, or what exchanges them among threads, 16 bytes of each at a time.
    width: of a float in bytes, that of q's unless given."""
    m, n, warps, stages = tiles
    if kernel != "dense" and is_gathered(load):
        inner, outer = (m, n) if kernel == "keys" else (n, m)
        return outer * max(4 * min(inner, 32), (width or WIDTHS[problem.dtype]) * inner)
    if load.kind == "int" or load.index[-1] != Var("j") or kernel == "dense" and load.kind == "bool":
        return WIDTHS["float32"] * m * n * stages
    width = 1 if load.kind == "bool" else width or WIDTHS[problem.dtype]
    if kernel == "keys":  # transposed on the way; booleans all at once
        return m * n if width == 1 else min(512 * warps, width * m * n)
    if width < 4 and is_exchanged(load, kernel, problem):  # at most: the scores in float32, since elements lie among threads as they are read
        return m * n * (1 if width == 1 and kernel == "rows" else 4)
    return width * m * n * max(1, stages - 1)


def wider_bytes(kernel: str, tiles: tuple[int, int, int, int], problem: Problem, spec: AttentionSpec) -> int:
    """What more is needed if captured tensors are float32, which a plan is not told."""
    if kernel == "dense":
        return 0
    wider = _vectors(kernel, tiles, problem, spec, width=4)[0] - _vectors(kernel, tiles, problem, spec)[0]
    return wider + sum(_staged(load, kernel, tiles, problem, 4) - _staged(load, kernel, tiles, problem) for load in across(spec))


@functools.lru_cache(maxsize=4096)
def _is_known(spec: AttentionSpec, problem: Problem) -> bool:
    """Is all known that passes through shared memory, of tables that are gathered at most how much?"""
    if "float32" in (problem.dtype, problem.v_dtype):
        return False
    tiled = lambda load: load.kind != "int" and load.index[-1] == Var("j")
    plain = lambda load: len(load.variables & {"i", "j"}) < 2 and all(isinstance(x, Var) or not x.variables & {"i", "j"} for x in load.index)
    return all(tiled(load) or is_gathered(load) if {"i", "j"} <= load.variables else plain(load) for load in spec.loads)
