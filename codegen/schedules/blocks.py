"""The kernel that summarises a mask: for each block of FINE queries and BLOCK keys whether none, some or all of it is visible.

It evaluates the mask itself on every element that it cannot decide sooner, so the summary is exact for any mask: a padding vector,
document ids, a dense tensor. One program per BLOCK queries and keys and batch index of the mask (not of the heads), no products, nothing
stored but two numbers. Two scalar tests come first: the closed form of the range (`flashfx.codegen.ranges`), and for conditions between a value
of the query and a value of the key (`doc[b, i] == doc[b, j]`) the intervals of both over the block.
"""
from __future__ import annotations

import contextlib

from ...expr import INT, Call, Expr, Var, conjuncts, substitute
from ...spec import BLOCK, FINE, AttentionSpec
from ..parts import decode, extent
from ..program import Program, local, pointer, stride
from ..ranges import bounds
from ..reads import averages
from ..writer import Kernel, Writer

ROWS = 16
"""Rows of a block evaluated at a time."""
SHARE = 2 * FINE * BLOCK
"""A number above that of a block's elements: two counts in one."""

EMPTY, PARTIAL, FULL = 0, 1, 2

LISTS = '''@triton.jit
def kinds_at(kinds, block, count, stride_block, second, beyond):
    """Kinds of some blocks of a line, `beyond` where it has ended. second: where the line's second half is, 0 if it has none."""
    kind = tl.load(kinds + block * stride_block, mask=block < count, other=beyond)
    other = tl.load(kinds + second + block * stride_block, mask=block < count, other=beyond)
    return tl.where(kind == other, kind, 1)


@triton.jit
def attention_lists(Kinds, Lists, stride_z, stride_line, stride_block, lines, count, halves, stride_half, WIDTH: tl.constexpr):
    """One program: one line of blocks as a list: how many are partial, how many full; then the partial, the full and the empty ones.

    Where a line has two halves, 2 * line and 2 * line + 1 of so many `halves`, a block is what both have in common; stride_half is 0 where it has one.
    """
    line = tl.program_id(0)
    kinds = Kinds + tl.cast(line // lines, tl.int64) * stride_z + line % lines * stride_line
    second = tl.where(line % lines * 2 + 1 < halves, stride_half, 0)
    listed = Lists + tl.cast(line, tl.int64) * (count + 2)
    partial = line * 0
    full = line * 0
    for start in tl.range(0, count, WIDTH):
        block = start + tl.arange(0, WIDTH)
        kind = kinds_at(kinds, block, count, stride_block, second, 0)
        partial += tl.sum((kind == 1).to(tl.int32), 0)
        full += tl.sum((kind == 2).to(tl.int32), 0)
    tl.store(listed, partial)
    tl.store(listed + 1, full)
    next_partial = line * 0 + 2
    next_full = 2 + partial
    next_empty = 2 + partial + full
    for start in tl.range(0, count, WIDTH):
        block = start + tl.arange(0, WIDTH)
        kind = kinds_at(kinds, block, count, stride_block, second, 3)
        is_partial = (kind == 1).to(tl.int32)
        is_full = (kind == 2).to(tl.int32)
        is_empty = (kind == 0).to(tl.int32)
        tl.store(listed + next_partial + tl.cumsum(is_partial, 0) - 1, block, mask=kind == 1)
        tl.store(listed + next_full + tl.cumsum(is_full, 0) - 1, block, mask=kind == 2)
        tl.store(listed + next_empty + tl.cumsum(is_empty, 0) - 1, block, mask=kind == 0)
        next_partial += tl.sum(is_partial, 0)
        next_full += tl.sum(is_full, 0)
        next_empty += tl.sum(is_empty, 0)'''
"""The kernel that makes lists of the kinds; it runs along pairs of rows or, with the strides exchanged, along the columns of blocks."""


def arguments(mask: AttentionSpec, results: dict[str, str]) -> dict[str, str]:
    """Arguments of a kernel that looks at a mask alone, behind what it writes."""
    found = results | {pointer(a.name): local(a.name) for a in mask.aux}
    for a in mask.aux:
        found |= {stride(a.name, d): f"{local(a.name)}.stride({d})" for d in range(a.rank)}
    return found | {extent(axis): extent(axis) for axis in mask.axes} | {"M": "M", "N": "N"} | {local(s): local(s) for s in mask.sizes}


def blocks_kernel(mask: AttentionSpec) -> Kernel:
    """kinds[*axes, row block, key block]: 0 where nothing is visible, 2 where everything is (all keys existing), else 1. Where empty rows average v, seen[*axes, row]:
    1 if the row sees some key, else as it was."""
    kernel = Kernel("attention_blocks", "One program: what the mask leaves of two blocks of FINE rows and BLOCK keys.",
                    arguments(mask, {"Kinds": "kinds", "Seen": "seen"}), ("BLOCK", "FINE", "ROWS"), "BLOCKS")
    out = kernel.body
    out.assign("columns", "tl.cdiv(N, BLOCK)")
    out.assign("j0", "tl.program_id(0) % columns * BLOCK")
    out.assign("first", "tl.program_id(0) // columns % tl.cdiv(M, BLOCK) * BLOCK")
    out.assign("z", "tl.program_id(0) // (columns * tl.cdiv(M, BLOCK))")
    decode(out, mask.axes, "z")
    out.assign("last", "tl.minimum(first + BLOCK, M)")
    out.assign("j", "j0 + tl.arange(0, BLOCK)")
    out.assign("own", "tl.minimum(last - first, FINE)", "rows of the first block")
    out.assign("rest", "last - first - own")
    out.assign("seen", "tl.program_id(0) * 0", f"visible elements of the first block, and of the second times {SHARE}")
    if averages(mask):
        out.assign("seen_rows", "Seen + tl.cast(z, tl.int64) * (tl.cdiv(M, FINE) * FINE)", "of each row: does it see a key?")
    scalars = Program(mask, out, inner="i", columns="j")
    edges, decided = _edges(mask, scalars, out)
    pairs = [p for p in map(separable, conjuncts(mask.visible)) if p is not None]
    with _if(out, edges, "else nothing is visible"):
        possible, certain = _intervals(pairs, scalars, out)
        with _if(out, possible, "else no value of the rows is one of the keys" if pairs else ""):
            whole = len(decided) + len(pairs) == len(conjuncts(mask.visible))
            if whole:
                out.assign("certain", " & ".join(["(j0 + BLOCK <= N)", *(x for found in decided for x in found), *certain]), "all of it is visible")
            with _if(out, ["certain == 0"] if whole else [], ""):
                _evaluate(mask, scalars, out)
            if whole:
                out.assign("seen", f"tl.where(certain, (own + rest * {SHARE}) * BLOCK, seen)")
                if averages(mask):
                    out.assign("every_row", "first + tl.arange(0, BLOCK)")
                    out.line("tl.store(seen_rows + every_row, 1, mask=(every_row < last) & (certain != 0))")
    out.assign("place", "(z * tl.cdiv(M, FINE) + first // FINE) * columns + tl.program_id(0) % columns")
    for at, seen, rows, there in (("", f"seen % {SHARE}", "own", ""), (" + columns", f"seen // {SHARE}", "rest", ", mask=rest > 0")):
        out.line(f"tl.store(Kinds + place{at}, tl.where({seen} == {rows} * BLOCK, 2, tl.minimum({seen}, 1)){there})",
                 "" if at else "blocks that reach beyond the last key are partial")
    return kernel


@contextlib.contextmanager
def _if(out: Writer, conditions: list[str], comment: str):
    if not conditions:
        yield
        return
    with out.block(f"if {' & '.join(conditions)}:", comment):
        yield


def _evaluate(mask: AttentionSpec, scalars: Program, out: Writer) -> None:
    program = Program(mask, out.section(), inner="i", columns="j", beside=scalars)
    out.assign("count", "tl.zeros([ROWS, BLOCK], tl.int32)")
    with out.block("for row in tl.range(first, last, ROWS):"):
        out.assign("i", "row + tl.arange(0, ROWS)")
        program.enter(out, [mask.visible])
        out.assign("visible", f"{program.tile(mask.visible)} & (i < M)[:, None] & (j < N)[None, :]")
        out.assign("count", f"count + visible.to(tl.int32) * tl.where(row < first + FINE, 1, {SHARE})")
        if averages(mask):
            out.line("tl.store(seen_rows + i, 1, mask=tl.max(visible.to(tl.int32), 1) > 0)")
    out.assign("seen", "tl.sum(count)")


def _edges(mask: AttentionSpec, scalars: Program, out: Writer) -> tuple[list[str], list[list[str]]]:
    """Scalar conditions by the closed form: those without which the block is empty, and of each conjunct that has one those with which it holds everywhere."""
    found = bounds(mask.visible, "j")
    edges = [e for e in (found.lo, found.hi) if e.variables and e != Var("N")]
    closed = [bounds(c, "j") for c in conjuncts(mask.visible) if not c.loads]
    inner = [(f.full_lo, f.full_hi) for f in closed if f.has_full]
    if any(x in e.leaves for e in (*edges, *(e for ends in inner for e in ends)) for x in (Var("i0"), Var("i1"))):
        out.assign("i0", "first")
        out.assign("i1", "last - 1")
    empty = [f"(j0 + BLOCK > {scalars.value(found.lo)})" if e is found.lo else f"(j0 < {scalars.value(found.hi)})" for e in edges]
    return empty, [[f"(j0 >= {scalars.value(lo)})", f"(j0 + BLOCK <= {scalars.value(hi)})"] for lo, hi in inner]


def _intervals(pairs: list[tuple[str, Expr, Expr]], scalars: Program, out: Writer) -> tuple[list[str], list[str]]:
    """Scalar conditions by the intervals of both sides of each pair: those without which the block is empty, and those with which they hold everywhere."""
    if pairs:  # the last query or key repeats beyond the end, which no interval sees
        out.assign("block_rows", "tl.minimum(first + tl.arange(0, BLOCK), M - 1)")
        out.assign("block_keys", "tl.minimum(j0 + tl.arange(0, BLOCK), N - 1)")
    names = {Var("i"): Var("block_rows"), Var("j"): Var("block_keys")}
    possible, certain = [], []
    for n, (op, row, key) in enumerate(pairs):
        for side, e in (("row", row), ("key", key)):
            values = scalars.value(substitute(e, names))
            for end in ("min", "max"):
                out.assign(f"{end}_{side}_{n}", f"tl.{end}({values}, 0)")
        possible += possible_where(op, n)
        certain += certain_where(op, n)
    return possible, certain


SIGNS = {"eq": ("<=", ">="), "lt": ("<",), "le": ("<=",), "gt": (">",), "ge": (">=",)}


def possible_where(op: str, n: int, key: str = "key") -> list[str]:
    """Conditions on the intervals of pair `n` without which it holds nowhere. key: what the interval of keys is called."""
    ends = {"<": ("min", "max"), ">": ("max", "min")}
    return [f"({ends[sign[0]][0]}_row_{n} {sign} {ends[sign[0]][1]}_{key}_{n})" for sign in SIGNS[op]]


def certain_where(op: str, n: int) -> list[str]:
    """Conditions on the intervals of pair `n` under which it holds everywhere."""
    ends = {"<": ("max", "min"), ">": ("min", "max")}
    return [f"({ends[sign[0]][0]}_row_{n} {sign} {ends[sign[0]][1]}_key_{n})" for sign in SIGNS[op]]


_MIRRORED = {"eq": "eq", "lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}


def separable(e: Expr) -> tuple[str, Expr, Expr] | None:
    """(comparison, value of the row, value of the key) of `doc[b, i] == doc[b, j]` and its kind, if it reads a captured tensor."""
    if not isinstance(e, Call) or e.op not in _MIRRORED or not e.loads or any(a.kind != INT for a in e.args):
        return None
    a, b = e.args
    sides = [x.variables & {"i", "j"} for x in (a, b)]
    if sides == [{"i"}, {"j"}]:
        return e.op, a, b
    return (_MIRRORED[e.op], b, a) if sides == [{"j"}, {"i"}] else None
