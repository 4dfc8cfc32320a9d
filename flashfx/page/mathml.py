"""A spec as MathML, which browsers draw: before -> after: where j <= i -> <math>…j ≤ i…</math>"""
from __future__ import annotations

from markupsafe import Markup, escape

from ..expr import QK, Call, Const, Expr, Load, Var, conjuncts
from ..ops import OPS
from ..spec import AttentionSpec, EmptyRow

_SIGN = {"le": "≤", "ge": "≥", "lt": "<", "gt": ">", "eq": "=", "ne": "≠", "and": "∧", "or": "∨", "xor": "⊻", "mul": "·", "add": "+", "sub": "−",
         "mod": "mod", "bit_xor": "⊕"}
_LEVEL = {name: 48 for name in ("le", "ge", "lt", "gt", "eq", "ne")}
"""Relations bind tighter than conditions on a page; Python's operators are the other way round."""
_PLAIN = {"to_float", "to_int", "to_bool"}
"""Changes of kind: not drawn."""


def tag(name: str, *parts: str, **attributes: str) -> str:
    given = "".join(f' {k}="{v}"' for k, v in attributes.items())
    return f"<{name}{given}>{''.join(parts)}</{name}>"


def _op(sign: str) -> str:
    return tag("mo", str(escape(sign)))


def _name(name: str) -> str:
    return tag("mi", str(escape(name)))


def _number(value) -> str:
    if isinstance(value, bool):
        return _name("true" if value else "false")
    if value in (float("inf"), float("-inf")):
        return _op("∞") if value > 0 else tag("mrow", _op("−"), _op("∞"))
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    if "e" not in text:
        return tag("mn", text)
    digits, _, power = text.partition("e")
    return tag("mrow", tag("mn", digits), _op("·"), tag("msup", tag("mn", "10"), tag("mn", str(int(power)))))


def _index(name: str, index: list[str]) -> str:
    return tag("msub", _name(name), tag("mrow", *(part for n, i in enumerate(index) for part in ([_op(",")] if n else []) + [i]))) if index else _name(name)


def drawn(e: Expr, dot: str, level: int = 0) -> str:
    """MathML of an expression, `dot` standing for q . k; `level` is the precedence of what stands around it."""
    if e == QK:
        return _within(dot, 60, level)
    if isinstance(e, Const):
        return _number(e.value)
    if isinstance(e, Var):
        return _name(e.name)
    if isinstance(e, Load):
        return _index(e.name, [drawn(i, dot) for i in e.index])
    assert isinstance(e, Call)
    args, row = e.args, OPS[e.op]
    if e.op in _PLAIN:
        return drawn(args[0], dot, level)
    if e.op == "truediv":
        return tag("mfrac", drawn(args[0], dot), drawn(args[1], dot))
    if e.op == "floordiv":
        return tag("mrow", _op("⌊"), tag("mfrac", drawn(args[0], dot), drawn(args[1], dot)), _op("⌋"))
    if e.op == "abs":
        return tag("mrow", _op("|"), drawn(args[0], dot), _op("|"))
    if e.op == "sqrt":
        return tag("msqrt", drawn(args[0], dot))
    if e.op in ("exp", "exp2"):
        return tag("msup", _name("e") if e.op == "exp" else tag("mn", "2"), drawn(args[0], dot))
    if e.op == "where":
        rows = [(drawn(args[1], dot), tag("mrow", tag("mtext", "if "), drawn(args[0], dot))), (drawn(args[2], dot), tag("mtext", "else"))]
        return tag("mrow", _op("{"), tag("mtable", *(tag("mtr", *(tag("mtd", cell) for cell in row)) for row in rows), columnalign="left left"))
    if e.op in ("neg", "not"):
        return _within(tag("mrow", _op("−" if e.op == "neg" else "¬"), drawn(args[0], dot, row.precedence)), row.precedence, level)
    if e.op in _SIGN:
        own = _LEVEL.get(e.op, row.precedence)
        left, right = drawn(args[0], dot, own), drawn(args[1], dot, own + (e.op not in ("and", "or", "add", "mul")))
        return _within(tag("mrow", left, _op(_SIGN[e.op]), right), own, level)
    inner = [part for n, a in enumerate(args) for part in ([_op(",")] if n else []) + [drawn(a, dot)]]
    return tag("mrow", _name({"minimum": "min", "maximum": "max"}.get(e.op, e.op)), tag("mrow", _op("("), *inner, _op(")")))


def _within(text: str, own: int, level: int) -> str:
    bracket = lambda sign: tag("mo", sign, stretchy="false")
    return tag("mrow", bracket("("), text, bracket(")")) if own < level else text


def formulas(spec: AttentionSpec) -> list[tuple[str, Markup]]:
    """(what it is, the formula): score, mask, weights, output."""
    axes = [_name(a) for a in spec.axes]
    at = lambda *more: [*axes, *map(_name, more)]
    own = lambda operand, row: [*(_name(a) for a in spec.axes if a in getattr(spec, operand)), _name(row)]
    dot = tag("mrow", _index("q", own("q", "i")), _op("·"), _index("k", own("k", "j")))
    equal = lambda left, right: Markup(tag("math", tag("mrow", left, _op("="), right), display="block"))
    rows = [("score", equal(_index("s", at("i", "j")), drawn(spec.score, dot)))]
    if spec.is_masked:
        for n, condition in enumerate(conjuncts(spec.visible)):
            rows.append(("and" if n else "visible where", Markup(tag("math", drawn(condition, dot), display="block"))))
    over = tag("munder", _op("∑"), tag("mrow", _name("j"), *([tag("mtext", ": visible")] if spec.is_masked else [])))
    rows.append(("weight", equal(_index("p", at("i", "j")), tag("mfrac", tag("msup", _name("e"), _index("s", at("i", "j"))),
                                                               tag("mrow", over, tag("msup", _name("e"), _index("s", at("i", "j"))))))))
    weight = _index("p", at("i", "j"))
    if spec.dropout:
        weight = tag("mrow", tag("msub", _name("dropout"), tag("mn", f"{spec.dropout:g}")), _op("("), weight, _op(")"))
    rows.append(("output", equal(_index("o", at("i")), tag("mrow", tag("munder", _op("∑"), _name("j")), weight, _op("·"), _index("v", own("v", "j"))))))
    return rows


EMPTY = {EmptyRow.NAN: "NaN, as -inf and softmax give", EmptyRow.ZERO: "0", EmptyRow.MEAN: "the mean of v, without a gradient for q and k",
         EmptyRow.MEAN_ADD: "the mean of v, with softmax's gradient"}
"""What a row without any visible key yields."""
