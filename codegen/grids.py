"""The grids of kernels, as text of a host function."""
from __future__ import annotations

from .limits import WIDTHS
from .order import PORTABLE
from .parts import Site, count
from .writer import Writer


def grid_of(options: str, block: str, size: str, axes) -> str:
    """A program for each tile of `size` rows or keys of each batch index."""
    return f"(triton.cdiv({size}, {options}[{block!r}]) * {count(axes)},)"


def rows_of(site: Site, axes) -> str:
    """How many rows read the keys of a batch index of `axes`."""
    others = site.other_axes(axes)
    return f"M * {count(others)}" if others else "M"


def groups_of(site: Site, options: str, block: str, size: str, axes, streamed: str, out: Writer, parts: bool = False) -> str:
    """The grid of a kernel whose longest tiles of several batch indices start together (`forward.locate`). streamed: how many keys or rows of an index its
    programs read. parts: the second dimension is of the parts of the keys."""
    width = site.D * WIDTHS[site.dtype] + site.Dv * WIDTHS[site.v_dtype]
    tiles = f"triton.cdiv({size}, {options}[{block!r}])"
    out.line(f"together, tiles, groups = grouped({count(axes)}, {tiles}, {streamed} * {width} / 1024, {PORTABLE * site.programs})", "batch indices whose longest tiles start together")
    return f"(together * tiles, {'parts' if parts else 1}, groups)"
