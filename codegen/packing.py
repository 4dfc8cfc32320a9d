"""Heads that share keys as rows of one tile, in the portable forward kernel: where queries are few, as in decoding, the query heads of a group fill
the rows that a tile has to have anyway, and keys and values are read once for all of them. Row r is query r % M of head r // M of the group."""
from __future__ import annotations

import math

from ..region import Problem
from ..spec import AttentionSpec
from .captured import ends
from .ranges import bounds

MOST = 128
"""Rows of a group at most; from there on tiles are full without the other heads."""


def packed_axes(spec: AttentionSpec, problem: Problem) -> tuple[str, ...]:
    """The axes that k and v lack, whose heads become rows of a tile. () where there are none, or too many rows, and where a kernel takes one head for
    all rows of a tile: keys that a head sees by its number, dropout's position, a table's ends."""
    found = tuple(axis for axis in spec.axes if axis not in spec.k | spec.v)
    group = math.prod(e for axis, e in zip(spec.axes, problem.extents) if axis in found)
    range_ = bounds(spec.visible, "j")
    scalars = frozenset().union(*(e.variables for e in (range_.lo, range_.hi, range_.full_lo, range_.full_hi)))
    if group == 1 or problem.M * group > MOST or spec.dropout or scalars & {*found} or any(map(ends, spec.score.loads)):
        return ()
    return found
