"""Of the Hopper backward: the weights of a tile from its products, and the gradient of its scores."""
from __future__ import annotations

from contextlib import nullcontext

from ...expr import QK, Call, Const, Expr, Load, walk
from ...spec import EmptyRow
from ..captured import ends
from ..parts import LOG2E, Site, tiles_name
from ..philox import kept_scale, threshold
from ..reads import across
from ..within import hidden_outside
from ..writer import Writer
from .common import Body, has_slopes, scaled
from .ends import tight_score
from .hopper_captured import doubles, is_signed, left_out, tile_loads
from .hopper import THIRD, compares
from .hopper_keys import is_full, is_split, is_tight, is_wide, number, sees_ends_late
from .hopper_producer import from_ring, rows_from_rings
from .hopper_vectors import cut, groups, last_of_tile
from .relative import add_ends, beyond_ends


def fills_registers(site: Site) -> bool:
    """Does the score need a tile of registers beside the accumulators of a large head, for elements read across rows and keys or for its derivative? Or do an order, or
    tiles that begin with documents, need some?"""
    beside = site.ordered or site.documents
    return not (is_split(site) or is_wide(site)) and (beside or bool(across(site.spec, False)) or has_slopes(site))


def unknown_zero(site: Site, number: str) -> str:
    """Place 0 in shared memory from a number that the warp that copies tells, which is not negative; "" where registers are left. Of a place that the
    assembler knows it works out every address ahead of the loops, and each takes a register throughout."""
    return f"{number} >> 31" if fills_registers(site) else ""


def by_halves(site: Site) -> bool:
    """Are weights and slopes worked out in one half of a tile after the other? The assembler keeps that order, else all of the exponentials are there
    before the first slope. They are where a slope is of the score alone."""
    crowded = site.thirds or (fills_registers(site) or is_full(site)) and not is_wide(site)
    return crowded and has_slopes(site) and _is_of(scaled(site, QK)[0], site.raw)


def reads_rows_ahead(site: Site) -> bool:
    """Do two warpgroups that drift apart read log-sum-exp before they wait for the scores, delta before they wait for dP, and behind the scores what is told of the rows, for which they would
    wait between the instructions of dP? A read of shared memory that the products keep busy takes up to 400 cycles, and it takes 16 registers to have it early.

    H200, N = 4k, 16k, % faster: head size 64 full 6, 5 (32: 8), a soft cap 4, 2, dropout 2, 2, captured tiles 2 to 4, causal -1, 0, a window -2, documents -6, ALiBi -5, a padding vector 0, sinks -1.
    """
    spec = site.spec
    if not is_split(site):
        return False
    if spec.loads:
        return {*spec.loads} == {*tile_loads(site)} & {*spec.score.loads} and not (spec.dropout or has_slopes(site))
    return not spec.is_masked or spec.dropout > 0 or has_slopes(site)


def reads_lse_first(site: Site) -> bool:
    """Do two warpgroups that hold the keys together read log-sum-exp ahead of both products? Behind them it would take longer than where it is named: 1 to 4 %.

    H200, N = 4k, 16k, % faster: head size 128 full 1, 1, causal 1, 0, a window -2, dropout -1; 96 full 0, causal -2. Delta early too: 1 % slower.
    """
    return not (is_split(site) or is_wide(site) or site.spec.is_masked or site.spec.dropout or site.spec.loads or fills_registers(site))


def draws_first(site: Site) -> bool:
    """Are dropout's bits worked out ahead of the weights that they drop, in front of the branch of a tile that the mask cuts? Two warpgroups that drift apart then have something to do
    where they would wait for exponentials. H200, causal, N = 1024, 4096, 16384, backward: head size 64 -1, 3, 3 % faster, 32 even; at 96 and 128, whose products everything waits for, 4 to 6 % slower."""
    return is_split(site) and site.spec.dropout > 0 and not by_halves(site)


def _is_of(e: Expr, x: Expr) -> bool:
    """Is it made of `x` and scalars?"""
    return e == x or not {"i", "j"} & e.variables or isinstance(e, Call) and all(_is_of(a, x) for a in e.args)


FLAT = 1e-12
"""What a score counts for in a row that averages v and keeps its scores for their slopes: nothing, while one that is hidden, of -1e15, still is."""


def averages_by_score(site: Site) -> bool:
    """Do rows that average v pass a gradient on to their scores, by a slope that is of the score? Then no constant may take its place."""
    return site.averages and site.spec.empty_row is EmptyRow.MEAN_ADD and site.raw in walk(scaled(site, QK)[0])


def weights(site: Site, body: Body, out: Writer, partial: str, rows: str, warps: int) -> None:
    """From the products qk: slope = exp(score - lse) * d score / d qk, and the weights p = exp(score - lse) after dropout."""
    spec, program = site.spec, body.program
    end = "N" if not site.documents else "key_end" if is_split(site) else number(site, "key_end", warps)  # from shared memory, for want of registers
    beyond = [] if site.whole else [program.spread(f"(j < {end})", frozenset("j"))]
    visible = [spec.visible] if spec.is_masked else []
    wanted = [scaled(site, QK)[0]]
    raw = tight_score(site, program, out, rows, "BLOCK_M", None if is_wide(site) else not is_split(site))
    name = raw if raw.isidentifier() else out.assign("raw", raw)

    def hide(hidden: str, value: str, mean: str) -> None:
        """Where the mask hides a key, `value` becomes `hidden`; in rows that average v, `mean` where they do."""
        def inside() -> None:
            closed, others = groups(spec, "i")
            found = "" if site.averages or crowded or not visible else hidden_outside(program, out, value, visible, "i", hidden, False, end if beyond else "")
            if found:
                out.assign(value, found)
                return
            if others and (closed or site.documents) and not site.averages:
                if site.documents and not is_split(site):
                    last_of_tile(site, out, "i", end)
                read = any({"i", "j"} <= load.variables for c in others for load in c.loads)  # a tile of the mask: to be used up before it waits for a branch
                hide_others = lambda: out.assign(value, f"tl.where({' & '.join(map(program.tile, others))}, {value}, {hidden})")
                if read:
                    hide_others()
                ends = ["(is_short != 0)" if site.documents else "(j0 + BLOCK_N > N)"] if beyond else []
                with program.branch(), out.block(f"if {' | '.join(filter(None, [*ends, cut(site, program, 'i', True)]))}:"):
                    by_bits = hidden_outside(program, out, value, closed, "i", hidden, False, end if beyond else "") if read and not is_wide(site) else ""
                    out.assign(value, by_bits or f"tl.where({' & '.join([*beyond, *map(program.tile, closed)])}, {value}, {hidden})")
                if site.documents:  # the list says in which tiles
                    with program.branch(), out.block("if is_mixed != 0:"):
                        hide_others()
                elif not read:
                    hide_others()
                return
            seen = [*beyond, *(program.tile(v) for v in visible)]
            text = f"tl.where({' & '.join(seen)}, {value}, {hidden})" if seen else value
            if site.averages:
                over = [*beyond, *([program.tile(spec.empty_over)] if spec.empty_over != Const(True) else [])]
                average = f"tl.where({' & '.join(over)}, {mean}, {hidden})" if over else mean
                text = f"tl.where({body.across(from_ring('mean_ring'))} > 0.0, {average}, {text})"
            out.assign(value, text, "rows that average v" if site.averages else "")
        if partial == "True":
            inside()
        elif partial:
            with program.branch(), out.block(f"if {partial}:"):
                inside()

    if draws_first(site):
        out.assign("bits", _bits(site, rows, warps))
    early = is_tight(site)  # before exp the tile stays where the product left it; after, exp starts sooner (2 % of the pass)
    # words of a row's bits take registers too
    crowded = is_wide(site) or any(map(ends, spec.score.loads)) or not is_split(site) and (spec.dropout > 0 or fills_registers(site))
    squared = degree(wanted[0], site.raw) <= 2 and site.factor > 1e-6  # then 0 * slope is 0 with a finite score, and no weight needs a second look
    hidden = early and bool(partial) and not squared  # may the score be -inf?
    rate, flat = repr(site.factor * LOG2E), early and averages_by_score(site)
    if early:
        hide("-1e15" if squared else "float('-inf')", name, name if flat else "0.0")  # exp2(0 - log2(keys)) = 1 / keys
        program.body.names[site.raw] = name
    if flat:
        rate = body.across(f"tl.where({from_ring('mean_ring')} > 0.0, {FLAT}, {rate})")
    lse2 = "lse2" if reads_rows_ahead(site) or reads_lse_first(site) else from_ring("lse2_ring")
    exponent = f"{name} * {rate} - {body.across(lse2)}"
    if by_halves(site):
        return _halves(site, body, out, name, exponent, hidden, rows, warps)
    out.assign("p", f"tl.exp2({exponent})")
    if not early:
        hide("0.0", "p", body.across(from_ring("mean_ring")))
    if reads_rows_ahead(site):
        out.assign("delta", from_ring("delta_ring"))
    late = program.dims(wanted[0]) != {"i", "j"}
    rest = "p" if late else body.times(wanted[0], "p", hidden)
    out.assign("slope", rest, "d score / d qk now, so that one tile waits for dP and not two" if rest != "p" else "")
    if spec.dropout:
        if not draws_first(site):
            out.assign("bits", _bits(site, rows, warps))
        if is_signed(site):
            out.assign("slope", f"signed_by_keep(p, bits, {threshold(spec.dropout)})", "its sign says what dropout keeps")
            out.assign("p", f"positive(slope, {tiles_name('Q', site.qk_chunks[0])}.dtype)")
        else:
            out.assign("keep", f"kept_mask(bits, {threshold(spec.dropout)})")
            out.assign("p", "tl.where(keep, p, 0.0)")


def _halves(site: Site, body: Body, out: Writer, name: str, exponent: str, hidden: bool, rows: str, warps: int) -> None:
    """Weights, in the type of their product, and slopes from the tile `name` of scores; a slope's lowest bit says what dropout keeps."""
    rest, program, dropped = scaled(site, QK)[0], body.program, site.spec.dropout
    width = str(THIRD) if site.thirds else "BLOCK_M"
    halves = f".reshape([{rows}, 2, {width} // 2]).permute((0, 2, 1))"
    if dropped:
        out.assign("bits", _bits(site, rows, warps))
    out.assign("exponent", exponent)
    for tile in (name, "exponent", *(["bits"] if dropped else [])):
        out.assign(f"{tile}_0, {tile}_1", f"tl.split({tile}{halves})")
    for half in range(2):
        with program.branch():
            program.body.names[site.raw] = f"{name}_{half}"
            p = out.assign(f"p_{half}", f"tl.exp2(exponent_{half})")
            why = "" if half else "d score / d qk now, so that one tile waits for dP and not two"
            slope = out.assign(f"slope_{half}", body.times(rest, p, hidden, p), why)
            if dropped:
                out.assign(slope, f"marked_by_keep({slope}, bits_{half}, {threshold(dropped)})")
                out.assign(p, f"kept({p}, bits_{half}, {threshold(dropped)})")
            out.assign(p, f"{p}.to({tiles_name('Q', site.qk_chunks[0])}.dtype)")
    for tile in ("p", "slope"):
        out.assign(tile, f"gl.convert_layout(tl.join({tile}_0, {tile}_1).permute((0, 2, 1)).reshape([{rows}, {width}]), scores)")


def _bits(site: Site, rows: str, warps: int) -> str:
    """Where registers run out, of the seed and an unknown zero: a key for each round, known ahead of the loop, would take two. Where a mask is read by
    hand, or sums beyond a table's ends are kept, of such a zero too: with whom a thread shares bits would take four."""
    zero = "told >> 31"
    late = f" + ({zero})" if fills_registers(site) or is_full(site) or site.thirds else ""
    unknown = "0" if compares(site.spec) and not any(map(ends, site.loads)) else zero
    shape = f"z, i0, key0, {unknown}, None, None, BLOCK_M, {THIRD}, {warps}, False" if site.thirds else f"z, key0, i0, {unknown}, None, None, {rows}, BLOCK_M, {warps}, True"
    return f"random_bits(seed{late}, {shape}, False, scores)"


def degree(e: Expr, x: Expr) -> int:
    """As which power of `x` the expression grows; 99 if it is no polynomial of it."""
    if e == x:
        return 1
    below = [degree(a, x) for a in e.args_()] if not isinstance(e, Load) else []
    if not any(below):
        return 0
    op = getattr(e, "op", "")
    return sum(below) if op == "mul" else max(below) if op in ("add", "sub", "neg") else 99


def score_gradient(site: Site, body: Body, out: Writer, partial: str) -> None:
    """ds, the gradient of the products qk over the factors that are left out, from dP. partial: the condition of a tile that the mask cuts, as of `weights`."""
    spec = site.spec
    if not reads_rows_ahead(site):
        out.assign("delta", from_ring("delta_ring"))
    scale = kept_scale(spec.dropout)
    if is_signed(site):
        within = 1.0 if doubles(site) else 0.5 * scale / left_out(site)  # |x| + x is 2 p: p itself would be kept in registers
        out.assign("ds", f"(slope + tl.abs(slope)) * {'dp' if within == 1.0 else f'(dp * {within!r})'} - tl.abs(slope) * {body.across('delta')}")
    else:
        if spec.dropout:
            if by_halves(site):
                out.assign("keep", "is_marked(slope)")
            out.assign("dp", f"tl.where(keep, dp * {scale!r}, 0.0)")
        out.assign("ds", f"slope * (dp - {body.across('delta')})")
    rest = scaled(site, QK)[0]
    if body.program.dims(rest) != {"i", "j"}:  # from shared memory again: a row vector kept since the scores would take registers
        body.program.forget_rows()
        rows_from_rings(site, body.program)
        if rest != Const(1.0):
            out.assign("ds", body.times(rest, "ds", weight="slope"))
    if site.averages and spec.empty_row is EmptyRow.MEAN:
        # only tiles that the mask cuts have rows that see no key
        with body.program.branch(), out.block(f"if {partial}:") if partial not in ("", "True") else nullcontext():
            out.assign("mean", from_ring("mean_ring"))
            body.replaced(out)
    if sees_ends_late(site):
        beyond_ends(site, body.program.here(out), out)
    add_ends(site, out, "ds")
    out.assign("ds", f"ds.to({tiles_name('Q', site.qk_chunks[0])}.dtype)")
