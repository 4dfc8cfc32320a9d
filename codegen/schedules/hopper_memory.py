"""Shared memory of the warp-specialised pair, as Triton allocates it: tiles and barriers, and what partitions are handed.

A partition other than the first gets the values that it names through shared memory, packed one behind the other
(`WarpSpecializeOp::getCaptureSizeAlign` in lib/Dialect/TritonGPU/IR/Ops.cpp). So what `schedules/hopper_forward.py` and
`schedules/hopper_backward.py` let their partitions name is listed here.
"""
from __future__ import annotations

import functools
from math import prod
from typing import Sequence

from ...expr import INT, QK, Const, Load, Var
from ...region import Problem
from ...spec import BLOCK, AttentionSpec
from ..captured import ends
from ..derivative import partial as derivative
from ..factors import split_factor
from ..order import long_first
from ..limits import padded
from ..parts import Site, chunks
from ..ranges import bounds
from ..reads import averages
from .hopper import BY_THIRDS, THIRD, is_laden
from .hopper_captured import gradient_dims, mask_loads, outermost, shares
from .hopper_keys import goes_past_of
from .hopper_locate import by_host, takes_key_tiles, takes_row_tiles, tells, visits_together
from .hopper_vectors import WORDS, compared, groups, vector_bytes, vectors, shares_words

ROWS = 64
BARRIER = 8
NUMBER, ADDRESS = 4, 8
"""What a partition is handed: a 32-bit number; a pointer, a tensor map or a seed."""


def _buffer(rank: int) -> int:
    """A buffer in shared memory as a partition is handed it: its address, and an offset for each dimension."""
    return 8 + 4 * rank


def stacked(buffers: list[tuple[int, int]]) -> int:
    """Buffers, (bytes, alignment), that are all in use at once, as lib/Analysis/Allocation.cpp places them: the largest first."""
    top = 0
    for size, place in sorted(buffers, reverse=True):
        top = -(-top // place) * place + size
    return top


@functools.cache
def _pieces(size: int) -> tuple[int, ...]:
    return tuple(c.width for c in chunks(size))


def _tiles(copies: int, rows: int, widths: Sequence[int]) -> list[tuple[int, int]]:
    """Buffers of `copies` tiles, one for each piece of a head; TMA's swizzle wants eight rows aligned."""
    return [(copies * rows * w * 2, min(1024, 16 * w)) for w in widths]


def _captured_tiles(spec: AttentionSpec, m: int, n: int, stages: int, tiled: Sequence[str]) -> list[tuple[int, int]]:
    return [(stages * 2 * m * n, 1024) for load in spec.score.loads if load.name in tiled]


def q_tiles(spec: AttentionSpec, problem: Problem, m: int, n: int, stages: int, tiled: Sequence[str]) -> int:
    """Is there shared memory for the next query rows while the output is stored from the place of the ones before?"""
    held = sum(size for size, _ in _forward_tiles(spec, problem, m, n, stages, tiled, 1)) + 2048 + vector_bytes(spec, m, n, stages)
    return 1 + (held + 2 * m * sum(_pieces(problem.D)) <= 227 * 1024)


@functools.lru_cache(maxsize=4096)
def stores_directly(spec: AttentionSpec, problem: Problem, listed: bool) -> bool:
    """As `hopper_output.stores_directly`."""
    laden = listed or is_laden(spec, max(problem.D, problem.Dv)) and not bounds(spec.visible, "j").is_total
    return len(_pieces(problem.Dv)) > 1 and (QK in spec.score.leaves and any(map(ends, spec.score.loads)) or laden)


def _staged_apart(problem: Problem, directly: bool) -> tuple[int, ...]:
    """Widths of the pieces of the output that TMA stores, but not from where q was."""
    q, v = _pieces(problem.D), _pieces(problem.Dv)
    return tuple(w for n, w in enumerate(v[:1] if directly else v) if n >= len(q) or q[n] != w)


def _forward_tiles(spec: AttentionSpec, problem: Problem, m: int, n: int, stages: int, tiled: Sequence[str], queries: int,
                   directly: bool = False) -> list[tuple[int, int]]:
    q, v = _pieces(problem.D), _pieces(problem.Dv)
    found = _tiles(queries * m // ROWS, ROWS, q) + _tiles(stages, n, q) + _tiles(stages, n, v)
    found += _tiles(m // ROWS, ROWS, _staged_apart(problem, directly)) + _captured_tiles(spec, m, n, stages, tiled)
    return found + [((stages + 1) * m * n, 1024)] * len(mask_loads(spec, tiled))


def shared_bytes(kernel: str, spec: AttentionSpec, problem: Problem, m: int, n: int, stages: int, tiled: Sequence[str] = (), listed: bool = False,
                 stored: str = "", turns: bool = False) -> int:
    """Shared memory that the compiler takes for a kernel; an upper bound where tables get no gradient, integers have 32 bits,
    dQ is summed in order, or the spec names sizes.
    stored, turns: as of `Plan`."""
    tiled = tuple(tiled)
    if kernel == "forward":
        queries = q_tiles(spec, problem, m, n, stages, tiled)
        found = _forward_tiles(spec, problem, m, n, stages, tiled, queries, stores_directly(spec, problem, listed))
        found += [((stages + 1) * 2 * n, 16)] * len(WORDS) * shares_words(spec, max(problem.D, problem.Dv))
        if not is_counted(spec):
            return sum(size for size, _ in found) + vector_bytes(spec, m, n, stages) + 2048
        found += [(queries * m * _element(load), 16) for load in vectors(spec, "i")]
        found += [((stages + 1) * n * _element(load), 16) for load in vectors(spec, "j")]
        found += [(queries * NUMBER, 16)] * (2 * listed) + [((stages + 1) * NUMBER, 16)] * (listed + bool(compared(spec)))
        uneven = not bounds(spec.visible, "j").is_total
        found += [(queries * NUMBER * number, 16) for number in [_told(spec, problem, tiled, listed)] if number]
        found += [(queries * BARRIER, 16)] * 2 + [(stages * BARRIER, 16)] * 4
        # the last: a byte for each warp of the other partitions
        return stacked([*found, (_forward_handed(spec, problem, tiled, uneven, listed), 8), (m // ROWS * 4, 4)])
    q, v = _pieces(problem.D), _pieces(problem.Dv)
    split = _is_split(problem)
    keys = 2 if split else 1  # tiles of them
    late = split and stages > 2  # `hopper_keys.frees_late`
    thirds = n == BY_THIRDS
    wide, single = _is_wide(problem), _has_single_do(problem, thirds)
    paired = not (split or wide)  # `hopper_keys.adds_apart`
    if thirds:
        found = _thirds_tiles(problem, m, stages, single)
    else:
        found = _tiles(stages, m, q) + _tiles(1 if single else stages, m, v) + _tiles(keys, n, q) + _tiles(keys, n, v) + [(m * min(w, 128) * 4, 1024) for w in q]
        found += [((stages if split else 1) * 2 * m * n, 1024)] * (1 + wide) + _captured_tiles(spec, m, n, stages, tiled)
    found += [(stages * m * n, 1024)] * len(mask_loads(spec, tiled))
    if not is_counted(spec):
        rows = 3 + sum(2 for load in spec.loads if load.variables & {"i", "j"} == {"i"})  # of 4 bytes
        sums = 8 * n * sum(map(ends, spec.score.loads))  # beyond the ends of tables
        by_key = sum("j" in load.variables and "i" not in load.variables for load in spec.loads)  # vectors of 8 bytes an element at most
        return sum(size for size, _ in found) + stages * (4 * rows * m + sums) + keys * 8 * n * by_key + 2048
    found += [(stages * 4 * m, 16)] * (2 + averages(spec)) + [(stages * m * _element(load), 16) for load in _at(spec, "i")]
    found += [(keys * (128 if thirds else n) * _element(load), 16) for load in _at(spec, "j")] + [(8 * n, 16)] * _sums(spec)
    apart = _is_apart(spec, problem, tiled, listed)
    found += [(keys * BARRIER, 16)] * (3 if split or apart else 2) + [(stages * BARRIER, 16)] * (5 if split and not late else 4 if split else 2 if paired else 3 - single)
    found += [(BARRIER, 16)] * (2 * single)
    others = [a for a in spec.axes if a not in spec.k | spec.v]
    documents = takes_key_tiles(spec, tiled, max(problem.D, problem.Dv), listed, bool(stored))
    pairs = paired and any({"i", "j"} <= load.variables for load in spec.visible.loads)
    before = not split and (spec.dropout > 0 or pairs)  # as `hopper_keys` says
    by_key = 4 + len(spec.axes) - len(others) + before + 2 * documents + len(goes_past_of(spec, max(problem.D, problem.Dv), listed, documents))
    told = keys * by_key, 2 * stages * (1 + bool(others or paired) + len(others) + documents)
    found += [(NUMBER * number, 16) for number in told]
    return stacked([*found, (_backward_handed(spec, problem, tiled, n, split, late, paired, stored, listed, documents, turns), 8), (12 if split or thirds else 4, 4)])


def _thirds_tiles(problem: Problem, m: int, stages: int, single: bool) -> list[tuple[int, int]]:
    """As `hopper_thirds.reserve_operands`."""
    q, v = -(-problem.D // 64), -(-problem.Dv // 64)
    found = _tiles(stages * q, m, [64]) + _tiles(v if single else stages * v, m, [64]) + [(q * m * 64 * 4, 1024)]
    for rows in (64, THIRD):
        found += _tiles(q, rows, [64]) + _tiles(v, rows, [64]) + [(2 * m * rows, 512)] * 2
    return found


def _is_split(problem: Problem) -> bool:
    """As `hopper_keys.is_split`."""
    return max(problem.D, problem.Dv) <= 64


def _is_wide(problem: Problem) -> bool:
    """As `hopper_keys.is_wide`."""
    return max(problem.D, problem.Dv) > 128


def _has_single_do(problem: Problem, thirds: bool) -> bool:
    """As `hopper_keys.has_single_do`."""
    return padded(problem.D, thirds) + padded(problem.Dv, thirds) > 384 - thirds


def _is_apart(spec: AttentionSpec, problem: Problem, tiled: Sequence[str], listed: bool) -> bool:
    """As `hopper_keys.is_apart`."""
    pieces = len(_pieces(problem.D)) + len(_pieces(problem.Dv))
    slopes = {"i", "j"} <= split_factor(derivative(spec.score, QK))[0].variables
    beside = tiled or spec.dropout or slopes or takes_key_tiles(spec, tiled, max(problem.D, problem.Dv), listed) if listed or spec.visible.loads else _at(spec, "j")
    return not _is_split(problem) and (pieces > 2 or _is_wide(problem) or bool(beside))


@functools.lru_cache(maxsize=1024)
def is_counted(spec: AttentionSpec) -> bool:
    """Is what partitions are handed known? Not of sizes that the spec names."""
    return not spec.sizes and bool(spec.axes)


def _element(load: Load) -> int:
    """Bytes of an element of a ring; integers taken to have 64 bits."""
    return 8 if load.kind == INT else 4


MOST = 6
"""As `hopper_keys` and `hopper_producer` have it."""


@functools.lru_cache(maxsize=1024)
def _at(spec: AttentionSpec, index: str) -> tuple[Load, ...]:
    """Captured vectors that the one warp of backward reads, at "i" or "j" alone."""
    if index == "i":
        return tuple(load for load in spec.loads if load.variables & {"i", "j"} == {"i"})[:MOST]
    return tuple(load for load in spec.loads if "j" in load.variables and load.variables & {"i", *spec.axes} <= {"j", *spec.k})[:MOST]


@functools.lru_cache(maxsize=1024)
def _sums(spec: AttentionSpec) -> int:
    """Tables beyond whose ends backward adds up dS (`relative.summed`), taken to get gradients."""
    rest = lambda e: split_factor(derivative(spec.score, e))[0]
    return sum(ends(load) and rest(load) == rest(QK) for load in spec.score.loads)


def _loads(spec: AttentionSpec, tiled: Sequence[str], wanted: Sequence[Load]) -> int:
    """Of captured tensors: a tile's ring and tensor map; of others that are `wanted`, address and strides but the last, which is 1."""
    found, strides = 0, {}
    for load in dict.fromkeys(spec.loads):
        if load.name in tiled:
            found += (_buffer(1 + len(load.index)) + ADDRESS) * (load.name not in strides)
            strides[load.name] = set()
        elif load in wanted:
            strides.setdefault(load.name, set()).update(d for d, x in enumerate(load.index[:-1]) if x != Const(0))
    return found + sum(ADDRESS + NUMBER * len(dims) for name, dims in strides.items() if name not in tiled)


@functools.lru_cache(maxsize=4096)
def _forward_handed(spec: AttentionSpec, problem: Problem, tiled: Sequence[str], uneven: bool, listed: bool) -> int:
    """To the second warpgroup and the warp that copies, in bytes."""
    extents, pieces, v_pieces = problem.extents, len(_pieces(problem.D)), len(_pieces(problem.Dv))
    q, k, v, out = (_buffer(3 + len(axes)) for axes in (spec.q, spec.k, spec.v, spec.axes))
    directly = stores_directly(spec, problem, listed)
    apart = takes_row_tiles(spec, tiled, max(problem.D, problem.Dv), listed)  # some of their output goes to memory from registers
    maps = ADDRESS * 2 * (pieces + v_pieces) + NUMBER * (1 + len(spec.axes)) * (directly or apart)  # instead of a map for a piece of it its address and strides
    maps += ADDRESS * (apart and not directly)
    rings = pieces * (q + k) + v_pieces * v + len(_staged_apart(problem, directly)) * out + 6 * _buffer(2)
    first = visits_together(spec, tiled)  # how many batch indices there are
    beside = (3 * listed + bool(compared(spec)) + len(vectors(spec, "i")) + len(vectors(spec, "j"))) * _buffer(2) + ADDRESS * listed
    host = by_host(spec, tiled, max(problem.D, problem.Dv))  # works out what is made of sizes, which is handed too, and always
    alone = uneven and not host  # the warp that copies works out the number of tiles
    known = not alone and (not first or host and not outermost(spec, tiled, spec.axes))  # a batch index is decoded without the first extent
    sizes = NUMBER * (3 - alone + sum(e != 1 for e in extents[known:]) + host * (1 + 2 * first))  # M, N, number of tiles
    if listed:
        # lists of a batch index; their length, and N only where that is asked for
        sizes += NUMBER * (bool(spec.mask().axes) + names_length(spec, problem, tiled))
    beside += _buffer(2) * (_told(spec, problem, tiled, listed) > 0) + _buffer(3) * len(WORDS) * shares_words(spec, max(problem.D, problem.Dv))
    return maps + rings + sizes + ADDRESS + ADDRESS * uneven + ADDRESS * (spec.dropout > 0) + _loads(spec, tiled, spec.loads) + beside


def names_length(spec: AttentionSpec, problem: Problem, tiled: Sequence[str]) -> bool:
    """Do partitions of a forward that takes tiles from lists name N: to tell which batch indices go together, to hide keys beyond it, not to read there, or
    for a position?"""
    site = Site(spec, problem.D, problem.Dv, problem.dtype, problem.v_dtype, wide=problem.M <= problem.N,
                whole=problem.N % BLOCK == 0 and not takes_row_tiles(spec, tiled, max(problem.D, problem.Dv), True))
    read = any("j" in load.variables and load.name not in tiled for load in spec.loads)
    named = any(map(ends, spec.score.loads)) or any(Var("N") in e.leaves for e in (spec.score, spec.visible, spec.empty_over))
    grouped = visits_together(spec, tiled) and not by_host(spec, tiled, max(problem.D, problem.Dv))
    return grouped or not site.whole and (read or not site.hides_beyond) or named


@functools.lru_cache(maxsize=4096)
def _told(spec: AttentionSpec, problem: Problem, tiled: Sequence[str], listed: bool) -> int:
    """How many numbers the one warp of forward tells the warpgroups (`hopper_locate.told_of`)."""
    found = bounds(spec.visible, "j")
    if found.is_total and not listed:
        return 0
    if not listed and not tells(spec, max(problem.D, problem.Dv)):
        return 1
    whole = problem.N % BLOCK == 0 and found.full_hi == Var("N")
    return 2 + len(spec.axes) + (takes_row_tiles(spec, tiled, max(problem.D, problem.Dv), listed) if listed else 1 + (found.lo != Const(0)) + found.has_full * ((not found.starts_full) + (not whole)))


def _of_the_warp(spec: AttentionSpec, listed: bool) -> tuple[Load, ...]:
    """Captured tensors that the one warp of backward reads itself."""
    found = bounds(spec.visible, "i")
    limits = () if listed else (found.lo, found.hi, *((found.full_lo, found.full_hi) if found.has_full else ()))
    return (*_at(spec, "i"), *_at(spec, "j"), *(load for e in limits for load in e.loads))


def _reads_ends(spec: AttentionSpec, tiled: Sequence[str]) -> bool:
    """Does a warpgroup of backward ask for the last key: of tensors that it reads itself, or of a mask of two kinds?"""
    by_hand = any({"i", "j"} <= load.variables and load.name not in tiled for load in spec.loads)
    closed = groups(spec, "i")
    return by_hand or all(closed) and any(Var("j1") in e.leaves for c in closed[0] for f in [bounds(c, "i")] for e in (f.full_lo, f.full_hi))


@functools.lru_cache(maxsize=4096)
def _backward_handed(spec: AttentionSpec, problem: Problem, tiled: Sequence[str], n: int, split: bool, late: bool, paired: bool, stored: str, listed: bool,
                    documents: bool, turns: bool) -> int:
    """To the second warpgroup, the one for dQ and the warp that copies; to that and the one that adds dQ, or to that alone, where one partition multiplies. In bytes."""
    extents = dict(zip(spec.axes, problem.extents))
    pieces, v_pieces, found = len(_pieces(problem.D)), len(_pieces(problem.Dv)), bounds(spec.visible, "i")
    q, k, v, out = (_buffer(3 + len(axes)) for axes in (spec.q, spec.k, spec.v, spec.axes))
    total = ADDRESS * (2 * pieces + 2 * v_pieces + 3)  # tensor maps of Q, K, V and dO; log-sum-exp, delta and the counter
    thirds = n == BY_THIRDS
    if thirds:  # one buffer and map for all pieces, and keys in two; the gradients' maps, dQ's tile, P and dS
        pieces = v_pieces = 1
        total = 14 * ADDRESS + k + v + pieces * q + 4 * _buffer(3)
    total += pieces * (q + k) + v_pieces * (v + out) + 4 * _buffer(2) + (8 - late if split else 5 - paired + _is_apart(spec, problem, tiled, listed)) * _buffer(2)
    total += _buffer(2) * _has_single_do(problem, thirds)
    total += _loads(spec, tiled, spec.loads if split or thirds else _of_the_warp(spec, listed)) + ADDRESS * (thirds and spec.dropout > 0)
    total += (len(_at(spec, "i")) + len(_at(spec, "j")) + averages(spec)) * _buffer(2) + ADDRESS * (listed or averages(spec))
    ends = () if listed else (found.lo, found.hi, *((found.full_lo, found.full_hi) if found.has_full else ()))
    uneven = problem.N % BLOCK > 0 or thirds
    # a batch index of keys is decoded without the extent of the first axis, one of queries likewise
    first = next((a for a in spec.axes if a in spec.k), "")
    known = [a for a in spec.axes if a != first or set(spec.axes) - spec.k and a != spec.axes[0]]
    numbers = 4 + sum(extents[a] != 1 for a in known)  # M, and with padding; numbers of tiles in all and of a batch index
    if documents:  # the lists say how many tiles there are of a batch index
        numbers += (first not in known and extents.get(first, 1) != 1) - 2
        total += ADDRESS + 2 * ADDRESS * split  # their order; dK and dV
        uneven = split
    numbers += (uneven and (split or thirds or listed or found.has_full or found.is_total) or any(e.leaves & {Var("j1"), Var("N")} for e in ends)
                or bool(_at(spec, "j")) or split and _reads_ends(spec, tiled))  # N
    mine = [a for a in spec.axes if a in spec.k | spec.v]
    if (turns or documents or not listed) and (documents or Var("j0") in found.lo.leaves and found.hi == Var("M") or shares(spec, tiled, mine)):  # batch indices that go together
        batches = prod(e for a, e in extents.items() if a in spec.k | spec.v)
        rows = problem.M * prod(problem.extents) // max(1, batches)
        row = 6 * sum(_pieces(problem.D)) + 2 * sum(_pieces(problem.Dv))
        numbers += long_first(batches, -(-problem.N // n), rows * row / 1024)[0] != 1
        numbers += bool(outermost(spec, tiled, mine)) and first not in known and extents[first] != 1
    if listed:
        numbers += bool(spec.mask().axes) + bool(_at(spec, "i") and not documents)  # lists of a batch index; their length in place of M
    if paired:
        total += ADDRESS * pieces + pieces * q  # dQ, its tile
    if split:
        total += ADDRESS * (2 * pieces + v_pieces) + pieces * q + ADDRESS * (spec.dropout > 0)  # dQ, dK, dV; dQ's tile
        total += ADDRESS + _buffer(3 + gradient_dims(spec, stored)) if stored else _buffer(3)  # dS
        total += (ADDRESS + _buffer(2)) * _sums(spec) + NUMBER * (_sums(spec) > 0)
    return total + NUMBER * numbers
