"""The kernels of `flashfx::gather_by_difference_backward`: sums along diagonals whose positions agree, as products with one-hot vectors."""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from .. import compat
from . import calls
from .replay import Watched

BLOCK = 64
CHUNK = 4096


@triton.jit
def occurrences(Positions, First, Last, count, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """The first and the last t whose position lies in a tile, w0 <= Positions[t] < w0 + BLOCK; count and -1 where none does."""
    w0 = tl.program_id(0) * BLOCK
    first, last = count, -1
    for t0 in range(0, count, CHUNK):
        t = t0 + tl.arange(0, CHUNK)
        at = tl.load(Positions + t, mask=t < count, other=-1)
        inside = (at >= w0) & (at < w0 + BLOCK)
        first = tl.minimum(first, tl.min(tl.where(inside, t, count), 0))
        last = tl.maximum(last, tl.max(tl.where(inside, t, -1), 0))
    tl.store(First + tl.program_id(0), first)
    tl.store(Last + tl.program_id(0), last)


@triton.jit
def diagonals(grad, Positions, t0, r, rows, columns, BLOCK: tl.constexpr):
    """Elements t0 <= t < t0 + BLOCK of rows r, read along diagonals: element t of a row is the one whose column lies t - rows + 1 to its right. And
    the positions of these diagonals, -1 beyond the last."""
    t = t0 + tl.arange(0, BLOCK)
    c = t[None, :] + (r - rows + 1)[:, None]
    tile = tl.load(grad + (r[:, None] * columns + c), mask=(c >= 0) & (c < columns) & (r < rows)[:, None], other=0.0)
    return tile, tl.load(Positions + t, mask=t < rows + columns - 1, other=-1)


@triton.jit
def sum_by_position(Grad, Positions, First, Last, Out, rows, columns, width, BLOCK: tl.constexpr):
    """A tile of the gradient of `source`, positions w0 <= w < w0 + BLOCK of rows r: the matrix units add up diagonals that have one position.

    Positions mostly rise or fall with t: of those outside of the first and the last t whose position is in the tile nothing is read.
    """
    row_tiles, width_tiles = tl.cdiv(rows, BLOCK), tl.cdiv(width, BLOCK)
    tile_w = tl.program_id(0) % width_tiles
    r0 = tl.program_id(0) // width_tiles % row_tiles * BLOCK
    z = (tl.program_id(0) // width_tiles // row_tiles).to(tl.int64)
    r, w = r0 + tl.arange(0, BLOCK), tile_w * BLOCK + tl.arange(0, BLOCK)
    start = tl.maximum(tl.load(First + tile_w), rows - BLOCK - r0) // BLOCK * BLOCK
    stop = tl.minimum(tl.load(Last + tile_w) + 1, rows + columns - 1 - r0)
    grad = Grad + z * rows * columns
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    tile, at = diagonals(grad, Positions, start, r, rows, columns, BLOCK)
    for t0 in range(start, stop, BLOCK):
        one_hot = tl.where(at[:, None] == w[None, :], 1.0, 0.0).to(tile.dtype)
        tile_after, at_after = diagonals(grad, Positions, t0 + BLOCK, r, rows, columns, BLOCK)
        acc = tl.dot(tile, one_hot, acc, input_precision="ieee")
        tile, at = tile_after, at_after
    out = Out + z * rows * width + (r[:, None] * width + w[None, :])
    tl.store(out, acc.to(Out.dtype.element_ty), mask=(r < rows)[:, None] & (w < width)[None, :])


@triton.jit
def copy_tile(In, Out, rows, columns, stride_z, stride_r, stride_c, BLOCK: tl.constexpr):
    """A tile of a matrix, read along the one dim and written along the other."""
    column_tiles, row_tiles = tl.cdiv(columns, BLOCK), tl.cdiv(rows, BLOCK)
    c = tl.program_id(0) % column_tiles * BLOCK + tl.arange(0, BLOCK)
    r = tl.program_id(0) // column_tiles % row_tiles * BLOCK + tl.arange(0, BLOCK)
    z = (tl.program_id(0) // column_tiles // row_tiles).to(tl.int64)
    here = (r < rows)[:, None] & (c < columns)[None, :]
    tile = tl.load(In + z * stride_z + r[:, None].to(tl.int64) * stride_r + c[None, :].to(tl.int64) * stride_c, mask=here)
    tl.store(Out + (z * rows + r)[:, None] * columns + c[None, :], tile, mask=here)


if not compat.interpreting():
    occurrences, sum_by_position, copy_tile = map(Watched, (occurrences, sum_by_position, copy_tile))


def contiguous(grad: torch.Tensor) -> torch.Tensor:
    """(..., rows, columns) of any strides. PyTorch's own copy of transposed matrices takes six times a plain copy's time (H200, bfloat16, 512 x 512)."""
    if grad.is_contiguous():
        return grad
    matrices, out = grad.reshape(-1, *grad.shape[-2:]), torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
    count, rows, columns = matrices.shape
    copy_tile[(count * triton.cdiv(rows, BLOCK) * triton.cdiv(columns, BLOCK),)](matrices, out, rows, columns, *matrices.stride(), BLOCK=BLOCK)
    return out


def _gradient(grad: torch.Tensor, positions: torch.Tensor, width: int) -> list[torch.Tensor]:
    *lead, rows, columns = grad.shape
    out = torch.empty((*lead, rows, width), dtype=grad.dtype, device=grad.device)
    if out.numel() == 0 or columns == 0:
        return [out.zero_()]
    tiles, count = triton.cdiv(width, BLOCK), rows + columns - 1
    first, last = (torch.empty(tiles, dtype=torch.int32, device=grad.device) for _ in range(2))
    occurrences[(tiles,)](positions, first, last, count, BLOCK=BLOCK, CHUNK=min(CHUNK, triton.next_power_of_2(count)))
    programs = out.numel() // (rows * width) * triton.cdiv(rows, BLOCK) * tiles
    sum_by_position[(programs,)](contiguous(grad), positions, first, last, out, rows, columns, width, BLOCK=BLOCK, num_warps=8)
    return [out]


def gradient(grad: torch.Tensor, positions: torch.Tensor, width: int) -> torch.Tensor:
    """grad (..., rows, columns) -> (..., rows, width); on a GPU or in Triton's interpreter."""
    layout = [(t.shape, t.stride(), t.dtype, t.data_ptr() % 16) for t in (grad, positions)]
    call = calls.remembered(("gather_by_difference", width, *layout, grad.device), lambda: lambda *operands: _gradient(*operands, width))
    return call((grad, positions))[0]
