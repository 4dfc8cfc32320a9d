"""What the warp-specialised Hopper schedules share: what they take, TMA descriptors, shared memory, barriers, the order of tiles."""
from __future__ import annotations

import functools

from ...compat import interpreting
from ...expr import QK, Call, Const, Expr, Var, conjuncts, walk
from ...region import Problem
from ...spec import AttentionSpec
from ..captured import differentiable_loads, ends, is_overfull
from ..derivative import partial as derivative
from ..factors import peel, split_factor
from ..limits import padded
from ..philox import HALF_BITS, is_narrow
from ..parts import Chunk, Site, arguments, chunks, operand_axes, pieces, tiles_name
from ..program import Program, local
from ..ranges import Bounds, bounds
from ..reads import across, averages
from ..within import interval
from ..writer import Writer

ROWS = 64
"""Rows of one warpgroup's matrix instruction (wgmma)."""

WIDEST = 256
"""Largest head size: the accumulators of a warpgroup are held in registers."""

THIRD = 32
"""Keys of each of three warpgroups of a backward (`hopper_thirds`)."""
BY_THIRDS = 3 * THIRD
"""Keys of their tile."""


def place_of(place: str, names: list[str], name: str) -> str:
    """Of one of several numbers that lie side by side in a ring, at `place` of it."""
    if len(names) == 1:
        return place
    return f"{place} * {len(names)}" + (f" + {names.index(name)}" if name != names[0] else "")


def refusal(spec: AttentionSpec, problem: Problem, direction: str, describable: bool, listed: bool, needs: tuple[bool, ...] = (),
            deterministic: bool = False) -> str | None:
    """Why the Hopper schedule of "forward" or "backward" does not take this, or None. What is refused runs in the portable schedule.

    describable    can the tensor memory accelerator read the operands where they lie?
    listed         does a run-time summary of the mask say which tiles to visit?
    needs          which of (q, k, v, *aux) get gradients
    deterministic  must gradients be the same bits in every run?
    """
    if interpreting():
        return "Triton's interpreter does not run Gluon"
    if {problem.dtype, problem.v_dtype} - {"float16", "bfloat16"} or problem.dtype != problem.v_dtype:
        return f"its matrix units take q, k and v of one 16-bit type, not {problem.dtype} and {problem.v_dtype}"
    if not describable or len(spec.axes) > 3:
        return "the tensor memory accelerator cannot index these operands"
    if problem.D % 8 or problem.Dv % 8:
        return f"rows of {problem.D} and {problem.Dv} elements are not aligned to 16 bytes"
    if max(problem.D, problem.Dv) > WIDEST:
        return f"head sizes above {WIDEST} do not fit its registers"
    if spec.dropout and not is_narrow(spec.dropout):
        return f"a dropout rate of {spec.dropout:g} takes more than {HALF_BITS} random bits"
    if QK not in spec.score.leaves:
        return "the score does not depend on q . k"
    if direction == "forward":
        wide = is_overfull(spec) and max(problem.D, problem.Dv) > 128
        return "a table read at j - i, dropout and a function of each score leave a head this wide no registers" if wide else None
    if any(not {"i", "j"} <= load.variables for load in differentiable_loads(spec, dict(zip((a.name for a in spec.aux), needs[3:])))):
        return "captured tensors that are not read at both row and key need gradients"
    if is_overfull(spec):
        return "a table read at j - i, dropout and a derivative of each score's own are more than its registers hold"
    if spec.k != spec.v or not spec.k <= spec.q:
        return "k and v vary along different batch axes"
    ends = bounds(spec.visible, "i")
    if deterministic and (listed or not has_order(ends)):
        return "deterministic algorithms are asked for, and it cannot tell in which order tiles of keys come to a row"
    if listed and not set(spec.mask().axes) <= spec.k:
        return "the queries that share a key see it from different rows"
    if {a for a in spec.axes if a not in spec.k} & frozenset().union(*(e.variables for e in (ends.lo, ends.hi, ends.full_lo, ends.full_hi))):
        return "the queries that share a key see it from different rows"
    return None


def rises(e: Expr) -> bool:
    """Does the expression provably not fall where j0 and j1 grow?"""
    fixed = lambda x: not {Var("j0"), Var("j1")} & x.leaves
    if fixed(e) or isinstance(e, Var):
        return True
    if not isinstance(e, Call):
        return False
    if e.op in ("add", "minimum", "maximum"):
        return all(map(rises, e.args))
    if e.op == "where":  # everything up to some key, nothing behind it
        c, a, b = e.args
        return isinstance(c, Call) and c.op in ("le", "lt") and rises(c.args[0]) and fixed(c.args[1]) and a == Const(0) and isinstance(b, Var)
    a, b = e.args if len(e.args) == 2 else (e, e)
    positive = lambda x: isinstance(x, Const) and x.value > 0
    if e.op == "mul":
        return rises(a) and positive(b) or positive(a) and rises(b)
    return e.op == "sub" and rises(a) and fixed(b) or e.op == "floordiv" and rises(a) and positive(b)


def has_order(found: Bounds) -> bool:
    """Do the tiles of keys that a tile of rows sees follow each other without a gap? found: the rows that see a tile of keys."""
    return rises(found.lo) and rises(found.hi)


# --------------------------------------------------------------------------------------------------- operands by TMA

ROW_BLOCKS = {"Q": "M", "Out": "M", "dO": "M", "dQ": "M", "K": "N", "V": "N", "dK": "N", "dV": "N"}


def tma_arguments(site: Site, results: dict[str, str], rows: dict[str, int | str]) -> dict[str, str]:
    """`parts.arguments`, with tiles that Gluon reads and writes by TMA.

    rows  operand or result ("Q", …, "dK", …) -> rows of its tiles, a number or the name of an option
    """
    out = {name: value for name, value in arguments(site, results).items() if "_tiles" not in name}
    tensors = {"Q": "q", "K": "k", "V": "v", "Out": "out", "dO": "grad_out"} | {n: v for n, v in results.items() if n in rows}
    found = {}
    for name, block in rows.items():
        like = name.removeprefix("d") if name in results else name
        axes = [n for n, a in enumerate(site.spec.axes) if a in operand_axes(site, like)]
        block = block if isinstance(block, int) else f"OPTIONS['{block}']"
        for c, _, _ in pieces(site, like):
            found[tiles_name(name, c)] = f"tma_tiles({tensors[name]}, {axes}, {block}, {c.width})"
    return found | out


def position(site: Site, operand: str, row: str, c: Chunk, zero: str = "") -> str:
    """Coordinates of a tile, for TMA. zero: added to the last, one that the assembler cannot know say."""
    return "[" + ", ".join([*(local(a) for a in operand_axes(site, operand)), row, f"{c.start} + ({zero})" if zero else str(c.start)]) + "]"


def block_shape(site: Site, operand: str, rows: str | int, c: Chunk) -> str:
    """Shape of a tile as TMA sees it: 1 along the batch axes."""
    return ", ".join(["1"] * len(operand_axes(site, operand)) + [str(rows), str(c.width)])


def reserve(site: Site, out: Writer, name: str, operand: str, copies: str | int, rows: str | int, tiles: str = "") -> None:
    """Shared memory for `copies` tiles of an operand, one variable per head-size chunk."""
    for c, _, _ in pieces(site, operand):
        tile = tiles_name(tiles or operand, c)
        out.assign(name + c.suffix, f"gl.allocate_shared_memory({tile}.dtype, [{copies}, {block_shape(site, operand, rows, c)}], {tile}.layout)")


def barriers(out: Writer, count: str | int, arrivals: dict[str, int]) -> None:
    """Barriers in shared memory, `count` of each name, which complete a phase after so many arrivals."""
    for name in arrivals:
        out.assign(name, f"gl.allocate_shared_memory(gl.int64, [{count}, 1], mbarrier.MBarrierLayout())")
    with out.block(f"for slot in gl.static_range({count}):"):
        for name, number in arrivals.items():
            out.line(f"mbarrier.init({name}.index(slot), count={number})")


def read_by_tma(site: Site, out: Writer, operand: str, row: str, rows: str | int, full: str, into: str, index: str, expect: bool = True, tiles: str = "") -> None:
    """Start the copy of one tile; `full` completes when it has arrived. tiles: the tensor map, if not the operand's own."""
    found = pieces(site, operand)
    if expect:
        out.line(f"mbarrier.expect({full}, {rows} * {sum(c.width for c, _, _ in found) * 2})")
    for n, (c, _, _) in enumerate(found):
        place = piece_of(index, n, len(found)) if site.narrow else index
        out.line(f"tma.async_copy_global_to_shared({tiles or tiles_name(operand, c)}, {position(site, operand, row, c)}, {full}, {into}{c.suffix}.index({place}))")


def piece_of(index: str, n: int, pieces: int) -> str:
    """Place of a piece in a buffer that holds those of a tile side by side."""
    return index if pieces == 1 else f"{index} * {pieces}{f' + {n}' * (n > 0)}"


def tile_view(name: str, c: Chunk, index: str, rows: str | int) -> str:
    """A tile in shared memory as a matrix."""
    return f"{name}{c.suffix}.index({index}).reshape([{rows}, {c.width}])"


# -------------------------------------------------------------------------------------------------------- tile order

def bound_text(program: Program, e: Expr) -> str:
    """A bound of a mask's range, as 32-bit numbers whatever data it reads."""
    return f"tl.cast({program.value(e)}, tl.int32)" if e.loads else program.value(e)


def segments(found: Bounds, program: Program, out: Writer, x: str, block: str, size: str, padded: bool, nonempty: bool,
             override: str = "") -> str:
    """Assign start and stop, between which all tiles are visited, and what else the returned condition of a partial tile needs.

    padded    the last tile counts as full
    nonempty  some tile must be visited, a hidden one if there is no other
    override  a condition under which every tile is visited, none as full
    Returns "" if no tile is partial. The arithmetic is that of `flashfx.codegen.tiles.cut`.
    """
    if found.is_total:
        out.assign("start", "0")
        out.assign("stop", size)
        return "" if padded else f"{x}0 + {block} > {size}"
    text = lambda e: bound_text(program, e)
    out.assign("start", "0" if found.lo == Const(0) else f"{text(found.lo)} // {block} * {block}", "tiles outside [start, stop) are hidden")
    out.assign("stop", text(found.hi))
    conditions = []
    if found.has_full:
        if not found.starts_full:
            out.assign("full_start", f"tl.cdiv({text(found.full_lo)}, {block}) * {block}", "tiles inside [full_start, full_stop) need no mask")
            conditions.append(f"({x}0 < full_start)")
        if not (padded and found.full_hi == Var(size)):
            out.assign("full_stop", f"{text(found.full_hi)} // {block} * {block}")
            conditions.append(f"({x}0 >= full_stop)")
    if nonempty:
        out.assign("start", f"tl.minimum(start, ({size} - 1) // {block} * {block})", "at least one tile, if a hidden one")
        out.assign("stop", "tl.maximum(stop, start + 1)")
    if override:
        out.assign("start", f"tl.where({override}, 0, start)", "a row that averages v reads every tile")
        out.assign("stop", f"tl.where({override}, {size}, stop)")
        conditions.append(f"({override})")
    return " | ".join(conditions) if found.has_full else "True"


# -------------------------------------------------------------------------------------------------------------- tiles

@functools.lru_cache(maxsize=1024)
def compares(spec: AttentionSpec) -> bool:
    """Is the mask made of comparisons, without data and divisions?"""
    return not spec.visible.loads and not any(isinstance(x, Call) and x.row.cost == "div" for x in walk(spec.visible))


def is_laden(spec: AttentionSpec, head: int) -> bool:
    """Does a mask that reads data or divides, or a score that reads data beside a wide head, take a forward's registers?"""
    return not compares(spec) or head > 192 and bool(spec.score.loads)


@functools.lru_cache(maxsize=1024)
def takes_three(spec: AttentionSpec) -> bool:
    """Have three warpgroups of a forward registers enough? They do without dropout, under a mask of comparisons, where the score is q . k or a function
    of it alone that names it once: it takes the place of q . k element by element."""
    return in_place(peel(spec.score)[0]) and not spec.dropout and compares(spec)


def in_place(e: Expr) -> bool:
    """Is it q . k, or a function of it and of constants that names it once?"""
    rest = [a for a in e.args if not isinstance(a, Const)] if isinstance(e, Call) else []
    return e == QK or len(rest) == 1 and in_place(rest[0])


def _functions(spec: AttentionSpec) -> set[str]:
    """The kinds ("mufu", "div") of functions that are evaluated for each element."""
    return {x.row.cost for x in walk(peel(spec.score)[0]) if isinstance(x, Call) and x.row.cost in ("mufu", "div") and "j" in x.variables}


def _gathers(spec: AttentionSpec, head: int) -> bool:
    return any({"i", "j"} <= load.variables and load.index[-1] != Var("j") and not (head <= 64 and ends(load)) for load in spec.loads)


@functools.lru_cache(maxsize=1024)
def score_tiles(spec: AttentionSpec, head: int) -> float:
    """Beside the score itself, how many tiles of registers a forward needs to compute it. A function alone needs none: it is evaluated in place, a few
    elements at a time. Beside a mask that the data decide, and for divisions, something of it stays; so does a captured tile where keys are compared one by one."""
    found, tiled = _functions(spec), any({"i", "j"} <= load.variables for load in spec.loads)
    compared = tiled and any(not c.loads for c in conjuncts(spec.visible) if c != Const(True)) and interval(spec.visible, "j") is None
    in_pieces = spec.is_masked and len(chunks(head)) > 1 and any(map(ends, spec.score.loads))  # 36 bytes spilled at 40, causal
    return 1.5 if _gathers(spec, head) or in_pieces else 0.75 if "div" in found or found and spec.visible.loads or compared else 0.0


def is_crowded(spec: AttentionSpec, head: int) -> bool:
    """Do dropout's random bits leave a forward too few registers, beside a wide head or positions in a table that ends?"""
    return spec.dropout > 0 and (head > 192 or any(map(ends, spec.score.loads)))


def takes_thirds(spec: AttentionSpec, problem: Problem, listed: bool, ordered: bool) -> bool:
    """Does a backward have tiles of 96 keys (`hopper_thirds`)? Lists have blocks of 128 keys, which 96 do not divide; shared memory has no place for captured tiles, nor are
    there registers for what is read element by element, masks that read at rows or keys, rows that average v, slopes beside dropout or of a score that names q . k twice (28 to 230 bytes spilled); and who adds to
    dQ in an order adds all of its columns."""
    if not 128 < max(problem.D, problem.Dv) <= 192:
        return False
    slopes = {"i", "j"} <= split_factor(derivative(spec.score, QK))[0].variables
    if listed or ordered or averages(spec, problem.M <= problem.N) or slopes and (spec.dropout or not in_place(peel(spec.score)[0])):
        return False
    return not across(spec) and not any({"i", "j"} & load.variables for load in spec.visible.loads)


def unmeasured(spec: AttentionSpec, problem: Problem, direction: str, deterministic: bool = False, listed: bool = False) -> str | None:
    """Why the cost model cannot tell how fast this schedule is, so that the portable one runs, or None. deterministic, listed: as `refusal`."""
    if direction == "backward" and deterministic and bounds(spec.visible, "i").lo == Const(0) and problem.N < 8192:  # 3.5 against 3.2 ms at 4096
        return "where every tile of keys begins at the first row, they wait for each other too long"
    if direction == "forward" and is_overfull(spec) and any(map(ends, spec.score.loads)):  # 5.4 against 4.5 ms at head size 64
        return "dropout beside positions in a table that ends, and a function of each score, was slower in it"
    if problem.M <= ROWS:
        return f"{problem.M} query rows leave its second warpgroup idle"
    thirds = takes_thirds(spec, problem, listed, deterministic) and problem.Dv >= 128  # what is added to dQ binds: with values of 64 the portable one is 9 to 15 % faster
    if problem.D != problem.Dv and direction == "backward" and not thirds:  # 192 and 128 by tiles of 64 keys, N = 4096: 3.3 against 2.6 ms
        return f"of head sizes {problem.D} and {problem.Dv} it is not known to be faster"
    return None


def registers_per_thread(kernel: str, problem: Problem, m: int, n: int, extra: float) -> float:
    """Accumulators, scores and weights of a consumer, in 32-bit registers of each thread. extra: as `score_tiles`."""
    thirds = n == BY_THIRDS
    d, dv = padded(problem.D, thirds), padded(problem.Dv, thirds)
    if kernel == "forward":
        return (dv + n + n / 2 + extra * n) / 2
    return (n * (d + dv) + 2.5 * m * n) / (384 if thirds else 256)  # heavy scores spill some at head size 128, and are half as fast again as in the portable schedule


def register_limit(kernel: str, m: int) -> int:
    """Of the registers that a partition gets, without addresses, row vectors and counters."""
    return 208 if kernel == "keys" else 190 if m == 2 * ROWS else 136


def options(kernel: str, m: int, n: int, warps: int, stages: int) -> dict[str, int]:
    """Compile-time constants and launch options. The first partition runs on `num_warps` warps; `maxnreg` is what a thread has before
    partitions trade registers: 64K over the warps of all partitions, rounded up to warpgroups."""
    total = m // ROWS * 4 + 4 if kernel == "forward" else 4 + warps
    first = 8 if kernel == "keys" and warps == 8 else 4
    return {"BLOCK_M": m, "BLOCK_N": n, "STAGES": stages, "num_warps": first, "maxnreg": 65536 // (32 * total) // 8 * 8}
