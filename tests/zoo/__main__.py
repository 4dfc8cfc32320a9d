"""python -m tests.zoo [--attn eager|sdpa] [--train] [--dynamic] [--inner eager|aot_eager|inductor] [--others] [names…]: the whole zoo, one line per entry.

sites are softmaxes between two products and SDPA calls, counted in the Dynamo graphs without FlashFX's finder; fused are those that the
rewrite took away; over is the largest error in outputs, loss and gradients beyond twice eager's own, in rounding bands (at most 1 is
within the budget). N x N counts nodes of the rewritten graphs that make a tensor with an element for every query and key for a mask, bias
those from which a bias is made that the scores add, own those that the model itself reads or hands out, across a graph break say. With
--train the sites are those of a training step with dropout 0.1, which is run twice with one seed; errors are taken without dropout.
--others: instead of the table's, the architectures that it does not name, as far as they can be built without being told how (half an hour).
ZOO_LENGTH=512 python -m tests.zoo --shapes looks at the graphs of long texts alone: no errors are taken, and a shape of (512, 512) is no
coincidence.
"""
from __future__ import annotations

import argparse
import logging
import sys
import time

import torch

from . import entries
from .measure import captured_at_all, compare, dropped_out, shapes, worst
from .others import others


def one(entry, args) -> tuple[int, int, bool]:
    """Prints the line of one entry. (sites, fused, ok)"""
    started = time.time()
    options = dict(attn=args.attn, dynamic=args.dynamic or None, inner=args.inner)
    note, bad = "", []
    try:
        if args.shapes:
            return told(entry, shapes(entry, args.attn, args.train, args.inner), started)
        backend, *results = compare(entry, train=args.train, **options)
        over, where = worst(*results)
        if over > 1.0:
            backend, *results = compare(entry, train=args.train, captured=True, **options)
            over, where = worst(*results)
            note = " (against its captured graph; eager itself differs from that)" if over <= 1.0 else ""
        if args.train:
            backend, first, second = dropped_out(entry, **options)
            bad = [f"not finite with dropout: {n}" for n in first if results[1].get(n, first[n]).isfinite().all() and not first[n].isfinite().all()]
            bad += [f"a second run with the same seed differs: {n}" for n in first if backend.fused and first[n].isfinite().all() and not torch.equal(first[n], second[n])]
            note += "; ".join(["", *bad[:2]])
    except ValueError as error:
        if "does not support" in str(error):
            print(f"{entry.name:28} {args.attn} is not offered", flush=True)
            return 0, 0, True
        raise
    return told(entry, backend, started, over, f"{where if over > 1 else ''}{note}", over <= 1.0 and not bad)


def told(entry, backend, started: float, over: float = 0.0, note: str = "", ok: bool = True) -> tuple[int, int, bool]:
    sites, fused = backend.before, backend.fused
    print(f"{entry.name:28} sites {sites:3} fused {fused:3} over {over:8.2f}  N x N {len(backend.matrices):2}, bias {backend.biases:2}, own {backend.own:2} {note} ({time.time() - started:.1f} s)", flush=True)
    if fused < sites or backend.refusals:
        for text in dict.fromkeys(f"{r.stage}: {r.reason} [{r.node}] {r.source}" for r in backend.refusals):
            print(f"    {text}", flush=True)
    for text in dict.fromkeys(backend.matrices):
        print(f"    N x N: {text}", flush=True)
    return sites, fused, ok


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--attn", choices=("eager", "sdpa"), default="eager")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--dynamic", action="store_true")
    parser.add_argument("--shapes", action="store_true")
    parser.add_argument("--others", action="store_true")
    parser.add_argument("--inner", choices=("eager", "aot_eager", "inductor"), default="eager")
    args = parser.parse_args()
    torch._logging.set_logs(dynamo=logging.ERROR)
    totals, bad = [0, 0], []
    for entry in others(args.names) if args.others else entries(args.names or None):
        if entry.xfail:
            print(f"{entry.name:28} not captured by Dynamo: {entry.xfail}")
            continue
        try:
            sites, fused, ok = one(entry, args)
        except Exception as error:  # one broken entry must not hide the others
            said = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            ok = not captured_at_all(entry, args.attn, args.train, args.dynamic or None)
            print(f"{entry.name:28} {'not captured by Dynamo, whatever the backend:' if ok else 'FAILED'} {said}", flush=True)
            sites, fused = 0, 0
        totals = [totals[0] + sites, totals[1] + fused]
        if not ok:
            bad.append(entry.name)
    print(f"{totals[0]} sites, {totals[1]} fused ({100 * totals[1] / max(totals[0], 1):.1f} %); over the budget or failed: {', '.join(bad) or 'none'}")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
