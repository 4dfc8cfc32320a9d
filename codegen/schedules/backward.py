"""FlashAttention-2's backward pass (Dao 2023, algorithm 2) as portable Triton, in two kernels without atomics: dK and dV by tiles of
keys, dQ by tiles of rows. Both rebuild the weights P from Q, K and the log-sum-exp:

    P = exp(S - lse)    dV = P^T dO    dP = dO V^T    dS = P * (dP - delta)    delta = rowsum(dO * O)
    dQK = dS * dscore/dqk    dQ = dQK K    dK = dQK^T Q    d load = dS * dscore/dload
"""
from __future__ import annotations

from ...expr import QK, Expr, Load, Var
from ..listed import ListedLoops, loops as loops_over
from ..loops import Loops
from ..philox import kept_scale
from ..parts import Site, arguments, count, decode, flatten, head_index, load_tile, matrix, multiples, pieces
from ..program import Program
from ..writer import Kernel, Writer
from .common import Body, buffer, load_lse2, row_pointers, scaled
from .forward import locate
from .relative import add_ends, beyond_ends, ends_arguments, start_ends, store_ends, summed


def keys_kernel(site: Site, of: str = "KV") -> Kernel:
    """dK and dV (and gradients of loads over j alone) for a tile of BLOCK_N keys. of: "K" or "V" for one of them, the loads' with dK's."""
    spec = site.spec
    mine, others = site.axes_of("k", "v"), site.other_axes(site.axes_of("k", "v"))
    columns = site.loads_over("j") if "K" in of else []
    results = {"dK": "grad_k", "dV": "grad_v"} | {buffer(site, load): buffer(site, load) for load in columns} | ends_arguments(site)
    shared = f", summed over ({', '.join(others)}) in registers" if others else ""
    name, what = {"KV": ("keys", "keys and values"), "K": ("keys", "keys"), "V": ("values", "values")}[of]
    kernel = Kernel(f"attention_backward_{name}", f"One program: gradients of the {what} j0 <= j < j0 + BLOCK_N{shared}.",
                    arguments(site, results), ("BLOCK_M", "BLOCK_N"), "KEYS", multiples(site))
    kernel.hoists = max(site.D, site.Dv) <= 128  # wider, without, on an H100: 5 % less time at 192, as much under a mask and at 256; with it Triton 3.7 spilled 12 bytes
    out = kernel.body
    out.assign("tiles", "tl.cdiv(N, BLOCK_N)")
    locate(out, "y", "keys" if site.by_keys.shrinks else "", site.by_keys.shrinks)
    decode(out, mine, "y")
    out.assign("j0", "tile * BLOCK_N")
    if any(Var("j1") in e.leaves for e in _ends(site.by_keys)):
        out.assign("j1", "tl.minimum(j0 + BLOCK_N, N) - 1")
    out.assign("rows", "tl.arange(0, BLOCK_M)")
    out.assign("cols", "tl.arange(0, BLOCK_N)")
    out.assign("j", "j0 + cols")
    head_index(site, out, "de")
    for name in ("K", "V") if "K" in of else ("K",):
        # read by TMA, wide tiles that the matrix units take from registers would be kept there through the loop
        load_tile(site, out, name, name.lower(), "(j < N)[:, None]", direct=max(site.D, site.Dv) > 128 or site.float32)
    if spec.dropout:
        out.assign("seed", "tl.load(Seed)")
    for c in site.qk_chunks if "K" in of else ():
        out.assign(f"dk{c.suffix}", f"tl.zeros([BLOCK_N, {c.width}], tl.float32)")
    for c in site.v_chunks if "V" in of else ():
        out.assign(f"dv{c.suffix}", f"tl.zeros([BLOCK_N, {c.width}], tl.float32)")
    if others:
        with out.block(f"for g in tl.range(0, {count(others)}):", "the queries that share these keys"):
            decode(out, others, "g")
            _over_rows(site, out, columns, of)
    else:
        _over_rows(site, out, columns, of)
    if "K" in of:
        store_gradient(site, out, "K", "dk", "y", "N", "cols", scaled(site, QK)[1])
    if "V" in of:
        store_gradient(site, out, "V", "dv", "y", "N", "cols", kept_scale(spec.dropout))
    return kernel


def _ends(found) -> tuple[Expr, ...]:
    return found.lo, found.hi, found.full_lo, found.full_hi


def _over_rows(site: Site, out: Writer, columns: list[Load], of: str) -> None:
    """One batch index of the key kernel: the loops over tiles of rows."""
    spec = site.spec
    if tuple(spec.axes) == site.axes_of("k", "v"):
        out.assign("z", "y")
    else:
        out.assign("z", flatten(spec.axes))
    matrix(site, out, "Q")
    matrix(site, out, "dO")
    row_pointers(out)
    program = Program(spec, out.section(), inner="i", columns="i")
    body = Body(site, program, transposed=True)
    for load in columns:
        out.assign(f"sum_{buffer(site, load)}", "tl.zeros([BLOCK_N], tl.float32)")
    start_ends(site, out, "tl.zeros([BLOCK_N], tl.float32)")
    loops = loops_over(site, "i", padded=True)
    override = "tl.load(Averaging + z) != 0" if site.averages and not site.listed else ""  # a list has them
    loops.prepare(program, out, override)

    def tile(partial: bool) -> None:
        check = "(i < M)[:, None]"
        out.assign("i", "i0 + rows")
        load_tile(site, out, "Q", "q", check, looped=True)
        load_lse2(site, out)
        rest, _ = scaled(site, QK)
        found = [(load, *scaled(site, load)) for load in columns]
        body.weights(out, partial, "", [rest, *(r for _, r, _ in found)])
        load_tile(site, out, "dO", "do", check, looped=True)
        weights = "p"
        if spec.dropout:
            body.keep(out)
            weights = "tl.where(keep, p, 0.0)"
        if "V" in of:
            out.assign("weights", f"({weights}).to(do{site.v_chunks[0].suffix}.dtype)")
            for c in site.v_chunks:
                out.assign(f"dv{c.suffix}", site.dot("weights", f"do{c.suffix}", f"dv{c.suffix}"))
        if "K" not in of:
            return
        out.assign("delta", "tl.load(delta_rows + i)")
        body.gradient(out, partial)
        for load, r, f in found:
            name = f"sum_{buffer(site, load)}"
            out.assign(name, f"{name} + tl.sum({body.times(r)}, 1)" + (f" * {f!r}" if f != 1.0 else ""))
        if QK in spec.score.leaves:
            gradient = body.times(rest)
            if summed(site):
                gradient = out.assign("dqk", gradient)
                beyond_ends(site, program, out)
                add_ends(site, out, gradient, "" if site.whole else "j < N")
            out.assign("dqk", f"({gradient}).to(q{site.qk_chunks[0].suffix}.dtype)")
            for c in site.qk_chunks:
                out.assign(f"dk{c.suffix}", site.dot("dqk", f"q{c.suffix}", f"dk{c.suffix}"))

    _loops(loops, out, tile, bool(override))
    for load in columns:
        name = buffer(site, load)
        out.line(f"tl.store({name} + tl.cast(z, tl.int64) * N + j, sum_{name}, mask=j < N)")
    store_ends(site, out, "tile")


def _loops(loops: Loops | ListedLoops, out: Writer, tile, override: bool) -> None:
    def full() -> None:
        if loops.full:
            loop = loops.full_loop()
            with out.block(loop.head):
                out.lines(*loop.lines)
                tile(False)

    if not loops.partial_first:
        full()
    if loops.partial:
        loop = loops.partial_loop(out, override)
        with out.block(loop.head):
            out.lines(*loop.lines)
            tile(True)
    if loops.partial_first:
        full()


def store_gradient(site: Site, out: Writer, operand: str, name: str, flat: str, size: str, rows: str, factor: float) -> None:
    """Store a gradient, contiguous as (flattened axes, rows, head size)."""
    x = "j" if rows == "cols" else "i"
    head = site.D if operand in "QK" else site.Dv
    out.assign(f"d{operand.lower()}_tile", f"d{operand} + (tl.cast({flat}, tl.int64) * {size} + {x}0) * {head}")
    if site.float32 and not site.scalar:
        rows = out.assign("own", f"{rows} + ({size} >> 31)", "a zero that the compiler does not know: addresses of the operand's tile, alike, were kept through the loop")
    for c, index, check in pieces(site, operand):
        mask = " & ".join([f"({x} < {size})[:, None]", *([check] if check else [])])
        value = f"{name}{c.suffix}" if factor == 1.0 else f"({name}{c.suffix} * {factor!r})"
        out.line(f"tl.store(d{operand.lower()}_tile + {rows}[:, None] * {head} + {index}[None, :], "
                 f"{value}.to(d{operand}.dtype.element_ty), mask={mask})")


def rows_kernel(site: Site) -> Kernel:
    """dQ (and gradients of loads over i alone, and over neither index) for a tile of BLOCK_M rows."""
    spec = site.spec
    mine, others = site.axes_of("q"), site.other_axes(site.axes_of("q"))
    found = [*site.loads_over("i"), *site.loads_over()]
    results = {"dQ": "grad_q"} | {buffer(site, load): buffer(site, load) for load in found}
    kernel = Kernel("attention_backward_rows", "One program: gradients of the query rows i0 <= i < i0 + BLOCK_M.",
                    arguments(site, results), ("BLOCK_M", "BLOCK_N"), "ROWS", multiples(site))
    out = kernel.body
    out.assign("tiles", "tl.cdiv(M, BLOCK_M)")
    locate(out, "y", "rows" if site.by_rows.grows else "", site.by_rows.only_grows)
    decode(out, mine, "y")
    out.assign("i0", "tile * BLOCK_M")
    if any(Var("i1") in e.leaves for e in _ends(site.by_rows)):
        out.assign("i1", "tl.minimum(i0 + BLOCK_M, M) - 1")
    out.assign("rows", "tl.arange(0, BLOCK_M)")
    out.assign("cols", "tl.arange(0, BLOCK_N)")
    out.assign("i", "i0 + rows")
    head_index(site, out, "de")
    load_tile(site, out, "Q", "q", "(i < M)[:, None]", direct=True)
    if spec.dropout:
        out.assign("seed", "tl.load(Seed)")
    for c in site.qk_chunks:
        out.assign(f"dq{c.suffix}", f"tl.zeros([BLOCK_M, {c.width}], tl.float32)")
    if others:
        with out.block(f"for g in tl.range(0, {count(others)}):", "the batch indices that share these queries"):
            decode(out, others, "g")
            _over_keys(site, out, found)
    else:
        _over_keys(site, out, found)
    store_gradient(site, out, "Q", "dq", "y", "M", "rows", scaled(site, QK)[1])
    return kernel


def _over_keys(site: Site, out: Writer, loads: list[Load]) -> None:
    spec = site.spec
    out.assign("z", "y" if tuple(spec.axes) == site.axes_of("q") else flatten(spec.axes))
    load_tile(site, out, "dO", "do", "(i < M)[:, None]", direct=True)
    row_pointers(out)
    load_lse2(site, out)
    out.assign("delta", "tl.load(delta_rows + i)")
    matrix(site, out, "K")
    matrix(site, out, "V")
    program = Program(spec, out.section(), inner="j")
    body = Body(site, program, transposed=False)
    if site.loads:
        out.assign("excess", "tl.zeros([BLOCK_M], tl.float32)", "sum_j ds, which is 0 but for the rounding of O in delta: see below")
    for load in loads:
        out.assign(f"sum_{buffer(site, load)}", "tl.zeros([BLOCK_M], tl.float32)")
        out.assign(f"mass_{buffer(site, load)}", "tl.zeros([BLOCK_M], tl.float32)")
    loops = loops_over(site, "j", padded=site.whole)
    override = "tl.max(mean, 0) > 0.0" if site.averages else ""
    loops.prepare(program, out, override)

    def tile(partial: bool) -> None:
        out.assign("j", "j0 + cols")
        beyond = partial and not site.whole
        check = "(j < N)[:, None]" if beyond else ""
        load_tile(site, out, "K", "k", check, looped=True)
        rest, _ = scaled(site, QK)
        found = [(load, *scaled(site, load)) for load in loads]
        body.weights(out, partial, "" if beyond else "j", [rest, *(r for _, r, _ in found)])
        load_tile(site, out, "V", "v", check, looped=True)
        if spec.dropout:
            body.keep(out)
        body.gradient(out, partial)
        if site.loads:
            out.assign("excess", "excess + tl.sum(ds, 1)")
        for load, r, f in found:
            for name, factor in ((f"sum_{buffer(site, load)}", "ds"), (f"mass_{buffer(site, load)}", "p")):
                out.assign(name, f"{name} + tl.sum({body.times(r, factor)}, 1)" + (f" * {f!r}" if f != 1.0 else ""))
        if QK in spec.score.leaves:
            out.assign("dqk", f"({body.times(rest)}).to(k{site.qk_chunks[0].suffix}.dtype)")
            for c in site.qk_chunks:
                out.assign(f"dq{c.suffix}", site.dot("dqk", f"k{c.suffix}", f"dq{c.suffix}"))

    _loops(loops, out, tile, bool(override))
    if site.loads:  # sums over many keys see delta's rounding error, which the loop has measured: sum_j p = 1
        out.line("tl.store(delta_rows + i, delta + excess)", "the exact delta, for the kernels that follow")
    for load in loads:
        name = buffer(site, load)
        out.assign(f"sum_{name}", f"sum_{name} - excess * mass_{name}")
        if "i" in load.variables:
            out.line(f"tl.store({name} + tl.cast(z, tl.int64) * M + i, sum_{name}, mask=i < M)")
        else:
            out.line(f"tl.store({name} + z * tiles + tile, tl.sum(tl.where(i < M, sum_{name}, 0.0), 0))")
