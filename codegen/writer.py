"""A small writer of Python text: lines, indentation, sections that are filled later, and kernels that take only what they use."""
from __future__ import annotations

import re
from contextlib import contextmanager
from typing import Iterable, Mapping, Sequence

WIDTH = 120


class Writer:
    """Collects lines. `section()` marks a place above later lines that can still grow (hoisted values go there)."""

    def __init__(self, indent: int = 0):
        self._parts: list[str | Writer] = []
        self._indent = indent

    def line(self, text: str = "", comment: str = "") -> None:
        """One line; the comment follows it, or stands above if it does not fit. A long line continues inside its brackets."""
        pad = "    " * self._indent
        if comment and len(pad) + len(text) + len(comment) + 4 > WIDTH:
            self._parts.append(f"{pad}# {comment}")
            comment = ""
        if comment:
            self._parts.append(f"{pad}{text}  # {comment}" if text else f"{pad}# {comment}")
        else:
            self._parts.extend(folded(pad + text) if text else [""])

    def lines(self, *texts: str) -> None:
        for text in texts:
            self.line(text)

    def quoted(self, text: str) -> None:
        """Lines inside a string literal: they stand as they are, whatever their length."""
        self._parts.extend(text.splitlines())

    @contextmanager
    def block(self, head: str, comment: str = ""):
        """`head` and an indented block under it."""
        self.line(head, comment)
        self._indent += 1
        yield self
        self._indent -= 1

    def section(self) -> Writer:
        child = Writer(self._indent)
        self._parts.append(child)
        return child

    def assign(self, name: str, value: str, comment: str = "") -> str:
        text = f"{name} = {value}"
        if len(text) + 4 * self._indent > WIDTH and not re.fullmatch(r"[\w.]+\(.*\)", value):
            text = f"{name} = ({value})"  # brackets to continue in
        self.line(text, comment)
        return name

    @property
    def text(self) -> str:
        return "\n".join(self._flat())

    def _flat(self) -> Iterable[str]:
        for part in self._parts:
            if isinstance(part, Writer):
                yield from part._flat()
            else:
                yield part


def folded(text: str) -> list[str]:
    """A line of code over several, broken inside brackets after an operator or a comma, as deep as the bracket."""
    out, around = [], []  # columns of brackets that earlier lines opened
    while len(text) > WIDTH:
        opened: list[int] = [*around]
        best = None
        for n, c in enumerate(text[: WIDTH + 1]):
            if c in "([{":
                opened.append(n)
            elif c in ")]}" and opened:
                opened.pop()
            elif c == " " and opened and text[:n].strip() and text[n - 1] in ",+&|*-<>=" and text[n - 2: n] not in ("=-", ":,"):
                if best is None or len(opened) <= best[0]:
                    best = (len(opened), n, [*opened])
        if best is None:
            break
        out.append(text[: best[1]])
        around = [min(column, WIDTH // 2 - 1) for column in best[2]]
        text = " " * (around[-1] + 1) + text[best[1] + 1:]
    return [*out, text]


def wrapped(head: str, items: Sequence[str], tail: str, indent: int = 0) -> list[str]:
    """`head(items)tail` over as many lines as it needs, continued under the opening bracket."""
    pad, continuation = "    " * indent, " " * (4 * indent + len(head))
    out, current = [], pad + head
    for n, item in enumerate(items):
        piece = item + (", " if n + 1 < len(items) else tail)
        if len(current) + len(piece.rstrip()) > WIDTH and current.strip() != head.strip():
            out.append(current.rstrip())
            current = continuation
        current += piece
    if not items:
        current += tail
    return [*out, current.rstrip()]


HOIST = "HOIST"
"""May the compiler work out in front of a loop what stays the same in it? It holds that in registers throughout: a kernel that spills is built without (`spilling`)."""


class Kernel:
    """One `@triton.jit` function and its launch. Arguments that the body does not name are left out.

    arguments  name in the kernel -> expression in the host function, in the order of the signature
    options    name of the host's dict of tile sizes and launch options; `constexprs` are those that the kernel sees
    multiples  arguments that are known to be multiples of a number, which the compiler then knows too
    hoists     the value of `HOIST` unless it spills
    """

    def __init__(self, name: str, doc: str, arguments: Mapping[str, str], constexprs: Sequence[str], options: str, multiples: Mapping[str, int] | None = None):
        self.name, self.doc, self.options, self.multiples, self.hoists = name, doc, options, multiples or {}, True
        self._arguments, self._constexprs = dict(arguments), constexprs
        self.body = Writer(1)

    def _used(self, names: Mapping[str, str]) -> dict[str, str]:
        words = set(re.findall(r"[A-Za-z_]\w*", re.sub(r"#.*", "", self.body.text)))
        return {name: value for name, value in names.items() if name in words}

    @property
    def source(self) -> str:
        parameters = [*self._used(self._arguments), *(f"{c}: tl.constexpr" for c in self._constexprs)]
        parameters += [f"{HOIST}: tl.constexpr = {self.hoists}"] if f"not {HOIST}" in self.body.text else []
        told = [f"    {name} = {name} // {number} * {number}" for name, number in self._used(self.multiples).items()]
        told = ["    # Multiples, of which the compiler can copy so many elements at once", *told] if told else []
        return "\n".join(["@triton.jit", *wrapped(f"def {self.name}(", parameters, "):"), f'    """{self.doc}"""', *told, self.body.text])

    def call(self, grid: str, out: Writer) -> None:
        """Write the launch into the host function."""
        values = [value.replace("OPTIONS", self.options) for value in _collapse(list(self._used(self._arguments).values()))]
        values.append(f"**{self.options}")
        out.line(f"grid = {grid}")
        for text in wrapped(f"{self.name}[grid](", values, ")"):
            out.line(text)


def _collapse(values: list[str]) -> list[str]:
    """before -> after: q.stride(0), q.stride(1), q.stride(2) -> *q.stride()[:3]"""
    out: list[str] = []
    for value in values:
        found = re.fullmatch(r"(\w+)\.stride\((\d+)\)", value)
        if found and found[2] == "0":
            out.append(f"*{found[1]}.stride()[:1]")
        elif found and out and out[-1] == f"*{found[1]}.stride()[:{found[2]}]":
            out[-1] = f"*{found[1]}.stride()[:{int(found[2]) + 1}]"
        else:
            out.append(value)
    return out
