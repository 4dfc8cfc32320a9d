"""Masks that leave each row an interval: which masks they are, and the bits of words that hide the rest."""
from __future__ import annotations

import re
import types

import pytest
import torch

from flashfx.codegen.within import WITHIN, interval
from flashfx.expr import Const, Load, Var, call
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


def _words(count: int, starts: bool, hidden: float) -> str:
    """The text that `within` gives the assembler."""
    plain = types.SimpleNamespace(constexpr_function=lambda f: f, jit=lambda f: f)
    found: dict = {"gluon": plain, "gl": types.SimpleNamespace(constexpr=None)}
    exec(WITHIN, found)
    return found["within_text"](count, starts, hidden)


def _run(text: str, given: dict[str, float], lane: int) -> dict[str, float]:
    """What the few instructions of `within` leave in its registers."""
    signed = lambda x: (int(x) + 2 ** 31) % 2 ** 32 - 2 ** 31
    ops = {"sub.s32": lambda a, b: a - b, "add.s32": lambda a, b: a + b, "and.b32": lambda a, b: a & b, "or.b32": lambda a, b: a | b,
           "shr.s32": lambda a, b: signed(a) >> b, "shl.b32": lambda a, b: a << b if b < 32 else 0, "not.b32": lambda a: ~a, "mov.u32": lambda a: a,
           "min.u32": lambda a, b: min(a % 2 ** 32, b), "max.s32": lambda a, b: max(signed(a), b), "setp.eq.u32": lambda a, b: signed(a) == b,
           "selp.f32": lambda a, b, p: a if p else b}
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
    text = _words(count, starts, hidden)
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
