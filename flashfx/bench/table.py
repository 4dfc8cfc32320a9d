"""Rows of a measurement as text and as a picture."""
from __future__ import annotations

import math
import statistics
from typing import Sequence

from .measure import Row

OURS, PLAIN = "flashfx", "plain"


def workload(row: Row) -> tuple:
    return row.variant, row.head_size, row.other_values, row.batch, row.heads, row.kv_heads, row.length, row.other_keys, row.dtype


def heads(row: Row) -> str:
    """Head size, and of values where that is another, as `--head-size` takes them."""
    return f"{row.head_size}:{row.other_values}" if row.other_values else f"{row.head_size}"


def lengths(row: Row) -> str:
    """Queries, and keys where those are others."""
    return f"{row.length}x{row.other_keys}" if row.other_keys else f"{row.length}"


def best_peer(rows: Sequence[Row], name: str, peers: Sequence[str] | None = None) -> Row | None:
    """The fastest peer of one workload in pass `name`, other than FlashFX."""
    rivals = [r for r in rows if r.peer not in (OURS, PLAIN) and name in r.tflops and (peers is None or r.peer in peers)]
    return max(rivals, key=lambda r: r.tflops[name], default=None)


def groups(rows: Sequence[Row]) -> dict[tuple, list[Row]]:
    """Rows by workload."""
    found: dict[tuple, list[Row]] = {}
    for row in rows:
        found.setdefault(workload(row), []).append(row)
    return found


def ratio(rows: Sequence[Row], name: str) -> float | None:
    """FlashFX's speed over the fastest peer's of one workload; None where either is missing."""
    return _over(rows, name, best_peer(rows, name))


def of_plain(rows: Sequence[Row], name: str) -> float | None:
    """FlashFX's speed over its own on plain attention of as many visible keys."""
    return _over(rows, name, next((r for r in rows if r.peer == PLAIN and name in r.tflops), None))


def _over(rows: Sequence[Row], name: str, other: Row | None) -> float | None:
    ours = next((r for r in rows if r.peer == OURS and name in r.tflops), None)
    return ours.tflops[name] / other.tflops[name] if ours and other else None


def of_roofline(rows: Sequence[Row], name: str) -> float | None:
    """FlashFX's speed over what the card's peaks allow; None where either is unknown."""
    ours = next((r for r in rows if r.peer == OURS and name in r.tflops and name in r.roofline), None)
    return ours.tflops[name] / ours.roofline[name] if ours else None


def head(peers: Sequence[str], plain: bool = False) -> str:
    """What the lines of `lines` mean."""
    return ("TFLOP/s of the visible work (forward 2 (d + dv) per visible pair, backward 2.5 times that), medians; ratio: flashfx over the "
            "fastest peer; of roof: of what the card's peaks allow (products, exponentials, bytes)\n"
            f"{'variant':<10}{'d':>8}{'N':>7}  {'pass':<9}" + "".join(f"{p:>10}" for p in peers) + f"{'ratio':>8}{'of plain' if plain else '':>{9 * plain}}{'of roof':>9}{'error':>10}{'eager':>10}{'MiB':>9}")


def lines(group: Sequence[Row], peers: Sequence[str], passes: Sequence[str]) -> list[str]:
    """One workload, one line a pass: TFLOP/s of each peer, FlashFX over the fastest of the others, its error, eager's, its memory."""
    out, by_peer = [], {r.peer: r for r in group}
    ours, first = by_peer.get(OURS), group[0]
    for name in passes:
        cells = "".join(f"{by_peer[p].tflops[name]:>10.0f}" if p in by_peer and name in by_peer[p].tflops else f"{'-':>10}" for p in peers)
        cell = lambda found, width: f"{found:>{width}.2f}" if found else f"{'-':>{width}}"
        tail = cell(ratio(group, name), 8) + (cell(of_plain(group, name), 9) if PLAIN in by_peer else "") + cell(of_roofline(group, name), 9)
        if name == passes[-1] and ours is not None and ours.error is not None:
            tail += f"{ours.error:>10.1e}{ours.eager_error:>10.1e}"
            tail += f"{ours.peak_mib:>9.0f}" if ours.peak_mib is not None else ""
        out.append(f"{first.variant:<10}{heads(first):>8} {lengths(first):>6}  {name:<9}{cells}{tail}")
    return out


def summary(rows: Sequence[Row], passes: Sequence[str]) -> list[str]:
    """Geometric means, what calls keep the host, and why a peer has no number."""
    out = []
    for name in passes:
        found = [r for r in (ratio(group, name) for group in groups(rows).values()) if r]
        if len(found) > 1:
            mean = math.exp(sum(map(math.log, found)) / len(found))
            out.append(f"{name}: geometric mean of the ratios {mean:.3f}, least {min(found):.2f}, {len(found)} workloads")
    waiting = [r for r in rows if r.host_us and r.peer != PLAIN]
    if waiting:
        cell = lambda own, name: f"{name} {statistics.median(own):.0f} ({max(own):.0f})"
        each = {peer: [cell(own, name) for name in passes if (own := [r.host_us[name] for r in waiting if r.peer == peer and name in r.host_us])]
                for peer in dict.fromkeys(r.peer for r in waiting)}
        out.append("host time of a call in microseconds, median and most: " + "; ".join(f"{peer} {', '.join(cells)}" for peer, cells in each.items()))
        called = sorted({(r.peer, name) for r in waiting for name in r.by_call})
        out += [f"not recorded as CUDA graphs: {', '.join(f'{peer} {name}' for peer, name in called)}"] * bool(called)
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in (r for r in rows if r.failed):
        reasons.setdefault((row.peer, row.failed), []).append(f"{row.variant} d={heads(row)} N={lengths(row)}")
    return out + [f"no number for {peer} ({', '.join(where[:3])}{', …' if len(where) > 3 else ''}): {why}" for (peer, why), where in reasons.items()]


def plot(rows: Sequence[Row], passes: Sequence[str], path: str, title: str) -> None:
    """TFLOP/s over length: one picture a variant and head size, one line a peer. Needs matplotlib (the `report` extra)."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    panels = list(dict.fromkeys((r.variant, heads(r)) for r in rows))
    figure, axes = pyplot.subplots(len(panels), len(passes), figsize=(5 * len(passes), 3.2 * len(panels)), squeeze=False)
    for line, (variant, head_size) in zip(axes, panels):
        for axis, name in zip(line, passes):
            for peer in dict.fromkeys(r.peer for r in rows):
                points = sorted((r.length, r.tflops[name]) for r in rows
                                if (r.variant, heads(r), r.peer) == (variant, head_size, peer) and name in r.tflops)
                if points:
                    axis.plot(*zip(*points), marker="o", markersize=3, label=peer, linewidth=2.2 if peer == OURS else 1.2)
            axis.set_xscale("log", base=2)
            axis.set_ylim(bottom=0)
            axis.set_title(f"{variant}, head size {head_size}: {name}", fontsize=9)
            axis.set_xlabel("length")
            axis.set_ylabel("TFLOP/s")
            axis.legend(fontsize=7)
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
