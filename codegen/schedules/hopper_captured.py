"""Captured tensors read at both row and key, a bias say, in the Hopper schedules: tiles of them by TMA, and in backward their gradient stored by TMA.

Read element by element where scores are computed, a bias doubles the time of backward (5.3 against 2.7 ms at head size 128 on an H200).
"""
from __future__ import annotations

import itertools
import math
from contextlib import nullcontext
from typing import Sequence

from ...expr import BOOL, FLOAT, INT, QK, Const, Load, Var
from ...region import Problem
from ...spec import AttentionSpec
from ..captured import differentiable_loads, dims_of
from ..derivative import partial as derivative
from ..factors import split_factor
from ..parts import Site, count, extent, flatten
from ..philox import kept_scale
from ..program import local
from ..writer import Kernel, Writer
from .common import buffer, has_slopes


def _is_matrix(spec: AttentionSpec, load: Load) -> bool:
    """Are the tensor's last two dimensions row and key, in either order, and the others batch axes or constants?"""
    *first, a, b = load.index if len(load.index) > 1 else (None, None)
    plain = all(isinstance(x, Var) and x.name in spec.axes or isinstance(x, Const) and x.kind == INT for x in first)
    return {a, b} == {Var("i"), Var("j")} and plain and len(load.index) <= 5


def candidates(spec: AttentionSpec) -> list[Load]:
    """What a score reads of such matrices."""
    return [load for load in spec.score.loads if load.kind == FLOAT and _is_matrix(spec, load)]


def tile_loads(site: Site) -> list[Load]:
    return [load for load in candidates(site.spec) if load.name in site.tiled]


def mask_loads(spec: AttentionSpec, tiled: Sequence[str]) -> list[Load]:
    """What a mask reads of such matrices of booleans: copied a byte an element, for the steps that the mask cuts alone."""
    return [load for load in _masks(spec) if load.name in tiled]


def _masks(spec: AttentionSpec) -> list[Load]:
    return [load for load in spec.visible.loads if load.kind == BOOL and _is_matrix(spec, load)]


def copyable(spec: AttentionSpec, problem: Problem) -> set[str]:
    """Captured tensors of which tiles are copied if their strides allow it."""
    aligned = lambda load: (problem.N if _keys_last(load) else problem.M) % 16 == 0  # TMA wants rows of multiples of 16 bytes
    return {load.name for load in (*candidates(spec), *filter(aligned, _masks(spec)))}


def shares(spec: AttentionSpec, tiled: Sequence[str], axes: Sequence[str]) -> bool:
    """Do batch indices (of these axes) read the same tiles? Programs of several then run beside each other, so that a tile comes from device memory once
    and for the others from the L2 cache."""
    return any(not {*axes} <= load.variables for load in candidates(spec) if load.name in tiled)


def outermost(spec: AttentionSpec, tiled: Sequence[str], axes: Sequence[str]) -> list[str]:
    """The first axes that such a tensor lacks, which must be counted fastest for that; those behind them are already."""
    lacked = ([*itertools.takewhile(lambda a: a not in load.variables, axes)] for load in candidates(spec) if load.name in tiled)
    return max(lacked, key=len, default=[])


def assign_batch(site: Site, out: Writer, axes: Sequence[str], name: str, number: str) -> None:
    """Assign the batch index of a number that counts `outermost` axes fastest."""
    found = outermost(site.spec, site.tiled, axes)
    if not found:
        out.assign(name, number)
        return
    out.assign("copies", count(found), "of batch indices, that share captured tiles")
    out.assign("place", number)
    out.assign(name, f"place % copies * ({count(axes[len(found):])}) + place // copies")


def _keys_last(load: Load) -> bool:
    return load.index[-1] == Var("j")


def _name(site: Site, load: Load) -> str:
    return f"captured_{tile_loads(site).index(load)}"


def _shape(load: Load, rows: str | int, keys: str | int) -> list[str]:
    return [str(rows), str(keys)] if _keys_last(load) else [str(keys), str(rows)]


def _option(size: str) -> str:
    return size if size.isdigit() else f"OPTIONS['{size}']"


def tile_arguments(site: Site, rows: str | int, keys: str | int) -> dict[str, str]:
    """Kernel arguments that describe tiles of captured tensors."""
    out = {}
    for load in tile_loads(site):
        height, width = map(_option, _shape(load, rows, keys))
        out[f"{_name(site, load)}_tiles"] = f"tma_tiles({local(load.name)}, {list(range(len(load.index) - 2))}, {height}, {width})"
    return out


def stored_arguments(site: Site, keys: str | int) -> dict[str, str]:
    """The kernel argument that describes tiles of the gradient that is stored."""
    out = {}
    if stored := stored_load(site):
        axes = list(range(gradient_dims(site.spec, site.stored)))
        out["Captured_tiles"] = f"tma_tiles({buffer(site, stored)}, {axes}, OPTIONS['BLOCK_M'], {_option(str(keys))})"
    return out


def _mask_name(site: Site, load: Load) -> str:
    return f"visible_{mask_loads(site.spec, site.tiled).index(load)}"


def mask_arguments(site: Site, rows: str | int, keys: str | int) -> dict[str, str]:
    """Kernel arguments that describe tiles of the mask. They end with the queries and keys, so that False is read beyond, however large the tensor is."""
    out = {}
    for load in mask_loads(site.spec, site.tiled):
        (height, width), sizes = map(_option, _shape(load, rows, keys)), ", ".join(_shape(load, "M", "N"))
        out[f"{_mask_name(site, load)}_tiles"] = f"tma_tiles({local(load.name)}, {list(range(len(load.index) - 2))}, {height}, {width}, ({sizes}))"
    return out


def reserve_mask(site: Site, out: Writer, places: str, parts: int, rows: str | int, keys: str | int) -> None:
    """Rings of the mask's tiles. parts: as of `reserve_tiles`."""
    for load in mask_loads(site.spec, site.tiled):
        _reserve(out, _mask_name(site, load), load, places, parts, rows, keys)


def mask_from_rings(site: Site, out: Writer, index: str, rows: str | int, keys: str | int, transposed: bool) -> dict[Load, str]:
    """As `tiles_from_rings`, of the mask: they are read where they are named."""
    found = {}
    for load in mask_loads(site.spec, site.tiled):
        name = _view(out, _mask_name(site, load), load, index, rows, keys, transposed)
        found[load] = f"({name}.load(scores) != 0)"
    return found


def expect_with_mask(site: Site, out: Writer, full: str, expected: str, partial: str, place: str, parts: int, rows: int = 0, keys: int = 0) -> None:
    """Tell a barrier of the bytes of a step, `expected` of them without the mask's, and start the copies of its tiles where it cuts the step. partial: that condition,
    "True" if always; place: in the rings; rows, keys: from one part to the next."""
    loads = mask_loads(site.spec, site.tiled)
    with out.block(f"if {partial}:") if loads and partial != "True" else nullcontext():
        out.line(f"mbarrier.expect({full}.index(slot), {expected}{' + BLOCK_M * BLOCK_N' * len(loads)})")
        for load in loads:
            for n in range(parts):
                _copy(out, _mask_name(site, load), load, n * rows, n * keys, full, _in_part(place, parts, n))
    if loads and partial != "True":
        with out.block("else:"):
            out.line(f"mbarrier.expect({full}.index(slot), {expected})")


def _reserve(out: Writer, name: str, load: Load, places: str, parts: int, rows: str | int, keys: str | int) -> None:
    shape = ", ".join([f"{places} * {parts}" if parts > 1 else places, *["1"] * (len(load.index) - 2), *_shape(load, rows, keys)])
    out.assign(f"{name}_ring", f"gl.allocate_shared_memory({name}_tiles.dtype, [{shape}], {name}_tiles.layout)")


def _view(out: Writer, name: str, load: Load, index: str, rows: str | int, keys: str | int, transposed: bool) -> str:
    tile = f"{name}_ring.index({index}).reshape([{', '.join(_shape(load, rows, keys))}])"
    return out.assign(name, f"{tile}{'.permute((1, 0))' if _keys_last(load) == transposed else ''}")


def _in_part(place: str, parts: int, n: int) -> str:
    return f"{place} * {parts} + {n}" if parts > 1 else place


def reserve_tiles(site: Site, out: Writer, parts: int, rows: str | int, keys: str | int) -> None:
    """Rings of captured tiles. parts: how many warpgroups have a tile of their own in each stage."""
    for load in tile_loads(site):
        _reserve(out, _name(site, load), load, "STAGES", parts, rows, keys)


def tiles_from_rings(site: Site, out: Writer, index: str, rows: str | int, keys: str | int, transposed: bool) -> dict[Load, str]:
    """Captured tiles in their rings, as text that reads them. index: place in the ring; transposed: keys run along the score tile's first
    dimension."""
    found = {}
    for load in tile_loads(site):
        name = _view(out, _name(site, load), load, index, rows, keys, transposed)
        found[load] = f"{name}.load(scores).to(tl.float32)" if transposed else f"widened({name}.load(scores))"  # in backward as fast to 4 % slower
    return found


def tile_bytes(site: Site) -> str:
    """Bytes of the captured tiles of one step, as text."""
    return "".join(" + BLOCK_M * BLOCK_N * 2" for _ in tile_loads(site))


def read_tiles(site: Site, out: Writer, full: str, parts: int, rows: int = 0, keys: int = 0) -> None:
    """Start the copies of a step's captured tiles, on whose arrival `full` waits. rows, keys: from one part to the next."""
    for load in tile_loads(site):
        name = _name(site, load)
        for n in range(parts):
            _copy(out, name, load, n * rows, n * keys, full, _in_part("slot", parts, n))


def _copy(out: Writer, name: str, load: Load, row: int, key: int, full: str, place: str) -> None:
    at = {Var("i"): f"i0 + {row}" if row else "i0", Var("j"): f"j0 + {key}" if key else "j0"}
    index = ", ".join(str(a.value) if isinstance(a, Const) else at.get(a) or local(a.name) for a in load.index)
    out.line(f"tma.async_copy_global_to_shared({name}_tiles, [{index}], {full}.index(slot), {name}_ring.index({place}))")


# ------------------------------------------------------------------------------------------------------------ gradient

ADDED = 8
"""Batch indices that add to one copy of the gradient of a captured tensor that they share, in the L2 cache. A copy is rounded with each, and the copies are summed in float32.
Error over eager's: a copy for each 0.3, for 8 0.6, for 16 0.7."""
COPIES = 8
"""Most copies that take more memory than q, k, v and dO."""


def storable(spec: AttentionSpec, problem: Problem, tiled: Sequence[str], needs: Sequence[bool], ordered: bool) -> str:
    """The captured tensor whose gradient is the tile dS itself, or that times a number, so that it can be stored on the way, or "". ordered: the same bits in every run."""
    if problem.N % 8:  # rows of dS are as long, and TMA stores such as are multiples of 16 bytes
        return ""
    operands = (problem.M + problem.N) * (problem.D + problem.Dv)
    loads = differentiable_loads(spec, dict(zip((a.name for a in spec.aux), needs[3:])))
    for load in candidates(spec):
        own, shared = [a.name for a in load.index if not isinstance(a, Const)], _shared(spec, load)
        sharing = math.prod(e for a, e in zip(spec.axes, problem.extents) if a in shared)
        copies = sharing if ordered else -(-sharing // ADDED)
        small = copies <= COPIES or copies * problem.M * problem.N <= sharing * operands
        alone = load.name in tiled and load in loads and sum(x.name == load.name for x in loads) == 1
        if alone and small and own == list(dims_of(spec, load)) and _is_ds(spec, load):
            return load.name
    return ""


def _is_ds(spec: AttentionSpec, load: Load) -> bool:
    """Is the gradient of what is read dS as the kernel has it, times a number?"""
    return all(split_factor(derivative(spec.score, x))[0] == Const(1.0) for x in (QK, load))


def _over_ds(site: Site) -> float:
    """That number. before -> after: (qk + bias[h, i, j]) * 0.125 -> 0.125"""
    return split_factor(derivative(site.spec.score, stored_load(site)))[1]


def _shared(spec: AttentionSpec, load: Load) -> list[str]:
    """Batch axes on which a load does not depend."""
    return [a for a in spec.axes if a not in dims_of(spec, load)]


def stored_load(site: Site) -> Load | None:
    return next((load for load in site.loads if load.name == site.stored), None)


def _own(spec: AttentionSpec, load: Load) -> list[str]:
    """The batch axes on which it does."""
    return [a for a in spec.axes if a in dims_of(spec, load)]


def gradient_dims(spec: AttentionSpec, name: str) -> int:
    """How many dimensions a stored gradient has in front of row and key: the tensor's own batch axes, and its copies where batch indices share it."""
    load = next(load for load in candidates(spec) if load.name == name)
    return len(_own(spec, load)) + bool(_shared(spec, load))


def _is_added(site: Site) -> bool:
    """Do batch indices that share the tensor add to the same copy? What it is rounded to depends on who comes first."""
    return bool(_shared(site.spec, stored_load(site))) and not site.ordered


def store_ds(site: Site, out: Writer, tiles: list[tuple[str, str]]) -> None:
    """Start the stores of dS, or add it to what others stored; tiles: (first key, place in ds_tile)."""
    if stored := stored_load(site):
        start, copy = "tma.async_copy_shared_to_global", [flatten(shared)] if (shared := _shared(site.spec, stored)) else []
        if _is_added(site):
            start, copy = "reduce_add", [f"({flatten(shared)}) // {ADDED}"]
        for key, index in tiles:
            at = ", ".join([*copy, *(local(a) for a in _own(site.spec, stored)), "i0", key])
            out.line(f"{start}(Captured_tiles, [{at}], ds_tile.index({index}))")


def allocate_stored(site: Site, out: Writer) -> None:
    """The host's buffer of that gradient. Where dS is not added and the mask hides no tiles, all of it is written."""
    if stored := stored_load(site):
        fill, copies = "zeros" if site.spec.is_masked else "empty", [count(shared)] if (shared := _shared(site.spec, stored)) else []
        if _is_added(site):
            fill, copies = "zeros", [f"triton.cdiv({count(shared)}, {ADDED})"]
        shape = ", ".join([*copies, *(extent(a) for a in _own(site.spec, stored)), "M", "N"])
        out.line(f"{buffer(site, stored)} = torch.{fill}(({shape}), dtype=q.dtype, device=q.device)", f"gradient of {stored}")


def is_signed(site: Site) -> bool:
    """Does the sign of `slope` say what dropout keeps, which takes no registers? It does where slope is the weight."""
    return site.spec.dropout > 0 and not has_slopes(site)


def left_out(site: Site) -> float:
    """The factor of dS that is applied to the sums dQ and dK instead: dropout's, unless dS itself is stored."""
    if not is_signed(site) or stored_load(site):
        return 1.0
    return kept_scale(site.spec.dropout) * (0.5 if doubles(site) else 1.0)


def doubles(site: Site) -> bool:
    """Is dS twice as large, so that slope + |slope| serves it? bfloat16 has the range for that."""
    return site.dtype == "bfloat16" and not stored_load(site)


def sum_kernel(site: Site) -> Kernel | None:
    """Sums the copies of the stored gradient (PyTorch's own sum takes three times as long)."""
    stored = stored_load(site)
    if stored is None or site.one_tile or not (shared := _shared(site.spec, stored)):
        return None
    name = buffer(site, stored)
    kernel = Kernel(f"attention_sum_{name[2:]}", f"The gradient of {stored}: the sum over ({', '.join(shared)}).",
                    {"Stored": name, "Sum": f"sum_{name}", "elements": f"sum_{name}.numel()", "copies": f"{name}.shape[0]"}, ("BLOCK",), "SUM")
    out = kernel.body
    out.assign("n", "tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)")
    out.assign("total", "tl.zeros([BLOCK], tl.float32)")
    with out.block("for copy in tl.range(0, copies):"):
        out.assign("total", "total + tl.load(Stored + tl.cast(copy, tl.int64) * elements + n, mask=n < elements, other=0.0).to(tl.float32)")
    factor = _over_ds(site)
    out.line(f"tl.store(Sum + n, {f'(total * {factor!r})' if factor != 1.0 else 'total'}.to(Sum.dtype.element_ty), mask=n < elements)")
    return kernel


def finish_stored(site: Site, kernel: Kernel | None, out: Writer) -> None:
    """The captured tensor's gradient, of its copies and of dS."""
    stored = stored_load(site)
    if stored is None:
        return
    name, factor = buffer(site, stored), _over_ds(site)
    times = f" * {factor!r}" if factor != 1.0 else ""
    if kernel is None:
        if times:
            out.line(f"{name} *= {factor!r}", f"the score has {stored} times that")
        return
    with out.block(f"if {name}.shape[0] == 1:"):
        out.line(f"{name} = {name}[0]{times}")
    with out.block("else:"):
        out.line(f"sum_{name} = torch.empty({name}.shape[1:], dtype={local(stored.name)}.dtype, device=q.device)")
        kernel.call(f'(triton.cdiv(sum_{name}.numel(), SUM["BLOCK"]),)', out)
        out.line(f"{name} = sum_{name}")
