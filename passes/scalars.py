"""Building scalar programs from graph ops: kinds, roundings, and ops on one of two constants."""
from __future__ import annotations

import math

import torch

from flashfx.expr import BOOL, FLOAT, INT, Call, Const, Expr, call


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


def simplified(op: str, *args: Expr) -> Expr:
    """`call`, with an op on one of two constants made a choice of two results.

    before -> after: (1.0 - to_float(c)) * C -> where(c, 0.0, C); to_bool(where(c, 0.0, 1.0)) -> ~c
    """
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


def cast_simplified(e: Expr, kind: str) -> Expr:
    return e if e.kind == kind else simplified(f"to_{kind}", e)
