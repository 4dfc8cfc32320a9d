"""The command line: `python -m flashfx --help`."""
from __future__ import annotations

import sys


def main() -> None:
    try:
        import typer

        from .bench.command import app as bench
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"python -m flashfx needs {error.name}: pip install 'flashfx[report]'")
    app = typer.Typer(no_args_is_help=True, add_completion=False, help="FlashFX finds attention in any model and runs it in generated tiled kernels.")
    app.add_typer(bench, name="bench")
    app(prog_name="python -m flashfx")


if __name__ == "__main__":
    main()
