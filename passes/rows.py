"""Can a row be hidden entirely? Where none can, nothing need be known of what such a row yields."""
from __future__ import annotations

from typing import Mapping

import torch

from flashfx.expr import Expr
from flashfx.reference import evaluate

from .index import Size

LARGEST = 2 ** 22
"""Elements of a condition that are looked at, one by one."""


def every_row_sees(visible: Expr, extents: Mapping[str, Size]) -> bool:
    """Is it certain that every query sees a key? Decided for conditions over positions alone and static sizes, by trying them all."""
    m, n = extents["i"], extents["j"]
    if visible.loads or not visible.variables <= {"i", "j"} or not isinstance(m, int) or not isinstance(n, int) or not 0 < m * n <= LARGEST:
        return False
    seen = evaluate(visible, {"i": torch.arange(m)[:, None], "j": torch.arange(n)}, {}, None, torch.float64)
    return bool(seen.expand(m, n).any(-1).all())
