"""The Hopper backward of heads of 129 to 192, padded to pieces of 64 columns: a tile of 96 keys, of which each of three warpgroups has a third.

A warpgroup has the scores of its 32 keys, and of dK^T, dV^T and dQ the 64 columns of its third of the head. So all need all of P and dS, which pass
through shared memory: they meet twice in a step, when P is there and when dS is. What binds the backward of such heads is what programs add to dQ, and
tiles of 96 keys add to it two thirds as often as those of 64 (`hopper_wide`). A tensor's sides are powers of two: keys lie there as 64 and 32.
"""
from __future__ import annotations

from contextlib import nullcontext
from typing import ContextManager

from ...expr import QK
from ..gluon import Partition
from ..parts import Chunk, Site
from ..philox import kept_scale
from ..program import Program
from ..writer import Writer
from .common import Body, scaled
from .hopper import THIRD, block_shape, piece_of, position, tma_arguments
from .hopper_captured import left_out
from .hopper_dq import store_share, sum_block, sum_position
from .hopper_keys import do_place, each_step, has_single_do, keys_at, keys_from_rings, read_late, row_at
from .hopper_score import score_gradient, weights
from .hopper_steps import enter
from .hopper_vectors import last_of_tile

REST = THIRD
"""Keys of a tile behind the first 64."""
REGISTERS = 160, 32
"""Of a thread of each warpgroup, and of the warps that copy."""


def arguments(site: Site, results: dict[str, str]) -> dict[str, str]:
    """Tensor maps of K, V, dK and dV behind the first 64 keys of a tile."""
    found = tma_arguments(site, results, {"K": REST, "V": REST, "dK": REST, "dV": REST})
    return {name.replace("_tiles", "_rest"): text for name, text in found.items() if name in ("K_tiles", "V_tiles", "dK_tiles", "dV_tiles")}


def reserve_operands(site: Site, out: Writer) -> None:
    """Shared memory for tiles, all pieces of one in one buffer."""
    rings = ("q_ring", "Q", "Q_tiles", "STAGES * ", "BLOCK_M"), ("do_ring", "dO", "dO_tiles", "" if has_single_do(site) else "STAGES * ", "BLOCK_M")
    keys = [(f"{x.lower()}_{part}", x, f"{x}_{tiles}", "", size) for x in "KV" for part, tiles, size in (("tile", "tiles", 64), ("rest", "rest", REST))]
    dtype = "Q_tiles.dtype"
    for name, operand, tiles, copies, height in (*rings, *keys):
        found = site.qk_chunks if operand in ("Q", "K") else site.v_chunks
        out.assign(name, f"gl.allocate_shared_memory({dtype}, [{copies}{len(found)}, {block_shape(site, operand, height, found[0])}], {tiles}.layout)")
    out.line(f"by_thirds: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, {THIRD}], {dtype})", "the side of 64 in halves")
    for name in ("p", "ds"):
        out.assign(f"{name}_tile", f"gl.allocate_shared_memory({dtype}, [1, BLOCK_M, 64], by_thirds)")
        out.assign(f"{name}_rest", f"gl.allocate_shared_memory({dtype}, [1, BLOCK_M, {REST}], by_thirds)")
    out.assign("dq_tile", f"gl.allocate_shared_memory(gl.float32, [{len(site.qk_chunks)}, {sum_block(site, site.qk_chunks[0])}], dQ_tiles.layout)")


def _if_own(out: Writer, pieces: tuple[Chunk, ...]) -> ContextManager:
    """What follows is of a warpgroup that has a piece of these."""
    return out.block(f"if PART < {len(pieces)}:") if len(pieces) < 3 else nullcontext()


def accumulate_thirds(site: Site, partial: str, others, tiles) -> Partition:
    consumer = Partition("sum_keys", f"One warpgroup of three: the scores of {THIRD} keys against all query rows that see them, and a third of the columns of all gradients.", ("PART",))
    out, spec, q, v = consumer.body, site.spec, site.qk_chunks, site.v_chunks
    out.line(f"scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, {THIRD}, 16])")
    out.line("gradients: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])")
    out.line("keywise: gl.constexpr = gl.SliceLayout(0, scores)")
    out.line("rowwise: gl.constexpr = gl.SliceLayout(1, scores)")
    out.assign("rows", "gl.arange(0, BLOCK_M, rowwise)")
    out.assign("zeros", f"gl.zeros([BLOCK_M, {THIRD}], gl.float32, scores)")
    with tiles(out, 4):
        out.assign("key0", f"j0 + PART * {THIRD}")
        out.assign("j", f"key0 + gl.arange(0, {THIRD}, keywise)")
        last_of_tile(site, out, "i", "tl.minimum(j0 + BLOCK_N, N)")
        program = Program(spec, out.section(), inner="i", varying=others, nearest="" if site.whole else "j")
        keys_from_rings(site, program)
        body = Body(site, program, transposed=False)
        for name in ("dk", "dv"):
            out.assign(name, "gl.zeros([64, 64], gl.float32, gradients)")
            out.assign(f"{name}_rest", f"gl.zeros([64, {REST}], gl.float32, scores)")
        with each_step(site, out):
            out.assign("first", "at >> 31", "0: of a place that is known every address would be kept from before the loop")
            _scores_and_dp(site, body, out)
            weights(site, body, out, partial, "BLOCK_M", 4)
            _publish(out, "p", "p.to(Q_tiles.dtype)")
            with _if_own(out, v):
                out.assign("own_do", f"do_ring.index({_own_place(_do_place(site), v)}).reshape([BLOCK_M, 64]).permute((1, 0))")
                out.assign("next_dv", "warpgroup_mma(own_do, p_tile.index(first), dv, is_async=True)")
                out.assign("next_dv_rest", "warpgroup_mma(own_do, p_rest.index(first), dv_rest, is_async=True)")
                out.assign("dp", "warpgroup_mma_wait(2, [next_dp])", "dV still runs")
            if len(v) < 3:
                with out.block("else:"):
                    out.assign("dp", "warpgroup_mma_wait(0, [next_dp])")
            score_gradient(site, body, out, partial)
            out.line("tma.store_wait(0)", "dQ of the step before has left its place")
            with _if_own(out, v):
                out.assign("dv, dv_rest", "warpgroup_mma_wait(0, [next_dv, next_dv_rest])", "or the next P would come too soon")
            _publish(out, "ds", "ds")
            if has_single_do(site):
                out.line("mbarrier.arrive(do_empty.index(0), count=1)")
            with _if_own(out, q):
                _dq_and_dk(site, out)
            out.line("mbarrier.arrive(rows_empty.index(slot), count=1)")
        keys_at(site, out, 4)
        _store(site, out)
    out.line("tma.store_wait(0)")
    return consumer


def _own_place(place: str, pieces: tuple[Chunk, ...]) -> str:
    return f"{piece_of(place, 0, len(pieces))} + PART"


def _do_place(site: Site) -> str:
    return "first" if has_single_do(site) else "slot"


def _scores_and_dp(site: Site, body: Body, out: Writer) -> None:
    """Issue S and dP of a tile as soon as its q and dO are there; wait for the first."""
    do, do_phase = _do_place(site), do_place(site)[1]

    def issue(name: str, rows: str, place: str, keys: str, pieces: tuple[Chunk, ...]) -> None:
        for n in range(len(pieces)):
            left = f"{rows}.index({piece_of(place, n, len(pieces))}).reshape([BLOCK_M, 64])"
            own = f"third_of_keys({keys}_tile, {keys}_rest, first{f' + {n}' * (n > 0)}, PART).permute((1, 0))"
            out.assign(name, f"warpgroup_mma({left}, {own}, {name if n else 'zeros, use_acc=False'}, is_async=True)")
    out.line("mbarrier.wait(q_full.index(slot), phase)")
    issue("next_qk", "q_ring", "slot", "k", site.qk_chunks)
    out.line(f"mbarrier.wait(do_full.index({do_place(site)[0]}), {do_phase})")
    issue("next_dp", "do_ring", do, "v", site.v_chunks)
    row_at(site, out, 4)
    out.assign("i", "i0 + rows")
    enter(site, body.program, out, "BLOCK_M", 4)
    out.assign("qk", f"warpgroup_mma_wait({len(site.v_chunks)}, [next_qk])", "dP still runs")


def _publish(out: Writer, name: str, value: str) -> None:
    """Into shared memory for all three warpgroups."""
    out.line(f"third_of_columns({name}_tile, {name}_rest, first, PART).store({value})")
    out.line("fence_async_shared()")
    out.line("meet()")


def _dq_and_dk(site: Site, out: Writer) -> None:
    """dQ = dS K and dK^T += Q^T dS of a warpgroup's own columns; dQ is added to its sum."""
    own = site.qk_chunks[0]
    out.assign("next_dq", "warpgroup_mma(ds_tile.index(first), k_tile.index(first + PART).reshape([64, 64]), gl.zeros([BLOCK_M, 64], gl.float32, gradients), use_acc=False, is_async=True)")
    out.assign("next_dq", f"warpgroup_mma(ds_rest.index(first), k_rest.index(first + PART).reshape([{REST}, 64]), next_dq, is_async=True)")
    out.assign("own_q", f"q_ring.index({_own_place('slot', site.qk_chunks)}).reshape([BLOCK_M, 64]).permute((1, 0))")
    out.assign("next_dk", "warpgroup_mma(own_q, ds_tile.index(first), dk, is_async=True)")
    out.assign("next_dk_rest", "warpgroup_mma(own_q, ds_rest.index(first), dk_rest, is_async=True)")
    out.assign("dq", "warpgroup_mma_wait(2, [next_dq])", "dK still runs")
    store_share(site, out, [own], "first + PART")
    out.line("barrier()")
    out.line(f"reduce_add(dQ_tiles, {read_late(site, sum_position(site, own, ' + PART * (BLOCK_M * 2)'), 4)}, dq_tile.index(first + PART))")
    out.assign("dk, dk_rest", "warpgroup_mma_wait(0, [next_dk, next_dk_rest])")


def _store(site: Site, out: Writer) -> None:
    """The end of a tile of keys: a warpgroup's own columns of dV and dK leave by the place of those of V and K, which the others no longer read."""
    out.assign("own", "(nth >> 31) + PART")
    factors = {"dv": kept_scale(site.spec.dropout), "dk": scaled(site, QK)[1] * left_out(site)}
    both = (("dv", "V", site.v_chunks), ("dk", "K", site.qk_chunks))
    for name, operand, found in both:
        with _if_own(out, found):
            for part, value, height in (("tile", name, 64), ("rest", f"{name}_rest", REST)):
                text = value if factors[name] == 1.0 else f"({value} * {factors[name]!r})"
                out.line(f"{operand.lower()}_{part}.index(own).reshape([{height}, 64]).permute((1, 0)).store({text}.to(Q_tiles.dtype))")
    out.line("fence_async_shared()")
    out.line("barrier()")
    for name, operand, found in both:
        with _if_own(out, found):
            for part, tiles, first in (("tile", "tiles", "j0"), ("rest", "rest", "j0 + 64")):
                at = position(site, operand, first, found[0], "PART * 64")
                out.line(f"tma.async_copy_shared_to_global(d{operand}_{tiles}, {at}, {operand.lower()}_{part}.index(own))")
    out.line("tma.store_wait(0)")
    out.line("mbarrier.arrive(kv_empty.index(0), count=1)")
