"""Of the Hopper forward: what its one warp reads for the warpgroups beside tiles, through rings in shared memory. Where tiles come from a list,
how many there are and where each begins; and captured vectors that the mask reads at the row or at the key alone, document ids say.

Read by the warpgroups themselves they would come from global memory between two matrix products, one load behind the other.
"""
from __future__ import annotations

import functools

from ...expr import BOOL, FLOAT, Const, Expr, Load, Var, conjuncts
from ...spec import AttentionSpec
from ..parts import Site
from ..program import Program, pointer
from ..ranges import Bounds, bounds
from ..writer import Writer
from ..captured import ends
from .blocks import certain_where, separable
from .hopper_locate import by_row_tiles

MOST = 6
"""Vectors that get a ring, 8 bytes an element at most; warpgroups load the others themselves."""
PLACES = "(STAGES + 1)"
"""Of a ring beside the keys: a warpgroup still looks at its place when it has left that of the keys, but not when it leaves those of the next tile."""


@functools.lru_cache(maxsize=1024)
def vectors(spec: AttentionSpec, index: str) -> tuple[Load, ...]:
    """Loads of the mask at "i" or "j" alone."""
    found = [load for load in spec.visible.loads if len(load.variables & {"i", "j"}) == 1][:MOST]
    return tuple(load for load in found if index in load.variables)


def vector_bytes(spec: AttentionSpec, m: int, n: int, stages: int) -> int:
    """Shared memory of the rings, at most."""
    return 8 * (2 * m * len(vectors(spec, "i")) + (stages + 1) * n * len(vectors(spec, "j")))


def _ring(site: Site, load: Load) -> str:
    return f"{'row' if 'i' in load.variables else 'key'}_ring_{vectors(site.spec, 'i' if 'i' in load.variables else 'j').index(load)}"


def by_hand(site: Site) -> bool:
    """Does something come beside the keys that no TMA copies?"""
    return site.listed or bool(vectors(site.spec, "j")) or shares_words(site.spec, max(site.D, site.Dv))


WORDS = "words_ring_0", "words_ring_1"
NUMBERS = "next_count", "next_partial", "start_ring", "cut_ring"
"""Rings of one number each, the others of vectors."""


@functools.lru_cache(maxsize=1024)
def shares_words(spec: AttentionSpec, head: int) -> bool:
    """Does the one warp work out what of dropout's random bits belongs to the keys alone? Of the products for a tile it is a quarter. H200, N = 4096, 16384: head size 64
    2 and 4 % faster; 32 1 to 2 % slower; 128 does not gain though nobody worked it out."""
    return spec.dropout > 0 and 32 < head <= 64 and not any(map(ends, spec.score.loads))


def _reserve(out: Writer, name: str, dtype: str, places: str | int, *sizes: str | int) -> None:
    """A ring of tensors of these sizes, in memory with the first dimension innermost."""
    shape = ", ".join(map(str, (places, *sizes)))
    out.assign(name, f"gl.allocate_shared_memory({dtype}, [{shape}], gl.SwizzledSharedLayout(1, 1, 1, {[*range(len(sizes))]}))")


def reserve_vectors(site: Site, out: Writer) -> None:
    if site.listed:
        for name in ("next_count", "next_partial"):
            _reserve(out, name, "gl.int32", site.q_tiles, 1)
        _reserve(out, "start_ring", "gl.int32", "STAGES + 1", 1)
    if shares_words(site.spec, max(site.D, site.Dv)):
        for name in WORDS:
            _reserve(out, name, "gl.int64", "STAGES + 1", 2, "BLOCK_N // 8")  # by bit 4 of the key first: no two of the eight words that a warp reads at once share a bank
    if compared(site.spec):
        _reserve(out, "cut_ring", "gl.int32", "STAGES + 1", 1)
    kinds = {FLOAT: "gl.float32", BOOL: "gl.int32"}
    for index, places, size in (("i", site.q_tiles, "BLOCK_M"), ("j", "STAGES + 1", "BLOCK_N")):
        for load in vectors(site.spec, index):
            _reserve(out, _ring(site, load), kinds.get(load.kind, f"{pointer(load.name)}.dtype.element_ty"), places, size)


# ------------------------------------------------------------------------------------------------- masks of two kinds

def groups(spec: AttentionSpec, index: str) -> tuple[list[Expr], list[Expr]]:
    """The mask's conjuncts whose range over `index` has a closed form, and the others. Where there are both, each is evaluated only in tiles that it
    cuts: in those of a packed batch the mask costs as much as the softmax."""
    closed = [c for c in conjuncts(spec.visible) if not c.loads and bounds(c, index).has_full]
    return closed, [c for c in conjuncts(spec.visible) if c not in closed]


def last_of_tile(site: Site, out: Writer, index: str, end: str) -> None:
    """Assign i1 or j1, the tile's last row or key, if `cut` needs it. end: what is behind it."""
    name = "i1" if index == "j" else "j1"
    if all(groups(site.spec, index)) and any(Var(name) in e.leaves for f in _closed(site.spec, index) for e in (f.full_lo, f.full_hi)):
        out.assign(name, f"{end} - 1")


def _closed(spec: AttentionSpec, index: str) -> list[Bounds]:
    return [bounds(c, index) for c in groups(spec, index)[0]]


def cut(site: Site, program: Program, index: str, padded: bool) -> str:
    """The condition under which conjuncts of closed form cut the tile. padded: none reaches beyond the end, or it does no harm."""
    block, size = ("BLOCK_N", "N") if index == "j" else ("BLOCK_M", "M")
    found = [] if padded else [f"({index}0 + {block} > {size})"]
    for f in _closed(site.spec, index):
        found += [f"({index}0 < {program.value(f.full_lo)})"] * (f.full_lo != Const(0))
        found += [f"({index}0 + {block} > {program.value(f.full_hi)})"] * (f.full_hi != Var(size))
    return " | ".join(dict.fromkeys(found))


def compared(spec: AttentionSpec) -> list[tuple[str, Expr, Expr]]:
    """What `separable` says of the other conjuncts, if it does of all: the one warp tells where they hold in a whole tile."""
    closed, others = groups(spec, "j")
    found = [separable(c) for c in others] if closed else []
    known = {*vectors(spec, "i"), *vectors(spec, "j")}
    return found if None not in found and all({*e.loads} <= known for _, *sides in found for e in sides) else []


def hidden_by_data(site: Site, program: Program) -> tuple[list[str], list[str]]:
    """Conditions of what the others leave visible in a tile with is_cut: those that do, equalities of low words alone, and the equalities that is_cut > 1
    asks for besides. Document ids are 64 bits wide, and differ in the low ones."""
    low, whole = [], []
    for conjunct, (op, row, key) in zip(groups(site.spec, "j")[1], compared(site.spec)):
        if op == "eq":
            words = [program.spread(f"{program.value(e)}.to(tl.int32)", frozenset(x)) for e, x in ((row, "i"), (key, "j"))]
            low.append(f"({' == '.join(words)})")
            whole.append(program.tile(conjunct))
        else:
            low.append(program.tile(conjunct))
    return low, whole


# -------------------------------------------------------------------------------------------------------- the one warp

def _values(site: Site, program: Program, index: str) -> dict[str, str]:
    return {_ring(site, load): program.value(load) + ".to(tl.int32)" * (load.kind == BOOL) for load in vectors(site.spec, index)}


def read_rows(site: Site, out: Writer) -> tuple[dict[str, str], Program]:
    """Ring -> value, of what belongs to a tile of rows; and the program that reads what belongs to its tiles of keys."""
    found = {"next_count": "count", "next_partial": "partial_tiles"} if site.listed else {}
    if vectors(site.spec, "i"):
        rows = "i0 + gl.arange(0, BLOCK_M, gl.BlockedLayout([BLOCK_M // 32], [32], [1], [0]))"
        out.assign("i", f"tl.minimum({rows}, row_end - 1)" if by_row_tiles(site) else rows)  # those of another tile would count as cut by the mask
    rows = Program(site.spec, out.section(), inner="j")
    found |= _values(site, rows, "i")
    for n, (op, row, _) in enumerate(compared(site.spec)):
        value = rows.value(row)
        if op == "eq":
            out.assign(f"one_row_{n}", f"tl.max({value}, 0)")
            out.assign(f"cut_row_{n}", f"apart({value}, one_row_{n})")
        else:
            for end in ("min", "max"):
                out.assign(f"{end}_row_{n}", f"tl.{end}({value}, 0)")
    return found, Program(site.spec, out.section(), inner="j", beside=rows)


def read_keys(site: Site, program: Program, out: Writer) -> dict[str, str]:
    """Ring -> value, of what belongs to a tile of keys."""
    if vectors(site.spec, "j"):
        out.assign("j", "j0 + gl.arange(0, BLOCK_N, gl.BlockedLayout([BLOCK_N // 32], [32], [1], [0]))")
    program.enter(out, vectors(site.spec, "j"), "j" if site.whole else "")
    found = ({"start_ring": "j0"} if site.listed else {}) | _values(site, program, "j")
    told = ""
    for n, (op, _, key) in enumerate(compared(site.spec)):
        value = program.value(key)
        if op == "eq":
            text = f"tl.maximum(apart({value}, one_row_{n}), cut_row_{n})"
        else:
            ends = {f"{end}_key_{n}": f"tl.{end}({value}, 0)" for end in ("min", "max")}
            holds = [text.replace(name, end) for text in certain_where(op, n) for name, end in ends.items() if name in text]
            text = f"1 - ({' & '.join(holds)}).to(tl.int32)"
        told = f"tl.maximum({told}, {text})" if told else text
    if shares_words(site.spec, max(site.D, site.Dv)):
        out.assign(", ".join(WORDS).replace("ring", "tile"), "key_words(seed, z, j0, BLOCK_N)")
        found |= {name: name.replace("ring", "tile") for name in WORDS}
    return found | ({"cut_ring": told} if told else {})


def store(out: Writer, ring: str, place: str, value: str) -> None:
    """Into a ring what `read_rows` or `read_keys` found."""
    out.line(f"tell({ring}, {place}, {value})" if ring in NUMBERS else f"{ring}.index({place}).store({value})")


# ------------------------------------------------------------------------------------------------------ the warpgroups

def _text(ring: str, load: Load) -> str:
    return f"({ring} != 0)" if load.kind == BOOL else ring


def rows_from_rings(site: Site, program: Program, out: Writer, rows: int) -> None:
    """Behind the barrier of the query rows: assign the list's numbers, and let the program read row vectors, `rows` of them a warpgroup."""
    if site.listed:
        for name, ring in (("count", "next_count"), ("partial_tiles", "next_partial")):
            out.assign(name, f"number_at({ring}, q_slot, 4)")
    for n, load in enumerate(vectors(site.spec, "i")):
        name = out.assign(f"row_vector_{n}", f"{_ring(site, load)}.index(q_slot).slice(WARPGROUP * {rows}, {rows}).load(rowwise)")
        program.outer.names[load] = _text(name, load)


def keys_from_rings(site: Site, program: Program, out: Writer) -> None:
    """Behind the barrier of the keys: assign where the tile begins, and let the body just entered read key vectors where it names them."""
    if by_hand(site):
        out.assign("place", f"tile % {PLACES}")
    if site.listed:
        out.assign("j0", "number_at(start_ring, place, 4)")
    if compared(site.spec):
        out.assign("is_cut", "number_at(cut_ring, place, 4)")
    for load in vectors(site.spec, "j"):
        program.body.names[load] = _text(f"{_ring(site, load)}.index(place).load(keywise)", load)
