"""Of the Hopper backward at heads up to 64: steps that one of its two warpgroups goes past, since no row of them sees a key of its half.

Under a causal mask the first tile of rows that sees a tile of keys sees its first half alone, under a window the last one its second half. The other
warpgroup has dS = 0 there, for the one that computes dQ, and nothing else to do.
"""
from __future__ import annotations

from ...expr import Const, Var, call, substitute
from ..parts import Site, tiles_name
from ..program import Program
from ..writer import Writer
from .hopper import bound_text
from .hopper_dq import ds_tile
from .hopper_keys import HALF, end_step, frees_late, goes_past, number, slot_of
from .hopper_lists import tile_start


def count_past(site: Site, out: Writer) -> None:
    """Of the warp that copies: behind start, stop and count of a tile of keys."""
    told, program = goes_past(site), Program(site.spec, out.section(), inner="i")
    half = call("add", Var("j0"), Const(HALF))
    if "front" in told:
        first = bound_text(program, substitute(site.by_keys.lo, {Var("j0"): half}))
        why = "those that see the first half alone"
        if site.listed:
            out.assign("front", f"({tile_start(site, 'i', '0')} + BLOCK_M <= {first}).to(tl.int32)", f"{why}: the first, if any")
        else:
            out.assign("front", f"tl.minimum({first} // BLOCK_M - start // BLOCK_M, count)", why)
    if "back" in told:
        last = bound_text(program, substitute(site.by_keys.hi, {Var("j1"): call("minimum", Var("j1"), call("sub", half, Const(1)))}))
        out.assign("back", f"tl.maximum(count - tl.cdiv(tl.maximum({last} - start, 0), BLOCK_M), 0)", "those that see the second")


def steps_of_half(site: Site, out: Writer) -> tuple[str, str]:
    """The steps of a half: the first, and the one behind the last."""
    told = goes_past(site)
    for name in told:
        out.assign(name, number(site, name, 4))
    return "before + front * PART" if "front" in told else "before", "end - back * (1 - PART)" if "back" in told else "end"


def hand_over_zeros(site: Site, out: Writer, where: str) -> None:
    """dS of the steps at the "front" or at the "back" that the half goes past."""
    if where not in goes_past(site):
        return
    dtype = f"{tiles_name('Q', site.qk_chunks[0])}.dtype"
    part, steps = (1, "before, before + front") if where == "front" else (0, "end - back, end")
    with out.block(f"if PART == {part}:"), out.block(f"for at in tl.range({steps}):", f"these rows see keys of the {'first' if part else 'second'} half alone"):
        slot_of(site, out)
        out.line("mbarrier.wait(q_full.index(slot), phase)")
        out.line("mbarrier.wait(do_full.index(slot), phase)")
        out.line("mbarrier.wait(ds_empty.index(slot), phase ^ 1)")
        out.line(f"{ds_tile(site, 'slot * 2 + PART', HALF)}.store(zeros.to({dtype}))")
        out.line("fence_async_shared()")
        out.line("mbarrier.arrive(ds_full.index(slot), count=1)")
        if not frees_late(site):
            out.line("mbarrier.arrive(rows_empty.index(slot), count=1)")
        end_step(site, out)
