"""Every refusal text of the source, as a pattern, and what the tables of tests cover of them."""
from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
RAISED = {"Refused": ROOT / "passes", "NotAffine": ROOT / "passes", "PlanError": ROOT / "codegen" / "plan.py"}
"""Exceptions whose first argument is a reason for the user, and where they are raised while a site is looked at."""


def written(path: Path, name: str) -> list[tuple[str, str]]:
    """(pattern, "file:line") of each text given to `name(...)`: interpolations match anything; both arms of a choice."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == name and node.args:
            found += [(p, f"{path.relative_to(ROOT)}:{node.lineno}") for p in patterns(node.args[0])]
    return found


def patterns(e: ast.expr) -> list[str]:
    if isinstance(e, ast.Constant) and isinstance(e.value, str):
        return [re.escape(e.value)]
    if isinstance(e, ast.JoinedStr):
        return ["".join(re.escape(part.value) if isinstance(part, ast.Constant) else ".+" for part in e.values)]
    if isinstance(e, ast.IfExp):
        return patterns(e.body) + patterns(e.orelse)
    if isinstance(e, ast.Call) and isinstance(e.func, ast.Attribute) and e.func.attr == "replace":
        return patterns(e.func.value)
    return []  # a text made elsewhere: str(error), a variable


def all_written() -> list[tuple[str, str]]:
    found = []
    for name, place in RAISED.items():
        for path in [place] if place.is_file() else sorted(place.glob("*.py")):
            found += written(path, name)
    return found
