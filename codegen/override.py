"""What tests, sweeps and tuning say of a plan before the cost model does."""
from __future__ import annotations

import contextlib

from ..region import Problem
from ..spec import AttentionSpec
from . import calls

SCHEDULES = ("triton", "hopper")
KERNELS = {"forward", "keys", "rows", "one_tile", "dense"}
OVERRIDE: dict[str, tuple[int, int, int, int] | str | int] = {}
"""Kernel -> (BLOCK_M, BLOCK_N, num_warps, num_stages), "schedule" -> one of SCHEDULES, "parts" -> as in `Plan`, "packed" -> may heads be rows; set by
`overridden`."""

PINNED: dict[tuple[AttentionSpec, str], dict] = {}
"""(spec, direction) -> what `overridden` takes; set by `tuning.pin`."""
TUNED: dict[tuple[AttentionSpec, Problem, str], dict] = {}
"""(spec, representative problem, direction) -> what `overridden` takes; set by `tuning.tune`."""


@contextlib.contextmanager
def overridden(schedule: str | None = None, parts: int | None = None, packed: bool | None = None, turns: bool | None = None,
               **tiles: tuple[int, int, int, int]):
    """For tests and sweeps: overridden(forward=(64, 32, 4, 2), keys=…, rows=…, one_tile=…, dense=…) while the block runs.

    schedule  "triton": the portable schedule everywhere; "hopper": the Hopper schedule wherever it can run, short rows too. Without it,
              tiles are the portable schedule's.
    parts     of the keys in the portable forward kernel: 1 for none, 0 for as many as fill the card, else that many
    packed    False: each head has tiles of its own in it
    turns     do heads that share keys take turns in the Hopper backward, where they can?
    """
    unknown = set(tiles) - KERNELS
    if unknown:
        raise ValueError(f"unknown kernels {sorted(unknown)}; known: {', '.join(sorted(KERNELS))}")
    if schedule not in (None, *SCHEDULES):
        raise ValueError(f"schedule must be one of {SCHEDULES}, not {schedule!r}")
    before = dict(OVERRIDE)
    OVERRIDE.update(tiles | {name: value for name, value in (("schedule", schedule), ("parts", parts), ("packed", packed), ("turns", turns)) if value is not None})
    calls.forget()
    try:
        yield
    finally:
        OVERRIDE.clear()
        OVERRIDE.update(before)
        calls.forget()
