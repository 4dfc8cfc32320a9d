"""The largest tiles of float32 products as good as exact that compile without spilling registers, as `largest` has those of 16 bits."""
from __future__ import annotations

from ..spec import AttentionSpec, EmptyRow
from .gpu import GPU
from .captured import grouped
from .limits import has_relative
from .reads import across

ON_ORDINARY_UNITS = {
    # (kernel, head size up to) -> (BLOCK_M, BLOCK_N, num_warps, num_stages) for simple scores, and for heavy ones
    ("forward", 64): ((64, 32, 8, 1), (64, 32, 8, 1)),
    ("forward", 128): ((64, 32, 8, 1), (64, 32, 8, 1)),
    ("forward", 256): ((32, 32, 8, 1), (32, 32, 8, 1)),
    ("keys", 64): ((32, 32, 4, 1), (16, 32, 4, 1)),
    ("keys", 128): ((64, 32, 8, 1), (16, 32, 4, 1)),
    ("keys", 256): ((16, 16, 4, 1), (16, 16, 4, 1)),
    ("rows", 64): ((32, 32, 4, 1), (32, 32, 4, 1)),
    ("rows", 128): ((32, 32, 4, 1), (32, 32, 4, 1)),
    ("rows", 256): ((32, 16, 4, 1), (32, 16, 4, 1)),
}


def largest(kernel: str, spec: AttentionSpec, step: int, found: str, heavy: bool, whole: bool, gpu: GPU) -> tuple[int, int, int, int]:
    """Tiles of a kernel. step: head sizes up to which they hold; found: the units; heavy: as in `largest.largest`; whole: no tile reaches beyond the
    last key."""
    if found == "bf16x6":
        return _in_pieces(kernel, spec, step > 64, heavy or bool(spec.loads), whole)
    return _scalar(kernel, spec, step, heavy, ON_ORDINARY_UNITS[kernel, step][heavy], gpu)


def _in_pieces(kernel: str, spec: AttentionSpec, wide: bool, heavy: bool, whole: bool) -> tuple[int, int, int, int]:
    """On Hopper: the outer tile is what a warpgroup's product takes, the inner one what registers hold beside the sums, in three pieces. heavy: or are
    captured tensors read?"""
    table, across_tail = has_relative(spec), not whole and bool(across(spec))
    if kernel == "dense":  # every tile of a diagonal of tiles has the same diagonals
        inner = 32 if whole and not grouped(spec) else 16
        return inner if table else 64, inner, 4, 1
    if kernel == "forward":
        inner = 16 if wide and (table or across_tail) else 32 if wide or spec.loads or heavy and not whole else 64
        return 64, inner, 4, 2 if inner < 64 or heavy else 3
    if kernel == "keys":
        if wide:
            return 16 if table or spec.dropout or spec.is_data_masked or across_tail else 32, 64, 4, 1
        return 16 if table and spec.dropout else 32 if heavy or spec.is_masked else 64, 64, 4, 1
    if wide:
        return 64, 16 if spec.score.loads or not whole or spec.is_data_masked and spec.empty_row is EmptyRow.MEAN else 32, 4, 1
    by_row = any("i" in load.variables and "j" not in load.variables for load in spec.score.loads)
    return (64, 16, 4, 2) if table or by_row else (64, 64, 4, 1) if whole and not heavy else (64, 32, 4, 2)


def _scalar(kernel: str, spec: AttentionSpec, step: int, heavy: bool, tiles: tuple[int, int, int, int], gpu: GPU) -> tuple[int, int, int, int]:
    """Of float32: rows of both operands fill the registers, beside what masks and captured tensors take."""
    masked, by_data = spec.is_masked, spec.is_data_masked
    reads = bool(across(spec, False))
    if kernel == "forward":
        return (32, 32, 8, 1) if by_data and spec.dropout and step <= 128 else tiles
    if kernel == "rows" and step == 256:
        return (16, 32, 8, 1) if masked else tiles
    if kernel == "rows" and by_data:
        return 16, 16 if heavy else 32, 4, 1
    if kernel == "rows":
        return (32, 16, 4, 1) if reads or masked and heavy and step == 128 else tiles
    if step == 256:
        return (16, 16, 8, 1) if masked and heavy else tiles
    if heavy and (by_data or has_relative(spec) or step == 128 and (masked or reads)):
        return 16, 16, 4, 1
    small = step == 128 and gpu.shared_per_block < 2 ** 17  # half of the rows would fit, and spill
    return (16, 32, 4, 1) if masked or small else tiles
