"""Loops over the tiles that a mask's run-time summary lists (`flashfx.codegen.blocks`): hidden blocks are never visited, fully visible
ones are read without the mask, and the closed form of the range, where there is one, cuts the first and last partial block.

    for t in tl.range(0, full_blocks * tiles per block):             blocks that every row sees
        j0 = tl.load(blocks + 2 + partial_blocks + t // tiles per block) * 128 + t % tiles per block * BLOCK_N
    for t in tl.range(leading, trailing): ...                        blocks cut by the mask
"""
from __future__ import annotations

from dataclasses import dataclass

from ..expr import Const
from ..spec import BLOCK, FINE
from .loops import Loop, Loops
from .parts import Site, flatten
from .program import Program
from .ranges import Bounds
from .writer import Writer


@dataclass(frozen=True)
class ListedLoops:
    """As `loops.Loops`, with tiles from a list. `site.listed` chooses; `loops` makes either."""

    index: str                # "i" or "j"
    found: Bounds
    block: str
    size: str
    axes: tuple[str, ...]     # of the mask
    trims: bool = True        # do partial blocks lie in the closed form's range? Those of rows that average v need not

    full = partial = True
    partial_first = False

    @property
    def _wide(self) -> int:
        """Of a listed block: keys, or the rows of the lists that kernels over keys read."""
        return BLOCK if self.index == "j" else FINE

    @property
    def _split(self) -> str:
        return f"({self._wide} // {self.block})"

    @property
    def _trims_start(self) -> bool:
        return self.trims and self.found.lo != Const(0)

    def prepare(self, program: Program, out: Writer, override: str = "") -> None:
        """Assign the tile's list, its lengths and the cut ends. override: a condition under which every tile must be visited, none as full."""
        at = flatten(self.axes)
        at = f"({at})" if len(self.axes) > 1 else at
        own, lists, other = ("i", "RowBlocks", "M") if self.index == "j" else ("j", "KeyBlocks", "N")
        row = f"{at} * tl.cdiv({other}, {BLOCK}) + {own}0 // {BLOCK}" if self.axes else f"{own}0 // {BLOCK}"
        out.assign("blocks", f"{lists} + tl.cast({row}, tl.int64) * (tl.cdiv({self.size}, {self._wide}) + 2)",
                   "numbers of blocks cut by the mask and fully visible; then the former, the latter, the hidden")
        out.assign("partial_blocks", "tl.load(blocks)")
        out.assign("full_blocks", "tl.load(blocks + 1)")
        text = lambda e: f"tl.cast({program.value(e)}, tl.int32)" if e.loads else program.value(e)
        if self._trims_start:
            out.assign("first_block", f"tl.load(blocks + 2) * {self._wide}")
            out.assign("leading", f"tl.minimum(tl.maximum({text(self.found.lo)} - first_block, 0) // {self.block}, {self._split})")
        trailing = f"partial_blocks * {self._split}"
        if self.trims:
            out.assign("last_block", f"tl.load(blocks + 1 + partial_blocks) * {self._wide}")
            trailing += f" - tl.minimum(tl.maximum(last_block + {self._wide} - {text(self.found.hi)}, 0) // {self.block}, {self._split})"
        out.assign("trailing", trailing)
        if override:
            out.assign("every", override, "a row that averages v reads every tile")
            out.assign("full_blocks", "tl.where(every, 0, full_blocks)")
            if self._trims_start:
                out.assign("leading", "tl.where(every, 0, leading)")
            out.assign("trailing", f"tl.where(every, tl.cdiv({self.size}, {self.block}), trailing)")

    def _start(self, first: str) -> str:
        return f"tl.load(blocks + {first} + t // {self._split}) * {self._wide} + t % {self._split} * {self.block}"

    def full_loop(self) -> Loop:
        return Loop("t", "0", f"full_blocks * {self._split}", lines=(f"{self.index}0 = {self._start('2 + partial_blocks')}",))

    def partial_loop(self, out: Writer, override: bool = False) -> Loop:
        start = self._start("2")
        if override:  # the list's row has room for every block, so its loads stay inside
            start = f"tl.where(every, t * {self.block}, {start})"
        return Loop("t", "leading" if self._trims_start else "0", "trailing", lines=(f"{self.index}0 = {start}",))


def loops(site: Site, index: str, padded: bool) -> Loops | ListedLoops:
    """The loops over the tiles of `index` in a kernel whose tile lies along the other index."""
    found, block, size = (site.by_rows, "BLOCK_N", "N") if index == "j" else (site.by_keys, "BLOCK_M", "M")
    if site.listed:
        return ListedLoops(index, found, block, size, site.spec.mask().axes, index == "j" or not site.averages)
    return Loops(index, found, block, size, padded)
