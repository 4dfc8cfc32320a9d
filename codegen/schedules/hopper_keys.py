"""Of the Hopper backward: which tile of keys comes next, and what its partitions know of it.

There is a program for each multiprocessor, and each takes the next tile from a counter. Its one warp that copies is ahead of the others: while they
end a tile, query rows of the next arrive, and its keys where shared memory has room for two tiles. It alone knows which rows see a tile of keys; it
tells the others where each step is through rings in shared memory.
"""
from __future__ import annotations

import re
from contextlib import contextmanager

from ...expr import BOOL, FLOAT, QK, Load, Var
from ..captured import ends
from ..factors import peel
from ..gluon import Partition
from ..limits import padded
from ...spec import BLOCK, AttentionSpec
from ..parts import Site, count, decode
from ..program import Program, local, pointer
from ..ranges import bounds
from ..reads import across, averages
from ..writer import Writer
from .common import PADDING, has_slopes
from .hopper import THIRD, place_of, rises
from .hopper_lists import list_arguments, rows_of_keys
from .hopper_captured import assign_batch, shares, tile_loads

MOST = 6
"""Loads by key that get a ring, 8 bytes an element at most; the warpgroups load the others themselves."""
MOST_TILES = f"tl.load(KeyTiles) * ({BLOCK} // BLOCK_N)"
"""Of a batch index, where they begin with documents."""
HALF = 64
"""Keys of each of two warpgroups where a third computes dQ."""
NEXT = "tl.where(step == 2 * STAGES - 1, 0, step + 1)"
"""Where steps are counted over two turns around the rings and no more: remainders by three would take registers that loops lack."""


def is_split(site: Site) -> bool:
    """Three warpgroups: two with half of the keys each, which drift apart so that one multiplies while the other takes exponentials, and one
    for dQ. Only heads up to 64 leave it the registers."""
    return max(site.D, site.Dv) <= 64


def is_wide(site: Site) -> bool:
    """Heads above 128: a tile of 64 keys, of which two warpgroups take half of the columns each, so that their registers hold dK and dV; or of 96, and three (`hopper_thirds`)."""
    return max(site.D, site.Dv) > 128


def adds_apart(site: Site) -> bool:
    """Does a warp of its own add dQ to its sum? It, and the warp that copies rows, meet the two warpgroups at named barriers (`codegen/named.py`): at an mbarrier
    those would wait for each other in front of their arrival and behind it. Backward of 16k tokens at head size 128, H200, N = 16384: 1.5 % faster, and registers
    are left for half of v. Two warpgroups that drift apart gain nothing by such barriers (head size 64: 1 % faster to 1 slower, a padding vector 4 slower)."""
    return not (is_split(site) or is_wide(site))


def has_single_do(site: Site) -> bool:
    """Is there shared memory for one tile of dO alone, whatever the stages?"""
    return padded(site.D, site.thirds) + padded(site.Dv, site.thirds) > 384 - site.thirds


def readers(site: Site) -> int:
    """Partitions that read a tile of keys, and each row that sees it, and say so."""
    return 3 if site.thirds else 2 if is_split(site) else 1


def own_keys(site: Site) -> str:
    """What of a vector over a tile of keys is a partition's own."""
    return f".slice(PART * {HALF}, {HALF})" if is_split(site) else f".slice(PART * {THIRD}, {THIRD})" if site.thirds else ""


def keys_held(site: Site) -> str:
    """Elements of such a vector: a power of two."""
    return "128" if site.thirds else "BLOCK_N"


def do_place(site: Site) -> tuple[str, str]:
    """Place of a step's dO, and phase."""
    return ("0", "at & 1") if has_single_do(site) else ("slot", "phase")


def frees_late(site: Site) -> bool:
    """Does a step's dS say that the warpgroup has done with the rows of the step before? With places to spare for rows, no warp then waits for the
    others of its warpgroup to say so apart (up to 10 % of the time); with two, the copies would come too late."""
    return is_split(site) and site.stages > 2


def is_tight(site: Site) -> bool:
    """Do registers run out unless the loop spares them, at the price of a little time?"""
    return not is_split(site) or bool(site.spec.visible.loads) or is_full(site)


def is_full(site: Site) -> bool:
    """Does the score read tensors across rows and keys, and have a derivative of its own and dropout? That is too much at any head size."""
    return bool(across(site.spec, False)) and site.spec.dropout > 0 and has_slopes(site)


def is_apart(site: Site) -> bool:
    """Does a second warp copy keys and values? Where the one that copies rows reads lists or vectors, or copies heads in pieces, and has no registers for it
    (`hopper_backward.REGISTERS`)."""
    pieces = len(site.qk_chunks) + len(site.v_chunks)
    return not is_split(site) and (pieces > 2 or is_wide(site) or bool(tile_loads(site) or site.spec.dropout or site.documents or has_slopes(site) if by_hand(site) else key_loads(site)))


def is_told_before(site: Site) -> bool:
    """Are the others told how many steps came before a tile of keys? Under dropout, and where the mask has an element for every pair, registers are too few to count
    them across the loop over rows."""
    pairs = adds_apart(site) and any({"i", "j"} <= load.variables for load in site.spec.visible.loads)
    return not is_split(site) and (site.spec.dropout > 0 or pairs)


def sees_ends_late(site: Site) -> bool:
    """Is it worked out last, and not with the scores, which keys lie beyond the ends of a table? That spares the step registers."""
    return is_split(site) or is_told_before(site) or len(site.qk_chunks) + len(site.v_chunks) > 2


def goes_past_of(spec: AttentionSpec, head: int, listed: bool, documents: bool) -> list[str]:
    """What is told of a tile of keys to halves that go past rows (`hopper_past`). front: how many steps the second one does before its first; back: the first one behind
    its last. Beside the products alone nothing is gained: one half is a step ahead then, and its rows have to stay (causal, head size 64, 1 % faster to 2 slower)."""
    found, moves = bounds(spec.visible, "i"), lambda e: bool({Var("j0"), Var("j1")} & e.leaves) and rises(e)
    bare = peel(spec.score)[0] == QK and not spec.dropout
    if head > HALF or bare or averages(spec) or documents or any(a not in spec.k | spec.v for a in spec.axes):
        return []
    return ["front"] * moves(found.lo) + ["back"] * (moves(found.hi) and not listed)


def goes_past(site: Site) -> list[str]:
    """As `goes_past_of`."""
    return goes_past_of(site.spec, max(site.D, site.Dv), site.listed, site.documents)


def key_tiles(site: Site) -> int:
    """Tiles of keys in shared memory."""
    return 2 if is_split(site) else 1


def starts_long(site: Site) -> bool:
    """Are the first keys seen by most rows, as under causal masks, or do tiles take turns?"""
    return site.documents or site.by_keys.shrinks


def goes_together(site: Site) -> bool:
    """Is any order of tiles right, and does it matter? Tiles that most rows see start first (`order.long_first`), those of batch indices that share
    captured tiles beside each other. Which tiles most rows see is known of listed ones where their heads take turns, or tiles of keys do (`documents`)."""
    return not site.ordered and (site.turns or site.documents or not site.listed) and (starts_long(site) or shares(site.spec, site.tiled, site.axes_of("k", "v")))


def takes_turns(site: Site) -> bool:
    """Do the batch indices that share keys take turns, tile of rows by tile of rows? Not where sums of each are kept, nor where rows are added to in an order."""
    return site.turns and bool(site.other_axes(site.axes_of("k", "v"))) and not site.ordered and not any(map(ends, site.loads))


def locate(site: Site, mine: tuple[str, ...]) -> tuple[Partition, list[str]]:
    """The function that says where a tile is, and the names of what it returns."""
    function = Partition("locate_keys", f"A tile of keys by number: batch index, first key{', and the rows that see it: see `documents.KEY_HEAD`' * site.documents}.")
    out = function.body
    if site.documents:
        out.assign("tiles", MOST_TILES)
    if goes_together(site):
        out.assign("group", "number // (together * tiles)", "the keys that most rows see first: short tiles fill the gaps" if starts_long(site) else "")
        assign_batch(site, out, mine, "y", "group * together + number % together")
        out.assign("tile", "number // together % tiles")
    else:
        out.assign("y", "number // tiles")
        out.assign("tile", "tiles - 1 - number % tiles" if site.ordered else "number % tiles")
    decode(out, mine, "y")
    if not site.documents:
        out.assign("j0", "tile * BLOCK_N")
    return function, ["y", *(local(a) for a in mine), "tile", *(rows_of_keys(site, out) if site.documents else ["j0"])]


def partial_tiles(site: Site) -> str:
    """The condition of a tile that the mask cuts, or that reaches beyond the last key; "" if there is none, "True" if all count as such."""
    found = site.by_keys
    if not site.listed and found.is_total and site.whole:
        return ""
    return "is_partial != 0" if site.listed or found.has_full or found.is_total else "True"


def key_loads(site: Site) -> list[Load]:
    """Captured tensors read at the key alone, which the one warp reads for the others."""
    mine = {"j", *site.axes_of("k", "v")}
    return [load for load in site.spec.loads if "j" in load.variables and load.variables & {"i", *site.spec.axes} <= mine][:MOST]


def key_ring(site: Site, load: Load) -> str:
    return f"key_ring_{key_loads(site).index(load)}"


def keys_from_rings(site: Site, program: Program) -> None:
    """Let the program read key vectors where it names them: registers are what it lacks."""
    for load in key_loads(site):
        text = f"{key_ring(site, load)}.index(kv){own_keys(site)}.load(keywise)"
        program.outer.names[load] = f"({text} != 0)" if load.kind == BOOL else text


def reserve_numbers(site: Site, out: Writer) -> None:
    for load in key_loads(site):
        dtype = {FLOAT: "gl.float32", BOOL: "gl.int32"}.get(load.kind, f"{pointer(load.name)}.dtype.element_ty")
        out.assign(key_ring(site, load), f"gl.allocate_shared_memory({dtype}, [{key_tiles(site)}, {keys_held(site)}], gl.SwizzledSharedLayout(1, 1, 1, [0]))")
    # the warpgroup of dQ still reads a place when the others have left the rows of the next step
    for name, numbers in (("keys_told", str(key_tiles(site) * len(_keys_told(site)))), ("rows_told", f"2 * STAGES * {len(rows_told(site))}")):
        out.assign(name, f"gl.allocate_shared_memory(gl.int32, [{numbers}, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))")


def _keys_told(site: Site) -> list[str]:
    """Numbers that the warp that copies tells of a tile of keys."""
    return ["tile", "steps", "nth", "y", *map(local, site.axes_of("k", "v")), *(["before"] if is_told_before(site) else []), *goes_past(site),
            *(["j0", "key_end"] if site.documents else [])]


def rows_told(site: Site) -> list[str]:
    """Numbers that it tells of a step. told: the first row, and in its lowest bits whether the mask cuts the tile, whether it is the last of batch
    index z, the first of a tile of keys, and, where keys begin with documents, of a short one, and whether values differ in the tile.
    wanted: whose turn it must be at these rows, where there is an order, and own_turn: that of these keys. sum0: first row in the sum of dQ, if not that."""
    others = site.other_axes(site.axes_of("k", "v"))
    turns = (["wanted", "own_turn"] if adds_apart(site) else ["wanted"]) if site.ordered else []
    return ["told", *(["z", *map(local, others)] if others else ["z"] if adds_apart(site) else []), *turns, *(["sum0"] if site.documents else [])]


def _told_at(site: Site, name: str) -> str:
    """Where one of them lies in shared memory, for the warp that tells it and for those that read it: a ring, and a place there."""
    place = "step" if frees_late(site) else "place_in(at, 2 * STAGES)"
    array, place, names = ("keys_told", "kv", _keys_told(site)) if name in _keys_told(site) else ("rows_told", place, rows_told(site))
    return f"{array}, {place_of(place, names, name)}"


def number(site: Site, name: str, warps: int) -> str:
    """One of them, as the other warps read it."""
    return f"number_at({_told_at(site, name)}, {warps})"


def tell(site: Site, out: Writer, names: list[str]) -> None:
    for name in names:
        out.line(f"tell({_told_at(site, name)}, {name})")


def _place(site: Site, nth: str) -> tuple[str, str]:
    """Place and phase of the keys of the nth tile."""
    tiles = key_tiles(site)
    return ("0", f"{nth} & 1") if tiles == 1 else (f"{nth} & 1", f"{nth} >> 1 & 1")


# ------------------------------------------------------------------------------------------------------ the warpgroups

@contextmanager
def each_tile(site: Site, out: Writer, warps: int, counts: bool = True, barrier: str = "kv_full"):
    """Of a warpgroup (or two together), or a warp: the loop over tiles of keys, once they have arrived. counts: does it count steps?"""
    def arrived() -> None:
        place, phase = _place(site, "nth")
        out.assign("kv", place)
        out.line(f"mbarrier.wait({barrier}.index(kv), {phase})")
        out.assign("tile", number(site, "tile", warps))
    counted = counts and not is_told_before(site)
    out.assign("nth", "0")
    if counted:
        out.assign("before", "0", "counts steps over all tiles of keys")
    if counted:
        start_steps(site, out)
    arrived()
    with out.block("while tile >= 0:"):
        keys_at(site, out, warps)
        steps = number(site, "steps", warps)
        if counts:
            out.assign("end", f"before + {f'tl.maximum({steps}, 1)' if is_tight(site) else steps}")
        yield
        if counted:
            out.assign("before", "end")
        out.assign("nth", "nth + 1")
        arrived()


def keys_at(site: Site, out: Writer, warps: int) -> None:
    """Assign where the tile of keys is. Behind the loop over rows once more: registers that hold it meanwhile are what that loop lacks."""
    for name in _keys_told(site):
        if name not in ("steps", "front", "back"):
            out.assign(name, number(site, name, warps))
    if not site.documents:
        out.assign("j0", "tile * BLOCK_N")
    if not site.other_axes(site.axes_of("k", "v")):
        out.assign("z", "y")


def row_at(site: Site, out: Writer, warps: int) -> None:
    """Assign where a step is that has begun, and whether the mask cuts the tile."""
    shared = bool(site.other_axes(site.axes_of("k", "v")))
    for name in rows_told(site):
        if not adds_apart(site) or name == "told" or shared and name not in ("wanted", "own_turn", "sum0"):
            out.assign(name, number(site, name, warps))
    out.assign("is_partial", "told & 1")
    if shared:
        if not takes_turns(site):
            out.assign("is_last", "told & 2", "of the rows of this z")
    elif is_told_before(site):
        out.assign("z", number(site, "y", warps))
    out.assign("is_first", "told & 4", "of a tile of keys")
    if site.documents:
        out.assign("is_short", "told & 8", "does the tile of keys end sooner than others?")
        out.assign("is_mixed", "told & 16", "do the values that the mask compares differ within this tile?")
    out.assign("i0", "told >> 5" if site.documents else "told & -8")


def read_late(site: Site, text: str, warps: int) -> str:
    """Coordinates with batch indices read from shared memory where they are named."""
    for name in (*_keys_told(site), *rows_told(site)):
        text = re.sub(rf"\b{name}\b", number(site, name, warps), text)
    return text


# -------------------------------------------------------------------------------------------------------- the one warp

def by_hand(site: Site) -> bool:
    """Does that warp read lists, or tensors of the mask?"""
    return site.listed or bool(site.spec.visible.loads)


def worked_out(site: Site) -> dict[str, str]:
    """Arguments that the host works out: what a partition makes of its arguments alone the assembler puts in front of all partitions of its warps, where it
    takes a register of each. work: tiles of keys in all; padded: rows of a batch index in delta and lse2."""
    if site.documents:  # the lists say how many there are
        return {"padded": f"triton.cdiv(M, {PADDING}) * {PADDING}"} | list_arguments(site, "i")
    tiles = "triton.cdiv(N, KEYS['BLOCK_N'])"
    found = {"work": f"{tiles} * {count(site.axes_of('k', 'v'))}", "padded": f"triton.cdiv(M, {PADDING}) * {PADDING}"}
    return found | ({"tiles": tiles} if by_hand(site) or not is_split(site) and (tile_loads(site) or is_apart(site)) else {}) | list_arguments(site, "i")


@contextmanager
def each_step(site: Site, out: Writer, first: str = "before", end: str = "end"):
    """Of a warpgroup: the loop over the steps of a tile of keys."""
    with out.block(f"for at in tl.range({first}, {end}):"):
        slot_of(site, out)
        yield
        end_step(site, out)


def slot_of(site: Site, out: Writer, step: str = "step") -> None:
    """Place of a step in the rings, and phase."""
    if frees_late(site):
        slot, phase = slot_and_phase(step)
        out.assign("slot", slot)
        out.assign("phase", phase)
    else:
        out.assign("slot", "place_in(at, STAGES)")
        out.assign("phase", "phase_in(at, STAGES)")


def slot_of_last(site: Site, out: Writer) -> None:
    """The same of a tile's last step, behind the loop."""
    if frees_late(site):
        out.assign("last", "tl.where(step == 0, 2 * STAGES - 1, step - 1)")
    else:
        out.assign("at", "end - 1")
    slot_of(site, out, "last")


def slot_and_phase(step: str) -> tuple[str, str]:
    """Of a step that is counted so."""
    return f"tl.where({step} >= STAGES, {step} - STAGES, {step})", f"tl.where({step} >= STAGES, 1, 0)"


def start_steps(site: Site, out: Writer) -> None:
    if frees_late(site):
        out.assign("step", "0", "of two turns around the rings")


def end_step(site: Site, out: Writer) -> None:
    if frees_late(site):
        out.assign("step", NEXT)


def await_place(site: Site, out: Writer) -> None:
    """Wait for the place of a tile of keys."""
    place, phase = _place(site, "nth")
    out.assign("kv", place)
    out.line(f"mbarrier.wait(kv_empty.index(kv), ({phase}) ^ 1)")


def tell_keys(site: Site, out: Writer) -> None:
    """Tell where a tile of keys is, and how many steps it has."""
    tell(site, out, _keys_told(site))
