"""What the one warp does that feeds the Hopper backward: tiles by TMA, and row vectors through rings in shared memory.

Consumers read a row vector where they need it and forget it: registers are what they lack, and loads from global memory would stand
between two matrix products.
"""
from __future__ import annotations

from contextlib import contextmanager

from ...expr import BOOL, FLOAT, Load, Var
from ..gluon import Partition
from ..parts import Site, count, decode, extent, flatten
from ..program import Program, pointer
from ..writer import Writer
from .documents import MIXED, SHARE
from .common import mean_share, padded_rows
from .hopper_captured import expect_with_mask, left_out, read_tiles, tile_bytes, tile_loads
from .hopper import read_by_tma, segments
from .hopper_lists import listed_tiles, row_place, row_start, tile_start
from .hopper_keys import HALF, MOST_TILES, NEXT, adds_apart, await_place, do_place, each_tile, end_step, frees_late, has_single_do, is_apart, is_wide, key_loads, key_ring, keys_held, partial_tiles, rows_told
from .hopper_past import count_past
from .hopper_keys import slot_and_phase, slot_of, start_steps, takes_turns, tell, tell_keys

TICKET = "number_on(take_ticket(Taken, -1))"
NEXT_NUMBER = f"tl.num_programs(0) + {TICKET}"
MOST_VECTORS = 6
"""Loads by row that get a ring, 8 bytes an element at most; consumers load the others themselves."""


def row_loads(site: Site) -> list[Load]:
    """Captured tensors read at the row and not at the key, which the producer reads for the consumers."""
    return [load for load in site.spec.loads if load.variables & {"i", "j"} == {"i"}][:MOST_VECTORS]


def row_ring(site: Site, load: Load) -> str:
    return f"row_ring_{row_loads(site).index(load)}"


def reserve_rows(site: Site, out: Writer) -> None:
    """Rings of the row vectors."""
    types = {name: "gl.float32" for name in ("lse2_ring", "delta_ring", *(["mean_ring"] if site.averages else []))}
    kinds = {FLOAT: "gl.float32", BOOL: "gl.int32"}
    types |= {row_ring(site, load): kinds.get(load.kind, f"{pointer(load.name)}.dtype.element_ty") for load in row_loads(site)}
    for name, dtype in types.items():
        out.assign(name, f"gl.allocate_shared_memory({dtype}, [STAGES, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))")


def from_ring(name: str) -> str:
    return f"{name}.index(slot).load(rowwise)"


def rows_from_rings(site: Site, program: Program) -> None:
    """Let the body just entered read row vectors from their rings, wherever it names them."""
    for load in row_loads(site):
        text = from_ring(row_ring(site, load))
        program.body.names[load] = f"({text} != 0)" if load.kind == BOOL else text


def _segments(site: Site, out: Writer) -> str:
    """Assign the range of rows that see a tile of keys; returns the condition of a partial tile of them, by position."""
    if any(Var("j1") in e.leaves for e in (site.by_keys.lo, site.by_keys.hi, site.by_keys.full_lo, site.by_keys.full_hi)):
        out.assign("j1", "tl.minimum(j0 + BLOCK_N, N) - 1")
    program = Program(site.spec, out.section(), inner="i")
    return segments(site.by_keys, program, out, "i", "BLOCK_M", "M", True, True, "average != 0" if site.averages else "")


def _rows(site: Site, out: Writer) -> str:
    """As `_segments`, or from a list; and count, the number of tiles."""
    if site.averages and not site.listed:  # a list has them
        out.assign("average", "tl.load(Averaging + y)")
    if site.ordered:
        _predecessor(site, out)
    if site.listed:
        partial = listed_tiles(site, out, "i")
    else:
        partial = _segments(site, out)
        stop = "late(stop, nth)" if site.by_keys.is_total and tile_loads(site) and len(site.qk_chunks) > 1 else "stop"
        out.assign("count", f"tl.cdiv({stop} - start, BLOCK_M)")
    count_past(site, out)
    if site.documents:
        return partial
    return partial if site.whole else f"{partial} | (j0 + BLOCK_N > N)" if partial else "(j0 + BLOCK_N > N)"


def _predecessor(site: Site, out: Writer) -> None:
    """Assign first_before and last_before, between which rows are visited by the next tile of keys too, which adds to dQ first."""
    out.assign("j0", "(tile + 1) * BLOCK_N", "the tile of keys that comes first")
    _segments(site, out)
    out.assign("first_before", "start")
    out.assign("last_before", "tl.where(j0 < N, stop, 0)")
    out.assign("j0", "tile * BLOCK_N")


def read_vectors(site: Site, out: Writer, rows: Program | None) -> None:
    """Captured vectors read at the key alone, for the others. rows: what reads those at the row in the same function."""
    if loads := key_loads(site):
        held = keys_held(site)
        out.assign("j", f"j0 + gl.arange(0, {held}, gl.BlockedLayout([{held} // 32], [32], [1], [0]))")
        program = Program(site.spec, out.section(), inner="i", columns="i", beside=rows)
        for load in loads:
            out.line(f"{key_ring(site, load)}.index(kv).store({program.value(load)}{'.to(tl.int32)' * (load.kind == BOOL)})")


@contextmanager
def each_tile_ahead(site: Site, out: Writer, where: tuple[str, str], others):
    """Of the warp that copies: the loop over tiles of keys, each taken from the counter. Yields the condition of a partial tile of rows."""
    out.assign("number", TICKET if site.ordered else "tl.program_id(0)")
    out.assign("nth", "0")
    out.assign("before", "0", "counts steps over all tiles of keys")
    start_steps(site, out)
    if site.documents:
        out.assign("work", " * ".join([MOST_TILES, *(f"late({extent(a)}, number)" for a in site.axes_of("k", "v"))]))
    ahead = site.documents and not is_wide(site)  # whose registers are too few
    if ahead:
        out.assign(*where)
    with out.block("while number < work:"):
        if ahead:
            out.assign("next_number", NEXT_NUMBER, "a tile ahead: where one is takes three reads, each of which waits for the one before")
            out.assign("following", where[1].replace("(number", "(tl.minimum(next_number, work - 1)"))
        else:
            out.assign(*where)
        partial = _rows(site, out)
        out.assign("steps", f"count * {count(others)}" if others else "count")
        out.assign("end", "before + steps")
        if not others:
            out.assign("z", "y")
        yield partial
        out.assign("before", "end")
        out.assign("nth", "nth + 1")
        if ahead:
            out.assign("number", "next_number")
            out.assign(where[0], "following")
        else:  # when the rows of this one are on their way: others may be free sooner
            out.assign("number", TICKET if site.ordered else NEXT_NUMBER)
    if adds_apart(site):
        with out.block("for at in tl.range(tl.maximum(before - STAGES, 0), before):"):
            out.line("await_rows(place_in(at, STAGES))")
    await_place(site, out)
    out.assign("tile", "-1", "no tile is left")
    if adds_apart(site):
        out.assign("at", "before")
        out.assign("told", "-1")
        tell(site, out, ["told"])
    tell(site, out, ["tile"])
    out.line("mbarrier.arrive(kv_told.index(kv), count=1)" if is_apart(site) else "mbarrier.arrive(kv_full.index(kv), count=2)")


@contextmanager
def each_row(site: Site, out: Writer, others):
    """Of the warp that copies: the loop over tiles of rows that see a tile of keys, of the batch indices that share it: in turn, or one after the other."""
    turns = takes_turns(site)
    if others:
        out.assign("g", "0")
    if turns:
        out.assign("t", "tl.where(nth % 2 == 0, count - 1, 0)", "to the mask's edge and, with the next keys, back: where other programs are")
        out.assign("onward", "nth % 2 * 2 - 1")
    elif others:
        out.assign("t", "0")
    with out.block("for at in tl.range(before, end):"):
        if others:
            decode(out, others, "g")
            out.assign("z", flatten(site.spec.axes))
            if not turns:
                out.assign("is_last", "(t + 1 == count).to(tl.int32)", "of the rows of this z")
        else:
            out.assign("t", "at - before")
        slot_of(site, out)
        yield
        end_step(site, out)
        if turns:
            out.assign("g", f"tl.where(g + 1 == {count(others)}, 0, g + 1)")
            out.assign("t", "tl.where(g == 0, t + onward, t)")
        elif others:
            out.assign("g", "g + is_last")
            out.assign("t", "tl.where(is_last != 0, 0, t + 1)")


def load_tiles(site: Site, others, halves: int, half: int, where: tuple[str, str]) -> Partition:
    """halves: tiles of `half` keys each, or one of BLOCK_N. where: names of what says where a tile of keys is, and the call of its number that returns it."""
    copies = "tells which tiles of keys come next" if is_apart(site) else "copies tiles of keys and values"
    producer = Partition("load_rows", f"One warp: {copies}, and copies the query rows that see each and what belongs to them.")
    out = producer.body
    out.line("lanes: gl.constexpr = gl.BlockedLayout([BLOCK_M // 32], [32], [1], [0])")
    with each_tile_ahead(site, out, where, others) as partial:
        program = Program(site.spec, out.section(), inner="i", columns="i", varying=others)
        with each_row(site, out, others):
            if site.documents:
                row_start(out, "t")
            else:
                out.assign("i0", tile_start(site, "i", "t"))
            _load_rows(site, program, out, halves, half, partial)
            with out.block("if at == before:", "behind the first rows: those before them still read the keys"):
                await_place(site, out)
                if is_apart(site):
                    tell_keys(site, out)
                    out.line("mbarrier.arrive(kv_told.index(kv), count=1)")
                else:
                    _load_keys(site, program, out, halves, half)
    return producer


def _load_keys(site: Site, program: Program | None, out: Writer, halves: int, half: int) -> None:
    wide = sum(c.width for c in (*site.qk_chunks, *site.v_chunks))
    out.line(f"mbarrier.expect(kv_full.index(kv), BLOCK_N * {wide * 2})")
    for n in range(halves):
        for operand in ("K", "V"):
            place = f"kv * {halves} + {n}" if halves > 1 else "kv"
            read_by_tma(site, out, operand, f"j0 + {n * half}" if n else "j0", "BLOCK_N", "kv_full.index(kv)", f"{operand.lower()}_tile", place, expect=False)
        if site.thirds:
            for operand in ("K", "V"):
                read_by_tma(site, out, operand, "j0 + 64", "BLOCK_N", "kv_full.index(kv)", f"{operand.lower()}_rest", "kv", expect=False, tiles=f"{operand}_rest")
    if not is_apart(site):
        tell_keys(site, out)
    read_vectors(site, out, program)
    out.line("mbarrier.arrive(kv_full.index(kv), count=1)")


def load_keys(site: Site) -> Partition:
    """The second warp that copies (`hopper_keys.is_apart`)."""
    producer = Partition("load_keys", "One warp: copies the tiles of keys and values that it is told of.")
    out = producer.body
    with each_tile(site, out, 1, False, "kv_told"):
        _load_keys(site, None, out, 1, HALF)
    out.line("mbarrier.arrive(kv_full.index(kv), count=2)", "no tile is left")
    return producer


def _load_rows(site: Site, program: Program, out: Writer, halves: int, half: int, partial: str) -> None:
    out.assign("i", "i0 + gl.arange(0, BLOCK_M, lanes)")
    if site.documents:
        out.assign("beyond", "i >= row_end", "rows behind are another tile's: of weight exp(-inf) = 0 here")
        out.assign("i", "tl.minimum(i, row_end - 1)")
    out.assign("lse2", f"tl.load(Lse2 + {padded_rows('z', 'padded')} + i)")
    if site.documents:
        out.assign("lse2", 'tl.where(beyond, float("inf"), lse2)')
    out.assign("delta", f"tl.load(Delta + {padded_rows('z', 'padded')} + i)")
    if left_out(site) != 1.0:
        out.assign("delta", f"delta * {1.0 / left_out(site)!r}", "dS and what it is subtracted from, over dropout's factor")
    if site.averages:
        mean_share(site, out)
        out.assign("lse2", "tl.where(mean > 0.0, -tl.log2(mean), lse2)")
    program.enter(out, row_loads(site), "i" if site.documents else "")
    found = {row_ring(site, load): program.value(load) + ".to(tl.int32)" * (load.kind == BOOL) for load in row_loads(site)}
    if frees_late(site):
        out.assign("after", NEXT, "less STAGES: the step after the one whose rows leave their place")
        for name, text in zip(("freeing", "freeing_phase"), slot_and_phase("after")):
            out.assign(name, text)
        out.line("mbarrier.wait(ds_full.index(freeing), freeing_phase ^ 1)")
    elif adds_apart(site):
        with out.block("if at >= STAGES:"):
            out.line("await_rows(slot)")
    else:
        out.line("mbarrier.wait(rows_empty.index(slot), phase ^ 1)")
    wide = sum(c.width for c in site.qk_chunks)
    asked = partial if partial_tiles(site) not in ("", "True") else "True"
    expect_with_mask(site, out, "q_full", f"BLOCK_M * {wide * 2}{tile_bytes(site)}", asked, "slot", halves, keys=half)
    read_by_tma(site, out, "Q", "i0", "BLOCK_M", "q_full.index(slot)", "q_ring", "slot", expect=False)
    read_tiles(site, out, "q_full", halves, keys=half)
    tell_row(site, out, partial)
    for name, value in ({"lse2_ring": "lse2", "delta_ring": "delta"} | ({"mean_ring": "mean"} if site.averages else {}) | found).items():
        out.line(f"{name}.index(slot).store({value})")
    out.line("mbarrier.arrive(q_full.index(slot), count=1)")
    place, phase = do_place(site)
    if has_single_do(site):
        out.line(f"mbarrier.wait(do_empty.index(0), {phase} ^ 1)")
    read_by_tma(site, out, "dO", "i0", "BLOCK_M", f"do_full.index({place})", "do_ring", place)


def tell_row(site: Site, out: Writer, partial: str) -> None:
    """Tell where a step is. Rows begin at multiples of BLOCK_M, so that the lowest bits are free, but for those of documents."""
    flag = f" + ({partial}).to(tl.int32)" if partial and partial_tiles(site) not in ("", "True") else ""
    last = " + is_last * 2" * (bool(site.other_axes(site.axes_of("k", "v"))) and not takes_turns(site))
    short = f" + (j0 + BLOCK_N > key_end).to(tl.int32) * 8 + (listed % {SHARE} // {MIXED}) * 16" * site.documents
    out.assign("told", f"{'i0 * 32' if site.documents else 'i0'}{flag}{last} + (at == before).to(tl.int32) * 4{short}")
    if site.ordered:
        out.assign("wanted", "tl.where((i0 >= first_before) & (i0 < last_before), tiles - 1 - tile, 0)", "0: nobody comes before")
        if adds_apart(site):
            out.assign("own_turn", "tiles - tile")
    if site.documents:
        row_place(out)
    tell(site, out, rows_told(site))
