"""Scalar programs: what happens to one score, as a small expression over indices, loads and the dot product.

An `Expr` is a frozen tree whose leaves are

* `QK`        the dot product of one query row with one key row (float),
* `Var`       an index (`b`, `h`, `i`, `j`, …) or a size (`M`, `N`, …) (integer),
* `Load`      one element of a captured tensor, by index expressions,
* `Const`     a Python bool, int or float,

and whose inner nodes are rows of `flashfx.ops`. Order is kept: nothing is reassociated, so rounding, infinities and
NaN stay where the model put them. `str(expr)` is Python text and `parse` reads it back.
"""
from __future__ import annotations

import ast
import math
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Callable, Iterable, Iterator

from .errors import SpecError
from .ops import COMPARISONS, OPS, Op

BOOL, INT, FLOAT = "bool", "int", "float"


@dataclass(frozen=True)
class Expr:
    """One node of a scalar program. Compare and hash by structure; `kind` is "bool", "int" or "float"."""

    def args_(self) -> tuple[Expr, ...]:
        return ()

    @cached_property
    def leaves(self) -> frozenset[Expr]:
        """Every leaf below (or the node itself if it is one); index expressions of loads count as below."""
        below = self.args_()
        own = frozenset((self,)) if not isinstance(self, Call) else frozenset()
        return own.union(*(a.leaves for a in below))

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names of the indices and sizes that the value depends on. The dot product depends on i and j."""
        return frozenset().union(*(a.variables for a in self.args_()))

    @cached_property
    def nodes(self) -> int:
        """How many there are when it is written out, parts that occur twice counted twice."""
        return 1 + sum(a.nodes for a in self.args_())

    @cached_property
    def loads(self) -> tuple[Load, ...]:
        """Loads below, or the node itself, in a fixed order."""
        found = {load for a in self.args_() for load in a.loads}
        if isinstance(self, Load):
            found.add(self)
        return tuple(sorted(found, key=str) if len(found) > 1 else found)

    def __str__(self) -> str:
        return to_text(self)

    def __repr__(self) -> str:
        return to_text(self)


def cached_hash(cls):
    """Class decorator: hash each (frozen) value once; trees share subtrees and every launch looks a spec up."""
    structural = cls.__hash__

    def __hash__(self):
        try:
            return self._hash
        except AttributeError:
            value = self.__dict__["_hash"] = structural(self)
            return value

    def __getstate__(self):  # no cached values: hashes of strings differ between processes
        return {f.name: getattr(self, f.name) for f in fields(self)}

    cls.__hash__, cls.__getstate__ = __hash__, __getstate__
    return cls


@cached_hash
@dataclass(frozen=True, repr=False)
class Const(Expr):
    value: bool | int | float
    variables = frozenset()

    @property
    def kind(self) -> str:
        return BOOL if isinstance(self.value, bool) else INT if isinstance(self.value, int) else FLOAT

    # True == 1 == 1.0 in Python; three different constants here. NaN equals itself, -0.0 is not 0.0.
    def __eq__(self, other):
        return isinstance(other, Const) and self._key == other._key

    def __hash__(self):
        return hash(self._key)

    @property
    def _key(self):
        return (self.kind, repr(self.value))


@cached_hash
@dataclass(frozen=True, repr=False)
class Var(Expr):
    name: str
    kind = INT

    @cached_property
    def variables(self) -> frozenset[str]:
        return frozenset((self.name,))


@dataclass(frozen=True, repr=False)
class _Dot(Expr):
    kind = FLOAT
    variables = frozenset(("i", "j"))


QK = _Dot()


@cached_hash
@dataclass(frozen=True, repr=False)
class Load(Expr):
    """`name[index...]`: one element of a captured tensor of element kind `kind`."""

    name: str
    index: tuple[Expr, ...]
    kind: str

    def args_(self):
        return self.index


@cached_hash
@dataclass(frozen=True, repr=False)
class Call(Expr):
    """An op row applied to arguments. Build with `call`, which folds constants and checks kinds."""

    op: str
    args: tuple[Expr, ...]

    def args_(self):
        return self.args

    @property
    def row(self) -> Op:
        return OPS[self.op]

    @cached_property
    def kind(self) -> str:
        return self.row.result_kind(tuple(a.kind for a in self.args))


TRUE, FALSE = Const(True), Const(False)


def const(value) -> Expr:
    return value if isinstance(value, Expr) else Const(value)


def is_const(e: Expr, value=None) -> bool:
    return isinstance(e, Const) and (value is None or e.value == value)


def call(op: str, *args) -> Expr:
    """`op` applied to `args`, with the folds that are exact in floating point too.

    before -> after: x + 0 (integers), x * 1 -> x; x & True -> x; where(True, x, y) -> x; ~~x -> x; op(constants) -> constant
    """
    args = tuple(const(a) for a in args)
    row = OPS[op]
    if len(args) != row.arity:
        raise SpecError(f"{op} takes {row.arity} arguments, got {len(args)}")
    if op in ("and", "or", "xor", "not") and any(a.kind != BOOL for a in args):
        raise SpecError(f"{op} takes conditions, got {', '.join(f'{a} ({a.kind})' for a in args)}")
    node = Call(op, args)
    folded = _fold(node)
    return node if folded is None else folded


def _fold(e: Call) -> Expr | None:
    op, args = e.op, e.args
    if e.row.evaluate is not None and all(isinstance(a, Const) for a in args):
        value = e.row.evaluate(*(a.value for a in args))
        if value is not None:
            return Const({BOOL: bool, INT: int, FLOAT: float}[e.kind](value))
    a = args[0]
    b = args[1] if len(args) > 1 else None
    exact_zero = (lambda x: isinstance(x, Const) and x.value == 0 and e.kind == INT)
    if op == "add" and e.kind == FLOAT:  # exact but for the sign of a zero, which no score function can see
        return b if is_const(a, 0) and b.kind == FLOAT else a if is_const(b, 0) and a.kind == FLOAT else None
    if op == "add":
        return b if exact_zero(a) else a if exact_zero(b) else None
    if op == "sub":
        return a if exact_zero(b) else None
    if op in ("mul", "truediv", "floordiv") and is_const(b, 1) and a.kind == e.kind:
        return a
    if op == "mul" and is_const(a, 1) and b.kind == e.kind:
        return b
    if op == "mul" and (exact_zero(a) or exact_zero(b)):
        return Const(0)
    if op in ("and", "or"):
        neutral = op == "and"
        for x, y in ((a, b), (b, a)):
            if isinstance(x, Const):
                return y if x.value is neutral else Const(not neutral)
        return a if a == b else None
    if op == "not" and isinstance(a, Call):
        if a.op == "not":
            return a.args[0]
        if a.op in _NEGATED and all(x.kind != FLOAT for x in a.args):  # NaN: not (x < y) is not x >= y
            return call(_NEGATED[a.op], *a.args)
    if op == "where":
        if isinstance(a, Const):
            chosen = b if a.value else args[2]
            return chosen if chosen.kind == e.kind else cast(chosen, e.kind)
        return b if b == args[2] else None
    if op in ("to_float", "to_int", "to_bool") and a.kind == e.kind:
        return a
    if op == "to_bool" and isinstance(a, Call) and a.op in ("to_int", "to_float") and a.args[0].kind == BOOL:
        return a.args[0]
    if op in ("ne", "eq") and is_const(b, 0) and isinstance(a, Call) and a.op in ("to_int", "to_float") and a.args[0].kind == BOOL:
        return a.args[0] if op == "ne" else call("not", a.args[0])
    if op in COMPARISONS and a == b and a.kind != FLOAT:
        return Const(op in ("eq", "le", "ge"))
    return None


_NEGATED = {"lt": "ge", "ge": "lt", "le": "gt", "gt": "le", "eq": "ne", "ne": "eq"}


def cast(e: Expr, kind: str) -> Expr:
    return e if e.kind == kind else call(f"to_{kind}", e)


def rebuild(e: Expr, leaf: Callable[[Expr], Expr]) -> Expr:
    """The same program with every leaf replaced by `leaf(leaf)` (constants folded again). Loads are passed whole."""
    done: dict[Expr, Expr] = {}

    def go(x: Expr) -> Expr:
        if x not in done:
            done[x] = call(x.op, *(go(a) for a in x.args)) if isinstance(x, Call) else leaf(x)
        return done[x]

    return go(e)


def substitute(e: Expr, table: dict[Expr, Expr]) -> Expr:
    """Replace leaves and, inside load indices, variables; `table` maps old to new."""
    def leaf(x):
        if x in table:
            return table[x]
        if isinstance(x, Load):
            return Load(x.name, tuple(substitute(a, table) for a in x.index), x.kind)
        return x
    return rebuild(e, leaf)


def conjuncts(e: Expr) -> list[Expr]:
    """The operands of nested `&`, in order; [] for True."""
    if isinstance(e, Call) and e.op == "and":
        return conjuncts(e.args[0]) + conjuncts(e.args[1])
    return [] if e == TRUE else [e]


def conjunction(parts: Iterable[Expr]) -> Expr:
    out: Expr = TRUE
    for p in dict.fromkeys(parts):
        out = call("and", out, p)
    return out


def walk(e: Expr) -> Iterator[Expr]:
    """Every distinct node, arguments before users."""
    seen: dict[Expr, None] = {}

    def go(x):
        if x in seen:
            return
        for a in x.args_():
            go(a)
        seen[x] = None

    go(e)
    return iter(seen)


# ---------------------------------------------------------------------------------------------------- text

_ATOM = 100


def to_text(e: Expr) -> str:
    return _text(e, 0)


def _text(e: Expr, level: int) -> str:
    if isinstance(e, Const):
        if e.kind == FLOAT:
            v = e.value
            text = "nan" if math.isnan(v) else ("-inf" if v < 0 else "inf") if math.isinf(v) else repr(v)
        else:
            text = repr(e.value)
        return f"({text})" if text.startswith("-") and level > 0 else text
    if isinstance(e, Var):
        return e.name
    if e == QK:
        return "qk"
    if isinstance(e, Load):
        return f"{e.name}[{', '.join(_text(a, 0) for a in e.index) or '()'}]"
    row = e.row
    if row.infix is None:
        return f"{row.name}({', '.join(_text(a, 0) for a in e.args)})"
    p = row.precedence
    if row.arity == 1:
        text = f"{row.infix}{_text(e.args[0], p)}"
    else:  # left associative: the right argument needs more
        text = f"{_text(e.args[0], p)} {row.infix} {_text(e.args[1], p + 1)}"
    return f"({text})" if p < level else text


_BINARY = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "truediv", ast.FloorDiv: "floordiv", ast.Mod: "mod",
           ast.BitAnd: "and", ast.BitOr: "or", ast.BitXor: "xor"}
_COMPARE = {ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Eq: "eq", ast.NotEq: "ne"}


def parse(text: str, kinds: dict[str, str]) -> Expr:
    """Read what `str(expr)` printed. `kinds` gives the element kind of each captured tensor. Raises `SpecError`."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise SpecError(f"not an expression: {text!r} ({error.msg})") from None

    def go(n: ast.AST) -> Expr:
        match n:
            case ast.Constant(value=bool() | int() | float() as v):
                return Const(v)
            case ast.Name(id="qk"):
                return QK
            case ast.Name(id="inf"):
                return Const(math.inf)
            case ast.Name(id="nan"):
                return Const(math.nan)
            case ast.Name(id=name):
                return Var(name)
            case ast.UnaryOp(op=ast.USub(), operand=a):
                inner = go(a)
                return Const(-inner.value) if isinstance(inner, Const) and inner.kind != BOOL else call("neg", inner)
            case ast.UnaryOp(op=ast.Invert(), operand=a):
                return call("not", go(a))
            case ast.BinOp(left=a, op=o, right=b) if type(o) in _BINARY:
                return call(_BINARY[type(o)], go(a), go(b))
            case ast.Compare(left=a, ops=[o], comparators=[b]) if type(o) in _COMPARE:
                return call(_COMPARE[type(o)], go(a), go(b))
            case ast.Subscript(value=ast.Name(id=name), slice=s):
                if name not in kinds:
                    raise SpecError(f"{text!r} reads {name!r}, which the spec does not declare; declared: {sorted(kinds)}")
                index = s.elts if isinstance(s, ast.Tuple) else [s]
                return Load(name, tuple(go(a) for a in index), kinds[name])
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in OPS:
                return call(name, *(go(a) for a in args))
        raise SpecError(f"cannot read {ast.unparse(n)!r} in {text!r}; known functions: {', '.join(sorted(OPS))}")

    return go(tree)


def nonnegative(e: Expr) -> bool:
    """Is the integer `e` surely >= 0? Indices and sizes are."""
    if isinstance(e, Const):
        return e.value >= 0
    if isinstance(e, Var):
        return True
    if isinstance(e, Call):
        if e.op in ("add", "mul", "minimum", "bit_xor"):
            return all(nonnegative(a) for a in e.args)
        if e.op in ("floordiv", "mod"):
            return nonnegative(e.args[0]) and nonnegative(e.args[1])
        if e.op == "maximum":
            return any(nonnegative(a) for a in e.args)
        return e.op == "abs" or (e.op in ("to_int",) and e.args[0].kind == BOOL)
    return False
