"""The command line: `python -m flashfx --help`."""
from __future__ import annotations

import sys


def main() -> None:
    try:
        from .commands import run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"python -m flashfx needs {error.name}: pip install 'flashfx[report]'")
    run()


if __name__ == "__main__":
    main()
