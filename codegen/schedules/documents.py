"""Of masks that compare a value of the query with one of the key (document ids): tiles of query rows, and of keys, that begin where a long run of one value does.

Tiles at multiples of BLOCK straddle the documents of a packed batch: their rows read the keys of both, and the mask cuts most of their tiles of keys. Here a
tile begins at each *cut*, a row that begins a run of BLOCK or more of its value, and every BLOCK rows behind it; tiles of its keys begin where its first visible
key does. Backward goes over tiles of keys that begin so, each against tiles of FINE rows, halves of those of rows. With documents of 1000 under a causal mask,
128 rows and 128 keys compute 1.18 times the pairs that are visible, as without packing, and not 1.37 times.

Three small kernels: cuts, and the least and greatest value of each GROUP keys; then tiles of rows (`row_tiles`), and of each the blocks of keys that it sees, by
those intervals; and tiles of keys (`key_tiles`). An interval may say "in part" where each element would say "not" or "in full".

    row_tiles  int32 (1 + batch indices * tiles, HEAD + C)
    key_tiles  int32 (batch indices * (1 + tiles), KEY_HEAD + 2 * slots)

A *slot* is a place for a tile of FINE rows in the float32 sum of dQ: i0 // FINE + the cuts up to its first row i0, so that no two share one.
"""
from __future__ import annotations

import functools

from ...expr import Expr, Var, conjuncts, substitute
from ...spec import BLOCK, FINE, AttentionSpec
from ..parts import decode
from ..program import Program
from ..ranges import bounds
from ..reads import averages
from ..writer import Kernel, Writer
from .blocks import arguments, certain_where, possible_where, separable

GROUP = 16
"""Keys whose least and greatest value are kept: of a block's keys those of the groups that it touches."""
HEAD = 5
"""Numbers of a tile of rows in front of its blocks: first row, end of its rows, first key of its first block, how many blocks are partly, how many fully visible.
Line 0 begins with the most tiles that a batch index has."""
KEY_HEAD = 4
"""Numbers of a tile of keys in front of its tiles of FINE rows: first key, end of its keys, how many of those are partly, how many fully visible. Each of them
is two: its first row, and SHARE * slot + rows, MIXED more where values differ within the tile. A batch index has a line in front of its tiles: in the first the most
tiles of keys and the most cuts among rows that one has, in each at OWN how many tiles of keys it has itself, and behind KEY_HEAD of each slot: first row, rows; 0 rows
where it is not used."""
OWN = 2
MIXED = 2 * FINE
SHARE = 2 * MIXED
SLOTS = BLOCK // FINE + 1
"""For BLOCK rows: their tiles of FINE rows, and a cut."""
RESULTS = {"Cuts": "cuts", "KeyCuts": "key_cuts", "KeyEnds": "key_ends", "SlotEnds": "slot_ends", "RowTiles": "row_tiles", "KeyTiles": "key_tiles"}
"""What the kernels write, and its names on the host."""
WIDTH = 64
"""Blocks looked at together."""

LARGER = '''@triton.jit
def larger(a, b):
    return tl.maximum(a, b)'''


@functools.lru_cache(maxsize=1024)
def pairs(mask: AttentionSpec) -> tuple[tuple[str, Expr, Expr], ...]:
    """`blocks.separable` of the conjuncts without closed form, if every one is such a comparison and one of them an equality; else ()."""
    found = [separable(c) for c in conjuncts(mask.visible) if c.loads or not bounds(c, "j").has_full]
    return tuple(found) if None not in found and any(op == "eq" for op, *_ in found) else ()


def takes(spec: AttentionSpec) -> bool:
    """Are there such tiles for this spec? Dropout's random bits belong to rows and keys that tiles share in a fixed way; rows that average v to blocks of their own."""
    return not spec.dropout and not averages(spec.mask()) and bool(pairs(spec.mask()))


def lines(length: int) -> int:
    """Tiles of a batch index at most: cuts are BLOCK rows apart."""
    return 2 * -(-length // BLOCK)


def shapes(batch: int, M: int, N: int) -> tuple[list, list]:
    """Shapes of `row_tiles` and `key_tiles`; works on SymInts too. batch: how many batch indices the mask has."""
    return [1 + batch * lines(M), HEAD - (-N // BLOCK)], [batch * (1 + lines(N)), KEY_HEAD + 2 * SLOTS * -(-M // BLOCK)]


def options(windows: str = "", **more: int) -> str:
    """A kernel's options beside TILES. windows: of how many WINDOWS is the next power of two."""
    found = {name: str(number) for name, number in more.items()} | ({"WINDOWS": f"triton.next_power_of_2({windows})"} if windows else {})
    return f"{{**TILES, {', '.join(f'{name!r}: {number}' for name, number in found.items())}}}"


def value(scalars: Program, e: Expr, at: str) -> str:
    """Text of a row's or key's value at the positions named `at`, which exist."""
    return scalars.value(substitute(e, {Var("i"): Var(at), Var("j"): Var(at)}))


def cuts_kernel(mask: AttentionSpec) -> Kernel:
    """cuts[*axes, window]: the cut among its BLOCK rows (there is one at most), or -1; key_cuts likewise; key_ends[*axes, group, pair, 2]: least and greatest value of
    GROUP keys."""
    kernel = Kernel("attention_cuts", "One program: BLOCK rows and as many keys.", arguments(mask, RESULTS), ("BLOCK", "GROUP"), options(GROUP=GROUP))
    out, number = kernel.body, 2 * len(pairs(mask))
    out.assign("windows", "tl.maximum(tl.cdiv(M, BLOCK), tl.cdiv(N, BLOCK))")
    out.assign("window", "tl.program_id(0) % windows")
    out.assign("z", "tl.program_id(0) // windows")
    decode(out, mask.axes, "z")
    scalars = Program(mask, out, inner="i", columns="j")
    out.assign("place", "window * BLOCK + tl.arange(0, 2 * BLOCK)")
    out.assign("end", "(window + 1) * BLOCK")
    for at, (size, cuts) in enumerate((("M", "Cuts"), ("N", "KeyCuts"))):
        x = "key" if at else "row"
        out.assign(f"block_{x}s", f"tl.minimum(place, {size} - 1)", "" if at else "the last one repeats beyond the end")
        out.assign(f"{x}s_before", f"tl.minimum(tl.maximum(place - 1, 0), {size} - 1)")
        changes = [f"({value(scalars, pair[1 + at], f'block_{x}s')} != {value(scalars, pair[1 + at], f'{x}s_before')})" for pair in pairs(mask) if pair[0] == "eq"]
        out.assign("changed", " | ".join(changes), "" if at else "does another value begin here?")
        out.assign("cut", "tl.max(tl.where(changed & (place < end), place, -1), 0)")
        out.assign("following", "tl.min(tl.where(changed & (place >= end), place, end + BLOCK), 0)")
        out.line(f"tl.store({cuts} + z * tl.cdiv({size}, BLOCK) + window, tl.where(following - cut >= BLOCK, cut, -1), mask=window < tl.cdiv({size}, BLOCK))")
    out.assign("own_keys", "tl.minimum(window * BLOCK + tl.arange(0, BLOCK), N - 1)")
    out.assign("group", "window * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)")
    out.assign("groups", "tl.cdiv(N, BLOCK) * (BLOCK // GROUP)")
    out.assign("key_place", f"KeyEnds + (tl.cast(z, tl.int64) * groups + group) * {number}")
    for n, (_, _, key) in enumerate(pairs(mask)):
        out.assign(f"key_{n}", f"tl.reshape({value(scalars, key, 'own_keys')}.to(tl.int64), [BLOCK // GROUP, GROUP])")
        for at, end in enumerate(("min", "max")):
            out.line(f"tl.store(key_place + {2 * n + at}, tl.{end}(key_{n}, 1), mask=group < groups)")
    key_line(out, "head", "0")
    out.assign("slot", "tl.arange(0, 4)")
    out.line(f"tl.store(head + {KEY_HEAD + 1} + 2 * (window * {SLOTS} + slot), 0, mask=(slot < {SLOTS}) & (window < tl.cdiv(M, BLOCK)))", "no slot is used")
    out.line("tl.store(RowTiles, 0, mask=tl.program_id(0) == 0)", "the next kernels' maxima")
    for n in range(2):
        out.line(f"tl.store(KeyTiles + {n}, 0, mask=tl.program_id(0) == 0)")
    return kernel


def key_line(out: Writer, name: str, number: str, z: str = "z") -> None:
    """Assign where a line of key_tiles begins; number 0 is in front of the tiles."""
    out.assign(name, f"KeyTiles + (tl.cast({z}, tl.int64) * (1 + tl.cdiv(N, {BLOCK}) * 2) + {number}) * ({KEY_HEAD} + tl.cdiv(M, {BLOCK}) * {2 * SLOTS})")


def locate(mask: AttentionSpec, out: Writer, cuts: str, size: str) -> None:
    """Of a program for each tile that there may be of `size` rows or keys: assign t, its number, and z, its batch index, with the axes; count, how many there are of that,
    first and last, the tile's ends, both `size` if it is none of them, and cuts_before, how many cuts there are up to its first row (or key)."""
    out.assign("windows", f"tl.cdiv({size}, BLOCK)")
    out.assign("t", "tl.program_id(0) % (2 * windows)")
    out.assign("z", "tl.program_id(0) // (2 * windows)")
    decode(out, mask.axes, "z")
    out.assign("window", "tl.arange(0, WINDOWS)")
    out.assign("cut", f"tl.load({cuts} + z * windows + window, mask=window < windows, other=-1)")
    out.assign("earlier", f"tl.load({cuts} + z * windows + window - 1, mask=(window > 0) & (window < windows), other=-1)")
    out.assign("anchor", "tl.maximum(tl.associative_scan(earlier, 0, larger), 0)", "the last cut in front of a window")
    out.assign("start", "anchor + tl.cdiv(window * BLOCK - anchor, BLOCK) * BLOCK", "where a tile begins that is counted from there, one in each window")
    out.assign("goes_on", f"((window < windows) & (start < {size}) & ((cut < 0) | (start < cut))).to(tl.int32)")
    out.assign("begins", "(cut >= 0).to(tl.int32)")
    out.assign("before", "tl.cumsum(goes_on + begins, 0) - goes_on - begins", "tiles of the windows in front")
    out.assign("count", "tl.sum(goes_on + begins, 0)")
    for name, number in (("first", "t"), ("last", "t + 1")):
        out.assign(name, f"tl.sum(tl.where(before == {number}, goes_on * start, 0) + tl.where(before + goes_on == {number}, begins * cut, 0), 0)")
        out.assign(name, f"tl.where({number} < count, {name}, {size})")
    out.assign("cuts_before", "tl.sum(tl.where(before + goes_on <= t, begins, 0), 0)")


def possible(mask: AttentionSpec, of: str) -> str:
    """Does some row have a value between the least and the greatest of the keys?"""
    return " & ".join(text for n, (op, _, _) in enumerate(pairs(mask)) for text in possible_where(op, n, of))


def alike(mask: AttentionSpec) -> str:
    """Do all rows have values to which all of the keys compare as the mask wants?"""
    return " & ".join(text for n, (op, _, _) in enumerate(pairs(mask)) for text in certain_where(op, n))


def certain(mask: AttentionSpec, scalars: Program, end: str) -> str:
    """The condition under which all of a block is visible, by the closed form and the intervals. end: of the keys."""
    closed = [f for c in conjuncts(mask.visible) for f in [bounds(c, "j")] if not c.loads and f.has_full]
    whole = [text for f in closed for text in (f"(j0 >= {scalars.value(f.full_lo)})", f"(j0 + BLOCK <= {scalars.value(f.full_hi)})")]
    return " & ".join([f"(j0 + BLOCK <= {end})", *whole, alike(mask)])


def list_twice(out: Writer, head: int, numbers: tuple[str, ...], loop: str, look) -> None:
    """Count blocks that are partly and fully visible, then write numbers of each behind the list's head. look: assigns seen and certain of the blocks of a turn of the loop."""
    out.assign("partial", "t * 0")
    out.assign("full", "t * 0")
    for counts in (True, False):
        if not counts:
            out.assign("next_partial", "partial * 0")
            out.assign("next_full", "partial")
        with out.block(loop):
            look()
            out.assign("is_partial", "(seen & (certain == 0)).to(tl.int32)")
            out.assign("is_full", "(seen & certain).to(tl.int32)")
            width = len(numbers)
            for kind in ("partial", "full") if not counts else ():
                place = f"next_{kind} + tl.cumsum(is_{kind}, 0)"
                place = place if width == 1 else f"{width} * ({place})"
                for n, number in enumerate(numbers):
                    out.line(f"tl.store(listed + {head - width + n} + {place}, {number}, mask=is_{kind} != 0)")
            for kind in ("partial", "full"):
                own = kind if counts else f"next_{kind}"
                out.assign(own, f"{own} + tl.sum(is_{kind}, 0)")
