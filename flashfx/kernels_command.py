"""`python -m flashfx kernels`: the generated files that this machine keeps."""
from __future__ import annotations

import ast
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from .codegen.load import cache_dir
from .errors import FlashFXError

app = typer.Typer(no_args_is_help=True, help="The generated kernels that this machine keeps: list, show, run.")


def kept() -> list[Path]:
    """Files of generated kernels, the newest first."""
    return sorted(Path(cache_dir()).glob("attention_*.py"), key=lambda p: p.stat().st_mtime, reverse=True)


def name_of(path: Path) -> str:
    return path.stem.removeprefix("attention_")[:10]


def chosen(name: str) -> Path:
    """The one file whose name starts with `name`. Raises FlashFXError."""
    found = [p for p in kept() if p.stem.removeprefix("attention_").startswith(name)]
    if len(found) != 1:
        raise FlashFXError(f"{len(found)} kernels begin with {name!r}: python -m flashfx kernels list names them")
    return found[0]


def summary(path: Path) -> str:
    """One line of mathematics and shapes, from the file's docstring."""
    lines = [line.strip() for line in (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()]
    parts = [line for line in lines if line.startswith(("score", "where"))]
    shapes = next((line.removeprefix("shapes").strip() for line in lines if line.startswith("shapes")), "block lists of a mask")
    return f"{'; '.join(' '.join(p.split()) for p in parts)} | {shapes}"


@app.callback()
def kernels() -> None:
    """The generated kernels that this machine keeps: list, show, run.

    Examples:

      python -m flashfx kernels list

      python -m flashfx kernels show 3fa94c

      python -m flashfx kernels run 3fa94c

    Exit codes: 0 done, 1 there is no such kernel or its check failed, 2 wrong arguments.
    """


@app.command("list")
def list_(all_: Annotated[bool, typer.Option("--all", help="not only the newest 20")] = False) -> None:
    """Name, age and mathematics of each kernel, the newest first."""
    found = kept()
    print(f"{len(found)} kernel{'s' * (len(found) != 1)} in {cache_dir()}" + ("" if found else ": none was generated yet; on a GPU the first call of "
          "a compiled model does, and explain --kernels FOLDER writes files anywhere"))
    for path in found if all_ else found[:20]:
        age = (time.time() - path.stat().st_mtime) / 3600
        print(f"{name_of(path)}  {f'{age:.0f} h' if age < 48 else f'{age / 24:.0f} d':>6}  {summary(path)}")


@app.command()
def show(name: Annotated[str, typer.Argument(help="the name's first letters")]) -> None:
    """The generated source."""
    text = chosen(name).read_text()
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.syntax import Syntax
        Console().print(Syntax(text, "python", theme="ansi_dark", word_wrap=True))
    else:
        print(text, end="")


@app.command()
def run(name: Annotated[str, typer.Argument(help="the name's first letters")]) -> None:
    """Rebuild inputs, check the kernels against the reference, and time them on a GPU."""
    path = chosen(name)
    if "__main__" not in path.read_text():
        raise FlashFXError(f"{name_of(path)} summarises a mask and has no check of its own")
    raise typer.Exit(min(subprocess.run([sys.executable, str(path)]).returncode & 255, 1))
