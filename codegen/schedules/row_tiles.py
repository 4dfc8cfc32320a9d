"""The kernel that makes tiles of query rows which begin where documents do (`documents`), for the Hopper forward, and what the tiles of keys need of them."""
from __future__ import annotations

from ...spec import FINE, AttentionSpec
from ..program import Program
from ..ranges import bounds
from ..writer import Kernel, Writer
from .blocks import arguments
from .documents import GROUP, HEAD, KEY_HEAD, RESULTS, SLOTS, WIDTH, certain, key_line, list_twice, locate, options, pairs, possible, value


def tiles_kernel(mask: AttentionSpec) -> Kernel:
    """row_tiles[0, 0]: the most tiles of a batch index; row_tiles[1 + (axes, tile)]: as HEAD says, then the blocks. Of key_tiles the slots, and slot_ends[*axes, slot, pair, 2]:
    least and greatest value of their rows."""
    kernel = Kernel("attention_row_tiles", "One program: one tile of rows, and the blocks of BLOCK keys that they see.", arguments(mask, RESULTS),
                    ("BLOCK", "FINE", "GROUP", "WIDTH", "WINDOWS"), options("R", FINE=FINE, GROUP=GROUP, WIDTH=WIDTH))
    out, number = kernel.body, 2 * len(pairs(mask))
    locate(mask, out, "Cuts", "M")
    with out.block("if t == 0:"):
        out.line("tl.atomic_max(RowTiles, count)")
        out.line("tl.atomic_max(KeyTiles + 1, tl.sum(begins, 0))")
    out.assign("i0", "first")
    out.assign("i1", "last - 1")
    scalars = Program(mask, out, inner="i", columns="j")
    found = bounds(mask.visible, "j")
    out.assign("lo", f"tl.maximum({scalars.value(found.lo)}, 0) + first * 0", "keys outside [lo, hi) are hidden")
    out.assign("hi", f"tl.where(t < count, tl.minimum({scalars.value(found.hi)}, N), 0)")
    out.assign("block_rows", "tl.maximum(tl.minimum(first + tl.arange(0, BLOCK), last - 1), 0)")
    out.assign("half", "first + tl.arange(0, BLOCK // FINE) * FINE", "first rows of tiles of FINE")
    out.assign("slot", "half // FINE + cuts_before")
    key_line(out, "head", "0")
    out.assign("ends", f"SlotEnds + (z * windows * {SLOTS} + slot) * {number}")
    for at, text in enumerate(("half", "tl.minimum(last - half, FINE)")):
        out.line(f"tl.store(head + {KEY_HEAD + at} + 2 * slot, {text}, mask=half < last)")
    for n, (_, row, _) in enumerate(pairs(mask)):
        out.assign(f"row_{n}", f"{value(scalars, row, 'block_rows')}.to(tl.int64)")
        for at, end in enumerate(("min", "max")):
            out.assign(f"{end}_row_{n}", f"tl.{end}(row_{n}, 0)")
            out.line(f"tl.store(ends + {2 * n + at}, tl.{end}(tl.reshape(row_{n}, [BLOCK // FINE, FINE]), 1), mask=half < last)")
    out.assign("groups", "tl.cdiv(N, BLOCK) * (BLOCK // GROUP)")
    out.assign("ends", f"KeyEnds + tl.cast(z, tl.int64) * groups * {number}")
    out.assign("first_group", "groups")
    out.assign("last_group", "groups * 0 - 1")
    with out.block("for g0 in tl.range(lo // GROUP, tl.cdiv(hi, GROUP), 8 * WIDTH):"):
        out.assign("group", "g0 + tl.arange(0, 8 * WIDTH)")
        seen = _key_ends(mask, out, "group", "group < tl.cdiv(hi, GROUP)")
        out.assign("group_seen", f"{seen} & (group < tl.cdiv(hi, GROUP))")
        out.assign("first_group", "tl.minimum(first_group, tl.min(tl.where(group_seen, group, groups), 0))")
        out.assign("last_group", "tl.maximum(last_group, tl.max(tl.where(group_seen, group, -1), 0))")
    for at, beyond, reduced in (("first", "first_group * GROUP + GROUP", "min"), ("last", "last_group * GROUP - 1", "max")):
        out.assign("near", f"{at}_group * GROUP + tl.arange(0, GROUP)")
        out.assign(f"{at}_keys", "tl.maximum(tl.minimum(near, N - 1), 0)")
        for n, (_, _, key) in enumerate(pairs(mask)):
            out.assign(f"min_near_{n}", f"{value(scalars, key, f'{at}_keys')}.to(tl.int64)")
            out.assign(f"max_near_{n}", f"min_near_{n}")
        out.assign("near_seen", f"{possible(mask, 'near')} & (near >= lo) & (near < hi)")
        out.assign(f"{at}_key", f"tl.{reduced}(tl.where(near_seen, near, {beyond}), 0)")
        if at == "first":  # the first block has no keys in front
            for n in range(len(pairs(mask))):
                out.assign(f"least_{n}", f"tl.min(tl.where(near >= first_key, min_near_{n}, {2 ** 62}), 0)")
                out.assign(f"greatest_{n}", f"tl.max(tl.where(near >= first_key, max_near_{n}, {-2 ** 62}), 0)")
    out.assign("begin", "first_key % BLOCK", "of the first block, so that one begins with the first key that is seen")
    out.assign("hi", "tl.minimum(hi, last_key + 1)")
    out.assign("listed", f"RowTiles + (1 + tl.cast(tl.program_id(0), tl.int64)) * (tl.cdiv(N, BLOCK) + {HEAD})")
    is_certain = certain(mask, scalars, "N")

    def look() -> None:
        out.assign("block", "c0 + tl.arange(0, WIDTH)")
        out.assign("j0", "begin + block * BLOCK")
        out.assign("groups_of", "tl.minimum((j0 // GROUP)[:, None] + tl.arange(0, 2 * BLOCK // GROUP)[None, :], ((j0 + BLOCK - 1) // GROUP)[:, None])")
        seen = _key_ends(mask, out, "key", "groups_of < groups")
        out.assign("seen", f"{seen} & (j0 + BLOCK > lo) & (j0 < hi)")
        out.assign("certain", is_certain)
    list_twice(out, HEAD, ("block",), "for c0 in tl.range(first_key // BLOCK, tl.cdiv(hi - begin, BLOCK), WIDTH):", look)
    for at, name in enumerate(("first", "last", "begin", "partial", "full")):
        out.line(f"tl.store(listed + {at}, {name})" if at else f"tl.store(listed, {name})")
    out.line(f"tl.store(listed + {HEAD}, 0, mask=partial + full == 0)", "a tile of rows visits one block, if a hidden one")
    return kernel


def _key_ends(mask: AttentionSpec, out: Writer, of: str, there: str) -> str:
    """Assign least and greatest value of the keys of each "group", or of the groups of a "key" block, of each pair, and return the condition under which some row
    has one of them."""
    group = "group" if of == "group" else "groups_of"
    for n in range(len(pairs(mask))):
        for at, (end, other) in enumerate((("min", 2 ** 62), ("max", -2 ** 62))):
            text = f"tl.load(ends + {group} * {2 * len(pairs(mask))} + {2 * n + at}, mask={there}, other={other})"
            least = f"{'least' if end == 'min' else 'greatest'}_{n}"
            out.assign(f"{end}_{of}_{n}", text if of == "group" else f"tl.{end}(tl.where(groups_of == first_group, {least}, {text}), 1)")
    return possible(mask, of)
