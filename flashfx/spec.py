"""`AttentionSpec`: what one attention site computes, as a value. Everything downstream sees only this.

For batch indices x = (b, h, …), query row i < M and key row j < N:

    qk[x, i, j]  = sum_d q[x, i, d] * k[x, j, d]
    s[x, i, j]   = score(qk, captured tensors, indices)                      where visible(x, i, j), else hidden
    p[x, i, j]   = exp(s) / sum_j exp(s)                                     in float32
    o[x, i, :]   = sum_j dropout(p)[x, i, j] * v[x, j, :]

A key that is not visible has weight exactly 0 in every row with a visible key. What a row with **no** visible key
yields is the numerics contract, `EmptyRow`:

* NAN       the hidden scores were -inf: 0/0, as `masked_fill(-inf)` followed by softmax gives;
* ZERO      `scaled_dot_product_attention` with a boolean or -inf mask: the row is 0 and has no gradient;
* MEAN      hidden scores were *replaced* by a huge finite constant (`masked_fill(finfo.min)`): the row is the mean of
            v over the keys of `empty_over`, and no gradient flows into q and k;
* MEAN_ADD  the constant was *added* (HuggingFace's additive masks): the same mean, and softmax's gradient flows.

The text form (`str(spec)`, `AttentionSpec.parse`) is what the rewritten graph carries in `flashfx::attention`, on one line.
"""
from __future__ import annotations

import enum
import functools
from dataclasses import dataclass

from .errors import SpecError
from .expr import BOOL, FLOAT, INT, QK, TRUE, Expr, Load, cached_hash, parse as parse_expr

MEAN_ROW = 2.0 ** 100
"""Log-sum-exp at or above this marks a row that averages v; divided by it, it is the number of keys averaged."""
HIDING_FILL = -6.0e4
"""Fills at or below this hide a key (float16's finfo.min is -65504); -1e4 and the like stay ordinary score terms."""


BLOCK, FINE = 128, 64
"""Of the blocks of a mask's run-time summary, `flashfx::block_lists`: keys, and rows in the lists by rows; and rows in the lists by keys. The tiles of a
kernel divide the blocks of the lists that it reads."""


DIFFERENCE = parse_expr("j - i + M - 1", {})
"""Where a tensor with an element for each j - i, lowest first, has that of (i, j)."""


class EmptyRow(enum.Enum):
    """What a row without any visible key yields: see the module's docstring."""

    NAN = "nan"
    ZERO = "zero"
    MEAN = "mean"
    MEAN_ADD = "mean, additive"

    @property
    def averages(self) -> bool:
        """Does such a row average v?"""
        return self in (EmptyRow.MEAN, EmptyRow.MEAN_ADD)


@dataclass(frozen=True)
class Aux:
    """A captured tensor: its name in the score and mask expressions, its element kind, its rank."""

    name: str
    kind: str
    rank: int


@cached_hash
@dataclass(frozen=True)
class AttentionSpec:
    """See the module's docstring.

    axes      names of the batch indices, outermost first; 0 to 6 of them
    q, k, v   the subset of `axes` on which each operand depends; elsewhere its extent is 1 and it is broadcast
              (grouped-query attention is a k and v without the last axis)
    aux       captured tensors, in the order in which the op receives them
    sizes     further integer sizes that expressions use, besides M, N and the extents; passed at run time
    """

    axes: tuple[str, ...]
    q: frozenset[str]
    k: frozenset[str]
    v: frozenset[str]
    score: Expr = QK
    visible: Expr = TRUE
    empty_row: EmptyRow = EmptyRow.NAN
    empty_over: Expr = TRUE
    dropout: float = 0.0
    aux: tuple[Aux, ...] = ()
    sizes: tuple[str, ...] = ()

    def __post_init__(self):
        known = {*self.axes, *self.sizes, "M", "N", "i", "j"}
        if len(known) != len(self.axes) + len(self.sizes) + 4:
            raise SpecError(f"axes {self.axes} and sizes {self.sizes} must be distinct and may not be named M, N, i or j")
        for name, operand in (("q", self.q), ("k", self.k), ("v", self.v)):
            if not operand <= set(self.axes):
                raise SpecError(f"{name} depends on {sorted(operand - set(self.axes))}, which are not batch axes {self.axes}")
        if self.score.kind != FLOAT or self.visible.kind != BOOL or self.empty_over.kind != BOOL:
            raise SpecError("score must be a float expression, visible and empty_over conditions")
        if QK in self.visible.leaves or QK in self.empty_over.leaves:
            raise SpecError("a mask may not depend on the scores")
        if not 0.0 <= self.dropout < 1.0:
            raise SpecError(f"dropout must be in [0, 1), got {self.dropout}")
        declared = {a.name: a for a in self.aux}
        for e in (self.score, self.visible, self.empty_over):
            if not e.variables <= known:
                raise SpecError(f"{e} uses {sorted(e.variables - known)}; known indices and sizes: {sorted(known)}")
            for load in e.loads:
                a = declared.get(load.name)
                if a is None or a.kind != load.kind or a.rank != len(load.index):
                    raise SpecError(f"{load} does not fit the declared captured tensors {self.aux}")

    def __str__(self) -> str:
        return to_text(self)

    @property
    def line(self) -> str:
        """The text on one line, as the graph carries it: compilers print arguments of nodes into comments of the code they generate."""
        return "; ".join(" ".join(line.split()) for line in str(self).splitlines())

    @staticmethod
    @functools.lru_cache(maxsize=4096)
    def parse(text: str) -> AttentionSpec:
        """Read what `str(spec)` or `spec.line` gave. Raises `SpecError` naming the line."""
        return from_text(text)

    @functools.cached_property
    def loads(self) -> tuple[Load, ...]:
        """Every distinct load of score and masks."""
        return tuple(sorted({load for e in (self.score, self.visible, self.empty_over) for load in e.loads}, key=str))

    def present(self, operand: str) -> tuple[bool, ...]:
        """For each batch axis: does `operand` ("q", "k" or "v") vary along it?"""
        return tuple(a in getattr(self, operand) for a in self.axes)

    def reference(self, q, k, v, aux=(), sizes=(), keep=None, dtype=None):
        """The output in plain PyTorch, float64 by default: see `flashfx.reference.reference`."""
        import torch
        from .reference import reference
        return reference(self, q, k, v, aux, sizes, keep, dtype or torch.float64)

    def to_flex(self, aux=(), sizes=()):
        """The spec as FlexAttention's score and mask functions: see `flashfx.reference.to_flex`."""
        from .reference import to_flex
        return to_flex(self, aux, sizes)

    @functools.cached_property
    def is_masked(self) -> bool:
        """Is any key hidden from any query?"""
        return self.visible != TRUE

    @functools.cached_property
    def is_data_masked(self) -> bool:
        """Does the mask read captured tensors at i or j? Then only a run knows which tiles it hides."""
        return any({"i", "j"} & load.variables for load in self.visible.loads)

    @functools.lru_cache(maxsize=1024)
    def mask(self) -> AttentionSpec:
        """The mask alone, over the axes and with the captured tensors on which it depends: what `flashfx::block_lists` summarises.

        before -> after: axes (b, h), visible pad[b, j] -> axes (b,), visible pad[b, j], score qk
        `EmptyRow.MEAN` if rows that it leaves empty average v, over whatever keys.
        """
        average = {"empty_row": EmptyRow.MEAN} if self.empty_row.averages else {}
        axes = tuple(a for a in self.axes if a in self.visible.variables)
        read = {load.name for load in self.visible.loads}
        return AttentionSpec(axes, *[frozenset(axes)] * 3, visible=self.visible, aux=tuple(a for a in self.aux if a.name in read),
                             sizes=tuple(s for s in self.sizes if s in self.visible.variables), **average)


def _operand(name: str, axes: tuple[str, ...], subset: frozenset[str], row: str) -> str:
    return f"{name}[{', '.join([a for a in axes if a in subset] + [row])}]"


def to_text(spec: AttentionSpec) -> str:
    """A few lines of mathematics; `from_text` reads them back."""
    lines = ["attention[" + ", ".join((*spec.axes, "i", "j")) + "]"]
    for a in spec.aux:
        lines.append(f"  given   {a.name}: {a.kind}[{a.rank}]")
    if spec.sizes:
        lines.append("  sizes   " + ", ".join(spec.sizes))
    lines.append("  qk    = " + _operand("q", spec.axes, spec.q, "i") + " . " + _operand("k", spec.axes, spec.k, "j"))
    lines.append(f"  score = {spec.score}")
    if spec.is_masked:
        lines.append(f"  where   {spec.visible}")
        over = "" if spec.empty_over == TRUE else f" over {spec.empty_over}"
        lines.append(f"  empty   {spec.empty_row.value}{over}")
    if spec.dropout:
        lines.append(f"  drop    {spec.dropout!r}")
    lines.append("  out   = softmax_j(score) . " + _operand("v", spec.axes, spec.v, "j"))
    return "\n".join(lines)


def from_text(text: str) -> AttentionSpec:
    fields: dict = {"aux": [], "sizes": ()}
    pending: list[tuple[str, str]] = []
    for number, line in enumerate(text.strip().replace(";", "\n").splitlines(), 1):
        line = line.strip()
        try:
            head, _, rest = line.partition(" ")
            rest = rest.strip().removeprefix("=").strip()
            if head.startswith("attention["):
                names = line.removeprefix("attention[").removesuffix("]").split(", ")
                if names[-2:] != ["i", "j"]:
                    raise SpecError("the last two indices must be i, j")
                fields["axes"] = tuple(names[:-2])
            elif head == "given":
                name, kind = rest.split(": ")
                kind, rank = kind.removesuffix("]").split("[")
                if kind not in (BOOL, INT, FLOAT):
                    raise SpecError(f"unknown element kind {kind!r}")
                fields["aux"].append(Aux(name, kind, int(rank)))
            elif head == "sizes":
                fields["sizes"] = tuple(rest.split(", "))
            elif head == "qk":
                q, k = rest.split(" . ")
                fields["q"], fields["k"] = _subset(q), _subset(k)
            elif head == "out":
                fields["v"] = _subset(rest.split(" . ")[1])
            elif head == "drop":
                fields["dropout"] = float(rest)
            elif head in ("score", "where", "empty"):
                pending.append((head, rest))
            else:
                raise SpecError(f"unknown field {head!r}")
        except (ValueError, IndexError) as error:
            raise SpecError(f"line {number} of the spec does not read: {line!r} ({error})") from error
    kinds = {a.name: a.kind for a in fields["aux"]}
    for head, rest in pending:
        if head == "empty":
            value, _, over = rest.partition(" over ")
            fields["empty_row"] = EmptyRow(value)
            if over:
                fields["empty_over"] = parse_expr(over, kinds)
        else:
            fields["score" if head == "score" else "visible"] = parse_expr(rest, kinds)
    missing = {"axes", "q", "k", "v"} - fields.keys()
    if missing:
        raise SpecError(f"the spec text lacks {sorted(missing)}: {text!r}")
    return AttentionSpec(**{**fields, "aux": tuple(fields["aux"])})


def _subset(operand: str) -> frozenset[str]:
    inside = operand[operand.index("[") + 1:].removesuffix("]")
    return frozenset(inside.split(", ")[:-1])

