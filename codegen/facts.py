"""What the time of a kernel depends on beside its tiles: of a spec and a problem, worked out once for all tiles that are weighed."""
from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

from ..expr import Call, Const, Expr, Load, Var, cached_hash, call, walk
from ..region import Problem
from ..spec import AttentionSpec
from .captured import ends, is_relative
from .factors import peel
from .limits import WIDTHS, padded
from .parts import chunks
from .ranges import bounds
from .schedules.hopper import BY_THIRDS
from .tiles import estimate, known_names, unevenness

ELEMENT = {"bool": 1, "int": 8}
ENDS = 128
"""Keys before and behind the diagonal beyond which a table that ends is taken to be one number. Where it ends is data; T5's
`relative_attention_max_distance`, 128, is assumed."""


@cached_hash
@dataclass(frozen=True)
class Facts:
    """See the module's docstring.

    z, share    batch indices, and how many of them share keys
    functions   special functions of a score's own for each element, in exponentials; a division takes two
    steps       other operations for each element
    loads       (bytes of an element, is it read at j - i?, elements in all) of each tensor with an element for every query and key
    near        where elements of those are read one by one: where visible, or, if all are tables that end, `ENDS` from the diagonal at most
    places      operations for the place of each
    group       heads that are rows of one tile; z counts the others
    """

    visible: Expr
    z: int
    share: int
    M: int
    N: int
    D: int
    E: int
    width: int
    functions: float
    steps: float
    random: bool
    pieces: bool
    loads: tuple[tuple[int, bool, int], ...]
    near: Expr
    places: float
    given: tuple[tuple[str, int], ...]
    group: int = 1

    def packed(self, packed: bool = True) -> Facts:
        """Heads that share keys as rows of one tile."""
        return replace(self, z=self.z // self.share, share=1, group=self.share) if packed and self.group == 1 else self

    def heads(self, n: int) -> tuple[int, int]:
        """Columns of q and k, and of v, of which tiles of n keys compute products: by thirds, padded to multiples of 64."""
        thirds = n == BY_THIRDS
        return padded(self.D, thirds), padded(self.E, thirds)

    @functools.cached_property
    def rows(self) -> int:
        """Loops of a program over keys: one, and one for each end at which a mask cuts tiles."""
        return _loops(self.visible, "j")

    @functools.cached_property
    def keys(self) -> int:
        """Loops of a program over rows."""
        return _loops(self.visible, "i")

    @functools.cached_property
    def uneven(self) -> float:
        """How unequally many keys rows see, from 0 (all see as many) to 1 (as under a causal mask)."""
        return unevenness(self.visible, self.M, self.N, self.given)

    def long_first(self, by_keys: bool, schedule: str) -> bool:
        """Are the last rows those with most keys, or the first keys those that most rows see? Then the schedules start those of several batch indices first."""
        if by_keys:
            return bounds(self.visible, "i").shrinks
        found = bounds(self.visible, "j")
        return found.only_grows if schedule == "triton" else found.grows

    def tiles(self, m: int, n: int, near: bool = False) -> tuple[float, float]:
        """(visible, partial) tiles over all batch indices; tiles that only data hide count as visible. near: those with elements of `near`."""
        seen = self.near if near else self.visible
        full, partial = estimate(seen, m if self.group == 1 else max(self.M, 1), n, self.M, self.N, self.given)
        times = self.z if self.group == 1 else self.z * -(-self.M * self.group // m)
        return times * (full + partial), times * partial

    def gathered(self, m: int, n: int, visible: float) -> float:
        """Those of so many visible tiles that have elements of `near`."""
        return visible if self.near == self.visible else min(visible, self.tiles(m, n, near=True)[0])


@functools.lru_cache(maxsize=4096)
def facts(spec: AttentionSpec, problem: Problem) -> Facts:
    """Of a spec at a problem's sizes. Pieces of a head count in full."""
    extents, z = dict(zip(spec.axes, problem.extents)), math.prod(problem.extents)
    own = math.prod(e for axis, e in extents.items() if axis in spec.k | spec.v)
    loads = []
    for load, relative in _across(spec):  # of the axes that it has
        whole = problem.M + problem.N if relative else problem.M * problem.N
        loads.append((WIDTHS[problem.dtype] if load.kind == "float" else ELEMENT[load.kind], relative,
                      whole * math.prod(extents[a] for a in spec.axes if a in load.variables)))
    given = known_names(spec, problem.extents, problem.sizes)
    return Facts(visible=spec.visible, z=z, share=max(z // max(own, 1), 1), M=problem.M, N=problem.N, D=padded(problem.D), E=padded(problem.Dv),
                 width=WIDTHS[problem.dtype], pieces=len(chunks(max(problem.D, problem.Dv))) > 1, loads=tuple(loads), random=spec.dropout > 0,
                 given=given, **_of_spec(spec))


@functools.lru_cache(maxsize=1024)
def _across(spec: AttentionSpec) -> tuple[tuple[Load, bool], ...]:
    """A bias or a mask with an element for every query and key, or for each j - i: which of the two."""
    return tuple((load, is_relative(load)) for load in spec.loads if {"i", "j"} <= load.variables)


@functools.lru_cache(maxsize=1024)
def _of_spec(spec: AttentionSpec) -> dict[str, object]:
    """The fields of `Facts` that hold at all sizes."""
    clamped = [load for load in spec.score.loads if ends(load)]
    places = {x for load in clamped for a in load.index for x in walk(a) if isinstance(x, Call) and "j" in x.variables}
    calls = [x.row.cost for x in walk(peel(spec.score)[0]) if isinstance(x, Call) and "j" in x.variables and x not in places]
    vectors = 2 * sum(len({"i", "j"} & load.variables) == 1 for load in spec.score.loads)  # to read one and to spread it
    band = (call("le", Var("j"), call("add", Var("i"), Const(ENDS))), call("ge", Var("j"), call("sub", Var("i"), Const(ENDS))))
    ended = clamped and all(ends(load) for load, _ in _across(spec))
    return {"functions": calls.count("mufu") + 2.0 * calls.count("div"), "steps": float(calls.count("alu") + vectors), "places": float(len(places)),
            "near": functools.reduce(lambda a, b: call("and", a, b), band, spec.visible) if ended else spec.visible}


def _loops(visible: Expr, over: str) -> int:
    found = bounds(visible, over)
    return 1 if found.is_total or not found.has_full else 2 if found.starts_full or over == "i" and found.full_hi == Var("M") else 3
