"""The loops of a kernel over its tiles, and the share of them that falls to a program where keys are in parts."""
from __future__ import annotations

from dataclasses import dataclass, replace

from ..expr import Const, Var
from .program import Program
from .ranges import Bounds
from .writer import HOIST, Writer


AT_ONCE = "num_stages=1"
"""Of a loop whose one product per accumulator adds weights times values, without a product of scores that it must wait for: copied ahead, Triton 3.6 and
3.7 leave Hopper's products running while the next step overwrites the registers that hold their weights (`offline.is_outrun`)."""


@dataclass(frozen=True)
class Loop:
    """A loop over tiles: its index, where it starts and ends, its step, and the first lines of its body. ahead: are tiles copied ahead (`AT_ONCE`)?"""

    index: str
    first: str
    last: str
    step: str = ""
    lines: tuple[str, ...] = ()
    ahead: bool = True

    @property
    def head(self) -> str:
        stages = "" if self.ahead else f"{AT_ONCE}, "
        return f"for {self.index} in tl.range({self.first}, {self.last}{', ' * bool(self.step)}{self.step}, {stages}disable_licm=not {HOIST}):"

    def of_part(self, out: Writer) -> Loop:
        """The tiles of it that fall to this program where the second dimension of the grid counts parts of the keys: as many to each, but for the last."""
        length = self.last if self.first == "0" else f"{self.last} - {self.first}"
        share = f"tl.cdiv({length}, {self.step} * tl.num_programs(1)) * {self.step}" if self.step else f"tl.cdiv({length}, tl.num_programs(1))"
        out.assign("share", share)
        out.assign("first", "part * share" if self.first == "0" else f"{self.first} + part * share")
        return replace(self, first="first", last=f"tl.minimum(first + share, {self.last})")


@dataclass(frozen=True)
class Loops:
    """The loops over the tiles of one index: which exist, and how their tile starts are written.

    padded  the last tile counts as full: no element lies beyond the end, or (rows, whose weight is 0 there) it does no harm
    """

    index: str                # "i" or "j"
    found: Bounds
    block: str
    size: str
    padded: bool = False

    @property
    def full(self) -> bool:
        return self.found.has_full

    @property
    def partial(self) -> bool:
        return not (self.found.is_total and self.padded)

    @property
    def partial_first(self) -> bool:
        """Do the partial tiles all lie before the full ones?"""
        return self.padded and self.full and self.found.hi == self.found.full_hi == Var(self.size)

    def prepare(self, program: Program, out: Writer, override: str = "") -> None:
        """Assign start, full_start, full_stop and stop (see `flashfx.codegen.tiles.cut`), as far as the loops need them.

        override  a condition under which every tile must be visited, none as full
        """
        f, block, size = self.found, self.block, self.size
        if f.is_total:
            return
        text = lambda e: f"tl.cast({program.value(e)}, tl.int32)" if e.loads else program.value(e)
        lo = "0" if f.lo == Const(0) else f"{text(f.lo)} // {block} * {block}"
        out.assign("start", lo, "tiles outside [start, stop) are hidden, tiles inside [full_start, full_stop) need no mask")
        if self.partial_first:
            out.assign("full_start", f"tl.minimum(tl.maximum(tl.cdiv({text(f.full_lo)}, {block}) * {block}, start), {size})")
        else:
            out.assign("stop", text(f.hi) if f.lo == Const(0) and (f.hi == Var(size) or not self.full or f.starts_full)
                       else f"tl.maximum({text(f.hi)}, start)")
        if self.full and not self.partial_first:
            first = "start" if f.starts_full else f"tl.minimum(tl.maximum(tl.cdiv({text(f.full_lo)}, {block}) * {block}, start), stop)"
            out.assign("full_start", first)
            out.assign("full_stop", f"tl.maximum(full_start, tl.minimum({text(f.full_hi)} // {block} * {block}, stop))")
        if override:
            out.assign("start", f"tl.where({override}, 0, start)", "a row that averages v reads every tile")
            if self.full:
                out.assign("full_start", f"tl.where({override}, {size}, full_start)")
            if not self.partial_first:
                out.assign("stop", f"tl.where({override}, {size}, stop)")
                if self.full:
                    out.assign("full_stop", f"tl.where({override}, {size}, full_stop)")

    def full_loop(self) -> Loop:
        """Over the full tiles."""
        if self.found.is_total:
            return Loop(f"{self.index}0", "0", self.size if self.padded else f"{self.size} // {self.block} * {self.block}", self.block)
        return Loop(f"{self.index}0", "full_start", self.size if self.partial_first else "full_stop", self.block)

    def partial_loop(self, out: Writer, override: bool = False) -> Loop:
        """Over the partial tiles."""
        x, block = f"{self.index}0", self.block
        if self.found.is_total:
            return Loop(x, f"{self.size} // {block} * {block}", self.size, block)
        if not self.full or self.partial_first:
            return Loop(x, "start", "full_start" if self.full else "stop", block)
        if self.found.starts_full and not override:
            return Loop(x, "full_stop", "stop", block)
        out.assign("leading", f"tl.cdiv(full_start - start, {block})", "partial tiles lie on both sides of the full ones")
        out.assign("trailing", f"tl.cdiv(stop - full_stop, {block})")
        return Loop("t", "0", "leading + trailing", lines=(f"{x} = tl.where(t < leading, start + t * {block}, full_stop + (t - leading) * {block})",))
