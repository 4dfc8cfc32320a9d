"""Random specs and shapes through every schedule of this GPU: outputs and gradients against the float64 reference, repeats bit for bit.

    python -m tests.gpu.stress [--count 200] [--first 0] [--processes 12]

A failure names its seed; `--first SEED --count 1` runs it again alone.
"""
from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
import traceback

import torch

from flashfx.codegen import gpu, launch
from flashfx.codegen.plan import make_plan, overridden
from flashfx.codegen.selfcheck import inputs
from tests.kernels.random_spec import draw
from tests.kernels.run import in_runs, run


def repeats(spec, problem, ordered: bool) -> None:
    """Forward twice, and where its order is fixed backward twice: the same bits."""
    q, k, v, aux, seed, sizes = inputs(spec, problem, "cuda")
    same = lambda a, b: torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    (out, lse), again = (launch.forward(spec, q, k, v, aux, seed, sizes) for _ in range(2))
    assert same(out, again[0]) and same(lse, again[1]), "forward differs from run to run"
    if ordered:
        needs, grad = [t.is_floating_point() for t in (q, k, v, *aux)], torch.ones_like(out)
        first, second = (launch.backward(spec, grad, q, k, v, aux, seed, out, lse, sizes, needs) for _ in range(2))
        assert all(same(a, b) for a, b in zip(first, second)), "backward differs from run to run"


def attempt(seed: int) -> tuple[int, list[str], list[str]]:
    """(seed, kernels run, failures)."""
    spec, problem = draw(seed)
    ran, failed = [], []
    for schedule, parts in (("triton", 1), ("triton", 3), ("hopper", 1)):
        with overridden(schedule=schedule, parts=parts):
            plans = [make_plan(spec, problem, gpu.current("cuda"), direction).schedule for direction in ("forward", "backward")]
            if schedule not in plans:
                continue
            try:
                run(spec, problem, "cuda").within_budget()
                if schedule == "hopper" and spec.is_masked:  # once more by the mask's run-time summary
                    run(spec, problem, "cuda", operands=in_runs(spec, inputs(spec, problem, "cuda"), seed=seed), listed=True).within_budget()
                repeats(spec, problem, ordered=plans[1] == "triton")
                ran.append("/".join(plans) + ", keys in parts" * (parts > 1))
            except Exception:
                failed.append(f"seed {seed}, {'/'.join(plans)}, {parts} parts, {problem}\n{spec}\n{traceback.format_exc(limit=-3)}")
    return seed, ran, failed


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=12)
    options = parser.parse_args(argv)
    start, totals, failures = time.time(), {}, []
    with multiprocessing.get_context("spawn").Pool(min(options.processes, options.count)) as pool:
        for _, ran, failed in pool.imap_unordered(attempt, range(options.first, options.first + options.count)):
            for plans in ran:
                totals[plans] = totals.get(plans, 0) + 1
            failures += failed
            for text in failed:
                print(text, flush=True)
    print(f"{torch.cuda.get_device_name()}: {options.count} specs, runs by schedule (forward/backward) {totals}, {len(failures)} failures, "
          f"{time.time() - start:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
