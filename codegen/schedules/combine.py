"""The second kernel of a forward pass whose keys were split (Flash-Decoding, Dao, Haziza, Massa and Sizov 2023): adds up what the parts left of a row.

    m = max_s m_s        l = sum_s exp(m_s - m) l_s        out = sum_s exp(m_s - m) acc_s / l        lse = m + log(l)
"""
from __future__ import annotations

from ..parts import LOG2E, Site, arguments, base, count, decode, head_index, pieces
from ..writer import Kernel
from .forward import PARTIAL, normalisation


def combine_kernel(site: Site) -> Kernel:
    """out and log-sum-exp of some rows from the maxima, sums and accumulators of their parts (`split.shared_out`)."""
    axes, c2 = site.spec.axes, site.factor * LOG2E
    what = f"({', '.join(axes)})" if axes else "0"
    kernel = Kernel("attention_combine", f"One program: ROWS rows i of batch indices z = {what}, all parts of their keys.",
                    arguments(site, {**PARTIAL, "parts": "parts", "all_rows": f"{count(axes)} * M"}), ("TOGETHER", "ROWS"), "combined")
    out = kernel.body
    out.assign("row", "tl.minimum(tl.program_id(0) * ROWS + tl.arange(0, ROWS), all_rows - 1)", "those beyond the last are the last")
    out.assign("z", "row // M")
    out.assign("i", "row % M")
    decode(out, axes, "z")
    head_index(site, out, "e")
    out.assign("part", "tl.arange(0, TOGETHER)[None, :]")
    out.assign("top", 'tl.full([ROWS, TOGETHER], float("-inf"), tl.float32)')
    with out.block("for first in tl.range(0, parts, TOGETHER):"):
        out.assign("at", "tl.cast(first + part, tl.int64) * all_rows + row[:, None]")
        out.assign("top", 'tl.maximum(top, tl.load(PartMax + at, mask=first + part < parts, other=float("-inf")))')
    out.assign("m", "tl.max(top, 1)")
    if site.averages:
        out.assign("empty", 'm == float("-inf")')
    out.assign("anchor", 'tl.where(m == float("-inf"), 0.0, m)', "no part has seen a key: keep exp2(-inf - 0) = 0")
    out.assign("sums", "tl.zeros([ROWS, TOGETHER], tl.float32)")
    for c in site.v_chunks:
        out.assign(f"acc{c.suffix}", f"tl.zeros([ROWS, TOGETHER, {c.width}], tl.float32)")
    with out.block("for first in tl.range(0, parts, TOGETHER):"):
        out.assign("inside", "first + part < parts")
        out.assign("at", "tl.cast(first + part, tl.int64) * all_rows + row[:, None]")
        out.assign("weight", f'tl.exp2((tl.load(PartMax + at, mask=inside, other=float("-inf")) - anchor[:, None]) * {c2!r})')
        seen = "inside"
        if site.averages:
            out.assign("weight", "tl.where(empty[:, None], 1.0, weight)", "all parts average: sums of v and numbers of keys add up as they are")
            seen = "(inside & (weight != 0.0))"  # what a part averages in vain must not reach a sum that is not finite
        out.assign("sums", "sums + weight * tl.load(PartSum + at, mask=inside, other=0.0)")
        for c, index, check in pieces(site, "Out"):
            mask = " & ".join([f"{seen}[:, :, None]", *([f"({index} < {site.Dv})[None, None, :]"] if check else [])])
            value = f"tl.load(PartOut + at[:, :, None] * {site.Dv} + {index}[None, None, :], mask={mask}, other=0.0)"
            out.assign(f"acc{c.suffix}", f"acc{c.suffix} + weight[:, :, None] * {value}")
    out.assign("l", "tl.sum(sums, 1)")
    normalisation(site, out)
    out.assign("out_row", f"{base(site, 'Out')} + tl.cast(i, tl.int64) * stride_o_m")
    for c, index, check in pieces(site, "Out"):
        value = f"(tl.sum(acc{c.suffix}, 1) * scale[:, None]).to(Out.dtype.element_ty)"
        out.line(f"tl.store(out_row[:, None] + {index}[None, :] * stride_o_d, {value}{f', mask={check}' if check else ''})")
    out.line("tl.store(Lse + row, lse)")
    return kernel
