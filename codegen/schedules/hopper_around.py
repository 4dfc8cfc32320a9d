"""Behind the Hopper forward: rows that average v are repaired."""
from __future__ import annotations

from ...spec import AttentionSpec
from ..loops import AT_ONCE
from ..parts import Site, arguments, base, decode, head_index, load_tile, matrix, pieces
from ..philox import kept_scale
from ..program import Program
from ..torch_tiled import MEAN_ROW
from ..writer import Kernel, Writer
from .forward import add_values


def is_shared(spec: AttentionSpec) -> bool:
    """Do all rows of a head that see no key average the same values?"""
    return not spec.dropout and "i" not in spec.empty_over.variables


def options(spec: AttentionSpec) -> dict[str, int]:
    """Tile and launch options: one sum needs no accumulator for each row."""
    return {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 4} if is_shared(spec) else {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 4, "num_stages": 1}


def empty_rows_kernel(site: Site) -> Kernel:
    """After the forward kernel: rows that see no key get the mean of v over the keys of `empty_over`, and their mark in the log-sum-exp.

    Which rows they are is known only when all keys were read, too late for the warp that copies tiles; few programs find one.
    """
    spec = site.spec
    kernel = Kernel("attention_empty_rows", "One program: those of the rows i0 <= i < i0 + BLOCK_M that see no key average v.",
                    arguments(site, {}), ("BLOCK_M", "BLOCK_N"), "EMPTY_ROWS")
    out = kernel.body
    out.assign("tiles", "tl.cdiv(M, BLOCK_M)")
    out.assign("z", "tl.program_id(0) // tiles")
    decode(out, spec.axes, "z")
    out.assign("i0", "tl.program_id(0) % tiles * BLOCK_M")
    out.assign("rows", "tl.arange(0, BLOCK_M)")
    out.assign("cols", "tl.arange(0, BLOCK_N)")
    out.assign("i", "i0 + rows")
    out.assign("lse", "tl.load(Lse + tl.cast(z, tl.int64) * M + i, mask=i < M, other=0.0)")
    out.assign("empty", 'lse == float("-inf")')
    with out.block("if tl.max(empty.to(tl.int32)) > 0:"):
        head_index(site, out, "e")
        if spec.dropout:
            out.assign("seed", "tl.load(Seed)")
        matrix(site, out, "V")
        (_one_sum if is_shared(spec) else _sums)(site, Program(spec, out.section(), inner="j"), out)
        out.line(f"tl.store(Lse + tl.cast(z, tl.int64) * M + i, l * {MEAN_ROW!r}, mask=empty)", "marks the row and holds the number of keys averaged")
        out.assign("scale", f"{kept_scale(spec.dropout)!r} / l")
        out.assign("out_tile", f"{base(site, 'Out')} + tl.cast(i0, tl.int64) * stride_o_m")
        for c, index, check in pieces(site, "Out"):
            mask = " & ".join(["empty[:, None]", *([check] if check else [])])
            offsets = f"rows[:, None] * stride_o_m + {index}[None, :] * stride_o_d"
            out.line(f"tl.store(out_tile + {offsets}, (acc{c.suffix} * scale[:, None]).to(Out.dtype.element_ty), mask={mask})")
    return kernel


def _sums(site: Site, program: Program, out: Writer) -> None:
    """Number l and sum acc of the values that each row averages, as a product with weights of 1."""
    out.assign("l", "tl.zeros([BLOCK_M], tl.float32)")
    for c in site.v_chunks:
        out.assign(f"acc{c.suffix}", f"tl.zeros([BLOCK_M, {c.width}], tl.float32)")
    with out.block(f"for j0 in tl.range(0, N, BLOCK_N, {AT_ONCE}):"):
        conditions = " & ".join(["empty[:, None]", *_averaged(site, program, out)])
        out.assign("p", f"tl.broadcast_to(tl.where({conditions}, 1.0, 0.0), BLOCK_M, BLOCK_N)")
        out.assign("l", "l + tl.sum(p, 1)")
        add_values(site, out, "(j < N)[:, None]", "")


def _one_sum(site: Site, program: Program, out: Writer) -> None:
    """The same where all rows share them: a partial sum for each key of a tile, added up behind the loop."""
    out.assign("l", "tl.zeros([1], tl.float32)")
    for c in site.v_chunks:
        out.assign(f"sums{c.suffix}", f"tl.zeros([BLOCK_N, {c.width}], tl.float32)")
    with out.block("for j0 in tl.range(0, N, BLOCK_N):"):
        out.assign("p", f"tl.broadcast_to(tl.where({' & '.join(_averaged(site, program, out))}, 1.0, 0.0), 1, BLOCK_N)")
        out.assign("l", "l + tl.sum(p, 1)")
        load_tile(site, out, "V", "v", "(j < N)[:, None]", looped=True)
        for c in site.v_chunks:
            out.assign(f"sums{c.suffix}", f"sums{c.suffix} + tl.trans(p) * v{c.suffix}.to(tl.float32)")
    for c in site.v_chunks:
        out.assign(f"acc{c.suffix}", f"tl.sum(sums{c.suffix}, 0)[None, :]")


def _averaged(site: Site, program: Program, out: Writer) -> list[str]:
    """What must hold of an element of a tile of keys that rows average."""
    spec = site.spec
    out.assign("j", "j0 + cols")
    program.enter(out, [spec.empty_over])
    over = program.tile(spec.empty_over)
    return ["(j < N)[None, :]", *([over] if over != "True" else [])]
