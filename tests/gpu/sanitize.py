"""compute-sanitizer over one forward and one backward of each schedule: accesses out of bounds (memcheck), races in shared memory (racecheck).

    python -m tests.gpu.sanitize [--tools memcheck,racecheck] [--heads 64,128] [--limit 240]

The kernels are compiled first, without the tool. Lengths are no multiple of a tile. A line for each run, and the tool's own report if it is not clean. Of warp-specialised
kernels racecheck cannot judge what partitions hand each other (`tests.gpu.hazards`, which says why): of those hazards there is only the number, beside that of a ring which is right.
"""
from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from flashfx.codegen.load import cache_dir

from .hazards import counts, hazards, within

TEXT = """\
attention[b, h, i, j]
  qk    = q[b, h, i] . k[b, h, j]
  score = qk * 0.125
  where   j <= i
  empty   nan
  drop    0.1
  out   = softmax_j(score) . v[b, h, j]"""
TEXTS = {"dropout": TEXT, "plain": "\n".join(line for line in TEXT.splitlines() if line.split()[0] not in ("where", "empty", "drop"))}
TEXTS["documents"] = "\n".join({"qk": "  given   doc: int[2]\n" + line, "where": "  where   (doc[b, i] == doc[b, j]) & (j <= i)", "drop": ""}.get(line.split()[0], line)
                             for line in TEXT.splitlines()).replace("\n\n", "\n")
RUNS = (("triton", 64, "dropout"), ("triton", 128, "dropout"), ("hopper", 64, "dropout"), ("hopper", 128, "dropout"), ("hopper", 192, "dropout"), ("hopper", 256, "dropout"),
        ("hopper", 64, "plain"), ("hopper", 128, "plain"), ("hopper", 64, "documents"), ("hopper", 128, "documents"), ("ring", 0, "control"))
CLEAN = "clean"
LENGTH = 300


def both(schedule: str, head: int, kind: str) -> None:
    """Forward and backward, of causal attention with dropout, or of those for which kernels have other ways: plain attention, and packed documents."""
    import torch

    from flashfx.codegen import launch
    from flashfx.codegen.plan import overridden
    from flashfx.codegen.selfcheck import inputs
    from flashfx.region import Problem
    from flashfx.spec import AttentionSpec
    from tests.kernels.run import in_runs, summary
    spec, problem = AttentionSpec.parse(TEXTS[kind]), Problem((1, 2), LENGTH, LENGTH, head, head, "bfloat16", "bfloat16")
    with overridden(schedule=schedule):
        q, k, v, aux, seed, sizes = in_runs(spec, inputs(spec, problem, "cuda"))
        lists = summary(spec, aux, sizes, q, k) if aux else None
        out, lse = launch.forward(spec, q, k, v, aux, seed, sizes, lists)
        grads = launch.backward(spec, torch.ones_like(out), q, k, v, aux, seed, out, lse, sizes, [True] * 3 + [False] * len(aux), None, lists)
    torch.cuda.synchronize()
    assert all(t.isfinite().all() for t in (out, *grads[:3]))


def checked(tool: str, schedule: str, head: int, kind: str, limit: int) -> tuple[str, str]:
    """(what the tool says in a word or two, its report)"""
    own = [sys.executable, "-m", *(["tests.gpu.ring"] if schedule == "ring" else ["tests.gpu.sanitize", "--run", schedule, str(head), kind])]
    if tool:
        own = ["compute-sanitizer", "--tool", tool, "--print-limit", "1000", *own]
    try:
        done = subprocess.run(own, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired as error:
        return f"ended after {limit} s", str(error.stdout or "")
    text = done.stdout + done.stderr
    return verdict(text, done.returncode, tool, schedule), text


def verdict(report: str, status: int, tool: str, schedule: str, source_of=None) -> str:
    """What to say of a run: it begins with CLEAN if that can be said. source_of: text of a kernel's file."""
    found = counts(report) if tool else [0]
    if status or found is None:
        return "failed"
    if not any(found):
        return CLEAN
    if schedule == "ring":
        return f"{found[0]} reported, though it is right"
    between = hazards(report)
    told_apart = tool == "racecheck" and schedule == "hopper" and 0 < found[0] == max(found) == report.count("Race reported between")
    if told_apart and not within(between, source_of or generated):
        return f"{CLEAN} within partitions; {found[0]} reported between them"
    return "not clean"


def generated(file: str) -> str:
    """Text of a kernel's file."""
    return (Path(cache_dir()) / file).read_text()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default="memcheck,racecheck")
    parser.add_argument("--limit", type=int, default=240, help="seconds for one run")
    parser.add_argument("--heads", default="", help="of these sizes alone, with commas")
    parser.add_argument("--run", nargs=3, metavar=("SCHEDULE", "HEAD", "KIND"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.run:
        both(options.run[0], int(options.run[1]), options.run[2])
        return 0
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not on the PATH: it comes with CUDA's toolkit", file=sys.stderr)
        return 1
    failed = 0
    with ThreadPoolExecutor(8) as pool:
        for tools in ([""], options.tools.split(",")):  # first without a tool, to compile
            runs = [(tool, *run) for tool in tools for run in RUNS if not options.heads or str(run[1]) in options.heads.split(",")]
            for (tool, schedule, head, kind), (said, text) in zip(runs, pool.map(lambda run: checked(*run, options.limit), runs)):
                if tool or said != CLEAN:
                    print(f"{tool or 'without a tool':12} {schedule:7} d={head:<4} {kind:9} {said}", flush=True)
                if schedule != "ring" and not said.startswith(CLEAN):
                    print(text[-3000:])
                    failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
