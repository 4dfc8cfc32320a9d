"""What the warpgroups of the Hopper backward have in common: how a step begins, and how dV and dK leave."""
from __future__ import annotations

from contextlib import nullcontext
from typing import Callable, ContextManager

from ...expr import QK
from ..parts import Chunk, Site, tiles_name
from ..philox import kept_scale
from ..program import Program
from ..writer import Writer
from .common import Body, scaled
from .ends import classify, ended
from .hopper import position, tile_view
from .hopper_captured import left_out, mask_from_rings, store_ds, stored_load, tiles_from_rings
from .hopper_dq import ds_tile, finish_dq, frees_early, is_halved, look
from .hopper_keys import adds_apart, by_hand, do_place, is_split, is_wide, keys_at, keys_from_rings, row_at, sees_ends_late
from .hopper_producer import from_ring, rows_from_rings
from .hopper_score import fills_registers, reads_lse_first, reads_rows_ahead
from .hopper_vectors import last_of_tile
from .relative import beyond_ends, start_ends, store_ends, summed

WARPS = 8
"""Of the one consumer partition: two warpgroups that hold a tile of keys."""


def holds_half(site: Site) -> bool:
    """Do the registers of two warpgroups that hold the keys together have room for half of v, 16 of a thread? It spares a step a sixteenth of what its products read
    of shared memory, which they keep busy: 1 % of the backward at head size 128."""
    spec = site.spec
    lacks = site.other_axes(site.axes_of("k", "v")) or spec.loads or spec.dropout or by_hand(site) or fills_registers(site)
    return adds_apart(site) and site.whole and not lacks and len(site.v_chunks) == 1 and site.v_chunks[0].width == 128


def chain(out: Writer, name: str, found, left, right, start: str) -> None:
    """A product over head-size chunks, each continuing the one before."""
    for n, c in enumerate(found):
        out.assign(name, f"warpgroup_mma({left(c)}, {right(c)}, {f'{name}, is_async=True' if n else start})")


def _issue_scores(site: Site, out: Writer, q: str) -> None:
    chain(out, "next_qk", site.qk_chunks, lambda c: f"k{c.suffix}", lambda c: f"{q}{c.suffix}.permute((1, 0))", "zeros, use_acc=False, is_async=True")


def scores_and_dp(site: Site, body: Body, out: Writer, rows: str = "BLOCK_N", warps: int = WARPS) -> None:
    """Issue S^T and dP^T of a tile as soon as its q and dO are there; wait for the first."""
    ahead = reads_rows_ahead(site)
    out.line("mbarrier.wait(q_full.index(slot), phase)")
    if reads_lse_first(site):
        out.assign("lse2", from_ring("lse2_ring"))
    _issue_scores(site, out, "q")
    place, do_phase = do_place(site)
    out.line(f"mbarrier.wait(do_full.index({place}), {do_phase})")
    if holds_half(site):
        out.assign("next_dp", "warpgroup_mma(v_held, do.slice(0, 64, 1).permute((1, 0)), zeros, use_acc=False, is_async=True)")
        out.assign("next_dp", "warpgroup_mma(v.slice(64, 64, 1), do.slice(64, 64, 1).permute((1, 0)), next_dp, is_async=True)")
    else:
        chain(out, "next_dp", site.v_chunks, lambda c: f"v{c.suffix}", lambda c: f"do{c.suffix}.permute((1, 0))", "zeros, use_acc=False, is_async=True")
    await_scores = lambda: out.assign("qk", f"warpgroup_mma_wait({2 if holds_half(site) else len(site.v_chunks)}, [next_qk])", "dP still runs")
    if ahead:
        out.assign("lse2", from_ring("lse2_ring"))
        await_scores()
    row_at(site, out, warps)
    if is_wide(site):
        look(site, out)
    out.assign("i", "i0 + rows")
    enter(site, body.program, out, rows, warps)
    if not ahead:
        await_scores()


def enter(site: Site, program: Program, out: Writer, rows: str, warps: int) -> None:
    """Begin a tile: where its vectors and captured tiles are, and with registers to spare the loads across rows and keys that TMA cannot do."""
    visible = [site.spec.visible] if site.spec.is_masked else []
    program.enter(out, [site.raw, *visible, scaled(site, QK)[0], *([site.spec.empty_over] if site.averages else [])], "")
    if len(ended(site)) == 1 and (is_split(site) or not summed(site) or len(site.qk_chunks) > 1):  # of more tables it is cheaper to keep what they share
        program.latest = "told"
    rows_from_rings(site, program)
    place = "slot" if warps == WARPS else "slot * 2 + PART"
    tiles = tiles_from_rings(site, out, place, "BLOCK_M", rows, True)
    program.body.names |= tiles | mask_from_rings(site, out, place, "BLOCK_M", rows, True)
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


def unless_short(site: Site, out: Writer, first: str, rows: str | int) -> ContextManager:
    """What follows is not of a tile of keys that ends sooner than `rows` from `first` on, where a document does: keys behind are another's."""
    return out.block(f"if {first} + {rows} <= key_end:") if site.documents else nullcontext()


def store_short(site: Site, out: Writer, first: str, rows: str | int) -> None:
    """Behind `unless_short`: dV and dK of such a tile, from registers, four bytes at a time."""
    if not site.documents:
        return
    with out.block("else:", "keys behind are another tile's"):
        for name, operand, _, c, value in gradients(site):
            size = site.D if operand == "K" else site.Dv
            out.assign("row", f"{first} + gl.arange(0, {rows}, gl.SliceLayout(1, {name}_layout{c.suffix}))[:, None]")
            out.assign("column", f"gl.arange(0, {c.width}, gl.SliceLayout(0, {name}_layout{c.suffix}))[None, :]")
            out.assign("cells", f"d{operand} + (tl.cast(y, tl.int64) * late(N, y) + row) * {size} + {c.start} + column")
            inside = f"(row < key_end) & (column < {size - c.start})" if c.masked else "row < key_end"
            out.line(f"tl.store(cells, {value}, mask={inside})")


def store_short_rows(site: Site, out: Writer, operand: str, c: Chunk, tile: str) -> None:
    """Behind `unless_short` too: a piece of them from shared memory, sixteen bytes at a time, where registers are left for what says where."""
    size = site.D if operand == "K" else site.Dv
    with out.block("else:", "keys behind are another tile's"):
        out.assign("cells", f"d{operand} + (tl.cast(y, tl.int64) * late(N, y) + j0) * {size} + {c.start}")
        out.line(f"store_rows({tile}.reshape([BLOCK_N, {c.width}]), cells, {size}, j0, key_end, {min(c.width, size - c.start)}, {WARPS})")


def store_in_place(site: Site, out: Writer) -> None:
    """The end of a tile of keys: dV and dK leave by the place of V and K."""
    with unless_short(site, out, "j0", "BLOCK_N"):
        out.line("barrier()", "all warps have read the keys and values: their place takes the gradients")
        keep(site, out, "kv", "BLOCK_N")
        out.line("barrier()")
        copy_out(site, out, "j0", "kv")
        out.line("tma.store_wait(0)")
    store_short(site, out, "j0", "BLOCK_N")
    out.line("mbarrier.arrive(kv_empty.index(0), count=1)")


# ------------------------------------------------------------------------------- of two warpgroups that multiply together

def number_rows(out: Writer) -> None:
    """Ahead of all tiles, behind the layout of the scores."""
    out.line("keywise: gl.constexpr = gl.SliceLayout(1, scores)")
    out.line("rowwise: gl.constexpr = gl.SliceLayout(0, scores)")
    out.assign("rows", "gl.arange(0, BLOCK_M, rowwise)")
    out.assign("zeros", "gl.zeros([BLOCK_N, BLOCK_M], gl.float32, scores)")


def start_tile(site: Site, out: Writer, others) -> Body:
    """Begin a tile of keys: accumulators, where the keys are, and the program of its steps."""
    out.assign("key0", "j0")
    out.assign("j", "key0 + gl.arange(0, BLOCK_N, keywise)")
    if not site.documents:  # else `weights` does, where it needs it
        last_of_tile(site, out, "i", "tl.minimum(key0 + BLOCK_N, N)")
    program = Program(site.spec, out.section(), inner="i", columns="i", varying=others, nearest="" if site.whole else "j")
    program.ramps = not is_wide(site)
    keys_from_rings(site, program)
    for c in site.qk_chunks:
        out.assign(f"dk{c.suffix}", f"gl.zeros([BLOCK_N, {c.width}], gl.float32, dk_layout{c.suffix})")
        out.assign(f"k{c.suffix}", tile_view("k_tile", c, "kv", "BLOCK_N"))
    for c in site.v_chunks:
        out.assign(f"v{c.suffix}", tile_view("v_tile", c, "kv", "BLOCK_N"))
        if holds_half(site):
            out.assign("v_held", "v.slice(0, 64, 1).load(gl.DotOperandLayout(0, scores, 2))")
        out.assign(f"dv{c.suffix}", f"gl.zeros([BLOCK_N, {c.width}], gl.float32, dv_layout{c.suffix})")
    start_ends(site, out, "gl.zeros([BLOCK_N], gl.float32, keywise)")
    return Body(site, program, transposed=True)


def view_rows(site: Site, out: Writer) -> None:
    """Where a step's q and dO are."""
    for letter, place, found in (("q", "slot", site.qk_chunks), ("do", do_place(site)[0], site.v_chunks)):
        for c in found:
            out.assign(f"{letter}{c.suffix}", tile_view(f"{letter}_ring", c, place, "BLOCK_M"))


def multiplies_beside(site: Site) -> bool:
    """Is dV += P^T dO started before dS is worked out? Behind that it runs while warps meet, and less is under way at once; but under dropout dS takes long, and halves of dQ
    leave no time. H200, head size 128, N = 4096 and 16384, backward: 1 to 4 % slower, dropout 1 to 3 % faster; 192 3 % slower, 256 1 % faster."""
    return site.spec.dropout > 0 or is_halved(site)


def publish_ds(site: Site, out: Writer, place: str, beside: Callable[[], None] = lambda: None) -> None:
    """dS^T into shared memory, for all warps. beside: issues what runs meanwhile."""
    apart, stored = adds_apart(site), stored_load(site)
    if apart and stored:
        out.line("tma.store_wait(0)", "dS of the step before has left its place, and dK of the tile before that of dQ")
        out.line("barrier()")
    out.line(f"{ds_tile(site, place, 'BLOCK_N')}.store(ds)")
    beside()
    out.line("fence_async_shared()")
    if apart and not stored:
        out.line("tma.store_wait(0)", "dK of the tile before has left the place of dQ")
    elif not apart and frees_early(site):
        out.line("tma.store_wait(0)", "dQ of the step before has left its place")
    out.line("barrier()")
    store_ds(site, out, [("j0", place)])


def issue_dq(site: Site, out: Writer, found, place: str) -> None:
    """Start dQ = dS K for some of its pieces."""
    for c in found:
        k = f"k.slice({c.start}, {c.width}, 1)" if is_halved(site) else f"k{c.suffix}"
        out.assign(f"next_dq{c.suffix}", f"warpgroup_mma({ds_tile(site, place, 'BLOCK_N')}.permute((1, 0)), {k}, "
                                         f"gl.zeros([BLOCK_M, {c.width}], gl.float32, dq_layout{c.suffix}), use_acc=False, is_async=True)")


def end_rows(site: Site, out: Writer, others) -> None:
    """Behind the loop over steps: sums beyond the ends of tables, and the last of dQ."""
    keys_at(site, out, WARPS)
    if not others:
        store_ends(site, out, "tile")
    if not adds_apart(site):
        finish_dq(site, out)
