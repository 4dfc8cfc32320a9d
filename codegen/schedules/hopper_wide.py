"""The Hopper backward of heads above 128: a tile of 64 keys, of whose accumulators each of two warpgroups holds half of the columns.

So each has half of the query rows of S^T and dP^T, and needs all of P^T and dS^T for dV and dK: both pass through shared memory. dQ of 256 columns
is added half by half through one place; where heads are that wide, there is one tile of dO, which dV leaves long before the next step needs it.
"""
from __future__ import annotations

from ..gluon import Partition
from ..parts import Site, tiles_name
from ..program import Program
from ..writer import Writer
from .common import Body
from .hopper import tile_view
from .hopper_captured import store_ds
from .hopper_dq import add_dq, dq_chunks, ds_tile, finish_dq, frees_early, in_turn, names, turns
from .hopper_keys import do_place, keys_at, keys_from_rings, read_late, values_wait
from .hopper_score import score_gradient, weights
from .hopper_steps import WARPS, copy_out, keep, scores_and_dp
from .hopper_vectors import last_of_tile
from .relative import flush_ends, start_ends, store_ends


def accumulate_wide(site: Site, partial: str, others, tiles) -> Partition:
    nv = len(site.v_chunks)
    consumer = Partition("sum_keys", "Two warpgroups: one tile of keys against all query rows that see it, half of the columns each.")
    out = consumer.body
    dtype = f"{tiles_name('Q', site.qk_chunks[0])}.dtype"
    out.line(f"scores: gl.constexpr = {_shared_by('BLOCK_M')}")
    for name, found in (("dk", site.qk_chunks), ("dv", site.v_chunks), ("dq", dq_chunks(site))):
        for c in found:
            out.line(f"{name}_layout{c.suffix}: gl.constexpr = {_shared_by(c.width)}")
    out.line("keywise: gl.constexpr = gl.SliceLayout(1, scores)")
    out.line("rowwise: gl.constexpr = gl.SliceLayout(0, scores)")
    out.assign("rows", "gl.arange(0, BLOCK_M, rowwise)")
    out.assign("zeros", "gl.zeros([BLOCK_N, BLOCK_M], gl.float32, scores)")
    with tiles(out, WARPS):
        out.assign("key0", "j0")
        out.assign("j", "key0 + gl.arange(0, BLOCK_N, keywise)")
        last_of_tile(site, out, "i", "key0", "BLOCK_N")
        program = Program(site.spec, out.section(), inner="i", columns="i", varying=others, nearest="" if site.whole else "j")
        keys_from_rings(site, program)
        body = Body(site, program, transposed=True)
        for letter, found in (("k", site.qk_chunks), ("v", site.v_chunks)):
            for c in found:
                out.assign(f"d{letter}{c.suffix}", f"gl.zeros([BLOCK_N, {c.width}], gl.float32, d{letter}_layout{c.suffix})")
                out.assign(f"{letter}{c.suffix}", tile_view(f"{letter}_tile", c, "kv", "BLOCK_N"))
        start_ends(site, out, "gl.zeros([BLOCK_N], gl.float32, keywise)")
        with turns(site, out):
            for letter, place, found in (("q", "slot", site.qk_chunks), ("do", do_place(site)[0], site.v_chunks)):
                for c in found:
                    out.assign(f"{letter}{c.suffix}", tile_view(f"{letter}_ring", c, place, "BLOCK_M"))
            scores_and_dp(site, body, out)
            weights(site, body, out, partial, "BLOCK_N", WARPS)
            out.line(f"p_tile.store(p.to({dtype}))")
            out.line("fence_async_shared()")
            out.line("barrier()")
            for c in site.v_chunks:
                out.assign(f"next_dv{c.suffix}", f"warpgroup_mma(p_tile, do{c.suffix}, dv{c.suffix}, is_async=True)")
            out.assign("dp", f"warpgroup_mma_wait({nv}, [next_dp])", "dV still runs")
            score_gradient(site, body, out, partial)
            out.line(f"{ds_tile(site, '0', 'BLOCK_N')}.store(ds)")
            out.line("fence_async_shared()")
            if frees_early(site):
                out.line("tma.store_wait(0)", "dQ of the step before has left its place")
            out.line("barrier()")
            store_ds(site, out, [("j0", "0")])
            first, *behind = [[c] for c in dq_chunks(site)] if in_turn(site) else [dq_chunks(site)]
            _issue_dq(site, out, first)
            for c in site.qk_chunks:
                out.assign(f"next_dk{c.suffix}", f"warpgroup_mma({ds_tile(site, '0', 'BLOCK_N')}, q{c.suffix}, dk{c.suffix}, is_async=True)")
            running = len(first) + len(site.qk_chunks)
            out.assign(names("dv", site.v_chunks), f"warpgroup_mma_wait({running}, [{names('next_dv', site.v_chunks)}])", "dQ and dK still run")
            if values_wait(site):
                out.line("mbarrier.arrive(do_empty.index(0), count=1)")

            out.assign(names("dq", first), f"warpgroup_mma_wait({len(site.qk_chunks)}, [{names('next_dq', first)}])", "dK still runs")

            def multiply(n: int) -> None:
                """The second half, while the first leaves."""
                _issue_dq(site, out, behind[n - 1])
                out.assign(names("dq", behind[n - 1]), f"warpgroup_mma_wait(0, [{names('next_dq', behind[n - 1])}])")

            add_dq(site, out, lambda text: read_late(site, text, WARPS), "0", multiply)
            out.assign(names("dk", site.qk_chunks), f"warpgroup_mma_wait(0, [{names('next_dk', site.qk_chunks)}])")
            out.line("mbarrier.arrive(rows_empty.index(slot), count=1)")
            if others:
                flush_ends(site, out, "tile", "gl.zeros([BLOCK_N], gl.float32, keywise)")
        keys_at(site, out, WARPS)
        if not others:
            store_ends(site, out, "tile")
        finish_dq(site, out)
        _store(site, out)
    out.line("tma.store_wait(0)")
    return consumer


def _shared_by(columns: str | int) -> str:
    """Layout of an accumulator of 64 rows whose columns two warpgroups share."""
    half = columns // 2 if isinstance(columns, int) else f"{columns} // 2"
    return f"gl.NVMMADistributedLayout([3, 0], [4, {WARPS // 4}], [16, {half}, 16])"


def _issue_dq(site: Site, out: Writer, found) -> None:
    for c in found:
        k = f"k.slice({c.start}, {c.width}, 1)" if in_turn(site) else f"k{c.suffix}"
        out.assign(f"next_dq{c.suffix}", f"warpgroup_mma({ds_tile(site, '0', 'BLOCK_N')}.permute((1, 0)), {k}, "
                                         f"gl.zeros([BLOCK_M, {c.width}], gl.float32, dq_layout{c.suffix}), use_acc=False, is_async=True)")


def _store(site: Site, out: Writer) -> None:
    out.line("barrier()", "all warps have read the keys and values: their place takes the gradients")
    keep(site, out, "kv", "BLOCK_N")
    out.line("barrier()")
    copy_out(site, out, "j0", "kv")
    out.line("tma.store_wait(0)")
    out.line("mbarrier.arrive(kv_empty.index(0), count=1)")
