"""Run-time summaries of masks whose range has no closed form, above all of those that only the data decides: for each block of queries the blocks of keys that it sees, and the reverse.

    flashfx::block_lists(like, aux, sizes, mask) -> (rows, keys)

`mask` is the text of `AttentionSpec.mask()`: the mask alone, over the axes on which it depends, so that layers, heads, forward and
backward share one summary. With R = ceil(M / BLOCK), F = ceil(M / FINE) and C = ceil(N / BLOCK)

    rows  int32 (*extents, R, 2 + C): of each row of blocks of BLOCK rows and keys [number partly visible, number fully visible, the
          partly visible ones, the fully visible ones, the hidden ones], each of the three ascending
    keys  int32 (*extents, C, 2 + F): the same of each column of blocks of FINE rows and BLOCK keys, as kernels over keys step; where rows that
          see no key average v, blocks with such rows count as partly visible: gradients of all keys pass through them

    flashfx::document_tiles(like, aux, sizes, mask) -> (row_tiles, key_tiles)

is for the Hopper schedules: tiles that begin where documents do, as `flashfx.codegen.schedules.documents` says.

Memory is O(blocks). Kernels give the same results without the lists.
"""
from __future__ import annotations

import functools
import math
from typing import Mapping, Sequence

import torch

from ..compat import interpreting
from ..reference import evaluate, index_grid
from ..region import Problem
from ..spec import BLOCK, FINE, AttentionSpec
from .reads import averages
from .schedules import documents
from .schedules.blocks import EMPTY, FULL, PARTIAL
from .tiles import TileCounts, cut, tile_bounds

Lists = tuple[torch.Tensor, torch.Tensor]
Summary = tuple[torch.Tensor, torch.Tensor, bool]
"""Lists of blocks, or tiles; are they of `document_tiles`?"""

CHUNK = 1 << 22
"""Elements of a mask evaluated at a time on the CPU."""
SAMPLE = 2048
"""Queries and keys at most on which a mask over indices alone is tried at compile time."""
STEP = 32
"""From one to the next of the rows that are looked at first: they find most blocks that a mask cuts."""
SUMMARISED_FROM = 2 ** 19
"""Queries times keys from which a summary pays: below, its few small kernels cost more than the tiles that it could skip."""


def pays(spec: AttentionSpec, problem: Problem) -> bool:
    """Is the mask worth a run-time summary: are there enough tiles, and do data decide them or has their range no good closed form?"""
    if not spec.is_masked or problem.M == 1 or problem.M * problem.N < SUMMARISED_FROM:
        return False
    if any(load in spec.score.loads and {*spec.axes, "i", "j"} <= load.variables for load in spec.visible.loads):
        return False  # a mask that each batch index has to itself and the score reads anyway: to summarise it is to read it all once more
    return spec.is_data_masked or not spec.visible.loads and _closed_form_wastes(spec.mask(), min(problem.M, SAMPLE), min(problem.N, SAMPLE),
                                                                                  tuple(dict(zip(spec.sizes, problem.sizes)).items()))


@functools.lru_cache(maxsize=1024)
def _closed_form_wastes(mask: AttentionSpec, M: int, N: int, sizes: tuple) -> bool:
    """Of the blocks that a mask over indices alone leaves of M queries and N keys: does the range that the kernels derive visit a quarter
    more, or evaluate the mask in a quarter more than it cuts? So it does for dilated, global and butterfly patterns, not for causal ones."""
    extents, given, rows = [2] * len(mask.axes), [dict(sizes)[s] for s in mask.sizes], -(-M // BLOCK)
    ends = tile_bounds(mask, BLOCK, M, N, [*extents, *given])
    visits, cuts, alike = [0] * rows, [0] * rows, math.prod(extents) * rows // len(ends)  # blocks of each row of blocks
    for number, found in enumerate(ends):
        start, full_start, full_stop, stop = cut(*found[:4], BLOCK)
        beside = -((start - full_start) // BLOCK + (full_stop - stop) // BLOCK)
        cuts[number % rows] += alike * beside
        visits[number % rows] += alike * (beside - (full_start - full_stop) // BLOCK)
    wastes = lambda seen, partial: sum(visits) > 1.25 * sum(seen) or sum(cuts) > 1.25 * sum(partial) + 4
    # what is known of blocks that are seen, and of those that the mask cuts, row by row; the more there are, the less is wasted
    size = [*extents, M, N, *given]
    least, most = _counted(mask, size, slice(0, M, STEP), BLOCK // STEP), ([*visits], [*cuts])
    for row in sorted(range(rows), key=lambda row: -visits[row]):
        if not wastes(*least) or wastes(*most):
            break
        (seen,), (partial,) = _counted(mask, size, slice(row * BLOCK, min((row + 1) * BLOCK, M)), BLOCK)
        for known in (least, most):
            known[0][row], known[1][row] = seen, partial
    return wastes(*least)


def _counted(mask: AttentionSpec, sizes: Sequence[int], rows: slice, height: int) -> tuple[list[int], list[int]]:
    """Of each row of blocks, `height` of these rows: how many blocks are seen, and how many of them the mask cuts. Arguments as `evaluated`."""
    visible = _visible(mask, [], sizes, torch.device("cpu"), rows, slice(None))
    of_block = lambda x, beyond: _by_block(_by_block(x, beyond).any(-1).mT, False, height).any(-1).mT
    seen = of_block(visible, False)
    across = [*range(seen.dim() - 2), -1]
    return seen.sum(across).tolist(), (seen & of_block(~visible, True)).sum(across).tolist()


def shape(mask: AttentionSpec, sizes: Sequence[int]) -> tuple[list, list]:
    """Shapes of `rows` and `keys`; works on SymInts too. sizes = extents of the mask's axes, M, N, then its sizes."""
    n = len(mask.axes)
    R, F, C = -(-sizes[n] // BLOCK), -(-sizes[n] // FINE), -(-sizes[n + 1] // BLOCK)
    return [*sizes[:n], R, 2 + C], [*sizes[:n], C, 2 + F]


def block_lists(mask: AttentionSpec, aux: Sequence[torch.Tensor], sizes: Sequence[int], like: torch.Tensor) -> Lists:
    """(rows, keys) as the module's docstring says, on the device of `like`. sizes = extents of the mask's axes, M, N, then its sizes."""
    n = len(mask.axes)
    if 0 in sizes[: n + 2]:
        return tuple(torch.zeros(s, dtype=torch.int32, device=like.device) for s in shape(mask, sizes))
    if like.is_cuda or interpreting():
        from .triton_host import run_block_lists
        return run_block_lists(mask, aux, sizes, like)
    kinds = evaluated(mask, aux, sizes, like.device)
    return _listed(joined(kinds)), _listed(over_keys(kinds, mask, aux, sizes, like.device).mT)


def tiles_shape(mask: AttentionSpec, sizes: Sequence[int]) -> tuple[list, list]:
    """Shapes of `row_tiles` and `key_tiles`; arguments as `shape`."""
    n = len(mask.axes)
    return documents.shapes(math.prod(sizes[:n]), *sizes[n: n + 2])


def document_tiles(mask: AttentionSpec, aux: Sequence[torch.Tensor], sizes: Sequence[int], like: torch.Tensor) -> Lists:
    """(row_tiles, key_tiles) as the module's docstring says, on the device of `like`; arguments as `block_lists`. Where only the pure-torch schedule runs, which reads
    no such tiles, they are zeros."""
    if 0 in sizes[: len(mask.axes) + 2] or not (like.is_cuda or interpreting()):
        return tuple(torch.zeros(s, dtype=torch.int32, device=like.device) for s in tiles_shape(mask, sizes))
    from .triton_host import run_document_tiles
    return run_document_tiles(mask, aux, sizes, like)


def tiles_for(spec: AttentionSpec, aux: Sequence[torch.Tensor], sizes: Sequence[int], q: torch.Tensor, k: torch.Tensor) -> Summary:
    """As `lists_for`, of `document_tiles`."""
    return *document_tiles(*of_mask(spec, aux, sizes, q, k), q), True


def lists_for(spec: AttentionSpec, aux: Sequence[torch.Tensor], sizes: Sequence[int], q: torch.Tensor, k: torch.Tensor) -> Summary:
    """The lists of a whole spec's mask: `aux` and `sizes` as the attention op takes them (extents of all axes first)."""
    return *block_lists(*of_mask(spec, aux, sizes, q, k), q), False


def of_mask(spec: AttentionSpec, aux, sizes, q, k) -> tuple[AttentionSpec, list[torch.Tensor], list[int]]:
    """The mask, its captured tensors and its sizes, from those of the whole spec."""
    mask, table = spec.mask(), dict(zip((*spec.axes, *spec.sizes), sizes))
    tensors = {a.name: t for a, t in zip(spec.aux, aux)}
    return mask, [tensors[a.name] for a in mask.aux], [*(table[a] for a in mask.axes), q.shape[-2], k.shape[-2], *(table[s] for s in mask.sizes)]


def _listed(kinds: torch.Tensor) -> torch.Tensor:
    """before -> after: [0, 2, 1, 2, 1] -> [2, 2, 2, 4, 1, 3, 0]"""
    order = torch.where(kinds == EMPTY, 2, kinds - 1).to(torch.uint8).sort(dim=-1, stable=True).indices
    counts = [(kinds == kind).sum(-1, keepdim=True) for kind in (PARTIAL, FULL)]
    return torch.cat([*counts, order], -1).to(torch.int32)


def joined(kinds: torch.Tensor) -> torch.Tensor:
    """Kinds (*extents, R, C) of blocks of BLOCK rows from those (*extents, F, C) of FINE rows: what both halves have in common.

    before -> after: [[0, 2, 1], [0, 2, 2], [0, 2, 1]] -> [[0, 2, 1], [0, 2, 1]]
    """
    first, second = kinds[..., ::2, :], kinds[..., 1::2, :]
    second = torch.cat([second, first[..., second.shape[-2]:, :]], -2)
    return torch.where(first == second, first, PARTIAL)


def kinds_of(lists: torch.Tensor) -> torch.Tensor:
    """Kinds (*extents, lines, blocks) from the lists of rows or keys: the inverse of how they were made."""
    partial, full, order = lists[..., :1], lists[..., 1:2], lists[..., 2:].long()
    position = torch.arange(order.shape[-1], device=lists.device)
    kinds = torch.where(position < partial, PARTIAL, torch.where(position < partial + full, FULL, EMPTY))
    return torch.empty_like(order).scatter_(-1, order, kinds)


def evaluated(mask: AttentionSpec, aux: Sequence[torch.Tensor], sizes: Sequence[int], device: torch.device) -> torch.Tensor:
    """Kinds (*extents, F, C) by evaluating the mask, a strip of FINE rows at a time, in plain PyTorch."""
    n = len(mask.axes)
    extents, (M, N) = list(sizes[:n]), sizes[n: n + 2]
    width = max(1, CHUNK // (FINE * BLOCK * max(1, math.prod(extents)))) * BLOCK
    strips = []
    for i in range(0, M, FINE):
        pieces = []
        for j in range(0, N, width):
            visible = _visible(mask, aux, sizes, device, slice(i, i + FINE), slice(j, j + width))
            some = _by_block(visible.any(-2)).any(-1)
            every = _by_block(visible.all(-2)).all(-1)
            pieces.append(some.long() + every.long())
        strips.append(torch.cat(pieces, -1))
    return torch.stack(strips, -2)


def over_keys(kinds: torch.Tensor, mask: AttentionSpec, aux: Sequence[torch.Tensor], sizes: Sequence[int], device: torch.device) -> torch.Tensor:
    """Those of `evaluated` as `keys` has them: where empty rows average v, their blocks are partly visible to all keys."""
    if not averages(mask):
        return kinds
    strips = [_visible(mask, aux, sizes, device, slice(i, i + FINE), slice(None)).any(-1) for i in range(0, sizes[len(mask.axes)], FINE)]
    return kinds.masked_fill(torch.stack([~seen.all(-1) for seen in strips], -1)[..., None], PARTIAL)


def _visible(mask: AttentionSpec, aux: Sequence[torch.Tensor], sizes: Sequence[int], device: torch.device, rows: slice, cols: slice) -> torch.Tensor:
    """The mask itself, (*extents, rows, cols)."""
    n = len(mask.axes)
    env = index_grid(mask, [*sizes[:n], *sizes[n + 2:]], *sizes[n: n + 2], device, rows, cols)
    found = evaluate(mask.visible, env, {a.name: t for a, t in zip(mask.aux, aux)}, None, torch.float32)
    return found.expand(*sizes[:n], env["i"].shape[-2], env["j"].shape[-1])


def count(spec: AttentionSpec, BLOCK_M: int, BLOCK_N: int, M: int, N: int, sizes: Sequence[int], tensors: Mapping[str, torch.Tensor]) -> TileCounts:
    """Forward tiles over all batch indices as kernels with these lists visit them. sizes = extents of the axes, then `spec.sizes`.

    Costs O(M * N): it evaluates the mask.
    """
    mask, table = spec.mask(), dict(zip((*spec.axes, *spec.sizes), sizes))
    given = [*(table[a] for a in mask.axes), M, N, *(table[s] for s in mask.sizes)]
    kinds = joined(evaluated(mask, [tensors[a.name].cpu() for a in mask.aux], given, torch.device("cpu")))
    rest = math.prod(table[a] for a in spec.axes if a not in mask.axes)
    rows, columns = (_tiles_of(length, tile) for length, tile in ((M, BLOCK_M), (N, BLOCK_N)))
    visited = {kind: int(((kinds == kind) * rows[:, None] * columns).sum()) * rest for kind in (FULL, PARTIAL)}
    total = int(rows.sum() * columns.sum()) * math.prod(table[a] for a in spec.axes)
    return TileCounts(total - sum(visited.values()), visited[FULL], visited[PARTIAL])


def _tiles_of(length: int, tile: int) -> torch.Tensor:
    """How many tiles each block has."""
    starts = torch.arange(0, length, BLOCK)
    return -(-(length - starts).clamp(max=BLOCK) // tile)


def _by_block(x: torch.Tensor, beyond: bool = False, size: int = BLOCK) -> torch.Tensor:
    """(…, n) -> (…, blocks, size), the last block filled up with `beyond`."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % size), value=beyond).unflatten(-1, (-1, size))
