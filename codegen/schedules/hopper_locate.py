"""Of the Hopper forward: which tile of query rows comes next."""
from __future__ import annotations

from typing import Sequence

from ...expr import Call, Const, Expr, Var, substitute
from ...spec import BLOCK, AttentionSpec
from ..captured import ends
from ..gluon import Partition
from ..order import KEYS_KIB, evened
from ..parts import Site, chunks, count, decode
from ..program import Program, local
from ..ranges import Bounds, bounds, linear
from .hopper import ROWS, is_crowded, is_laden, place_of, segments, takes_three
from .hopper_captured import assign_batch, outermost, shares
from .documents import takes


def by_host(spec: AttentionSpec, tiled: Sequence[str], head: int) -> bool:
    """Does the host work out what is made of sizes alone, for want of registers?"""
    three = takes_three(spec) and head < 64 and len(chunks(head)) > 1  # warpgroups, of 160 registers a thread
    return is_crowded(spec, head) or three or bool(outermost(spec, tiled, spec.axes))


def is_by_host(site: Site) -> bool:
    """As `by_host`."""
    return by_host(site.spec, site.tiled, max(site.D, site.Dv))


def visits_together(spec: AttentionSpec, tiled: Sequence[str]) -> bool:
    """Are batch indices visited together (`order.row_groups`)?"""
    return bounds(spec.visible, "j").grows or shares(spec, tiled, spec.axes)


def _key_bytes(site: Site) -> int:
    return 2 * sum(c.width for c in (*site.qk_chunks, *site.v_chunks))


def _programs_to_even(site: Site) -> int:
    """Programs among which long and short tiles of rows are to even out; 0 where all tiles are as long."""
    return site.programs if site.by_rows.grows else 0


def worked_out(site: Site) -> dict[str, str]:
    """Arguments that the host works out: all that is made of sizes. last: the number of the last tile of rows."""
    if not is_by_host(site):
        return {}
    tiles, all = "triton.cdiv(M, FORWARD['BLOCK_M'])", count(site.spec.axes)
    groups = f"row_groups({all}, {tiles}, N * {_key_bytes(site)} / 1024, {_programs_to_even(site)})"
    together = {"all": all, "group": f"triton.cdiv({all}, {groups})"} if visits_together(site.spec, site.tiled) else {}
    return {"tiles": tiles, "last": f"{tiles} * {all} - 1"} | together


def takes_row_tiles(spec: AttentionSpec, tiled: Sequence[str], head: int, listed: bool) -> bool:
    """Do tiles of rows begin where documents do (`documents`)?"""
    return listed and takes(spec) and not by_host(spec, tiled, head)


def takes_key_tiles(spec: AttentionSpec, tiled: Sequence[str], head: int, listed: bool, stored: bool = False) -> bool:
    """And tiles of keys of the Hopper backward? stored: it stores a captured tensor's gradient as it goes, and that, like sums beyond a table's ends, has fixed places."""
    return takes_row_tiles(spec, tiled, head, listed) and not stored and not any(map(ends, spec.score.loads))


def by_row_tiles(site: Site) -> bool:
    """As `takes_row_tiles`."""
    return takes_row_tiles(site.spec, site.tiled, max(site.D, site.Dv), site.listed)


def tiles_of_rows(site: Site) -> str:
    """How many tiles of rows a batch index has; at most, where the data say where they begin."""
    return "tl.load(RowTiles)" if by_row_tiles(site) else "tl.cdiv(M, BLOCK_M)"


def locate_rows(site: Site) -> tuple[Partition, list[str], str]:
    """The function that says where a tile is, the names of what it returns, and the condition of a partial tile of keys."""
    spec, axes, ends = site.spec, site.spec.axes, site.by_rows
    function = Partition("locate", "A tile of query rows by number: batch index, first row, and the tiles of keys that its rows see.")
    out = function.body
    if not is_by_host(site):
        out.assign("tiles", tiles_of_rows(site))
    if visits_together(site.spec, site.tiled):
        if not is_by_host(site):
            out.assign("all", count(axes))
            (most, even), fitting = evened(_programs_to_even(site)), f"tl.cdiv(all * tl.cdiv(N * {_key_bytes(site)}, 1024), {KEYS_KIB})"
            balanced = f"tl.cdiv(all, tl.minimum({most}, tl.cdiv({even}, tiles)))" if even else "all"
            out.assign("groups", f"tl.minimum({fitting}, {balanced})", "of batch indices: see flashfx.codegen.order.row_groups")
            out.assign("group", "tl.cdiv(all, groups)")
        out.assign("first", "number // (group * tiles) * group")
        out.assign("size", "tl.minimum(group, all - first)")
        out.assign("rest", "number % (group * tiles)")
        assign_batch(site, out, axes, "z", "first + rest % size")
        if ends.grows:
            tiles = "late(tiles, number)" if is_by_host(site) else "tiles"
            number, why = f"({tiles} - 1 - rest // size)", "the rows with most keys first: short ones fill the gaps"
        else:
            number, why = "rest // size", ""
    else:
        out.assign("z", "number // tiles")
        number, why = "number % tiles", ""
    first = "row_tile" if by_row_tiles(site) else "i0"
    out.assign(first, number if by_row_tiles(site) else f"{number} * BLOCK_M", why)
    decode(out, axes, "z")
    if site.listed:
        return function, ["z", *(local(a) for a in axes), first], "t < partial_tiles"
    if any(Var("i1") in e.leaves for e in (ends.lo, ends.hi, ends.full_lo, ends.full_hi)):
        out.assign("i1", "tl.minimum(i0 + BLOCK_M, M) - 1")
    program = Program(spec, out.section(), inner="j")
    partial = segments(ends, program, out, "j", "BLOCK_N", "N", site.hides_beyond, site.can_be_empty)
    out.assign("count", "tl.cdiv(stop - start, BLOCK_N)")
    extra = [name for name in ("full_start", "full_stop") if name in partial]
    return function, ["z", *(local(a) for a in axes), "i0", "start", *extra, "count"], partial


def is_uneven(site: Site) -> bool:
    """Do tiles of rows differ in the number of keys that they see? Then a program takes the next tile when it is done with one."""
    return site.listed or not site.by_rows.is_total


def is_told(site: Site) -> bool:
    """Does the warp that copies tell the others where a tile is? It is ahead of them, and what they make of arguments alone the assembler keeps in registers of
    every partition."""
    return is_uneven(site) and (site.listed or tells(site.spec, max(site.D, site.Dv)))


def tells(spec: AttentionSpec, head: int) -> bool:
    """As `is_told`, of tiles that no list names. Beside tables that end registers are too few for numbers that nothing can work out again."""
    return is_laden(spec, head) or not any(map(ends, spec.score.loads))


def told_of(site: Site, returns: list[str]) -> list[str]:
    """The numbers that are told of a tile, the first at least 0: all that `locate_rows` returns but a start that is 0 for every tile; or
    the tile's own."""
    if not is_told(site):
        return ["number"]
    if by_row_tiles(site):  # what the list says of the tile
        return [*returns[:-1], "i0", "row_end"]
    return [name for name in returns if name != "start" or site.by_rows.lo != Const(0)]


def told_at(site: Site, returns: list[str], name: str) -> str:
    """Where one of them lies in shared memory: a ring, and a place there."""
    names = told_of(site, returns)
    return f"told_ring, {place_of('q_slot', names, name)}"


def narrows(site: Site) -> bool:
    """Does a warpgroup go past tiles of keys that only the others' rows see? Under a causal mask of 192 rows two tiles of 128 keys or three are cut
    by it, one for each warpgroup. H200, head size 64, causal, forward: N = 1024 7 % faster, 4096 6 %, 16384 3 %. Likewise of 128 rows two tiles of 64 keys: H100,
    192, N = 512, 1024, 4096 2, 2, 1 %, 128 under a soft cap 6, 5, 3; beside positions in a table that ends registers are short."""
    apart = site.warpgroups == 3 or site.warpgroups == 2 and site.columns == ROWS and not any(map(ends, site.spec.score.loads))
    return apart and not site.listed and not is_by_host(site) and not site.by_rows.is_total


def adds_position(score: Expr) -> bool:
    """Is a score computed from the key's position, and not only read there (ALiBi)?"""
    return score == Var("j") or isinstance(score, Call) and any(map(adds_position, score.args))


def cuts_last(found: Bounds, rows: int, columns: int) -> bool:
    """Of tiles of `columns` keys that some of `rows` rows see, the first of them a multiple of `rows`, do all rows see all but the last in full, and something of that?"""
    alike = substitute(found.hi, {Var("i1"): Var("i0")}) == found.full_hi
    return found.starts_full and alike and columns % rows == 0 and BLOCK % columns == 0 and _ends_with_rows(found.hi)


def _ends_with_rows(hi: Expr) -> bool:
    """Do rows of a tile see keys up to their own, or up to what is the same for all of them? Then the keys that some of a tile's rows see and some do not are
    as many as those rows at most, behind a multiple of as many."""
    if isinstance(hi, Call) and hi.op in ("minimum", "maximum"):
        return all(map(_ends_with_rows, hi.args))
    terms, constant = linear(hi)
    return not {"i0", "i1"} & hi.variables or terms == {Var("i1"): 1} and (constant - 1) % BLOCK == 0


def locate_own(site: Site) -> tuple[Partition, list[str], list[str]]:
    """The function that says which of a tile's keys a warpgroup's rows see, what it takes beside the kernel's names, and the names of what it returns."""
    ends = site.by_rows
    function = Partition("locate_own", "Of a tile's keys those that the rows of one warpgroup see: its first and last tile, and where a mask cuts them.")
    out = function.body
    out.assign("i1", f"tl.minimum(i0 + {ROWS}, M) - 1")
    partial = segments(ends, Program(site.spec, out.section(), inner="j"), out, "j", "BLOCK_N", "N", site.hides_beyond, site.can_be_empty)
    out.assign("first", "tl.maximum(0, tl.minimum(start - begin, (count - 1) * BLOCK_N)) // BLOCK_N")
    out.assign("last", "tl.maximum(first + 1, tl.minimum(count, tl.cdiv(stop - begin, BLOCK_N)))")
    axes = [local(a) for a in site.spec.axes if any(Var(a) in e.leaves for e in (ends.lo, ends.hi, ends.full_lo, ends.full_hi))]
    return function, ["i0", "begin", "count", *axes], ["first", "last", *(name for name in ("full_start", "full_stop") if name in partial)]
