"""The host functions of a generated file: allocate, launch, and bring gradients of captured tensors into their own shape."""
from __future__ import annotations

from typing import Sequence

from ..expr import Const, Load
from ..spec import BLOCK, AttentionSpec
from . import captured
from .derivative import partial as derivative
from .factors import split_factor
from .grids import grid_of, groups_of, rows_of
from .parts import Site, count, extent
from .program import local
from .reads import averages
from .schedules.backward import keys_kernel, rows_kernel
from .schedules.common import PADDING, buffer, delta_kernel
from .schedules.dense import dense_kernel
from .schedules.one_tile import held_axes, one_tile_kernel, own_loads, parts_kernel, reads_delta
from .schedules.relative import allocate_ends, diagonal_kernel, line_kernel, relative_gradient, summed
from .schedules import documents, hopper, hopper_around, hopper_backward, hopper_forward, hopper_locate
from .schedules.combine import combine_kernel
from .schedules.forward import forward_kernel, goes_in_groups
from .schedules.hopper_dq import finish_kernel, sum_shape, turns_shape
from .schedules.hopper_keys import goes_together, is_split
from .schedules.hopper_captured import allocate_stored, finish_stored, stored_load, sum_kernel
from .writer import Kernel, Writer, wrapped


DENSE_PROGRAMS = 512
"""Programs that the gradient of a tensor of pairs should have at least, where batch indices share the tensor: it is summed in parts then."""
HELD_PROGRAMS = 1024
"""So many where that gradient stays in registers beside all others: twice as many as an H200 holds at once."""


def kernels(site: Site) -> dict[str, Kernel]:
    """The kernels a file needs, by role."""
    if site.warpgroups:
        found = {"forward": hopper_forward.forward_kernel(site)}
        if site.averages:
            found["empty rows"] = hopper_around.empty_rows_kernel(site)
    else:
        found = {"forward": forward_kernel(site)} | ({"combine": combine_kernel(site)} if site.parts else {})
    if any(site.needs) and (not site.one_tile or reads_delta(site)):
        found["delta"] = delta_kernel(site)
    if site.one_tile:
        found |= {"one tile": one_tile_kernel(site)} | ({"sum": parts_kernel(site)} if site.row_parts else {})
    elif site.one_pass:
        found |= {"keys": hopper_backward.keys_kernel(site), "rows": finish_kernel(site)}
    elif site.needs[1] or site.needs[2] or site.loads_over("j") or summed(site):
        found |= {"keys": keys_kernel(site, "K"), "values": keys_kernel(site, "V")} if site.divided else {"keys": keys_kernel(site)}
    if not site.one_pass and not site.one_tile and (site.needs[0] or site.loads):
        found["rows"] = rows_kernel(site)
    if summing := sum_kernel(site):
        found["sum"] = summing
    for load in _dense_loads(site):
        relative = captured.is_relative(load)
        found[f"dense {buffer(site, load)}"] = (diagonal_kernel if relative else dense_kernel)(site.dense, load)
        if relative:
            found[f"line {buffer(site, load)}"] = line_kernel(site, load)
    return found


def _dense_loads(site: Site) -> list[Load]:
    """Loads over rows and keys whose gradient has a kernel of its own."""
    return [load for load in site.loads_over("i", "j") if load != stored_load(site)]


def _twins(site: Site) -> dict[Load, tuple[Load, float]]:
    """Loads over rows and keys whose gradient is that of an earlier one, times a number. before -> after: qk + a[h, i, j] + b[h, i, j] * 2.0 -> b: (a, 2.0)"""
    found, kinds = {}, {}
    for load in sorted(site.loads_over("i", "j"), key=lambda load: load != stored_load(site)):
        rest, factor = split_factor(derivative(site.spec.score, load))
        if captured.is_relative(load) or factor == 0.0:
            continue
        first, its = kinds.setdefault((rest, captured.dims_of(site.spec, load)), (load, factor))
        if first != load:
            found[load] = first, factor / its
    return found


def _unpack(site: Site, out: Writer, by_documents: bool) -> None:
    """by_documents: do its tiles begin where documents do?"""
    spec = site.spec
    if spec.aux:
        out.line(", ".join(local(a.name) for a in spec.aux) + ("," if len(spec.aux) == 1 else "") + " = aux")
    names = [*(extent(a) for a in spec.axes), *(local(s) for s in spec.sizes)]
    if names:
        out.line(", ".join(names) + ("," if len(names) == 1 else "") + " = sizes")
    out.line("M, N = q.shape[-2], k.shape[-2]")
    if site.listed:
        if by_documents:
            out.line("row_tiles, key_tiles, _ = blocks if blocks and blocks[2] else tiles_for(SPEC, aux, sizes, q, k)", "where documents begin")
        else:
            out.line("row_blocks, key_blocks, _ = blocks if blocks and not blocks[2] else lists_for(SPEC, aux, sizes, q, k)", "which tiles the mask leaves")


def _shape(items) -> str:
    items = list(items)
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


def _unpack_mask(mask: AttentionSpec, out: Writer) -> None:
    if mask.aux:
        out.line(", ".join(local(a.name) for a in mask.aux) + ("," if len(mask.aux) == 1 else "") + " = aux")
    out.line(", ".join([*(extent(a) for a in mask.axes), "M", "N", *(local(s) for s in mask.sizes)]) + " = sizes")


def lists_function(mask: AttentionSpec, kernel: Kernel) -> str:
    """Host function of the mask summary: the kinds of all blocks, then lists of them by rows and by columns."""
    out = Writer()
    with out.block("def block_lists(aux, sizes, device):"):
        out.line('"""(rows, keys), as flashfx.codegen.blocks.block_lists."""')
        _unpack_mask(mask, out)
        out.line("R, C, halves = triton.cdiv(M, BLOCKS['BLOCK']), triton.cdiv(N, BLOCKS['BLOCK']), triton.cdiv(M, BLOCKS['FINE'])")
        axes = [extent(a) for a in mask.axes]
        if averages(mask):
            padded = _shape([*axes, "halves * BLOCKS['FINE']"])
            out.line(f"seen = torch.zeros({padded}, dtype=torch.int32, device=device)", "1 for each row that sees a key")
            out.line("seen[..., M:] = 1")
        for name, shape in (("kinds", ["halves", "C"]), ("rows", ["R", "2 + C"]), ("keys", ["C", "2 + halves"])):
            out.line(f"{name} = torch.empty({_shape([*axes, *shape])}, dtype=torch.int32, device=device)",
                     "what the mask leaves of each block: 0 nothing, 1 some, 2 all of it" if name == "kinds" else "")
        kernel.call(f"({count(mask.axes)} * R * C,)", out)
        out.line(f"attention_lists[({count(mask.axes)} * R,)](kinds, rows, halves * C, 2 * C, 1, R, C, halves, C, **LISTS)")
        if averages(mask):
            out.line("empty = seen.unflatten(-1, (halves, -1)).amin(-1, keepdim=True) == 0")
            out.line("kinds.masked_fill_(empty, 1)", "rows that see no key average v: gradients of all keys pass through them")
        out.line(f"attention_lists[({count(mask.axes)} * C,)](kinds, keys, halves * C, 1, C, C, halves, 0, 0, **LISTS)")
        out.line("return rows, keys")
    return out.text


def document_tiles_function(mask: AttentionSpec, kernels: Sequence[Kernel]) -> str:
    """Host function of `schedules.documents`, whose kernels come in their order."""
    out = Writer()
    with out.block("def document_tiles(aux, sizes, device):"):
        out.line('"""(row_tiles, key_tiles), as flashfx.codegen.blocks.document_tiles."""')
        _unpack_mask(mask, out)
        out.line("R, C = triton.cdiv(M, TILES['BLOCK']), triton.cdiv(N, TILES['BLOCK'])")
        batch = count(mask.axes)
        out.line(f"cuts, key_cuts = (torch.empty({batch} * blocks, dtype=torch.int32, device=device) for blocks in (R, C))")
        for name, places in (("key_ends", f"C * {BLOCK // documents.GROUP}"), ("slot_ends", f"R * {documents.SLOTS}")):
            out.line(f"{name} = torch.empty({batch} * {places} * {2 * len(documents.pairs(mask))}, dtype=torch.int64, device=device)")
        out.line(f"row_tiles = torch.empty((1 + {batch} * R * 2, {documents.HEAD} + C), dtype=torch.int32, device=device)")
        out.line(f"key_tiles = torch.empty(({batch} * (1 + C * 2), {documents.KEY_HEAD} + R * {2 * documents.SLOTS}), dtype=torch.int32, device=device)")
        for kernel, grid in zip(kernels, ("max(R, C)", "R * 2", "C * 2")):
            kernel.call(f"({batch} * {grid},)", out)
        out.line("return row_tiles, key_tiles")
    return out.text


def forward_function(site: Site, found: dict[str, Kernel]) -> str:
    out = Writer()
    with out.block(f"def forward(q, k, v, aux, seed, sizes{', blocks=None' if site.listed else ''}, outer=1):"):
        out.line('"""(out, lse), as flashfx.codegen.launch.forward."""')
        _unpack(site, out, site.warpgroups > 0 and hopper_locate.by_row_tiles(site))
        extents = _shape(extent(a) for a in site.spec.axes)
        out.line(f"out, lse = empty_output({extents}, M, v, outer), empty_lse({extents}, M, v)")
        if site.warpgroups and hopper_locate.is_uneven(site):
            out.line("taken = tile_counter(q.device)", "how many tiles programs took beside their first: 0 before and behind the kernel")
        if site.parts:
            out.line(f"parts = {site.parts}", "of the keys, a program for each")
            shape = _shape(["parts", *(extent(a) for a in site.spec.axes), "M"])
            out.line(f"part_max, part_sum = (torch.empty({shape}, dtype=torch.float32, device=q.device) for _ in range(2))")
            out.line(f"part_out = torch.empty({shape[:-1]}, {site.Dv}), dtype=torch.float32, device=q.device)")
        if not site.warpgroups and goes_in_groups(site):
            grid = groups_of(site, "FORWARD", "BLOCK_M", "M", site.spec.axes, "N", out, bool(site.parts))
        else:
            grid = grid_of("FORWARD", "BLOCK_M", f"M * {count(site.packed)}" if site.packed else "M", site.other_axes(site.packed))
            grid = f"(min({site.programs}, {grid[1:-2]}),)" if site.warpgroups else f"{grid[:-1]} parts)" if site.parts else grid
        found["forward"].call(grid, out)
        if site.parts:
            out.line("combined = shared_out(parts)")
            found["combine"].call(f"(triton.cdiv({count(site.spec.axes)} * M, combined['ROWS']),)", out)
        if "empty rows" in found:
            found["empty rows"].call(grid_of("EMPTY_ROWS", "BLOCK_M", "M", site.spec.axes), out)
        out.line("return out, lse")
    return out.text


def backward_function(site: Site, found: dict[str, Kernel]) -> str:
    spec, out = site.spec, Writer()
    extra = ("" if site.loads else ", grad_lse=None") + (", blocks=None" if site.listed else "")
    with out.block(f"def backward(grad_out, q, k, v, aux, seed, out, lse, sizes{extra}):"):
        out.line('"""Gradients of (q, k, v, *aux), as flashfx.codegen.launch.backward; None where none was asked for."""')
        _unpack(site, out, site.documents)
        if "delta" in found:
            out.line(f"padded = triton.cdiv(M, {PADDING}) * {PADDING}")
            shape = _shape([*(extent(a) for a in spec.axes), "padded"])
            out.line(f"delta, lse2 = (torch.empty({shape}, dtype=torch.float32, device=q.device) for _ in range(2))")
        if site.one_pass:
            rows = [*(extent(a) if a in spec.q else "1" for a in spec.axes), *sum_shape(site)]
            out.line(f"sum_q = torch.empty({_shape(rows)}, dtype=torch.float32, device=q.device)", "dQ; the next kernel sets it to 0")
            if site.documents:
                out.line(f"order = torch.empty(({count(spec.mask().axes)}, triton.cdiv(N, {BLOCK}) * 2), dtype=torch.int32, device=q.device)", "of tiles of keys; worked out there too")
            out.line("taken = torch.empty(1, dtype=torch.int32, device=q.device)", "how many tiles of keys programs took beside their first; set to 0 too")
            if site.ordered:
                out.line(f"turns = torch.zeros({turns_shape(site)}, dtype=torch.int32, device=q.device)", "who added last to each tile of rows")
        if "delta" in found:
            found["delta"].call(grid_of("DELTA", "BLOCK_M", "padded", spec.axes), out)
        if not site.loads:
            with out.block("if grad_lse is not None:"):
                if "delta" in found:
                    out.line("delta[..., :M] -= grad_lse", "d lse / d score = p: what reaches lse adds p * grad_lse to ds")
                else:
                    out.line("grad_lse = grad_lse.contiguous()")
        if site.averages and not site.listed and not site.one_tile:
            shared = [n for n, a in enumerate(spec.axes) if a in site.other_axes(site.axes_of("k", "v"))] if site.one_pass else []
            over = f"{tuple(shared) + (-1,)}" if shared else "-1"
            out.line(f"averaging = (lse >= MEAN_ROW).any({over}).to(torch.int32)", "batch indices with rows that average v")
        results = ["None"] * 3
        allocate_ends(site, out, f"triton.cdiv(N, KEYS['BLOCK_N'])" + " * 2" * (site.one_pass and is_split(site)))
        if site.one_pass:
            results = _one_pass(site, found, out)
        elif site.one_tile:
            results = _one_tile(site, found, out)
        elif "rows" in found:
            results[0] = _rows(site, found["rows"], out)
        if "keys" in found and not site.one_pass:
            results[1], results[2] = _keys(site, [found[name] for name in ("values", "keys") if name in found], out)
        twins = _twins(site)
        for load in sorted(_dense_loads(site), key=lambda load: load in twins):
            _dense(site, load, found, out, twins.get(load))
        for a, need in zip(spec.aux, site.needs[3:]):
            results.append(_captured(site, a.name, out) if need else "None")
        for text in wrapped("return [", results, "]"):
            out.line(text)
    return out.text


def _allocate(site: Site, name: str, operand: str, axes, size: str, head: int, out: Writer) -> str:
    """Buffer of a gradient with one matrix per index of `axes`; returns the host expression of the finished gradient."""
    own = site.axes_of(operand)
    spread = [extent(a) if a in axes else "1" for a in site.spec.axes]
    shape = _shape([*spread, size, str(head)])
    if tuple(own) == tuple(axes):
        out.line(f"{name} = torch.empty({shape}, dtype={operand}.dtype, device={operand}.device)")
        return name
    out.line(f"{name} = torch.empty({shape}, dtype=torch.float32, device={operand}.device)", f"{operand} is shared along some of these")
    absent = [n for n, a in enumerate(site.spec.axes) if a in axes and a not in own]
    return f"{name}.sum({tuple(absent)}, keepdim=True).to({operand}.dtype)"


def _keys(site: Site, found: list[Kernel], out: Writer) -> tuple[str, str]:
    axes = site.axes_of("k", "v")
    grad_k = _allocate(site, "grad_k", "k", axes, "N", site.D, out)
    grad_v = _allocate(site, "grad_v", "v", axes, "N", site.Dv, out)
    _allocate_sums(site, site.loads_over("j"), "", out)
    grid = groups_of(site, "KEYS", "BLOCK_N", "N", axes, rows_of(site, axes), out) if site.by_keys.shrinks else grid_of("KEYS", "BLOCK_N", "N", axes)
    for kernel in found:
        kernel.call(grid, out)
    return grad_k if site.needs[1] else "None", grad_v if site.needs[2] else "None"


def _allocate_sums(site: Site, loads: Sequence[Load], parts: str, out: Writer, *first: str) -> None:
    """Buffers of gradients by row, by key, or of so many parts of a batch index. first: dims in front of all."""
    for load in loads:
        last = "M" if "i" in load.variables else "N" if "j" in load.variables else parts
        out.line(f"{buffer(site, load)} = torch.empty({_shape([*first, *(extent(a) for a in site.spec.axes), last])}, dtype=torch.float32, device=q.device)")


def _one_tile(site: Site, found: dict[str, Kernel], out: Writer) -> list[str]:
    """All three gradients, a program for each batch index of the keys, or for each part of the rows."""
    axes, kernel = site.axes_of("k", "v"), found["one tile"]
    results = [_allocate(site, f"grad_{x}", x, site.spec.axes if x == "q" else axes, size, head, out)
               for x, size, head in (("q", "M", site.D), ("k", "N", site.D), ("v", "N", site.Dv))]
    if site.row_parts:
        out.line(f"parts = {site.row_parts}", "of the rows, a program for each")
        for x in "kv":
            out.line(f"part_{x} = grad_{x} if parts == 1 else torch.empty((parts, *grad_{x}.shape), dtype=torch.float32, device=q.device)")
        by_key = site.loads_over("j")
        _allocate_sums(site, [load for load in own_loads(site) if load not in by_key], "parts", out)
        _allocate_sums(site, by_key, "", out, "parts")
        kernel.call(f"({count(axes)}, parts)", out)
        with out.block("if parts > 1:"):
            found["sum"].call('(triton.cdiv(grad_k.numel(), SUM["BLOCK"]) + triton.cdiv(grad_v.numel(), SUM["BLOCK"]),)', out)
        for name in (buffer(site, load) for load in by_key):
            out.line(f"{name} = {name}.sum(0)")
        return results
    _allocate_sums(site, own_loads(site), "1", out)
    if load := stored_load(site):
        mine, others = held_axes(site)
        _dense_parts(site, load, count(mine), HELD_PROGRAMS, kernel, out)
    else:
        kernel.call(f"({count(axes)},)", out)
    return results


def _rows(site: Site, kernel: Kernel, out: Writer) -> str:
    axes = site.axes_of("q")
    grad_q = _allocate(site, "grad_q", "q", axes, "M", site.D, out)
    _allocate_sums(site, [*site.loads_over("i"), *site.loads_over()], 'triton.cdiv(M, ROWS["BLOCK_M"])', out)
    kernel.call(groups_of(site, "ROWS", "BLOCK_M", "M", axes, "N", out) if site.by_rows.only_grows else grid_of("ROWS", "BLOCK_M", "M", axes), out)
    return grad_q if site.needs[0] else "None"


def _one_pass(site: Site, found: dict[str, Kernel], out: Writer) -> list[str]:
    """All three gradients by tiles of keys; dQ is summed in float32."""
    axes, shape = site.axes_of("k", "v"), _shape([*(extent(a) if a in site.spec.q else "1" for a in site.spec.axes), "M", str(site.D)])
    grad_k = _allocate(site, "grad_k", "k", axes, "N", site.D, out)
    grad_v = _allocate(site, "grad_v", "v", axes, "N", site.Dv, out)
    allocate_stored(site, out)
    if goes_together(site):
        row = sum(6 * c.width for c in site.qk_chunks) + sum(2 * c.width for c in site.v_chunks)  # bytes of q, dO and dQ
        out.line(f"together, *_ = long_first({count(axes)}, triton.cdiv(N, KEYS['BLOCK_N']), {rows_of(site, axes)} * {row} / 1024)", "batch indices whose tiles start together")
    found["keys"].call(f"(min({site.programs}, {grid_of('KEYS', 'BLOCK_N', 'N', axes)[1:-2]}),)", out)
    finish_stored(site, found.get("sum"), out)
    out.line(f"grad_q = torch.empty({shape}, dtype=q.dtype, device=q.device)")
    tiles = f"triton.cdiv(M, {BLOCK}) * {documents.SLOTS}" if site.documents else f"triton.cdiv(M, {hopper.ROWS})"
    found["rows"].call(f"({tiles} * {count(site.axes_of('q'))},)", out)
    return [name if need else "None" for name, need in zip(("grad_q", grad_k, grad_v), site.needs)]


def _is_final(site: Site, load: Load) -> bool:
    """Is the dense gradient of a load, element for element, the captured tensor's own where both have the same size?"""
    read = captured.on_line(load)
    names = [a.name for a in read.index if not isinstance(a, Const)] if captured.is_plain(site.spec, read) else []
    return names == list(captured.dims_of(site.spec, read)) and sum(x.name == load.name for x in site.loads) == 1


def _dense(site: Site, load: Load, found: dict[str, Kernel], out: Writer, twin: tuple[Load, float] | None = None) -> None:
    if twin is not None:
        first, factor = twin
        with out.block(f"if {local(first.name)}.dtype == {local(load.name)}.dtype:"):
            out.line(f"{buffer(site, load)} = {buffer(site, first)}{f' * {factor!r}' if factor != 1.0 else '.clone()'}", f"gradient of {load}")
        with out.block("else:"):
            _dense(site, load, found, out)
        return
    axes = [a for a in captured.dims_of(site.spec, load) if a not in ("i", "j")]
    kernel, dtype = found[f"dense {buffer(site, load)}"], f"{local(load.name)}.dtype" if _is_final(site, load) else "torch.float32"
    if captured.is_relative(load):
        relative_gradient(site, load, (kernel, found[f"line {buffer(site, load)}"]), dtype, out)
        return
    _dense_parts(site, load, f'triton.cdiv(M, DENSE["BLOCK_M"]) * triton.cdiv(N, DENSE["BLOCK_N"]) * {count(axes)}', DENSE_PROGRAMS, kernel, out)


def _dense_parts(site: Site, load: Load, tiles: str, programs: int, kernel: Kernel, out: Writer) -> None:
    """Buffer and launch of a dense gradient, which programs, so many in all, make in parts where batch indices share the tensor. tiles: of the whole gradient."""
    axes = [a for a in captured.dims_of(site.spec, load) if a not in ("i", "j")]
    name, shape, dtype = buffer(site, load), [*(extent(a) for a in axes), "M", "N"], f"{local(load.name)}.dtype" if _is_final(site, load) else "torch.float32"
    if not (others := site.other_axes(axes)):
        out.line(f"{name} = torch.empty({_shape(shape)}, dtype={dtype}, device=q.device)", f"gradient of {load}")
        kernel.call(f"({tiles},)", out)
        return
    out.line(f"parts = max(1, min({count(others)}, {programs} // max(1, {tiles})))", f"programs for each tile of the gradient of {load}")
    out.line(f"{name} = torch.empty({_shape(['parts', *shape])}, dtype={dtype} if parts == 1 else torch.float32, device=q.device)")
    kernel.call(f"({tiles} * parts,)", out)
    out.line(f"{name} = {name}[0] if parts == 1 else {name}.sum(0).to({dtype})")


def _captured(site: Site, tensor: str, out: Writer) -> str:
    """Sum the gradients of all loads of one tensor into its own shape; returns the host expression."""
    name = f"grad_{tensor}"
    source = local(tensor)
    final = next((buffer(site, x) for x in site.loads_over("i", "j") if x.name == tensor and _is_final(site, x)), "")
    if final:
        with out.block(f"if {final}.numel() == {source}.numel():"):
            out.line(f"{name} = {final}.view({source}.shape)")
        with out.block("else:", "only a part of it is read"):
            _accumulated(site, tensor, name, source, out)
    else:
        _accumulated(site, tensor, name, source, out)
    return f"{name}.to({source}.dtype)"


def _accumulated(site: Site, tensor: str, name: str, source: str, out: Writer) -> None:
    spec = site.spec
    out.line(f"{name} = torch.zeros({source}.shape, dtype=torch.float32, device={source}.device)")
    for load in (x for x in site.loads if x.name == tensor):
        dims, size, grid = captured.dims_of(spec, load), {"i": "M", "j": "N"}, "index_grid(SPEC, sizes, M, N, q.device)"
        value, read = buffer(site, load), captured.on_line(load)
        if read != load:
            length = f"{source}.shape[{captured.line_of(load).dim}]"
            dims, size, grid = tuple(d for d in dims if d != "i"), {"j": length}, f"positions({grid}, {length})"
        elif captured.is_relative(load):  # one value for each j - i, where j's would stand
            dims, size, grid = tuple(d for d in dims if d != "i"), {"i": "1", "j": "(M + N - 1)"}, f"differences({grid})"
        elif not {"i", "j"} <= set(dims):  # a sum per batch index, row or key: add up what the load does not depend on
            absent = [n for n, a in enumerate(spec.axes) if a not in dims]
            if not {"i", "j"} & set(dims):
                absent.append(len(spec.axes))  # one partial sum per program
            if absent:
                value = f"{value}.sum({tuple(absent)})"
        if captured.is_plain(spec, read):
            size |= {a: extent(a) for a in spec.axes}
            index = [str(a.value) if isinstance(a, Const) else f":{size[a.name]}" for a in read.index]
            order = [dims.index(a.name) for a in read.index if not isinstance(a, Const)]
            if order != sorted(order):
                value = f"{value}.permute({', '.join(map(str, order))})"
            out.line(f"{name}[{', '.join(index) or '...'}] += {value}", f"{load}")
        else:
            shape = _shape(size.get(d, extent(d)) if d in dims else "1" for d in (*spec.axes, "i", "j"))
            number = spec.score.loads.index(load)
            text = f"SPEC.score.loads[{number}]"
            for text in wrapped("accumulate(", ["SPEC", text if read == load else f"on_line({text})", f"{value}.reshape({shape})", name,
                                                grid, f"dict(zip({[a.name for a in spec.aux]!r}, aux))",
                                                *(["whole=True"] if read == load and not captured.is_relative(load) else [])], ")"):
                out.line(text)
