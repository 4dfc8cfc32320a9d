"""Of masks that compare a value of the query with one of the key (document ids): tiles of query rows that begin where a long run of one value does.

Tiles at multiples of BLOCK straddle the documents of a packed batch: their rows read the keys of both, and the mask cuts most of their tiles of keys. Here a
tile begins at each *cut*, a row that begins a run of BLOCK or more of its value, and every BLOCK rows behind it; tiles of its keys begin where its first visible
key does. With documents of 1000 under a causal mask, 128 rows and 128 keys compute 1.18 times the pairs that are visible, as without packing, and not 1.37 times.

Three small kernels: cuts, and the least and greatest value of each GROUP keys and FINE rows; then tiles, and of each the blocks of keys that it sees, by those
intervals; and the lists by keys of `flashfx.codegen.blocks`. An interval may say "in part" where each element would say "not" or "in full".
"""
from __future__ import annotations

import functools

from ...expr import Expr, Var, conjuncts, substitute
from ...spec import BLOCK, AttentionSpec
from ..parts import decode
from ..program import Program
from ..ranges import bounds
from ..reads import averages
from ..writer import Kernel, Writer
from .blocks import arguments, certain_where, possible_where, separable

GROUP = 16
"""Keys whose least and greatest value are kept: of a block's keys those of the groups that it touches."""
HEAD = 5
"""Numbers of a tile in front of its blocks: first row, end of its rows, first key of its first block, how many blocks are partly, how many fully visible."""
WIDTH = 64
"""Blocks of keys looked at together."""

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


def lines(M: int) -> int:
    """Tiles of a batch index at most: cuts are BLOCK rows apart."""
    return 2 * -(-M // BLOCK)


def _arguments(mask: AttentionSpec) -> dict[str, str]:
    return arguments(mask, {"Cuts": "cuts", "KeyEnds": "key_ends", "RowEnds": "row_ends", "RowTiles": "row_tiles", "Lists": "keys"})


def _options(more: str) -> str:
    return f"{{**TILES, 'WIDTH': {WIDTH}{more}}}"


def _value(scalars: Program, e: Expr, at: str) -> str:
    """Text of a row's or key's value at the positions named `at`, which exist."""
    return scalars.value(substitute(e, {Var("i"): Var(at), Var("j"): Var(at)}))


def cuts_kernel(mask: AttentionSpec) -> Kernel:
    """cuts[*axes, window]: the cut among its BLOCK rows (there is one at most), or -1; key_ends[*axes, group, pair, 2]: least and greatest value of GROUP keys;
    row_ends, likewise, of FINE rows."""
    kernel = Kernel("attention_cuts", "One program: BLOCK rows and as many keys.", _arguments(mask), ("BLOCK", "FINE", "GROUP"), "TILES")
    out = kernel.body
    out.assign("windows", "tl.maximum(tl.cdiv(M, BLOCK), tl.cdiv(N, BLOCK))")
    out.assign("window", "tl.program_id(0) % windows")
    out.assign("z", "tl.program_id(0) // windows")
    decode(out, mask.axes, "z")
    scalars = Program(mask, out, inner="i", columns="j")
    out.assign("place", "window * BLOCK + tl.arange(0, 2 * BLOCK)")
    out.assign("block_rows", "tl.minimum(place, M - 1)", "the last row repeats beyond the end")
    out.assign("rows_before", "tl.minimum(tl.maximum(place - 1, 0), M - 1)")
    out.assign("end", "(window + 1) * BLOCK")
    changes = [f"({_value(scalars, row, 'block_rows')} != {_value(scalars, row, 'rows_before')})" for op, row, _ in pairs(mask) if op == "eq"]
    out.assign("changed", " | ".join(changes), "does another value begin here?")
    out.assign("cut", "tl.max(tl.where(changed & (place < end), place, -1), 0)")
    out.assign("following", "tl.min(tl.where(changed & (place >= end), place, end + BLOCK), 0)")
    out.line("tl.store(Cuts + z * tl.cdiv(M, BLOCK) + window, tl.where(following - cut >= BLOCK, cut, -1), mask=window < tl.cdiv(M, BLOCK))")
    out.assign("block_keys", "tl.minimum(window * BLOCK + tl.arange(0, BLOCK), N - 1)")
    out.assign("group", "window * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)")
    out.assign("groups", "tl.cdiv(N, BLOCK) * (BLOCK // GROUP)")
    out.assign("fine", "window * (BLOCK // FINE) + tl.arange(0, 2 * BLOCK // FINE)", "the second half are the next window's")
    out.assign("fines", "tl.cdiv(M, BLOCK) * (BLOCK // FINE)")
    out.assign("key_place", f"KeyEnds + (tl.cast(z, tl.int64) * groups + group) * {2 * len(pairs(mask))}")
    out.assign("row_place", f"RowEnds + (tl.cast(z, tl.int64) * fines + fine) * {2 * len(pairs(mask))}")
    for n, (_, row, key) in enumerate(pairs(mask)):
        out.assign(f"key_{n}", f"tl.reshape({_value(scalars, key, 'block_keys')}.to(tl.int64), [BLOCK // GROUP, GROUP])")
        out.assign(f"row_{n}", f"tl.reshape({_value(scalars, row, 'block_rows')}.to(tl.int64), [2 * BLOCK // FINE, FINE])")
        for at, end in enumerate(("min", "max")):
            out.line(f"tl.store(key_place + {2 * n + at}, tl.{end}(key_{n}, 1), mask=group < groups)")
            out.line(f"tl.store(row_place + {2 * n + at}, tl.{end}(row_{n}, 1), mask=fine < tl.minimum(fines, (window + 1) * (BLOCK // FINE)))")
    out.line("tl.store(RowTiles, 0, mask=tl.program_id(0) == 0)", "the next kernel's maximum")
    return kernel


def tiles_kernel(mask: AttentionSpec) -> Kernel:
    """row_tiles[0, 0]: the most tiles of a batch index; row_tiles[1 + (axes, tile)]: as HEAD says, then the blocks."""
    kernel = Kernel("attention_row_tiles", "One program: one tile of rows, and the blocks of BLOCK keys that they see.", _arguments(mask),
                    ("BLOCK", "FINE", "GROUP", "WIDTH", "WINDOWS"), _options(", 'WINDOWS': triton.next_power_of_2(R)"))
    out = kernel.body
    out.assign("windows", "tl.cdiv(M, BLOCK)")
    out.assign("t", "tl.program_id(0) % (2 * windows)")
    out.assign("z", "tl.program_id(0) // (2 * windows)")
    decode(out, mask.axes, "z")
    _locate(out)
    out.assign("i0", "first")
    out.assign("i1", "last - 1")
    scalars = Program(mask, out, inner="i", columns="j")
    found = bounds(mask.visible, "j")
    out.assign("lo", f"tl.maximum({scalars.value(found.lo)}, 0) + first * 0", "keys outside [lo, hi) are hidden")
    out.assign("hi", f"tl.where(t < count, tl.minimum({scalars.value(found.hi)}, N), 0)")
    out.assign("block_rows", "tl.maximum(tl.minimum(first + tl.arange(0, BLOCK), last - 1), 0)")
    for n, (_, row, _) in enumerate(pairs(mask)):
        out.assign(f"row_{n}", f"{_value(scalars, row, 'block_rows')}.to(tl.int64)")
        for end in ("min", "max"):
            out.assign(f"{end}_row_{n}", f"tl.{end}(row_{n}, 0)")
    out.assign("groups", "tl.cdiv(N, BLOCK) * (BLOCK // GROUP)")
    out.assign("ends", f"KeyEnds + tl.cast(z, tl.int64) * groups * {2 * len(pairs(mask))}")
    out.assign("first_group", "groups")
    out.assign("last_group", "groups * 0 - 1")
    with out.block("for g0 in tl.range(lo // GROUP, tl.cdiv(hi, GROUP), 8 * WIDTH):"):
        out.assign("group", "g0 + tl.arange(0, 8 * WIDTH)")
        possible = _key_ends(mask, out, "group", "group < tl.cdiv(hi, GROUP)")
        out.assign("group_seen", f"{possible} & (group < tl.cdiv(hi, GROUP))")
        out.assign("first_group", "tl.minimum(first_group, tl.min(tl.where(group_seen, group, groups), 0))")
        out.assign("last_group", "tl.maximum(last_group, tl.max(tl.where(group_seen, group, -1), 0))")
    for at, beyond, reduced in (("first", "first_group * GROUP + GROUP", "min"), ("last", "last_group * GROUP - 1", "max")):
        out.assign("near", f"{at}_group * GROUP + tl.arange(0, GROUP)")
        out.assign(f"{at}_keys", "tl.maximum(tl.minimum(near, N - 1), 0)")
        for n, (_, _, key) in enumerate(pairs(mask)):
            out.assign(f"min_near_{n}", f"{_value(scalars, key, f'{at}_keys')}.to(tl.int64)")
            out.assign(f"max_near_{n}", f"min_near_{n}")
        out.assign("near_seen", f"{_possible(mask, 'near')} & (near >= lo) & (near < hi)")
        out.assign(f"{at}_key", f"tl.{reduced}(tl.where(near_seen, near, {beyond}), 0)")
        if at == "first":  # the first block has no keys in front
            for n in range(len(pairs(mask))):
                out.assign(f"least_{n}", f"tl.min(tl.where(near >= first_key, min_near_{n}, {2 ** 62}), 0)")
                out.assign(f"greatest_{n}", f"tl.max(tl.where(near >= first_key, max_near_{n}, {-2 ** 62}), 0)")
    out.assign("begin", "first_key % BLOCK", "of the first block, so that one begins with the first key that is seen")
    out.assign("hi", "tl.minimum(hi, last_key + 1)")
    out.assign("listed", f"RowTiles + (1 + tl.cast(tl.program_id(0), tl.int64)) * (tl.cdiv(N, BLOCK) + {HEAD})")
    out.assign("partial", "t * 0")
    out.assign("full", "t * 0")
    certain = _certain(mask, scalars)
    for counts in (True, False):
        _restart(out, counts)
        with out.block("for c0 in tl.range(first_key // BLOCK, tl.cdiv(hi - begin, BLOCK), WIDTH):"):
            out.assign("block", "c0 + tl.arange(0, WIDTH)")
            out.assign("j0", "begin + block * BLOCK")
            out.assign("groups_of", "tl.minimum((j0 // GROUP)[:, None] + tl.arange(0, 2 * BLOCK // GROUP)[None, :], ((j0 + BLOCK - 1) // GROUP)[:, None])")
            possible = _key_ends(mask, out, "key", "groups_of < groups")
            out.assign("seen", f"{possible} & (j0 + BLOCK > lo) & (j0 < hi)")
            out.assign("certain", certain)
            _list(out, counts, HEAD)
    for at, name in enumerate(("first", "last", "begin", "partial", "full")):
        out.line(f"tl.store(listed + {at}, {name})" if at else f"tl.store(listed, {name})")
    out.line(f"tl.store(listed + {HEAD}, 0, mask=partial + full == 0)", "a tile of rows visits one block, if a hidden one")
    return kernel


def keys_kernel(mask: AttentionSpec) -> Kernel:
    """keys, as `flashfx.codegen.blocks` says, without the blocks that are hidden."""
    kernel = Kernel("attention_key_lists", "One program: one block of BLOCK keys, and the blocks of FINE rows that see some.", _arguments(mask),
                    ("BLOCK", "FINE", "GROUP", "WIDTH"), _options(""))
    out = kernel.body
    out.assign("columns", "tl.cdiv(N, BLOCK)")
    out.assign("z", "tl.program_id(0) // columns")
    out.assign("j0", "tl.program_id(0) % columns * BLOCK")
    decode(out, mask.axes, "z")
    out.assign("groups", "columns * (BLOCK // GROUP)")
    out.assign("group", "j0 // GROUP + tl.arange(0, BLOCK // GROUP)")
    out.assign("fines", "tl.cdiv(M, BLOCK) * (BLOCK // FINE)")
    out.assign("ends", f"KeyEnds + tl.cast(z, tl.int64) * groups * {2 * len(pairs(mask))}")
    _key_ends(mask, out, "group", "group < groups")
    for n in range(len(pairs(mask))):
        for end in ("min", "max"):
            out.assign(f"{end}_key_{n}", f"tl.{end}({end}_group_{n}, 0)")
    out.assign("row_place", f"RowEnds + tl.cast(z, tl.int64) * fines * {2 * len(pairs(mask))}")
    out.assign("listed", "Lists + tl.cast(tl.program_id(0), tl.int64) * (tl.cdiv(M, FINE) + 2)")
    out.assign("partial", "j0 * 0")
    out.assign("full", "j0 * 0")
    found = bounds(mask.visible, "j")
    for counts in (True, False):
        _restart(out, counts)
        with out.block("for r0 in tl.range(0, tl.cdiv(M, FINE), WIDTH):"):
            out.assign("block", "r0 + tl.arange(0, WIDTH)")
            out.assign("there", "block < tl.cdiv(M, FINE)")
            out.assign("i0", "block * FINE")
            out.assign("i1", "tl.minimum(i0 + FINE, M) - 1")
            scalars = Program(mask, out.section(), inner="i", columns="j")
            for n in range(len(pairs(mask))):
                for at, end in enumerate(("min", "max")):
                    out.assign(f"{end}_row_{n}", f"tl.load(row_place + block * {2 * len(pairs(mask))} + {2 * n + at}, mask=there, other=0)")
            out.assign("seen", f"{_possible(mask, 'key')} & there & (j0 + BLOCK > {scalars.value(found.lo)}) & (j0 < {scalars.value(found.hi)})")
            out.assign("certain", _certain(mask, scalars))
            _list(out, counts, 2)
    for at, name in enumerate(("partial", "full")):
        out.line(f"tl.store(listed + {at}, {name})")
    out.line("tl.store(listed + 2, 0, mask=partial + full == 0)", "a tile of keys visits one block, if a hidden one")
    return kernel


def _certain(mask: AttentionSpec, scalars: Program) -> str:
    """The condition under which all of a block is visible, by the closed form and the intervals."""
    closed = [f for c in conjuncts(mask.visible) for f in [bounds(c, "j")] if not c.loads and f.has_full]
    whole = [text for f in closed for text in (f"(j0 >= {scalars.value(f.full_lo)})", f"(j0 + BLOCK <= {scalars.value(f.full_hi)})")]
    return " & ".join(["(j0 + BLOCK <= N)", *whole, *(text for n, (op, _, _) in enumerate(pairs(mask)) for text in certain_where(op, n))])


def _restart(out: Writer, counts: bool) -> None:
    if not counts:
        out.assign("next_partial", "partial * 0")
        out.assign("next_full", "partial")


def _list(out: Writer, counts: bool, head: int) -> None:
    """In a loop over blocks, count those that are partly and fully visible; in the second loop write them behind the list's head."""
    out.assign("is_partial", "(seen & (certain == 0)).to(tl.int32)")
    out.assign("is_full", "(seen & certain).to(tl.int32)")
    if not counts:
        out.line(f"tl.store(listed + {head - 1} + next_partial + tl.cumsum(is_partial, 0), block, mask=is_partial != 0)")
        out.line(f"tl.store(listed + {head - 1} + next_full + tl.cumsum(is_full, 0), block, mask=is_full != 0)")
    for name in ("partial", "full"):
        own = name if counts else f"next_{name}"
        out.assign(own, f"{own} + tl.sum(is_{name}, 0)")


def _locate(out: Writer) -> None:
    """Assign count, the batch index's number of tiles, and first and last, the ends of tile t's rows; both M if there is no such tile."""
    out.assign("window", "tl.arange(0, WINDOWS)")
    out.assign("cut", "tl.load(Cuts + z * windows + window, mask=window < windows, other=-1)")
    out.assign("earlier", "tl.load(Cuts + z * windows + window - 1, mask=(window > 0) & (window < windows), other=-1)")
    out.assign("anchor", "tl.maximum(tl.associative_scan(earlier, 0, larger), 0)", "the last cut in front of a window")
    out.assign("start", "anchor + tl.cdiv(window * BLOCK - anchor, BLOCK) * BLOCK", "the first row of a tile counted from there, one in each window")
    out.assign("goes_on", "((window < windows) & (start < M) & ((cut < 0) | (start < cut))).to(tl.int32)")
    out.assign("begins", "(cut >= 0).to(tl.int32)")
    out.assign("before", "tl.cumsum(goes_on + begins, 0) - goes_on - begins", "tiles of the windows in front")
    out.assign("count", "tl.sum(goes_on + begins, 0)")
    for name, number in (("first", "t"), ("last", "t + 1")):
        out.assign(name, f"tl.sum(tl.where(before == {number}, goes_on * start, 0) + tl.where(before + goes_on == {number}, begins * cut, 0), 0)")
        out.assign(name, f"tl.where({number} < count, {name}, M)")
    with out.block("if t == 0:"):
        out.line("tl.atomic_max(RowTiles, count)")


def _key_ends(mask: AttentionSpec, out: Writer, of: str, there: str) -> str:
    """Assign least and greatest value of the keys of each "group", or of the groups of a "key" block, of each pair, and return the condition under which some row
    has one of them."""
    group = "group" if of == "group" else "groups_of"
    for n, (op, _, _) in enumerate(pairs(mask)):
        for at, (end, other) in enumerate((("min", 2 ** 62), ("max", -2 ** 62))):
            text = f"tl.load(ends + {group} * {2 * len(pairs(mask))} + {2 * n + at}, mask={there}, other={other})"
            least = f"{'least' if end == 'min' else 'greatest'}_{n}"
            out.assign(f"{end}_{of}_{n}", text if of == "group" else f"tl.{end}(tl.where(groups_of == first_group, {least}, {text}), 1)")
    return _possible(mask, of)


def _possible(mask: AttentionSpec, of: str) -> str:
    """Does some row have a value between the least and the greatest?"""
    return " & ".join(text for n, (op, _, _) in enumerate(pairs(mask)) for text in possible_where(op, n, of))
