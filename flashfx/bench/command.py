"""`python -m flashfx bench attention`."""
from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import sys
from dataclasses import replace
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from .apart import Apart
from .measure import PASSES, clocks, matrix_product, measure
from .peers import PEERS
from .table import PLAIN, head, lines, summary
from .table import plot as draw
from .variants import VARIANTS, Shape, plain_workload

app = typer.Typer(no_args_is_help=True, help="FlashFX and its peers side by side, in one run, on random data.")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def _chosen(given: str, known, what: str) -> list[str]:
    names = [n.strip() for n in given.split(",") if n.strip()]
    unknown = [n for n in names if n not in known]
    if unknown or not names:
        raise typer.BadParameter(f"unknown {what} {', '.join(unknown) or given!r}; known: {', '.join(known)}")
    return names


def _numbers(given: str, what: str) -> list[int]:
    try:
        found = [int(float(n[:-1]) * 1024) if n.strip().lower().endswith("k") else int(n) for n in given.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{what} {given!r}: numbers separated by commas are expected, as 512,1k,16k") from None
    if any(n < 1 for n in found):
        raise typer.BadParameter(f"{what} {given!r}: positive numbers are expected")
    return found


def device_line(device: torch.device) -> str:
    """Device, clocks and versions: what a figure means nothing without."""
    import triton
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.processor() or platform.machine()}), timings are noise"
    cudnn = f", cuDNN {torch.backends.cudnn.version()}" if device.type == "cuda" else ""
    now = clocks(device)
    return f"{name}{f' [{now}]' if now else ''}, torch {torch.__version__}, triton {triton.__version__}{cudnn}, Python {platform.python_version()}"


@app.callback()
def bench() -> None:
    """FlashFX and its peers side by side, in one run, on random data."""


@app.command()
def attention(
    variant: Annotated[str, typer.Option(help=f"comma-separated, or all: {', '.join(VARIANTS)}")] = "full,causal",
    length: Annotated[str, typer.Option(help="sequence lengths")] = "512,1k,2k,4k,8k,16k",
    keys: Annotated[int, typer.Option(help=f"keys of each sequence of queries, as many as these where 0; variants {', '.join(n for n, v in VARIANTS.items() if v.crosses)}")] = 0,
    head_size: Annotated[str, typer.Option(help="head sizes of queries and keys; 192:128 means values of another size")] = "64,128",
    tokens: Annotated[int, typer.Option(help="batch = tokens / length")] = 16384,
    hidden: Annotated[int, typer.Option(help="heads = hidden / head size")] = 2048,
    heads: Annotated[int, typer.Option(help="heads, whatever the head size")] = 0,
    group: Annotated[int, typer.Option(help="queries that share a key (GQA); a variant's own where 0")] = 0,
    dtype: Annotated[str, typer.Option(help=f"one of {', '.join(DTYPES)}")] = "bf16",
    passes: Annotated[str, typer.Option("--pass", help=f"comma-separated: {', '.join(PASSES)}")] = "forward,both",
    peers: Annotated[str, typer.Option(help=f"comma-separated: {', '.join(PEERS)}")] = "flashfx,flex,flash,cudnn,fa4",
    plain: Annotated[bool, typer.Option(help="flashfx beside plain attention of as many tokens and visible keys")] = False,
    graph: Annotated[bool, typer.Option(help="on a GPU, replay calls as CUDA graphs: the device's time, for every peer; --no-graph: call after call, which wait for "
                                        "the host where they are short")] = True,
    check: Annotated[bool, typer.Option(help="compare outputs and gradients with float64")] = True,
    device: Annotated[str, typer.Option(help="cuda, cuda:1, cpu")] = "",
    json_path: Annotated[str, typer.Option("--json", help="write every row here")] = "",
    plot: Annotated[str, typer.Option(help="draw TFLOP/s over length here (.png, .svg)")] = "",
) -> None:
    """Attention alone: forward, backward and both, against peers.

    Examples:

      python -m flashfx bench attention
      python -m flashfx bench attention --variant all --length 4k,16k --peers flashfx,flex --plain
      python -m flashfx bench attention --head-size 32,80,96,192:128,256 --json rows.json --plot rows.png
      python -m flashfx bench attention --variant full --length 1k,4k --keys 77 --head-size 40,64 --heads 10 --tokens 16384
    """
    names = list(VARIANTS) if variant == "all" else _chosen(variant, VARIANTS, "variant")
    who, which = _chosen(peers, PEERS, "peer"), _chosen(passes, PASSES, "pass")
    if dtype not in DTYPES:
        raise typer.BadParameter(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
    if keys < 0 or keys and (others := [n for n in names if not VARIANTS[n].crosses]):
        raise typer.BadParameter(f"--keys {keys}: " + ("a positive number is expected" if keys < 0 else f"{', '.join(others)} need as many keys as queries"))
    lengths = _numbers(length, "length")
    sizes = [(pair[0], pair[-1]) for pair in (_numbers(s.replace(":", ","), "head size") for s in head_size.split(","))]
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    title = device_line(where)
    print(f"{title}{', CUDA graphs' if graph and where.type == 'cuda' else ''}\n{head(who, plain)}", flush=True)
    rows = []
    with Progress(console=Console(file=sys.stderr), transient=True) as progress, (Apart() if where.type == "cuda" else contextlib.nullcontext(measure)) as measured:
        plainly = functools.cache(lambda name, shape: measured(name, "flashfx", shape, which, False, graph))
        task = progress.add_task("", total=len(names) * len(sizes) * len(lengths) * len(who))
        for name in names:
            for d, dv in sizes:
                for n in lengths:
                    count = heads or max(1, hidden // d)
                    share = group or VARIANTS[name].kv_ratio
                    shape = Shape(max(1, tokens // n), count, max(1, count // share), n, d, dv, DTYPES[dtype], where, keys)
                    together = []
                    for peer in who:
                        progress.update(task, description=f"{name} d={d} N={n} {peer}")
                        together.append(measured(name, peer, shape, which, check, graph))
                        progress.advance(task)
                    if plain:
                        together.append(replace(together[0], peer=PLAIN, ms={}, tflops=plainly(*plain_workload(name, shape)).tflops, error=None, failed=""))
                    rows += together
                    print("\n".join(lines(together, who, which)), flush=True)
    print("\n".join(summary(rows, which)), flush=True)
    if now := clocks(where):
        print(f"[{now}; a matrix product of {dtype}, 8192 square: {matrix_product(DTYPES[dtype], where):.0f} TFLOP/s]")
    if json_path:
        with open(json_path, "w") as file:
            json.dump({"device": title, "rows": [r.as_dict() for r in rows]}, file, indent=1)
    if plot:
        draw(rows, which, plot, title)


@app.command()
def tiles(
    path: Annotated[str, typer.Argument(help="the table, JSON")] = "tiles.json",
    quick: Annotated[bool, typer.Option(help="two small workloads, to try the command")] = False,
    processes: Annotated[int, typer.Option(help="that compile; one a core by default")] = 0,
    minutes: Annotated[float, typer.Option(help="stop after this long, with what there is")] = 60.0,
    only: Annotated[str, typer.Option(help="comma-separated texts: workloads whose name contains one; a table that is there already keeps all else")] = "",
    schedules: Annotated[str, typer.Option(help="comma-separated: hopper, triton; with one of them a table that is there already keeps the other's times")] = "hopper,triton",
    directions: Annotated[str, typer.Option("--pass", help="comma-separated: forward, backward; likewise")] = "forward,backward",
) -> None:
    """Every tile that fits, kernel by kernel, over a grid of specs: what the cost model's rates are fitted to.

    Examples:

      python -m flashfx bench tiles
      python -m flashfx bench tiles h200.json --minutes 10
      python -m flashfx bench tiles h200.json --only "bias d=64,trained d=128"
      python -m flashfx bench tiles h200.json --schedules hopper --pass forward
    """
    from ..codegen.gpu import current
    from .sweep import DIRECTIONS, SCHEDULES, Table, grid, sweep
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    title, workloads, chosen = device_line(where), grid(quick, only), _chosen(schedules, SCHEDULES, "schedule")
    ways = _chosen(directions, DIRECTIONS, "pass")
    again = bool(only) or len(chosen) < len(SCHEDULES) or len(ways) < len(DIRECTIONS)
    if not workloads:
        raise typer.BadParameter(f"no workload has any of {only!r} in its name; there are: {', '.join(sorted({str(w) for w in grid(quick)}))}")
    print(title, *map(str, workloads if only else ()), sep="\n", flush=True)
    sweep(workloads, current(where), where, Table(path, title, again), processes or os.cpu_count() or 1, 60 * minutes,
          lambda text: print(text, flush=True), chosen, ways)


@app.command()
def fit(
    path: Annotated[str, typer.Argument(help="a table that bench tiles wrote")],
    gpu: Annotated[str, typer.Option(help="the GPU it was measured on, a row of python -m flashfx gpu")] = "H200",
) -> None:
    """The cost model's rates from one half of a table of bench tiles, as Python for flashfx/codegen/rates.py.

    Examples:

      python -m flashfx bench fit tests/data/h200_tiles.json
    """
    from ..codegen.gpu import BY_NAME
    from .fit import text
    print(text(path, BY_NAME[_chosen(gpu, BY_NAME, "GPU")[0]]))


@app.command()
def figure2(
    path: Annotated[str, typer.Argument(help="the picture (.png, .svg)")] = "figure2.png",
    batch: Annotated[int, typer.Option(help="batch of the left and middle parts")] = 64,
    length: Annotated[int, typer.Option(help="length of the left and middle parts; four times as long at the right")] = 1024,
    watched: Annotated[bool, typer.Option("--watched", help="run each line once, for a profiler, and print nothing")] = False,
) -> None:
    """FlashAttention's Figure 2 on this card: standard against tiled, size of tiles, sparsity; by the model and, with a GPU, measured.

    Where Nsight Compute (ncu) is installed, bytes of device memory are counted too.

    Examples:

      python -m flashfx bench figure2
      python -m flashfx bench figure2 h200.svg
    """
    from ..codegen.gpu import current
    from ..codegen.timing import Clock
    from . import figure2 as figure
    from .counters import count
    where = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    place, groups = where or torch.device("cpu"), []
    gpu = current(place)
    if watched:
        figure.watched(gpu, where, batch, length)
        return
    title = device_line(place)
    print(f"{title}\n{figure.HEAD}", flush=True)
    try:
        groups = count("figure2", "--watched", "--batch", str(batch), "--length", str(length)) if where else []
    except RuntimeError as error:
        print(f"bytes are not counted: {error}", file=sys.stderr)
    clock, left, drawn = Clock(where) if where else None, iter(groups), {}
    for name, cases in figure.tables(gpu, where, batch, length):
        print(name)
        for line in figure.measured(cases, clock, left):
            print(line, flush=True)
            drawn.setdefault(name, []).append(line)
    figure.draw(drawn, path, title)


@app.command("bytes")
def counters(
    watched: Annotated[bool, typer.Option("--watched", help="launch the kernels once, for a profiler, and print nothing")] = False,
    json_path: Annotated[str, typer.Option("--json", help="write what was counted here, as tests/data/h200_bytes.json")] = "",
) -> None:
    """Bytes of device memory of ten kernels: predicted, and as Nsight Compute (ncu) counts them.

    Examples:

      python -m flashfx bench bytes
      python -m flashfx bench bytes --json bytes.json
    """
    from ..codegen.gpu import current
    from .counters import as_json, count, rows, run_kernels, table
    if not torch.cuda.is_available():
        raise typer.BadParameter("the counters are those of a GPU, and there is none")
    where = torch.device("cuda", torch.cuda.current_device())
    if watched:
        run_kernels(current(where), where)
        return
    try:
        found, title = rows(count("bytes", "--watched"), current(where)), device_line(where)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    if json_path:
        with open(json_path, "w") as file:
            file.write(as_json(found, title))
    print(title, *table(found, current(where)), sep="\n")
