"""classes: tensors that a score reads at a class of the key, `rel[b, i, j // 64]`, and of those which may stand in q and k (`columns.py`)."""
from __future__ import annotations

from typing import Mapping

import torch

from flashfx.expr import Expr, Load

from .index import Size, size
from .operands import constant_factor
from .rules import PRODUCTS
from .softmax import is_rounding
from .values import Value
from .views import VIEWS

WIDEST = {torch.float16: 256, torch.bfloat16: 256}
"""Columns of q and k, those added included, up to which a product is faster than what it replaces; of other dtypes 128, beyond which float32 lacks registers."""
ALIGNED = 8
"""Columns come in multiples of this: rows that TMA can copy."""


def class_dim(load: Load) -> int | None:
    """The one dim of a load that is read at a function of j alone, the others at none of j."""
    dims = [d for d, a in enumerate(load.index) if "j" in a.variables]
    return dims[0] if len(dims) == 1 and load.index[dims[0]].variables == {"j"} and not load.index[dims[0]].loads else None


def of_product(v: Value) -> bool:
    """Is it what a matrix product yields, through views, casts and constant factors? No such tensor hides keys by infinity: times 0 that were NaN."""
    while v.name not in PRODUCTS:
        if v.op is None or not (v.name in VIEWS and v.name != "copy.default" or is_rounding(v) or constant_factor(v) is not None):
            return False
        v = v.args[0]
    return True


def could_stand(e: Expr, loads: Mapping[str, Value], head: Size, keys: Size, dtype: torch.dtype) -> bool:
    """Could all that an expression reads stand in q and k? loads: name -> tensor; head: columns of q; keys: how many; dtype: of q."""
    wide = 0
    for load in e.loads:
        v, dim = loads[load.name], class_dim(load)
        if dim is None or "i" not in load.variables or v.dtype != dtype or not of_product(v) or not isinstance(width := size(v.shape[dim]), int):
            return False
        wide += width
    return fits(wide, head, keys, dtype)


def fits(wide: int, head: Size, keys: Size, dtype: torch.dtype) -> bool:
    """Are so many columns worth it beside a head's, for so many keys? Half as many as keys are as many numbers as half of the scores."""
    return isinstance(head, int) and isinstance(keys, int) and 0 < 2 * wide <= keys and padded(head + wide) <= WIDEST.get(dtype, 128)


def padded(columns: int) -> int:
    return -(-columns // ALIGNED) * ALIGNED
