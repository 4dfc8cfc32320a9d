"""What a kernel is compiled with where it spills registers as planned.

No register model knows every score function, mask and length; where there is none, tiles are the largest that compiled without spilling for the specs of the
tests. So the compiler is asked at the first launch what it spilled, and while it did a kernel is compiled again, with
1. as many registers as a thread can have: the assembler gives fewer when it hopes for more programs at a time,
2. an assembler that is sparing with them,
3. nothing worked out in front of its loops that the compiler could work out there (`writer.HOIST`),
4. twice the warps,
5. half of the inner tile, and so on. Grids and buffers go by the outer tile, which stays; of sums beyond the ends of a table another kernel knows by the
   inner tile what is left for it, and then that stays too,
6. all of these with nothing copied ahead: where the next tile is waits in registers too.
From the fourth on for more than a `FEW` bytes only.
Where warps have parts of their own only the assembler can be asked: registers are dealt out, and tiles belong to the parts.
"""
from __future__ import annotations

import copy
from typing import Any, Callable, Iterator, Mapping, Sequence

from .. import compat
from .writer import HOIST

INNER = {"attention_forward": ("BLOCK_N", ("K", "V")), "attention_backward_rows": ("BLOCK_N", ("K", "V")),
         "attention_backward_keys": ("BLOCK_M", ("Q", "dO")), "attention_backward_values": ("BLOCK_M", ("Q", "dO")),
         "attention_backward": ("BLOCK_M", ("Q", "dO"))}
"""Kernels with a loop -> the tile that they go through it by, and the operands of which TMA copies such tiles."""
SUMS = "slots"
"""The argument of a kernel that sums beyond the ends of a table (`schedules/relative.py`)."""
SPARING = "--register-usage-level=0"
"""What ptxas takes to leave out optimizations that cost registers: mostly, to compute in a loop what it could keep from before it."""
FEW = 32
"""Bytes of a thread that cost less than more warps or smaller tiles (H200, windows of 64 with a trained bias: 221 microseconds with 32 bytes spilled, 293 by twice the warps)."""
SAME = {"maxnreg", "ptx_options", HOIST}
"""Options that leave warps, tiles and stages as they are."""
LEAST, WARPS, REGISTERS = 16, 8, 255
"""Elements that a matrix product takes at least; warps of a program at most, of which each thread can have so many registers."""


def attempts(kernel, options: Mapping[str, Any]) -> Iterator[dict[str, int | str]]:
    """Options to replace, the best first."""
    from triton import knobs
    sparing = {"ptx_options": " ".join([*filter(None, [knobs.nvidia.ptxas_options]), SPARING])}
    if "maxnreg" in options:  # dealt out among warps with parts of their own
        yield sparing
        return
    name, _ = INNER.get(kernel.__name__, ("", ())) if SUMS not in kernel.arg_names else ("", ())
    warps, inner = options.get("num_warps", 4), options.get(name, LEAST)
    for stages in ({}, {"num_stages": 1})[: 1 + (options.get("num_stages", 1) > 1)]:
        for tile in [inner >> n for n in range(8) if inner >> n >= LEAST]:
            for count in (warps, warps * 2)[: 1 + (warps < WARPS)]:
                found = {"maxnreg": REGISTERS} | ({name: tile} if tile < inner else {}) | ({"num_warps": count} if count > warps else {}) | stages
                yield found
                if tile == inner:
                    yield found | sparing
                    if HOIST in kernel.arg_names:
                        yield found | {HOIST: False}


def fitted(kernel, args: Sequence, more: Mapping[str, int | str]) -> Sequence:
    """A kernel's arguments, with tiles for TMA of as many rows as `more` says."""
    name, operands = INNER.get(kernel.__name__, ("", ()))
    if name not in more:
        return args
    found = [*args]
    for n, (argument, value) in enumerate(zip(kernel.arg_names, args)):
        if hasattr(value, "block_shape") and argument.split("_tiles")[0] in operands:
            found[n] = copy.copy(value)
            found[n].block_shape = [*value.block_shape[:-2], more[name], value.block_shape[-1]]
    return found


def settled(spilled: Callable[[dict[str, int | str]], int], kernel, options: Mapping[str, Any]) -> dict[str, int | str]:
    """The first of them with which it does not spill, or few bytes, or spills least. spilled: bytes with these instead."""
    best, least = {}, spilled({})
    for more in attempts(kernel, options):
        if least <= FEW * bool({*more} - SAME):
            break
        found = spilled(more)
        if found < least:
            best, least = more, found
    return best


def settled_here(kernel, grid, args: Sequence, options: Mapping[str, Any]) -> dict[str, int | str]:
    """`settled` by the card that the kernel runs on."""
    return settled(lambda more: compat.spilled(kernel.warmup(*fitted(kernel, args, more), grid=grid, **options | more)), kernel, options)
