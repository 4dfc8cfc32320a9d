"""dQ in the Hopper backward: each tile of keys adds its share to a float32 buffer by TMA; under deterministic algorithms one after the other.

In order, the last keys add first. A number in memory for each tile of rows says who added last. Nobody reads what others added: the sums
are formed in the L2 cache, where the number is too, and it is written when the addition is complete, so that no fence is needed (two in
each step took a tenth of the time). Programs take all tiles from the counter, in the order of their numbers, and the last keys have the least,
so a program waits only for one that runs already; under a causal mask it need not wait at all, for the tile of keys before it came to
these rows two steps earlier (flash-attention's deterministic mode orders tiles so too). Who comes before whom is known without a list where
the rows that see a tile of keys begin and end the later, the later its keys: its predecessor is the next tile of keys.
"""
from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import Callable

from ...expr import QK
from ..gluon import Partition
from ..limits import padded
from ..parts import Chunk, Site, arguments, count, decode, flatten, head_index, pieces, tiles_name
from ..program import local
from ..writer import Kernel, Writer
from .common import PADDING, padded_rows, scaled, summed_rows
from .documents import KEY_HEAD, SLOTS, key_line
from .hopper import ROWS, operand_axes, tile_view
from .hopper_captured import left_out, store_ds, stored_load
from .hopper_keys import HALF, each_step, is_split, number, row_at, rows_told


LINE = 32
"""Floats of a line of the sum of dQ: 128 bytes."""
HALF_WIDTH = 128
"""Most columns of dQ that are multiplied and added at once: 256 lines of a tile of rows, and TMA takes no more."""


# ------------------------------------------------------------------------------------------------------- order of the sum

def sum_shape(site: Site) -> list[str]:
    """Of a batch index, on the host. Each piece of a tile of rows has its elements in the order of the registers that the product leaves them in, four of a thread
    side by side: stored so, a warp fills whole lines of shared memory, by rows it would take twice the time. Eight columns follow eight columns, so that
    pieces of other widths can read them (`finish_kernel`)."""
    rows = "padded // 2 * 3" if site.documents else "padded"
    return [f"{rows} // {LINE} * {padded(site.D, site.thirds)}", str(LINE)]


def _lines(c: Chunk) -> str:
    """Shape of a piece of a tile there."""
    return f"{ROWS * c.width // LINE}, {LINE}"


def _by_registers(site: Site, c: Chunk, tile: str) -> str:
    """A tile by rows, (warp, half, row, warpgroup, eight columns, thread, pair), as (warpgroup, eight columns, warp, row, thread, half, pair)."""
    groups, eights = _eights(site, c)
    return f"{tile}.reshape([4, 2, 8, {groups}, {eights}, 4, 2]).permute((3, 4, 0, 2, 5, 1, 6))"


def _by_rows(site: Site, c: Chunk, tile: str) -> str:
    """And back, in Triton."""
    groups, eights = _eights(site, c)
    return f"tl.permute(tl.reshape({tile}, [{groups}, {eights}, 4, 8, 4, 2, 2]), (2, 5, 3, 0, 1, 4, 6)).reshape({ROWS}, {c.width})"


def _eights(site: Site, c: Chunk) -> tuple[int, int]:
    """Warpgroups that share the columns of a piece, half by half where it is multiplied so, and how often each has eight of them."""
    groups = 1 if is_split(site) else 2 * -(-c.width // HALF_WIDTH)
    return groups, c.width // (8 * groups)


def dq_chunks(site: Site) -> tuple[Chunk, ...]:
    """The pieces in which dQ is multiplied: those of a head, but 256 columns in two halves, for which there is one place (`is_halved`)."""
    if not is_halved(site):
        return tuple(site.qk_chunks)
    return tuple(Chunk(str(n), n * HALF_WIDTH, HALF_WIDTH, False) for n in range(2))


def is_halved(site: Site) -> bool:
    """Do the halves of dQ go through one place in shared memory, one after the other?"""
    return site.qk_chunks[0].width > HALF_WIDTH


def dq_rounds(site: Site) -> list[tuple[Chunk, ...]]:
    """Which of them are multiplied and added together, in their order."""
    return [(c,) for c in dq_chunks(site)] if is_halved(site) else [dq_chunks(site)]


def dq_places(site: Site) -> tuple[Chunk, ...]:
    """The pieces that have a place and a tensor map of their own."""
    return (Chunk("", 0, HALF_WIDTH, False),) if is_halved(site) else tuple(site.qk_chunks)


def sum_position(site: Site, c: Chunk, beside: str = "") -> str:
    """Coordinates of a piece of a tile, for TMA. beside: lines to go on by, as text."""
    whole, rest = divmod(padded(site.D, site.thirds), LINE)
    row = "sum0" if site.documents else "i0"
    line = f"({row} >> {LINE.bit_length() - 1}) * {padded(site.D, site.thirds)}" if rest else f"{row} * {whole}"
    return "[" + ", ".join([*(local(a) for a in operand_axes(site, "Q")), f"{line}{_plus(ROWS * c.start // LINE)}{beside}", "0"]) + "]"


def _plus(number: int) -> str:
    return f" + {number}" if number else ""


def sum_arguments(site: Site) -> dict[str, str]:
    """Kernel arguments that describe tiles of the sum."""
    axes = [n for n, a in enumerate(site.spec.axes) if a in operand_axes(site, "Q")]
    return {tiles_name("dQ", c): f"tma_tiles(sum_q, {axes}, {_lines(c)})" for c in dq_places(site)}


def reserve_dq(site: Site, out: Writer) -> None:
    for c in dq_places(site):
        out.assign(f"dq_tile{c.suffix}", f"gl.allocate_shared_memory(gl.float32, [1, {sum_block(site, c)}], {tiles_name('dQ', c)}.layout)")


def sum_block(site: Site, c: Chunk) -> str:
    """Shape of a piece of a tile as TMA sees it."""
    return "1, " * len(operand_axes(site, "Q")) + _lines(c)


# --------------------------------------------------------------------------------------------------------------- turns

def turns_shape(site: Site) -> str:
    """How many tiles of rows there are, on the host."""
    axes = site.axes_of("q")
    return f"({count(axes)} * triton.cdiv(M, KEYS['BLOCK_M']),)"


def look(site: Site, out: Writer) -> None:
    """When the rows of a step are known: whose turn is it there?"""
    if site.ordered:
        out.assign("turn", f"Turns + ({flatten(site.axes_of('q'))}) * tl.cdiv(M, BLOCK_M) + i0 // BLOCK_M")
        out.assign("seen", "gl.load(turn, volatile=True)")


def await_turn(site: Site, out: Writer) -> None:
    if site.ordered:
        with out.block("while seen != wanted:"):
            out.assign("seen", "gl.load(turn, volatile=True)")


def _added(number: str) -> str:
    """Waits until what this thread's bulk copies add is in memory: Gluon's own wait is for their source alone. number: any."""
    return f"gl.inline_asm_elementwise('cp.async.bulk.wait_group 0; mov.b32 $0, $1;', '=r,r', [{number}], dtype=gl.int32, is_pure=False, pack=1)"


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


# ---------------------------------------------------------------------------------------------------------------- dQ

def names(prefix: str, found) -> str:
    return ", ".join(prefix + c.suffix for c in found)


def ds_tile(site: Site, index: str, keys: str | int) -> str:
    """dS^T in shared memory. Where it is stored as a captured tensor's gradient it lies there by rows, as that does."""
    return f"ds_tile.index({index}).reshape([BLOCK_M, {keys}]).permute((1, 0))" if stored_load(site) else f"ds_tile.index({index})"


def frees_early(site: Site) -> bool:
    """Is the place of dQ known to be free by the barrier in front of its product?"""
    return not (is_split(site) or site.ordered or stored_load(site))


def add_dq(site: Site, out: Writer, coordinates: Callable[[str], str] = str, place: str = "0", multiply: Callable[[tuple[Chunk, ...]], None] | None = None) -> None:
    """coordinates: rewrites those of the tile. place: 0, in shared memory. multiply: starts the product of a later round and waits for it (`dq_rounds`)."""
    if not frees_early(site):
        if site.ordered:
            out.assign("added", _added("end"), "dQ of the step before is in memory")
        else:
            out.line("tma.store_wait(0)", "dQ of the step before has left its place")
        out.line("barrier()")
    pass_on(site, out, "is_first == 0")
    at = lambda c: "" if is_halved(site) else c.suffix
    for n, together in enumerate(dq_rounds(site)):
        if n:
            multiply(together)
            out.line("tma.store_wait(0)", "the half before has left its place")
            out.line("barrier()")
        store_share(site, out, together, place)
        if not n:
            await_turn(site, out)
        out.line("barrier()")
        for c in together:
            out.line(f"reduce_add(dQ_tiles{at(c)}, {coordinates(sum_position(site, c))}, dq_tile{at(c)}.index(0))")
    if site.ordered:
        out.assign("previous", "turn")


def store_share(site: Site, out: Writer, found, place: str) -> None:
    """Pieces of dQ into their places, in the order of the registers that they lie in."""
    for c in found:
        ordered = out.assign(f"registers{c.suffix}", _by_registers(site, c, f"dq{c.suffix}"))
        at = "" if is_halved(site) else c.suffix
        out.line(f"dq_tile{at}.index({place}).reshape([{_lines(c)}]).store({ordered}.reshape([{_lines(c)}]))")
    out.line("fence_async_shared()")


def hand_over_dq(site: Site, out: Writer, place: str) -> None:
    """A step's share of dQ, for the warp that adds it."""
    with out.block("if is_first == 0:"):
        out.line("await_place_of_dq()")
    store_share(site, out, site.qk_chunks, place)
    out.line("hand_dq()")


def add_apart(site: Site) -> Partition:
    """The warp that adds dQ to its sum (`hopper_keys.adds_apart`)."""
    adder = Partition("add_dq", "One warp: adds the share of dQ of each step to the sum.")
    out = adder.body
    out.assign("at", "tl.cast(0, tl.int32)")

    def arrived() -> None:
        out.line("await_dq()")
        out.assign("told", number(site, "told", 1))
    arrived()
    with out.block("while told >= 0:"):
        out.assign("i0", "told >> 5" if site.documents else "told & -8")
        for name in rows_told(site):
            if name in ("z", "wanted", "own_turn", "sum0"):
                out.assign(name, number(site, name, 1))
        decode(out, site.spec.axes, "z")
        look(site, out)
        await_turn(site, out)
        for c in dq_places(site):
            out.line(f"reduce_add(dQ_tiles{c.suffix}, {sum_position(site, c)}, dq_tile{c.suffix}.index(0))")
        out.line("tma.store_wait(0)", "it has left its place")
        out.line("free_place_of_dq()")
        if site.ordered:
            out.assign("added", _added("at"), "it is in memory")
            out.line("barrier()")
            out.line("gl.atomic_xchg(turn, own_turn, sem='relaxed', scope='gpu')")
        out.assign("at", "at + 1")
        arrived()
    return adder


def finish_dq(site: Site, out: Writer) -> None:
    if site.ordered:
        out.assign("added", _added("end"))
        out.line("barrier()")
        pass_on(site, out, "")


@contextmanager
def turns(site: Site, out: Writer):
    """Of a warpgroup that adds to dQ: the loop over row tiles."""
    if site.ordered:
        out.assign("previous", "Turns")
    with each_step(site, out):
        yield


def sum_dq(site: Site, tiles) -> Partition:
    """The warpgroup that computes dQ."""
    adder = Partition("sum_dq", "One warpgroup: the share of dQ of all keys of this tile, row tile by row tile.")
    out, chunks = adder.body, site.qk_chunks
    for c in chunks:
        out.line(f"dq_layout{c.suffix}: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, {c.width}, 16])")
    with tiles(out, 4):
        with turns(site, out):
            out.line("mbarrier.wait(ds_full.index(slot), phase)")
            row_at(site, out, 4)
            look(site, out)
            store_ds(site, out, [("j0", "slot * 2"), (f"j0 + {HALF}", "slot * 2 + 1")])
            for c in chunks:
                for n in range(2):
                    start = f"next_dq{c.suffix}, is_async=True" if n else f"gl.zeros([BLOCK_M, {c.width}], gl.float32, dq_layout{c.suffix}), use_acc=False, is_async=True"
                    out.assign(f"next_dq{c.suffix}", f"warpgroup_mma({ds_tile(site, f'slot * 2 + {n}', HALF)}.permute((1, 0)), {tile_view('k_tile', c, f'kv * 2 + {n}', HALF)}, {start})")
            out.assign(names("dq", chunks), f"warpgroup_mma_wait(0, [{names('next_dq', chunks)}])")
            if stored_load(site):
                out.line("tma.store_wait(0)")
                out.line("barrier()", "dS has left its place")
            out.line("mbarrier.arrive(ds_empty.index(slot), count=1)")
            add_dq(site, out)
        finish_dq(site, out)
    out.line("tma.store_wait(0)")
    return adder


def finish_kernel(site: Site) -> Kernel:
    """dQ in q's dtype from its float32 sum."""
    kernel = Kernel("attention_backward_rows", "dQ from its float32 sum, which lies in the order of registers.", arguments(site, {"Sum": "sum_q", "dQ": "grad_q"}), (), "ROWS")
    out = kernel.body
    out.assign("tiles", f"tl.cdiv(M, {PADDING}) * {SLOTS}" if site.documents else f"tl.cdiv(M, {ROWS})")
    out.assign("y", "tl.program_id(0) // tiles")
    out.assign("i0", f"tl.program_id(0) % tiles * {ROWS}")
    out.assign("sum_tile", f"Sum + ({padded_rows('y', summed_rows(site))} + i0) * {padded(site.D, site.thirds)}")
    if site.documents:
        decode(out, site.axes_of("q"), "y")
        key_line(out, "head", "0", flatten(site.spec.mask().axes))
        out.assign("slot", f"{KEY_HEAD} + tl.program_id(0) % tiles * 2")
        out.assign("i0", "tl.load(head + slot)", "where documents begin: see `documents.KEY_HEAD`")
        out.assign("row_end", "i0 + tl.load(head + slot + 1)")
    with out.block("if i0 < row_end:") if site.documents else nullcontext():
        out.assign("i", f"i0 + tl.arange(0, {ROWS})")
        head_index(site, out, "d")
        out.assign("dq_rows", f"dQ + (tl.cast(y, tl.int64) * M + i)[:, None] * {site.D}")
        factor = scaled(site, QK)[1] * left_out(site)
        for c, index, check in pieces(site, "Q"):
            name = f"dq{c.suffix}"
            out.assign(name, f"tl.load(sum_tile{_plus(ROWS * c.start)} + tl.arange(0, {ROWS * c.width}))")
            out.assign(name, _by_rows(site, c, name))
            mask = " & ".join([f"(i < {'row_end' if site.documents else 'M'})[:, None]", *([check] if check else [])])
            out.line(f"tl.store(dq_rows + {index}[None, :], ({name}{f' * {factor!r}' if factor != 1.0 else ''}).to(dQ.dtype.element_ty), mask={mask})")
    return kernel
