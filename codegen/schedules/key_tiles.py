"""The kernel that makes tiles of keys which begin where documents do (`documents`), for the Hopper backward."""
from __future__ import annotations

from ...spec import AttentionSpec
from ..program import Program
from ..ranges import bounds
from ..writer import Kernel
from .blocks import arguments
from .documents import KEY_HEAD, MIXED, OWN, RESULTS, SHARE, SLOTS, WIDTH, alike, certain, key_line, list_twice, locate, options, pairs, possible, value


def keys_kernel(mask: AttentionSpec) -> Kernel:
    """key_tiles[0, 0]: the most tiles of a batch index; key_tiles[(axes, 1 + tile)]: as KEY_HEAD says, then the tiles of rows."""
    kernel = Kernel("attention_key_tiles", "One program: one tile of keys, and the tiles of FINE rows that see some.", arguments(mask, RESULTS),
                    ("BLOCK", "WIDTH", "WINDOWS"), options("C", WIDTH=8 * WIDTH))
    out, number = kernel.body, 2 * len(pairs(mask))
    locate(mask, out, "KeyCuts", "N")
    with out.block("if t == 0:"):
        out.line("tl.atomic_max(KeyTiles, count)")
    out.assign("j0", "first")
    out.assign("block_keys", "tl.maximum(tl.minimum(first + tl.arange(0, BLOCK), last - 1), 0)")
    values = Program(mask, out, inner="i", columns="j")
    for n, (_, _, key) in enumerate(pairs(mask)):
        out.assign(f"key_{n}", f"{value(values, key, 'block_keys')}.to(tl.int64)")
        for end in ("min", "max"):
            out.assign(f"{end}_key_{n}", f"tl.{end}(key_{n}, 0)")
    key_line(out, "head", "0")
    out.line(f"tl.store(head + {OWN}, count, mask=t == 0)")
    key_line(out, "listed", "1 + t")
    out.assign("slots", f"{SLOTS} * tl.cdiv(M, BLOCK)")
    found = bounds(mask.visible, "j")

    def look() -> None:
        out.assign("slot", "s0 + tl.arange(0, WIDTH)")
        out.assign("there", "(slot < slots) & (t < count)")
        for at, name in enumerate(("i0", "rows")):
            out.assign(name, f"tl.load(head + {KEY_HEAD + at} + 2 * slot, mask=there, other=0)")
        out.assign("there", "there & (rows > 0)")
        out.assign("i1", "i0 + rows - 1")
        scalars = Program(mask, out.section(), inner="i", columns="j")
        for n in range(len(pairs(mask))):
            for at, end in enumerate(("min", "max")):
                out.assign(f"{end}_row_{n}", f"tl.load(SlotEnds + (z * slots + slot) * {number} + {2 * n + at}, mask=there, other=0)")
        out.assign("seen", f"{possible(mask, 'key')} & there & (last > {scalars.value(found.lo)}) & (j0 < {scalars.value(found.hi)})")
        out.assign("certain", certain(mask, scalars, "last"))
        out.assign("mixed", f"tl.where({alike(mask)}, 0, {MIXED})")
    list_twice(out, KEY_HEAD, ("i0", f"slot * {SHARE} + mixed + rows"), "for s0 in tl.range(0, slots, WIDTH):", look)
    for at, name in enumerate(("first", "last", "partial", "full")):
        out.line(f"tl.store(listed + {at}, {name})" if at else f"tl.store(listed, {name})")
    for n, number in enumerate((0, MIXED + 1)):
        out.line(f"tl.store(listed + {KEY_HEAD + n}, {number}, mask=partial + full == 0)", "" if n else "a tile of keys visits one tile of rows, if a hidden one: row 0 of slot 0")
    return kernel
