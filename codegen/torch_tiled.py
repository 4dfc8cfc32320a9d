"""The schedule for machines without a GPU, and the readable reference of what the generated kernels do: FlashAttention-2
(Dao 2023, algorithms 1 and 2) in plain PyTorch, over tiles of query rows and key rows, every batch index at once.

Memory is O(M + N): a few tiles of scores are the largest temporaries. Tiles that the mask hides wholly are skipped. Arithmetic is
float32, or float64 when any of q, k, v is. The log-sum-exp is all that the backward pass needs to rebuild the weights:

* a row that saw keys stores m + log(sum);
* an empty row of kind MEAN or MEAN_ADD stores (number of keys averaged) * 2**100, which no real row can reach;
* an empty row of kind ZERO or NAN stores -inf and passes no gradient on.
"""
from __future__ import annotations

import math
from typing import Iterator, Sequence

import torch

from ..expr import FALSE, QK
from ..reference import evaluate, index_grid
from ..spec import BLOCK, MEAN_ROW, AttentionSpec, EmptyRow
from . import captured
from .blocks import kinds_of
from .derivative import partial
from .layout import empty_lse, empty_output
from .philox import keep_mask, kept_scale
from .schedules.blocks import EMPTY, FULL, PARTIAL

TILE_ELEMENTS = 1 << 22
"""Scores per tile, over all batch indices: 16 MiB of float32, which stays in a large cache."""


def tile_sizes(batch: int, M: int, N: int) -> tuple[int, int]:
    """Rows and columns of a tile, all columns where that leaves some rows; depends on sizes alone, so that repeats are bit-identical."""
    rows = min(M, max(16, TILE_ELEMENTS // max(1, max(512, N) * batch)))
    return rows, min(N, max(16, TILE_ELEMENTS // max(1, rows * batch)))


def _compute_dtype(*tensors: torch.Tensor) -> torch.dtype:
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def _spans(length: int, tile: int) -> Iterator[slice]:
    return (slice(start, min(start + tile, length)) for start in range(0, length, tile))


class _Site:
    """One call: operands in the compute dtype's view, and the tile-wise pieces both passes share."""

    def __init__(self, spec: AttentionSpec, q, k, v, aux, seed, sizes: Sequence[int], tiles, blocks=None):
        self.spec, self.q, self.k, self.v, self.sizes = spec, q, k, v, sizes
        self.extents = tuple(int(e) for e in sizes[: len(spec.axes)])
        self.M, self.N = q.shape[-2], k.shape[-2]
        self.tensors = {a.name: t for a, t in zip(spec.aux, aux)}
        self.dtype = _compute_dtype(q, k, v)
        self.batch = math.prod(self.extents)
        self.tiles = tiles or tile_sizes(self.batch, self.M, self.N)
        self.kinds = None
        if blocks is not None and not blocks[2]:
            kinds = kinds_of(blocks[0])
            kinds = kinds.reshape(-1, *kinds.shape[-2:])  # a tile holds every batch index
            self.kinds = None if 0 in kinds.shape else (kinds.amin(0), kinds.amax(0))
            self.tiles = tiles or tuple(min(t, BLOCK) for t in self.tiles)
        self.is_empty = self.batch == 0 or self.M == 0 or self.N == 0
        if spec.dropout and not self.is_empty:
            self.seed = int(seed)
            self.z = torch.arange(self.batch, device=q.device).reshape(*self.extents, 1, 1)

    def scores(self, rows: slice, cols: slice):
        """(index grid, q . k, visible) of one tile; visible is None where nothing is hidden, False where everything is."""
        env = index_grid(self.spec, self.sizes, self.M, self.N, self.q.device, rows, cols)
        visible = None
        known = self._known(rows, cols)
        if known == EMPTY:
            return env, None, False
        if self.spec.is_masked and known != FULL:
            visible = evaluate(self.spec.visible, env, self.tensors, None, self.dtype)
            if not visible.any():
                return env, None, False
        dot = None
        if QK in self.spec.score.leaves:
            dot = self.q[..., rows, :].to(self.dtype) @ self.k[..., cols, :].to(self.dtype).mT
        return env, dot, visible

    def _known(self, rows: slice, cols: slice) -> int:
        """What the mask's summary says about one tile."""
        if self.kinds is None:
            return PARTIAL
        least, most = (k[rows.start // BLOCK: -(-rows.stop // BLOCK), cols.start // BLOCK: -(-cols.stop // BLOCK)] for k in self.kinds)
        return EMPTY if not most.any() else FULL if bool((least == FULL).all()) else PARTIAL

    def score(self, env, dot, visible) -> torch.Tensor:
        s = evaluate(self.spec.score, env, self.tensors, dot, self.dtype).to(self.dtype)
        if visible is not None:
            s = torch.where(visible, s, -math.inf)
        return s.expand(*self.extents, env["i"].numel(), env["j"].numel())

    def averaged(self, env) -> torch.Tensor:
        """Which keys an empty row averages, as 0.0 and 1.0."""
        over = evaluate(self.spec.empty_over, env, self.tensors, None, self.dtype)
        return over.to(self.dtype).expand(*self.extents, env["i"].numel(), env["j"].numel())

    def keep(self, env) -> torch.Tensor:
        return keep_mask(self.seed, self.z, env["i"], env["j"], self.spec.dropout)

    @property
    def averages(self) -> bool:
        return self.spec.is_masked and self.spec.empty_row.averages


def forward(spec: AttentionSpec, q, k, v, aux, seed, sizes, tiles: tuple[int, int] | None = None, blocks=None, outer: int = 1):
    """(out, lse) as `flashfx.codegen.launch.forward`; `tiles` overrides the tile of (rows, columns)."""
    site = _Site(spec, q, k, v, aux, seed, sizes, tiles, blocks)
    out, lse = empty_output(site.extents, site.M, v, outer), empty_lse(site.extents, site.M, v)
    if site.is_empty:
        return out.zero_(), lse.fill_(-math.inf)
    keep_scale = kept_scale(spec.dropout)

    def add(acc, weights, env, cols):
        if spec.dropout:
            weights = torch.where(site.keep(env), weights * keep_scale, 0.0)
        return acc + weights @ v[..., cols, :].to(site.dtype)

    for rows in _spans(site.M, site.tiles[0]):
        shape = (*site.extents, rows.stop - rows.start, 1)
        m = torch.full(shape, -math.inf, dtype=site.dtype, device=q.device)
        l, acc = torch.zeros_like(m), torch.zeros((*shape[:-1], v.shape[-1]), dtype=site.dtype, device=q.device)
        for cols in _spans(site.N, site.tiles[1]):
            env, dot, visible = site.scores(rows, cols)
            if visible is False:
                continue
            s = site.score(env, dot, visible)
            m_new = torch.maximum(m, s.amax(-1, keepdim=True))
            anchor = m_new.masked_fill(m_new == -math.inf, 0.0)  # nothing visible yet: exp(-inf - 0), not exp(-inf + inf)
            p, alpha = torch.exp(s - anchor), torch.exp(m - anchor)
            l, acc, m = l * alpha + p.sum(-1, keepdim=True), add(acc * alpha, p, env, cols), m_new
        empty = (l == 0) if spec.is_masked else torch.zeros_like(l, dtype=torch.bool)
        if site.averages and empty.any():
            for cols in _spans(site.N, site.tiles[1]):
                env = index_grid(spec, sizes, site.M, site.N, q.device, rows, cols)
                p = torch.where(empty, site.averaged(env), 0.0)
                l, acc = l + p.sum(-1, keepdim=True), add(acc, p, env, cols)
            m = torch.where(empty, l * MEAN_ROW - torch.log(l), m)
        result = acc / l
        if spec.is_masked and spec.empty_row is EmptyRow.ZERO:
            result = result.masked_fill(empty, 0.0)
        out[..., rows, :] = result.to(out.dtype)
        lse[..., rows] = (m + torch.log(l)).squeeze(-1).to(lse.dtype)
    return out, lse


def _sum_to(gradient: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Sum over the axes along which the operand was broadcast."""
    absent = [d for d, extent in enumerate(shape) if extent == 1 and gradient.shape[d] != 1]
    return gradient.sum(absent, keepdim=True) if absent else gradient


def backward(spec: AttentionSpec, grad_out, q, k, v, aux, seed, out, lse, sizes, needs: Sequence[bool],
             tiles: tuple[int, int] | None = None, grad_lse: torch.Tensor | None = None,
             blocks=None) -> list[torch.Tensor]:
    """Gradients of (q, k, v, *aux) as `flashfx.codegen.launch.backward`.

    A first pass over the tiles of a row sums p and p * (dp - delta), which are 1 and 0 but for the rounding of `lse` and of `out` in delta. That is
    the same for all keys, so that it would add up where they are summed; both are put right.
    """
    site = _Site(spec, q, k, v, aux, seed, sizes, tiles, blocks)
    operands = [q, k, v, *aux]
    sums = [torch.zeros(t.shape, dtype=site.dtype, device=t.device) if need else None for t, need in zip(operands, needs)]
    named = dict(zip((a.name for a in spec.aux), needs[3:]))
    loads = captured.differentiable_loads(spec, named)
    into = dict(zip((a.name for a in spec.aux), sums[3:]))
    d_qk = partial(spec.score, QK)
    keep_scale = kept_scale(spec.dropout)
    for rows in () if site.is_empty else _spans(site.M, site.tiles[0]):
        g = grad_out[..., rows, :].to(site.dtype)
        row_lse = lse[..., rows].to(site.dtype).unsqueeze(-1)
        averaging = row_lse >= MEAN_ROW
        row_lse = row_lse.masked_fill(row_lse == -math.inf, math.inf)  # an empty row: every weight is 0
        has_mean = site.averages and bool(averaging.any())

        def rebuilt(cols: slice):
            """(cols, index grid, q . k, p, which weights dropout keeps, dp) of one tile; None where nothing is visible."""
            env, dot, visible = site.scores(rows, cols)
            if visible is False:
                if not has_mean:
                    return None
                dot = q[..., rows, :].to(site.dtype) @ k[..., cols, :].to(site.dtype).mT
                visible = evaluate(FALSE, env, {}, None, site.dtype)
            p = torch.exp(site.score(env, dot, visible) - row_lse)
            if has_mean:
                p = torch.where(averaging, site.averaged(env) * (MEAN_ROW / row_lse), p)
            kept = site.keep(env) if spec.dropout else None
            dp = g @ v[..., cols, :].to(site.dtype).mT
            return cols, env, dot, p, kept, dp if kept is None else torch.where(kept, dp * keep_scale, 0.0)

        all_tiles = lambda: (t for cols in _spans(site.N, site.tiles[1]) if (t := rebuilt(cols)) is not None)
        few = list(all_tiles()) if (rows.stop - rows.start) * site.N * site.batch <= TILE_ELEMENTS else None  # not computed twice
        delta = (g * out[..., rows, :].to(site.dtype)).nan_to_num(0.0).sum(-1, keepdim=True)
        total, excess = torch.zeros_like(delta), torch.zeros_like(delta)
        for _, _, _, p, _, dp in all_tiles() if few is None else few:
            total, excess = total + p.sum(-1, keepdim=True), excess + (p * (dp - delta)).sum(-1, keepdim=True)
        total = total.masked_fill(total == 0, 1.0)
        excess = excess / total
        if grad_lse is not None:  # d lse / d score = p
            excess = excess - grad_lse[..., rows].to(site.dtype).unsqueeze(-1)
        for cols, env, dot, p, kept, dp in all_tiles() if few is None else few:
            p = p / total
            weights = p if kept is None else torch.where(kept, p * keep_scale, 0.0)
            if needs[2]:
                sums[2][..., cols, :] += _sum_to(weights.mT @ g, (*v.shape[:-2], -1, -1))
            if not (needs[0] or needs[1] or loads):
                continue
            ds = p * ((dp - delta) - excess)
            if has_mean and spec.empty_row is EmptyRow.MEAN:
                ds = torch.where(averaging, 0.0, ds)
            if needs[0] or needs[1]:
                dqk = ds * evaluate(d_qk, env, site.tensors, dot, site.dtype)
                if needs[0]:
                    sums[0][..., rows, :] += _sum_to(dqk @ k[..., cols, :].to(site.dtype), (*q.shape[:-2], -1, -1))
                if needs[1]:
                    sums[1][..., cols, :] += _sum_to(dqk.mT @ q[..., rows, :].to(site.dtype), (*k.shape[:-2], -1, -1))
            for load in loads:
                dense = ds * evaluate(partial(spec.score, load), env, site.tensors, dot, site.dtype)
                dims = captured.dims_of(spec, load)
                absent = [d for d, name in enumerate((*spec.axes, "i", "j")) if name not in dims]
                dense = dense.sum(absent, keepdim=True) if absent else dense
                if captured.is_relative(load):
                    captured.accumulate(spec, load, captured.along_diagonals(dense).unsqueeze(-2), into[load.name], captured.differences(env), site.tensors)
                else:
                    captured.accumulate(spec, load, dense, into[load.name], env, site.tensors)
    return [torch.empty(0, dtype=t.dtype, device=t.device) if s is None else s.to(t.dtype) for t, s in zip(operands, sums)]
