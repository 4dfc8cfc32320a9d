"""The kernel that summarises a mask: for each block of BLOCK queries and BLOCK keys whether none, some or all of it is visible.

It evaluates the mask itself on every element that it cannot decide sooner, so the summary is exact for any mask: a padding vector,
document ids, a dense tensor. One program per block and batch index of the mask (not of the heads), no products, nothing stored but
one number. Two scalar tests come first: the closed form of the range (`flashfx.codegen.ranges`), and for conditions between a value
of the query and a value of the key (`doc[b, i] == doc[b, j]`) the intervals of both over the block.
"""
from __future__ import annotations

from ...expr import INT, Call, Expr, Var, conjuncts, substitute
from ...spec import AttentionSpec
from ..parts import decode, extent
from ..program import Program, local, pointer, stride
from ..ranges import bounds
from ..writer import Kernel, Writer

ROWS = 32
"""Rows of a block evaluated at a time."""

EMPTY, PARTIAL, FULL = 0, 1, 2

LISTS = '''@triton.jit
def attention_lists(Kinds, Lists, stride_z, stride_line, stride_block, lines, count, WIDTH: tl.constexpr):
    """One program: one line of blocks as a list: how many are partial, how many full; then the partial, the full and the empty ones."""
    line = tl.program_id(0)
    kinds = Kinds + tl.cast(line // lines, tl.int64) * stride_z + line % lines * stride_line
    listed = Lists + tl.cast(line, tl.int64) * (count + 2)
    partial = line * 0
    full = line * 0
    for start in tl.range(0, count, WIDTH):
        block = start + tl.arange(0, WIDTH)
        kind = tl.load(kinds + block * stride_block, mask=block < count, other=0)
        partial += tl.sum((kind == 1).to(tl.int32), 0)
        full += tl.sum((kind == 2).to(tl.int32), 0)
    tl.store(listed, partial)
    tl.store(listed + 1, full)
    next_partial = line * 0 + 2
    next_full = 2 + partial
    next_empty = 2 + partial + full
    for start in tl.range(0, count, WIDTH):
        block = start + tl.arange(0, WIDTH)
        kind = tl.load(kinds + block * stride_block, mask=block < count, other=3)
        is_partial = (kind == 1).to(tl.int32)
        is_full = (kind == 2).to(tl.int32)
        is_empty = (kind == 0).to(tl.int32)
        tl.store(listed + next_partial + tl.cumsum(is_partial, 0) - 1, block, mask=kind == 1)
        tl.store(listed + next_full + tl.cumsum(is_full, 0) - 1, block, mask=kind == 2)
        tl.store(listed + next_empty + tl.cumsum(is_empty, 0) - 1, block, mask=kind == 0)
        next_partial += tl.sum(is_partial, 0)
        next_full += tl.sum(is_full, 0)
        next_empty += tl.sum(is_empty, 0)'''
"""The kernel that makes lists of the kinds; it runs along the rows or, with the strides exchanged, along the columns of blocks."""


def blocks_kernel(mask: AttentionSpec) -> Kernel:
    """kinds[*axes, row block, key block]: 0 where nothing is visible, 2 where everything is (all keys existing), else 1."""
    arguments = {"Kinds": "kinds"} | {pointer(a.name): local(a.name) for a in mask.aux}
    for a in mask.aux:
        arguments |= {stride(a.name, d): f"{local(a.name)}.stride({d})" for d in range(a.rank)}
    arguments |= {extent(axis): extent(axis) for axis in mask.axes} | {"M": "M", "N": "N"} | {local(s): local(s) for s in mask.sizes}
    kernel = Kernel("attention_blocks", "One program: what the mask leaves of one block of BLOCK rows and keys.", arguments, ("BLOCK", "ROWS"), "BLOCKS")
    out = kernel.body
    out.assign("columns", "tl.cdiv(N, BLOCK)")
    out.assign("j0", "tl.program_id(0) % columns * BLOCK")
    out.assign("first", "tl.program_id(0) // columns % tl.cdiv(M, BLOCK) * BLOCK")
    out.assign("z", "tl.program_id(0) // (columns * tl.cdiv(M, BLOCK))")
    decode(out, mask.axes, "z")
    out.assign("last", "tl.minimum(first + BLOCK, M)")
    out.assign("j", "j0 + tl.arange(0, BLOCK)")
    out.assign("some", "tl.program_id(0) * 0")
    out.assign("every", "some + 1")
    scalars = Program(mask, out, inner="i", columns="j")
    possible = _possible(mask, scalars, out)
    if possible:
        with out.block(f"if {' & '.join(possible)}:", "else nothing is visible"):
            _evaluate(mask, scalars, out)
    else:
        _evaluate(mask, scalars, out)
    out.line("tl.store(Kinds + tl.program_id(0), some + some * every * (j0 + BLOCK <= N).to(tl.int32))", "blocks that reach beyond the last key are partial")
    return kernel


def _evaluate(mask: AttentionSpec, scalars: Program, out: Writer) -> None:
    program = Program(mask, out.section(), inner="i", columns="j", beside=scalars)
    with out.block("for row in tl.range(first, last, ROWS):"):
        out.assign("i", "row + tl.arange(0, ROWS)")
        program.enter(out, [mask.visible])
        out.assign("visible", f"tl.broadcast_to({program.tile(mask.visible)}, ROWS, BLOCK)")
        out.assign("inside", "(i < M)[:, None] & (j < N)[None, :]")
        out.assign("some", "tl.maximum(some, tl.max(tl.max((visible & inside).to(tl.int32), 1), 0))")
        out.assign("every", "tl.minimum(every, tl.min(tl.min((visible | (inside == 0)).to(tl.int32), 1), 0))")


def _possible(mask: AttentionSpec, scalars: Program, out: Writer) -> list[str]:
    """Scalar conditions without which the block is empty."""
    found = bounds(mask.visible, "j")
    edges = [e for e in (found.lo, found.hi) if e.variables and e != Var("N")]
    if any(x in e.leaves for e in edges for x in (Var("i0"), Var("i1"))):
        out.assign("i0", "first")
        out.assign("i1", "last - 1")
    conditions = [f"(j0 + BLOCK > {scalars.value(found.lo)})" if e is found.lo else f"(j0 < {scalars.value(found.hi)})" for e in edges]
    pairs = [p for p in map(_separable, conjuncts(mask.visible)) if p is not None]
    if pairs:  # the last query or key repeats beyond the end, which no interval sees
        out.assign("block_rows", "tl.minimum(first + tl.arange(0, BLOCK), M - 1)")
        out.assign("block_keys", "tl.minimum(j0 + tl.arange(0, BLOCK), N - 1)")
    names = {Var("i"): Var("block_rows"), Var("j"): Var("block_keys")}
    for n, (op, row, key) in enumerate(pairs):
        rows, keys = (out.assign(f"{side}_{n}", scalars.value(substitute(e, names))) for side, e in (("rows", row), ("keys", key)))
        if op in ("eq", "le", "lt"):
            conditions.append(f"(tl.min({rows}, 0) {'<' if op == 'lt' else '<='} tl.max({keys}, 0))")
        if op in ("eq", "ge", "gt"):
            conditions.append(f"(tl.max({rows}, 0) {'>' if op == 'gt' else '>='} tl.min({keys}, 0))")
    return conditions


_MIRRORED = {"eq": "eq", "lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}


def _separable(e: Expr) -> tuple[str, Expr, Expr] | None:
    """(comparison, value of the row, value of the key) of `doc[b, i] == doc[b, j]` and its kind, if it reads a captured tensor."""
    if not isinstance(e, Call) or e.op not in _MIRRORED or not e.loads or any(a.kind != INT for a in e.args):
        return None
    a, b = e.args
    sides = [x.variables & {"i", "j"} for x in (a, b)]
    if sides == [{"i"}, {"j"}]:
        return e.op, a, b
    return (_MIRRORED[e.op], b, a) if sides == [{"j"}, {"i"}] else None
