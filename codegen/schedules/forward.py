"""FlashAttention-2's forward pass (Dao 2023, algorithm 1) as portable Triton: one program per tile of query rows.

Where there are too few tiles of rows to fill the card, as in decoding, the keys are split over several programs as in Flash-Decoding (Dao, Haziza, Massa
and Sizov 2023). Each takes its part of the tiles of every loop and leaves its running maximum, sum and accumulator; `schedules/combine.py` adds them up.
"""
from __future__ import annotations

from ...expr import QK, Expr, Var, walk
from ...spec import EmptyRow
from ..listed import loops as loops_over
from ..loops import Loop
from ..parts import LOG2E, Site, arguments, base, count, decode, flatten, head_index, load_tile, matrix, multiples, packed_rows, pieces, product
from ..philox import is_narrow, kept_scale, threshold
from ..program import Program
from ..reads import is_gathered
from ..torch_tiled import MEAN_ROW
from ..writer import Kernel, Writer
from .ends import ended, score

PARTIAL = {"PartMax": "part_max", "PartSum": "part_sum", "PartOut": "part_out"}
"""What the parts of the keys leave of each row: kernel argument -> host tensor, float32, (parts, *extents, M) and (parts, *extents, M, Dv)."""


def is_finite(e: Expr) -> bool:
    """Can the raw score not be -inf for finite operands? Then a row that has seen a full tile has a finite maximum."""
    return not e.loads and not any(getattr(x, "op", "") in ("log", "log2", "log1p", "truediv", "reciprocal") for x in walk(e))


def goes_in_groups(site: Site) -> bool:
    """Do the longest tiles of several batch indices start together?"""
    return site.by_rows.only_grows and not site.packed


def locate(out: Writer, name: str, longest: str, together: bool) -> None:
    """A program's batch index and tile. longest: the tiles that start first, those of the last "rows" or of the first "keys", "" if all are alike; those of several
    batch indices `together` (`order.grouped`), one group of them after the other."""
    tile = "tl.program_id(0) // together" if together else "tl.program_id(0) % tiles"
    if together:
        out.assign("together", "tl.num_programs(0) // tiles", "batch indices of a group")
    out.assign(name, "tl.program_id(2) * together + tl.program_id(0) % together" if together else "tl.program_id(0) // tiles")
    why = f"the {longest} of the longest tiles first: short programs fill the gaps" if longest else ""
    out.assign("tile", f"tiles - 1 - {tile}" if longest == "rows" else tile, why)


def forward_kernel(site: Site) -> Kernel:
    """out and log-sum-exp for a tile of BLOCK_M query rows of one batch index, or what a part of the keys adds to them."""
    spec, axes = site.spec, site.spec.axes
    what = f"({', '.join(axes)})" if axes else "0"
    keys = "a part of their keys" if site.parts else "all their keys"
    rows = f"BLOCK_M rows packed_row = ({', '.join(site.packed)}, i) of batch index z of the other axes" if site.packed else \
        f"rows i0 <= i < i0 + BLOCK_M of batch index z = {what}"
    kernel = Kernel("attention_forward", f"One program: {rows}, {keys}, one tile at a time.",
                    arguments(site, PARTIAL), ("BLOCK_M", "BLOCK_N"), "FORWARD", multiples(site, results=True))
    out = kernel.body
    out.assign("tiles", f"tl.cdiv(M * {count(site.packed)}, BLOCK_M)" if site.packed else "tl.cdiv(M, BLOCK_M)")
    locate(out, "z", "rows" if site.by_rows.grows and not site.packed else "", goes_in_groups(site))
    decode(out, site.other_axes(site.packed), "z")
    if site.parts:
        out.assign("part", "tl.program_id(1)")
    out.assign("i0", "0" if site.packed else "tile * BLOCK_M")
    if _mentions(site.by_rows, "i1"):
        out.assign("i1", "M - 1" if site.packed else "tl.minimum(i0 + BLOCK_M, M) - 1")
    out.assign("rows", "tl.arange(0, BLOCK_M)")
    out.assign("cols", "tl.arange(0, BLOCK_N)")
    if site.packed:
        out.assign("packed_row", "tile * BLOCK_M + rows", "of all heads that share these keys")
        decode(out, site.packed, "packed_row // M")
        out.assign("i", f"tl.where(packed_row < M * {count(site.packed)}, packed_row % M, M)")
    else:
        out.assign("i", "i0 + rows")
    head_index(site, out, "de")
    if QK in spec.score.leaves:
        load_tile(site, out, "Q", "q", "(i < M)[:, None]", packed=bool(site.packed), direct=site.float32)
        matrix(site, out, "K")
    matrix(site, out, "V")
    if spec.dropout:
        out.assign("seed", "tl.load(Seed)")
    hoisted = out.section()
    program = Program(spec, hoisted, inner="j", packed=site.packed)
    out.assign("m", 'tl.full([BLOCK_M], float("-inf"), tl.float32)', "running maximum of the scores")
    out.assign("l", "tl.zeros([BLOCK_M], tl.float32)", "running sum of exp(score - m)")
    for c in site.v_chunks:
        out.assign(f"acc{c.suffix}", f"tl.zeros([BLOCK_M, {c.width}], tl.float32)", "running sum of exp(score - m) * v" if not c.start else "")
    loops = loops_over(site, "j", padded=site.whole)
    loops.prepare(program, out)

    def over(loop: Loop, partial: bool, comment: str) -> None:
        loop = loop.of_part(out) if site.parts else loop
        with out.block(loop.head, comment):
            out.lines(*loop.lines)
            _tile(site, program, out, partial)

    kinds = [False] * loops.full + [True] * loops.partial
    for n, partial in enumerate(reversed(kinds) if loops.partial_first else kinds):
        if n and site.parts:
            out.assign("part", "tl.num_programs(1) - 1 - part", "the last parts had fewest tiles")
        if partial:
            over(loops.partial_loop(out), True, "tiles cut by the mask or by the end of the keys" if spec.is_masked else "the last, incomplete tile")
        else:
            over(loops.full_loop(), False, "tiles in which every row sees every key")
    if site.averages:
        _average(site, program, out)
    if site.parts:
        _leave(site, out)
    else:
        _finish(site, out)
    return kernel


def _mentions(found, name: str) -> bool:
    return any(Var(name) in e.leaves for e in (found.lo, found.hi, found.full_lo, found.full_hi))


def _tile(site: Site, program: Program, out: Writer, partial: bool) -> None:
    """The body of a loop over keys: scores, online softmax, weighted sum of values."""
    spec = site.spec
    c2 = site.factor * LOG2E
    out.assign("j", "j0 + cols")
    visible = spec.visible if partial and spec.is_masked else None
    beyond = partial and not site.whole
    program.enter(out, [site.raw, *([visible] if visible is not None else [])], () if beyond else "j")
    check = "(j < N)[:, None]" if beyond else ""
    if QK in spec.score.leaves:
        _read_exchanged(site, program)
        load_tile(site, out, "K", "k", check, looped=True)
        product(site, out, "qk", "q", "k", site.qk_chunks)
    raw = score(site, program, out, ("i0", "BLOCK_M"), ("j0", "BLOCK_N"))
    if program.dims(site.raw) != {"i", "j"}:
        raw = f"tl.broadcast_to({raw}, BLOCK_M, BLOCK_N)"
    if partial:
        seen = [*(["(j < N)[None, :]"] if beyond else []), *([program.tile(visible)] if visible is not None else [])]
        out.assign("raw", f'tl.where({" & ".join(seen)}, {raw}, float("-inf"))')
    elif raw != "raw":
        out.assign("raw", raw)
    out.assign("m_new", "tl.maximum(m, tl.max(raw, 1))")
    if partial or not is_finite(site.raw):
        out.assign("anchor", 'tl.where(m_new == float("-inf"), 0.0, m_new)', "rows that have seen no key yet: keep exp2(-inf - 0) = 0")
    else:
        out.assign("anchor", "m_new")
    out.assign("p", f"tl.exp2(raw * {c2!r} - (anchor * {c2!r})[:, None])", f"exp((raw - m) * {site.factor!r}) as a power of two: one FMA")
    out.assign("alpha", f"tl.exp2((m - anchor) * {c2!r})")
    out.assign("l", "l * alpha + tl.sum(p, 1)")
    add_values(site, out, check, "alpha")
    out.assign("m", "m_new")


def _read_exchanged(site: Site, program: Program) -> None:
    """Read captured tiles whose values come through registers in front of the scores' product. Of two layouts that meet in a score, Triton 3.6 and 3.7 take that of
    the later one for a row's maximum and sum: behind the product that of a load, where 32 threads hold a row, five exchanges for each. H200, a bias shared by
    16k tokens in windows of 49: 281 -> 134 microseconds at head size 64, 164 -> 109 at 128, 210 -> 181 at 32; of a bias at 128, N = 197, nothing spills (684 bytes before)."""
    if not site.float32:
        program.read_tiles(lambda load: load not in ended(site) and (not site.whole or is_gathered(load)))


def add_values(site: Site, out: Writer, check: str, alpha: str) -> None:
    if site.spec.dropout:
        out.assign("keep", f"keep_tile(seed, z, i0, j0, {threshold(site.spec.dropout)}, {is_narrow(site.spec.dropout)}, BLOCK_M, BLOCK_N)")
        out.assign("p", "tl.where(keep, p, 0.0)", "the sum l is of the weights before dropout")
    load_tile(site, out, "V", "v", check, looped=True)
    first = site.v_chunks[0]
    out.assign("weights", f"p.to(v{first.suffix}.dtype)")
    for c in site.v_chunks:
        acc = f"acc{c.suffix}"
        out.assign(acc, site.dot("weights", f"v{c.suffix}", f"{acc} * {alpha}[:, None]" if alpha else acc))


def _average(site: Site, program: Program, out: Writer) -> None:
    """Rows that see no key (of the part): sum and number of the values that they average."""
    spec = site.spec
    out.assign("empty", "(l == 0.0) & (i < M)")
    with out.block("if tl.max(empty.to(tl.int32)) > 0:", "rows that see no key average v"):
        loop = Loop("j0", "0", "N", "BLOCK_N", ahead=not site.in_flight)
        loop = loop.of_part(out) if site.parts else loop
        with out.block(loop.head):
            out.assign("j", "j0 + cols")
            program.enter(out, [spec.empty_over])
            over = program.tile(spec.empty_over)
            beyond = [] if site.whole else ["(j < N)[None, :]"]
            conditions = ["empty[:, None]", *beyond, *([over] if over != "True" else [])]
            out.assign("p", f"tl.broadcast_to(tl.where({' & '.join(conditions)}, 1.0, 0.0), BLOCK_M, BLOCK_N)")
            out.assign("l", "l + tl.sum(p, 1)")
            add_values(site, out, "" if site.whole else "(j < N)[:, None]", "")


def _leave(site: Site, out: Writer) -> None:
    """Store what the part adds. Of a row that it does not see, m is -inf; l and acc are 0, or what the row averages if no part sees it."""
    if site.packed:
        out.assign("row", f"(tl.cast(part, tl.int64) * ({count(site.spec.axes)}) + {flatten(site.spec.axes)}) * M + i")
    else:
        out.assign("row", "(tl.cast(part, tl.int64) * (tl.num_programs(0) // tiles) + z) * M + i")
    out.line("tl.store(PartMax + row, m, mask=i < M)")
    out.line("tl.store(PartSum + row, l, mask=i < M)")
    for c, index, check in pieces(site, "Out"):
        mask = " & ".join(["(i < M)[:, None]", *([check] if check else [])])
        out.line(f"tl.store(PartOut + row[:, None] * {site.Dv} + {index}[None, :], acc{c.suffix}, mask={mask})")


def normalisation(site: Site, out: Writer) -> None:
    """lse and scale, by which acc is out, from the maximum m and the sum l of a row; of rows that average, `empty`, l is the number of keys."""
    out.assign("lse", f"m * {site.factor!r} + tl.log(l)" if site.factor != 1.0 else "m + tl.log(l)")
    if site.averages:
        out.assign("lse", f"tl.where(empty, l * {MEAN_ROW!r}, lse)", "marks the row and holds the number of keys averaged")
    scale = f"{kept_scale(site.spec.dropout)!r}"
    if site.can_be_empty and site.spec.empty_row is EmptyRow.ZERO:
        out.assign("scale", f"tl.where(l == 0.0, 0.0, {scale} / l)", "rows that see no key are 0")
    else:
        out.assign("scale", f"{scale} / l")


def _finish(site: Site, out: Writer) -> None:
    normalisation(site, out)
    if site.packed:
        out.assign("out_tile", packed_rows(site, "Out"))
    else:
        out.assign("out_tile", f"{base(site, 'Out')} + tl.cast(i0, tl.int64) * stride_o_m")
    for c, index, check in pieces(site, "Out"):
        mask = " & ".join(["(i < M)[:, None]", *([check] if check else [])])
        offsets = "" if site.packed else "rows[:, None] * stride_o_m + "
        offsets += f"{index}[None, :] * stride_o_d"
        out.line(f"tl.store(out_tile + {offsets}, (acc{c.suffix} * scale[:, None]).to(Out.dtype.element_ty), mask={mask})")
    z = flatten(site.spec.axes) if site.packed else "z"
    out.line(f"tl.store(Lse + tl.cast({z}, tl.int64) * M + i, lse, mask=i < M)")
