"""What rises by the same amount from column to column of a tile (`slope * to_float(j - i)`, ALiBi), by the accumulator's layout.

A thread of a warpgroup has columns 8 b + 2 q + e of two rows (q: its place among four, e: 0 or 1, every b), which the assembler knows but for q: of each element it makes one
multiplication with a constant and addition. Compared with that, a difference of positions for each element, and a number made of it, are instructions that start half as often.
"""
from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..expr import QK, Call, Const, Expr, Load, Var, call
from .ranges import linear, unlinear

if TYPE_CHECKING:
    from .program import Program

RAMP = '''@gluon.constexpr_function
def ramp_text(COUNT, STEP):
    import struct
    number = lambda x: f"0f{struct.unpack('<I', struct.pack('<f', x))[0]:08X}"
    text = "mov.u32 q, %laneid; and.b32 q, q, 3; shl.b32 q, q, 1; cvt.rn.f32.s32 f, q; "
    for row in range(2):
        text += f"mul.f32 r{row}, ${2 * COUNT + 2 * row}, {number(STEP)}; fma.rn.f32 s{row}, r{row}, f, ${COUNT + 2 * row}; "
        for e in range(row * 2, COUNT, 4):
            for odd in range(2):
                text += f"fma.rn.f32 ${e + odd}, r{row}, {number(e // 4 * 8 + odd)}, s{row}; "
    return f"{{ .reg .b32 q; .reg .f32 f, r<2>, s<2>; {text}}}"


@gluon.constexpr_function
def ramp_operands(COUNT):
    return ",".join(["=f"] * COUNT + ["f"] * 2 * COUNT)


@gluon.jit
def ramp(tile, start, rate, STEP: gl.constexpr):
    """start + rate * STEP * column, in the layout of `tile`. start, rate: of each row, or scalars. A thread has two rows of an
    accumulator, of each columns 8 b + 2 q + e."""
    layout: gl.constexpr = tile.type.layout
    gl.static_assert(is_row_by_row(layout, tile.shape[1]), "threads must have columns of an accumulator")
    zeros = gl.zeros(tile.shape, gl.float32, layout)
    COUNT: gl.constexpr = tile.shape[1] // 2
    text: gl.constexpr = ramp_text(COUNT, STEP)
    operands: gl.constexpr = ramp_operands(COUNT)
    return gl.inline_asm_elementwise(text, operands, [zeros + start, zeros + rate], gl.float32, is_pure=True, pack=COUNT)'''


@dataclass(frozen=True)
class Ramp:
    """rate * to_float(step * column + rest), or of the absolute value of that number."""

    rate: Expr
    step: int
    rest: Expr
    is_distance: bool


def ramp_of(e: Expr, column: str) -> Ramp | None:
    """A value that depends on the column ("i" or "j") as such a ramp, if it is one.

    before -> after: slope[h] * to_float(j - i) -> Ramp(slope[h], 1, -i, False); to_float(abs(j - i)) -> Ramp(1.0, 1, -i, True)
    """
    others, numbers = [], []
    for factor in _factors(e):
        (numbers if isinstance(factor, Call) and factor.op == "to_float" and column in factor.variables else others).append(factor)
    if len(numbers) != 1 or any(column in x.variables for x in others):
        return None
    number = numbers[0].args[0]
    is_distance = isinstance(number, Call) and number.op == "abs"
    terms, constant = linear(number.args[0] if is_distance else number)
    step, rest = terms.pop(Var(column), 0), unlinear(terms, constant)
    if not step or column in rest.variables:
        return None
    return Ramp(functools.reduce(lambda a, b: call("mul", a, b), others, Const(1.0)), step, rest, is_distance)


def is_ramped(e: Expr, column: str) -> bool:
    """Does a value depend on the column by products, loads and such ramps alone?"""
    return column not in e.variables or isinstance(e, Load) or e == QK or ramp_of(e, column) is not None or isinstance(e, Call) and all(is_ramped(a, column) for a in e.args)


def ramp(program: Program, e: Expr) -> str:
    """Text of a value that depends on the column, spread over the tile, if it is such a ramp, else "".

    before -> after: slope[h] * to_float(j - i) -> ramp(qk, (slope_value * tl.cast(j0 + row_term, tl.float32))[:, None], slope_value, 1)
    """
    found = ramp_of(e, program.columns)
    if found is None:
        return ""
    first, dims = f"{program.columns}0", program.dims(e) - {program.columns}
    start = f"tl.cast({first if found.step == 1 else f'{found.step} * {first}'} + {program.value(found.rest)}, tl.float32)"
    if found.is_distance or found.rate == Const(1.0):
        text = f"ramp(qk, {program.spread(f'({start})', dims)}, 1.0, {found.step})"
        text = f"tl.abs({text})" if found.is_distance else text
        return text if found.rate == Const(1.0) else f"({program.tile(found.rate)} * {text})"
    start = f"({program.value(found.rate)} * {start})"
    return f"ramp(qk, {program.spread(start, dims)}, {program.tile(found.rate)}, {found.step})"


def _factors(e: Expr) -> list[Expr]:
    return [x for a in e.args for x in _factors(a)] if isinstance(e, Call) and e.op == "mul" else [e]
