"""Tiles of more than forty families of masks against brute force: none unsound, closed forms and run-time lists exact."""
from __future__ import annotations

import pytest
import torch

from flashfx.codegen import blocks
from flashfx.codegen.ranges import bounds
from flashfx.codegen.tiles import cut
from flashfx.expr import parse
from flashfx.reference import evaluate, index_grid
from flashfx.spec import BLOCK, FINE, AttentionSpec

GIVEN = {"length": ("int", 1), "prefix": ("int", 1), "start": ("int", 1), "on": ("bool", 1), "width": ("int", 1), "pad": ("bool", 2), "doc": ("int", 2),
         "kind": ("int", 2), "seen": ("bool", 2), "position": ("int", 2), "importance": ("float", 2), "pair": ("bool", 3), "block": ("bool", 2),
         "bias": ("float", 3), "window": ("int", 2)}

EXACT = {
    "causal": "j <= i", "strictly causal": "j < i", "anticausal": "j >= i", "causal with a cache": "j <= i + N - M", "sliding window": "(j <= i) & (i - j < 37)",
    "band": "abs(i - j) <= 21", "one-sided band": "(j >= i) & (j - i < 50)", "delayed": "j <= i - 19", "shifted window": "(j > i - 90) & (j <= i - 30)",
    "prefix of a size": "(j <= i) | (j < 33)", "first keys": "j < 70", "last keys": "j >= N - 45", "first queries": "i < 61", "corner": "(i < 70) & (j < 90)",
    "chunks": "i // 32 == j // 32", "chunks up to now": "j // 32 <= i // 32", "chunked causal": "(i // 24 == j // 24) & (j <= i)",
    "neighbouring chunks": "(j // 40 <= i // 40) & (j // 40 >= i // 40 - 1)", "lengths": "j < length[b]", "prefix lengths": "(j <= i) | (j < prefix[b])",
    "causal lengths": "(j <= i) & (j < length[b])", "starts": "(j >= start[b]) & (j <= i)", "windows of a batch": "(j <= i) & (i - j < width[b])",
    "on and off": "on[b] & (j <= i)", "everything": "True", "nothing": "i < 0",
}
"""A conjunction of half-planes and intervals, or a disjunction without a gap: the closed form of the range leaves nothing on the table."""

OTHERS = {
    "dilated": "(j - i) % 3 == 0", "dilated causal": "((j - i) % 5 == 0) & (j <= i)", "strided": "(j <= i) & ((i - j < 16) | ((i - j) % 16 == 0))",
    "fixed": "(j <= i) & ((i // 32 == j // 32) | (j % 32 >= 30))", "global tokens": "(j < 5) | (i < 5) | (abs(i - j) < 24)",
    "butterfly": "(bit_xor(i // 16, j // 16) == 0) | (bit_xor(i // 16, j // 16) == 1) | (bit_xor(i // 16, j // 16) == 4)", "checkerboard": "(i + j) % 2 == 0",
    "checkerboard of blocks": "(i // 64 + j // 64) % 2 == 0", "hole": "~((i - j > 40) & (i - j < 90))", "two bands": "(abs(i - j) < 9) | (abs(i - j - 120) < 9)",
    "exclusive": "(j < 60) ^ (i < 90)", "either way": "where(i < 100, j <= i, j > i - 20)", "alternating rows": "where(i % 2 == 0, j <= i, j < 40)",
    "padding": "pad[b, j]", "causal padding": "pad[b, j] & (j <= i)", "padded queries too": "pad[b, j] & pad[b, i]", "documents": "doc[b, i] == doc[b, j]",
    "causal documents": "(doc[b, i] == doc[b, j]) & (j <= i)", "windows in documents": "(doc[b, i] == doc[b, j]) & (abs(i - j) <= 30)",
    "later documents": "doc[b, j] <= doc[b, i]", "other documents": "doc[b, i] != doc[b, j]", "modalities": "(j <= i) | (kind[b, i] == kind[b, j]) & (kind[b, i] != 0)",
    "packed positions": "(doc[b, i] == doc[b, j]) & (position[b, j] <= position[b, i])", "per-head switches": "seen[h, j] | (i == j)",
    "important keys": "(importance[b, j] > 0.5) | (abs(i - j) < 10)", "pairs": "pair[b, i, j]", "causal pairs": "pair[b, i, j] & (j <= i)",
    "block mask": "block[i // 64, j // 64]", "block mask, causal": "block[i // 64, j // 64] & (j <= i)", "additive": "bias[h, i, j] > -inf",
    "windows of a query": "(j <= i) & (i - j < window[b, i])", "negated documents": "~((doc[b, i] == doc[b, j]) | pad[b, j])",
}
FAMILIES = EXACT | OTHERS


def spec(text: str) -> AttentionSpec:
    visible = parse(text, {n: kind for n, (kind, _) in GIVEN.items()})
    used = sorted({load.name for load in visible.loads})
    lines = ["attention[b, h, i, j]", *(f"given {n}: {GIVEN[n][0]}[{GIVEN[n][1]}]" for n in used), "qk = q[b, h, i] . k[b, h, j]", "score = qk",
             f"where {visible}", "empty zero", "out = softmax_j(score) . v[b, h, j]"]
    return AttentionSpec.parse("\n".join(lines))


def tensors(M: int, N: int, seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    size = max(M, N)
    draw = lambda high, *shape: torch.randint(0, high, shape, generator=g)
    scattered = torch.rand(2, size // 64 + 1, generator=g) < 0.5
    pair = (torch.rand(2, size // 64 + 1, size // 64 + 1, generator=g) < 0.4).repeat_interleave(64, 1).repeat_interleave(64, 2)[:, :M, :N]
    doc = draw(size // 60 + 2, 2, size).sort(-1).values
    return {"length": draw(N + 4, 2), "prefix": draw(N, 2), "start": draw(N, 2), "on": torch.tensor([True, False]), "width": draw(N, 2),
            "pad": scattered.repeat_interleave(64, 1)[:, :size], "doc": doc, "kind": (doc * 7 % 3), "seen": torch.rand(2, size, generator=g) < 0.02,
            "position": torch.arange(size).expand(2, size) % 97, "importance": torch.rand(2, size, generator=g) * (torch.arange(size) % 256 < 130),
            "pair": pair, "block": torch.rand(size // 64 + 1, size // 64 + 1, generator=g) < 0.4, "bias": torch.zeros(2, M, N).masked_fill(~pair, float("-inf")),
            "window": draw(60, 2, size)}


def truth(s: AttentionSpec, aux, M: int, N: int) -> torch.Tensor:
    env = index_grid(s, [2, 2], M, N, "cpu")
    return evaluate(s.visible, env, {a.name: t for a, t in zip(s.aux, aux)}, None, torch.float64).expand(2, 2, M, N)


def by_tiles(grid: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(any, all) of each tile; beyond the end nothing counts as visible, in `all` rows beyond the end do."""
    pad = lambda t, value: torch.nn.functional.pad(t, (0, -t.shape[1] % columns, 0, -t.shape[0] % rows), value=value)
    tiles = lambda t: t.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).movedim(1, 2).flatten(2)
    inside = torch.nn.functional.pad(torch.ones_like(grid), (0, 0, 0, -grid.shape[0] % rows), value=True)
    whole = torch.nn.functional.pad(grid, (0, 0, 0, -grid.shape[0] % rows), value=True) & inside
    return tiles(pad(grid, False)).any(-1), tiles(pad(whole, False)).all(-1)


SHAPES = ((257, 300, 32, 32), (200, 260, 64, 16), (96, 513, 16, 64), (384, 384, 64, 64))


def test_there_are_enough():
    assert len(FAMILIES) >= 40 and not set(EXACT) & set(OTHERS)
    tiles = sum(-(-M // BM) * -(-N // BN) for M, N, BM, BN in SHAPES)
    batches = sum(2 * (1 + ("h" in spec(text).visible.variables)) for text in FAMILIES.values())
    assert 2 * tiles * batches >= 10_000


def classified(s: AttentionSpec, aux, var: str, M: int, N: int, tile: int, step: int, b: int, h: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(visited, full) of each tile as the kernels cut them, along `var`."""
    found = bounds(s.visible, var)
    names, rows, columns = (("i0", "i1"), M, N) if var == "j" else (("j0", "j1"), N, M)
    first = torch.arange(0, rows, tile)
    env = {"M": M, "N": N, "b": torch.tensor(b), "h": torch.tensor(h), names[0]: first, names[1]: (first + tile).clamp(max=rows) - 1}
    given = {a.name: t for a, t in zip(s.aux, aux)}
    ends = [evaluate(e, env, given, None, torch.float64).expand(first.shape).tolist() for e in (found.lo, found.hi, found.full_lo, found.full_hi)]
    starts = torch.arange(0, columns, step)
    visited, full = [], []
    for row in zip(*ends):
        start, full_start, full_stop, stop = cut(*row, step)
        visited.append((starts >= start) & (starts < stop))
        full.append((starts >= full_start) & (starts < full_stop))
    return torch.stack(visited), torch.stack(full)


@pytest.mark.parametrize("name", FAMILIES)
def test_ranges_are_sound_and_closed_forms_exact(name):
    """Over tiles of keys for tiles of queries, and the other way round."""
    s = spec(FAMILIES[name])
    for seed, (M, N, BM, BN) in enumerate(SHAPES):
        given = tensors(M, N, seed)
        aux = [given[a.name] for a in s.aux]
        grid = truth(s, aux, M, N)
        for b in range(2):
            for h in range(2 if "h" in s.visible.variables else 1):
                for var, view, tile, step in (("j", grid[b, h], BM, BN), ("i", grid[b, h].T, BN, BM)):
                    some, every = by_tiles(view, tile, step)
                    visited, full = classified(s, aux, var, M, N, tile, step, b, h)
                    what = f"{name}, {var}, {M}x{N} in {tile}x{step}, seed {seed}"
                    assert not (some & ~visited).any(), f"a visible tile is skipped: {what}"
                    assert not (full & ~every).any(), f"a tile with a hidden element counts as full: {what}"
                    if name in EXACT and var == "j":
                        assert torch.equal(visited & ~some, torch.zeros_like(some)), f"an empty tile is visited: {what}"
                        assert torch.equal(full, every), f"a full tile is not read as such: {what}"


@pytest.mark.parametrize("name", FAMILIES)
def test_lists_are_exact(name, monkeypatch):
    monkeypatch.setattr(blocks, "interpreting", lambda: False)
    s = spec(FAMILIES[name])
    for seed, (M, N) in enumerate([(257, 600), (384, 384), (500, 130)]):
        given = tensors(M, N, seed)
        aux = [given[a.name] for a in s.aux]
        grid = truth(s, aux, M, N)
        q, k = torch.empty(2, 2, M, 1), torch.empty(2, 2, N, 1)
        rows, keys = (blocks.kinds_of(t) for t in blocks.lists_for(s, aux, [2, 2], q, k)[:2])
        own = [n for n, a in enumerate(s.axes) if a in s.visible.variables]
        for b in range(2):
            for h in range(2):
                at = tuple((b, h)[n] for n in own)
                for found, high in ((rows[at], BLOCK), (keys[at].T, FINE)):
                    some, every = by_tiles(grid[b, h], high, BLOCK)
                    assert torch.equal(found > 0, some) and torch.equal(found == 2, every), name
