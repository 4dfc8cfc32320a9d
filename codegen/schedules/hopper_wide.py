"""The Hopper backward of heads above 128: a tile of 64 keys, of whose accumulators each of two warpgroups holds half of the columns.

So each has half of the query rows of S^T and dP^T, and needs all of P^T and dS^T for dV and dK: both pass through shared memory. dQ of 256 columns
is added half by half through one place; where heads are that wide, there is one tile of dO, which dV leaves long before the next step needs it.
"""
from __future__ import annotations

from ..gluon import Partition
from ..parts import Site, tiles_name
from .hopper_dq import add_dq, dq_chunks, dq_rounds, ds_tile, names, turns
from .hopper_keys import has_single_do, read_late
from .hopper_score import score_gradient, weights
from .hopper_steps import WARPS, end_rows, issue_dq, multiplies_beside, number_rows, publish_ds, scores_and_dp, start_tile, store_in_place, view_rows
from .relative import flush_ends


def accumulate_wide(site: Site, partial: str, others, tiles) -> Partition:
    nv = len(site.v_chunks)
    consumer = Partition("sum_keys", "Two warpgroups: one tile of keys against all query rows that see it, half of the columns each.")
    out = consumer.body
    dtype = f"{tiles_name('Q', site.qk_chunks[0])}.dtype"
    out.line(f"scores: gl.constexpr = {_shared_by('BLOCK_M')}")
    for name, found in (("dk", site.qk_chunks), ("dv", site.v_chunks), ("dq", dq_chunks(site))):
        for c in found:
            out.line(f"{name}_layout{c.suffix}: gl.constexpr = {_shared_by(c.width)}")
    number_rows(out)
    with tiles(out, WARPS):
        body = start_tile(site, out, others)

        def multiply_weights() -> None:
            for c in site.v_chunks:
                out.assign(f"next_dv{c.suffix}", f"warpgroup_mma(p_tile, do{c.suffix}, dv{c.suffix}, is_async=True)")
        with turns(site, out):
            view_rows(site, out)
            scores_and_dp(site, body, out)
            weights(site, body, out, partial, "BLOCK_N", WARPS)
            out.line(f"p_tile.store(p.to({dtype}))")
            beside = multiplies_beside(site)
            if beside:
                out.line("fence_async_shared()")
                out.line("barrier()")
                multiply_weights()
            out.assign("dp", f"warpgroup_mma_wait({nv if beside else 0}, [next_dp])", "dV still runs" if beside else "")
            score_gradient(site, body, out, partial)
            publish_ds(site, out, "0")
            if not beside:
                multiply_weights()
            first = dq_rounds(site)[0]
            issue_dq(site, out, first, "0")
            for c in site.qk_chunks:
                out.assign(f"next_dk{c.suffix}", f"warpgroup_mma({ds_tile(site, '0', 'BLOCK_N')}, q{c.suffix}, dk{c.suffix}, is_async=True)")
            running = len(first) + len(site.qk_chunks)
            out.assign(names("dv", site.v_chunks), f"warpgroup_mma_wait({running}, [{names('next_dv', site.v_chunks)}])", "dQ and dK still run")
            if has_single_do(site):
                out.line("mbarrier.arrive(do_empty.index(0), count=1)")
            out.assign(names("dq", first), f"warpgroup_mma_wait({len(site.qk_chunks)}, [{names('next_dq', first)}])", "dK still runs")

            def multiply(found) -> None:
                """The second half, while the first leaves."""
                issue_dq(site, out, found, "0")
                out.assign(names("dq", found), f"warpgroup_mma_wait(0, [{names('next_dq', found)}])")

            add_dq(site, out, lambda text: read_late(site, text, WARPS), "0", multiply)
            out.assign(names("dk", site.qk_chunks), f"warpgroup_mma_wait(0, [{names('next_dk', site.qk_chunks)}])")
            out.line("mbarrier.arrive(rows_empty.index(slot), count=1)")
            if others:
                flush_ends(site, out, "tile", "gl.zeros([BLOCK_N], gl.float32, keywise)")
        end_rows(site, out, others)
        store_in_place(site, out)
    out.line("tma.store_wait(0)")
    return consumer


def _shared_by(columns: str | int) -> str:
    """Layout of an accumulator of 64 rows whose columns two warpgroups share."""
    half = columns // 2 if isinstance(columns, int) else f"{columns} // 2"
    return f"gl.NVMMADistributedLayout([3, 0], [4, {WARPS // 4}], [16, {half}, 16])"
