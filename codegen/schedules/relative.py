"""Gradients of captured tensors read at j - i (relative position tables), in O(N) memory and without atomics.

A tile that lies beyond the ends of a table (`ends.py`) adds the sum of its dS to one element: the kernel over keys sums those on the way. The others have
a pass of their own over diagonals of square tiles, each of which is added up in registers, then along its own diagonals. All sums have a fixed order.
"""
from __future__ import annotations

from typing import Sequence

from ...expr import QK, Load, Var, call
from ...spec import DIFFERENCE
from ..captured import Line, dims_of, ends, is_relative, line_of
from ..parts import Site, arguments, count, decode, extent, flatten, head_index, multiples
from ..program import Program, local
from ..writer import Kernel, Writer
from .common import buffer, scaled
from .dense import add_tile
from .ends import ended
from .hopper_captured import left_out
from .hopper_keys import HALF, is_split

def summed(site: Site) -> list[Load]:
    """Those of them that get a gradient, and beyond their ends that of the products."""
    return [load for load in ended(site) if load in site.loads and scaled(site, load)[0] == scaled(site, QK)[0]]


# ------------------------------------------------------------------------------------------- gradients beyond the ends

def ends_buffer(site: Site, load: Load) -> str:
    """Where sums beyond the two ends lie: (*axes, slots, 2), a slot for each tile of keys and each diagonal of tiles."""
    return f"ends_of_{buffer(site, load)}"


def ends_arguments(site: Site) -> dict[str, str]:
    return {ends_buffer(site, load): ends_buffer(site, load) for load in summed(site)} | {"slots": "slots"}


def _held(site: Site, n: int, place: int) -> str:
    """Sums of a load at its first or last end, as text: in shared memory where registers run out."""
    return f"far_{n}.index({place}).load(keywise)" if _in_shared(site) else f"far_{n}_{place}"


def _in_shared(site: Site) -> bool:
    return site.one_pass and not is_split(site)


def _keep(site: Site, out: Writer, n: int, place: int, sums: str) -> None:
    if _in_shared(site):
        out.line(f"far_{n}.index({place}).store({sums})")
    else:
        out.assign(f"far_{n}_{place}", sums)


def reserve_ends(site: Site, out: Writer) -> None:
    """Shared memory of the Hopper kernel."""
    for n, _ in enumerate(summed(site)):
        shape = "[2, BLOCK_N]" if _in_shared(site) else f"[4, {HALF}]"  # of two warpgroups at the end of a tile
        out.assign(f"far_{n}", f"gl.allocate_shared_memory(gl.float32, {shape}, gl.SwizzledSharedLayout(1, 1, 1, [0]))")


def start_ends(site: Site, out: Writer, zeros: str) -> None:
    """In the kernel over keys: sums by key. zeros: a vector of them."""
    for n, _ in enumerate(summed(site)):
        for place in range(2):
            _keep(site, out, n, place, zeros)


def beyond_ends(site: Site, program: Program, out: Writer) -> None:
    """Assign beyond_0_0, beyond_0_1, …: for which keys do all rows of a tile lie beyond an end?"""
    for n, load in enumerate(summed(site)):
        line = line_of(load)
        first, last, offset = (program.value(e) for e in (line.first, line.last, line.offset))
        out.assign(f"beyond_{n}_0", f"j - i0 + {offset} <= {first}")
        out.assign(f"beyond_{n}_1", f"(j - i0 - BLOCK_M + 1 + {offset} >= {last}) & (beyond_{n}_0 == 0)")


def add_ends(site: Site, out: Writer, gradient: str, check: str = "") -> None:
    """Add a tile's gradient of the products, by key. check: which keys there are, "" if that of others is 0."""
    if summed(site):
        sums = f"tl.sum({gradient}, 1)"
        out.assign("sums", f"tl.where({check}, {sums}, 0.0)" if check else sums)
    for n, _ in enumerate(summed(site)):
        for place in range(2):
            _keep(site, out, n, place, f"{_held(site, n, place)} + tl.where(beyond_{n}_{place}, sums, 0.0)")


def store_ends(site: Site, out: Writer, slot: str) -> None:
    slots = "late(slots, tile)" if site.one_pass and (is_split(site) or len(site.qk_chunks) > 1) else "slots"
    for n, load in enumerate(summed(site)):
        factor = scaled(site, load)[1] * (left_out(site) if site.one_pass else 1.0)
        out.assign("end_slot", f"{ends_buffer(site, load)} + (tl.cast(z, tl.int64) * {slots} + {slot}) * 2")
        for place in range(2):
            sums = _held(site, n, place)
            if site.one_pass:  # all keys in every warp: what one of them reads for all holds a register throughout
                at, keys, warps = (f"far_{n}.index(PART * 2 + {place})", HALF, 4) if is_split(site) else (f"far_{n}.index({place})", "BLOCK_N", 8)
                if is_split(site):
                    out.line(f"{at}.store({sums})")
                sums = f"{at}.load(gl.BlockedLayout([{keys} // 32], [32], [{warps}], [0]))"
            total = f"tl.sum({sums}, 0)"
            out.line(f"tl.store(end_slot{' + 1' * place}, {total}{f' * {factor!r}' if factor != 1.0 else ''})")


def flush_ends(site: Site, out: Writer, slot: str, zeros: str) -> None:
    """In a loop of the Hopper kernel over steps, at the last of a batch index z."""
    if summed(site):
        with out.block("if is_last != 0:", "the last rows of a batch index"):
            store_ends(site, out, slot)
            start_ends(site, out, zeros)


def allocate_ends(site: Site, out: Writer, tiles: str) -> None:
    """On the host. tiles: how many slots the kernel over keys has."""
    loads = [load for load in site.loads if is_relative(load)]
    if loads:
        out.line("diagonals = triton.cdiv(M, DENSE['BLOCK_M']) + triton.cdiv(N, DENSE['BLOCK_N']) - 1")
    if any(map(ends, loads)):
        out.line(f"slots = {tiles} + diagonals")
    for load in loads:
        if ends(load):
            shape = ", ".join([*(extent(a) for a in site.spec.axes), "slots", "2"])
            make = "empty" if load in summed(site) else "zeros"
            out.line(f"{ends_buffer(site, load)} = torch.{make}(({shape}), dtype=torch.float32, device=q.device)", "sums beyond the ends of a table")


# --------------------------------------------------------------------------------------------------- and between them

def _line(load: Load) -> Line:
    """Of a load that depends on j - i in another way: a line of all M + N - 1 differences."""
    return line_of(load) or Line(-1, DIFFERENCE, call("sub", Var("M"), 1))


def _assign_ends(out: Writer, program: Program, line: Line) -> tuple[str, str]:
    return out.assign("first", program.value(line.first)), out.assign("last", program.value(line.last))


def lines_buffer(site: Site, load: Load) -> str:
    return f"lines_of_{buffer(site, load)}"


def diagonal_kernel(site: Site, load: Load) -> Kernel:
    """Sums of a load's gradient along the diagonals of one diagonal of square tiles, and beyond the ends."""
    spec, line, name = site.spec, _line(load), buffer(site, load)
    kernel = Kernel(f"attention_backward_{name[2:]}", f"One program: the gradient of {load} along one diagonal of tiles.",
                    arguments(site, {lines_buffer(site, load): lines_buffer(site, load), ends_buffer(site, load): ends_buffer(site, load), "slots": "slots",
                                     "STEP": "KEYS['BLOCK_M']"}), ("BLOCK_M", "BLOCK_N"), "DENSE", multiples(site))
    out = kernel.body
    out.assign("tiles", "tl.cdiv(N, BLOCK_N)")
    out.assign("all_rows", "tl.cdiv(M, BLOCK_M)")
    out.assign("diagonals", "tiles + all_rows - 1")
    out.assign("diagonal", "tl.program_id(0) % diagonals - (all_rows - 1)", "tiles from a row of tiles to its keys")
    out.assign("z", "tl.program_id(0) // diagonals")
    decode(out, spec.axes, "z")
    out.assign("rows", "tl.arange(0, BLOCK_M)")
    out.assign("cols", "tl.arange(0, BLOCK_N)")
    head_index(site, out, "de")
    if spec.dropout:
        out.assign("seed", "tl.load(Seed)")
    program = Program(spec, out.section(), inner="")
    program.enter(out, [])
    out.assign("stop", "tl.minimum(all_rows, tiles - diagonal)")
    offset = program.value(line.offset)
    if line.first is not None:
        first, last = _assign_ends(out, program, line)
        if load in summed(site):
            out.assign("span", "tl.maximum(BLOCK_M, STEP) - 1", "the kernel over keys adds up what lies beyond an end with all of its STEP rows")
            out.assign("stop", f"tl.where((diagonal * BLOCK_N + span + {offset} > {first}) & (diagonal * BLOCK_N - span + {offset} < {last}), stop, 0)")
    out.assign("dense", "tl.zeros([BLOCK_M, BLOCK_N], tl.float32)")
    with out.block("for row in tl.range(tl.maximum(0, -diagonal), stop):"):
        out.assign("i0", "row * BLOCK_M")
        out.assign("j0", "(row + diagonal) * BLOCK_N")
        out.assign("i1", "tl.minimum(i0 + BLOCK_M, M) - 1")
        out.assign("i", "i0 + rows")
        out.assign("j", "j0 + cols")
        within = load if load in summed(site) else None
        if within:
            out.assign("step", "i // STEP * STEP - j0")
            out.assign("shares", f"(cols[None, :] - step[:, None] + {offset} > {first}) & (cols[None, :] - step[:, None] - STEP + 1 + {offset} < {last})")
        add_tile(site, out, load, within)
    if line.first is not None:
        out.assign("place", f"diagonal * BLOCK_N + cols[None, :] - rows[:, None] + {offset}")
        out.assign("end_slot", f"{ends_buffer(site, load)} + (tl.cast(z, tl.int64) * slots + slots - diagonals + diagonal + all_rows - 1) * 2")
        out.line(f"tl.store(end_slot, tl.sum(tl.sum(tl.where(place <= {first}, dense, 0.0), 1), 0))")
        out.line(f"tl.store(end_slot + 1, tl.sum(tl.sum(tl.where((place > {first}) & (place >= {last}), dense, 0.0), 1), 0))")
        out.assign("dense", f"tl.where((place > {first}) & (place < {last}), dense, 0.0)")
    out.assign("turned", "cols[None, :] + rows[:, None]")
    out.assign("dense", "tl.gather(dense, turned % BLOCK_N, 1)", "each row begins at the main diagonal")
    out.assign("line", f"{lines_buffer(site, load)} + tl.cast(tl.program_id(0), tl.int64) * (2 * BLOCK_N) + cols")
    out.line("tl.store(line, tl.sum(tl.where(turned < BLOCK_N, dense, 0.0), 0))", "from the main diagonal on")
    out.line("tl.store(line + BLOCK_N, tl.sum(tl.where(turned < BLOCK_N, 0.0, dense), 0))", "and those below it")
    return kernel


def line_kernel(site: Site, load: Load) -> Kernel:
    """The gradient of a load from sums along diagonals, over the batch axes on which it does not depend."""
    spec, line, name = site.spec, _line(load), buffer(site, load)
    mine = tuple(a for a in dims_of(spec, load) if a not in ("i", "j"))
    others = site.other_axes(mine)
    results = {lines_buffer(site, load): lines_buffer(site, load), ends_buffer(site, load): ends_buffer(site, load), "slots": "slots", "Gradient": name,
               "length": f"{name}.shape[-1]", "SIDE": "DENSE['BLOCK_N']"}
    kernel = Kernel(f"attention_line_{name[2:]}", f"The gradient of {load}" + (f", summed over ({', '.join(others)})." if others else "."),
                    arguments(site, results), ("BLOCK", "GROUP"), "LINE")
    out = kernel.body
    out.assign("chunks", "tl.cdiv(length, BLOCK)")
    out.assign("y", "tl.program_id(0) // chunks")
    decode(out, mine, "y")
    out.assign("p0", "tl.program_id(0) % chunks * BLOCK")
    out.assign("p", "p0 + tl.arange(0, BLOCK)")
    out.assign("all_rows", "tl.cdiv(M, SIDE)")
    out.assign("diagonals", "tl.cdiv(N, SIDE) + all_rows - 1")
    program = Program(spec, out.section(), inner="")
    program.enter(out, [])
    out.assign("difference", f"p - ({program.value(line.offset)})", "j - i")
    out.assign("inside", "(difference > -M) & (difference < N)")
    if line.first is not None:
        first, last = _assign_ends(out, program, line)
        out.assign("inside", f"inside & (p > {first}) & (p < {last})")
    out.assign("place", "tl.where(inside, difference + all_rows * SIDE, 0)")
    out.assign("diagonal", "place // SIDE", "whose lower half holds it; the upper half of the one before does too")
    out.assign("total", "tl.zeros([BLOCK], tl.float32)")

    def members(size: str, group: str, number: str, shape: str) -> None:
        out.assign("g", f"{group} + tl.arange(0, {size}){shape}")
        decode(out, others, number)
        out.assign("z", f"tl.cast({flatten(spec.axes)}, tl.int64)" + ("" if others else " + g * 0"))

    with out.block(f"for g0 in tl.range(0, {count(others)}, GROUP):"):
        members("GROUP", "g0", "g", "[:, None]")
        out.assign("lines", f"{lines_buffer(site, load)} + z * diagonals * (2 * SIDE) + (place % SIDE)[None, :]")
        out.assign("there", f"(g < {count(others)}) & inside[None, :]")
        out.assign("upper", "tl.load(lines + (diagonal[None, :] - 1) * (2 * SIDE), mask=there & (diagonal > 0)[None, :], other=0.0)")
        out.assign("lower", "tl.load(lines + (diagonal[None, :] * 2 + 1) * SIDE, mask=there & (diagonal < diagonals)[None, :], other=0.0)")
        out.assign("total", "total + tl.sum(upper + lower, 0)")
    if line.first is not None:
        for n, end in enumerate((first, last)):
            with out.block(f"if (p0 <= {end}) & ({end} < p0 + BLOCK):"):
                out.assign("beyond", "tl.zeros([1024], tl.float32)")
                with out.block(f"for g0 in tl.range(0, slots * {count(others)}, 1024):"):
                    members("1024", "g0", "g // slots", "")
                    out.assign("beyond", f"beyond + tl.load({ends_buffer(site, load)} + (z * slots + g % slots) * 2{' + 1' * n}, "
                                         f"mask=g < slots * {count(others)}, other=0.0)")
                out.assign("total", f"total + tl.where(p == {end}, tl.sum(beyond, 0), 0.0)")
    out.line("tl.store(Gradient + tl.cast(y, tl.int64) * length + p, total.to(Gradient.dtype.element_ty), mask=p < length)")
    return kernel


def relative_gradient(site: Site, load: Load, kernels: Sequence[Kernel], dtype: str, out: Writer) -> None:
    """On the host: both kernels."""
    name, line = buffer(site, load), _line(load)
    mine = [extent(a) for a in dims_of(site.spec, load) if a not in ("i", "j")]
    length = f"{local(load.name)}.shape[{line.dim}]" if line_of(load) else "M + N - 1"
    every = ", ".join([*(extent(a) for a in site.spec.axes), "diagonals", "2", "DENSE['BLOCK_N']"])
    out.line(f"{lines_buffer(site, load)} = torch.empty(({every}), dtype=torch.float32, device=q.device)")
    out.line(f"{name} = torch.empty(({', '.join([*mine, length])},), dtype={dtype}, device=q.device)", f"gradient of {load}")
    diagonal, whole = kernels
    diagonal.call(f"(diagonals * {count(site.spec.axes)},)", out)
    whole.call(f"(triton.cdiv({name}.shape[-1], LINE['BLOCK']) * {' * '.join(mine) or '1'},)", out)
