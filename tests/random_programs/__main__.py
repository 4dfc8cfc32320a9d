"""python -m tests.random_programs [--examples 2000] [--seed 0] [--only N]: write, compile and compare random programs.

Example n is made from seed * 1000000 + n alone, so `--only n` runs one again; it prints the program.
"""
from __future__ import annotations

import argparse
import collections
import logging
import random
import sys
import time

import torch

from . import Wrong, check, write

INNERS = ("eager",) * 19 + ("aot_eager",)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.random_programs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--only", type=int)
    args = parser.parse_args()
    torch._logging.set_logs(dynamo=logging.ERROR)
    started, wrong = time.time(), []
    valid, fused, fused_anyway = 0, 0, 0
    missed: collections.Counter = collections.Counter()
    numbers = [args.only] if args.only is not None else range(args.start, args.examples)
    for n in numbers:
        program = write(random.Random(args.seed * 1000000 + n))
        if args.only is not None:
            print(program)
        try:
            outcome = check(program, INNERS[n % len(INNERS)])
        except (Wrong, ValueError) as error:
            wrong.append(n)
            print(f"---- example {n} (seed {args.seed}) is wrong: {error}", flush=True)
            continue
        if args.only is not None:
            print(*(r.spec or r.refusal for r in outcome.regions), sep="\n")
        if program.valid:
            valid, fused = valid + 1, fused + outcome.fused
            if not outcome.fused:
                missed[outcome.why] += 1
                print(f"example {n}: not fused: {outcome.why}", flush=True)
        else:
            fused_anyway += outcome.fused
    print(f"{len(numbers)} programs in {time.time() - started:.0f} s: {len(wrong)} wrong{f' ({wrong})' if wrong else ''}; "
          f"{valid} valid, {fused} of them fused ({100 * fused / max(valid, 1):.1f} %); {fused_anyway} of the others were attention all the same")
    for why, count in missed.most_common():
        print(f"{count:5} x {why}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
