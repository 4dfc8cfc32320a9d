"""The backward pass where one tile holds all keys of a batch index, as portable Triton: all gradients by one kernel, each operand read once.

With all keys in a program's registers dQ needs no sum over programs, and what FlashAttention-2's backward (Dao 2023, algorithm 2) keeps of each row
in memory, delta, is worked out where it is used:

    P = exp(S - lse)    dV = P^T dO    dP = dO V^T    delta = rowsum(dO * O)    dS = P * (dP - delta)
    dQK = dS * dscore/dqk    dQ = dQK K    dK = dQK^T Q    d load = dS * dscore/dload
"""
from __future__ import annotations

import contextlib
from dataclasses import replace

from ...expr import QK, Expr, Load
from ...region import Problem
from ...spec import AttentionSpec
from ..captured import differentiable_loads, dims_of, ends, is_relative
from ..gpu import GPU, units
from ..limits import padded
from ..loops import Loop
from ..parts import LOG2E, Site, arguments, count, decode, flatten, head_index, load_tile, matrix, multiples
from ..philox import kept_scale
from ..program import Program
from ..reads import across
from ..registers import registers_per_thread
from ..writer import Kernel, Writer
from .backward import store_gradient
from .hopper_captured import stored_load
from .common import Body, buffer, decode_part, load_lse2, mean_share, row_pointers, row_terms, scaled
from .relative import add_ends, beyond_ends, ends_arguments, start_ends, store_ends, summed

KEYS, ROWS, HEAD = 128, 256, 128
"""Most keys, queries of a program where rows are not in parts, and head size for it. H200, 16k tokens, microseconds of the kernels over keys and rows
with delta, and of this one: head size 64, N = 17, 32, 49, 64: 726, 422, 354, 295 and 302, 200, 202, 173; 32, N = 49, 64, 100, 128: 404, 332, 684, 569 and 255, 220,
298, 246; of a draft with tiles of 256 keys, N = 197, head size 64, 410 and 551. Rows in parts, of the faster of both schedules and of this kernel: head size 64, 77 keys,
4096 rows of 40 batch indices 123 and 70, 16384 of 20 387 and 129, 1024 of 80 46 and 47; 40, 77 keys, 4096 of 32 109 and 61; 128, 64 and 128 keys, 4096 of 64 204 and 144, 233 and 163."""


def takes(spec: AttentionSpec, problem: Problem, gpu: GPU, needs: tuple[bool, ...] = ()) -> bool:
    """Can it run, and was it measured? needs: which of (q, k, v, *aux) get gradients; all that can unless given."""
    head, keys = max(padded(problem.D), padded(problem.Dv)), 1 << (max(problem.N, 1) - 1).bit_length()
    if units(problem, gpu) != "wgmma" or not (0 < problem.N <= KEYS and head <= HEAD):
        return False
    if 64 < head <= 96 and keys > 64 and not in_parts(problem):  # no faster: 16k tokens, N = 100 of 80 282 microseconds and 265 (Hopper's), N = 96 of 96 390 and 391
        return False
    if any(map(ends, spec.score.loads)) and (head > 96 or in_parts(problem)):  # spilled up to 60 bytes, whatever was tried; of their sums there are no parts
        return False
    if keys * head > 8192 and registers_per_thread("one_tile", tiles(spec, problem), problem, spec) > 300:  # captured tiles that come element by element: spilled 52 bytes and more
        return False
    own = set(spec.q) == set(spec.axes)  # or dQ would be a sum over programs
    return own and QK in spec.score.leaves and all(needs[:3])


def in_parts(problem: Problem) -> bool:
    """Are rows split, a program for each part of them, whose sums of dK and dV another kernel adds up?"""
    return problem.M > ROWS


def tiles(spec: AttentionSpec, problem: Problem) -> tuple[int, int, int, int]:
    """(BLOCK_M, BLOCK_N, num_warps, num_stages): of those that do not spill, with dK and dV in up to 96 registers of a thread, the fastest that were measured:
    of 64 rows beside dropout and captured tiles, and where a thread holds little (head size 64, N = 64: dropout 229 and 256 microseconds, a mask 231 and 286, plain 196 and 173).
    Of many rows some are copied ahead, where registers are left for that (4096 rows of 40 batch indices, 77 keys, head size 64: 80 and 85 microseconds; 40: 89 and 63)."""
    keys, parts = _tile_of(problem), in_parts(problem)
    held = keys * (padded(problem.D) + padded(problem.Dv)) // 32
    warps = next((w for w in (2, 4) if (w > 2 or keys <= 32) and held <= 96 * w), 8)
    wide = parts or warps == 8 or max(problem.D, problem.Dv) <= 32 or spec.dropout > 0 or across(spec)
    return 64 if wide and min(problem.M, keys) > 32 else 32, keys, warps, 3 if parts and held <= 64 * warps else 1


def _tile_of(problem: Problem) -> int:
    return max(16, 1 << (problem.N - 1).bit_length())


def offered(problem: Problem) -> list[tuple[int, int, int, int]]:
    """Tiles to measure."""
    keys = _tile_of(problem)
    return [(m, keys, warps, stages) for stages in ((1, 3) if in_parts(problem) else (1,)) for m in (32, 64, 128) if m <= max(32, keys) for warps in (2, 4, 8) if keys <= 32 * warps <= 8 * m]


def holds(spec: AttentionSpec, problem: Problem, needs: tuple[bool, ...], rows: int) -> str:
    """The captured tensor with an element for every row and key whose gradient stays in registers, or "": where one tile of so many rows holds them all too, a program
    goes through batch indices that share the tensor. Not beside gradients that are summed over heads that share keys, or others over rows and keys."""
    loads = differentiable_loads(spec, dict(zip((a.name for a in spec.aux), needs[3:])))
    found = [load for load in loads if {"i", "j"} <= load.variables]
    if len(found) != 1 or problem.M > rows or is_relative(found[0]) or any(set(x) != set(spec.axes) for x in (spec.k, spec.v)):
        return ""
    return found[0].name if sum(load.name == found[0].name for load in loads) == 1 else ""


def reads_delta(site: Site) -> bool:
    """Are there kernels of gradients beside this one, which read delta?"""
    return any(load != stored_load(site) for load in site.loads_over("i", "j"))


def own_loads(site: Site) -> list[Load]:
    """Loads with an element for each row or key, or one for all, whose gradient the kernel makes on the way."""
    return [*site.loads_over("i"), *site.loads_over("j"), *site.loads_over()]


def one_tile_kernel(site: Site) -> Kernel:
    """All gradients but those of tensors with an element for every row and key, of which one may be `held`."""
    spec, site = site.spec, replace(site, descriptors=False)  # a few tiles of each operand, or rows that are copied ahead without them
    mine, others, held = site.axes_of("k", "v"), site.other_axes(site.axes_of("k", "v")), stored_load(site)
    results = {"dQ": "grad_q", **({"dK": "part_k", "dV": "part_v"} if site.row_parts else {"dK": "grad_k", "dV": "grad_v"}), "GradLse": "grad_lse"} | {buffer(site, load): buffer(site, load) for load in [*own_loads(site), *([held] if held else [])]}
    shared = f"; gradients of the keys and values summed over ({', '.join(others)}) in registers" if others else ""
    if held:
        mine, others = held_axes(site)
        shared = f" and queries; the gradient of {held}, summed over its part of ({', '.join(others)}) in registers" if others else " and queries"
    rows = " of a part of the rows" if site.row_parts else ""
    kernel = Kernel("attention_backward_at_once" if held else "attention_backward", f"One program: all keys 0 <= j < N <= BLOCK_N{rows}{shared}.", arguments(site, results | ends_arguments(site)),
                    ("BLOCK_M", "BLOCK_N"), "KEYS", multiples(site))
    kernel.hoists = False  # of a loop of a few steps nothing is worth a register throughout
    out = kernel.body
    out.assign("y", "tl.program_id(0)")
    if site.row_parts:
        out.assign("part", "tl.program_id(1)")
    if held and others:
        out.assign("slot", "y")
        decode_part(out, mine)
    decode(out, mine, "y")
    out.assign("j0", "0")
    out.assign("rows", "tl.arange(0, BLOCK_M)")
    out.assign("cols", "tl.arange(0, BLOCK_N)")
    out.assign("j", "j0 + cols")
    head_index(site, out, "de")
    if spec.dropout:
        out.assign("seed", "tl.load(Seed)")
    if held:
        _held(site, out, held, others)
        return kernel
    _keys(site, out)
    if others:
        with out.block(f"for g in tl.range(0, {count(others)}):", "the queries that share these keys"):
            decode(out, others, "g")
            _over_rows(site, out)
    else:
        _over_rows(site, out)
    slot = out.assign("slot", "part * tl.num_programs(0) + y") if site.row_parts else "y"
    store_gradient(site, out, "K", "dk", slot, "N", "cols", scaled(site, QK)[1])
    store_gradient(site, out, "V", "dv", slot, "N", "cols", kept_scale(spec.dropout))
    return kernel


def parts_kernel(site: Site) -> Kernel:
    """dK and dV, the sums of what programs found for their parts of the rows."""
    kernel = Kernel("attention_backward_sum", "One program: BLOCK elements of dK or of dV, the sums over all parts of the rows.",
                    {f"{role}{x}": f"{name}_{x.lower()}" for role, name in (("Part", "part"), ("d", "grad")) for x in "KV"}
                    | {"elements_k": "grad_k.numel()", "elements_v": "grad_v.numel()", "parts": "parts"}, ("BLOCK",), "SUM")
    out = kernel.body
    out.assign("blocks", "tl.cdiv(elements_k, BLOCK)")
    for x, block, where in (("K", "tl.program_id(0)", "if tl.program_id(0) < blocks:"), ("V", "tl.program_id(0) - blocks", "else:")):
        with out.block(where):
            size = f"elements_{x.lower()}"
            out.assign("n", f"tl.cast({block}, tl.int64) * BLOCK + tl.arange(0, BLOCK)")
            out.assign("total", "tl.zeros([BLOCK], tl.float32)")
            with out.block("for part in tl.range(0, parts):"):
                out.assign("total", f"total + tl.load(Part{x} + tl.cast(part, tl.int64) * {size} + n, mask=n < {size}, other=0.0)")
            out.line(f"tl.store(d{x} + n, total.to(d{x}.dtype.element_ty), mask=n < {size})")
    return kernel


def held_axes(site: Site) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(batch axes of the tensor whose gradient stays in registers, all others)."""
    mine = tuple(a for a in dims_of(site.spec, stored_load(site)) if a not in ("i", "j"))
    return mine, site.other_axes(mine)


def _held(site: Site, out: Writer, load: Load, others: tuple[str, ...]) -> None:
    """All batch indices of a part, whose tiles are one each: their dK and dV leave at once, the tensor's gradient behind the last."""
    name, slot = buffer(site, load), "slot" if others else "y"
    out.assign("dense", "tl.zeros([BLOCK_N, BLOCK_M], tl.float32)")
    known = _read_once(site, out, others)
    with out.block(f"for g in tl.range(part, {count(others)}, parts):") if others else contextlib.nullcontext():
        if others:
            out.assign("rows", "tl.arange(0, BLOCK_M) + (g >> 31)", "a zero that the compiler does not know: offsets would be kept through the loop")
            out.assign("cols", "tl.arange(0, BLOCK_N) + (g >> 31)")
            out.assign("j", "j0 + cols")
            decode(out, others, "g")
        _keys(site, out)
        _over_rows(site, out, known)
        store_gradient(site, out, "K", "dk", "z", "N", "cols", scaled(site, QK)[1])
    out.assign("dense_rows", f"{name} + (tl.cast({slot}, tl.int64) * M + rows) * N")
    out.line(f"tl.store(dense_rows[None, :] + j[:, None], dense.to({name}.dtype.element_ty), mask=(rows < M)[None, :] & (j < N)[:, None])")


def _read_once(site: Site, out: Writer, others: tuple[str, ...]) -> dict[Expr, str]:
    """Captured tiles that all those batch indices share, read in front of the loop: in it their addresses would be kept in registers, two for each element."""
    out.assign("i", "rows")
    program = Program(site.spec, out, inner="", columns="i")
    program.enter(out, [])
    return {load: program.value(load) for load in across(site.spec) if not load.variables & {*others}} if others else {}


def _keys(site: Site, out: Writer) -> None:
    for name in ("K", "V"):
        load_tile(site, out, name, name.lower(), "(j < N)[:, None]")
    for gradient, chunks in (("dk", site.qk_chunks), ("dv", site.v_chunks)):
        for c in chunks:
            out.assign(f"{gradient}{c.suffix}", f"tl.zeros([BLOCK_N, {c.width}], tl.float32)")


def _over_rows(site: Site, out: Writer, known: dict[Expr, str] | None = None) -> None:
    """One batch index: the loop over tiles of rows. known: what was read before."""
    spec, held = site.spec, stored_load(site)
    out.assign("z", "y" if not held and tuple(spec.axes) == site.axes_of("k", "v") else flatten(spec.axes))
    for operand in ("Q", "dO", *(() if reads_delta(site) else ("Out",))):
        matrix(site, out, operand)
    if reads_delta(site):
        row_pointers(out)
    program = Program(spec, out.section(), inner="i", columns="i")
    program.known = known or {}
    body = Body(site, program, transposed=True, sums_keys=not site.whole)
    by_key, single = site.loads_over("j"), site.loads_over()
    for load in (*by_key, *single):
        out.assign(f"sum_{buffer(site, load)}", "tl.zeros([BLOCK_N], tl.float32)" if load in by_key else "0.0")
    start_ends(site, out, "tl.zeros([BLOCK_N], tl.float32)")
    if held:
        out.assign("i0", "0")
        _tile(site, out, program, body)
    else:
        loop = Loop("i0", "0", "M", "BLOCK_M", ahead=bool(site.row_parts))
        with out.block((loop.of_part(out) if site.row_parts else loop).head):
            _tile(site, out, program, body)
    for load in (*by_key, *single):
        name = buffer(site, load)
        at, mask = (" * N + j", ", mask=j < N") if load in by_key else (" * tl.num_programs(1) + part" * bool(site.row_parts), "")
        if load in by_key and site.row_parts:
            name += f" + tl.cast(part, tl.int64) * ({count(spec.axes)}) * N"
        out.line(f"tl.store({name} + tl.cast(z, tl.int64){at}, sum_{buffer(site, load)}{mask})")
    store_ends(site, out, "0")


def _tile(site: Site, out: Writer, program: Program, body: Body) -> None:
    spec, check = site.spec, "(i < M)[:, None]"
    out.assign("i", "i0 + rows")
    load_tile(site, out, "Q", "q", check, looped=True)
    load_tile(site, out, "dO", "do", check, looped=True)
    if reads_delta(site):  # as other kernels do
        load_lse2(site, out)
        out.assign("delta", "tl.load(delta_rows + i)")
    else:
        load_tile(site, out, "Out", "o", check, looped=True)
        row_terms(site, out)
        if not site.loads:
            with out.block("if GradLse is not None:", "d lse / d score = p: what reaches lse adds p * grad_lse to ds"):
                out.assign("delta", "delta - tl.load(GradLse + tl.cast(z, tl.int64) * M + i, mask=i < M, other=0.0)")
        out.assign("lse2", f"lse * {LOG2E!r}")
        mean_share(site, out)
    rest, factor = scaled(site, QK)
    found = [(load, *scaled(site, load)) for load in own_loads(site)]
    held = stored_load(site)
    wanted = [rest, *(r for _, r, _ in found), *([scaled(site, held)[0]] if held else [])]
    body.weights(out, True, "j" if site.whole else "", wanted)
    weights = "p"
    if spec.dropout:
        body.keep(out)
        weights = "tl.where(keep, p, 0.0)"
    out.assign("weights", f"({weights}).to(do{site.v_chunks[0].suffix}.dtype)")
    for c in site.v_chunks:
        out.assign(f"dv{c.suffix}", site.dot("weights", f"do{c.suffix}", f"dv{c.suffix}"))
    if held:
        store_gradient(site, out, "V", "dv", "z", "N", "cols", kept_scale(spec.dropout))
    body.gradient(out, True)
    if site.loads:
        out.assign("excess", "tl.sum(ds, 0)", "which is 0 but for the rounding of O in delta: sums over many keys would see it")
        out.assign("ds", "ds - p * excess[None, :]")
    if reads_delta(site):
        out.line("tl.store(delta_rows + i, delta + excess)", "the exact delta, for the kernels that follow")
    for load, r, f in found:
        name, gradient = buffer(site, load), body.times(r)
        scale = f" * {f!r}" if f != 1.0 else ""
        if "i" in load.variables:
            out.line(f"tl.store({name} + tl.cast(z, tl.int64) * M + i, tl.sum({gradient}, 0){scale}, mask=i < M)")
        else:
            total = f"tl.sum({gradient}, 1)" if "j" in load.variables else f"tl.sum(tl.sum({gradient}, 1), 0)"
            out.assign(f"sum_{name}", f"sum_{name} + {total}{scale}")
    if held:
        r, f = scaled(site, held)
        out.assign("dense", f"dense + {body.times(r)}" + (f" * {f!r}" if f != 1.0 else ""))
    gradient = body.times(rest)
    if summed(site):
        gradient = out.assign("dqk", gradient)
        beyond_ends(site, program, out)
        add_ends(site, out, gradient)
    out.assign("dqk", f"({gradient}).to(q{site.qk_chunks[0].suffix}.dtype)")
    for c in site.qk_chunks:
        out.assign(f"dk{c.suffix}", site.dot("dqk", f"q{c.suffix}", f"dk{c.suffix}"))
    for c in site.qk_chunks:
        out.assign(f"dq{c.suffix}", site.dot("tl.trans(dqk)", f"k{c.suffix}"))
    store_gradient(site, out, "Q", "dq", "z", "M", "rows", factor)
