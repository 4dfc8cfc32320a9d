"""Of the Hopper forward: what becomes of a tile of query rows behind its last tile of keys."""
from __future__ import annotations

from ...spec import EmptyRow
from ..parts import LOG2E, Chunk, Site, local, tiles_name
from ..philox import kept_scale
from ..writer import Writer
from .ends import ended
from .hopper import ROWS, is_laden, position
from .hopper_locate import by_row_tiles, is_told, is_uneven
from .hopper_softmax import across_threads, is_bounded, speculates, weight_unit


def reads_again(site: Site) -> bool:
    """Does a warpgroup read again behind the loop where its tile is? That loop lacks registers for it."""
    return by_row_tiles(site) or is_told(site) and (site.spec.dropout > 0 or len(site.v_chunks) > 1 or site.Dv > 192 or speculates(site))


def end_of_rows(site: Site) -> str:
    """The end of a tile's rows."""
    return "row_end" if by_row_tiles(site) else "M"


def staged(site: Site) -> list[tuple[Chunk, str, str]]:
    """(piece of the output, its place in shared memory, which of them) for those that TMA stores: where q's was if that is as wide."""
    found = []
    for n, c in enumerate(site.v_chunks[:1] if stores_directly(site) else site.v_chunks):
        like = site.qk_chunks[n] if n < len(site.qk_chunks) else None
        apart = like is None or like.width != c.width
        found.append((c, f"out_tile{c.suffix}" if apart else f"q_tile{like.suffix}", "WARPGROUP" if apart else "own"))
    return found


def stores_directly(site: Site) -> bool:
    """Does a second piece of the output go to memory from registers? The assembler keeps from tile to tile what says where TMA is to store, though nothing reads
    it, and beside tables that end, lists and masks of data it has no registers for two. Without need it is 15 % slower to 7 % faster."""
    laden = site.listed or is_uneven(site) and is_laden(site.spec, max(site.D, site.Dv))
    return len(site.v_chunks) > 1 and (bool(ended(site)) or laden)


def finish(site: Site, out: Writer) -> None:
    spec = site.spec
    across_threads(site, out)
    scale = f"{kept_scale(spec.dropout) * weight_unit(site)!r}"
    if site.can_be_empty and spec.empty_row is not EmptyRow.NAN:
        out.assign("scale", f"tl.where(l == 0.0, 0.0, {scale} / l)", "rows that see no key are 0")
    else:
        out.assign("scale", f"{scale} / l")
    lse = "tl.log(l)" if is_bounded(site) else f"m * {1 / LOG2E if speculates(site) else site.factor!r} + tl.log(l)"
    M = "late(M, z)" if reads_again(site) else "M"  # its sign too would be kept from before all partitions
    out.line(f"tl.store(Lse + tl.cast(z, tl.int64) * {M} + i, {lse}, mask=i < {end_of_rows(site)})")
    for c in site.v_chunks:
        out.assign(f"acc{c.suffix}", f"acc{c.suffix} * gl.convert_layout(scale, gl.SliceLayout(1, values{c.suffix}))[:, None]")
    if not by_row_tiles(site):
        return _store(site, out)
    with out.block(f"if i0 + {ROWS} <= row_end:"):
        _store(site, out)
    with out.block("else:", "rows behind are another tile's"):
        for c in site.v_chunks:
            _store_directly(site, out, c)


def _store(site: Site, out: Writer) -> None:
    for c, tile, at in staged(site):
        out.line(f"{tile}.index({at}).reshape([{ROWS}, {c.width}]).store(acc{c.suffix}.to({tiles_name('Out', c)}.dtype))")
    out.line("fence_async_shared()")
    out.line("barrier()")
    for c, tile, at in staged(site):
        out.line(f"tma.async_copy_shared_to_global({tiles_name('Out', c)}, {position(site, 'Out', 'i0', c)}, {tile}.index({at}))")
    if stores_directly(site):
        _store_directly(site, out, site.v_chunks[1])


def _store_directly(site: Site, out: Writer, c: Chunk) -> None:
    """A piece of the output, four bytes at a time."""
    step = lambda axis, now: f"late(stride_o_{axis}, {now})" if reads_again(site) else f"stride_o_{axis}"
    rowwise, columnwise = (f"gl.SliceLayout({n}, values{c.suffix})" for n in (1, 0))
    out.assign("row", f"gl.convert_layout(i, {rowwise})[:, None]")
    out.assign("column", f"gl.arange(0, {c.width}, {columnwise})[None, :]")
    batch = "".join(f" + tl.cast({local(a)}, tl.int64) * {step(a, local(a))}" for a in site.spec.axes)
    out.assign("cells", f"Out{batch} + {c.start} + tl.cast(row, tl.int64) * {step('m', 'z')} + column")
    out.assign("cells", "tl.multiple_of(cells, [1, 16])", "bytes: rows of an output start at such")
    end = end_of_rows(site)
    inside = f"(row < {end}) & (column < {site.Dv - c.start})" if c.masked else f"row < {end}"
    out.line(f"tl.store(cells, acc{c.suffix}.to(Out.dtype.element_ty), mask={inside})")
