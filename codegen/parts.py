"""What all generated attention kernels share: the site being generated, head-size chunks, batch indices, tile ranges, operands."""
from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Iterable, Sequence

from ..expr import BOOL, Call, Expr, Load, conjuncts
from ..spec import AttentionSpec
from . import captured
from .factors import gathered, peel
from .program import local, pointer, stride
from .ranges import Bounds, bounds, never_empty, not_behind
from .writer import Writer

LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Chunk:
    """A power-of-two piece of the head size, at least 16 wide, with its own accumulator; `masked` if it reaches beyond the end."""

    suffix: str
    start: int
    width: int
    masked: bool


APART = {"ieee": 32, "bf16x6": 64, "bf16x3": 64}
"""Precisions of float32 products whose sums are as good as exact: the widest piece of the head size, which is summed by itself. On scalar units whole
rows of both operands of a piece are in registers."""
DENSE_IN_PIECES = 64
"""Head size up to which the kernels for gradients over rows and keys multiply float32 in pieces of bfloat16: they hold both factors of both products."""


@functools.cache
def chunks(size: int, limit: int = 256) -> tuple[Chunk, ...]:
    """80 -> 64 + 16, 40 -> 32 + 16 (8 of them masked): no padding to the next power of two, but where that takes more than two pieces, for which
    registers are too few: 112 -> 128 (16 masked), 144 -> 128 + 32, 176 -> 128 + 64, 208 -> 256. `limit` bounds a piece, and then there may be many."""
    padded = -(-size // 16) * 16
    widths = [limit] * (padded // limit)
    rest = padded % limit
    widths += [1 << bit for bit in range(rest.bit_length() - 1, 3, -1) if rest >> bit & 1]
    if limit == 256 and len(widths) > 2:
        second = 1 << (padded - widths[0] - 1).bit_length()
        widths = [2 * second] if second == widths[0] else [widths[0], second]
    elif limit == 256 and widths == [128, 16]:  # products of 16 columns beside such of 128 take more registers than of 32
        widths = [128, 32]
    starts = [sum(widths[:n]) for n in range(len(widths))]
    return tuple(Chunk(str(n) if len(widths) > 1 else "", s, w, s + w > size) for n, (s, w) in enumerate(zip(starts, widths)))


@functools.cache
def even_chunks(size: int) -> tuple[Chunk, ...]:
    """For float32 in pieces of bfloat16, all of one width: 80 -> 3 of 32, the last 16 of them masked; 112 -> 2 of 64.

    Where widths differ, tiles of one and of another lie at the same place in shared memory one after the other, and ptxas 12.8 (of Triton 3.6 and 3.7)
    forgets the place in one of their matrix descriptors, where TMA copies ahead too: products read beyond shared memory.
    """
    padded = 16 if size <= 16 else -(-size // 32) * 32
    width = min(padded, 32) if padded % 64 else 64
    return tuple(Chunk(str(n) if width < padded else "", n * width, width, (n + 1) * width > size) for n in range(padded // width))


@dataclass(frozen=True)
class Site:
    """What a generated file is generated from. `loads`: those whose tensor gets a gradient."""

    spec: AttentionSpec
    D: int
    Dv: int
    dtype: str
    v_dtype: str
    precision: str = "ieee"
    wide: bool = False           # M <= N is known: with it, more masks provably leave no row empty
    whole: bool = False          # N is a multiple of every BLOCK_N: no tile reaches beyond the last key
    descriptors: bool = False    # read tiles through tensor descriptors (TMA)
    listed: bool = False         # the mask's run-time summary says which tiles to visit
    needs: tuple[bool, ...] = ()
    warpgroups: int = 0          # of the Hopper forward schedule; 0: the portable one
    columns: int = 0             # keys of a tile of that schedule
    q_tiles: int = 1             # query tiles of that schedule in shared memory
    programs: int = 0            # of that schedule: one for each multiprocessor
    one_pass: bool = False       # the Hopper backward schedule
    ordered: bool = False        # which adds dQ up in a fixed order
    tiled: tuple[str, ...] = ()  # captured tensors of which the Hopper schedules read tiles by TMA
    stored: str = ""             # captured tensor whose gradient the Hopper backward stores
    turns: bool = False          # there, heads that share keys in turn, tile of rows by tile of rows
    documents: bool = False      # there, tiles of keys and rows that begin where documents do
    thirds: bool = False         # there, three warpgroups with a third of the keys and of the columns each
    narrow: bool = False         # heads in pieces of 64, of which one buffer holds all
    packed: tuple[str, ...] = ()  # axes whose heads are rows of a tile of the portable forward kernel
    one_tile: bool = False       # the backward kernel of which one tile holds all keys
    stages: int = 2              # of the Hopper backward schedule: tiles of rows in shared memory
    aligned: bool = True         # strides of q, k, v and dO are multiples of 16 bytes
    in_flight: bool = False      # matrix products run on while the program goes on (Hopper)
    parts: str = ""              # into how many parts the host splits the keys of a tile of rows; "" if one program reads them all
    row_parts: str = ""          # the same of the rows of a tile of all keys, in backward

    @cached_property
    def hides_beyond(self) -> bool:
        """Does no tile reach beyond the last key, or the mask hide what lies there? It does where no row sees a key behind its own and M <= N, and where
        it reads for each key whether that may be seen: beyond the end False is read. So does a score to which `added_by_key` is added."""
        read = any(isinstance(c, Load) and c.kind == BOOL and "j" in c.variables for c in conjuncts(self.spec.visible))
        return self.whole or not self.averages and (read or self.added_by_key is not None or self.wide and not_behind(self.by_rows.hi))

    @cached_property
    def added_by_key(self) -> Load | None:
        """What a score reads at the key alone and adds to something that is not +inf for finite operands: beyond the end the Hopper forward reads -inf."""
        if not set(_operations(self.raw)) <= {"add", "sub", "neg", "mul", "to_float", "tanh"}:
            return None
        return next((load for load in _addends(self.raw) if isinstance(load, Load) and load.variables & {"i", "j"} == {"j"}
                     and load not in self.spec.visible.loads), None)

    @property
    def loads(self) -> list[Load]:
        return captured.differentiable_loads(self.spec, dict(zip((a.name for a in self.spec.aux), self.needs[3:])))

    def loads_over(self, *dims: str) -> list[Load]:
        """Those that depend on exactly these of i and j."""
        return [load for load in self.loads if load.variables & {"i", "j"} == set(dims)]

    def axes_of(self, *operands: str) -> tuple[str, ...]:
        subset = frozenset().union(*(getattr(self.spec, o) for o in operands))
        return tuple(a for a in self.spec.axes if a in subset)

    def other_axes(self, axes: Sequence[str]) -> tuple[str, ...]:
        return tuple(a for a in self.spec.axes if a not in axes)

    @cached_property
    def can_be_empty(self) -> bool:
        return self.spec.is_masked and not never_empty(self.spec.visible, self.wide)

    @property
    def averages(self) -> bool:
        return self.can_be_empty and self.spec.empty_row.averages

    @cached_property
    def score(self) -> Expr:
        """As the kernels compute it."""
        return self.spec.score if self.float32 else gathered(self.spec.score)

    @cached_property
    def raw(self) -> Expr:
        return peel(self.score)[0]

    @cached_property
    def factor(self) -> float:
        return peel(self.score)[1]

    @cached_property
    def by_rows(self) -> Bounds:
        return bounds(self.spec.visible, "j")

    @cached_property
    def by_keys(self) -> Bounds:
        return bounds(self.spec.visible, "i")

    @property
    def scalar(self) -> bool:
        """Are products of float32 on the ordinary units?"""
        return self.precision == "ieee" and self.float32

    @property
    def float32(self) -> bool:
        """Are there products of float32?"""
        return "float32" in (self.dtype, self.v_dtype)

    @property
    def apart(self) -> int:
        """The widest piece of the head size whose products are summed by themselves; 0: sums go on in one accumulator."""
        return APART.get(self.precision, 0) if self.float32 else 0

    @property
    def in_pieces(self) -> bool:
        """Do matrix units multiply float32, each number as a sum of narrower ones?"""
        return self.float32 and self.precision != "ieee"

    @property
    def divided(self) -> bool:
        """Have dK and dV kernels of their own? Sums of both are more than registers hold beside what matrix units take for a product of float32, too."""
        return self.in_pieces or captured.is_divided(self.spec)

    @property
    def dense(self) -> Site:
        """As the kernels for gradients over rows and keys are written."""
        wide = self.in_pieces and max(self.D, self.Dv) > DENSE_IN_PIECES
        return replace(self, precision="ieee", descriptors=False) if wide else self

    @property
    def qk_chunks(self) -> tuple[Chunk, ...]:
        return self._chunks(self.D)

    @property
    def v_chunks(self) -> tuple[Chunk, ...]:
        return self._chunks(self.Dv)

    def _chunks(self, size: int) -> tuple[Chunk, ...]:
        if self.narrow:
            return tuple(Chunk("", start, 64, start + 64 > size) for start in range(0, size, 64))
        return even_chunks(size) if self.in_pieces else chunks(size, self.apart or 256)

    @property
    def v_index(self) -> str:
        """Name of the index vector along the value head size: shared with d where both sizes agree."""
        return "d" if self.D == self.Dv else "e"

    def dot(self, a: str, b: str, acc: str = "") -> str:
        """acc + a . b. Products as good as exact are each summed by themselves before they are added, or all of them were one chain, whose error grows with
        its length: Triton makes one of them but for the last argument, which means nothing else to float32."""
        full_precision = [f'input_precision="{self.precision}"'] if self.float32 else []
        if acc and self.apart:
            return f"{acc} + tl.dot({', '.join([a, b, *full_precision])}, max_num_imprecise_acc=1)"
        return f"tl.dot({', '.join([a, b, *([acc] if acc else []), *full_precision])})"


def _operations(e: Expr) -> list[str]:
    """Of values: positions are whole numbers."""
    return [e.op, *(op for a in e.args for op in _operations(a))] if isinstance(e, Call) else []


def _addends(e: Expr) -> list[Expr]:
    """Without factors that are positive constants."""
    if isinstance(e, Call) and e.op == "add":
        return [x for a in e.args for x in _addends(a)]
    return [peel(e)[0]]


# ------------------------------------------------------------------------------------------------ batch indices

def extent(axis: str) -> str:
    return f"extent_{axis}"


def decode(out: Writer, axes: Sequence[str], flat: str) -> None:
    """Axis indices from a flattened one.

    before -> after: (b, h), "z" -> b = z // extent_h; h = z % extent_h
    """
    for n, axis in enumerate(axes):
        inner = [extent(a) for a in axes[n + 1:]]
        value = flat if not inner else f"{flat} // {inner[0]}" if len(inner) == 1 else f"{flat} // ({' * '.join(inner)})"
        if n:
            value = f"({value}) % {extent(axis)}" if "//" in value else f"{value} % {extent(axis)}"
        out.assign(local(axis), value)


def flatten(axes: Sequence[str]) -> str:
    """The flattened index of the named axes."""
    if not axes:
        return "0"
    text = local(axes[0])
    for axis in axes[1:]:
        text = f"({text}) * {extent(axis)} + {local(axis)}" if "+" in text else f"{text} * {extent(axis)} + {local(axis)}"
    return text


def count(axes: Sequence[str]) -> str:
    return " * ".join(extent(a) for a in axes) or "1"


# ---------------------------------------------------------------------------------------------------- operands

OPERANDS = {  # kernel name -> (spec operand, host tensor, prefix of its strides, row letter, "qk" or "v" head size)
    "Q": ("q", "q", "q", "m", "d"), "K": ("k", "k", "k", "n", "d"), "V": ("v", "v", "v", "n", "e"),
    "Out": ("out", "out", "o", "m", "e"), "dO": ("out", "grad_out", "do", "m", "e"),
}


def operand_axes(site: Site, operand: str) -> tuple[str, ...]:
    name = OPERANDS[operand][0]
    return site.spec.axes if name == "out" else site.axes_of(name)


def arguments(site: Site, results: dict[str, str]) -> dict[str, str]:
    """Every argument a kernel may take, in order, with the host's expression for it. A kernel drops what it does not use."""
    spec, out = site.spec, {}
    for name, (_, tensor, *_rest) in OPERANDS.items():
        out[name] = tensor
    if site.descriptors:
        for name, (_, tensor, _, row, _) in OPERANDS.items():
            axes = [n for n, a in enumerate(spec.axes) if a in operand_axes(site, name)]
            for c, _, _ in pieces(site, name):
                block = "BLOCK_M" if row == "m" else "BLOCK_N"
                out[tiles_name(name, c)] = f"tiles_of({tensor}, {axes}, OPTIONS['{block}'], {c.width})"
    out |= {"Lse": "lse", "Lse2": "lse2", "Delta": "delta", "Averaging": "averaging", "Turns": "turns",
            "RowBlocks": "row_blocks", "KeyBlocks": "key_blocks", "RowTiles": "row_tiles", "KeyTiles": "key_tiles"} | results
    out |= {pointer(a.name): local(a.name) for a in spec.aux} | {"Seed": "seed"}
    for name, (_, tensor, prefix, row, _) in OPERANDS.items():
        for position, axis in enumerate(spec.axes):
            if axis in operand_axes(site, name):
                out[f"stride_{prefix}_{axis}"] = f"{tensor}.stride({position})"
        rank = len(spec.axes)
        out[f"stride_{prefix}_{row}"] = f"{tensor}.stride({rank})"
        out[f"stride_{prefix}_d"] = f"{tensor}.stride({rank + 1})"
    for a in spec.aux:
        out |= {stride(a.name, d): f"{local(a.name)}.stride({d})" for d in range(a.rank)}
    out |= {extent(axis): extent(axis) for axis in spec.axes} | {"M": "M", "N": "N"} | {local(s): local(s) for s in spec.sizes}
    return out


def multiples(site: Site, results: bool = False) -> dict[str, int]:
    """Of the strides of q, k, v and dO, and of what a kernel writes where it has `results`: so many elements are 16 bytes. Triton itself asks for multiples
    of 16 elements, which strides of heads such as 72 are not, and would read those one by one, each by an address in registers."""
    if not site.aligned or site.D % 8 or site.Dv % 8 or site.D % 16 == site.Dv % 16 == 0:
        return {}
    names = [name for name in OPERANDS if name != "Out" or results]
    width = lambda letter: 4 if (site.dtype if letter == "d" else site.v_dtype) == "float32" else 8
    return {f"stride_{prefix}_{of}": width(letter) for _, _, prefix, row, letter in map(OPERANDS.get, names) for of in (*site.spec.axes, row)}


def base(site: Site, operand: str) -> str:
    """Address of the operand's matrix for the current batch indices; 64-bit offsets."""
    prefix = OPERANDS[operand][2]
    return " + ".join([operand, *(f"tl.cast({local(a)}, tl.int64) * stride_{prefix}_{a}" for a in operand_axes(site, operand))])


def head_index(site: Site, out: Writer, which: Iterable[str]) -> None:
    """Index vectors along the head sizes: "d" for q and k, "e" for v."""
    for letter in dict.fromkeys("d" if w == "d" else site.v_index for w in which):
        for c in site.qk_chunks if letter == "d" else site.v_chunks:
            value = f"tl.arange(0, {c.width})"
            out.assign(letter + c.suffix, f"{c.start} + {value}" if c.start else value)


def pieces(site: Site, operand: str) -> list[tuple[Chunk, str, str]]:
    """(chunk, name of its index vector, bounds check along it or "")."""
    head = OPERANDS[operand][4]
    letter = "d" if head == "d" else site.v_index
    size = site.D if head == "d" else site.Dv
    found = site.qk_chunks if head == "d" else site.v_chunks
    return [(c, letter + c.suffix, f"({letter}{c.suffix} < {size})[None, :]" if c.masked else "") for c in found]


def row_names(operand: str) -> tuple[str, str]:
    """(start of the tile, counting vector) of the operand's rows."""
    return ("i0", "rows") if OPERANDS[operand][3] == "m" else ("j0", "cols")


def matrix(site: Site, out: Writer, operand: str) -> None:
    """Assign the operand's matrix for the current batch indices, from which a loop reads tiles."""
    if not site.descriptors:
        out.assign(f"{OPERANDS[operand][2]}_matrix", base(site, operand))


def load_tile(site: Site, out: Writer, operand: str, name: str, check: str = "", looped: bool = False,
              direct: bool = False, packed: bool = False) -> None:
    """name = a tile of the operand's rows, one variable per head-size chunk.

    check   bounds the rows; "" if they cannot lie outside
    looped  read in an inner loop: from the matrix of `matrix(...)`
    direct  by addresses even if the site allows the tensor memory accelerator
    packed  each row has indices of its own, i and those of `Site.packed`
    """
    _, _, prefix, row, _ = OPERANDS[operand]
    start, rows = row_names(operand)
    if packed:
        address = out.assign(f"{prefix}_tile", packed_rows(site, operand))
        for c, index, head_check in pieces(site, operand):
            mask = " & ".join(x for x in (check, head_check) if x)
            out.assign(name + c.suffix, f"tl.load({address} + {index}[None, :] * stride_{prefix}_d, mask={mask}, other=0.0)")
        return
    if site.descriptors and not direct:
        block = "BLOCK_M" if rows == "rows" else "BLOCK_N"
        position = [*(local(a) for a in operand_axes(site, operand)), start]
        for c, _, _ in pieces(site, operand):
            index = ", ".join([*position, str(c.start)])
            out.assign(name + c.suffix, f"{tiles_name(operand, c)}.load([{index}]).reshape({block}, {c.width})")
        return
    address = f"{prefix}_matrix" if looped else base(site, operand)
    address = f"{address} + tl.cast({start}, tl.int64) * stride_{prefix}_{row}"
    parts = pieces(site, operand)
    if len(parts) > 1:
        address = out.assign(f"{prefix}_tile", address)
    for c, index, head_check in parts:
        conditions = [x for x in (check, head_check) if x]
        mask = f", mask={' & '.join(conditions)}, other=0.0" if conditions else ""
        offsets = f"{rows}[:, None] * stride_{prefix}_{row} + {index}[None, :] * stride_{prefix}_d"
        out.assign(name + c.suffix, f"tl.load({address} + {offsets}{mask})")


def packed_rows(site: Site, operand: str) -> str:
    """Addresses of the operand's rows where each has indices of its own."""
    _, _, prefix, row, _ = OPERANDS[operand]
    return f"({base(site, operand)} + tl.cast(i, tl.int64) * stride_{prefix}_{row})[:, None]"


def tiles_name(operand: str, c: Chunk) -> str:
    return f"{operand}_tiles{c.suffix}"


def product(site: Site, out: Writer, result: str, a: str, b: str, found: Sequence[Chunk], start: str = "") -> None:
    """result = start + a . b^T over the head size, chunk by chunk."""
    for n, c in enumerate(found):
        out.assign(result, site.dot(f"{a}{c.suffix}", f"tl.trans({b}{c.suffix})", result if n else start))
