"""Which nodes in front of a site's last step may run behind it: those that read its log-sum-exp, which our op yields only there."""
from __future__ import annotations

from torch import fx

from .normalise import DROPOUT, SDPA
from .rules import PRODUCTS, RANDOM
from .values import ValueGraph


def readers(vg: ValueGraph, holder: fx.Node, owner: fx.Node) -> list[fx.Node] | None:
    """The nodes before `owner` that are computed from `holder`, in order; None if one of them must stay where it is.

    Each is a plain call with one tensor result that nobody changes, reads nothing that changes before `owner`, draws no random numbers, and sees the same
    gradient and autocast modes there. Matrix products stay too, so that no other site stands among them.
    """
    found, last = {holder}, vg.steps[owner]
    for n in vg.steps:  # in the graph's order
        if vg.steps[n] < last and n not in found and not found.isdisjoint(n.all_input_nodes):
            found.add(n)
    moved = sorted(found - {holder}, key=vg.steps.__getitem__)
    if not moved:
        return []
    between = [n for n in vg.steps if vg.steps[moved[0]] <= vg.steps[n] < last]
    if any(n.op == "call_function" and n not in vg.timeline and getattr(n.target, "__name__", "").startswith("_") for n in between):
        return None  # a change of mode
    plain = all(_plain(vg, n) and not any(vg.steps[n] < at < last for a in n.all_input_nodes for at, _ in vg.timeline.get(a, ())) for n in moved)
    return moved if plain else None


def _plain(vg: ValueGraph, n: fx.Node) -> bool:
    if n.op not in ("call_function", "call_method") or n in vg.changing or len(vg.timeline.get(n, ())) != 1:
        return False
    own = [v for v in vg.values if v.owner is n]
    return all(v.op not in (None, DROPOUT, SDPA) and v.name not in PRODUCTS and RANDOM not in v.op.tags for v in own)


def move(vg: ValueGraph, nodes: list[fx.Node], owner: fx.Node) -> None:
    """Put them right in front of `owner`, behind what was emitted there."""
    for n in nodes:
        owner.prepend(n)
        vg.steps[n] = vg.steps[owner]
