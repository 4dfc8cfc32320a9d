"""What kernels of the tests' specs spill, and where the assembler runs asynchronous products one by one for want of registers: `python -m tests.kernels.spills sm_80:triton:dropout_padding:gqa:72:1000 …`, on any machine.

A point is arch:schedule:variant:kind:head:length[:dtype]; schedule may be "" (the planned one), and each of the first five and the length a list with commas.
Captured tensors get gradients with --trained; --tiles keys=32,64,8,1 takes other tiles than the planned. A line per kernel that does (all with --all), then the number of kernels.
"""
from __future__ import annotations

import argparse
import itertools
import sys

from flashfx.codegen.plan import PlanError, overridden

from .cases import CORE, MORE, problem, spec
from .compiled import BY_ARCH, compile_all


def survey(point: str, trained: bool, tiles: dict[str, tuple[int, ...]]):
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("points", nargs="+")
    parser.add_argument("--trained", action="store_true", help="captured tensors get gradients")
    parser.add_argument("--tiles", nargs="*", default=[], metavar="KERNEL=M,N,WARPS,STAGES")
    parser.add_argument("--all", action="store_true", help="a line for kernels that do not spill too")
    args, found, bad = parser.parse_args(), 0, 0
    tiles = {kernel: tuple(map(int, numbers.split(","))) for kernel, numbers in (text.split("=") for text in args.tiles)}
    for point in args.points:
        for name, reports in survey(point, args.trained, tiles):
            for report, plan in reports:
                found, wrong = found + 1, report.spilled or report.shallow or report.serialised
                bad += bool(wrong)
                if wrong or args.all:
                    what = "" if plan is None else f"{plan.schedule} {plan.BLOCK_M}x{plan.BLOCK_N} {plan.num_warps} warps {plan.num_stages} stages"
                    print(f"{name} {report.kernel} {what}: {report.spilled} bytes, {report.registers} registers, {report.shared} shared"
                          f"{', shallow' * report.shallow}{', products one by one' * report.serialised}{f', instead {dict(report.instead)}' if report.instead else ''}", flush=True)
    print(f"{found} kernels, {bad} spill or wait")
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
