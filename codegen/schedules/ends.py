"""Scores of tiles that lie beyond the ends of a relative position table: where positions are clamped, rel[h, minimum(maximum(j - i + M - 1, lo), hi)], all
elements of a tile far from the diagonal have the same one, and one number is read for them."""
from __future__ import annotations

from ...expr import QK, Call, Const, Expr, Load
from ..captured import Line, at, ends, line_of
from ..parts import Site
from ..program import Program, pointer, stride
from ..writer import Writer

Span = tuple[str, str | int]
"""First row or key of a tile, and how many there are, as text."""


def ended(site: Site) -> list[Load]:
    """Loads of the score whose positions end."""
    found = [load for load in site.raw.loads if ends(load)]
    return found if QK in site.raw.leaves else []


def classify(site: Site, program: Program, out: Writer, rows: Span, keys: Span, near: bool = False) -> Program:
    """Assign for each load of `ended`: low_0, high_0, does the tile lie beyond an end, and end_0, what is read there. near: all of it here, where otherwise
    what loops do not change is kept in registers. Returns what knows the ends."""
    (i0, m), (j0, n) = rows, keys
    own = program.here(out) if near else program
    for number, load in enumerate(ended(site)):
        line = line_of(load)
        first, last, offset = (own.value(e) for e in (line.first, line.last, line.offset))
        low = out.assign(f"low_{number}", f"{j0} + {n} - 1 - {i0} + {offset} <= {first}")
        out.assign(f"high_{number}", f"{j0} - {i0} - {m} + 1 + {offset} >= {last}")
        if near:
            out.assign(f"end_{number}", f"tl.load({_address(own, load, line, f'tl.where({low}, {first}, {last})')}).to(tl.float32)")
        else:
            values = (own.value(at(load, line.dim, line.first)), own.value(at(load, line.dim, line.last)))
            out.assign(f"end_{number}", f"tl.where({low}, {', '.join(values)})")
    return own


def score(site: Site, program: Program, out: Writer, rows: Span, keys: Span, within: Load | None = None) -> str:
    """Text of the raw scores of a tile in the portable schedule. within: a table beyond whose ends no tile lies.

    The branch chooses a tile of the table and not of scores: Triton 3.6 fails to pipeline products that are read in a branch. On scalar units there is none:
    Triton would work out P again behind it for each layout, in that of a product's operand too, where a thread holds whole rows.
    """
    loads = [load for load in ended(site) if load != within and not site.float32]
    if loads:
        classify(site, program, out, rows, keys)
        shape = f"[{rows[1]}, {keys[1]}]" if program.columns == "j" else f"[{keys[1]}, {rows[1]}]"
    for load in loads:
        number = ended(site).index(load)
        with out.block(f"if low_{number} | high_{number}:", "beyond the ends of a table one number serves all of the tile"):
            out.assign(f"table_{number}", f"tl.full({shape}, end_{number}, tl.float32)")
        with program.branch(), out.block("else:"):
            out.assign(f"table_{number}", program.value(load))
        program.body.names[load] = f"table_{number}"
    return program.tile(site.raw)


def warpgroup_score(site: Site, program: Program, out: Writer, rows: Span, keys: Span) -> str:
    """The same in the Hopper forward, where a tile of numbers that are all the same would take registers."""
    if not ended(site):
        return program.tile(site.raw)
    classify(site, program, out, rows, keys)
    _beyond(site, program, out)
    with program.branch(), out.block("else:"):
        if not site.whole or site.spec.is_masked:  # else registers do without, and clamps take 3 % of the pass
            _read_clamped(program, program, ended(site), out)
        out.assign("raw", program.tile(site.raw))
    program.body.names[site.raw] = "raw"
    return "raw"


def _read_clamped(program: Program, own: Program, tables: list[Load], out: Writer) -> None:
    """Let the program read elements of tables at positions that occur, so that no row and no key beyond the end is asked for. own: what works them out."""
    for number, load in enumerate(tables):
        line = line_of(load)
        program.body.names[load] = out.assign(f"table_{number}", f"tl.load({_address(own, load, line, _place(own, line))}).to(tl.float32)")


def _place(program: Program, line: Line) -> str:
    """Of the tile's elements in a table, as text: beyond the last row or key, of the one that is nearest."""
    first, last = (line.lowest, line.highest) if line.first is None else (line.first, line.last)
    return f"tl.minimum(tl.maximum({program.value(line.place)}, {program.value(first)}), {program.value(last)})"


def _beyond(site: Site, program: Program, out: Writer) -> None:
    loads = ended(site)
    condition = " & ".join(f"(low_{number} | high_{number})" for number in range(len(loads)))
    with program.branch(), out.block(f"if {condition}:", "beyond the ends of a table one number serves all of the tile"):
        program.body.names |= {load: f"end_{number}" for number, load in enumerate(loads)}
        out.assign("raw", program.tile(site.raw))


# ------------------------------------------------------------------------------------------------ where registers run out

def tight_score(site: Site, program: Program, out: Writer, height: str | int, width: str, halves: bool | None) -> str:
    """The same in the Hopper backward, of a tile of height x width that `classify` has looked at: nothing is kept for the tiles between the ends.
    halves: is a table without ends read by halves too? None: nor one with ends, for two warpgroups share the columns and their tiles are small."""
    if not ended(site):
        tables = [load for load in site.raw.loads if line_of(load)] if halves else []
        if len(tables) != 1 or not read_by_halves(site, program, out, tables, height, width):
            _read_clamped(program, program.here(out), tables, out)
            return program.tile(site.raw)
        program.body.names[site.raw] = "raw"
        return "raw"
    _beyond(site, program, out)
    with program.branch(), out.block("else:"):
        if halves is None or not read_by_halves(site, program, out, ended(site), height, width):
            _read_clamped(program, program.here(out), ended(site), out)
            out.assign("raw", program.tile(site.raw))
    program.body.names[site.raw] = "raw"
    return "raw"


def read_by_halves(site: Site, program: Program, out: Writer, tables: list[Load], height: str | int, width: str) -> bool:
    """Assign the raw scores, a table read in two halves of a tile, each added as soon as it is there; if they are a sum with a table."""
    parts = _apart(site.raw, tables)
    if parts is None:
        return False
    rest, load, added = parts
    line, own = line_of(load), program.here(out)
    out.assign("raw", program.tile(rest))
    halves = f".reshape([{height}, 2, {width} // 2]).permute((0, 2, 1))"
    out.assign("place", _address(own, load, line, _place(own, line)))
    out.assign("place_0, place_1", f"tl.split(place{halves})")
    out.assign("raw_0, raw_1", f"tl.split(raw{halves})")
    for half in range(2):
        own.body.names[load] = f"tl.load(place_{half}).to(tl.float32)"
        out.assign(f"raw_{half}", f"raw_{half} + {own.value(added)}")
    out.assign("raw", f"gl.convert_layout(tl.join(raw_0, raw_1).permute((0, 2, 1)).reshape([{height}, {width}]), scores)")
    return True


def _apart(raw: Expr, loads: list[Load]) -> tuple[Expr, Load, Expr] | None:
    """before -> after: qk * 0.125 + rel[…] * 2.0 -> (qk * 0.125, rel[…], rel[…] * 2.0)"""
    if not isinstance(raw, Call) or raw.op != "add" or len(loads) != 1:
        return None
    for rest, added in (raw.args, raw.args[::-1]):
        parts = [leaf for leaf in _leaves(added) if not isinstance(leaf, Const)]
        if set(parts) == {*loads} and loads[0] not in rest.leaves and QK in rest.leaves:
            return rest, loads[0], added
    return None


def _leaves(e: Expr) -> list[Expr]:
    """Without those of positions."""
    return [leaf for a in e.args for leaf in _leaves(a)] if isinstance(e, Call) else [e]


def _address(program: Program, load: Load, line: Line, place: str) -> str:
    """Of a load's element at a place of its line."""
    fixed = [program.offset(load.name, d, a) for d, a in enumerate(load.index) if d != line.dim]
    return " + ".join([pointer(load.name), *fixed, f"{place} * {stride(load.name, line.dim)}"])
