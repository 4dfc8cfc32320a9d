"""House rules, each as a test."""
from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashfx.expr import Const, parse
from flashfx.ops import OPS

from . import forked

ROOT = Path(__file__).parent.parent
PACKAGE = [p for folder in ("flashfx", "passes", "codegen") for p in sorted((ROOT / folder).rglob("*.py"))
           if "flashfx/passes" not in str(p) and "flashfx/codegen" not in str(p)]
ALL = [*PACKAGE, *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "examples").rglob("*.py"))]


def imports(path: Path) -> set[str]:
    """Absolute names of everything a module imports, at any level of nesting."""
    parts = ["flashfx", *path.relative_to(ROOT).with_suffix("").parts]
    if parts[1] == "flashfx":
        parts = parts[1:]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = parts[: len(parts) - node.level] if node.level else []
            module = ".".join([*base, *(node.module.split(".") if node.module else [])])
            found |= {module, *(f"{module}.{a.name}" for a in node.names)}
    return found


def test_passes_and_codegen_do_not_import_each_other():
    for path in PACKAGE:
        found = imports(path)
        if path.is_relative_to(ROOT / "passes"):
            assert not any(n.startswith(("flashfx.codegen", "triton")) for n in found), path
        if path.is_relative_to(ROOT / "codegen"):
            assert not any(n.startswith(("flashfx.passes", "torch.fx", "torch._dynamo")) for n in found), path


def test_contract_imports_neither_passes_nor_codegen():
    for name in ("spec", "expr", "ops", "region", "errors", "reference"):
        found = imports(ROOT / "flashfx" / f"{name}.py")
        assert not any(n.startswith(("flashfx.passes", "flashfx.codegen", "flashfx.backend", "flashfx.report")) for n in found), name


@pytest.mark.parametrize("path", ALL, ids=lambda p: str(p.relative_to(ROOT)))
def test_modules_are_short_and_documented(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    assert not text.strip() or ast.get_docstring(ast.parse(text)), "a module says what it is for"


def test_import_is_light():
    code = ("import flashfx, sys; heavy = {'triton', 'transformers', 'torch._inductor'} & set(sys.modules);"
            "assert not heavy, heavy; assert flashfx.AttentionSpec and flashfx.Refusal")
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_public_names_are_documented():
    """Where they stand: `help(flashfx.explain)` says what it takes, returns and raises."""
    import inspect
    import flashfx
    for name in flashfx.__all__:
        found = getattr(flashfx, name)
        if callable(found):
            assert found.__doc__ and len(found.__doc__.split()) > 8, name
            for member, what in vars(found).items() if inspect.isclass(found) else ():
                if not member.startswith("_") and (inspect.isfunction(what) or isinstance(what, property)):
                    assert what.__doc__, f"{name}.{member}"


def test_a_plain_checkout_registers_the_backend():
    """Without site-packages' record of an install; still no heavy import."""
    code = ("import sys, torch; from importlib import metadata; F = metadata.MetadataPathFinder; real = F.find_distributions;"
            "F.find_distributions = classmethod(lambda cls, *a: (d for d in real(*a) if d.metadata['Name'] != 'flashfx'));"
            "import flashfx; assert 'torch._dynamo' not in sys.modules and 'triton' not in sys.modules;"
            "e, = metadata.entry_points(group='torch_dynamo_backends', name='flashfx');"
            "assert type(e.dist).__name__ == '_Checkout' and 'flashfx' in torch._dynamo.list_backends() and callable(e.load())")
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_package_folders_refuse_another_name():
    for name in ("passes", "codegen"):
        done = subprocess.run([sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode and f"import flashfx.{name}" in done.stderr


def test_no_absolute_paths():
    """Neither in code nor in text; fragments are joined here so that this file does not match itself."""
    pattern = re.compile("|".join(["/" + "home/", "/" + "work/", "/" + "root/", "/" + "tmp/", "/" + "Users/"]))
    texts = [*ALL, *ROOT.glob("*.md"), ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / ".ci" / "run"]
    assert [p for p in texts if pattern.search(p.read_text())] == []


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples_have_main(path):
    tree = ast.parse(path.read_text())
    assert "main" in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
    assert ast.get_docstring(tree)


def test_readme_code_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert blocks
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks))
    done = forked.run(script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="the output shown is that of a machine without a GPU")
def test_readme_output_is_real(tmp_path):
    text = (ROOT / "README.md").read_text()
    first = re.findall(r"```python\n(.*?)```", text, re.S)[0]
    (tmp_path / "alibi.py").write_text(first.split("fast = ")[0])
    done = forked.run("alibi.py", cwd=tmp_path)
    shown = text.split("explain` prints what was derived")[1].split("The causal mask was derived")[0].partition(":")[2]
    assert shown.split() == done.stdout.split(), done.stderr or done.stdout


@pytest.mark.parametrize("name", sorted(OPS))
def test_op_rows_are_complete(name):
    """Every row: a PyTorch meaning that agrees with its constant folding, a Triton text, derivatives that parse."""
    row = OPS[name]
    assert row.triton and callable(row.torch)
    if row.evaluate is not None:
        samples = {"bool": (True, False, True), "int": (7, 3, 2), "float": (0.75, 0.5, 0.25)}
        kinds = ["bool"] if name in ("and", "or", "xor", "not") else ["int"] if name in ("floordiv", "mod", "bit_xor") else ["float"]
        for kind in kinds:
            args = samples[kind][: row.arity]
            expected = row.torch(*(torch.tensor(a, dtype=torch.float64 if kind == "float" else None) for a in args))
            assert float(row.evaluate(*args)) == pytest.approx(float(expected), rel=1e-12)
    for text in row.partials:
        if text is not None:
            known = re.sub(r"\b(x|y|z|out)\b", r"\1[0]", text)
            parse(known, {n: "float" for n in ("x", "y", "z", "out")})
    if row.result == "float" and row.cost == "mufu":
        assert row.partials, "a smooth function without a derivative"
    assert Const(True) != Const(1) != Const(1.0)
