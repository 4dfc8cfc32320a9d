"""In which order the Hopper backward takes tiles of keys that begin where documents do (`documents`): those that most rows see first, so that short ones fill the gaps.

Not all of a batch index: neighbours read the same rows, which the L2 cache would lose over long texts. So each WINDOW tiles are ordered among themselves, counted from
the last, so that a launch ends with a whole window.
"""
from __future__ import annotations

from ...spec import BLOCK
from ..parts import Site, count, flatten
from ..writer import Writer
from .documents import KEY_HEAD, OWN, SLOTS

WINDOW = 128
"""Tiles: about as many as there are multiprocessors, and 16 MB of the rows of a head of 128."""
AT_ONCE = 16
"""Tiles that each is compared with at a time."""


def order_tiles(site: Site, out: Writer) -> None:
    """Of a kernel in front of the backward's: order[batch index of the mask, turn], which tile has that turn."""
    axes = site.spec.mask().axes
    out.assign("lines", f"tl.cdiv(N, {BLOCK}) * 2")
    out.assign("windows", f"tl.cdiv(lines, {WINDOW})")
    with out.block(f"for task in tl.range(tl.program_id(0), {count(axes)} * windows, tl.num_programs(0)):"):
        out.assign("own", "task // windows")
        out.assign("length", f"{KEY_HEAD} + tl.cdiv(M, {BLOCK}) * {2 * SLOTS}")
        out.assign("head", "KeyTiles + tl.cast(own, tl.int64) * (1 + lines) * length")
        out.assign("count", f"tl.load(head + {OWN})")
        out.assign("begin", f"count - (task % windows + 1) * {WINDOW}", "windows are counted from the last tile")
        out.assign("number", f"begin + tl.arange(0, {WINDOW})")
        _count_steps(out, "steps", "number")
        out.assign("turn", "tl.maximum(begin, 0) + number * 0")
        with out.block(f"for first in tl.range(begin, begin + {WINDOW}, {AT_ONCE}):"):
            out.assign("other", f"first + tl.arange(0, {AT_ONCE})")
            _count_steps(out, "others", "other")
            out.assign("is_earlier", "other[None, :] < number[:, None]")
            out.assign("goes_first", "(others[None, :] > steps[:, None]) | (others[None, :] == steps[:, None]) & is_earlier")
            out.assign("turn", "turn + tl.sum(goes_first.to(tl.int32), 1)")
        out.line("tl.store(Order + own * lines + turn, number, mask=number >= 0)")
        out.assign("beyond", f"number - begin + count + task % windows * {WINDOW}", "tiles that other batch indices have keep their places")
        out.line("tl.store(Order + own * lines + beyond, beyond, mask=beyond < lines)")


def _count_steps(out: Writer, name: str, tiles: str) -> None:
    """Assign how many tiles of rows see each of some tiles of keys; fewer than any do for those that there are not."""
    out.assign(f"{name}_at", f"head + tl.cast(1 + {tiles}, tl.int64) * length")
    partial, full = (f"tl.load({name}_at + {KEY_HEAD - n}, mask={tiles} >= 0, other=-1)" for n in (2, 1))
    out.assign(name, f"{partial} + {full}")


def tile_in_turn(site: Site, turn: str) -> str:
    """Text of the tile that has a turn. lists: lines of a batch index in key_tiles, of which one is in front of its tiles."""
    axes = site.spec.mask().axes
    return f"tl.load(Order + ({flatten(axes)}) * (lists - 1) + {turn})" if axes else f"tl.load(Order + {turn})"
