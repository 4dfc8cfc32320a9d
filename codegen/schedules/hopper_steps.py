"""What the warpgroups of the Hopper backward have in common: how a step begins, and how dV and dK leave."""
from __future__ import annotations

from ...expr import QK
from ..parts import Chunk, Site, tiles_name
from ..philox import kept_scale
from ..program import Program
from ..writer import Writer
from .common import Body, scaled
from .ends import classify, ended
from .hopper import position, tile_view
from .hopper_captured import left_out, tiles_from_rings
from .hopper_dq import look
from .hopper_keys import do_place, is_split, row_at, sees_ends_late
from .hopper_producer import rows_from_rings
from .relative import beyond_ends, summed

WARPS = 8
"""Of the one consumer partition: two warpgroups that hold a tile of keys."""


def chain(out: Writer, name: str, found, left, right, start: str) -> None:
    """A product over head-size chunks, each continuing the one before."""
    for n, c in enumerate(found):
        out.assign(name, f"warpgroup_mma({left(c)}, {right(c)}, {f'{name}, is_async=True' if n else start})")


def _issue_scores(site: Site, out: Writer, q: str) -> None:
    chain(out, "next_qk", site.qk_chunks, lambda c: f"k{c.suffix}", lambda c: f"{q}{c.suffix}.permute((1, 0))", "zeros, use_acc=False, is_async=True")


def scores_and_dp(site: Site, body: Body, out: Writer, rows: str = "BLOCK_N", warps: int = WARPS) -> None:
    """Issue S^T and dP^T of a tile as soon as its q and dO are there; wait for the first."""
    out.line("mbarrier.wait(q_full.index(slot), phase)")
    _issue_scores(site, out, "q")
    place, do_phase = do_place(site)
    out.line(f"mbarrier.wait(do_full.index({place}), {do_phase})")
    chain(out, "next_dp", site.v_chunks, lambda c: f"v{c.suffix}", lambda c: f"do{c.suffix}.permute((1, 0))", "zeros, use_acc=False, is_async=True")
    row_at(site, out, warps)
    if not is_split(site):
        look(site, out)
    out.assign("i", "i0 + rows")
    _enter(site, body.program, out, rows, warps)
    out.assign("qk", f"warpgroup_mma_wait({len(site.v_chunks)}, [next_qk])", "dP still runs")


def _enter(site: Site, program: Program, out: Writer, rows: str, warps: int) -> None:
    """Begin a tile: where its vectors and captured tiles are, and with registers to spare the loads across rows and keys that TMA cannot do."""
    visible = [site.spec.visible] if site.spec.is_masked else []
    program.enter(out, [site.raw, *visible, scaled(site, QK)[0], *([site.spec.empty_over] if site.averages else [])], "")
    if len(ended(site)) == 1 and (is_split(site) or not summed(site) or len(site.qk_chunks) > 1):  # of more tables it is cheaper to keep what they share
        program.latest = "told"
    rows_from_rings(site, program)
    tiles = tiles_from_rings(site, out, "slot" if warps == WARPS else "slot * 2 + PART", "BLOCK_M", rows, True)
    program.body.names |= tiles
    for load in site.raw.loads:
        if is_split(site) and {"i", "j"} <= load.variables and load not in (*tiles, *ended(site)):
            program.value(load)
    own = classify(site, program, out, ("i0", "BLOCK_M"), ("key0", rows), near=True)
    if not sees_ends_late(site):
        beyond_ends(site, own, out)


def gradients(site: Site) -> tuple[tuple[str, str, str, Chunk, str], ...]:
    """(name, operand, its tiles, piece, value) of each piece of dV and dK."""
    dtype, found = f"{tiles_name('Q', site.qk_chunks[0])}.dtype", []
    for name, operand, pieces, factor in (("dv", "V", site.v_chunks, kept_scale(site.spec.dropout)), ("dk", "K", site.qk_chunks, scaled(site, QK)[1] * left_out(site))):
        for c in pieces:
            value = f"{name}{c.suffix}" if factor == 1.0 else f"({name}{c.suffix} * {factor!r})"
            found.append((name, operand, tiles_name("d" + operand, c), c, f"{value}.to({dtype})"))
    return tuple(found)


def keep(site: Site, out: Writer, index: str, rows: str | int) -> None:
    """Keep dV and dK in the place of V and K. What the assembler knows ahead of the loop over rows, an address, it holds in a register throughout it:
    `index` has an unknown zero, of a number that is not negative."""
    for _, operand, _, c, value in gradients(site):
        out.line(f"{tile_view(f'{operand.lower()}_tile', c, index, rows)}.store({value})")
    out.line("fence_async_shared()")


def copy_out(site: Site, out: Writer, first: str, index: str) -> None:
    """Copy dV and dK from the place of V and K to memory."""
    for _, operand, tiles, c, _ in gradients(site):
        out.line(f"tma.async_copy_shared_to_global({tiles}, {position(site, operand, first, c)}, {operand.lower()}_tile{c.suffix}.index({index}))")


