"""A program in the making: lines of text, inputs, and the random choices behind them."""
from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch


@dataclass
class Program:
    """source   a function `program` of the inputs, by name
    inputs   name -> tensor
    valid    is it attention that the rewrite should take? (Else it only has to be right.)
    turns    the wrong turns that were taken
    exact_rows  may eager leave whole rows NaN? Then gradients are not compared: eager's NaN rows poison those of k and v.
    """

    source: str
    inputs: dict[str, torch.Tensor]
    turns: tuple[str, ...]
    dynamic: bool
    dtype: torch.dtype

    @property
    def valid(self) -> bool:
        return not self.turns

    def function(self):
        """The compiled text. Sources of compiled text are kept for Dynamo's reports."""
        import linecache
        name = f"random_program_{abs(hash(self.source))}"
        linecache.cache[name] = (len(self.source), None, self.source.splitlines(True), name)
        scope: dict = {}
        exec(compile(PRELUDE, "prelude", "exec"), scope)
        exec(compile(self.source, name, "exec"), scope)
        return scope["program"]

    def __str__(self) -> str:
        given = "\n".join(f"#   {n}: {str(t.dtype).removeprefix('torch.')}{list(t.shape)}{' with gradient' if t.requires_grad else ''}"
                          for n, t in self.inputs.items())
        return f"# valid: {self.valid} {', '.join(self.turns)}{' dynamic' if self.dynamic else ''}\n{given}\n{PRELUDE}{self.source}"


PRELUDE = "import math\nimport torch\nimport torch.nn.functional as F\nfrom torch import nn\n"


@dataclass
class Writer:
    """`r` makes every choice, so that a seed (or hypothesis) decides the whole program."""

    r: random.Random
    lines: list[str] = field(default_factory=list)
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    turns: list[str] = field(default_factory=list)
    dtype: torch.dtype = torch.float32
    wrong: bool = False
    named: int = 0
    differentiable: bool = True
    head: int = 0

    def pick(self, *choices):
        return self.r.choice(choices)

    def chance(self, p: float) -> bool:
        return self.r.random() < p

    def turn(self, name: str, p: float = 0.12) -> bool:
        """Take this wrong turn? Only programs that are to go wrong do, once."""
        if not self.wrong or self.turns or not self.chance(p):
            return False
        self.turns.append(name)
        return True

    def line(self, text: str) -> None:
        self.lines.append(text)

    def let(self, base: str, text: str) -> str:
        self.named += 1
        name = f"{base}{self.named}"
        self.line(f"{name} = {text}")
        return name

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.r.randrange(2 ** 31))

    def tensor(self, base: str, *shape: int, grad: bool | None = None, scale: float = 1.0) -> str:
        """A float input; it wants a gradient in most programs."""
        name = self._fresh(base)
        t = torch.randn(shape, generator=self.generator(), dtype=torch.float64) * scale
        wants = self.chance(0.85) if grad is None else grad
        self.inputs[name] = t.to(self.dtype).requires_grad_(wants and self.differentiable)
        return name

    def condition(self, base: str, *shape: int, p: float = 0.7, first: bool = True) -> str:
        """A Boolean input; each row keeps its first key if `first`."""
        name = self._fresh(base)
        t = torch.rand(shape, generator=self.generator()) < p
        if first and shape:
            t[..., 0] = True
        self.inputs[name] = t
        return name

    def integers(self, base: str, *shape: int, low: int = 0, high: int = 3) -> str:
        name = self._fresh(base)
        self.inputs[name] = torch.randint(low, high, shape, generator=self.generator())
        return name

    def _fresh(self, base: str) -> str:
        count = sum(n.rstrip("0123456789") == base for n in self.inputs)
        return base if not count else f"{base}{count + 1}"
