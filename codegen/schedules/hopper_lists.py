"""Of the Hopper schedules: tiles that a mask's run-time summary lists (`flashfx.codegen.blocks`)."""
from __future__ import annotations

from ...spec import BLOCK, FINE
from ..parts import Site, flatten
from ..writer import Writer
from .hopper_locate import by_row_tiles
from .tile_order import tile_in_turn
from .documents import HEAD, KEY_HEAD, MIXED, SHARE, SLOTS


def list_arguments(site: Site, x: str) -> dict[str, str]:
    """Arguments that the host works out: how many lists a batch index has, and how long they are."""
    if x == "j" and by_row_tiles(site):
        return {"lists": f"triton.cdiv(M, {BLOCK}) * 2", "list_length": f"triton.cdiv(N, {BLOCK}) + {HEAD}"}
    if x == "i" and site.documents:
        return {"lists": f"triton.cdiv(N, {BLOCK}) * 2 + 1", "list_length": f"triton.cdiv(M, {BLOCK}) * {2 * SLOTS} + {KEY_HEAD}"}
    own, length, wide = ("M", "N", BLOCK) if x == "j" else ("N", "M", FINE)
    return {"lists": f"triton.cdiv({own}, {BLOCK})", "list_length": f"triton.cdiv({length}, {wide}) + 2"} if site.listed else {}


def listed_tiles(site: Site, out: Writer, x: str) -> str:
    """`segments` for a mask with a run-time summary (`flashfx.codegen.blocks`): assign the list `blocks`, count and partial_tiles; those
    cut by the mask come first."""
    own, lists, block, wide = ("i", "RowBlocks", "BLOCK_N", BLOCK) if x == "j" else ("j", "KeyBlocks", "BLOCK_M", FINE)
    axes = site.spec.mask().axes
    if x == "i" and site.documents:  # `rows_of_keys` has them
        return "(t < partial_tiles)"
    if by_row_tiles(site) and x == "j":
        row = f"({flatten(axes)}) * lists + row_tile + 1" if axes else "row_tile + 1"
        out.assign("blocks", f"RowTiles + tl.cast({row}, tl.int64) * list_length", "a tile of rows: see `documents.HEAD`")
        for n, name in enumerate(("i0", "row_end", "begin")):
            out.assign(name, f"tl.load(blocks + {n})")
        out.assign("blocks", f"blocks + {HEAD - 2}")
    else:
        row = f"({flatten(axes)}) * lists + {own}0 // {BLOCK}" if axes else f"{own}0 // {BLOCK}"
        out.assign("blocks", f"{lists} + tl.cast({row}, tl.int64) * list_length", "numbers of blocks cut by the mask and fully visible, then the blocks")
    out.assign("partial_tiles", f"tl.load(blocks) * ({wide} // {block})")
    out.assign("count", f"partial_tiles + tl.load(blocks + 1) * ({wide} // {block})")
    out.assign("partial_tiles", "tl.where(count == 0, 1, partial_tiles)")
    out.assign("count", "tl.maximum(count, 1)", "at least one tile, if a hidden one")
    return "(t < partial_tiles)"


def rows_of_keys(site: Site, out: Writer) -> list[str]:
    """As `listed_tiles`, of a tile of keys that begins where a document does, and where it begins and ends; returns the names."""
    axes = site.spec.mask().axes
    out.assign("next_tile", tile_in_turn(site, f"tile // ({BLOCK} // BLOCK_N)"))
    row = f"({flatten(axes)}) * lists + next_tile + 1" if axes else "next_tile + 1"
    out.assign("blocks", f"KeyTiles + tl.cast({row}, tl.int64) * list_length", "a tile of keys: see `documents.KEY_HEAD`")
    out.assign("j0", f"tl.load(blocks) + tile % ({BLOCK} // BLOCK_N) * BLOCK_N")
    out.assign("key_end", "tl.minimum(tl.load(blocks + 1), j0 + BLOCK_N)")
    out.assign("partial_tiles", f"tl.load(blocks + {KEY_HEAD - 2})")
    out.assign("count", f"partial_tiles + tl.load(blocks + {KEY_HEAD - 1})")
    out.assign("is_hidden", "(count == 0) | (j0 >= key_end)", "by the end of the keys: it visits one tile of rows")
    out.assign("partial_tiles", "tl.where(is_hidden, 1, partial_tiles)")
    out.assign("count", "tl.where(is_hidden, 1, count)")
    return ["blocks", "j0", "key_end", "partial_tiles", "count"]


def row_start(out: Writer, t: str) -> None:
    """Where tile of rows number t of such a list begins and ends."""
    out.assign("i0", f"tl.load(blocks + ({KEY_HEAD} + 2 * {t}))")
    out.assign("listed", f"tl.load(blocks + ({KEY_HEAD + 1} + 2 * {t}))")
    out.assign("row_end", f"i0 + listed % {MIXED}")


def row_place(out: Writer) -> None:
    """Its first row in the sum of dQ."""
    out.assign("sum0", f"listed // {SHARE} * {FINE}")


def tile_start(site: Site, x: str, t: str) -> str:
    """Where tile number t begins."""
    block, wide = ("BLOCK_N", BLOCK) if x == "j" else ("BLOCK_M", FINE)
    if not site.listed:
        return f"start + {t} * {block}"
    split = f"({wide} // {block})"
    begin = "begin + " if x == "j" and by_row_tiles(site) else ""
    return f"{begin}tl.load(blocks + (2 + {t} // {split})) * {wide} + {t} % {split} * {block}"
