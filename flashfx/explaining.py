"""`python -m flashfx explain`."""
from __future__ import annotations

import contextlib
import logging
import os
import shlex
import sys
import warnings
from pathlib import Path
from typing import Annotated, Optional

import torch
import typer
from torch._subclasses.fake_tensor import DataDependentOutputException

from .capture import explain as explain_call
from .codegen.gpu import BY_NAME, current
from .errors import FlashFXError
from .hf import said
from .report import Report
from .targets import DTYPES, Target, huggingface, load


def explain(
    target: Annotated[str, typer.Argument(help="module:name or path/to/file.py:name, see below", show_default=False)] = "",
    hf: Annotated[str, typer.Option(help="a model type of transformers (gpt2, llama, t5, …), or a model of the hub or a folder")] = "",
    attn: Annotated[str, typer.Option(help="with --hf: attn_implementation, eager or sdpa")] = "eager",
    seq: Annotated[int, typer.Option(min=1, help="with --hf: sequence length")] = 1024,
    batch: Annotated[int, typer.Option(min=1, help="with --hf: batch size")] = 2,
    layers: Annotated[int, typer.Option(min=0, help="with --hf: cut each stack of layers to this many; 0: all")] = 0,
    changes: Annotated[Optional[list[str]], typer.Option("--set", help="with --hf: key=value, a field of the configuration; repeatable")] = None,
    inputs: Annotated[Optional[list[str]], typer.Option("--input", help="shape of one argument, 2x4x1024x64 or 2x1024:bool; repeatable")] = None,
    dtype: Annotated[str, typer.Option(help="of the weights and inputs: bf16, fp16, fp32, fp64")] = "bf16",
    train: Annotated[bool, typer.Option("--train", help="a training step: gradients, dropout")] = False,
    gpu: Annotated[str, typer.Option(help=f"plan for this card: {', '.join(BY_NAME)}; this machine's by default, else the H100")] = "",
    measure: Annotated[bool, typer.Option("--measure", help="also time each distinct site on this machine's GPU, original and rewritten")] = False,
    html: Annotated[str, typer.Option(help="write the page here")] = "",
    json_: Annotated[bool, typer.Option("--json", help="print the whole record as JSON instead of text")] = False,
    kernels: Annotated[str, typer.Option(help="write each distinct kernel into this folder, as a file that checks itself when run")] = "",
    strict: Annotated[bool, typer.Option("--strict", help="exit with 1 if a site is left alone")] = False,
) -> None:
    """What would be rewritten in a model, why, and why not. Nothing is compiled and, without --measure, no kernel runs.

    TARGET names either a function without required arguments that returns (model, inputs), inputs being a tensor, a tuple of arguments or a
    dict of keyword arguments; or the module or function itself, with --input for each of its arguments.

    --hf builds the model from its configuration with random weights that take no memory.

    Examples:

      python -m flashfx explain --hf gpt2 --train --html gpt2.html

      python -m flashfx explain --hf llama --attn sdpa --seq 8192 --gpu A100 --layers 2

      python -m flashfx explain --hf bloom --set hidden_size=4096 --set n_head=32

      python -m flashfx explain mymodel.py:build

      python -m flashfx explain mymodel:attention --input 2x8x4096x64 --input 2x8x4096x64 --input 2x8x4096x64 --train

    Exit codes: 0 done, 1 the model cannot be built or captured (or, with --strict, a site is left alone), 2 wrong arguments.
    """
    if bool(target) == bool(hf):
        raise typer.BadParameter("give either TARGET (module:name) or --hf MODEL")
    if gpu and gpu not in (*BY_NAME, current().name):
        raise typer.BadParameter(f"unknown GPU {gpu!r}; known: {', '.join(BY_NAME)}")
    if dtype not in ("bf16", "fp16", "fp32", "fp64"):
        raise typer.BadParameter(f"unknown dtype {dtype!r}; known: {', '.join(list(DTYPES)[:4])}")
    if hf and inputs:
        raise typer.BadParameter("--input is for TARGET; a HuggingFace model gets its inputs from --seq and --batch")
    card = gpu or (current().name if hf or torch.cuda.is_available() else None)  # the arguments made here lie in the CPU's memory
    if hf:
        made = lambda real: huggingface(hf, attn, batch, seq, dtype, layers, changes or [], train, real)
        try:
            report, about = _explained(made(False), train, card, measure)
        except DataDependentOutputException:  # it reads numbers out of tensors, which fake ones do not have
            report, about = _explained(made(True), train, card, measure)
    else:
        report, about = _explained(load(target, inputs or [], dtype, train), train, card, measure)
    report = report.titled(about, _again(sys.argv[1:]))
    if kernels:
        for number, group in enumerate(g for g in report.groups() if g.site.fused):
            print(f"wrote {group.site.repro(Path(kernels) / f'kernel_{number}.py')}", file=sys.stderr)
    if html:
        report.to_html(html)
        print(f"wrote {html}", file=sys.stderr)
    if json_:
        print(report.to_json())
    else:
        report.show()
    raise typer.Exit(1 if strict and report.fused < len(report) else 0)


def _explained(found: Target, train: bool, card: str | None, measure: bool) -> tuple[Report, str]:
    """The report, and what it is of. Raises FlashFXError with the cause if no call of `found` can be captured."""
    first: FlashFXError | None = None
    for call in (found, *found.others):
        try:
            with call.mode, torch.set_grad_enabled(train), _quiet():
                report = explain_call(call.fn, *call.args, gpu=card, measure=measure, **call.kwargs)
        except (FlashFXError, DataDependentOutputException):
            raise
        except Exception as error:
            first = first or FlashFXError(f"{call.about} cannot be captured: {said(error)}")
            continue
        if call.note:
            print(f"note: {call.note}", file=sys.stderr)
        return report, call.about
    raise first


@contextlib.contextmanager
def _quiet():
    """PyTorch logs what it raises, with its stack, and warns of what concerns a compilation; not where somebody asked for logs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = logging.root.manager.disable
        logging.disable(before if os.environ.get("TORCH_LOGS") else logging.ERROR)
        try:
            yield
        finally:
            logging.disable(before)


def _again(arguments: list[str]) -> str:
    """The command line without what it writes."""
    kept, skip = [], False
    for a in arguments:
        if skip or a.split("=")[0] in ("--html", "--kernels", "--json"):
            skip = not skip and a in ("--html", "--kernels")
            continue
        kept.append(a)
    return " ".join(map(shlex.quote, ["python", "-m", "flashfx", *kept]))
