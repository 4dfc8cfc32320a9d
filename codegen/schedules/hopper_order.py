"""An ordered dQ for the Hopper backward under deterministic algorithms: tiles of keys add to a tile of rows one after the other, last keys first.

A number in memory for each tile of rows says who added last. Nobody reads what others added: the sums are formed in the L2 cache, where
the number is too, and it is written when the addition is complete, so that no fence is needed (two a step took a third of the time). Programs start in the order of their numbers and the last keys have the
least, so a program waits only for one that runs already; under a causal mask it then need not wait at all, for the tile of keys before it
came to these rows two steps earlier (flash-attention's deterministic mode orders tiles so too). Who comes before whom is known without a
list where the rows that see a tile of keys begin and end the later, the later its keys: its predecessor is the next tile of keys.
"""
from __future__ import annotations

from ...expr import Var
from ..parts import Site, count, flatten
from ..program import Program
from ..writer import Writer
from .hopper import segments


def predecessor(site: Site, out: Writer, override: str) -> None:
    """Assign first_before and last_before, between which rows are visited by the next tile of keys too, which adds to them first."""
    out.assign("j0", "(tile + 1) * BLOCK_N", "the tile of keys that comes first")
    if any(Var("j1") in e.leaves for e in (site.by_keys.lo, site.by_keys.hi, site.by_keys.full_lo, site.by_keys.full_hi)):
        out.assign("j1", "tl.minimum(j0 + BLOCK_N, N) - 1")
    segments(site.by_keys, Program(site.spec, out.section(), inner="i"), out, "i", "BLOCK_M", "M", True, True, override)
    out.assign("first_before", "start")
    out.assign("last_before", "tl.where(j0 < N, stop, 0)")


def turns_shape(site: Site) -> str:
    """How many tiles of rows there are, on the host."""
    axes = site.axes_of("q")
    return f"({count(axes)} * triton.cdiv(M, KEYS['BLOCK_M']),)"


def look(site: Site, out: Writer) -> None:
    """At the start of a step: whose turn is it at its rows?"""
    if site.ordered:
        out.assign("turn", f"Turns + ({flatten(site.axes_of('q'))}) * tl.cdiv(M, BLOCK_M) + i0 // BLOCK_M")
        out.assign("seen", "gl.load(turn, volatile=True)")
        out.assign("wanted", "tl.where((i0 >= first_before) & (i0 < last_before), tiles - 1 - tile, 0)", "0: nobody comes before")


def await_turn(site: Site, out: Writer) -> None:
    if site.ordered:
        with out.block("while seen != wanted:"):
            out.assign("seen", "gl.load(turn, volatile=True)")


ADDED = "gl.inline_asm_elementwise('cp.async.bulk.wait_group 0; mov.b32 $0, $1;', '=r,r', [steps], dtype=gl.int32, is_pure=False, pack=1)"
"""Waits until what this thread's bulk copies add is in memory: Gluon's own wait is for their source alone."""


def pass_on(site: Site, out: Writer, after: str) -> None:
    """Tell the next that the step before has added. after: a condition, "" if there was such a step."""
    if site.ordered:
        def release() -> None:
            out.line("gl.atomic_xchg(previous, tiles - tile, sem='relaxed', scope='gpu')")
        if after:
            with out.block(f"if {after}:"):
                release()
        else:
            release()
