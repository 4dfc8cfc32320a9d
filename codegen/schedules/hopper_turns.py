"""Of the Hopper forward: where warpgroups wait for their turn to issue products (`codegen/named.py`)."""
from __future__ import annotations

from ..parts import Site
from ..writer import Writer


def in_turn(site: Site) -> bool:
    """Do warpgroups issue their products in turn? Of three each gains by it, on an H200 at head size 64 1 to 5 %, at 32 and 48 1 to 9;
    but under a mask at 64, where each has tiles of its own to see, -1 to 3. Two, at 128, lose 1 to 3."""
    return site.warpgroups == 3 and (site.by_rows.is_total or max(site.D, site.Dv) < 64)


def begin_turn(site: Site, out: Writer) -> None:
    if in_turn(site):
        out.line("await_turn(WARPGROUP)")


def end_turn(site: Site, out: Writer) -> None:
    if in_turn(site):
        out.line(f"pass_turn(WARPGROUP, {site.warpgroups})")
