"""Masks that leave every row of a tile one interval of columns (causal, windows, bands, chunks, the tensor's end): hidden by the accumulator's layout.

A thread of a warpgroup has columns 8 b + 2 q + e of two rows (q: its place among four, e: 0 or 1, every b), so what it sees of a row are neighbouring
bits of a word, and the assembler makes seven predicates of a word's bits at once. Compared column by column, a tile of 64 x 128 takes twice the
instructions, of which each waits for the one before.
"""
from __future__ import annotations

import functools
from typing import Sequence

from ..expr import Call, Const, Expr, Var, call, conjunction, substitute
from .program import Program
from .ranges import TILE, bounds, linear, unlinear
from .writer import Writer

IS_ROW_BY_ROW = '''@gluon.constexpr_function
def is_row_by_row(layout, COLUMNS):
    return type(layout).__name__ == "NVMMADistributedLayout" and layout.warps_per_cta[1] == 1 and layout.instr_shape[1] == COLUMNS'''
WITHIN = '''@gluon.constexpr_function
def within_text(COUNT, STARTS, HIDDEN):
    import struct
    below = ("sub.s32 a, ${0}, q; shr.s32 n, a, 3; shl.b32 n, n, 1; and.b32 a, a, 7; min.u32 a, a, 2; add.s32 n, n, a; "
             "max.s32 n, n, 0; shl.b32 {1}, -1, n; ")
    text = "mov.u32 q, %laneid; and.b32 q, q, 3; shl.b32 q, q, 1; "
    for row in range(2):
        text += below.format(2 * COUNT + 2 * row, f"h{row}")
        if STARTS:
            text += below.format(3 * COUNT + 2 * row, "b") + f"not.b32 b, b; or.b32 h{row}, h{row}, b; "
    hidden = f"0f{struct.unpack('<I', struct.pack('<f', HIDDEN))[0]:08X}"
    for row in range(2):
        for bit in range(COUNT // 2):
            e = bit // 2 * 4 + row * 2 + bit % 2
            text += f"and.b32 t{e}, h{row}, {1 << bit}; setp.eq.u32 p{e}, t{e}, 0; selp.f32 ${e}, ${COUNT + e}, {hidden}, p{e}; "
    return f"{{ .reg .b32 q, a, b, n, h<2>, t<{COUNT}>; .reg .pred p<{COUNT}>; {text}}}"


@gluon.constexpr_function
def within_operands(COUNT, ENDS):
    return ",".join(["=f"] * COUNT + ["f"] * COUNT + ["r"] * ENDS * COUNT)


@gluon.jit
def within(tile, start, stop, HIDDEN: gl.constexpr):
    """`tile` in columns start <= c < stop of each row, `HIDDEN` elsewhere. start: None for 0. A thread has two rows of an
    accumulator, of each columns 8 b + 2 q + e, and a word with a bit for each, set where it is hidden: n lie below a column."""
    layout: gl.constexpr = tile.type.layout
    gl.static_assert(is_row_by_row(layout, tile.shape[1]), "threads must have columns of an accumulator")
    zeros = gl.zeros(tile.shape, gl.int32, layout)
    COUNT: gl.constexpr = tile.shape[1] // 2
    STARTS: gl.constexpr = start is not None
    text: gl.constexpr = within_text(COUNT, STARTS, HIDDEN)
    operands: gl.constexpr = within_operands(COUNT, 1 + STARTS)
    if STARTS:
        both = [tile, (zeros + stop).to(gl.int32), (zeros + start).to(gl.int32)]
        return gl.inline_asm_elementwise(text, operands, both, gl.float32, is_pure=True, pack=COUNT)
    given = [tile, (zeros + stop).to(gl.int32)]
    return gl.inline_asm_elementwise(text, operands, given, gl.float32, is_pure=True, pack=COUNT)'''


@functools.lru_cache(maxsize=1024)
def interval(visible: Expr, var: str) -> tuple[Expr | None, Expr | None] | None:
    """(lo, hi): what a single row (or key) sees is lo <= `var` < hi, None for no end but the tensor's own. None if a mask is no such interval, or reads data.

    before -> after: interval(j <= i & i - j < 8, "j") -> (i - 7, i + 1)
    """
    if visible.loads:
        return None
    own, first, last, size = TILE[var]
    found, one = bounds(visible, var), {Var(first): Var(own), Var(last): Var(own)}
    lo, hi, full_lo, full_hi = (substitute(e, one) for e in (found.lo, found.hi, found.full_lo, found.full_hi))
    if (lo, hi) != (full_lo, full_hi):  # of one row, what it may see and what it surely sees
        return None

    def own_end(e: Expr, op: str, end: Expr) -> Expr | None:
        if e == end:
            return None
        return next(a for a in e.args if a != end) if isinstance(e, Call) and e.op == op and end in e.args else e
    return own_end(lo, "maximum", Const(0)), own_end(hi, "minimum", Var(size))


def hidden_outside(program: Program, out: Writer, tile: str, conditions: Sequence[Expr], index: str, hidden: str, ended: bool, rows: str = "") -> str:
    """Text of `tile` with `hidden` where the conditions do not all hold, if they leave each row an interval of `index`, which runs along the columns; else "".
    ended: the tile may reach beyond the last index, where it is hidden too. rows: how many rows there are, of which
    the tile may have more, all hidden; "" if it has not."""
    found = interval(conjunction(conditions), index)
    if found is None or found == (None, None) and not ended:
        return ""
    (lo, hi), (row, first, size, block) = found, ("i", "j0", "N", "BLOCK_N") if index == "j" else ("j", "i0", "M", "BLOCK_M")
    if ended:
        hi = Var(size) if hi is None else call("minimum", Var(size), hi)
    here = program.here(out)
    start, stop = (e if e is None else unlinear(*linear(call("sub", e, Var(first)))) for e in (lo, hi))
    end = block if stop is None else here.tile(stop)
    if rows:
        end = here.spread(f"tl.where({row} < {rows}, {block if stop is None else here.value(stop)}, 0)", frozenset(row))
    return f"within({tile}, {start if start is None else here.tile(start)}, {end}, {hidden})"
