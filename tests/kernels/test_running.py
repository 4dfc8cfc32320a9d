"""The PTX of `codegen/running.py`, instruction by instruction for the 32 threads of a warp, against float64."""
from __future__ import annotations

import re
import struct
import types

import numpy as np
import pytest
import torch

from flashfx.codegen.running import RUNNING

LANES = np.arange(32)
ROWS, FACTOR = 16, 0.18
KINDS = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}


def _texts() -> dict:
    """The compile-time functions of `RUNNING`."""
    same = lambda function: function
    names = {"gluon": types.SimpleNamespace(jit=same, constexpr_function=same), "gl": types.SimpleNamespace(constexpr=object)}
    exec(RUNNING, names)
    return names


def _literal(text: str):
    if text.startswith("0f"):
        return np.full(32, struct.unpack(">f", bytes.fromhex(text[2:]))[0], np.float32)
    return np.full(32, int(text, 0))


def run(text: str, registers: dict[str, np.ndarray]) -> int:
    """Execute one warp's instructions; `registers` has the operands. How many were executed?"""
    def value(name: str):
        return registers[name] if name in registers else _literal(name)

    def bits(x: np.ndarray) -> np.ndarray:
        return x.view(np.int32) if x.dtype == np.float32 else x.astype(np.int64).astype(np.uint32).view(np.int32)

    def number(x: np.ndarray) -> np.ndarray:
        return x.view(np.float32) if x.dtype == np.int32 else x

    def write(name: str, new, guard) -> None:
        registers[name] = np.broadcast_to(new, 32).copy() if guard.all() else np.where(guard, new, registers[name])

    executed, lines = 0, [line.strip() for line in re.sub(r"DONE:", "DONE:;", text.strip()[1:-1]).split(";")]
    at = 0
    while at < len(lines):
        line, at = lines[at], at + 1
        if not line or line.startswith(".reg") or line == "DONE:":
            continue
        executed += 1
        guard = np.full(32, True)
        if line.startswith("@"):
            name, line = line[1:].split(" ", 1)
            guard = ~registers[name[1:]] if name.startswith("!") else registers[name]
        op, *operands = re.split(r"[ ,]+", line)
        name, *kinds = op.split(".")
        if name == "bra":
            assert guard.all() or not guard.any(), "a warp takes a uniform branch together"
            at = lines.index(operands[0] + ":") if guard.all() else at
        elif name == "setp":
            to, a, b, *given = operands
            found = {"gt": np.greater, "eq": np.equal}[kinds[0]](value(a), value(b))
            if given:
                found = {"or": np.logical_or, "and": np.logical_and}[kinds[1]](found, value(given[0]))
            write(to, found, guard)
        elif name == "vote":
            write(operands[0], np.full(32, value(operands[1]).any()), guard)
        elif name == "selp":
            to, a, b, p = operands
            write(to, np.where(value(p), value(a), value(b)), guard)
        elif name == "shfl":
            write(operands[0], value(operands[1])[LANES ^ int(operands[2])], guard)
        elif name == "prmt":
            to, *given = operands
            one, other, order = (bits(value(x)).view(np.uint32).astype(np.uint64) for x in given)
            pair = one | other << np.uint64(32)
            chosen = [(pair >> (order >> np.uint64(4 * n) & np.uint64(7)) * np.uint64(8) & np.uint64(0xFF)) << np.uint64(8 * n) for n in range(4)]
            write(to, sum(chosen).astype(np.uint32).view(np.int32), guard)
        elif name == "cvt":
            high, low = (torch.from_numpy(value(x).astype(np.float32)).to(KINDS[kinds[1]]).view(torch.int16).numpy().astype(np.int64) for x in operands[1:])
            write(operands[0], high << 16 | low & 0xFFFF, guard)
        elif name == "shl" or op == "add.s32":
            one, other = (bits(value(x)) for x in operands[1:])
            write(operands[0], (one << other if name == "shl" else one + other).astype(np.int32), guard)
        else:
            one, *more = map(value, operands[1:]) if name == "mov" else (number(value(x)) for x in operands[1:])
            rule = {"mov": lambda: one, "neg": lambda: -one, "ex2": lambda: np.exp2(one), "add": lambda: one + more[0], "sub": lambda: one - more[0],
                    "mul": lambda: one * more[0], "max": lambda: np.fmax(one, more[0]),
                    "fma": lambda: (one.astype(np.float64) * more[0] + more[1]).astype(np.float32)}
            write(operands[0], rule[name](), guard)
    return executed


def _elements(width: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of each thread's elements, [element, thread], of a product's accumulator (PTX ISA, wgmma, figure of matrix D)."""
    n = np.arange(width // 2)[:, None]
    return LANES // 4 + 8 * (n // 2 % 2) + 0 * n, n // 4 * 8 + LANES % 4 * 2 + n % 2


class Warp:
    """What `hopper_softmax` makes of tile after tile, of 16 rows."""

    def __init__(self, width: int, kind: str = "bf16"):
        self.width, self.count, self.packed = width, width // 2, 1 if kind == "fp32" else 2
        self.dtype = KINDS.get(kind.replace("p", "") + "x2")
        self.text = _texts()["weigh_text"](self.count, kind)
        self.rows, self.columns = _elements(width)
        self.m = self.l = None
        self.values, self.executed = np.zeros((ROWS, 0), np.float32), []

    def first(self, scores: np.ndarray) -> None:
        top = (scores.max(1) * np.float32(FACTOR)).astype(np.float32)
        self.m = np.stack([top[LANES // 4], top[LANES // 4 + 8]])
        self.values = np.exp2(scores * np.float32(FACTOR) - np.where(top == -np.inf, 0, top)[:, None])
        own = self.values[self.rows, self.columns]
        self.l = np.stack([own[np.arange(self.count) // 2 % 2 == r].sum(0) for r in range(2)])

    def next(self, scores: np.ndarray) -> None:
        registers, at = {}, lambda kind, n: f"${(kind - 1) * self.count + self.count // self.packed + n}"
        for n in range(self.count):
            registers[at(5, n)] = scores[self.rows[n], self.columns[n]].astype(np.float32)
            registers[at(6, n)] = self.m[n // 2 % 2]
            registers[at(7, n)] = np.full(32, FACTOR, np.float32)
        with np.errstate(all="ignore"):
            self.executed.append(run(self.text, registers))
            p = np.zeros_like(scores)
            for n in range(self.count):
                weight = registers[f"${n // self.packed}"]
                if self.packed == 2:
                    weight = torch.from_numpy((weight >> 16 * (n % 2)).astype(np.int16)).view(self.dtype).float().numpy()
                p[self.rows[n], self.columns[n]] = weight
                for kind in range(1, 5):  # all elements of a row say the same
                    assert np.array_equal(registers[at(kind, n)], registers[at(kind, n // 2 % 2 * 2)], equal_nan=True)
            total, self.m, alpha = (np.stack([registers[at(kind, 2 * r)] for r in range(2)]) for kind in (1, 2, 3))
            grown = registers[at(4, 0)]
            assert not (p > 256).any(), "16-bit weights have a greatest number"
            assert grown.all() or (alpha == 1).all(), "warps that have not grown go past the products"
            self.l = self.l * alpha + total
            by_row = np.concatenate([alpha[0][::4], alpha[1][::4]])
            self.values = np.concatenate([self.values * by_row[:, None], p], 1)

    def sums(self) -> tuple[np.ndarray, np.ndarray]:
        """log2 of each row's sum, and its weights over the sum."""
        with np.errstate(all="ignore"):
            l = np.concatenate([self.l[r].reshape(8, 4).sum(1) for r in range(2)])
            m = np.concatenate([self.m[r][::4] for r in range(2)])
            return m + np.log2(l), self.values / l[:, None]


@pytest.mark.parametrize("width, kind", [(32, "bf16"), (64, "fp16"), (128, "bf16"), (128, "fp32")])
@pytest.mark.parametrize("row", [3, 12])
@pytest.mark.parametrize("case", ["quiet", "rising", "jump", "falling", "late rows", "hidden rows", "far below", "overflow"])
def test_weights_are_a_softmax_whatever_maximum_they_were_taken_from(width, kind, case, row):
    g = np.random.default_rng(width)
    tiles = [g.normal(size=(ROWS, width)).astype(np.float32) * 8 for _ in range(5)]
    for t, tile in enumerate(tiles):
        if case == "rising":
            tile += 30 * t
        elif case == "falling":
            tile -= 60 * t
        elif case == "jump" and t == 3:
            tile[row, 17] = 900
        elif case == "overflow" and t == 2:
            tile[row] += 4000  # exp2 of the exponents from the maximum before is infinite
        elif case in ("late rows", "far below"):
            tile[row: row + 3] = -np.inf if t < 2 else tile[row: row + 3] - 5000 * (case == "far below")
        elif case == "hidden rows":
            tile[row] = -np.inf
    warp = Warp(width, kind)
    warp.first(tiles[0])
    for tile in tiles[1:]:
        warp.next(tile)
    scores = np.concatenate(tiles, 1).astype(np.float64) * np.float32(FACTOR)
    seen = scores.max(1) > -np.inf
    top = np.where(seen, scores.max(1), 0)
    weights = np.exp2(scores - top[:, None])
    lse, found = warp.sums()
    np.testing.assert_allclose(lse[seen], (top + np.log2(np.where(seen, weights.sum(1), 1)))[seen], rtol=1e-6, atol=1e-5)
    np.testing.assert_allclose(found[seen], (weights / np.where(seen, weights.sum(1), 1)[:, None])[seen], rtol={"bf16": 2 ** -8, "fp16": 2 ** -10, "fp32": 1e-4}[kind], atol=1e-6)
    assert (lse[~seen] == -np.inf).all() and (warp.values[~seen] == 0).all() and seen.all() == (case != "hidden rows")
    renewed = [n > min(warp.executed) for n in warp.executed]
    assert renewed == {"quiet": [False] * 4, "falling": [False] * 4}.get(case, renewed)
    if case == "overflow":
        assert renewed == [False, True, False, False]


def test_scores_that_are_no_numbers_leave_no_number():
    for bad in (np.nan, np.inf):
        tiles = [np.zeros((ROWS, 64), np.float32) for _ in range(3)]
        tiles[1][6, 9] = bad
        warp = Warp(64)
        warp.first(tiles[0])
        warp.next(tiles[1])
        warp.next(tiles[2])
        lse, found = warp.sums()
        others = np.arange(ROWS) != 6
        assert np.isnan(found[6]).any() and np.allclose(lse[others], np.log2(192)) and np.isfinite(found[others]).all()


def test_equal_scores_keep_their_maximum():
    """As many weights of 1 as a thread can have of a row are no reason to renew it."""
    warp = Warp(128)
    warp.first(np.ones((ROWS, 128), np.float32))
    for _ in range(3):
        warp.next(np.ones((ROWS, 128), np.float32))
    assert len(set(warp.executed)) == 1


@pytest.mark.parametrize("grown", [0, 1])
def test_rescaled_goes_past_its_products(grown):
    count = 8
    registers = {f"${n + count}": np.full(32, n, np.float32) for n in range(count)} | {f"${n + 2 * count}": np.full(32, 0.5, np.float32) for n in range(count)} \
        | {f"${n + 3 * count}": np.full(32, grown) for n in range(count)}
    executed = run(_texts()["rescale_text"](count).replace("setp.eq.s32", "setp.eq.f32"), registers)
    assert [registers[f"${n}"][0] for n in range(count)] == [n * (0.5 if grown else 1) for n in range(count)]
    assert executed == count * (1 + grown) + 2


def test_bounded_exponentials_are_as_good_by_polynomial_as_float16_rounds():
    """Over all exponents that a cap allows, and that of what is hidden; what is no number stays none."""
    text, found = _texts()["bounded_text"](4), []
    scores = np.concatenate([np.linspace(-80 / FACTOR, 80 / FACTOR, 4000), [-120 / FACTOR, np.nan, 0.0, -0.0] * 8]).astype(np.float32)
    for given in scores.reshape(-1, 32):
        registers = {f"${4 + n}": given for n in range(4)} | {f"${8 + n}": np.full(32, FACTOR, np.float32) for n in range(4)}
        with np.errstate(all="ignore"):
            run(text, registers)
        found.append([registers[f"${n}"] for n in range(4)])
    finite, exact = np.isfinite(scores), np.exp2(scores.astype(np.float64) * np.float32(FACTOR))
    for weights in np.stack(found, 1).reshape(4, -1):
        np.testing.assert_allclose(weights[finite], exact[finite], rtol=1e-4)  # float16 rounds by five times as much
        assert np.isnan(weights[np.isnan(scores)]).all()
