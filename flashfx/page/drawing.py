"""SVG of a site's graph (layers from inputs down to the output) and of its mask (a grid of tiles)."""
from __future__ import annotations

import itertools
from statistics import mean

from markupsafe import Markup, escape

from ..codegen.picture import Picture
from ..region import Node

ROW, HEIGHT, GAP, CHAR = 74, 40, 22, 7.0
"""Distance of layers, height of a box, distance of boxes, width of a character, in pixels."""
LONGEST = 30


def _text(n: Node) -> tuple[str, str]:
    short = lambda t: t if len(t) <= LONGEST else t[: LONGEST - 1] + "…"
    return short(n.name if n.op == "input" else n.op), short(n.result)


def _layers(nodes: tuple[Node, ...]) -> tuple[list[list[str]], list[tuple[str, str]]]:
    """Names by layer, inputs first, and edges between neighbouring layers: long edges run through nameless points."""
    import networkx as nx
    graph = nx.DiGraph()
    graph.add_nodes_from(n.name for n in nodes)
    drawn = {n.name for n in nodes}
    graph.add_edges_from((x, n.name) for n in nodes for x in n.inputs if x in drawn)
    depth = {name: d for d, layer in enumerate(nx.topological_generations(graph.reverse())) for name in layer}
    edges = []
    for a, b in graph.edges:
        points = [a, *(f"{a}>{b}:{d}" for d in range(depth[a] - 1, depth[b], -1)), b]
        depth |= {p: depth[a] - n for n, p in enumerate(points)}
        edges += itertools.pairwise(points)
    layers: list[list[str]] = [[] for _ in range(max(depth.values(), default=0) + 1)]
    for name, d in depth.items():
        layers[len(layers) - 1 - d].append(name)
    return _ordered(layers, edges), edges


def _ordered(layers: list[list[str]], edges: list[tuple[str, str]]) -> list[list[str]]:
    """Fewer crossings: each layer sorted by the mean place of its neighbours, up and down a few times (Sugiyama's barycentre heuristic)."""
    above, below = {}, {}
    for a, b in edges:
        above.setdefault(b, []).append(a)
        below.setdefault(a, []).append(b)
    for sweep in range(8):
        down = sweep % 2
        place = {name: n / max(1, len(layer) - 1) for layer in layers for n, name in enumerate(layer)}
        for layer in layers if down else reversed(layers):
            near = above if down else below
            layer.sort(key=lambda name: mean(place[x] for x in near[name]) if name in near else place[name])
            place |= {name: n / max(1, len(layer) - 1) for n, name in enumerate(layer)}
    return layers


def _places(layers: list[list[str]], edges: list[tuple[str, str]], width: dict[str, float]) -> dict[str, float]:
    """The middle of each box: as near to its neighbours' as the order and the widths allow."""
    size = lambda name: width.get(name, 8.0)
    near: dict[str, list[str]] = {}
    for a, b in edges:
        near.setdefault(a, []).append(b)
        near.setdefault(b, []).append(a)
    at: dict[str, float] = {}
    for layer in layers:
        x = -sum(size(n) + GAP for n in layer) / 2
        for name in layer:
            at[name] = x + size(name) / 2
            x += size(name) + GAP
    for sweep in range(12):
        for layer in layers if sweep % 2 else reversed(layers):
            wanted = [mean(at[x] for x in near[name]) if name in near else at[name] for name in layer]
            for order, sign in ((range(len(layer)), 1), (range(len(layer) - 1, -1, -1), -1)):
                last = None
                for n in order:
                    name, x = layer[n], wanted[n]
                    if last is not None:
                        least = wanted[last] + sign * ((size(layer[last]) + size(name)) / 2 + GAP)
                        x = max(x, least) if sign > 0 else min(x, least)
                    wanted[n], last = x, n
            at |= dict(zip(layer, wanted))
    left = min((at[n] - size(n) / 2 for layer in layers for n in layer), default=0.0)
    return {n: x - left + 8 for n, x in at.items()}


def graph(nodes: tuple[Node, ...], marked: str = "") -> Markup:
    """Boxes coloured by role; `marked` is the node at which a match stopped."""
    if not nodes:
        return Markup("")
    texts = {n.name: _text(n) for n in nodes}
    width = {name: max(64.0, 16 + CHAR * max(map(len, pair))) for name, pair in texts.items()}
    layers, edges = _layers(nodes)
    x = _places(layers, edges, width)
    y = {name: 8 + d * ROW for d, layer in enumerate(layers) for name in layer}
    paths = []
    for a, b in edges:
        top, bottom = y[a] + (HEIGHT if a in width else HEIGHT / 2), y[b] + (0 if b in width else HEIGHT / 2)
        middle = (top + bottom) / 2
        paths.append(f'<path class="edge" d="M{x[a]:.1f} {top:.1f}C{x[a]:.1f} {middle:.1f} {x[b]:.1f} {middle:.1f} {x[b]:.1f} {bottom:.1f}"/>')
    boxes = []
    for n in nodes:
        first, second = texts[n.name]
        kind = "stop" if n.name == marked else n.role.split(",")[0] if n.role in _ROLES else "input" if n.op == "input" else "other"
        label = f'<text class="role" x="{x[n.name] - width[n.name] / 2 + 2:.1f}" y="{y[n.name] - 4}">{escape(n.role)}</text>' if n.role not in ("", "new") else ""
        place = f"\n{n.frame}" if n.frame else ""
        boxes.append(f'<g class="node {kind}"><title>{escape(f"{n.name} = {n.op}  {n.result}{place}")}</title>'
                     f'<rect x="{x[n.name] - width[n.name] / 2:.1f}" y="{y[n.name]}" width="{width[n.name]:.1f}" height="{HEIGHT}" rx="7"/>'
                     f'<text x="{x[n.name]:.1f}" y="{y[n.name] + (17 if second else 25)}">{escape(first)}</text>'
                     f'<text class="shape" x="{x[n.name]:.1f}" y="{y[n.name] + 32}">{escape(second)}</text>{label}</g>')
    wide, high = max(x[n] + width.get(n, 8) / 2 for n in x) + 8, len(layers) * ROW - ROW + HEIGHT + 16
    frame_w, frame_h = max(wide, 560), max(high, 430)  # small graphs are not blown up
    return Markup(f'<svg class="graph" viewBox="{(wide - frame_w) / 2:.0f} {(high - frame_h) / 2:.0f} {frame_w:.0f} {frame_h:.0f}" data-w="{wide:.0f}" data-h="{high:.0f}" role="img">'
                  f'<g class="scene">{"".join(paths)}{"".join(boxes)}</g></svg>')


_ROLES = {"scores", "softmax", "dropout", "output", "mask", "new"}
CELL = 480
"""Side of the mask's picture, in its own units."""


def mask(p: Picture) -> Markup:
    """Runs of equal tiles as rectangles; the page's script names the tile under the pointer from `data-rows`."""
    rows, columns = len(p.rows), max(map(len, p.rows), default=0)
    high, wide = CELL * min(1.0, p.M / p.N) if p.N else CELL, CELL * min(1.0, p.N / p.M) if p.M else CELL
    high, wide = max(high, 24.0), max(wide, 24.0)
    h, w = high / max(rows, 1), wide / max(columns, 1)
    parts = []
    for r, row in enumerate(p.rows):
        c = 0
        for kind, run in itertools.groupby(row):
            n = len(list(run))
            parts.append(f'<rect class="t{kind}" x="{c * w:.2f}" y="{r * h:.2f}" width="{n * w:.2f}" height="{h:.2f}"/>')
            c += n
    if rows <= 64 and columns <= 64:
        parts.append('<path class="grid" d="' + "".join(f"M0 {r * h:.2f}H{wide:.2f}" for r in range(1, rows)) +
                     "".join(f"M{c * w:.2f} 0V{high:.2f}" for c in range(1, columns)) + '"/>')
    return Markup(f'<svg class="mask" viewBox="0 0 {wide:.1f} {high:.1f}" data-rows="{" ".join(p.rows)}" data-m="{p.M_step}" data-n="{p.N_step}" '
                  f'data-queries="{p.M}" data-keys="{p.N}" role="img" tabindex="0" aria-label="mask by tiles; arrow keys name them">{"".join(parts)}<rect class="cursor" width="{w:.2f}" height="{h:.2f}"/></svg>')
