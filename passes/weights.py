"""The attention weights between the softmax and the second product: views, casts, one dropout, an attention sink."""
from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from flashfx.expr import BOOL, TRUE, Expr, call, cast

from .behind import readers
from .find import DROPOUTS
from .index import Affine, Index, Size, broadcast, same, size
from .maker import Maker
from .masks import normal_condition
from .operands import radix
from .pull import Puller, gradient_ends
from .softmax import Softmax, is_rounding, same_values, softmax_of, unshifted
from .values import Refused, Value, ValueGraph
from .views import step_through
from .zeroed import Zeroed, zeroed


@dataclass
class Dropped:
    """Where dropout stands: the value that draws the random numbers, p, and the index at which the site reads it."""

    value: Value
    p: object
    at: Index = ()

    def order(self, axes: dict[str, Size]) -> tuple:
        """Equal for sites that meet the same random numbers in the same order."""
        linear = Affine()
        for a, s in zip(self.at, self.value.shape):
            linear = linear * size(s) + a
        weights = dict(linear.terms)
        return (linear.constant, *((s, weights.get(n, 0)) for n, s in axes.items()))


@dataclass(frozen=True)
class Kept:
    """Weights were set to 0 except where `how` says; `at` is the index at which the site reads `of`."""

    of: Value
    how: Zeroed
    at: Index


def walk_weights(v: Value, at: Index, weights: Value, extents, vg: ValueGraph, grad: bool) -> tuple[Index, Dropped | None, list[Kept], bool]:
    """From the second product up to the softmax: views, casts, one dropout, masks that set weights to 0, and NaN made 0 (the last result)."""
    dropped, kept, cleaned = None, [], False
    while v is not weights:
        if grad and v.stops_gradient:
            raise gradient_ends(v)
        through = step_through(v, at, extents)
        if through is not None:
            v, at = through
        elif is_rounding(v):
            v = v.args[0]
        elif v.name in DROPOUTS and dropped is None:
            if any(not same(e, 1) and not any(n in a.axes for a in at) for n, e in extents.items() if n != "e"):
                raise Refused("one dropout is repeated along an axis of the attention", v, "repeat the weights first, or drop each weight")
            dropped, v = Dropped(v, v.args[1], at), v.args[0]
        elif (found := zeroed(vg, Maker(vg, v), v)) is not None and found.factor in (None, 1.0):
            vg.forget_users()
            kept.append(Kept(v, found, at))
            v = found.of
        elif v.name == "nan_to_num.default" and not v.argument(1, "nan"):  # weights are at most 1, or NaN in a row without a visible key
            cleaned, v = True, v.args[0]
        else:
            raise Refused(f"the attention weights are changed by {v.name.partition('.')[0]} before the second product", v,
                          "only casts, views and one dropout may stand between softmax and the second product")
    return at, dropped, kept, cleaned


def kept_keys(kept: list[Kept], puller: Puller) -> Expr:
    """Where weights are not set to 0 after the softmax."""
    found: Expr = TRUE
    for k in kept:
        found = call("and", found, cast(puller.pull(k.how.condition, broadcast(k.at, [size(s) for s in k.how.condition.shape])), BOOL))
    return normal_condition(found, puller)


@dataclass(frozen=True)
class LogSum:
    """logsumexp of the site's scores, read elsewhere: `value`, whose dims are products of axes ([]: extent 1).

    early   nodes that read it in front of the second product, and may do so behind our op
    fill    what it is in rows that a finite constant hides entirely, and the op marks
    """

    value: Value
    dims: tuple[tuple[str, ...], ...]
    early: tuple[fx.Node, ...]
    fill: float | None = None


SWALLOWS = -1e30
"""A fill at or below this is all that float32 keeps of a sum with it, and of a log-sum-exp over such sums."""


def log_sums(soft: Softmax, at: Index, vg: ValueGraph, owner: fx.Node, extents: dict[str, Size], fills: set[float]) -> list[LogSum]:
    """What the op's own log-sum-exp can serve: read only behind the second product, in front of which the op will stand, or by what can move there.

    fills: the finite constants that hide scores.
    """
    found = []
    if len(fills) > 1 or fills and max(fills) > SWALLOWS:
        return []
    for v in vg.users()[soft.scores]:
        if v.name != "logsumexp.default" or [d % len(soft.scores.shape) for d in v.args[1]] != [soft.dim] or v in vg.superseded:
            continue
        holders = vg.holders(v)
        if len(holders) != 1 or holders[0] in vg.changing or len(vg.timeline[holders[0]]) > 1 or (early := readers(vg, holders[0], owner)) is None:
            continue
        dims = [radix(a, extents) if a.constant == 0 else None for d, a in enumerate(at) if d != soft.dim]
        if any(d is None for d in dims):
            continue
        if v.argument(2, "keepdim", False):
            dims.insert(soft.dim, [])
        if sorted(n for d in dims for n in d) == sorted(n for n in extents if n not in ("j", "d", "e")):
            found.append(LogSum(v, tuple(map(tuple, dims)), tuple(early), *fills))
    return found


def sink_of(weights: Value, over: Affine, n: Size) -> tuple[Value, Value] | None:
    """(scores, column) if the softmax runs over the scores of n keys and one column beside them, whose weight is dropped.

    before -> after: softmax(cat([s, c], -1) - amax)[..., :-1] -> s, c
    """
    soft = softmax_of(weights)
    scores, dim = soft.scores, soft.dim
    joined = same_values(unshifted(same_values(scores), dim))
    if joined.name != "cat.default" or joined.argument(1, "dim", 0) % len(joined.shape) != dim or len(joined.args[0]) != 2:
        return None
    first, second = joined.args[0]
    scores, column = (first, second) if over.constant == 0 else (second, first)
    shapes = [size(scores.shape[dim]), size(column.shape[dim])]
    plain = over.terms == Affine.axis("j").terms and over.constant in (0, 1)
    return (scores, column) if plain and same(shapes[0], n) and same(shapes[1], 1) else None
