"""Behind the Hopper forward: rows that average v are repaired."""
from __future__ import annotations

from ..parts import Site, arguments, base, decode, head_index, matrix, pieces
from ..philox import kept_scale
from ..program import Program
from ..torch_tiled import MEAN_ROW
from ..writer import Kernel
from .forward import _add_values


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
        program = Program(spec, out.section(), inner="j")
        out.assign("l", "tl.zeros([BLOCK_M], tl.float32)")
        for c in site.v_chunks:
            out.assign(f"acc{c.suffix}", f"tl.zeros([BLOCK_M, {c.width}], tl.float32)")
        with out.block("for j0 in tl.range(0, N, BLOCK_N):"):
            out.assign("j", "j0 + cols")
            program.enter(out, [spec.empty_over])
            over = program.tile(spec.empty_over)
            conditions = ["empty[:, None]", "(j < N)[None, :]", *([over] if over != "True" else [])]
            out.assign("p", f"tl.broadcast_to(tl.where({' & '.join(conditions)}, 1.0, 0.0), BLOCK_M, BLOCK_N)")
            out.assign("l", "l + tl.sum(p, 1)")
            _add_values(site, out, "(j < N)[:, None]", "")
        out.line(f"tl.store(Lse + tl.cast(z, tl.int64) * M + i, l * {MEAN_ROW!r}, mask=empty)", "marks the row and holds the number of keys averaged")
        out.assign("scale", f"{kept_scale(spec.dropout)!r} / l")
        out.assign("out_tile", f"{base(site, 'Out')} + tl.cast(i0, tl.int64) * stride_o_m")
        for c, index, check in pieces(site, "Out"):
            mask = " & ".join(["empty[:, None]", *([check] if check else [])])
            offsets = f"rows[:, None] * stride_o_m + {index}[None, :] * stride_o_d"
            out.line(f"tl.store(out_tile + {offsets}, (acc{c.suffix} * scale[:, None]).to(Out.dtype.element_ty), mask={mask})")
    return kernel
