"""Of the Hopper forward: where warpgroups wait for their turn to issue products (`codegen/named.py`)."""
from __future__ import annotations

from ..parts import Site
from ..writer import Writer


def in_turn(site: Site) -> bool:
    """Do warpgroups issue their products in turn? Of three each gains by it, on an H200 at head size 64 1 to 6 %, at 32 and 48 1 to 9 (a window 0). Two, at 128, lose 1 to 3."""
    return site.warpgroups == 3


def begin_turn(site: Site, out: Writer) -> None:
    if in_turn(site):
        out.line("await_turn(WARPGROUP)")


def end_turn(site: Site, out: Writer) -> None:
    if in_turn(site):
        out.line(f"pass_turn(WARPGROUP, {site.warpgroups})")
