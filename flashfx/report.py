"""`Report`: what would be rewritten in a model, why, and why not. Shows the record that the stages pass on: as text, JSON, in a terminal, as a page."""
from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from pathlib import Path
from typing import Any, Iterator

from .errors import FlashFXError, PlanError
from .region import Measured, Refusal, Region
from .spec import BLOCK


def _with_numbers(method):
    """Plans and tile counts evaluate masks: real tensors, though the caller may still be under his fake ones."""
    @functools.wraps(method)
    def run(*args, **kwargs):
        from torch._subclasses.fake_tensor import unset_fake_temporarily
        with unset_fake_temporarily():
            return method(*args, **kwargs)
    return run


class SiteReport:
    """One attention site: `region`, and for a fused site its plans, kernels and predicted traffic on `gpu`."""

    def __init__(self, region: Region, gpu, training: bool):
        self.region, self.gpu, self.training = region, gpu, training

    @property
    def fused(self) -> bool:
        """Is the site rewritten?"""
        return self.region.fused

    @property
    def spec(self):
        """What the site computes, an `AttentionSpec`; None if that was not understood."""
        return self.region.spec

    @property
    def refusal(self) -> Refusal | None:
        """Why the site is left alone, or None."""
        return self.region.refusal

    @functools.cached_property
    def plan(self):
        """The forward plan. Raises PlanError if no tile fits."""
        return self._plan("forward")

    @functools.cached_property
    def backward_plan(self):
        """The backward plan. Raises PlanError if no tile fits."""
        return self._plan("backward")

    @_with_numbers
    def _plan(self, direction: str):
        from .codegen.plan import make_plan
        if not self.fused:
            raise FlashFXError(f"site {self.region.site} was left alone, so it has no plan:\n{self.refusal}")
        return make_plan(self.spec, self.region.problem, self.gpu, direction)

    @functools.cached_property
    def kernel(self) -> str:
        """Source of the generated Triton kernels: one Python file that checks itself when run."""
        from .codegen.render import render
        return render(self.spec, self.plan, self.region.problem).text

    def repro(self, path: str | Path) -> Path:
        """Write the kernels as a script: `python PATH` rebuilds inputs, checks against the reference, times on a GPU."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.kernel)
        return path

    @_with_numbers
    def traffic(self, direction: str = "forward"):
        """Predicted bytes to and from device memory, before and after."""
        from .codegen import traffic
        plan = self.plan if direction == "forward" else self.backward_plan
        return traffic.predict(self.spec, self.region.problem, plan, self.region.called, sum(n for n, *_ in self.region.columns))

    @_with_numbers
    def costs(self, direction: str = "forward"):
        """Predicted cost of each kernel that runs: `flashfx.codegen.cost.Cost`."""
        from .codegen import cost
        return cost.predict(self.spec, self.region.problem, self.plan if direction == "forward" else self.backward_plan)

    @property
    def parts(self) -> int:
        """Into how many parts the forward plan splits the keys of each tile of rows."""
        from .codegen import cost
        return cost.parts(cost.facts(self.spec, self.region.problem), self.plan)

    @_with_numbers
    def tiles(self):
        """Tiles skipped, full and partial under the forward plan."""
        from .codegen.blocks import count
        from .codegen.picture import EVALUATED
        from .codegen.tiles import classify
        p = self.region.problem
        if self.plan.listed and not self.spec.visible.loads and p.M * p.N <= EVALUATED:
            return count(self.spec, self.plan.BLOCK_M, self.plan.BLOCK_N, p.M, p.N, (*p.extents, *p.sizes), {})
        return classify(self.spec, self.plan.BLOCK_M, self.plan.BLOCK_N, p.M, p.N, (*p.extents, *p.sizes))

    @_with_numbers
    def picture(self):
        """The mask as a grid of tiles: `flashfx.codegen.picture.Picture`."""
        from .codegen.picture import picture
        return picture(self.spec, self.region.problem, self.plan)

    def facts(self, direction: str = "forward") -> dict[str, Any]:
        """One direction's plan as plain data: tiles, why, what else was on the ladder, bytes before and after and the least there can be, and
        predicted seconds, in all, by kernel and by resource (`flashfx.codegen.cost`). Raises PlanError if no tile fits."""
        from .codegen import choices
        plan, moved, p = self.plan if direction == "forward" else self.backward_plan, self.traffic(direction), self.region.problem
        costs = self.costs(direction)
        resources = {"matrix units": "matrix", "special functions": "special", "starting and ending programs": "turns", "device memory": "memory", "L2 cache": "cache"}
        own = dataclasses.asdict(dataclasses.replace(plan, rows=None, dense=None)) | {"gpu": plan.gpu.name, "parts": self.parts if direction == "forward" else 1}
        return {"plan": own, "text": str(plan), "choices": [dataclasses.asdict(c) for c in choices.choices(self.spec, p, plan)],
                "bytes": {"before": moved.before, "after": moved.after, "least": min(choices.compulsory(self.spec, p, direction), moved.after)},
                "seconds": sum(c.seconds for c in costs), "kernels": [dataclasses.asdict(c) | {"seconds": c.seconds, "binds": c.binds} for c in costs],
                "resources": {name: sum(getattr(c, field) for c in costs) for name, field in resources.items()}}

    def as_dict(self) -> dict[str, Any]:
        """The whole record of the site and all that is derived from it, as JSON has it; `kernel` is a key of the report's "kernels"."""
        record = {f.name: getattr(self.region, f.name) for f in dataclasses.fields(self.region) if f.name not in ("spec", "problem", "refusal")}
        row = {name: _plain(value) for name, value in record.items()} | {"fused": self.fused, "spec": str(self.spec) if self.spec else None}
        row |= {"problem": _plain(self.region.problem), "refusal": _plain(self.refusal)}
        if self.fused:
            try:
                row |= {direction: self.facts(direction) for direction in self.directions}
                row |= {"tiles": dataclasses.asdict(self.tiles()), "kernel": hashlib.sha256(self.kernel.encode()).hexdigest()[:20]}
            except PlanError as error:
                row["no_plan"] = str(error)
        return row

    @property
    def directions(self) -> tuple[str, ...]:
        """What a call runs: "forward", and "backward" in training."""
        return ("forward", "backward") if self.training else ("forward",)

    def _time(self, direction: str) -> str:
        from .codegen.traffic import duration
        costs = self.costs(direction)
        longest = max(costs, key=lambda c: c.seconds)
        return f"about {duration(sum(c.seconds for c in costs))}, bound by {longest.binds}"

    def _at_run_time(self) -> str:
        """What a mask that only the data decides does to the tiles."""
        if self.plan.listed and self.spec.is_data_masked:
            return f"; blocks of {BLOCK} that the data hide are skipped too, fully visible ones read without the mask"
        return "; too short for a list of what the data hide" if self.spec.is_data_masked else ""

    def lines(self) -> list[str]:
        """What the text report says of the site, without its name and source."""
        if not self.fused:
            understood = [f"{'matched' if n == 0 else '':<8}{step}" for n, step in enumerate(self.region.reached)]
            return [*str(self.refusal).splitlines(), *understood]
        out = str(self.spec).splitlines()
        if self.region.sink:
            out.append(f"sink    out * sigmoid(lse - sink), sink is {self.region.sink}")
        out += [f"{'' if n else 'columns':<7} {columns} of q and k add {tensor}, read at [{at}]" for n, (columns, at, tensor) in enumerate(self.region.columns)]
        p = self.region.problem
        extents = ", ".join(f"{a} = {n}" for a, n in zip(self.spec.axes, p.extents))
        heads = f"head size {p.D}" if p.D == p.Dv else f"head sizes {p.D} (q, k) and {p.Dv} (v)"
        out.append(f"shape   {extents}{', ' if extents else ''}M = {p.M}, N = {p.N}, {heads}, {p.dtype}")
        for aux, what in zip(self.spec.aux, self.region.captured):
            out.append(f"{aux.name:<7} is {what}")
        try:
            out.append(f"tiles   {self.tiles()}{self._at_run_time()}")
            out.append(f"plan    {self.plan}")
            if self.parts > 1:
                out.append(f"parts   the keys of each tile of rows in {self.parts} parts, a program for each; a second kernel adds them up")
            out.append(f"memory  forward {self.traffic()}")
            if self.training:
                out.append(f"        backward {self.traffic('backward')}")
            out += [f"{'time' if direction == 'forward' else '':<7} {direction} {self._time(direction)}" for direction in self.directions]
            out += [f"{'' if n else 'clock':<7} {m.direction} {_clocked(m)}" for n, m in enumerate(self.region.measured)]
            out += [f"clock   {self.region.unmeasured}"] * bool(self.region.unmeasured)
        except PlanError as error:
            out.append(f"plan    none: {error}")
        return out

    def __str__(self) -> str:
        state = "fused" if self.fused else "left alone"
        return "\n".join([f"{self.region.site}: {state}", *(f"  at {self.region.source}" for _ in [0] if self.region.source),
                          *("    " + line for line in self.lines())])


@dataclasses.dataclass(frozen=True)
class Group:
    """Sites that differ in nothing but their place: their numbers in the report, and one of them."""

    numbers: tuple[int, ...]
    site: SiteReport

    @property
    def label(self) -> str:
        """[3], [0..11], [0, 2..10] for a constant step, else every number."""
        n = self.numbers
        steps = {b - a for a, b in zip(n, n[1:])}
        if len(n) > 2 and len(steps) == 1:
            return f"[{n[0]}..{n[-1]}]" if steps == {1} else f"[{n[0]}, {n[1]}..{n[-1]}]"
        return f"[{', '.join(map(str, n))}]"


@dataclasses.dataclass(frozen=True)
class Report:
    """What `explain` found: a sequence of `SiteReport`. `print(report)` is plain text, with equal sites gathered; `report.show()` and notebooks
    are rich; `to_html` writes a page, `to_json` the whole record.

    sites     in the order of the graphs
    graphs    how many graphs Dynamo made of the call
    gpu       the row of `flashfx.codegen.gpu.GPUS` that plans are for
    here      is that this machine's, or was it asked for?
    training  would gradients flow?
    about     what was explained, and `command` the command line that did, if one did
    """

    sites: tuple[SiteReport, ...]
    graphs: int
    gpu: Any
    here: bool
    training: bool = False
    about: str = ""
    command: str = ""

    def titled(self, about: str, command: str = "") -> Report:
        """The same report, saying what it is of."""
        return dataclasses.replace(self, about=about, command=command)

    def __len__(self) -> int:
        return len(self.sites)

    def __getitem__(self, k) -> SiteReport:
        return self.sites[k]

    def __iter__(self) -> Iterator[SiteReport]:
        return iter(self.sites)

    @property
    def fused(self) -> int:
        """How many sites are rewritten."""
        return sum(s.fused for s in self.sites)

    def groups(self) -> list[Group]:
        """Sites that differ in nothing but their place, gathered, in the order of their first ones."""
        table: dict[tuple, tuple[list[int], SiteReport]] = {}
        for number, site in enumerate(self.sites):
            r = site.region
            why = () if r.refusal is None else (r.refusal.stage, r.refusal.reason.split(" (")[0], r.refusal.source, r.refusal.hint)
            shapes = tuple(text.partition(", ")[2] for text in (*r.captured, r.sink, *(tensor for *_, tensor in r.columns)))
            key = (r.source, r.called, r.spec, r.problem, shapes if r.fused else (), why, r.unchecked)  # parameters are named by their layer
            table.setdefault(key, ([], site))[0].append(number)
        return [Group(tuple(numbers), site) for numbers, site in table.values()]

    def totals(self) -> dict[str, Any]:
        """Over all fused sites with a plan, of one forward (and, in training, backward): bytes to and from device memory before and after, and
        the seconds that the difference takes at the card's bandwidth; "measured": seconds before and after of the `sites` that were measured on both
        sides, or None."""
        before = after = 0
        measured = {"before": 0.0, "after": 0.0, "sites": 0}
        for group in self.groups():
            for direction in group.site.directions if group.site.fused else ():
                try:
                    moved = group.site.traffic(direction)
                except PlanError:
                    continue
                before += moved.before * len(group.numbers)
                after += moved.after * len(group.numbers)
            clock = group.site.region.measured
            if clock and all(m.before and m.after for m in clock):
                measured["sites"] += len(group.numbers)
                for side in ("before", "after"):
                    measured[side] += sum(getattr(m, side) for m in clock) * len(group.numbers)
        return {"before": before, "after": after, "seconds": (before - after) / self.gpu.bandwidth, "measured": measured if measured["sites"] else None}

    def to_json(self) -> str:
        """All there is to know, as JSON: "sites" (`SiteReport.as_dict`), "groups" of equal ones, "kernels" (generated sources by key), "totals"."""
        import torch
        from . import __version__
        groups = self.groups()
        rows = {group: group.site.as_dict() for group in groups}
        sites: list[dict] = [{}] * len(self.sites)
        for group, shared in rows.items():
            for n in group.numbers:
                r = self.sites[n].region
                own = {name: _plain(getattr(r, name)) for name in ("site", "graph", "stack", "reached", "before", "after", "checked", "refusal")}
                sites[n] = shared | own
        kernels = {row["kernel"]: group.site.kernel for group, row in rows.items() if "kernel" in row}
        return json.dumps({"flashfx": __version__, "torch": torch.__version__, "graphs": self.graphs, "about": self.about, "gpu": self.gpu.name, "training": self.training,
                           "fused": self.fused, "totals": self.totals(), "groups": [g.numbers for g in groups], "sites": sites, "kernels": kernels}, indent=2)

    def to_html(self, path: str | Path | None = None) -> str:
        """One HTML page that opens offline, written to `path` if that is given. Needs pygments: pip install 'flashfx[report]'."""
        from .page import page
        text = page(self)
        if path is not None:
            path = Path(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return text

    def _repr_html_(self) -> str:
        """For notebooks: the summary and the sites, without graphs and sources."""
        from .page import notebook
        return notebook(self)

    def __rich__(self):
        from .terminal import rendered
        return rendered(self)

    def show(self) -> None:
        """Print it: with colours in a terminal if `rich` is installed, plain otherwise."""
        try:
            from rich.console import Console
        except ModuleNotFoundError:
            print(self)
            return
        console = Console()
        console.print(self) if console.is_terminal else print(self)

    @property
    def head(self) -> str:
        """The first line: how many sites, how many fused."""
        total, alone = len(self.sites), len(self.sites) - self.fused
        graphs = f" in {self.graphs} graphs" if self.graphs != 1 else ""
        return f"flashfx: {total} attention site{'s' * (total != 1)}{graphs}, {self.fused} fused, {alone} left alone"

    @property
    def note(self) -> str:
        """What plans are for, if that is not plain; else ""."""
        return "" if self.here else f"plans are for the {self.gpu.name}; without a GPU the tiled PyTorch schedule runs"

    @property
    def clock(self) -> str:
        """What was measured in all, if anything was; else ""."""
        from .codegen.traffic import duration
        if (found := self.totals()["measured"]) is None:
            return ""
        return (f"measured on the {self.gpu.name}, {found['sites']} of {self.fused} fused sites, {'forward and backward' if self.training else 'forward'}: "
                f"{duration(found['before'])} -> {duration(found['after'])}")

    def __str__(self) -> str:
        parts = ["\n".join(filter(None, [self.head, self.note, self.clock]))]
        for group in self.groups():
            site = group.site
            source = [f"  at {site.region.source}"] if site.fused and site.region.source else []
            parts.append("\n".join([f"{group.label} {'fused' if site.fused else 'left alone'}: {site.region.site}", *source,
                                    *("  " + line for line in site.lines())]))
        return "\n\n".join(parts)

    __repr__ = __str__


def _clocked(m: Measured) -> str:
    """"1.2 ms -> 310 us measured (3.9x faster)"."""
    from .codegen.traffic import duration
    said = lambda s: "out of memory" if s is None else duration(s)
    ratio = f" ({max(m.before, m.after) / min(m.before, m.after):.1f}x {'faster' if m.before > m.after else 'slower'})" if m.before and m.after else ""
    return f"{said(m.before)} -> {said(m.after)} measured{ratio}"


def _plain(value: Any) -> Any:
    """Dataclasses as dictionaries, tuples as lists."""
    if dataclasses.is_dataclass(value):
        return dataclasses.asdict(value)
    return [_plain(v) for v in value] if isinstance(value, (tuple, list)) else value
