"""The clock beside verification: a site as the graph had it and as it was rewritten, on the same random data (`flashfx.passes.rerun`).

What computes no part of q, k or v (masks made of indices, gathered biases, summaries of masks) is computed before the clock starts: layers share it.
"""
from __future__ import annotations

from typing import Callable

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from flashfx.region import Measured

from .find import Site
from .lift import Lifted
from .rerun import Rerun
from .values import ValueGraph, upstream
from .verify import Sampler, names_of, sources_of

Clock = Callable[[Callable[[], list[torch.Tensor]], list[torch.Tensor], torch.device], dict[str, float]]
"""(forward, leaves, device) -> median seconds of "forward" and, if there are leaves, of "backward": `flashfx.bench.measure.seconds`."""


def measure(site: Site, lifted: Lifted, vg: ValueGraph, replaced: dict[fx.Node, fx.Node], device: torch.device, clock: Clock) -> tuple[Measured, ...]:
    """One `Measured` for each direction that a call runs. `replaced` are the pairs of old and new nodes of the site's Dynamo node.

    A side that does not fit the device's memory has None. Raises what either side raises otherwise.
    """
    with unset_fake_temporarily():  # the caller may still be under his fake tensors
        return _measured(site, lifted, vg, replaced, device, clock)


def _measured(site, lifted, vg, replaced, device, clock) -> tuple[Measured, ...]:
    pairs, step = [(vg.timeline[old][0][1], new) for old, new in replaced.items()], vg.steps[site.out.owner]
    sources = sources_of(pairs, vg, step)
    leaves = list(names_of(sources, lifted)) if site.out.grad else []
    operands = {o.value for candidates in (lifted.q, lifted.k, lifted.v) for o in candidates}
    first = Rerun(vg, {}, None, double=True, rounded=False, leaves=[])
    sample = Sampler(first, 0, operands, 1.0, False)
    data = {v: sample(v) for v in sources}
    core = {v for o in operands for v in upstream(o, lambda v: [] if v in data else v.inputs) if v in data}

    def seconds(outputs: Callable[[Rerun], list[torch.Tensor]]) -> dict[str, float] | None:
        try:
            with torch.set_grad_enabled(bool(leaves)):
                run = Rerun(vg, data, sample, double=False, rounded=True, leaves=leaves, device=device, timed=True)
                outputs(run)
                wanted = run.shared(set(core), step)
                values, nodes = dict(run.values), dict(run.nodes)

                def forward() -> list[torch.Tensor]:
                    run.values, run.nodes = dict(values), dict(nodes)
                    return outputs(run)
                return clock(forward, wanted, device)
        except torch.OutOfMemoryError:
            return None

    before, after = seconds(lambda run: [run.value(v) for v, _ in pairs]), seconds(lambda run: [run.node(n, step) for _, n in pairs])
    return tuple(Measured(d, before and before[d], after and after[d]) for d in (before or after or ()))
