"""Each example runs, and prints what its docstring says ("…" stands for anything, a line of it for any lines)."""
from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
import torch

from . import forked

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
ARGUMENTS = {"01_quickstart.py": ["--length", "64", "--layers", "3"]}
SMALLER = {"01_quickstart.py": {"12": "3", "[0..11]": "[0..2]", "148": "40"}}
"""What the output says instead with these arguments."""


def promised(path: Path) -> str:
    """The lines below "Output:" in the docstring, as a pattern."""
    text = ast.get_docstring(ast.parse(path.read_text()))
    assert "\nOutput:\n" in text, "an example shows its output"
    for said, smaller in SMALLER.get(path.name, {}).items():
        text = text.replace(said, smaller)
    lines = [line.removeprefix("    ") for line in text.split("\nOutput:\n")[1].splitlines()]
    return "".join(r"(.*\n)*?" if line == "…" else re.escape(line).replace("…", ".*") + r"\n" for line in lines)


def test_examples_are_numbered():
    assert [p.name[:2] for p in EXAMPLES] == [f"{n:02}" for n in range(1, len(EXAMPLES) + 1)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the outputs shown are those of a machine without a GPU")
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_prints_what_it_says(path):
    pytest.importorskip("transformers")
    # without a C++ compiler on the path examples do not wait for Inductor
    done = forked.run(path.relative_to(ROOT), *ARGUMENTS.get(path.name, []), PATH=str(Path(sys.executable).parent), COLUMNS="200")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(promised(path), done.stdout), done.stdout
