"""The travelling record. A stage takes a `Region` and returns `replace(region, …)` or a `Refusal`; reports print it."""
from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True)
class Region:
    """One attention site on its way through the stages; later fields are filled by later stages.

    site    name of the node that computes the output (the second product, or the SDPA call)
    source  the user's source line
    spec    from lift
    problem from check
    """

    site: str
    source: str
    graph: str = "graph"
    called: bool = False
    spec: AttentionSpec | None = None
    captured: tuple[str, ...] = ()
    sink: str = ""
    problem: Problem | None = None
    refusal: Refusal | None = None

    @property
    def fused(self) -> bool:
        return self.refusal is None and self.spec is not None
