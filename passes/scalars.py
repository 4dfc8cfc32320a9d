"""Building scalar programs from graph ops: kinds, roundings, and ops on one of two constants."""
from __future__ import annotations

import math

import torch

from flashfx.expr import BOOL, FALSE, FLOAT, INT, TRUE, Call, Const, Expr, call


def kind_of(dtype: torch.dtype) -> str:
    return BOOL if dtype == torch.bool else FLOAT if dtype.is_floating_point else INT


def round_to(c: float, dtype: torch.dtype) -> float:
    """The constant as a tensor of `dtype` would hold it, where that is infinite: float32's finfo.min is -inf in bfloat16.

    Ordinary constants stay as they are; kernels compute in float32 whatever the dtype.
    """
    if not dtype.is_floating_point:
        return c
    held = float(torch.tensor(c, dtype=torch.float64).to(dtype))
    return held if math.isinf(held) else float(c)


def rounded(e: Expr, dtype: torch.dtype) -> Expr:
    return Const(round_to(e.value, dtype)) if isinstance(e, Const) and e.kind == FLOAT else e


def narrowed(e: Expr, dtype: torch.dtype) -> Expr:
    """`e` cast to `dtype`: masks' constants that do not fit become infinite, as what they hide does.

    before -> after: where(c, qk, finfo(float64).min), to float32 -> where(c, qk, -inf)
    """
    if isinstance(e, Call) and e.op == "where":
        return call("where", e.args[0], *(narrowed(a, dtype) for a in e.args[1:]))
    if isinstance(e, Call) and e.op == "add":
        return call("add", *(narrowed(a, dtype) for a in e.args))
    if isinstance(e, Call) and e.op == "to_float" and (parts := choice(e)):
        return call("where", *parts)
    return rounded(e, dtype)


def choice(e: Expr) -> tuple[Expr, Const, Const] | None:
    """(condition, then, else) where `e` is one of two constants by a condition."""
    if isinstance(e, Call) and e.op == "where" and isinstance(e.args[1], Const) and isinstance(e.args[2], Const):
        return e.args
    if isinstance(e, Call) and e.op in ("to_float", "to_int") and e.args[0].kind == BOOL:
        one, zero = (Const(1.0), Const(0.0)) if e.op == "to_float" else (Const(1), Const(0))
        return e.args[0], one, zero
    return None


def is_bit(e: Expr) -> bool:
    """Is it a condition, or 0 or 1 as an integer?"""
    parts = choice(e)
    return e.kind == BOOL or all(isinstance(c, Const) and c.kind == INT and c.value in (0, 1) for c in (parts[1:] if parts else (e,)))


def _one_choice(c: Expr, a: Expr, b: Expr) -> Expr | None:
    """before -> after: where(c, where(d, 0.0, K), where(e, 0.0, K)) -> where(c & d | ~c & e, 0.0, K)"""
    parts = [(TRUE, x, x) if isinstance(x, Const) else choice(x) for x in (a, b)]
    if None in parts or all(isinstance(x, Const) for x in (a, b)):
        return None
    first, second = parts[0][1], parts[0][2] if parts[0][1] != parts[0][2] else next((x for x in parts[1][1:] if x != parts[0][1]), None)
    if second is None or any(x not in (first, second) for p in parts for x in p[1:]) or first.kind == BOOL:
        return None
    is_first = [TRUE if p[1] == p[2] == first else FALSE if p[1] == p[2] else p[0] if p[1] == first else call("not", p[0]) for p in parts]
    return call("where", call("or", call("and", c, is_first[0]), call("and", call("not", c), is_first[1])), first, second)


def replaced(e: Expr, old: Expr, new: Expr) -> Expr:
    """`old` is `new` wherever no load is indexed by it."""
    return new if e == old else call(e.op, *(replaced(a, old, new) for a in e.args)) if isinstance(e, Call) else e


def _negated(e: Expr) -> Expr:
    """The opposite of a condition, NaN or not."""
    if isinstance(e, Call) and e.op in ("eq", "ne", "not"):
        return e.args[0] if e.op == "not" else call("ne" if e.op == "eq" else "eq", *e.args)
    return call("not", e)


def simplified(op: str, *args: Expr) -> Expr:
    """`call`, with an op on one of two constants made a choice of two results.

    before -> after: (1.0 - to_float(c)) * C -> where(c, 0.0, C); to_bool(where(c, 0.0, 1.0)) -> ~c; where(to_bool(x), C, x) -> where(to_bool(x), C, 0.0);
    where(x == 0, C, where(x != 0, D, x)) -> where(x == 0, C, D)
    """
    if op == "where" and args[1].kind == args[2].kind == BOOL:  # ranges of tiles are read off conjunctions and disjunctions
        c, a, b = args
        if b == TRUE:
            return call("or", call("not", c), a)
        return call("or", call("and", c, a), b if a == TRUE else call("and", call("not", c), b))
    if op == "where" and isinstance(args[0], Call) and args[0].op == "to_bool" and args[2] == args[0].args[0]:
        return simplified("where", *args[:2], Const(0.0 if args[2].kind == FLOAT else 0))
    if op == "where" and (flat := _one_choice(*args)) is not None:
        return flat
    if op == "where" and isinstance(args[2], Call) and args[2].op == "where" and args[2].args[0] == _negated(args[0]):
        return simplified("where", *args[:2], args[2].args[1])
    open_ = [a for a in args if not isinstance(a, Const)]
    if len(open_) == 1 and op != "where" and (parts := choice(open_[0])) and not (op.startswith("to_") and parts[1].kind == BOOL):
        branch = [call(op, *(parts[k] if a is open_[0] else a for a in args)) for k in (1, 2)]
        if all(isinstance(b, Const) for b in branch):
            if branch[0].kind == BOOL:
                if branch[0] == branch[1]:
                    return branch[0]
                return parts[0] if branch[0].value else call("not", parts[0])
            return call("where", parts[0], *branch)
    return call(op, *args)


def added(e: Expr) -> Expr:
    """A term of a score, where -0.0 is as good as 0.0 and two masks become one.

    before -> after: where(c, where(d, C, -0.0), 0.0) -> where(c & d, C, 0.0)
    """
    if isinstance(e, Call) and e.op == "where":
        return simplified("where", e.args[0], *map(added, e.args[1:]))
    return Const(0.0) if isinstance(e, Const) and e.kind == FLOAT and e.value == 0 else e


def cast_simplified(e: Expr, kind: str) -> Expr:
    return e if e.kind == kind else simplified(f"to_{kind}", e)
