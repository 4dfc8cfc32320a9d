"""compute-sanitizer over one forward and one backward of each schedule: accesses out of bounds (memcheck), races in shared memory (racecheck).

    python -m tests.gpu.sanitize [--tools memcheck,racecheck] [--limit 240]

The kernels are compiled first, without the tool. Lengths are no multiple of a tile. A line for each run, and the tool's own report if it is not clean.
"""
from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

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
RUNS = (("triton", 64, "dropout"), ("triton", 128, "dropout"), ("hopper", 64, "dropout"), ("hopper", 128, "dropout"), ("hopper", 256, "dropout"),
        ("hopper", 64, "plain"), ("hopper", 128, "plain"), ("hopper", 64, "documents"), ("hopper", 128, "documents"))
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
    own = [sys.executable, "-m", "tests.gpu.sanitize", "--run", schedule, str(head), kind]
    if tool:
        own = ["compute-sanitizer", "--tool", tool, "--print-limit", "10", *own]
    try:
        done = subprocess.run(own, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired as error:
        return f"ended after {limit} s", str(error.stdout or "")
    text = done.stdout + done.stderr
    summary = [line for line in text.splitlines() if "SUMMARY" in line]
    clean = done.returncode == 0 and (not tool or bool(summary) and all(" 0 " in line for line in summary))
    return "clean" if clean else "not clean", text


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default="memcheck,racecheck")
    parser.add_argument("--limit", type=int, default=240, help="seconds for one run")
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
            runs = [(tool, *run) for tool in tools for run in RUNS]
            for (tool, schedule, head, kind), (verdict, text) in zip(runs, pool.map(lambda run: checked(*run, options.limit), runs)):
                if tool or verdict != "clean":
                    print(f"{tool or 'without a tool':12} {schedule:7} d={head:<4} {kind:8} {verdict}", flush=True)
                if verdict != "clean":
                    print(text[-3000:])
                    failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
