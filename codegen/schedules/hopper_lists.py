"""Of the Hopper schedules: tiles that a mask's run-time summary lists (`flashfx.codegen.blocks`)."""
from __future__ import annotations

from ...spec import BLOCK, FINE
from ..parts import Site, flatten
from ..writer import Writer
from .hopper_locate import by_row_tiles
from .row_tiles import HEAD


def list_arguments(site: Site, x: str) -> dict[str, str]:
    """Arguments that the host works out: how many lists a batch index has, and how long they are."""
    if x == "j" and by_row_tiles(site):
        return {"lists": f"triton.cdiv(M, {BLOCK}) * 2", "list_length": f"triton.cdiv(N, {BLOCK}) + {HEAD}"}
    own, length, wide = ("M", "N", BLOCK) if x == "j" else ("N", "M", FINE)
    return {"lists": f"triton.cdiv({own}, {BLOCK})", "list_length": f"triton.cdiv({length}, {wide}) + 2"} if site.listed else {}


def listed_tiles(site: Site, out: Writer, x: str) -> str:
    """`segments` for a mask with a run-time summary (`flashfx.codegen.blocks`): assign the list `blocks`, count and partial_tiles; those
    cut by the mask come first."""
    own, lists, block, wide = ("i", "RowBlocks", "BLOCK_N", BLOCK) if x == "j" else ("j", "KeyBlocks", "BLOCK_M", FINE)
    axes = site.spec.mask().axes
    if by_row_tiles(site) and x == "j":
        row = f"({flatten(axes)}) * lists + row_tile + 1" if axes else "row_tile + 1"
        out.assign("blocks", f"RowTiles + tl.cast({row}, tl.int64) * list_length", "a tile of rows: see `row_tiles.HEAD`")
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


def tile_start(site: Site, x: str, t: str) -> str:
    """Where tile number t begins."""
    block, wide = ("BLOCK_N", BLOCK) if x == "j" else ("BLOCK_M", FINE)
    if not site.listed:
        return f"start + {t} * {block}"
    split = f"({wide} // {block})"
    begin = "begin + " if x == "j" and by_row_tiles(site) else ""
    return f"{begin}tl.load(blocks + (2 + {t} // {split})) * {wide} + {t} % {split} * {block}"
