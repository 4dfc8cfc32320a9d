"""Attention's backward pass for Hopper, warp-specialised, in Gluon: one pass over the keys, as FlashAttention-3 (Shah et al. 2024, section 3).

A program for each multiprocessor takes tiles of keys, one after the other. It holds one and goes over the query rows that see it, with the score
tile transposed, so that P^T and dS^T feed the products dV += P^T dO and dK += dS^T Q from registers. dS goes through shared memory for dQ = dS K,
which is added to a float32 buffer by the tensor memory accelerator: in no fixed order, so that dQ may differ between runs by rounding. No product is
in flight at the end of a step: the assembler would serialise those that are.
"""
from __future__ import annotations

import functools
from dataclasses import replace

from ..captured import ends
from ..gluon import Partition, WarpSpecialized
from ..limits import padded
from ..parts import Site, tiles_name
from ..program import Program
from ..reads import across
from ..writer import Kernel, Writer
from .common import Body, has_slopes
from .hopper import barriers, block_shape, position, reserve, tile_view, tma_arguments
from .hopper_captured import gradient_dims, mask_arguments, reserve_mask, reserve_tiles, stored_arguments, stored_load, tile_arguments, tile_loads
from .hopper_dq import HALF, add_apart, ds_tile, hand_over_dq, names, reserve_dq, sum_arguments, sum_dq
from .hopper_keys import adds_apart, by_hand, each_step, each_tile, frees_late, is_apart, is_split, key_loads, key_tiles, keys_at, keys_from_rings, locate, partial_tiles
from .hopper_keys import has_single_do, is_wide, readers, reserve_numbers, slot_of_last, worked_out
from .relative import ends_arguments, flush_ends, reserve_ends, start_ends, store_ends
from .hopper_vectors import last_of_tile
from .hopper_past import hand_over_zeros, steps_of_half
from .hopper_producer import load_keys, load_tiles, reserve_rows, row_loads
from .hopper_steps import WARPS, copy_out, end_rows, gradients, issue_dq, keep, multiplies_beside, number_rows, publish_ds, scores_and_dp, start_tile, store_in_place, store_short, store_short_rows
from .hopper_steps import unless_short, view_rows
from .hopper_thirds import REGISTERS as THIRDS_REGISTERS, accumulate_thirds, arguments as thirds_arguments, reserve_operands
from .hopper_wide import accumulate_wide
from .hopper_score import by_halves, score_gradient, unknown_zero, weights

REGISTERS = {False: (240, 24), True: (232, 40)}
"""Of a thread of both warpgroups, and of the warps that copy and add; those where one reads lists and vectors of a mask for them, heads up to 96
without dropout leave some, or heads are above 128 (with 24 it spilled 28 bytes)."""
LISTING = 224, 56
"""The same where tiles begin with documents: that warp reads more."""
SPLIT_REGISTERS = {False: (208, 64, 32), True: (200, 64, 48)}
"""Of a thread of each of two warpgroups with half of the keys, of the third, which computes dQ, and of the warp that copies: more where it reads a mask
by hand or copies much."""
PIECED_REGISTERS = 200, 72, 40
"""The same under dropout where heads of several pieces share keys: dQ has a place and a tensor map for each piece."""


def keys_kernel(site: Site) -> Kernel:
    """dK, dV, and the tile's share of dQ, for a tile of BLOCK_N keys."""
    if site.documents or site.thirds:  # where tiles begin anywhere, or have 96 keys
        site = replace(site, whole=False, narrow=site.thirds)
    spec = site.spec
    mine, others = site.axes_of("k", "v"), site.other_axes(site.axes_of("k", "v"))
    results = {"dK": "grad_k", "dV": "grad_v"} | ends_arguments(site)
    halves, keys = (2, HALF) if is_split(site) else (1, HALF if site.thirds else "BLOCK_N")
    rows = {"Q": "BLOCK_M", "dO": "BLOCK_M", "K": keys, "V": keys, "dK": keys, "dV": keys}
    shared = f", summed over ({', '.join(others)})" if others else ""
    kernel = WarpSpecialized("attention_backward_keys", f"Gradients of the keys and values j0 <= j < j0 + BLOCK_N{shared}, and their share of dQ, tile by tile.",
                             sum_arguments(site) | tma_arguments(site, results | {"Taken": "taken", "Order": "order", "together": "together"} | worked_out(site), rows)
                             | (thirds_arguments(site, results) if site.thirds else {}) | tile_arguments(site, "BLOCK_M", keys) | mask_arguments(site, "BLOCK_M", keys) | stored_arguments(site, keys), ("BLOCK_M", "BLOCK_N", "STAGES"), "KEYS",
                             [name for name in worked_out(site) if name != "padded"])
    out = kernel.body
    if not site.documents and "tiles" not in worked_out(site):
        out.assign("tiles", "tl.cdiv(N, BLOCK_N)")
    if spec.dropout:
        out.assign("seed", "tl.load(Seed)")
    if site.thirds:
        reserve_operands(site, out)
    else:
        _reserve_operands(site, out, halves, keys)
    reserve_rows(site, out)
    reserve_ends(site, out)
    reserve_tiles(site, out, halves, "BLOCK_M", keys)
    reserve_mask(site, out, "STAGES", halves, "BLOCK_M", keys)
    reserve_numbers(site, out)
    barriers(out, key_tiles(site), {"kv_full": 2, "kv_empty": 3 if site.thirds else 1} | ({"kv_done": 2} if is_split(site) else {"kv_told": 1} if is_apart(site) else {}))
    if has_single_do(site):
        barriers(out, 1, {"do_full": 1, "do_empty": readers(site)})
    ring = {"q_full": 2} | ({} if has_single_do(site) else {"do_full": 1}) | ({} if frees_late(site) or adds_apart(site) else {"rows_empty": readers(site)})
    barriers(out, "STAGES", ring | ({"ds_full": 2, "ds_empty": 1} if is_split(site) else {}))
    out.line("fence_async_shared()")
    function, returns = locate(site, mine)
    partial = partial_tiles(site)
    where = ", ".join(returns), kernel.function(function, ["number"], returns)
    tiles = functools.partial(each_tile, site)
    producer = load_tiles(site, others, halves, HALF, where)
    reads = by_hand(site) and (is_split(site) or not (tile_loads(site) or spec.dropout or by_halves(site)))  # with 232 registers, products would run one by one
    if is_split(site):
        pieced = others and spec.dropout and len(site.qk_chunks) > 1 and not reads
        half, (own, few, least) = _accumulate_half(site, partial, others, tiles), PIECED_REGISTERS if pieced else SPLIT_REGISTERS[reads or copies_much(site)]
        kernel.start([(half, ["0"], 4, own), (half, ["1"], 4, own), (sum_dq(site, tiles), [], 4, few), (producer, [], 1, least), (_store_keys(site, tiles), [], 1, least)])
    elif site.thirds:
        third, (own, least) = accumulate_thirds(site, partial, others, tiles), THIRDS_REGISTERS
        kernel.start([*((third, [str(n)], 4, own) for n in range(3)), (producer, [], 1, least), (load_keys(site), [], 1, least)])
    else:
        own, least = LISTING if site.documents else REGISTERS[reads or is_wide(site) or padded(site.D) + padded(site.Dv) <= 192 and not spec.dropout]
        accumulate = accumulate_wide if is_wide(site) else _accumulate
        beside = [(load_keys(site), [], 1, least)] if is_apart(site) else []
        adder = [(add_apart(site), [], 1, least)] if adds_apart(site) else []
        kernel.start([(accumulate(site, partial, others, tiles), [], WARPS, own), (producer, [], 1, least), *beside, *adder])
    return kernel


def _reserve_operands(site: Site, out: Writer, halves: int, keys: str | int) -> None:
    """Shared memory for tiles, and for what becomes of them."""
    reserve(site, out, "q_ring", "Q", "STAGES", "BLOCK_M")
    reserve(site, out, "do_ring", "dO", "1" if has_single_do(site) else "STAGES", "BLOCK_M")
    reserve(site, out, "k_tile", "K", halves * key_tiles(site), keys)
    reserve(site, out, "v_tile", "V", halves * key_tiles(site), keys)
    reserve_dq(site, out)
    dtype = f"{tiles_name('Q', site.qk_chunks[0])}.dtype"
    shape, copies = f"{keys}, BLOCK_M", "STAGES * 2" if is_split(site) else "1"
    layout = f"gl.NVMMASharedLayout.get_default_for([{shape}], {dtype})"
    if stored_load(site):
        shape, layout = ", ".join([*["1"] * gradient_dims(site.spec, site.stored), f"BLOCK_M, {keys}"]), "Captured_tiles.layout"
    out.assign("ds_tile", f"gl.allocate_shared_memory({dtype}, [{copies}, {shape}], {layout})")
    if is_wide(site):
        out.assign("p_tile", f"gl.allocate_shared_memory({dtype}, [{keys}, BLOCK_M], gl.NVMMASharedLayout.get_default_for([{keys}, BLOCK_M], {dtype}))")


def copies_much(site: Site) -> bool:
    """Are the registers of a warp that only copies too few, 4 to 12 bytes? It reads several vectors for the others beside queries that share keys, or heads come in
    pieces beside such queries or captured tensors."""
    others = site.other_axes(site.axes_of("k", "v"))
    return bool(others) and len(row_loads(site) + key_loads(site)) > 1 or len(site.qk_chunks) > 1 and bool(others or site.spec.loads)


def _accumulate(site: Site, partial: str, others, tiles) -> Partition:
    spec, nq, nv = site.spec, len(site.qk_chunks), len(site.v_chunks)
    consumer = Partition("sum_keys", "Two warpgroups: one tile of keys against all query rows that see it.")
    out = consumer.body
    dtype = f"{tiles_name('Q', site.qk_chunks[0])}.dtype"
    out.line(f"scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [{WARPS}, 1], [16, BLOCK_M, 16])")
    for kind, name, found in (("keys", "dk", site.qk_chunks), ("values", "dv", site.v_chunks)):
        for c in found:
            out.line(f"{name}_layout{c.suffix}: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [{WARPS}, 1], [16, {c.width}, 16])")
    for c in site.qk_chunks:  # BLOCK_M rows are one warpgroup's: the other takes half of the columns
        out.line(f"dq_layout{c.suffix}: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, {WARPS // 4}], [16, {c.width // (WARPS // 4)}, 16])")
    number_rows(out)
    place = unknown_zero(site, "told") or "0"
    with tiles(out, WARPS):
        body = start_tile(site, out, others)

        def multiply_weights() -> None:
            for c in site.v_chunks:
                out.assign(f"next_dv{c.suffix}", f"warpgroup_mma(weights{c.suffix}, do{c.suffix}, dv{c.suffix}, is_async=True)")
        with each_step(site, out):
            view_rows(site, out)
            scores_and_dp(site, body, out)
            weights(site, body, out, partial, "BLOCK_N", WARPS)
            for c in site.v_chunks:
                out.assign(f"weights{c.suffix}", f"gl.convert_layout(p.to({dtype}), gl.DotOperandLayout(0, dv_layout{c.suffix}, 2))")
            if multiplies_beside(site):
                multiply_weights()
                out.assign("dp", f"warpgroup_mma_wait({nv}, [next_dp])", "dV still runs")
                score_gradient(site, body, out, partial)
                publish_ds(site, out, place)
            else:
                out.assign("dp", "warpgroup_mma_wait(0, [next_dp])")
                score_gradient(site, body, out, partial)
                publish_ds(site, out, place, multiply_weights)
            issue_dq(site, out, site.qk_chunks, place)
            out.assign(names("dv", site.v_chunks), f"warpgroup_mma_wait({nq}, [{names('next_dv', site.v_chunks)}])", "dQ still runs")
            for c in site.qk_chunks:
                out.assign(f"next_dk{c.suffix}", f"warpgroup_mma(gl.convert_layout(ds, gl.DotOperandLayout(0, dk_layout{c.suffix}, 2)), q{c.suffix}, "
                                                 f"dk{c.suffix}, is_async=True)")
            out.assign(names("dq", site.qk_chunks), f"warpgroup_mma_wait({nq}, [{names('next_dq', site.qk_chunks)}])", "dK still runs")
            hand_over_dq(site, out, place if len(site.qk_chunks) > 1 else "0")
            out.assign(names("dk", site.qk_chunks), f"warpgroup_mma_wait(0, [{names('next_dk', site.qk_chunks)}])")
            out.line("leave_rows(slot)")
            if others:
                flush_ends(site, out, "tile", "gl.zeros([BLOCK_N], gl.float32, keywise)")
        end_rows(site, out, others)
        if through_dq(site):
            _store_through_dq(site, out)
        else:
            out.line("await_place_of_dq()")
            store_in_place(site, out)
    out.line("tma.store_wait(0)")
    out.line("hand_dq()", "no step is left")
    return consumer


def through_dq(site: Site) -> bool:
    """Are dV and dK stored one after the other through the place of dQ, which is as large? Then the next keys arrive meanwhile."""
    return not is_split(site) and site.D == site.Dv


def _store_through_dq(site: Site, out: Writer) -> None:
    out.line("mbarrier.arrive(kv_empty.index(0), count=1)", "the keys and values have been read")
    out.line("await_place_of_dq()")
    for name in ("dv", "dk"):
        found = [x for x in gradients(site) if x[0] == name]
        if name == "dk":
            out.line("tma.store_wait(0)", "dV has left its place")
            out.line("barrier()")
        for _, operand, tiles, c, value in found:
            shape, first = block_shape(site, operand, "BLOCK_N", c), unknown_zero(site, "tile")
            shape, index = (f"1, {shape}", f".index({first})") if first else (shape, "")
            out.assign(f"{name}_tile{c.suffix}", f"dq_tile{c.suffix}._reinterpret({tiles}.dtype, [{shape}], {tiles}.layout){index}")
            out.line(f"{name}_tile{c.suffix}.reshape([BLOCK_N, {c.width}]).store({value})")
        out.line("fence_async_shared()")
        out.line("barrier()")
        for _, operand, tiles, c, _ in found:
            with unless_short(site, out, "j0", "BLOCK_N"):
                out.line(f"tma.async_copy_shared_to_global({tiles}, {position(site, operand, 'j0', c)}, {name}_tile{c.suffix})")
            if site.documents:
                store_short_rows(site, out, operand, c, f"{name}_tile{c.suffix}")


def in_registers(site: Site) -> str:
    """Which of a half's k and v the registers of its warpgroup have room for: each spares the loop a tenth of its reads of shared memory, which
    are as many as it can deliver. H100, head size 64, N = 4096: both 5 to 10 % faster under a mask of data, 5 under ALiBi; v alone 3 to 5 under dropout."""
    spec = site.spec
    if spec.dropout and any(map(ends, spec.score.loads)):
        return ""
    return "v" if spec.dropout or across(spec) or has_slopes(site) else "kv"


def _accumulate_half(site: Site, partial: str, others, tiles) -> Partition:
    """A warpgroup with half of the keys: as `_accumulate`, but dS is handed to the warpgroup that computes dQ."""
    spec, nq, nv = site.spec, len(site.qk_chunks), len(site.v_chunks)
    consumer = Partition("sum_keys", f"One warpgroup: {HALF} keys against all query rows that see them.", ("PART",))
    out = consumer.body
    dtype = f"{tiles_name('Q', site.qk_chunks[0])}.dtype"
    out.line("scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])")
    for name, found in (("dk", site.qk_chunks), ("dv", site.v_chunks)):
        for c in found:
            out.line(f"{name}_layout{c.suffix}: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, {c.width}, 16])")
    out.line("keywise: gl.constexpr = gl.SliceLayout(1, scores)")
    out.line("rowwise: gl.constexpr = gl.SliceLayout(0, scores)")
    out.assign("rows", "gl.arange(0, BLOCK_M, rowwise)")
    out.assign("zeros", f"gl.zeros([{HALF}, BLOCK_M], gl.float32, scores)")
    with tiles(out, 4):
        out.assign("own", "kv * 2 + PART")
        out.assign("key0", f"j0 + PART * {HALF}")
        out.assign("j", f"key0 + gl.arange(0, {HALF}, keywise)")
        last_of_tile(site, out, "i", f"tl.minimum(key0 + {HALF}, {'key_end' if site.documents else 'N'})")
        program = Program(spec, out.section(), inner="i", columns="i", varying=others, nearest="" if site.whole else "j")
        program.ramps = True
        keys_from_rings(site, program)
        body = Body(site, program, transposed=True)
        for letter, found in (("k", site.qk_chunks), ("v", site.v_chunks)):
            for c in found:
                held = ".load(gl.DotOperandLayout(0, scores, 2))" if letter in in_registers(site) else ""
                out.assign(f"{letter}{c.suffix}", tile_view(f"{letter}_tile", c, "own", HALF) + held)
                out.assign(f"d{letter}{c.suffix}", f"gl.zeros([{HALF}, {c.width}], gl.float32, d{letter}_layout{c.suffix})")
        start_ends(site, out, f"gl.zeros([{HALF}], gl.float32, keywise)")
        steps = steps_of_half(site, out)
        hand_over_zeros(site, out, "front")
        with each_step(site, out, *steps):
            for letter, name, found in (("q", "q", site.qk_chunks), ("do", "do", site.v_chunks)):
                for c in found:
                    out.assign(f"{name}{c.suffix}", tile_view(f"{letter}_ring", c, "slot", "BLOCK_M"))
            scores_and_dp(site, body, out, str(HALF), 4)
            weights(site, body, out, partial, str(HALF), 4)
            for c in site.v_chunks:
                out.assign(f"weights{c.suffix}", f"gl.convert_layout(p.to({dtype}), gl.DotOperandLayout(0, dv_layout{c.suffix}, 2))")
                out.assign(f"next_dv{c.suffix}", f"warpgroup_mma(weights{c.suffix}, do{c.suffix}, dv{c.suffix}, is_async=True)")
            out.assign("dp", f"warpgroup_mma_wait({nv}, [next_dp])", "dV still runs")
            score_gradient(site, body, out, partial)
            for c in site.qk_chunks:
                out.assign(f"next_dk{c.suffix}", f"warpgroup_mma(gl.convert_layout(ds, gl.DotOperandLayout(0, dk_layout{c.suffix}, 2)), q{c.suffix}, "
                                                 f"dk{c.suffix}, is_async=True)")
            out.line("mbarrier.wait(ds_empty.index(slot), phase ^ 1)")
            out.line(f"{ds_tile(site, 'slot * 2 + PART', HALF)}.store(ds)")
            out.line("fence_async_shared()")
            out.line("mbarrier.arrive(ds_full.index(slot), count=1)")
            out.assign(names("dv", site.v_chunks), f"warpgroup_mma_wait({nq}, [{names('next_dv', site.v_chunks)}])")
            out.assign(names("dk", site.qk_chunks), f"warpgroup_mma_wait(0, [{names('next_dk', site.qk_chunks)}])")
            if not frees_late(site):
                out.line("mbarrier.arrive(rows_empty.index(slot), count=1)")
            if others:
                flush_ends(site, out, "tile * 2 + PART", f"gl.zeros([{HALF}], gl.float32, keywise)")
        hand_over_zeros(site, out, "back")
        keys_at(site, out, 4)
        if not others:
            store_ends(site, out, "tile * 2 + PART")
        slot_of_last(site, out)
        out.line("mbarrier.wait(ds_empty.index(slot), phase)", "dQ has read the keys: their place takes the gradients")
        first = f"j0 + PART * {HALF}"
        with unless_short(site, out, first, HALF):
            keep(site, out, "own + (nth >> 31)", HALF)
        store_short(site, out, first, HALF)
        out.line("mbarrier.arrive(kv_done.index(kv), count=1)")
    return consumer


def _store_keys(site: Site, tiles) -> Partition:
    """Beside both halves: neither waits until its gradients have left, nor holds what says where they go."""
    storer = Partition("store_keys", "One warp: dV and dK of a tile of keys to memory, when both halves are done.")
    out = storer.body
    with tiles(out, 1, False):
        out.line("mbarrier.wait(kv_done.index(kv), nth >> 1 & 1)")
        for n in range(2):
            first = f"j0 + {n * HALF}" if n else "j0"
            with unless_short(site, out, first, HALF):
                copy_out(site, out, first, f"kv * 2 + {n}")
        out.line("tma.store_wait(0)", "dV and dK have left")
        out.line("mbarrier.arrive(kv_empty.index(kv), count=1)", "their place is free")
    return storer
