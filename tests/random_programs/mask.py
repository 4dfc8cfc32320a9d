"""Masks and additive terms, as text over scores `s` of shape (*batch, M, N)."""
from __future__ import annotations

from dataclasses import dataclass

import torch

from .writer import Writer

LOWEST = "torch.finfo({s}.dtype).min"


@dataclass
class Frame:
    """Where the scores stand: names and sizes of the batch dims, and how the program writes M and N."""

    batch: list[tuple[str, int]]
    M: int
    N: int

    @property
    def rank(self) -> int:
        return len(self.batch)

    @property
    def sizes(self) -> list[int]:
        return [n for _, n in self.batch]

    def lifted(self, name: str, dims: list[str], rows: bool, columns: bool) -> str:
        """Index text that broadcasts a tensor with these batch dims (and rows, columns) to the scores."""
        picks = [":" if n in dims else "None" for n, _ in self.batch] + [":" if rows else "None", ":" if columns else "None"]
        while picks and picks[0] == "None":
            picks.pop(0)
        return f"{name}[{', '.join(picks)}]" if "None" in picks else name


def _rows(w: Writer) -> str:
    return w.pick("torch.arange(M)[:, None]", "torch.arange(M).unsqueeze(-1)", "torch.arange(0, M).view(-1, 1)")


def _columns(w: Writer) -> str:
    return w.pick("torch.arange(N)[None, :]", "torch.arange(N)", "torch.arange(N).unsqueeze(0)")


def _held(w: Writer, i: str, j: str) -> str:
    """A condition on positions in a dtype at whose end they are: it rounds them, or they wrap."""
    dtype, base = w.pick(("bfloat16", 254), ("float16", 2046), ("float32", 2 ** 24 - 2), ("int8", 124), ("uint8", 252), ("int16", 2 ** 15 - 3), ("int32", 2 ** 31 - 3))
    row, column = (w.pick(f"({x} + {base}).to(torch.{dtype})", f"({x} * {base // 2}).to(torch.{dtype})") for x in (i, j))
    if w.chance(0.5):
        row, column = (f"({i} + {base}).to(torch.{dtype})", f"({j} + {base}).to(torch.{dtype})")
    return w.pick(f"({row} >= {column})", f"({row} == {column})", f"(({row} - {column}) * 2 <= 3)", f"({row} - {column}).bool()", f"({column} > {base})", f"({row} < {column} + 1)")


def condition(w: Writer, f: Frame) -> str:
    """Text of a condition, true where a key is visible, that broadcasts to the scores."""
    i, j = _rows(w), _columns(w)
    options = [
        f"({j} <= {i})", f"({i} >= {j})", f"({j} <= {i} + {f.N - f.M})", "torch.ones(M, N).tril().bool()",
        "torch.tril(torch.ones(M, N, dtype=torch.bool))", "~torch.ones(M, N, dtype=torch.bool).triu(1)",
        f"(({i} - {j}).abs() <= 2)", f"(({j} <= {i}) & ({j} > {i} - 3))", f"(({i} - {j}) % 2 == 0)", f"({j} // 3 <= {i} // 3)",
        f"(({j} < 2) | ({j} <= {i}))", f"torch.lt({j}, {i} + 1)", "(torch.ones(M, N).triu(-1).bool() & torch.ones(M, N).tril(2).bool())",
        "(torch.tril(torch.ones(M, N)) != 0)", f"~({j} > {i})", f"torch.logical_not({j} > {i})",
    ]
    names = [n for n, _ in f.batch]
    inputs = []
    if names:
        b, size = f.batch[0]
        inputs += [
            lambda: f.lifted(w.condition("pad", size, f.N), [b], False, True),
            lambda: f.lifted(w.condition("keep", size, f.M, f.N), [b], True, True),
            lambda: f"({f.lifted(w.integers('pad_ids', size, f.N, high=2), [b], False, True)} {w.pick('!= 1', '== 0')})",
            lambda: f"({_columns(w)} < {f.lifted(w.integers('lengths', size, low=1, high=f.N + 1), [b], False, False)})",
            lambda: (lambda a, c: f"({f.lifted(a, [b], True, False)} == {f.lifted(c, [b], False, True)})")(
                w.integers("docs_q", size, f.M, high=2), w.integers("docs_k", size, f.N, high=2)),
            lambda: w.condition("allowed", *f.sizes, f.M, f.N),
        ]
    inputs += [lambda: w.condition("layout", f.M, f.N), lambda: w.condition("columns_kept", f.N)]
    if w.chance(0.45):
        return w.pick(*inputs)()
    return _held(w, i, j) if w.chance(0.2) else w.pick(*options)


def conditions(w: Writer, f: Frame) -> str:
    """One condition, or a combination of two."""
    a = condition(w, f)
    if w.chance(0.65):
        return a
    b = condition(w, f)
    return w.pick(f"({a} & {b})", f"({a} & {b})", f"torch.logical_and({a}, {b})", f"({a} | {b})", f"({a} * {b})", f"(~(~({a}) | ~({b})))")


def mask(w: Writer, s: str, f: Frame, fill: str) -> str:
    """A line that masks `s`; the name that then holds the scores. `fill` is the constant of every mask of one program."""
    seen = w.let("visible", conditions(w, f))
    low = LOWEST.format(s=s) if fill == "lowest" else "float('-inf')" if fill == "inf" else fill
    ways = [
        lambda: w.let("s", f"{s}.masked_fill(~{seen}, {low})"), lambda: w.let("s", f"torch.where({seen}, {s}, {low})"),
        lambda: w.let("s", f"{s}.masked_fill({seen} == 0, {low})"), lambda: w.let("s", f"torch.where(~{seen}, {low}, {s})"),
        lambda: w.let("s", f"{s} + torch.zeros_like({s}).masked_fill(~{seen}, {low})"),
        *([lambda: w.let("s", f"{s} + torch.where({seen}, 0.0, {low}).to({s}.dtype)")] if w.dtype != torch.float64 else []),
        lambda: w.let("s", f"{s}.masked_fill(torch.logical_not({seen}), {low})"),
        lambda: (w.line(f"{s} = {s} * 1.0"), w.line(f"{s}.masked_fill_(~{seen}, {low})"), s)[-1],
    ]
    if fill != "inf":
        ways.append(lambda: w.let("s", f"{s} + (1.0 - {seen}.to({s}.dtype)) * {low}"))
    else:
        ways.append(lambda: w.let("s", f"{s} + {seen}.to({s}.dtype).log()"))
    return w.pick(*ways)()


def _differing(w: Writer, f: Frame, i: str, j: str, of_rows: bool) -> str:
    """Relative positions of each row, or of each column: gathered at what their distance says."""
    rows, columns = (f.M, f.N) if of_rows else (f.N, f.M)
    at = f"(({i} - {j}).clamp(-3, 3) + 3){'' if of_rows else '.mT'}"
    gathered = f"torch.gather({w.tensor('table', *f.sizes, rows, 7)}, -1, {at}.expand({', '.join(map(str, (*f.sizes, rows, columns)))}))"
    return gathered if of_rows else f"{gathered}.mT"


def term(w: Writer, s: str, f: Frame) -> str:
    """A line that adds a bias, or changes the scores by a score function; the name that then holds them."""
    i, j = _rows(w), _columns(w)
    options = [
        lambda: f"{s} + {w.tensor('bias', f.M, f.N)}", lambda: f"{s} + {w.tensor('bias', f.N)}",
        lambda: f"{s} - {w.pick('0.25', '0.5')} * ({i} - {j}).abs()",
        lambda: f"{s} + {w.tensor('table', f.M + f.N)}[{i} - {j} + {f.N - 1}]",
        lambda: f"{s} + {w.tensor('near', 5)}[({j} - {i}).clamp(-2, 2) + 2]",
        lambda: f"torch.tanh({s} / 5.0) * 5.0", lambda: f"{s} * {w.tensor('temperature')}.exp()",
        lambda: f"{s} + {s}.new_zeros(M, N)", lambda: f"{s} + ({i} == {j}).to({s}.dtype)",
    ]
    if f.batch:
        name, size = f.batch[-1]
        first, b = f.batch[0]
        options += [
            lambda: f"{s} + {w.tensor('bias', size, f.M, f.N)}",
            lambda: f"{s} + {f.lifted(w.tensor('bias', b, f.N), [first], False, True)}",
            lambda: f"{s} - {f.lifted(w.tensor('slopes', size), [name], False, False)} * ({i} - {j}).abs()" if f.rank > 1 else f"{s} * 0.75",
            lambda: f"{s} + {w.tensor('table', size, 7)}[:, ({i} - {j}).clamp(-3, 3) + 3]",
            lambda: f"{s} + {w.tensor('bias', *f.sizes, f.M, f.N)}",
            lambda: f"{s} + torch.sigmoid({w.tensor('bias', *f.sizes, f.M, f.N)}) * 2.0", lambda: f"({s} + {w.tensor('bias', size, f.M, f.N)}) * 0.5",
            lambda: f"{s} + 0.5 * {_differing(w, f, i, j, True)}", lambda: f"{s} + ({_differing(w, f, i, j, False)} + {w.tensor('bias', *f.sizes, f.M, f.N)})",
        ]
    out = w.let("s", w.pick(*options)())
    if w.dtype in (torch.float16, torch.bfloat16):  # integers times a number are float32
        w.line(f"{out} = {out}.to(q.dtype)")
    return out
