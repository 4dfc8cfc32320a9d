"""Scalar operations: one row each. Adding an op is adding a row here; nothing else has to change.

A row says what PyTorch calls the op (`aten`), what it means (`torch`, `evaluate`), how it is written in a Triton kernel
(`triton`), its partial derivatives (`partials`), and what it costs (`cost`: "free", "alu", "div" or "mufu", the
special-function unit that also does exp). Derivatives are given as text in the arguments x, y, z and the result `out`,
so that they too are programs over these rows; None marks an argument through which no gradient flows.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Callable

import torch

ARITH = "arith"  # result kind: float if any argument is, else int


@dataclass(frozen=True)
class Op:
    name: str
    arity: int
    aten: tuple[str, ...]                    # overload names, "aten." left out
    torch: Callable[..., torch.Tensor]
    triton: str                              # format string over x, y, z
    evaluate: Callable[..., Any]             # on Python numbers; None: do not fold
    partials: tuple[str | None, ...] = ()    # d out / d argument
    result: str = ARITH                      # ARITH or a kind
    cost: str = "alu"
    infix: str | None = None
    precedence: int = 100

    def __post_init__(self):
        letters = "xyz"[: self.arity]
        assert all("{%s}" % c in self.triton for c in letters), f"{self.name}: the Triton text must use {letters}"
        assert not self.partials or len(self.partials) == self.arity, self.name
        assert self.cost in ("free", "alu", "div", "mufu"), self.name

    def result_kind(self, kinds: tuple[str, ...]) -> str:
        if self.name == "where":
            kinds = kinds[1:]
            return "float" if "float" in kinds else "int" if "int" in kinds else "bool"
        if self.result != ARITH:
            return self.result
        return "float" if "float" in kinds else "int"


def _guard(fn):
    """Fold a constant only where Python's arithmetic is that of IEEE floats."""
    def run(*args):
        try:
            return fn(*args)
        except (OverflowError, ValueError, ZeroDivisionError):
            return None
    return run


def _log(fn):
    """log(0) is -inf: the log of a 0/1 mask hides keys."""
    return lambda x: -math.inf if x == 0 else fn(x)


def _arith(name, infix, precedence, aten, fn, triton, partials, evaluate, cost="alu", result=ARITH):
    return Op(name, 2, aten, fn, triton, _guard(evaluate), partials, result, cost, infix, precedence)


def _compare(name, infix, fn, evaluate):
    return Op(name, 2, (f"{name}.Tensor", f"{name}.Scalar"), fn, "({x} %s {y})" % infix, evaluate, (), "bool", "alu", infix, 30)


def _unary(name, aten, fn, triton, partial, evaluate, cost="mufu", result="float"):
    return Op(name, 1, aten, fn, triton, _guard(evaluate), () if partial is None else (partial,), result, cost)


def _same(*names):
    return tuple(f"{n}.{o}" for n in names for o in ("Tensor", "Scalar"))


_ROWS = (
    # arithmetic
    _arith("add", "+", 50, _same("add"), torch.add, "({x} + {y})", ("1.0", "1.0"), lambda x, y: x + y),
    _arith("sub", "-", 50, _same("sub"), torch.sub, "({x} - {y})", ("1.0", "-1.0"), lambda x, y: x - y),
    _arith("mul", "*", 60, _same("mul"), torch.mul, "({x} * {y})", ("y", "x"), lambda x, y: x * y),
    _arith("truediv", "/", 60, _same("div"), torch.true_divide, "({x} / {y})", ("1.0 / y", "-x / (y * y)"),
           lambda x, y: x / y, "div", "float"),
    _arith("floordiv", "//", 60, ("floor_divide.default", *_same("floor_divide")), lambda x, y: torch.div(x, y, rounding_mode="floor"),
           "floor_div({x}, {y})", (None, None), lambda x, y: x // y, "div"),
    _arith("mod", "%", 60, _same("remainder"), torch.remainder, "floor_mod({x}, {y})", ("1.0", None),
           lambda x, y: x % y, "div"),
    Op("neg", 1, ("neg.default",), torch.neg, "(-{x})", lambda x: -x, ("-1.0",), ARITH, "alu", "-", 70),
    Op("minimum", 2, ("minimum.default",), torch.minimum, "tl.minimum({x}, {y})", None,
       ("where(x < y, 1.0, where(x == y, 0.5, 0.0))", "where(y < x, 1.0, where(x == y, 0.5, 0.0))")),
    Op("maximum", 2, ("maximum.default",), torch.maximum, "tl.maximum({x}, {y})", None,
       ("where(x > y, 1.0, where(x == y, 0.5, 0.0))", "where(y > x, 1.0, where(x == y, 0.5, 0.0))")),
    Op("abs", 1, ("abs.default",), torch.abs, "tl.abs({x})", abs, ("where(x > 0.0, 1.0, where(x < 0.0, -1.0, 0.0))",)),
    # elementary functions
    _unary("exp", ("exp.default",), torch.exp, "tl.exp({x})", "out", math.exp),
    _unary("exp2", ("exp2.default",), torch.exp2, "tl.exp2({x})", "out * 0.6931471805599453", lambda x: 2.0 ** x),
    _unary("log", ("log.default",), torch.log, "tl.log({x})", "1.0 / x", _log(math.log)),
    _unary("log2", ("log2.default",), torch.log2, "tl.log2({x})", "1.4426950408889634 / x", _log(math.log2)),
    _unary("log1p", ("log1p.default",), torch.log1p, "tl.log(1.0 + {x})", "1.0 / (1.0 + x)", math.log1p),
    _unary("sqrt", ("sqrt.default",), torch.sqrt, "tl.sqrt({x})", "0.5 / out", math.sqrt),
    _unary("rsqrt", ("rsqrt.default",), torch.rsqrt, "tl.rsqrt({x})", "-0.5 * out * out * out", lambda x: 1 / math.sqrt(x)),
    _unary("sin", ("sin.default",), torch.sin, "tl.sin({x})", "cos(x)", math.sin),
    _unary("cos", ("cos.default",), torch.cos, "tl.cos({x})", "-sin(x)", math.cos),
    _unary("tanh", ("tanh.default",), torch.tanh, "tanh({x})", "1.0 - out * out", math.tanh),
    _unary("sigmoid", ("sigmoid.default",), torch.sigmoid, "tl.sigmoid({x})", "out * (1.0 - out)",
           lambda x: 1 / (1 + math.exp(-x))),
    _unary("erf", ("erf.default",), torch.erf, "tl.erf({x})", "1.1283791670955126 * exp(-(x * x))", math.erf),
    _unary("reciprocal", ("reciprocal.default",), torch.reciprocal, "(1.0 / {x})", "-(out * out)", lambda x: 1 / x, "div"),
    _unary("floor", ("floor.default",), torch.floor, "tl.floor({x})", "0.0", math.floor, "alu"),
    _unary("ceil", ("ceil.default",), torch.ceil, "tl.ceil({x})", "0.0", math.ceil, "alu"),
    # comparisons and conditions
    _compare("lt", "<", torch.lt, lambda x, y: x < y), _compare("le", "<=", torch.le, lambda x, y: x <= y),
    _compare("gt", ">", torch.gt, lambda x, y: x > y), _compare("ge", ">=", torch.ge, lambda x, y: x >= y),
    _compare("eq", "==", torch.eq, lambda x, y: x == y), _compare("ne", "!=", torch.ne, lambda x, y: x != y),
    Op("and", 2, ("logical_and.default", "bitwise_and.Tensor", "bitwise_and.Scalar"), torch.logical_and, "({x} & {y})",
       lambda x, y: x and y, (), "bool", "alu", "&", 45),
    Op("xor", 2, ("logical_xor.default", "bitwise_xor.Tensor", "bitwise_xor.Scalar"), torch.logical_xor, "({x} ^ {y})",
       lambda x, y: x != y, (), "bool", "alu", "^", 43),
    Op("or", 2, ("logical_or.default", "bitwise_or.Tensor", "bitwise_or.Scalar"), torch.logical_or, "({x} | {y})",
       lambda x, y: x or y, (), "bool", "alu", "|", 40),
    Op("not", 1, ("logical_not.default", "bitwise_not.default"), torch.logical_not, "(({x}) == 0)", lambda x: not x, (),
       "bool", "alu", "~", 70),
    Op("bit_xor", 2, (), torch.bitwise_xor, "({x} ^ {y})", lambda x, y: x ^ y, (None, None), "int"),
    Op("where", 3, ("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar"), torch.where,
       "tl.where({x}, {y}, {z})", None, (None, "where(x, 1.0, 0.0)", "where(x, 0.0, 1.0)")),
    # kinds
    Op("to_float", 1, (), lambda x: x.to(torch.promote_types(x.dtype, torch.float32)), "tl.cast({x}, tl.float32)", float, (None,),
       "float", "free"),
    Op("to_int", 1, (), lambda x: x.to(torch.int64), "tl.cast({x}, tl.int32)", _guard(int), (None,), "int", "free"),
    Op("to_bool", 1, (), lambda x: x != 0, "({x} != 0)", bool, (None,), "bool", "free"),
)

OPS: dict[str, Op] = {row.name: row for row in _ROWS}
BY_ATEN: dict[str, Op] = {name: row for row in _ROWS for name in row.aten}
COMPARISONS = frozenset(("lt", "le", "gt", "ge", "eq", "ne"))
