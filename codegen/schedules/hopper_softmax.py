"""The softmax of the Hopper forward kernel, between its products: score, mask, running maximum and sum, dropout (FlashAttention-2, section 3.1)."""
from __future__ import annotations

from ...expr import BOOL, QK, Call, Const, Var, walk
from ..factors import span
from ..parts import LOG2E, Site
from ..philox import threshold
from ..program import Program
from ..ramp import is_ramped
from ..within import hidden_outside, interval
from ..writer import Writer
from .ends import ended, warpgroup_score
from .forward import is_finite
from .hopper_captured import mask_loads, tile_loads
from .hopper import ROWS, compares, in_place, is_crowded, tiles_name
from .hopper_locate import adds_position, cuts_last, narrows
from .hopper_vectors import WORDS, compared, cut, groups, hidden_by_data, shares_words

LAG = 8
"""Powers of two that a row's weights may come to before their maximum is renewed (FlashAttention-4's, made for Blackwell)."""
LARGEST = 3e38


def lags(site: Site) -> bool:
    """Is a row's maximum renewed only where its scores have grown by more than 2 ** LAG? Then each thread keeps maximum and sum of its own scores,
    and few tiles of keys make a warp look across a row and rescale what is summed up. Any maximum gives the same softmax.

    H200, N = 4k: head sizes 64, 128, 192, 256 faster by 2 to 5, 2 to 9, 10 to 12, 5 to 16 %; 80 and 96 by -7 to 3 %, 32 by -7 to -1 %. It ends a block
    of instructions, across which the assembler moves none: beside dropout 2 to 10 % slower, beside captured tensors by as much slower or faster.
    """
    spec, head = site.spec, max(site.D, site.Dv)
    bare = not spec.dropout and not spec.score.loads and not any({"i", "j"} & load.variables for load in spec.loads)
    return speculates(site) or bare and (head == 64 or head > 96)


def speculates(site: Site) -> bool:
    """Are weights taken from the maximum of the tiles before, without a look at their own tile's scores? What is summed up of them tells whether that maximum will do;
    where not, they are worked out again from a new one. So no exponential waits, and no maximum is looked for.

    H200, beside `lags` or nothing like it, in turn, N = 4k, full / causal, % faster: head size 32 4 / 0, 64 9 / 7, 80 7 / 10, 96 8 / 5, 128 8 / 7, 160 5 / -3, 192 2 / 4, 256 1 / -1; at 64
    and 128 a padding vector 3 and 8, an additive tensor 19 and 2 (96: -4), T5's table 1 and 17, ALiBi 0 and 7, dropout 5 and 0 (192, 256: 8). Three warpgroups at 48, in two pieces: -21. Not where rows
    that see their first key in a later tile, or scores that rise from tile to tile, have many tiles worked out twice (a window -5 to 0, documents -18, ALiBi from the first key on -20).
    """
    if is_bounded(site) or _is_short_of_registers(site) or any({"i", "j"} & load.variables == {"i"} for load in site.spec.visible.loads):
        return False
    if site.warpgroups == 3:
        return len(site.qk_chunks) == len(site.v_chunks) == 1
    if adds_position(site.raw):
        return descends(site) and is_ramped(site.raw, "j")  # else up to 292 bytes spilled
    return site.warpgroups == 2 and site.by_rows.lo == Const(0)


def descends(site: Site) -> bool:
    """Are keys visited from the last to the first? So they are where what a mask, or the end of the keys, cuts of the tiles that a warpgroup's rows see is the
    last at most: it then comes before the loop (FlashAttention-3), which asks for no mask, and no branch ends its block of instructions.

    H100, N = 4096, forward: three warpgroups under a soft cap 7 % faster; two 1 to 3 % at 128, with dropout 5, but 8 % slower at 96, 9 at 32, 2 to 4 where a
    score reads at the key's position, and at 64 up to 12 % beside a bias. Three that speculate, whose block ends anyhow, gain from that branch and from programs
    that read the same keys at once: H200, N = 1024, 4096, 16384, from the first key on causal 9, 4, 3 %, grouped queries 5, 4, 4, a prefix 6, 11, 5, head size 32 7, 2, 0. Scores that
    a slope makes rise with the key come first where they are highest, for `speculates`: H200, head size 64, N = 1k, 4k, 16k, 4, 7, 6 % faster.
    """
    found, head = site.by_rows, max(site.D, site.Dv)
    rises = adds_position(site.raw) and not found.is_total and (head > 96 or is_ramped(site.raw, "j"))
    if site.listed or site.warpgroups == 2 and not rises and (not _gains_cut_first(site) if head <= 96 else Var("j") in site.raw.leaves):
        return False
    if found.is_total:
        return not site.hides_beyond
    together = site.warpgroups == 3 and not adds_position(site.raw) and speculates(site)
    return not together and cuts_last(found, ROWS if narrows(site) else ROWS * site.warpgroups, site.columns)


def _gains_cut_first(site: Site) -> bool:
    """Two warpgroups of heads up to 96 that have a mask to ask for: does it gain to do what it cuts first? Under a soft cap, H200, N = 1024, 4096, 16384, % faster: head size 32 5, 8, 48 6, 7, 72 9, 10, 14, 80 8, 15, 17,
    96 5, 7, 14; with dropout, whose bits come first (`draws_first`), at 64 alone: 2, 4, 1, a prefix 1, -1; 32 -10 to -8, 48 -6 to -3, 80 and 96 -9 to -3 %. Plain attention at 80 and 96 -10, -8."""
    if site.spec.dropout:
        return site.raw == QK and 48 < max(site.D, site.Dv) <= 64
    return _is_capped(site)


def _is_capped(site: Site) -> bool:
    """Is a score a function of q . k alone, as under a soft cap?"""
    return site.raw != QK and in_place(site.raw)


def goes_round(site: Site) -> bool:
    """Do the other keys, behind those that are cut, then come from the first on? Programs that run at once read the same ones. H200, N = 1024, 4096, 16384: a soft cap at 64 and 128 4, 2, 2 and 3, 3, 2 %
    faster, dropout at 128 2, 3, 2; plain attention is -6 to 2 %, ALiBi -6 to -1."""
    costly = site.spec.dropout > 0 or isinstance(site.raw, Call)
    return costly and not adds_position(site.raw) and not site.by_rows.is_total and descends(site)


def _is_short_of_registers(site: Site) -> bool:
    """For scores and weights side by side: 4 to 88 bytes spilled, nothing gained, or not measured."""
    spec, head, read = site.spec, max(site.D, site.Dv), site.spec.visible.loads
    if head > 128 and _is_laden(site) or not site.whole and any("j" in load.variables for load in read):
        return True
    copied = mask_loads(spec, site.tiled)
    if 96 < head <= 128:
        return spec.dropout > 0 or any(load.kind == BOOL and {"i", "j"} <= load.variables and load not in copied for load in read)
    return bool(ended(site) or head > 64 and tile_loads(site))


def awaits_values(site: Site) -> bool:
    """Does a warpgroup await P V of the tile before ahead of its softmax, so that the weights of both can have the same registers? Of three the two others keep the matrix units
    busy; of two (head size 128, N = 4k) it is 3 to 17 % slower."""
    return speculates(site) and site.warpgroups == 3


def rounds_early(site: Site) -> bool:
    """Are such weights rounded to 16 bits before their sum is looked at? It takes half of the registers, and a move for each two
    unless it `awaits_values`: at head size 128 2 to 4 % slower than without, where registers are enough for that. (Heads of 192 with values of 128, tiles of 128 keys: 92 bytes
    spilled without.)"""
    head = max(site.D, site.Dv)
    return site.warpgroups == 3 or 192 >= head > 128 >= site.Dv or site.spec.dropout > 0 and head <= 96 or head > 96 and _is_laden(site) or 64 < head <= 96 and not site.whole


def _is_laden(site: Site) -> bool:
    """Is anything read at rows or keys, or made of the key's position but by a `ramp`, or does the mask ask much of it?"""
    return any({"i", "j"} & load.variables for load in site.spec.loads) or not is_ramped(site.raw, "j") or not _asks_little(site)


def _asks_little(site: Site) -> bool:
    """Does the mask leave each row an interval, or compare a key's own index twice at most?"""
    asked = [e.op for e in walk(site.spec.visible) if isinstance(e, Call) and "j" in e.variables]
    return not site.spec.is_masked or leaves_intervals(site) or len(asked) <= 3 and {*asked} <= {"le", "lt", "ge", "gt", "and", "or"}


BOUNDS = {"bfloat16": 80.0, "float16": 10.0}
"""Of v's dtype, to which weights are rounded: powers of two, up or down, that they may come to without a maximum."""


def is_bounded(site: Site) -> bool:
    """Is a score known to be so small that no maximum is needed (a soft cap)? Then nothing waits for a row's greatest score, and nothing is ever rescaled.

    H100, soft cap, N = 1k, 4k, 16k: head size 64 faster by 7, 4, 3 %, 256 by 5; 128 by 5, -2, -5 %. Beside dropout and a table that ends it spilled 52 bytes.
    """
    head, most = max(site.D, site.Dv), max(map(abs, span(site.spec.score))) * LOG2E
    return most <= BOUNDS.get(site.v_dtype, 0.0) and not (site.spec.dropout and head > 64) and not is_crowded(site.spec, head) and (head <= 64 or head > 128)


HIDDEN = -120.0
"""The power of two that a key which the mask hides weighs where the exponent goes through a polynomial, which makes nothing of -inf."""


def takes_polynomial(site: Site) -> bool:
    """Is a part of the exponentials worked out by a polynomial? The unit of exp, which a soft cap's tanh shares, is busy three quarters of the time at head sizes up to 64. H200,
    head size 64, N = 4k, 16k: an eighth of them 1, 4 % faster, a quarter 2, 6, a half -2, 8. Not where a row that sees no key is known by weights of 0, nor
    where the factor is so small that no finite score weighs as little as `HIDDEN`."""
    return is_bounded(site) and max(site.D, site.Dv) <= 64 and not site.can_be_empty and abs(site.factor) > 1e-6


def is_halved(site: Site) -> bool:
    """Does dropout act on weights of 16 bits, two at a time? H200, N = 4k: head size 128 2 to 6 % faster, 64 4 % slower where they are not rounded early."""
    return bool(site.spec.dropout) and (max(site.D, site.Dv) > 64 or speculates(site) and rounds_early(site))


def by_threads(site: Site) -> bool:
    """Does each thread sum up its own weights of a row?"""
    return lags(site) or is_bounded(site)


def weight_unit(site: Site) -> float:
    """What the products count in: `kept_half` takes bfloat16 to 2 ** -7."""
    return 2.0 ** 7 if is_halved(site) and site.v_dtype == "bfloat16" else 1.0


def draws_first(site: Site) -> bool:
    """Are dropout's bits worked out ahead of the softmax? Where its maximum else waits for all scores: H200, causal, N = 1k, 2k, 4k, 8k, 16k, % faster: head size 128 -1, 0, 1, 4, 6, 112 0, 0, 2, 5, 6,
    160 0, 2, 1, 2, 3; 192 at 4k, 16k -4, 1. Where two warpgroups ask for no mask in the loop: N = 1k, 4k, 16k, 64 without one 8, 15, 16, 48 10, 17; ALiBi at 64 2, 5, 7; T5's table without a mask 4, 3; -3 and -1 at 32,
    -3 to -13 at 80 and 96, and beside tiles of a bias -3, -1. Under a soft cap 64 6, 6, 6, 80 and 96 8, 9 and 5, 7, but 32 -2, -4. Else 6 to 19 % slower, three warpgroups 30 to 60."""
    head = max(site.D, site.Dv)
    if not site.spec.dropout or head > 160 or site.warpgroups != 2:
        return False
    if head > 96 or _is_capped(site) and head > 48:
        return True
    asks = site.listed or not descends(site) and not (site.by_rows.is_total and site.hides_beyond)
    return 32 < head <= 64 and not asks and not tile_loads(site)


def reads_seed_late(site: Site) -> bool:
    """Is dropout's seed read where it is used, tile by tile?"""
    return is_crowded(site.spec, max(site.D, site.Dv)) or site.spec.dropout > 0 and max(site.D, site.Dv) > 128 and speculates(site)


def leaves_intervals(site: Site) -> bool:
    """Does the mask leave every row one interval of keys? Then it is hidden by `within`, which asks for no key's own index: but beside positions in a table
    that ends, where keys have theirs in registers and none are left (20 bytes spilled)."""
    return interval(site.spec.visible, "j") is not None and not ended(site)


def softmax(site: Site, program: Program, out: Writer, partial: str, first: bool) -> None:
    """From the products qk: score, mask, running maximum and sum; weights p before dropout."""
    spec = site.spec
    c2 = site.factor * LOG2E
    beyond = bool(partial) and not site.hides_beyond
    visible = spec.visible if spec.is_masked else None
    hidden = repr(HIDDEN / c2) if takes_polynomial(site) else 'float("-inf")'
    raw = warpgroup_score(site, program, out, ("i0", ROWS), ("j0", "BLOCK_N"))
    if raw != "raw":
        out.assign("raw", raw)
    if draws_first(site):
        _draw(site, out)
    if partial:
        def hide_by(parts: list) -> None:
            out.assign("raw", f'tl.where({" & ".join([*parts])}, raw, {hidden})')

        def hide_outside(conditions: list) -> bool:
            found = "" if ended(site) else hidden_outside(program, out, "raw", conditions, "j", hidden, beyond)
            if found:
                out.assign("raw", found)
            return bool(found)

        def hide() -> None:
            if hide_outside([visible] if visible is not None else []):
                return
            ends, (closed, others) = ["(j < N)[None, :]"] * beyond, groups(spec, "j")
            if ends and others and partial == "True":  # both at once would take a register for each key
                hide_by([*map(program.tile, [*closed, *others])])
                with program.branch(), out.block("if j0 + BLOCK_N > N:"):
                    return hide_by(ends)
            if not closed or not others:
                return hide_by([*ends, *([program.tile(visible)] if visible is not None else [])])
            with program.branch(), out.block(f"if {cut(site, program, 'j', not beyond)}:"):
                if not hide_outside(closed):
                    hide_by([*ends, *map(program.tile, closed)])
            if not compared(spec):
                return hide_by([*map(program.tile, others)])
            low, whole = hidden_by_data(site, program)
            for condition, parts in ([("is_cut > 1", whole)] if whole else []) + [("is_cut != 0", low)]:
                with program.branch(), out.block(f"if {condition}:"):
                    hide_by(parts)
        if partial == "True" or first and site.listed:  # the list begins with partial tiles
            hide()
        else:
            with program.branch(), out.block(f"if {partial}:"):
                hide()
    if is_bounded(site):
        out.assign("p", f"bounded_exp2(raw, {c2!r})" if takes_polynomial(site) else f"tl.exp2(raw * {c2!r})", "scores are bounded: no maximum is needed")
        out.assign("l", "own_sum(p)" if first else "l + own_sum(p)")
        return
    lagging = lags(site)
    seen = partial or not is_finite(site.raw)
    if speculates(site):
        return _speculate(site, out, first, bool(seen))
    if lagging and first:
        out.assign("m", f"gl.convert_layout(tl.max(raw, 1), gl.SliceLayout(1, threads))[:, None] + gl.zeros([{ROWS}, 4], gl.float32, threads)")
    elif lagging:
        out.assign("m, alpha, grown", f"raised(m, own_max(raw), {c2!r}, {LAG / max(c2, LAG / LARGEST)!r})")
    else:
        out.assign("m_new", "tl.max(raw, 1)" if first else "tl.maximum(m, tl.max(raw, 1))")
    top = "m" if lagging else "m_new"
    out.assign("anchor", *((f'tl.where({top} == float("-inf"), 0.0, {top})', "rows that have seen no key yet: keep exp2(-inf - 0) = 0") if seen else (top,)))
    spread, added = ("across(anchor * {c2!r}, raw)", "own_sum(p)") if lagging else ("(anchor * {c2!r})[:, None]", "tl.sum(p, 1)")
    out.assign("p", f"tl.exp2(raw * {c2!r} - {spread.format(c2=c2)})")
    if not first and not lagging:
        out.assign("alpha", f"tl.exp2((m - anchor) * {c2!r})")
    out.assign("l", added if first else f"l * alpha + {added}")
    if not lagging:
        out.assign("m", "m_new")


def _speculate(site: Site, out: Writer, first: bool, seen: bool) -> None:
    """As `softmax`, but weights are rounded; the maximum is that of the exponents, raw times the score's factor."""
    c2, dtype = site.factor * LOG2E, f"{tiles_name('V', site.v_chunks[0])}.dtype" if rounds_early(site) else "gl.float32"
    if first:
        out.assign("m", f"gl.convert_layout(tl.max(raw, 1), gl.SliceLayout(1, threads))[:, None] * {c2!r} + gl.zeros([{ROWS}, 4], gl.float32, threads)")
        out.assign("anchor", 'tl.where(m == float("-inf"), 0.0, m)' if seen else "m")
        out.assign("p", f"tl.exp2(raw * {c2!r} - across(anchor, raw))")
        out.assign("l", "own_sum(p)")
        if rounds_early(site):
            out.assign("p", f"p.to({dtype})")
    else:
        out.assign("p, total, m, alpha, grown", f"weighed(raw, m, {c2!r}, {dtype})")
        out.assign("l", "l * alpha + total")


def rescale(site: Site, out: Writer) -> None:
    """What is summed up goes over to the new maximum."""
    for c in site.v_chunks if not is_bounded(site) else ():
        acc = f"acc{c.suffix}"
        out.assign(acc, f"rescaled({acc}, alpha, grown)" if lags(site) else f"{acc} * gl.convert_layout(alpha, gl.SliceLayout(1, values{c.suffix}))[:, None]")


def across_threads(site: Site, out: Writer) -> None:
    """Maximum and sum of each row, after the last tile."""
    if by_threads(site):
        for name, reduce in (("m", "max"), ("l", "sum"))[is_bounded(site):]:
            out.assign(name, f"gl.convert_layout(tl.{reduce}({name}, 1), rowwise)")


def varies(site: Site) -> bool:
    """Are Philox's keys in each thread's registers? H200, N = 4096: head size 64 4 % faster (a backward 3 % slower), 128 2 %; others, and 128 under a mask of data,
    lack the registers."""
    head = max(site.D, site.Dv)
    return head <= 64 or head <= 128 and compares(site.spec)


def weights(site: Site, out: Writer) -> None:
    """p as the left operand of P V, in registers."""
    if site.spec.dropout:
        if not draws_first(site):
            _draw(site, out)
        kept = f"kept_half(p.to({tiles_name('V', site.v_chunks[0])}.dtype)" if is_halved(site) else "kept(p"
        out.assign("p", f"{kept}, bits, {threshold(site.spec.dropout)})", "the sum l is of the weights before dropout")
    for c in site.v_chunks:
        out.assign(f"weights{c.suffix}", f"gl.convert_layout(p.to({tiles_name('V', c)}.dtype), gl.DotOperandLayout(0, values{c.suffix}, 2))")


def _draw(site: Site, out: Writer) -> None:
    """Dropout's bits for the tile."""
    seed = "tl.load(Seed)" if reads_seed_late(site) else "seed"
    zero = "tile >> 31" if reads_seed_late(site) and max(site.D, site.Dv) <= 192 else "0"  # wider heads lack registers for more in a tile
    words = ", ".join(f"{ring}.index(place)" if shares_words(site.spec, max(site.D, site.Dv)) else "None" for ring in WORDS)
    out.assign("bits", f"random_bits({seed}, z, i0, j0, {zero}, {words}, {ROWS}, BLOCK_N, 4, False, {varies(site)}, scores)")
