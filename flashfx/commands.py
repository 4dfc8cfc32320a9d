"""Commands of `python -m flashfx`. Exit codes: 0 done, 1 something is missing or failed, 2 wrong arguments. Errors are one line on stderr."""
from __future__ import annotations

import sys
from typing import Annotated

import torch
import typer

from .bench.command import app as bench
from .codegen.gpu import BY_NAME, current
from .errors import FlashFXError
from .explaining import explain
from .kernels_command import app as kernels

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich",
                  help="FlashFX finds attention in any model and runs it in generated tiled kernels.\n\n"
                       "Exit codes: 0 done, 1 something is missing or failed, 2 wrong arguments.")
app.command()(explain)
app.add_typer(kernels, name="kernels")
app.add_typer(bench, name="bench")


def run() -> None:
    """The command line; what went wrong on purpose is one line, with the way out."""
    try:
        app(prog_name="python -m flashfx")
    except FlashFXError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


@app.command()
def doctor() -> None:
    """What works on this machine, and what is missing, with the way out.

    Exit codes: 0 all that FlashFX needs is here ("note" lines are no failure), 1 something that it needs here is missing ("FAIL" lines).
    """
    from .bench.card import report
    lines, good = report()
    print("\n".join(lines))
    raise typer.Exit(0 if good else 1)


@app.command()
def gpu(
    name: Annotated[str, typer.Argument(help=f"a row: {', '.join(BY_NAME)}; this machine's by default")] = "",
    measure: Annotated[bool, typer.Option(help="measure this machine's GPU and print it as a row")] = False,
) -> None:
    """The numbers of a GPU that plans are made from.

    Examples:

      python -m flashfx gpu
      python -m flashfx gpu A100
      python -m flashfx gpu --measure
    """
    from .bench.card import measured, measured_row, row_text
    if name and name not in BY_NAME:
        raise typer.BadParameter(f"unknown GPU {name!r}; known: {', '.join(BY_NAME)}")
    if measure and (name or not torch.cuda.is_available()):
        raise typer.BadParameter("--measure measures the GPU of this machine" + ("" if name else ", and there is none"))
    row = BY_NAME[name] if name else current()
    print(row_text(row))
    if not name and not torch.cuda.is_available():
        print("no GPU here: plans are made for this one unless another is named")
    if measure:
        found = measured(torch.device("cuda", torch.cuda.current_device()))
        print(f"\nmeasured: {found['bandwidth'] / 1e9:.0f} GB/s, {found['matrix_rate'] / 1e12:.0f} TFLOP/s, {found['exp_rate'] / 1e12:.2f} T exponentials/s, "
              f"{found['launch'] * 1e6:.1f} us a launch (host)")
        print(measured_row(row, found))
