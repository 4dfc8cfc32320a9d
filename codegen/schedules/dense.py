"""Gradients of captured tensors read at both i and j, without atomics: dense, one tile per program; of those read at j - i (relative position
tables), one tile for each diagonal of blocks, whose own diagonals the host adds up (`captured.joined`): O(N) memory instead of O(N^2)."""
from __future__ import annotations

from ...expr import Const, Load, Var
from .. import captured
from ..parts import Site, arguments, count, decode, flatten, head_index, load_tile
from ..program import Program
from ..writer import Kernel
from .common import Body, buffer, load_lse2, row_pointers, scaled


def dense_kernel(site: Site, load: Load) -> Kernel:
    """Gradient of a load over both i and j, summed over the batch axes on which it does not depend: a tile per program, or where j - i alone
    matters a diagonal of square tiles."""
    spec = site.spec
    mine = tuple(a for a in captured.dims_of(spec, load) if a not in ("i", "j"))
    others = site.other_axes(mine)
    name = buffer(site, load)
    relative = captured.is_relative(load)
    kernel = Kernel(f"attention_backward_{name[2:]}", f"One program: gradient of {load} for one {'diagonal of tiles' if relative else 'tile'}"
                    + (f", summed over ({', '.join(others)})." if others else "."),
                    arguments(site, {name: name}), ("BLOCK_M", "BLOCK_N"), "DENSE")
    out = kernel.body
    out.assign("tiles", "tl.cdiv(N, BLOCK_N)")
    if relative:
        out.assign("all_rows", "tl.cdiv(M, BLOCK_M)")
        out.assign("diagonal", "tl.program_id(0) % (tiles + all_rows - 1) - (all_rows - 1)", "tiles from a row of tiles to its keys")
        out.assign("y", "tl.program_id(0) // (tiles + all_rows - 1)")
        decode(out, mine, "y")
    else:
        out.assign("j0", "tl.program_id(0) % tiles * BLOCK_N")
        out.assign("i0", "tl.program_id(0) // tiles % tl.cdiv(M, BLOCK_M) * BLOCK_M")
        out.assign("y", "tl.program_id(0) // (tiles * tl.cdiv(M, BLOCK_M))")
        decode(out, mine, "y")
        out.assign("i1", "tl.minimum(i0 + BLOCK_M, M) - 1")
    out.assign("rows", "tl.arange(0, BLOCK_M)")
    out.assign("cols", "tl.arange(0, BLOCK_N)")
    if not relative:
        out.assign("i", "i0 + rows")
        out.assign("j", "j0 + cols")
    head_index(site, out, "de")
    if spec.dropout:
        out.assign("seed", "tl.load(Seed)")
    out.assign("dense", "tl.zeros([BLOCK_M, BLOCK_N], tl.float32)")

    def one() -> None:
        out.assign("z", "y" if not others else flatten(spec.axes))
        outer = out.section()
        program = Program(spec, outer, inner="")
        body = Body(site, program, transposed=False)
        row_pointers(out)
        load_lse2(site, out)
        out.assign("delta", "tl.load(delta_rows + i)")
        program.enter(out, [])
        found = site.by_rows
        conditions = []
        if found.lo != Const(0):
            conditions.append(f"(j0 + BLOCK_N > {program.value(found.lo)})")
        if found.hi != Var("N"):
            conditions.append(f"(j0 < {program.value(found.hi)})")
        if site.listed or spec.is_data_masked:  # far cheaper than the products that an empty tile spares
            program.enter(out, [spec.visible])
            out.assign("shown", f"tl.broadcast_to({program.tile(spec.visible)}, BLOCK_M, BLOCK_N)")
            conditions.append("(tl.max(tl.max(shown.to(tl.int32), 1), 0) > 0)")
        seen = " & ".join(conditions)
        if seen and site.averages:
            seen = f"({seen}) | (tl.max(mean, 0) > 0.0)"
        if seen:
            with out.block(f"if {seen}:", "the mask hides other tiles"):
                inside(program, body)
        else:
            inside(program, body)

    def inside(program: Program, body: Body) -> None:
        load_tile(site, out, "Q", "q", "(i < M)[:, None]", direct=True)
        load_tile(site, out, "K", "k", "(j < N)[:, None]", direct=True)
        rest, factor = scaled(site, load)
        body.weights(out, True, "", [rest])
        load_tile(site, out, "dO", "do", "(i < M)[:, None]", direct=True)
        load_tile(site, out, "V", "v", "(j < N)[:, None]", direct=True)
        if spec.dropout:
            body.keep(out)
        body.gradient(out, True)
        out.assign("dense", f"dense + {body.times(rest)}" + (f" * {factor!r}" if factor != 1.0 else ""))

    def shared() -> None:
        if others:
            with out.block(f"for g in tl.range(0, {count(others)}):"):
                decode(out, others, "g")
                one()
        else:
            one()

    if relative:
        with out.block("for row in tl.range(tl.maximum(0, -diagonal), tl.minimum(all_rows, tiles - diagonal)):"):
            out.assign("i0", "row * BLOCK_M")
            out.assign("j0", "(row + diagonal) * BLOCK_N")
            out.assign("i1", "tl.minimum(i0 + BLOCK_M, M) - 1")
            out.assign("i", "i0 + rows")
            out.assign("j", "j0 + cols")
            shared()
        out.assign("dense_rows", f"{name} + (tl.cast(tl.program_id(0), tl.int64) * BLOCK_M + rows) * BLOCK_N")
        out.line("tl.store(dense_rows[:, None] + cols[None, :], dense)")
        return kernel
    shared()
    out.assign("dense_rows", f"{name} + (tl.cast(y, tl.int64) * M + i) * N")
    out.line(f"tl.store(dense_rows[:, None] + j[None, :], dense.to({name}.dtype.element_ty), mask=(i < M)[:, None] & (j < N)[None, :])")
    return kernel
