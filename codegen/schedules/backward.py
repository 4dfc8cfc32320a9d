"""FlashAttention-2's backward pass (Dao 2023, algorithm 2) as portable Triton, in two kernels without atomics: dK and dV by tiles of
keys, dQ by tiles of rows. Both rebuild the weights P from Q, K and the log-sum-exp:

    P = exp(S - lse)    dV = P^T dO    dP = dO V^T    dS = P * (dP - delta)    delta = rowsum(dO * O)
    dQK = dS * dscore/dqk    dQ = dQK K    dK = dQK^T Q    d load = dS * dscore/dload
"""
from __future__ import annotations

from dataclasses import dataclass

from ...expr import QK, Const, Expr, Load, Var
from ...spec import EmptyRow
from .. import captured
from ..derivative import partial as derivative
from ..parts import LOG2E, Loops, Site, arguments, count, decode, flatten, head_index, load_tile, matrix, pieces, product
from ..philox import threshold
from ..program import Program
from ..torch_tiled import MEAN_ROW
from ..writer import Kernel, Writer
from .forward import heavy_last


def split_factor(e: Expr) -> tuple[Expr, float]:
    """A derivative as (rest, constant): the constant multiplies the finished gradient once instead of every element."""
    factor = 1.0
    while getattr(e, "op", "") == "mul" and any(isinstance(a, Const) for a in e.args):
        a, b = e.args
        e, c = (b, a) if isinstance(a, Const) else (a, b)
        factor *= c.value
    return (Const(1.0), factor * e.value) if isinstance(e, Const) else (e, factor)


def scaled(site: Site, wrt: Expr) -> tuple[Expr, float]:
    return split_factor(derivative(site.spec.score, wrt))


def buffer(site: Site, load: Load) -> str:
    """Name of the buffer that receives a load's gradient; one tensor may be read by several loads."""
    same = [x for x in site.loads if x.name == load.name]
    return f"d_{load.name}" if len(same) == 1 else f"d_{load.name}_{same.index(load)}"


def delta_kernel(site: Site) -> Kernel:
    """delta = rowsum(dO * O) for BLOCK_M rows."""
    kernel = Kernel("attention_delta", "delta[z, i] = sum_e dO[z, i, e] * O[z, i, e], which is also sum_j P[z, i, j] * dP[z, i, j].",
                    arguments(site, {}), ("BLOCK_M",), "DELTA")
    out = kernel.body
    out.assign("tiles", "tl.cdiv(M, BLOCK_M)")
    out.assign("z", "tl.program_id(0) // tiles")
    decode(out, site.spec.axes, "z")
    out.assign("i0", "tl.program_id(0) % tiles * BLOCK_M")
    out.assign("rows", "tl.arange(0, BLOCK_M)")
    out.assign("i", "i0 + rows")
    head_index(site, out, "e")
    out.assign("delta", "tl.zeros([BLOCK_M], tl.float32)")
    for name, operand in (("o", "Out"), ("do", "dO")):
        load_tile(site, out, operand, name, "(i < M)[:, None]")
    for c in site.v_chunks:
        out.assign("delta", f"delta + tl.sum(o{c.suffix}.to(tl.float32) * do{c.suffix}.to(tl.float32), 1)")
    if site.can_be_empty and site.spec.empty_row is EmptyRow.NAN:
        out.assign("lse", "tl.load(Lse + tl.cast(z, tl.int64) * M + i, mask=i < M, other=0.0)")
        out.assign("delta", 'tl.where(lse == float("-inf"), 0.0, delta)', "rows that see no key are NaN; they pass no gradient on")
    out.line("tl.store(Delta + tl.cast(z, tl.int64) * M + i, delta, mask=i < M)")
    return kernel


@dataclass
class Body:
    """Writes P and dS of one tile. `transposed`: keys run along the tile's first dimension."""

    site: Site
    program: Program
    transposed: bool

    def across(self, row_vector: str) -> str:
        """A vector over i, spread over the tile."""
        return f"{row_vector}[None, :]" if self.transposed else f"{row_vector}[:, None]"

    def _valid(self, certain: str) -> list[str]:
        return self.program.condition(x for x in "ij" if x not in certain)

    def weights(self, out: Writer, partial: bool, certain: str, wanted: list[Expr]) -> None:
        """p = exp(score - lse) from q and k tiles; `certain`: indices of this body that cannot lie outside."""
        site, program = self.site, self.program
        spec, averages = site.spec, partial and site.averages
        visible = [spec.visible] if partial and spec.is_masked else []
        program.enter(out, [site.raw, *visible, *wanted, *([spec.empty_over] if averages else [])], certain)
        if QK in spec.score.leaves:
            a, b = ("k", "q") if self.transposed else ("q", "k")
            product(site, out, "qk", a, b, site.qk_chunks)
        raw = program.tile(site.raw)
        shape = "[BLOCK_N, BLOCK_M]" if self.transposed else "[BLOCK_M, BLOCK_N]"
        seen = [*(self._valid(certain + "i") if partial else []), *(program.tile(v) for v in visible)]
        if seen:
            out.assign("visible", " & ".join(seen))
        c2 = site.factor * LOG2E
        exponent = f"{raw} * {c2!r} - {self.across('lse2')}"
        if program.dims(site.raw) != {"i", "j"}:
            exponent += f" + tl.zeros({shape}, tl.float32)"
        out.assign("p", f'tl.where(visible, tl.exp2({exponent}), 0.0)' if seen else f"tl.exp2({exponent})")
        if averages:
            over = program.tile(spec.empty_over)
            keys = [*self._valid(certain + "i"), *([over] if over != "True" else [])]
            mean = f"tl.where({' & '.join(keys)}, {self.across('mean')}, 0.0)" if keys else self.across("mean")
            out.assign("p", f"tl.where({self.across('mean')} > 0.0, {mean}, p)", "rows that average v")

    def keep(self, out: Writer) -> None:
        """p_kept = the weights after dropout, but for the factor 1 / (1 - p)."""
        spec = self.site.spec
        tile = f"keep_tile(seed, z, i0, j0, {threshold(spec.dropout)}, BLOCK_M, BLOCK_N)"
        if self.transposed:
            tile = f"tl.trans({tile})"
        out.assign("keep", tile)

    def gradient(self, out: Writer, partial: bool) -> None:
        """ds = p * (dp - delta) from do and v tiles."""
        site = self.site
        a, b = ("v", "do") if self.transposed else ("do", "v")
        product(site, out, "dp", a, b, site.v_chunks)
        if site.spec.dropout:
            out.assign("dp", f"tl.where(keep, dp, 0.0) * {1.0 / (1.0 - site.spec.dropout)!r}")
        out.assign("ds", f"p * (dp - {self.across('delta')})")
        if partial and site.averages and site.spec.empty_row is EmptyRow.MEAN:
            out.assign("ds", f"tl.where({self.across('mean')} > 0.0, 0.0, ds)", "a constant replaced these scores")

    def times(self, rest: Expr, factor: str = "ds") -> str:
        """ds (or p) times a derivative (its constant left out); where p is 0 the derivative may be anything."""
        if rest == Const(1.0):
            return factor
        text = f"{factor} * {self.program.tile(rest)}"
        finite = not any(getattr(x, "op", "") in ("truediv", "log", "reciprocal", "rsqrt", "sqrt") for x in _nodes(rest))
        return text if finite else f"tl.where(p > 0.0, {text}, 0.0)"


def _nodes(e: Expr):
    yield e
    for a in e.args_():
        yield from _nodes(a)


def row_vectors(site: Site, out: Writer, check: bool) -> None:
    """lse2 (in powers of two), delta, and for rows that average v the weight of each of their keys."""
    mask = ", mask=i < M, other={}" if check else ""
    out.assign("lse", f"tl.load(lse_rows + i{mask.format('float(' + chr(34) + 'inf' + chr(34) + ')')})",
               "rows beyond the end get weight exp(-inf) = 0" if check else "")
    out.assign("delta", f"tl.load(delta_rows + i{mask.format('0.0')})")
    if site.averages:
        out.assign("mean", f'tl.where((lse >= {MEAN_ROW!r}) & (lse < float("inf")), {MEAN_ROW!r} / lse, 0.0)')
    if site.can_be_empty and site.spec.empty_row in (EmptyRow.NAN, EmptyRow.ZERO):
        out.assign("lse", 'tl.where(lse == float("-inf"), float("inf"), lse)', "rows that see no key get weight 0")
    out.assign("lse2", f"lse * {LOG2E!r}")


def keys_kernel(site: Site) -> Kernel:
    """dK and dV (and gradients of loads over j alone) for a tile of BLOCK_N keys."""
    spec = site.spec
    mine, others = site.axes_of("k", "v"), site.other_axes(site.axes_of("k", "v"))
    columns = site.loads_over("j")
    results = {"dK": "grad_k", "dV": "grad_v"} | {buffer(site, load): buffer(site, load) for load in columns}
    shared = f", summed over ({', '.join(others)}) in registers" if others else ""
    kernel = Kernel("attention_backward_keys", f"One program: gradients of the keys and values j0 <= j < j0 + BLOCK_N{shared}.",
                    arguments(site, results), ("BLOCK_M", "BLOCK_N"), "KEYS")
    out = kernel.body
    out.assign("tiles", "tl.cdiv(N, BLOCK_N)")
    out.assign("y", "tl.program_id(0) // tiles")
    out.assign("tile", "tl.program_id(0) % tiles")
    decode(out, mine, "y")
    out.assign("j0", "tile * BLOCK_N")
    if any(Var("j1") in e.leaves for e in _ends(site.by_keys)):
        out.assign("j1", "tl.minimum(j0 + BLOCK_N, N) - 1")
    out.assign("rows", "tl.arange(0, BLOCK_M)")
    out.assign("cols", "tl.arange(0, BLOCK_N)")
    out.assign("j", "j0 + cols")
    head_index(site, out, "de")
    for name in ("K", "V"):
        load_tile(site, out, name, name.lower(), "(j < N)[:, None]")
    if spec.dropout:
        out.assign("seed", "tl.load(Seed)")
    for c in site.qk_chunks:
        out.assign(f"dk{c.suffix}", f"tl.zeros([BLOCK_N, {c.width}], tl.float32)")
    for c in site.v_chunks:
        out.assign(f"dv{c.suffix}", f"tl.zeros([BLOCK_N, {c.width}], tl.float32)")
    if others:
        with out.block(f"for g in tl.range(0, {count(others)}):", "the queries that share these keys"):
            decode(out, others, "g")
            _over_rows(site, out, columns)
    else:
        _over_rows(site, out, columns)
    rest, factor = scaled(site, QK)
    _store(site, out, "K", "dk", "y", "N", "cols", factor)
    _store(site, out, "V", "dv", "y", "N", "cols", 1.0 / (1.0 - spec.dropout))
    return kernel


def _ends(found) -> tuple[Expr, ...]:
    return found.lo, found.hi, found.full_lo, found.full_hi


def _over_rows(site: Site, out: Writer, columns: list[Load]) -> None:
    """One batch index of the key kernel: the loops over tiles of rows."""
    spec = site.spec
    if tuple(spec.axes) == site.axes_of("k", "v"):
        out.assign("z", "y")
    else:
        out.assign("z", flatten(spec.axes))
    matrix(site, out, "Q")
    matrix(site, out, "dO")
    out.assign("lse_rows", "Lse + tl.cast(z, tl.int64) * M")
    out.assign("delta_rows", "Delta + tl.cast(z, tl.int64) * M")
    program = Program(spec, out.section(), inner="i", columns="i")
    body = Body(site, program, transposed=True)
    for load in columns:
        out.assign(f"sum_{buffer(site, load)}", "tl.zeros([BLOCK_N], tl.float32)")
    loops = Loops("i", site.by_keys, "BLOCK_M", "M")
    override = "tl.load(Averaging + z) != 0" if site.averages else ""
    loops.prepare(program, out, override)

    def tile(partial: bool) -> None:
        certain = "" if partial else "i"
        out.assign("i", "i0 + rows")
        check = "(i < M)[:, None]" if partial else ""
        load_tile(site, out, "Q", "q", check, looped=True)
        row_vectors(site, out, partial)
        rest, _ = scaled(site, QK)
        found = [(load, *scaled(site, load)) for load in columns]
        body.weights(out, partial, certain, [rest, *(r for _, r, _ in found)])
        load_tile(site, out, "dO", "do", check, looped=True)
        weights = "p"
        if spec.dropout:
            body.keep(out)
            weights = "tl.where(keep, p, 0.0)"
        out.assign("weights", f"({weights}).to(do{site.v_chunks[0].suffix}.dtype)")
        for c in site.v_chunks:
            out.assign(f"dv{c.suffix}", site.dot("weights", f"do{c.suffix}", f"dv{c.suffix}"))
        body.gradient(out, partial)
        for load, r, f in found:
            name = f"sum_{buffer(site, load)}"
            out.assign(name, f"{name} + tl.sum({body.times(r)}, 1)" + (f" * {f!r}" if f != 1.0 else ""))
        if QK in spec.score.leaves:
            out.assign("dqk", f"({body.times(rest)}).to(q{site.qk_chunks[0].suffix}.dtype)")
            for c in site.qk_chunks:
                out.assign(f"dk{c.suffix}", site.dot("dqk", f"q{c.suffix}", f"dk{c.suffix}"))

    _loops(loops, out, tile, bool(override))
    for load in columns:
        name = buffer(site, load)
        out.line(f"tl.store({name} + tl.cast(z, tl.int64) * N + j, sum_{name}, mask=j < N)")


def _loops(loops: Loops, out: Writer, tile, override: bool) -> None:
    if loops.full:
        with out.block(loops.full_head()):
            tile(False)
    head, first = loops.partial_head(out, override)
    with out.block(head):
        out.lines(*first)
        tile(True)


def _store(site: Site, out: Writer, operand: str, name: str, flat: str, size: str, rows: str, factor: float) -> None:
    """Store a gradient, contiguous as (flattened axes, rows, head size)."""
    x = "j" if rows == "cols" else "i"
    head = site.D if operand in "QK" else site.Dv
    out.assign(f"d{operand.lower()}_tile", f"d{operand} + (tl.cast({flat}, tl.int64) * {size} + {x}0) * {head}")
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
                    arguments(site, results), ("BLOCK_M", "BLOCK_N"), "ROWS")
    out = kernel.body
    out.assign("tiles", "tl.cdiv(M, BLOCK_M)")
    out.assign("y", "tl.program_id(0) // tiles")
    reverse = heavy_last(site.by_rows.hi)
    out.assign("tile", "tiles - 1 - tl.program_id(0) % tiles" if reverse else "tl.program_id(0) % tiles")
    decode(out, mine, "y")
    out.assign("i0", "tile * BLOCK_M")
    if any(Var("i1") in e.leaves for e in _ends(site.by_rows)):
        out.assign("i1", "tl.minimum(i0 + BLOCK_M, M) - 1")
    out.assign("rows", "tl.arange(0, BLOCK_M)")
    out.assign("cols", "tl.arange(0, BLOCK_N)")
    out.assign("i", "i0 + rows")
    head_index(site, out, "de")
    load_tile(site, out, "Q", "q", "(i < M)[:, None]")
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
    _store(site, out, "Q", "dq", "y", "M", "rows", scaled(site, QK)[1])
    return kernel


def _over_keys(site: Site, out: Writer, loads: list[Load]) -> None:
    spec = site.spec
    out.assign("z", "y" if tuple(spec.axes) == site.axes_of("q") else flatten(spec.axes))
    load_tile(site, out, "dO", "do", "(i < M)[:, None]")
    out.assign("lse_rows", "Lse + tl.cast(z, tl.int64) * M")
    out.assign("delta_rows", "Delta + tl.cast(z, tl.int64) * M")
    row_vectors(site, out, True)
    matrix(site, out, "K")
    matrix(site, out, "V")
    program = Program(spec, out.section(), inner="j")
    body = Body(site, program, transposed=False)
    if site.loads:
        out.assign("excess", "tl.zeros([BLOCK_M], tl.float32)", "sum_j ds, which is 0 but for the rounding of O in delta: see below")
    for load in loads:
        out.assign(f"sum_{buffer(site, load)}", "tl.zeros([BLOCK_M], tl.float32)")
        out.assign(f"mass_{buffer(site, load)}", "tl.zeros([BLOCK_M], tl.float32)")
    loops = Loops("j", site.by_rows, "BLOCK_N", "N")
    override = "tl.max(mean, 0) > 0.0" if site.averages else ""
    loops.prepare(program, out, override)

    def tile(partial: bool) -> None:
        out.assign("j", "j0 + cols")
        check = "(j < N)[:, None]" if partial else ""
        load_tile(site, out, "K", "k", check, looped=True)
        rest, _ = scaled(site, QK)
        found = [(load, *scaled(site, load)) for load in loads]
        body.weights(out, partial, "" if partial else "j", [rest, *(r for _, r, _ in found)])
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
        out.line("tl.store(delta_rows + i, delta + excess, mask=i < M)", "the exact delta, for the kernels that follow")
    for load in loads:
        name = buffer(site, load)
        out.assign(f"sum_{name}", f"sum_{name} - excess * mass_{name}")
        if "i" in load.variables:
            out.line(f"tl.store({name} + tl.cast(z, tl.int64) * M + i, sum_{name}, mask=i < M)")
        else:
            out.line(f"tl.store({name} + z * tiles + tile, tl.sum(tl.where(i < M, sum_{name}, 0.0), 0))")


def dense_kernel(site: Site, load: Load) -> Kernel:
    """Gradient of a load over both i and j, dense: a tile per program, summed over the batch axes on which it does not depend."""
    spec = site.spec
    mine = tuple(a for a in captured.dims_of(spec, load) if a not in ("i", "j"))
    others = site.other_axes(mine)
    name = buffer(site, load)
    kernel = Kernel(f"attention_backward_{name[2:]}", f"One program: gradient of {load} for one tile"
                    + (f", summed over ({', '.join(others)}) in registers." if others else "."),
                    arguments(site, {name: name}), ("BLOCK_M", "BLOCK_N"), "DENSE")
    out = kernel.body
    out.assign("tiles", "tl.cdiv(N, BLOCK_N)")
    out.assign("j0", "tl.program_id(0) % tiles * BLOCK_N")
    out.assign("i0", "tl.program_id(0) // tiles % tl.cdiv(M, BLOCK_M) * BLOCK_M")
    out.assign("y", "tl.program_id(0) // (tiles * tl.cdiv(M, BLOCK_M))")
    decode(out, mine, "y")
    out.assign("i1", "tl.minimum(i0 + BLOCK_M, M) - 1")
    out.assign("rows", "tl.arange(0, BLOCK_M)")
    out.assign("cols", "tl.arange(0, BLOCK_N)")
    out.assign("i", "i0 + rows")
    out.assign("j", "j0 + cols")
    head_index(site, out, "de")
    if spec.dropout:
        out.assign("seed", "tl.load(Seed)")
    out.assign("dense", "tl.zeros([BLOCK_M, BLOCK_N], tl.float32)")

    def one() -> None:
        out.assign("z", "y" if not others else flatten(spec.axes))
        outer = out.section()
        program = Program(spec, outer, inner="")
        body = Body(site, program, transposed=False)
        out.assign("lse_rows", "Lse + tl.cast(z, tl.int64) * M")
        out.assign("delta_rows", "Delta + tl.cast(z, tl.int64) * M")
        row_vectors(site, out, True)
        program.enter(out, [])
        found = site.by_rows
        conditions = []
        if found.lo != Const(0):
            conditions.append(f"(j0 + BLOCK_N > {program.value(found.lo)})")
        if found.hi != Var("N"):
            conditions.append(f"(j0 < {program.value(found.hi)})")
        seen = " & ".join(conditions)
        if seen and site.averages:
            seen = f"({seen}) | (tl.max(mean, 0) > 0.0)"
        if seen:
            with out.block(f"if {seen}:", "the mask hides other tiles"):
                inside(program, body)
        else:
            inside(program, body)

    def inside(program: Program, body: Body) -> None:
        load_tile(site, out, "Q", "q", "(i < M)[:, None]")
        load_tile(site, out, "K", "k", "(j < N)[:, None]")
        rest, factor = scaled(site, load)
        body.weights(out, True, "", [rest])
        load_tile(site, out, "dO", "do", "(i < M)[:, None]")
        load_tile(site, out, "V", "v", "(j < N)[:, None]")
        if spec.dropout:
            body.keep(out)
        body.gradient(out, True)
        out.assign("dense", f"dense + {body.times(rest)}" + (f" * {factor!r}" if factor != 1.0 else ""))

    if others:
        with out.block(f"for g in tl.range(0, {count(others)}):"):
            decode(out, others, "g")
            one()
    else:
        one()
    out.assign("dense_rows", f"{name} + (tl.cast(y, tl.int64) * M + i) * N")
    out.line(f"tl.store(dense_rows[:, None] + j[None, :], dense.to({name}.dtype.element_ty), mask=(i < M)[:, None] & (j < N)[None, :])")
    return kernel


