"""What the backward kernels share: delta and log-sum-exp by row, the weights and score gradients of one tile, derivative factors."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

from ...expr import QK, Const, Expr, Load, walk
from ...spec import FINE, EmptyRow
from ..derivative import partial as derivative
from ..factors import split_factor
from ..limits import padded
from ..parts import LOG2E, Site, arguments, chunks, count, decode, flatten, head_index, load_tile, multiples, product
from ..philox import is_narrow, kept_scale, threshold
from ..program import Program
from ..torch_tiled import MEAN_ROW
from ..writer import Kernel, Writer
from .documents import SLOTS
from .ends import score
from .tile_order import order_tiles


def scaled(site: Site, wrt: Expr) -> tuple[Expr, float]:
    return split_factor(derivative(site.score, wrt))


def has_slopes(site: Site) -> bool:
    """Does d score / d qk differ from element to element, as under a soft cap?"""
    return {"i", "j"} <= scaled(site, QK)[0].variables


def buffer(site: Site, load: Load) -> str:
    """Name of the buffer that receives a load's gradient; one tensor may be read by several loads."""
    same = [x for x in site.loads if x.name == load.name]
    return f"d_{load.name}" if len(same) == 1 else f"d_{load.name}_{same.index(load)}"


PADDING = 128
"""delta and lse2 are padded to a multiple of this, which every BLOCK_M divides: loops over rows read them without bounds checks."""


def padded_rows(z: str, rows: str = f"(tl.cdiv(M, {PADDING}) * {PADDING})") -> str:
    """Offset of a batch index in delta and lse2. rows: of each, padded."""
    return f"tl.cast({z}, tl.int64) * {rows}"


def summed_rows(site: Site) -> str:
    """Of a batch index in the sum of dQ: rows, padded, and where tiles begin with documents places for a tile of FINE rows more for each cut (`documents`)."""
    return f"(tl.cdiv(M, {PADDING}) * {SLOTS * FINE if site.documents else PADDING})"


def delta_kernel(site: Site) -> Kernel:
    """What the other kernels need of each row: delta, and the log-sum-exp in powers of two."""
    spec = site.spec
    kernel = Kernel("attention_delta", "delta[z, i] = sum_e dO[z, i, e] * O[z, i, e], which is also sum_j P[z, i, j] * dP[z, i, j]; lse2 = lse * log2(e).",
                    arguments(site, {"Sum": "sum_q", "Taken": "taken", "Order": "order"}), ("BLOCK_M",), "DELTA", multiples(site))
    out = kernel.body
    out.assign("tiles", f"tl.cdiv(M, {PADDING}) * ({PADDING} // BLOCK_M)", "with the padding")
    out.assign("z", "tl.program_id(0) // tiles")
    decode(out, spec.axes, "z")
    out.assign("i0", "tl.program_id(0) % tiles * BLOCK_M")
    out.assign("rows", "tl.arange(0, BLOCK_M)")
    out.assign("i", "i0 + rows")
    head_index(site, out, "e")
    for name, operand in (("o", "Out"), ("do", "dO")):
        load_tile(site, out, operand, name, "(i < M)[:, None]", direct=True)
    row_terms(site, out)
    if site.one_pass:
        out.line("tl.store(Taken, 0, mask=tl.program_id(0) == 0)")
        width = padded(site.D, site.thirds)
        out.assign("sum_tile", f"Sum + ({padded_rows(flatten(site.axes_of('q')), summed_rows(site))} + i0) * {width}", "where dQ will be added up")

        def reset(place: str) -> None:
            for c in chunks(width):
                out.line(f"tl.store({place} + rows[:, None] * {width} + tl.arange({c.start}, {c.start + c.width})[None, :], tl.zeros([BLOCK_M, {c.width}], tl.float32))")
        reset("sum_tile")
        if site.documents:
            with out.block(f"if i0 < tl.load(KeyTiles + 1) * {FINE}:", "places that cuts take"):
                reset(f"sum_tile + tl.cdiv(M, {PADDING}) * {PADDING * width}")
    out.line(f"tl.store(Delta + {padded_rows('z')} + i, delta)")
    out.line(f"tl.store(Lse2 + {padded_rows('z')} + i, lse * {LOG2E!r})")
    if site.documents:
        order_tiles(site, out)
    return kernel


def row_terms(site: Site, out: Writer) -> None:
    """Assign delta and lse of the rows i from tiles o and do."""
    out.assign("delta", "tl.zeros([BLOCK_M], tl.float32)")
    for c in site.v_chunks:
        out.assign("delta", f"delta + tl.sum(o{c.suffix}.to(tl.float32) * do{c.suffix}.to(tl.float32), 1)")
    out.assign("lse", 'tl.load(Lse + tl.cast(z, tl.int64) * M + i, mask=i < M, other=float("inf"))', "rows beyond the end get weight exp(-inf) = 0")
    if site.can_be_empty and site.spec.empty_row in (EmptyRow.NAN, EmptyRow.ZERO):
        out.assign("empty", 'lse == float("-inf")', "rows that see no key pass no gradient on")
        out.assign("lse", 'tl.where(empty, float("inf"), lse)')
        if site.spec.empty_row is EmptyRow.NAN:
            out.assign("delta", "tl.where(empty, 0.0, delta)", "their output is NaN")


@dataclass
class Body:
    """Writes P and dS of one tile. `transposed`: keys run along the tile's first dimension; `within`: as `ends.score`; `sums_keys`:
    sums go over keys and some may lie beyond the end, as always where they are not transposed."""

    site: Site
    program: Program
    transposed: bool
    within: Load | None = None
    sums_keys: bool = False

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
        raw = score(site, program, out, ("i0", "BLOCK_M"), ("j0", "BLOCK_N"), self.within)
        shape = "[BLOCK_N, BLOCK_M]" if self.transposed else "[BLOCK_M, BLOCK_N]"
        # rows beyond the end have weight 0 already; keys beyond the end matter only where they are summed over
        beyond = self._valid(certain + "i") if partial and (self.sums_keys or not self.transposed) else []
        seen = [*beyond, *(program.tile(v) for v in visible)]
        if seen:
            out.assign("visible", " & ".join(seen))
        c2 = site.factor * LOG2E
        exponent = f"{raw} * {c2!r} - {self.across('lse2')}"
        if program.dims(site.raw) != {"i", "j"}:
            exponent += f" + tl.zeros({shape}, tl.float32)"
        out.assign("p", f'tl.where(visible, tl.exp2({exponent}), 0.0)' if seen else f"tl.exp2({exponent})")
        if averages:
            self.averaged(out, beyond)

    def averaged(self, out: Writer, beyond: list[str]) -> None:
        """The weights of rows that average v. beyond: checks that a key lies before the end."""
        over = self.program.tile(self.site.spec.empty_over)
        keys = [*beyond, *([over] if over != "True" else [])]
        mean = f"tl.where({' & '.join(keys)}, {self.across('mean')}, 0.0)" if keys else self.across("mean")
        out.assign("p", f"tl.where({self.across('mean')} > 0.0, {mean}, p)", "rows that average v")

    def keep(self, out: Writer) -> None:
        """Dropout's decisions for the tile."""
        spec = self.site.spec
        tile = f"keep_tile(seed, z, i0, j0, {threshold(spec.dropout)}, {is_narrow(spec.dropout)}, BLOCK_M, BLOCK_N)"
        if self.transposed:
            tile = f"tl.trans({tile})"
        out.assign("keep", tile)

    def gradient(self, out: Writer, partial: bool) -> None:
        """ds = p * (dp - delta) from do and v tiles."""
        site = self.site
        a, b = ("v", "do") if self.transposed else ("do", "v")
        if self.transposed and not site.spec.dropout:  # as the accumulator's start, delta leaves the registers early
            product(site, out, "dp", a, b, site.v_chunks, "tl.broadcast_to(-delta[None, :], BLOCK_N, BLOCK_M)")
            out.assign("ds", "p * dp", "dp - delta, to be exact")
        else:
            product(site, out, "dp", a, b, site.v_chunks)
            if site.spec.dropout:
                out.assign("dp", f"tl.where(keep, dp, 0.0) * {kept_scale(site.spec.dropout)!r}")
            out.assign("ds", f"p * (dp - {self.across('delta')})")
        if partial:
            self.replaced(out)

    def replaced(self, out: Writer) -> None:
        """No gradient where a constant replaced all scores of a row."""
        if self.site.averages and self.site.spec.empty_row is EmptyRow.MEAN:
            out.assign("ds", f"tl.where({self.across('mean')} > 0.0, 0.0, ds)", "a constant replaced these scores")

    def times(self, rest: Expr, factor: str = "ds", hidden: bool = False, weight: str = "p") -> str:
        """ds (or p) times a derivative (its constant left out); where p is 0 the derivative may be anything. hidden: is the score -inf there? weight: p, or what
        has its zeros."""
        if rest == Const(1.0):
            return factor
        text = f"{factor} * {self.program.tile(rest)}"
        finite = not any(_unbounded(x) for x in walk(rest)) and not (hidden and self.site.raw in walk(rest))
        return text if finite else f"tl.where({weight} != 0.0, {text}, 0.0)"


def _unbounded(e: Expr) -> bool:
    """May a value be infinite or NaN where its arguments are not?"""
    op = getattr(e, "op", "")
    return op in ("log", "reciprocal", "rsqrt", "sqrt") or op == "truediv" and not isinstance(e.args[1], Const)


def decode_part(out: Writer, axes: Sequence[str], tiles: str = "") -> None:
    """Which part of all other batch indices a program goes through, of how many, and the index y of `axes`, from its slot. tiles: of each such index."""
    batch = f"({count(axes)})" if len(axes) > 1 else count(axes)
    out.assign("part", f"slot // {batch}")
    out.assign("parts", f"tl.num_programs(0) // {f'({tiles} * {count(axes)})' if tiles else batch}", "programs for each tile")
    out.assign("y", f"slot % {batch}")


def row_pointers(out: Writer) -> None:
    out.assign("delta_rows", f"Delta + {padded_rows('z')}")
    out.assign("lse2_rows", f"Lse2 + {padded_rows('z')}")


def load_lse2(site: Site, out: Writer) -> None:
    """The row vector that rebuilds p, and for rows that average v the weight of each of their keys."""
    out.assign("lse2", "tl.load(lse2_rows + i)")
    mean_share(site, out)


def mean_share(site: Site, out: Writer) -> None:
    if site.averages:
        marked = f'(lse2 >= {MEAN_ROW!r}) & (lse2 < float("inf"))'
        out.assign("mean", f"tl.where({marked}, {MEAN_ROW * LOG2E!r} / lse2, 0.0)", "the key's share in a row that averages v")
