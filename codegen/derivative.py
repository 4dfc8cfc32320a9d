"""Partial derivatives of a score program, as programs: reverse mode over the `partials` of the op rows."""
from __future__ import annotations

import functools

from ..expr import FLOAT, Call, Const, Expr, Var, call, is_const, parse, substitute, walk
from ..ops import OPS

ZERO, ONE = Const(0.0), Const(1.0)


@functools.lru_cache(maxsize=None)
def _rule(op: str, argument: int) -> Expr | None:
    """The row's derivative text as a program over x, y, z, out; None: no gradient flows."""
    texts = OPS[op].partials
    text = texts[argument] if texts else None
    return None if text is None else parse(text, {})


def _times(adjoint: Expr, partial: Expr) -> Expr:
    """Their product; a selection selects, so that 0 * inf cannot arise (as in PyTorch's own derivative of `where`)."""
    if adjoint == ONE:
        return partial
    if isinstance(partial, Call) and partial.op == "where" and {*partial.args[1:]} == {ZERO, ONE}:
        condition, a, _ = partial.args
        return call("where", condition, adjoint, 0.0) if a == ONE else call("where", condition, 0.0, adjoint)
    return call("mul", adjoint, partial)


@functools.lru_cache(maxsize=4096)
def partial(score: Expr, wrt: Expr) -> Expr:
    """d score / d wrt, where `wrt` is a leaf: `QK` or a float `Load`. Constants are folded; `Const(0.0)` if independent.

    before -> after: partial(tanh(qk / 30.0) * 30.0, qk) -> 30.0 * (1.0 - t * t) * (1.0 / 30.0) with t = tanh(qk / 30.0)
    """
    adjoints: dict[Expr, Expr] = {score: ONE}
    for node in reversed(list(walk(score))):
        adjoint = adjoints.get(node)
        if adjoint is None or not isinstance(node, Call):
            continue
        bindings = {Var(letter): argument for letter, argument in zip("xyz", node.args)} | {Var("out"): node}
        for position, argument in enumerate(node.args):
            rule = _rule(node.op, position)
            if rule is None or argument.kind != FLOAT or wrt not in argument.leaves:
                continue
            flow = _times(adjoint, substitute(rule, bindings))
            if is_const(flow, 0):
                continue
            adjoints[argument] = call("add", adjoints[argument], flow) if argument in adjoints else flow
    return adjoints.get(wrt, ZERO)
