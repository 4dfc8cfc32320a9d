"""`explain`: what would be rewritten in a model, why, and why not. Prints the same record that the stages pass on."""
from __future__ import annotations

import copy
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any, Callable, Iterator

import torch

from .errors import FlashFXError, PlanError
from .region import Refusal, Region
from .spec import BLOCK


class SiteReport:
    """One attention site: `region`, and for a fused site its plans, kernels and predicted traffic on `gpu`."""

    def __init__(self, region: Region, gpu, training: bool):
        self.region, self.gpu, self.training = region, gpu, training

    @property
    def fused(self) -> bool:
        return self.region.fused

    @property
    def spec(self):
        return self.region.spec

    @property
    def refusal(self) -> Refusal | None:
        return self.region.refusal

    @functools.cached_property
    def plan(self):
        """The forward plan. Raises PlanError if no tile fits."""
        return self._plan("forward")

    @functools.cached_property
    def backward_plan(self):
        return self._plan("backward")

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

    def traffic(self, direction: str = "forward"):
        """Predicted bytes to and from device memory, before and after."""
        from .codegen import traffic
        plan = self.plan if direction == "forward" else self.backward_plan
        return getattr(traffic, direction)(self.spec, self.region.problem, plan, self.region.called)

    def tiles(self):
        """Tiles skipped, full and partial under the forward plan."""
        from .codegen.blocks import count
        from .codegen.tiles import classify
        p = self.region.problem
        if self.plan.listed and not self.spec.visible.loads and p.M * p.N <= 2 ** 24:
            return count(self.spec, self.plan.BLOCK_M, self.plan.BLOCK_N, p.M, p.N, (*p.extents, *p.sizes), {})
        return classify(self.spec, self.plan.BLOCK_M, self.plan.BLOCK_N, p.M, p.N, (*p.extents, *p.sizes))

    def _at_run_time(self) -> str:
        """What a mask that only the data decides does to the tiles."""
        if self.plan.listed and self.spec.is_data_masked:
            return f"; blocks of {BLOCK} that the data hide are skipped too, fully visible ones read without the mask"
        return "; too short for a list of what the data hide" if self.spec.is_data_masked else ""

    def lines(self) -> list[str]:
        if not self.fused:
            return str(self.refusal).splitlines()
        out = str(self.spec).splitlines()
        if self.region.sink:
            out.append(f"sink    out * sigmoid(lse - sink), sink is {self.region.sink}")
        p = self.region.problem
        extents = ", ".join(f"{a} = {n}" for a, n in zip(self.spec.axes, p.extents))
        heads = f"head size {p.D}" if p.D == p.Dv else f"head sizes {p.D} (q, k) and {p.Dv} (v)"
        out.append(f"shape   {extents}{', ' if extents else ''}M = {p.M}, N = {p.N}, {heads}, {p.dtype}")
        for aux, what in zip(self.spec.aux, self.region.captured):
            out.append(f"{aux.name:<7} is {what}")
        try:
            out.append(f"tiles   {self.tiles()}{self._at_run_time()}")
            out.append(f"plan    {self.plan}")
            out.append(f"memory  forward {self.traffic()}")
            if self.training:
                out.append(f"        backward {self.traffic('backward')}")
        except PlanError as error:
            out.append(f"plan    none: {error}")
        return out

    def __str__(self) -> str:
        state = "fused" if self.fused else "left alone"
        return "\n".join([f"{self.region.site}: {state}", *(f"  at {self.region.source}" for _ in [0] if self.region.source),
                          *("    " + line for line in self.lines())])


@dataclasses.dataclass(frozen=True)
class Report:
    """What `explain` found: a sequence of `SiteReport`, printed with equal neighbours gathered."""

    sites: tuple[SiteReport, ...]
    graphs: int
    gpu: Any
    here: bool

    def __len__(self) -> int:
        return len(self.sites)

    def __getitem__(self, k) -> SiteReport:
        return self.sites[k]

    def __iter__(self) -> Iterator[SiteReport]:
        return iter(self.sites)

    @property
    def fused(self) -> int:
        return sum(s.fused for s in self.sites)

    def to_json(self) -> str:
        """The record as JSON: one object per site."""
        rows = []
        for s in self.sites:
            row: dict[str, Any] = {"site": s.region.site, "source": s.region.source, "graph": s.region.graph, "fused": s.fused}
            if s.fused:
                row |= {"spec": str(s.spec), "problem": dataclasses.asdict(s.region.problem)}
            else:
                row["refusal"] = dataclasses.asdict(s.refusal)
            rows.append(row)
        return json.dumps({"graphs": self.graphs, "gpu": self.gpu.name, "sites": rows}, indent=2)

    def __str__(self) -> str:
        total, alone = len(self.sites), len(self.sites) - self.fused
        graphs = f" in {self.graphs} graphs" if self.graphs != 1 else ""
        head = f"flashfx: {total} attention site{'s' * (total != 1)}{graphs}, {self.fused} fused, {alone} left alone"
        if not self.here:
            head += f"\nplans are for the {self.gpu.name}; without a GPU the tiled PyTorch schedule runs"
        groups: list[tuple[list[int], SiteReport, list[str]]] = []
        for number, site in enumerate(self.sites):
            lines = [x for x in ([f"at {site.region.source}"] if site.region.source and site.fused else [])] + site.lines()
            key = [x.split(" [node ")[0] for x in lines]
            if groups and groups[-1][2] == key:
                groups[-1][0].append(number)
            else:
                groups.append(([number], site, key))
        parts = [head]
        for numbers, site, _ in groups:
            label = f"[{numbers[0]}]" if len(numbers) == 1 else f"[{numbers[0]}..{numbers[-1]}]"
            source = [f"  at {site.region.source}"] if site.fused and site.region.source else []
            parts.append("\n".join([f"{label} {'fused' if site.fused else 'left alone'}: {site.region.site}", *source,
                                    *("  " + line for line in site.lines())]))
        return "\n\n".join(parts)

    __repr__ = __str__


def unwrapped(fn: Callable) -> Callable:
    """The model or function behind `torch.compile`."""
    fn = getattr(fn, "_orig_mod", fn)
    return getattr(fn, "_torchdynamo_orig_callable", fn)


def explain(fn: Callable, *args, gpu: str | None = None, **kwargs) -> Report:
    """Capture `fn(*args, **kwargs)` (a module or function, compiled or not), rewrite a copy of its graphs, and report.

    The call runs once, as it is, so that graphs behind a graph break are seen too. gpu: name of a row of
    `flashfx.codegen.gpu.GPUS` to plan for, e.g. "A100"; by default this machine's GPU, or the H100 where there is none.
    Raises FlashFXError if `gpu` is unknown.
    """
    from .codegen.gpu import BY_NAME, current
    from .options import Options
    from .backend import rewrite_graph
    if gpu is not None and gpu not in BY_NAME:
        raise FlashFXError(f"unknown GPU {gpu!r}; known: {', '.join(BY_NAME)}")
    regions: list[Region] = []
    graphs = 0
    training = False

    def capture(gm, example_inputs):
        nonlocal graphs, training
        graphs += 1
        examples = [n.meta.get("example_value") for n in gm.graph.nodes if n.op == "placeholder"]
        training |= torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in examples)
        regions.extend(rewrite_graph(copy.deepcopy(gm), Options()))
        return gm.forward

    target = unwrapped(fn)
    random_state = torch.random.get_rng_state()
    try:
        torch.compile(target, backend=capture)(*args, **kwargs)
    finally:
        torch.random.set_rng_state(random_state)
    card = BY_NAME[gpu] if gpu is not None else current()
    return Report(tuple(SiteReport(r, card, training) for r in regions), graphs, card, gpu is not None or torch.cuda.is_available())
