"""Masks that leave each row an interval: which masks they are, and the bits of words that hide the rest."""
from __future__ import annotations

import re
import types

import pytest
import torch

from flashfx.codegen.program import Program
from flashfx.codegen.ramp import RAMP, ramp
from flashfx.codegen.within import WITHIN, interval
from flashfx.codegen.writer import Writer
from flashfx.expr import Const, Load, Var, call, parse
from flashfx.reference import evaluate

from .cases import CORE, MORE, spec

IJ = call("le", Var("j"), Var("i"))


@pytest.mark.parametrize("mask, by_row, by_key", [
    (Const(True), (None, None), (None, None)),
    (IJ, (None, "i + 1"), ("j", None)),
    (call("and", IJ, call("lt", call("sub", Var("i"), Var("j")), 11)), ("i - 10", "i + 1"), ("j", "j + 11")),
    (call("le", call("abs", call("sub", Var("i"), Var("j"))), 6), ("i - 6", "i + 7"), ("j - 6", "j + 7")),
    (call("or", IJ, call("lt", Var("j"), 5)), (None, "maximumi + 1, 5"), None),
    (call("le", Var("j"), call("add", Var("i"), call("sub", Var("N"), Var("M")))), (None, "N + i - M + 1"), None)])
def test_intervals(mask, by_row, by_key):
    shown = lambda found: found and tuple(None if e is None else re.sub(r"[()]", "", str(e)) for e in found)
    assert shown(interval(mask, "j")) == by_row
    if by_key is not None:
        assert shown(interval(mask, "i")) == by_key


@pytest.mark.parametrize("mask", [
    call("eq", call("mod", call("sub", Var("j"), Var("i")), 3), 0),  # every third key
    call("lt", Var("j"), Load("length", (Var("b"),), "int")),  # data
    call("not", call("le", call("abs", call("sub", Var("i"), Var("j"))), 2))])  # all but an interval
def test_other_masks_are_none(mask):
    assert interval(mask, "j") is None


def _text(source: str, name: str, *arguments) -> str:
    """What `within` or `ramp` gives the assembler."""
    plain = types.SimpleNamespace(constexpr_function=lambda f: f, jit=lambda f: f)
    found: dict = {"gluon": plain, "gl": types.SimpleNamespace(constexpr=None)}
    exec(source, found)
    return found[name](*arguments)


def _run(text: str, given: dict[str, float], lane: int) -> dict[str, float]:
    """What those few instructions leave in their registers."""
    signed = lambda x: (int(x) + 2 ** 31) % 2 ** 32 - 2 ** 31
    ops = {"sub.s32": lambda a, b: a - b, "add.s32": lambda a, b: a + b, "and.b32": lambda a, b: a & b, "or.b32": lambda a, b: a | b,
           "shr.s32": lambda a, b: signed(a) >> b, "shl.b32": lambda a, b: a << b if b < 32 else 0, "not.b32": lambda a: ~a, "mov.u32": lambda a: a,
           "min.u32": lambda a, b: min(a % 2 ** 32, b), "max.s32": lambda a, b: max(signed(a), b), "setp.eq.u32": lambda a, b: signed(a) == b,
           "selp.f32": lambda a, b, p: a if p else b, "cvt.rn.f32.s32": float, "mul.f32": lambda a, b: a * b, "fma.rn.f32": lambda a, b, c: a * b + c}
    names = dict(given) | {"%laneid": lane}

    def value(word: str):
        if word.startswith("0f"):
            return float(torch.tensor(signed(int(word[2:], 16)), dtype=torch.int32).view(torch.float32))
        return int(word) if word.lstrip("-").isdigit() else names[word]

    for line in filter(None, (part.strip() for part in text[text.index("mov."):].rstrip("}").split(";"))):
        name, _, operands = line.partition(" ")
        into, *words = operands.replace(" ", "").split(",")
        found = ops[name](*map(value, words))
        names[into] = signed(found) if isinstance(found, int) and not isinstance(found, bool) else found
    return names


@pytest.mark.parametrize("columns", [32, 64, 128])
@pytest.mark.parametrize("starts", [False, True])
def test_a_thread_hides_its_columns_outside_each_row_s_interval(columns, starts):
    count, hidden = columns // 2, float("-inf") if starts else 0.0
    text = _text(WITHIN, "within_text", count, starts, hidden)
    ends = [-300, -9, -8, -1, 0, 1, 2, 3, 7, 8, 9, 30, 31, 32, 33, columns - 2, columns - 1, columns, columns + 1, 16384]
    for n, stop in enumerate(ends):
        for lane in (0, 5, 10, 31):
            rows = [(ends[(3 * n + lane) % len(ends)], stop), (ends[(7 * n + 2) % len(ends)], ends[(5 * n + lane) % len(ends)])]
            given = {f"${count + e}": float(e + 1) for e in range(count)}
            for row, (start, end) in enumerate(rows):
                given |= {f"${2 * count + 2 * row}": end} | ({f"${3 * count + 2 * row}": start} if starts else {})
            found = _run(text, given, lane)
            for e in range(count):  # an accumulator's registers: two columns, the row eight below, then eight columns on
                column, (start, end) = e // 4 * 8 + lane % 4 * 2 + e % 2, rows[e // 2 % 2]
                seen = column < end and (not starts or column >= start)
                assert found[f"${e}"] == (e + 1 if seen else hidden), (rows, lane, e)


@pytest.mark.parametrize("columns, step", [(64, 1), (128, -1), (32, 3)])
def test_what_rises_along_a_row(columns, step):
    count, rows = columns // 2, ((-70.5, 0.25), (11.0, -2.0))
    given = {f"${start}": at for row, (first, rate) in enumerate(rows) for start, at in ((count + 2 * row, first), (2 * count + 2 * row, rate))}
    for lane in (0, 5, 10, 31):
        found = _run(_text(RAMP, "ramp_text", count, step), given, lane)
        for e in range(count):
            column, (first, rate) = e // 4 * 8 + lane % 4 * 2 + e % 2, rows[e // 2 % 2]
            assert found[f"${e}"] == first + rate * step * column


@pytest.mark.parametrize("text, along_j, along_i", [
    ("to_float(j - i)", "ramp(qk, (tl.cast(j0 + row_term, tl.float32))[:, None], 1.0, 1)", "ramp(qk, (tl.cast(-1 * i0 + j, tl.float32))[:, None], 1.0, -1)"),
    ("u[h] * to_float(2 * j - i + 5) * 0.5", "ramp(qk, (scalar * tl.cast(2 * j0 + row_term_2, tl.float32))[:, None], scalar, 2)", ", scalar, -1)"),
    ("to_float(abs(i - j)) * u[h]", "(u_value * tl.abs(ramp(qk, (tl.cast(-1 * j0 + i, tl.float32))[:, None], 1.0, -1)))", ", 1.0, 1)"),
    ("u[i] * to_float(j - i)", "ramp(qk, (u_value * ", ""), ("to_float(j * i)", "", ""), ("to_float(j // 2 - i)", "", "ramp"), ("to_float(minimum(j - i, 3))", "", ""),
    ("to_float(j <= i)", "", ""), ("qk * to_float(j - i)", "", "")])
def test_ramps(text, along_j, along_i):
    for columns, inner, expected in (("j", "j", along_j), ("i", "i", along_i)):
        out = Writer()
        program, e = Program(spec(CORE["full"], "self"), out, inner, columns), parse(text, {"u": "float"})
        program.enter(out, [e], "ij")
        found = ramp(program, e)
        assert expected in found and bool(expected) == bool(found), found


@pytest.mark.parametrize("name", [*CORE, *MORE])
def test_an_interval_is_what_a_row_sees(name):
    s, M, N = spec((CORE | MORE)[name], "self"), 37, 51
    for index, own, length, size in (("j", "i", M, N), ("i", "j", N, M)):
        found = interval(s.visible, index)
        if found is None:
            continue
        env = {"i": torch.arange(M)[:, None], "j": torch.arange(N)[None, :], "M": M, "N": N}
        seen = torch.broadcast_to(torch.as_tensor(evaluate(s.visible, env, {}, None, torch.float64)), (M, N))
        lo, hi = (None if e is None else torch.as_tensor(evaluate(e, env, {}, None, torch.float64)) for e in found)
        expected = torch.ones(M, N, dtype=torch.bool)
        expected &= True if lo is None else env[index] >= lo
        expected &= True if hi is None else env[index] < hi
        assert torch.equal(seen, expected), (name, index)
