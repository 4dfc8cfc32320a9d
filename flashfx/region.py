"""The travelling record. A stage takes a `Region` and returns `replace(region, …)` or a `Refusal`; reports print it."""
from __future__ import annotations

from dataclasses import dataclass

from .expr import cached_hash
from .spec import AttentionSpec


@dataclass(frozen=True)
class Refusal:
    """Why a site is left alone. A value, not an error; its text is tested like an API.

    stage   "lift", "check", "plan" or "splice"
    reason  what stands in the way, one sentence
    node    name of the graph node that stopped the match
    source  the user's source line ("file:line in function: code"), or ""
    hint    what the user can change, one sentence
    """

    stage: str
    reason: str
    node: str
    source: str = ""
    hint: str = ""

    def __str__(self) -> str:
        where = f"\n  at {self.source}" if self.source else ""
        hint = f"\n  hint: {self.hint}" if self.hint else ""
        return f"left alone ({self.stage}): {self.reason} [node {self.node}]{where}{hint}"


@cached_hash
@dataclass(frozen=True)
class Problem:
    """The shape of one call, as far as planning needs it. Sizes are hints where the graph has symbols.

    dtype is that of q and k, v_dtype that of v ("float16", "bfloat16", "float32", "float64").
    """

    extents: tuple[int, ...]
    M: int
    N: int
    D: int
    Dv: int
    dtype: str
    v_dtype: str
    sizes: tuple[int, ...] = ()


CALLER = "<flashfx.explain>"
"""File name of the function through which `explain` calls the user's: no line of the user's."""


@dataclass(frozen=True)
class Frame:
    """One line of the user's stack, innermost last: where a node of the graph comes from."""

    file: str
    line: int
    function: str
    code: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}{': ' if self.code else ''}{self.code}"


@dataclass(frozen=True)
class Node:
    """One node of a site's graph, as it is drawn.

    op      what is called: "matmul", "softmax", or "input" for what the drawing does not look behind
    result  dtype and shape, "bfloat16[1, 12, 1024, 64]"; "" if it is no tensor
    inputs  names of the nodes that it reads, of those drawn
    role    "q", "k", "v", the name of a captured tensor, "scores", "softmax", "dropout", "output", "mask" (conditions and indices),
            "new" (put there by the rewrite), or ""
    frame   the user's line, or None
    """

    name: str
    op: str
    result: str
    inputs: tuple[str, ...]
    role: str = ""
    frame: Frame | None = None


@dataclass(frozen=True)
class Checked:
    """What verification found at one site, for one tensor ("out", or "gradient of q").

    dtype   the arithmetic of both sides: the model's, or "float64"
    error   largest difference between rewritten and original (in float64: to the original; in the model's dtype: to the original in float64)
    allowed the largest error that passes: rounding in float64, twice the original's own error in the model's dtype
    """

    what: str
    dtype: str
    error: float
    allowed: float

    @property
    def good(self) -> bool:
        return self.error <= self.allowed


@dataclass(frozen=True)
class Measured:
    """Median seconds of one site in one direction, "forward" or "backward", on random data: the calls that the graph had, one by one, and what was
    put in their place. None where a side did not fit into memory."""

    direction: str
    before: float | None
    after: float | None


@dataclass(frozen=True)
class Region:
    """One attention site on its way through the stages; later fields are filled by later stages.

    site    name of the node that computes the output (the second product, or the SDPA call)
    source  the user's source line
    stack   the user's stack at that node
    reached what the match understood, step by step, up to where it stopped
    before  the site in the graph as it was, drawn from its operands on; `after` what stands there now (empty if it was left alone)
    spec    from lift
    columns terms of the score that stand in q and k as further columns: (how many, at which indices read, the tensor)
    problem from check
    device  type of the device it was checked for
    checked from verify, if that was asked for; `unchecked` says why it is empty then
    measured likewise: times, and `unmeasured`
    """

    site: str
    source: str
    graph: str = "graph"
    called: bool = False
    spec: AttentionSpec | None = None
    captured: tuple[str, ...] = ()
    sink: str = ""
    columns: tuple[tuple[int, str, str], ...] = ()
    problem: Problem | None = None
    refusal: Refusal | None = None
    stack: tuple[Frame, ...] = ()
    reached: tuple[str, ...] = ()
    before: tuple[Node, ...] = ()
    after: tuple[Node, ...] = ()
    device: str = ""
    checked: tuple[Checked, ...] = ()
    unchecked: str = ""
    measured: tuple[Measured, ...] = ()
    unmeasured: str = ""

    @property
    def fused(self) -> bool:
        """Is the site rewritten?"""
        return self.refusal is None and self.spec is not None
