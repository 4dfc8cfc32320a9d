"""What the templates show, read from a report: plain values, SVG, highlighted lines. Nothing is derived here that the report does not say."""
from __future__ import annotations

import dataclasses
import shlex
from typing import Any

from ..codegen import traffic
from ..codegen.traffic import human
from ..errors import PlanError
from ..report import Group, Report
from . import drawing, mathml, source

STAGES = ("find", "lift", "check", "plan", "splice")
"""What a site passes through, in order; a refusal names the one that it did not pass."""


def duration(seconds: float) -> str:
    """As in the text report, with the sign for micro."""
    return traffic.duration(seconds).replace(" us", " µs")


def view(report: Report, sources: bool = True) -> dict[str, Any]:
    """Everything that page.html and notebook.html use. Without `sources` neither graphs nor code."""
    totals, clock = report.totals(), report.totals()["measured"]
    groups = [_group(report, number, g, sources) for number, g in enumerate(report.groups())]
    first: dict[str, str] = {}
    for g in groups:  # equal kernels are shown once
        if "kernel" in g and first.setdefault(g["kernel"], g["id"]) != g["id"]:
            g |= {"blocks": [], "kernel": "", "same_kernel": first[g["kernel"]]}
    return {"title": report.about or "FlashFX report", "head": report.head, "note": report.note, "gpu": report.gpu.name, "total": len(report),
            "fused": report.fused, "alone": len(report) - report.fused, "graphs": report.graphs, "training": report.training,
            "before": human(totals["before"]), "after": human(totals["after"]), "ratio": totals["before"] / totals["after"] if totals["after"] else 0.0,
            "saved": duration(totals["seconds"]), "bandwidth": f"{report.gpu.bandwidth / 1e9:.0f} GB/s", "command": report.command, "groups": groups,
            "clock": clock and {"before": duration(clock["before"]), "after": duration(clock["after"]), "sites": clock["sites"], "ratio": clock["before"] / clock["after"]}}


def _group(report: Report, number: int, group: Group, sources: bool) -> dict[str, Any]:
    site, region = group.site, group.site.region
    frame = region.stack[-1] if region.stack else None
    count = len(group.numbers)
    out: dict[str, Any] = {
        "id": f"g{number}", "label": group.label, "count": count, "numbers": group.numbers, "fused": site.fused, "name": region.site, "source": region.source,
        "title": f"{count} sites, one spec" if count > 1 else "1 site", "frame": frame, "graph": region.graph,
        "context": source.context(frame) if frame and sources else [], "stack": region.stack[:-1][-6:], "reached": region.reached, "called": region.called,
        "kind": "scaled_dot_product_attention" if region.called else "products and softmax", "checked": [dataclasses.asdict(c) | {"good": c.good} for c in region.checked],
        "unchecked": region.unchecked, "unmeasured": region.unmeasured, "spec": str(region.spec) if region.spec else "", "short": _short(region)}
    if region.spec is not None:
        out["formulas"] = mathml.formulas(region.spec)
        out["empty"] = mathml.EMPTY[region.spec.empty_row] if region.spec.is_masked else ""
        out["captured"] = list(zip((a.name for a in region.spec.aux), region.captured))
        out["sink"] = region.sink
        out["columns"] = region.columns
    if sources:
        out["before_graph"] = drawing.graph(region.before, "" if site.fused else region.refusal.node)
        out["after_graph"] = drawing.graph(region.after)
        out["nodes"] = len(region.before), len(region.after)
    if not site.fused:
        return out | _refused(region)
    p = region.problem
    out["shape"] = [*zip(region.spec.axes, p.extents), ("M", p.M), ("N", p.N), ("head size", p.D if p.D == p.Dv else f"{p.D}, {p.Dv}"), ("", p.dtype)]
    try:
        return out | _planned(report, number, group, sources)
    except PlanError as error:
        return out | {"plans": [], "no_plan": str(error)}


def _short(region) -> str:
    """A line for the list of sites: the spec's score and mask, or why it was left alone."""
    if region.refusal is not None:
        return region.refusal.reason
    spec = region.spec
    return f"score = {spec.score}" + (f", where {spec.visible}" if spec.is_masked else "")


def _refused(region) -> dict[str, Any]:
    r = region.refusal
    passed = STAGES.index(r.stage) if r.stage in STAGES else 1
    return {"refusal": r, "stages": [(s, "done" if n < passed else "stopped" if n == passed else "open") for n, s in enumerate(STAGES)]}


def _planned(report: Report, number: int, group: Group, sources: bool) -> dict[str, Any]:
    site, tiles = group.site, group.site.tiles()
    out: dict[str, Any] = {"plans": [_plan(site, direction, len(group.numbers)) for direction in site.directions],
                           "tiles": [(kind, n, f"{n / tiles.total:.0%}" if tiles.total else "0%")
                                     for kind, n in [("skipped", tiles.skipped), ("full", tiles.full), ("partial", tiles.partial),
                                                      *[("decided at run time", tiles.data)] * (not tiles.exact)]], "at_run_time": site._at_run_time().removeprefix("; ")}
    if site.spec.is_masked:
        shown = site.picture()
        out |= {"mask": drawing.mask(shown), "mask_at": ", ".join(f"{a} = {n}" for a, n in shown.at.items()), "mask_step": (shown.M_step, shown.N_step),
                "block": (shown.BLOCK_M, shown.BLOCK_N), "mask_size": (shown.M, shown.N)}
    if sources:
        origins = source.origins(site.region)
        blocks = source.kernel(site.kernel)
        used = {line.role for b in blocks for line in b["lines"]}
        fused_number = sum(g.site.fused for g in report.groups()[:number])
        file = f"kernel_{fused_number}.py"
        made = f"{report.command} --kernels kernels" if report.command else f"python -c \"…; report[{group.numbers[0]}].repro('kernels/{file}')\""
        out |= {"origins": [(role, origins[role], source.short(origins[role])) for role in source.ROLES if role in origins and role in used],
                "blocks": [b | {"lines": [(line, origins.get(line.role)) for line in b["lines"]], "tied": sum(line.role in origins for line in b["lines"])}
                           for b in blocks], "file": file, "kernel": site.kernel,
                "repro": f"{made}\npython {shlex.quote(f'kernels/{file}')}"}
    return out


def _clock(site, direction: str) -> list[tuple[str, str, float]]:
    """(side, time, share of the longer one) as measured."""
    found = next((m for m in site.region.measured if m.direction == direction), None)
    sides = [] if found is None else [("before", found.before), ("after", found.after)]
    longest = max((s for _, s in sides if s), default=1.0)
    return [(name, duration(s) if s else "out of memory", s / longest if s else 1.0) for name, s in sides]


def _plan(site, direction: str, count: int) -> dict[str, Any]:
    facts = site.facts(direction)
    plan, moved = facts["plan"], facts["bytes"]
    scale = max(moved["before"], 1)
    binding = max(facts["resources"].values()) or 1.0
    ladder = facts["choices"]
    chosen = next(n for n, c in enumerate(ladder) if c["verdict"] == "chosen")
    gpu = site.gpu
    return {"direction": direction, "text": facts["text"], "plan": plan, "shared": plan["shared"] / gpu.shared_per_block,
            "shared_text": f"{plan['shared'] / 1024:.0f} of {gpu.shared_per_block // 1024} KiB", "reason": plan["reason"],
            "registers": ladder[chosen]["registers"], "choices": ladder[: chosen + 4],
            "resources": [(name, duration(s), s / binding, s == binding) for name, s in facts["resources"].items()],
            "time": duration(facts["seconds"]), "clock": _clock(site, direction),
            "bytes": [(name, human(moved[key] * count), moved[key] / scale) for name, key in (("before", "before"), ("after", "after"), ("lower bound", "least"))],
            "ratio": moved["before"] / moved["after"] if moved["after"] else 0.0}
