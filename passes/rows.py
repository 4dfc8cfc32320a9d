"""Can a row be hidden entirely? Where none can, nothing need be known of what such a row yields."""
from __future__ import annotations

import math
from typing import Container, Mapping

import torch

from flashfx.expr import Call, Const, Expr, Var, conjunction, conjuncts, is_const, nonnegative, substitute, walk
from flashfx.reference import evaluate

from .find import Site
from .index import Size
from .masks import normal_condition
from .pull import Puller
from .values import Refused, Value

LARGEST = 2 ** 22
"""Elements of a condition that are looked at, one by one."""


def every_row_sees(visible: Expr, extents: Mapping[str, Size]) -> bool:
    """Is it certain that every query sees a key? The first one, or, decided for conditions over positions alone and static sizes by trying them all, another."""
    if all(map(_holds, conjuncts(substitute(visible, {Var("j"): Const(0)})))):
        return True
    m, n = extents["i"], extents["j"]
    if visible.loads or not visible.variables <= {"i", "j"} or not isinstance(m, int) or not isinstance(n, int) or not 0 < m * n <= LARGEST:
        return False
    seen = evaluate(visible, {"i": torch.arange(m)[:, None], "j": torch.arange(n)}, {}, None, torch.float64)
    return bool(seen.expand(m, n).any(-1).all())


def _holds(condition: Expr) -> bool:
    return is_const(condition, True) or isinstance(condition, Call) and condition.op == "le" and is_const(condition.args[0], 0) and nonnegative(condition.args[1])


def refuse_nan(site: Site, blanked: Container[Value], score: Expr, conditions: list[Expr] | None, puller: Puller) -> None:
    """Raises Refused where queries were blanked behind the product (`linear`) and may be NaN there: set to 0 in front of it, their weights give v no gradient.

    conditions  where keys are visible to each mask that leaves a row NaN of which it hides all keys; None if not all such masks are known
    """
    infinite = any(isinstance(x, Const) and isinstance(x.value, float) and not math.isfinite(x.value) for x in walk(score))
    if site.out in blanked and (infinite or conditions is None or not every_row_sees(normal_condition(conjunction(conditions), puller), puller.extents)):
        raise Refused("queries are blanked after the softmax, and a mask may hide all keys of one by -inf: its weights are NaN then", site.out,
                      "hide scores by a large negative number, or make NaN 0 (nan_to_num) after the softmax")
