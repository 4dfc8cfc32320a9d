"""Gradients of captured tensors read at both i and j, without atomics: dense, one tile per program (of those read at j - i: `relative.py`)."""
from __future__ import annotations

from ...expr import Const, Load, Var
from .. import captured
from ..parts import Site, arguments, count, decode, flatten, head_index, load_tile, multiples
from ..program import Program
from ..writer import Kernel, Writer
from .common import Body, buffer, decode_part, load_lse2, row_pointers, scaled


def dense_kernel(site: Site, load: Load) -> Kernel:
    """Gradient of a load over both i and j, summed over the batch axes on which it does not depend: a tile per program."""
    spec = site.spec
    mine = tuple(a for a in captured.dims_of(spec, load) if a not in ("i", "j"))
    others = site.other_axes(mine)
    name = buffer(site, load)
    kernel = Kernel(f"attention_backward_{name[2:]}", f"One program: gradient of {load} for one tile" + (f", summed over its part of ({', '.join(others)})." if others else "."),
                    arguments(site, {name: name}), ("BLOCK_M", "BLOCK_N"), "DENSE", multiples(site))
    out = kernel.body
    out.assign("tiles", "tl.cdiv(N, BLOCK_N)")
    out.assign("j0", "tl.program_id(0) % tiles * BLOCK_N")
    out.assign("i0", "tl.program_id(0) // tiles % tl.cdiv(M, BLOCK_M) * BLOCK_M")
    out.assign("slot", "tl.program_id(0) // (tiles * tl.cdiv(M, BLOCK_M))")
    if others:  # where few tiles would leave most of the card idle, several programs share each
        decode_part(out, mine, "tiles * tl.cdiv(M, BLOCK_M)")
    else:
        out.assign("y", "slot")
    decode(out, mine, "y")
    out.assign("i1", "tl.minimum(i0 + BLOCK_M, M) - 1")
    out.assign("rows", "tl.arange(0, BLOCK_M)")
    out.assign("cols", "tl.arange(0, BLOCK_N)")
    out.assign("i", "i0 + rows")
    out.assign("j", "j0 + cols")
    head_index(site, out, "de")
    if spec.dropout:
        out.assign("seed", "tl.load(Seed)")
    out.assign("dense", "tl.zeros([BLOCK_M, BLOCK_N], tl.float32)")
    if others:
        with out.block(f"for g in tl.range(part, {count(others)}, parts):"):
            decode(out, others, "g")
            out.assign("z", flatten(spec.axes))
            add_tile(site, out, load)
    else:
        out.assign("z", "y")
        add_tile(site, out, load)
    out.assign("dense_rows", f"{name} + (tl.cast(slot, tl.int64) * M + i) * N")
    out.line(f"tl.store(dense_rows[:, None] + j[None, :], dense.to({name}.dtype.element_ty), mask=(i < M)[:, None] & (j < N)[None, :])")
    return kernel


def add_tile(site: Site, out: Writer, load: Load, within: Load | None = None) -> None:
    """dense += the gradient of a load at the tile (i0, j0) of batch index z. within: as `ends.score`; then `shares` says which elements."""
    spec, outer = site.spec, out.section()
    program = Program(spec, outer, inner="")
    body = Body(site, program, transposed=False, within=within)
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
            _add(site, out, body, load)
    else:
        _add(site, out, body, load)


def _add(site: Site, out: Writer, body: Body, load: Load) -> None:
    load_tile(site, out, "Q", "q", "(i < M)[:, None]", direct=not site.float32)
    load_tile(site, out, "K", "k", "(j < N)[:, None]", direct=not site.float32)
    rest, factor = scaled(site, load)
    body.weights(out, True, "", [rest])
    load_tile(site, out, "dO", "do", "(i < M)[:, None]", direct=not site.float32)
    load_tile(site, out, "V", "v", "(j < N)[:, None]", direct=not site.float32)
    if site.spec.dropout:
        body.keep(out)
    body.gradient(out, True)
    share = f"tl.where(shares, {body.times(rest)}, 0.0)" if body.within else body.times(rest)
    out.assign("dense", f"dense + {share}" + (f" * {factor!r}" if factor != 1.0 else ""))
