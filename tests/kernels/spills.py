"""What kernels of the tests' specs spill, and where the assembler runs asynchronous products one by one for want of registers: `python -m tests.kernels.spills sm_80:triton:dropout_padding:gqa:72:1000 …`, on any machine.

A point is arch:schedule:variant:kind:head:length[:dtype]; schedule may be "" (the planned one), and each of the first five and the length a list with commas.
--random 12000:200 takes arch:schedule:length[:dtype] of so many specs of the stress run, by their seeds, with their own shapes where length is "".
--grid takes archs and compiles what is planned for the workloads of the recorded sweep (`python -m flashfx bench tiles`).
Captured tensors get gradients with --trained; --tiles keys=32,64,8,1 takes other tiles than the planned. A line per kernel that does (all with --all), then the number of kernels.
"""
from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import replace

from flashfx.bench.sweep import grid, job_needs
from flashfx.codegen.plan import PlanError, overridden

from .cases import CORE, MORE, problem, spec
from .compiled import BY_ARCH, compile_all
from .random_spec import draw


def survey(point: str, trained: bool, tiles: dict[str, tuple[int, ...] | bool]):
    """(line of the point, reports of its kernels with their plans) of each combination."""
    *lists, length, dtype = (point if point.count(":") == 6 else f"{point}:bfloat16").split(":")
    for arch, schedule, variant, kind, head, M in itertools.product(*(x.split(",") for x in (*lists, length))):
        s, p = spec((CORE | MORE)[variant], kind), problem(kind, int(head), dtype, M=int(M), heads=4)
        name = f"{arch} {schedule or 'planned'} {variant} {kind} d={head} N={M} {dtype}"
        with overridden(schedule=schedule or None, **tiles):
            try:
                yield name, compile_all(s, p, BY_ARCH[arch], None if trained else (True,) * 3 + (False,) * len(s.aux), wrong=True)
            except PlanError as reason:
                print(f"{name}: {reason}")


def grid_survey(arch: str):
    """The same of every workload and length of the recorded sweep, planned for its batches and heads."""
    for workload, p in ((w, p) for w in grid() for p in w.problems):
        small = replace(p, extents=(2, 3, 2)[: len(p.extents)])
        yield f"{arch} {workload} M={p.M} N={p.N}", compile_all(workload.spec, small, BY_ARCH[arch], job_needs(workload), wrong=True, batches=p.extents)


def random_survey(point: str, seeds: range, tiles: dict[str, tuple[int, ...]]):
    """The same of the stress run's specs. Float32 is left to where the point asks for it."""
    arch, schedule, length, *dtype = point.split(":")
    for seed, M in itertools.product(seeds, length.split(",")):
        s, p = draw(seed)
        kind = dtype[0] if dtype else "bfloat16" if p.dtype == "float32" else p.dtype
        p = replace(p, dtype=kind, v_dtype=kind, **({"M": int(M), "N": int(M)} if M else {}))
        for each in arch.split(","):
            with overridden(schedule=schedule or None, **tiles):
                try:
                    yield f"{each} {schedule or 'planned'} seed {seed} d={p.D},{p.Dv} M={p.M} N={p.N} {kind}", compile_all(s, p, BY_ARCH[each], wrong=True)
                except PlanError as reason:
                    print(f"{each} seed {seed}: {reason}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("points", nargs="+")
    parser.add_argument("--grid", action="store_true", help="workloads of the recorded sweep")
    parser.add_argument("--random", metavar="FIRST:COUNT", help="specs of tests.gpu.stress")
    parser.add_argument("--trained", action="store_true", help="captured tensors get gradients")
    parser.add_argument("--tiles", nargs="*", default=[], metavar="KERNEL=M,N,WARPS,STAGES")
    parser.add_argument("--turns", action="store_true", help="heads that share keys take turns in the Hopper backward")
    parser.add_argument("--all", action="store_true", help="a line for kernels that do not spill too")
    args, found, bad = parser.parse_args(), 0, 0
    tiles = {kernel: tuple(map(int, numbers.split(","))) for kernel, numbers in (text.split("=") for text in args.tiles)}
    tiles |= {"turns": True} if args.turns else {}
    first, count = map(int, (args.random or "0:0").split(":"))
    seeds = range(first, first + count)
    for point in args.points:
        for name, reports in grid_survey(point) if args.grid else random_survey(point, seeds, tiles) if args.random else survey(point, args.trained, tiles):
            for report, plan in reports:
                found, wrong = found + 1, report.spilled or report.shallow or report.outrun or report.serialised
                bad += bool(wrong)
                if wrong or args.all:
                    what = "" if plan is None else f"{plan.schedule} {plan.BLOCK_M}x{plan.BLOCK_N} {plan.num_warps} warps {plan.num_stages} stages"
                    print(f"{name} {report.kernel} {what}: {report.spilled} bytes, {report.registers} registers, {report.shared} shared"
                          f"{', shallow' * report.shallow}{', outrun' * report.outrun}{', products one by one' * report.serialised}{f', instead {dict(report.instead)}' if report.instead else ''}", flush=True)
    print(f"{found} kernels, {bad} spill or wait")
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
