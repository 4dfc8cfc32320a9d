"""FlashAttention-3's forward pass (Shah et al. 2024, algorithms 1 and 2) for Hopper, warp-specialised, in Gluon.

One warp copies tiles of K and V into rings in shared memory (TMA); warpgroups of 64 query rows each consume them. A warpgroup issues
the product Q K^T of a tile before the product P V of the tile before it, so that the matrix units work while it computes the softmax.
"""
from __future__ import annotations

from dataclasses import replace

from ...expr import Const, Var
from ..gluon import Partition, WarpSpecialized
from ..parts import Site, count, extent, local, pieces
from ..program import Program
from ..reads import across
from ..writer import Kernel, Writer
from .ends import ended
from .hopper_captured import expect_with_mask, mask_arguments, mask_from_rings, read_tiles, reserve_mask, reserve_tiles, tile_arguments, tile_bytes, tile_loads, tiles_from_rings
from .hopper_lists import list_arguments, listed_tiles, tile_start
from .hopper_locate import by_row_tiles, is_by_host, is_told, is_uneven, locate_own, locate_rows, narrows, tiles_of_rows, told_at, told_of, worked_out
from .hopper_output import finish, reads_again, staged
from .hopper_softmax import awaits_values, by_threads, descends, goes_round, leaves_intervals, reads_seed_late, rescale, softmax, speculates, weights
from .hopper_turns import begin_turn, end_turn, in_turn
from .hopper_vectors import PLACES, by_hand, keys_from_rings, last_of_tile, read_keys, read_rows, reserve_vectors, rows_from_rings, store, vectors
from .hopper import ROWS, barriers, block_shape, read_by_tma, reserve, tile_view, tiles_name, tma_arguments

REGISTERS = {2: (240, 24), 3: (160, 32)}
"""Warpgroups -> registers of a thread of each, and of the producer; 64K in all, shared by 12 and 16 warps."""
READING = 232, 40
"""Of two, where the producer needs some: it reads lists or vectors beside what it copies, or copies wide heads under dropout."""


def forward_kernel(site: Site) -> Kernel:
    """out and log-sum-exp, BLOCK_M = 64 * warpgroups query rows of one batch index at a time."""
    if by_row_tiles(site):  # which begin anywhere, and so do tiles of their keys
        site = replace(site, whole=False)
    site = replace(site, needs=())  # whatever gradients are asked for, its score is computed as is best here (trained ALiBi slopes at head size 128: 308 bytes spilled, then 0)
    spec, warpgroups = site.spec, site.warpgroups
    kernel = WarpSpecialized("attention_forward", "One program for each multiprocessor: takes tiles of query rows, one after the other.",
                             tma_arguments(site, {"Taken": "taken"} | worked_out(site) | list_arguments(site, "j"),
                                           {"Q": ROWS, "K": "BLOCK_N", "V": "BLOCK_N", "Out": ROWS})
                             | tile_arguments(site, ROWS, "BLOCK_N") | mask_arguments(site, ROWS, "BLOCK_N"),
                             ("BLOCK_M", "BLOCK_N", "STAGES"), "FORWARD", [*worked_out(site), *(["lists", "list_length"] if site.listed else [])])
    out = kernel.body
    if not is_by_host(site) and not is_uneven(site):
        out.assign("last", f"tl.cdiv(M, BLOCK_M) * {count(spec.axes)} - 1")
    if spec.dropout and not reads_seed_late(site):
        out.assign("seed", "tl.load(Seed)")
    reserve(site, out, "q_tile", "Q", warpgroups * site.q_tiles, ROWS)
    reserve(site, out, "k_ring", "K", "STAGES", "BLOCK_N")
    reserve(site, out, "v_ring", "V", "STAGES", "BLOCK_N")
    reserve_tiles(site, out, warpgroups, ROWS, "BLOCK_N")
    reserve_mask(site, out, PLACES, warpgroups, ROWS, "BLOCK_N")
    for c, name, _ in staged(site):
        if name.startswith("out"):
            out.assign(name, f"gl.allocate_shared_memory({tiles_name('Out', c)}.dtype, [{warpgroups}, {block_shape(site, 'Out', ROWS, c)}], "
                             f"{tiles_name('Out', c)}.layout)")
    reserve_vectors(site, out)
    locate, returns, partial = locate_rows(site)
    if is_uneven(site):
        out.assign("told_ring", f"gl.allocate_shared_memory(gl.int32, [{site.q_tiles * len(told_of(site, returns))}, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))")
    barriers(out, site.q_tiles, {"q_full": 2 if is_uneven(site) else 1, "q_empty": warpgroups})
    barriers(out, "STAGES", {"k_full": 1 + by_hand(site), "k_empty": warpgroups, "v_full": 1, "v_empty": warpgroups})
    out.line("fence_async_shared()")
    call = ", ".join(returns) + " = " + kernel.function(locate, ["number"], returns)
    own = ""
    if narrows(site):
        function, takes, gives = locate_own(site)
        own = ", ".join(gives) + " = " + kernel.function(function, takes, gives).replace("begin", "start", 1)
    attend, producer = _attend(site, partial, call, returns, own), _load_tiles(site, partial, call, returns)
    reads = max(site.D, site.Dv) > 192 and not by_hand(site) if spec.dropout else by_hand(site)
    registers, few = READING if reads and warpgroups == 2 else REGISTERS[warpgroups]
    kernel.start([*((attend, [str(n)], 4, registers) for n in range(warpgroups)), (producer, [], 1, few)])
    return kernel


def _q_slot(site: Site, turn: str = "turn") -> str:
    return "0" if site.q_tiles == 1 else f"{turn} % {site.q_tiles}"


def _q_phase(site: Site, turn: str = "turn") -> str:
    return f"{turn} & 1" if site.q_tiles == 1 else f"{turn} // {site.q_tiles} & 1"


def _count_cut(site: Site, out: Writer) -> None:
    """Where keys go round: how many tiles come first, the last of them first. One, unless warpgroups see different ones."""
    if goes_round(site) and narrows(site):
        out.assign("cut", "tl.maximum(1, count - (full_stop - start) // BLOCK_N)", "tiles that not all rows see in full: they come first")


def _number(site: Site, end: str) -> str:
    """Which of the tiles of keys before `end` comes at place t."""
    if goes_round(site):
        return f"tl.where(t < cut, {end} - 1 - t, t - cut)" if narrows(site) else f"(tl.where(t == 0, {end}, t) - 1)"
    return f"({end} - 1 - t)" if descends(site) else "t"


def _load_tiles(site: Site, partial: str, locate: str, returns: list[str]) -> Partition:
    producer = Partition("load_tiles", "One warp: copies query tiles, and K and V tile by tile, as places in their rings become free.")
    out, uneven = producer.body, is_uneven(site)
    width = sum(c.width for c in site.qk_chunks)
    asked = "t < tl.maximum(partial_tiles, 1)" if site.listed else partial  # of listed tiles the first is taken for one that the mask cuts
    out.assign("number", "tl.program_id(0)")
    if uneven and not is_by_host(site):
        out.assign("last", " * ".join([tiles_of_rows(site), *(f"late({extent(a)}, number)" for a in site.spec.axes)]) + " - 1")
    out.assign("turn", "0")
    out.assign("tile", "0", "counts tiles of keys over all turns")

    def announce(beside: dict[str, str], numbers: dict[str, str]) -> None:
        out.assign("q_slot", _q_slot(site))
        out.line(f"mbarrier.wait(q_empty.index(q_slot), {_q_phase(site)} ^ 1)")
        if uneven:
            for name, value in beside.items():
                store(out, name, "q_slot", value)
            for name, value in numbers.items():
                out.line(f"tell({told_at(site, returns, name)}, {value})")
            out.line("mbarrier.arrive(q_full.index(q_slot), count=1)")

    with out.block("while number <= last:"):
        if uneven:
            out.assign("ticket", "take_ticket(Taken, last)", "answered by the time that it is needed; the last leaves 0")
        out.line(locate)
        _count_cut(site, out)
        if site.listed:
            listed_tiles(site, out, "j")
        beside, program = read_rows(site, out)
        announce(beside, {name: name for name in told_of(site, returns)})
        out.line(f"mbarrier.expect(q_full.index(q_slot), BLOCK_M * {width * 2})")
        for n in range(site.warpgroups):
            into = str(n) if site.q_tiles == 1 else f"q_slot * {site.warpgroups} + {n}"
            read_by_tma(site, out, "Q", f"i0 + {n * ROWS}" if n else "i0", ROWS, "q_full.index(q_slot)", "q_tile", into, expect=False)
        with out.block("for t in tl.range(0, count):"):
            out.assign("j0", tile_start(site, "j", _number(site, "count")))
            out.assign("slot", "tile % STAGES")
            out.assign("phase", "tile // STAGES & 1")
            beside = read_keys(site, program, out)
            for letter, operand, captured in (("k", "K", tile_bytes(site)), ("v", "V", "")):
                wide = sum(c.width for c, _, _ in pieces(site, operand))
                out.line(f"mbarrier.wait({letter}_empty.index(slot), phase ^ 1)")
                expected = f"BLOCK_N * {wide * 2}{captured}"
                if letter == "k":
                    expect_with_mask(site, out, "k_full", expected, asked, f"tile % {PLACES}", site.warpgroups, rows=ROWS)
                else:
                    out.line(f"mbarrier.expect({letter}_full.index(slot), {expected})")
                read_by_tma(site, out, operand, "j0", "BLOCK_N", f"{letter}_full.index(slot)", f"{letter}_ring", "slot", expect=False)
                if captured:
                    read_tiles(site, out, "k_full", site.warpgroups, rows=ROWS)
                if letter == "k" and beside:
                    for name, value in beside.items():
                        store(out, name, f"tile % {PLACES}", value)
                    out.line("mbarrier.arrive(k_full.index(slot), count=1)")
            out.assign("tile", "tile + 1")
        out.assign("number", "tl.num_programs(0) + number_on(ticket)" if uneven else "number + tl.num_programs(0)")
        out.assign("turn", "turn + 1")
    if uneven:
        announce({}, {told_of(site, returns)[0]: "-1"})
        out.line("mbarrier.arrive(q_full.index(q_slot), count=1)", "no tile is left")
    return producer


def _pass(site: Site, out: Writer, first: str, end: str) -> None:
    """Tiles of keys that none of the warpgroup's rows sees: their places are free."""
    with out.block(f"for t in tl.range({first}, {end}):"):
        out.assign("slot", "tile % STAGES")
        for letter in ("k", "v"):
            out.line(f"mbarrier.wait({letter}_full.index(slot), tile // STAGES & 1)")
            out.line(f"mbarrier.arrive({letter}_empty.index(slot), count=1)")
        begin_turn(site, out)
        end_turn(site, out)
        out.assign("tile", "tile + 1")


def _attend(site: Site, partial: str, locate: str, returns: list[str], own: str) -> Partition:
    """A consumer warpgroup. own: what says which tiles of keys its rows see, "" for all that the producer copies."""
    spec, several = site.spec, site.q_tiles > 1
    attend = Partition("attend", f"One warpgroup: {ROWS} query rows at a time against every tile of keys that they see.", ("WARPGROUP",))
    out = attend.body
    out.line("scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])")
    for c in site.v_chunks:
        out.line(f"values{c.suffix}: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, {c.width}, 16])")
    out.line("rowwise: gl.constexpr = gl.SliceLayout(1, scores)")
    if by_threads(site):
        out.line(f"threads: gl.constexpr = threads_of({ROWS})")
    out.line("keywise: gl.constexpr = gl.SliceLayout(0, scores)")
    out.assign("cols", "gl.arange(0, BLOCK_N, keywise)")
    out.assign("zeros", f"gl.zeros([{ROWS}, BLOCK_N], gl.float32, scores)")
    if not is_uneven(site):
        out.assign("number", "tl.program_id(0)")
    out.assign("turn", "0")
    out.assign("tile", "0", "counts tiles of keys over all turns")

    if in_turn(site):
        with out.block(f"if WARPGROUP == {site.warpgroups - 1}:"):
            end_turn(site, out)

    def read_told(*names: str) -> None:
        for name in names:
            out.assign(name, f"number_at({told_at(site, returns, name)}, 4)")

    def arrived() -> None:
        out.line(f"mbarrier.wait(q_full.index(q_slot), {_q_phase(site)})")

    def next_tile() -> None:
        out.assign("q_slot", _q_slot(site))
        arrived()
        read_told(told)

    told, *rest = told_of(site, returns)
    if is_uneven(site):
        next_tile()
    with out.block(f"while {told} >= 0:" if is_uneven(site) else "while number <= last:"):
        if is_told(site):
            read_told(*(name for name in rest if name != "row_end"))
            if "start" in returns and "start" not in rest:
                out.assign("start", "0")
        else:
            out.line(locate)
        out.assign("i0", f"i0 + WARPGROUP * {ROWS}")
        if own:
            _count_cut(site, out)
            out.line(own)
            if goes_round(site):
                out.assign("cut", "cut - (count - last)", "of those that the warpgroup's rows see")
        rows = f"gl.arange(0, {ROWS}, rowwise)"
        out.assign("i", f"i0 + {f'late({rows}, z)' if site.Dv > 192 else rows}")  # else a thread's rows would be worked out in front of all partitions
        last_of_tile(site, out, "j", f"tl.minimum(i0 + {ROWS}, M)")
        if not is_uneven(site):
            out.assign("q_slot", _q_slot(site))
        before = out.section()
        if not is_uneven(site):
            arrived()
        behind = out.section()
        program = Program(spec, out.section() if vectors(spec, "i") else before, inner="j")
        program.withholds = spec.dropout > 0 and is_by_host(site)
        program.ramps = True
        rows_from_rings(site, program, behind, ROWS)
        out.assign("own", f"q_slot * {site.warpgroups} + WARPGROUP" if several else "WARPGROUP")
        for c in site.qk_chunks:
            out.assign(f"q{c.suffix}", tile_view("q_tile", c, "own", ROWS))
        begins, ends = own and site.by_rows.lo != Const(0), own and site.by_rows.hi != Var("N")  # else they are those of the tile
        first, last = ("first" if begins else "0"), ("last" if ends else "count")
        down = descends(site)
        if begins or ends and down:
            _pass(site, out, *((last, "count") if down else ("0", first)))
        out.assign("slot", "tile % STAGES")
        out.line("mbarrier.wait(k_full.index(slot), tile // STAGES & 1)")
        begin_turn(site, out)
        _issue_scores(site, out, "slot")
        end_turn(site, out)
        if down:
            number = "tl.where(cut > 0, last - 1, -cut)" if own and goes_round(site) else f"({last} - 1)"
            out.assign("j0", tile_start(site, "j", number), "the last tile, the only one that is cut")
        elif not site.listed:
            out.assign("j0", "late(start, turn)" if ended(site) and (spec.dropout or not site.whole) else tile_start(site, "j", first) if begins else "start")
        _enter(site, program, out, partial)
        out.assign("qk", "warpgroup_mma_wait(0, [next_qk])")
        _leave_keys(site, out)
        if several:
            out.line("tma.store_wait(0)", "the output before this one has left the place of its query rows")
            out.line(f"mbarrier.arrive(q_empty.index({_q_slot(site, '(turn + 1)')}), count=1, pred=turn > 0)")
        softmax(site, program, out, partial, first=True)
        weights(site, out)
        for c in site.v_chunks:
            out.assign(f"acc{c.suffix}", f"gl.zeros([{ROWS}, {c.width}], gl.float32, values{c.suffix})")
        loops = [(f"{first} + 1" if begins else "1", last, "" if down else partial)]
        if cuts_first(site):
            loops = [("1", "partial_tiles", "True"), ("tl.maximum(1, partial_tiles)", "count", "")]
        for start, stop, cuts in loops:
            with out.block(f"for t in tl.range({start}, {stop}):"):
                if not site.listed:
                    out.assign("j0", tile_start(site, "j", _number(site, last)))
                _step(site, program, out, cuts)
        out.assign("previous", "tile % STAGES")
        out.line("mbarrier.wait(v_full.index(previous), tile // STAGES & 1)")
        _issue_values(site, out, "previous")
        _leave_values(site, out)
        out.assign("tile", "tile + 1")
        if ends and not down:
            _pass(site, out, last, "count")
        if reads_again(site):
            read_told(*(name for name in told_of(site, returns) if name in ("z", *map(local, spec.axes), "i0", "row_end")))
            out.assign("i0", f"i0 + WARPGROUP * {ROWS}")
            out.assign("i", f"i0 + gl.arange(0, {ROWS}, rowwise)")
            out.assign("own", "own + (z >> 31)", "0, which nothing knows ahead of the loop: an address is made of it")
        elif speculates(site):
            out.assign("i", f"late(i0, z) + gl.arange(0, {ROWS}, rowwise)", "again: no register kept it")
        finish(site, out)
        if not several:
            out.line("tma.store_wait(0)")
            out.line("mbarrier.arrive(q_empty.index(0), count=1)")
        out.assign("turn", "turn + 1")
        if is_uneven(site):
            next_tile()
        else:
            out.assign("number", "number + tl.num_programs(0)")
    out.line("tma.store_wait(0)")
    return attend


def cuts_first(site: Site) -> bool:
    """Have listed tiles that the mask cuts a loop of their own, before that over tiles that all rows see? H100, N = 4096, a padding vector: under dropout 10 % faster
    at head size 128, even at 64; without it even or up to 8 % slower. Masks with an element for every query and key leave no registers for it."""
    return site.listed and site.spec.dropout > 0 and max(site.D, site.Dv) > 96 and not across(site.spec)


def _step(site: Site, program: Program, out: Writer, cuts: str) -> None:
    """One tile of keys: its scores while the weights of the tile before meet their values. cuts: where the mask cuts it, "" for nowhere."""
    out.assign("previous", "tile % STAGES")
    out.assign("previous_phase", "tile // STAGES & 1")
    out.assign("tile", "tile + 1")
    out.assign("slot", "tile % STAGES")
    out.line("mbarrier.wait(k_full.index(slot), tile // STAGES & 1)")
    begin_turn(site, out)
    _issue_scores(site, out, "slot")
    out.line("mbarrier.wait(v_full.index(previous), previous_phase)")
    _issue_values(site, out, "previous")
    end_turn(site, out)
    _enter(site, program, out, cuts)
    out.assign("qk", f"warpgroup_mma_wait({len(site.v_chunks)}, [next_qk])", "the products P V still run")
    _leave_keys(site, out)
    early = awaits_values(site)
    if early:
        _leave_values(site, out)
    softmax(site, program, out, cuts, first=False)
    if not early:
        _leave_values(site, out)
    rescale(site, out)
    weights(site, out)


def _issue_scores(site: Site, out: Writer, slot: str) -> None:
    for n, c in enumerate(site.qk_chunks):
        start = "next_qk, is_async=True" if n else "zeros, use_acc=False, is_async=True"
        out.assign(f"k{c.suffix}", tile_view("k_ring", c, slot, "BLOCK_N"))
        out.assign("next_qk", f"warpgroup_mma(q{c.suffix}, k{c.suffix}.permute((1, 0)), {start})")


def _leave_keys(site: Site, out: Writer) -> None:
    """The place of the keys, and of captured tiles beside them, is free."""
    for n, text in enumerate(tiles_from_rings(site, out, f"slot * {site.warpgroups} + WARPGROUP", ROWS, "BLOCK_N", False).values()):
        out.assign(f"captured_tile_{n}", text)
    out.line("mbarrier.arrive(k_empty.index(slot), count=1)")


def _issue_values(site: Site, out: Writer, slot: str) -> None:
    for c in site.v_chunks:
        out.assign(f"v{c.suffix}", tile_view("v_ring", c, slot, "BLOCK_N"))
        out.assign(f"next_acc{c.suffix}", f"warpgroup_mma(weights{c.suffix}, v{c.suffix}, acc{c.suffix}, is_async=True)")


def _leave_values(site: Site, out: Writer) -> None:
    """P V is there, and the place of the values is free."""
    names = [c.suffix for c in site.v_chunks]
    out.assign(", ".join(f"acc{n}" for n in names), f"warpgroup_mma_wait(0, [{', '.join(f'next_acc{n}' for n in names)}])")
    out.line("mbarrier.arrive(v_empty.index(previous), count=1)")


def _enter(site: Site, program: Program, out: Writer, partial: str) -> None:
    """Begin a tile of keys: its indices, and the loads across rows and keys that TMA cannot do, which come while the products run."""
    visible = [site.spec.visible] if site.spec.is_masked and partial else []
    program.enter(out, [site.raw, *visible], "j" if site.whole else ())
    program.others = {site.added_by_key: 'float("-inf")'}
    keys_from_rings(site, program, out)
    if partial and not leaves_intervals(site) or Var("j") in site.raw.leaves:
        out.assign("j", "j0 + cols")
    tiled = tile_loads(site)
    program.body.names |= {load: f"captured_tile_{n}" for n, load in enumerate(tiled)}
    if partial:
        program.body.names |= mask_from_rings(site, out, f"tile % {PLACES} * {site.warpgroups} + WARPGROUP", ROWS, "BLOCK_N", False)
    for load in site.raw.loads:
        if {"i", "j"} <= load.variables and load not in (*tiled, *ended(site)):
            program.value(load)
