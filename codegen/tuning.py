"""`options={"autotune": True}`: measure the cost model's best few plans on the device, once, and keep the fastest; and plans pinned by hand.

What was found is kept in `tuned.json` beside the generated kernels, keyed by GPU, versions, spec, sizes rounded as the planner rounds them, and the text of
the kernels. `pin` overrules both; autotuning prints the line that pins what it found.
"""
from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import sys
import tempfile
from typing import Callable, Mapping, Sequence

import torch

from ..region import Problem
from ..spec import AttentionSpec
from . import calls
from . import plan as planning
from .candidates import ask, ranked, representative
from .captured import grouped
from .gpu import GPU
from .load import cache_dir, load
from .packing import packed_axes
from .plan import Plan, make_plan, overridden
from .render import render
from .timing import Clock, Operands, each, launches
from .traffic import duration

FEW = 3
"""Tiles of a kernel and schedule that are measured."""
OPTIONS = "schedule", "turns"
"""What `overridden` takes of all kernels of a plan together."""
_state = {"on": False}


def enable() -> None:
    """From now on, sites are tuned at their first call with new sizes. For this process: the op that runs a site knows nothing of who compiled it."""
    _state["on"] = True


def enabled() -> bool:
    """Are sites tuned?"""
    return _state["on"]


def pin(spec: str | AttentionSpec, direction: str, schedule: str, turns: bool | None = None, **tiles: Sequence[int]) -> None:
    """Plan `spec` in "forward" or "backward" with a schedule and tiles, whatever the model says: `pin(text, "forward", "hopper", forward=(128, 64, 8, 3))`.

    turns  do heads that share keys take turns in the Hopper backward? As the model says unless given
    tiles  kernel ("forward", "keys", "rows", "one_tile", "dense") -> (BLOCK_M, BLOCK_N, num_warps, num_stages)
    Raises ValueError as `plan.overridden` does.
    """
    spec = AttentionSpec.parse(spec) if isinstance(spec, str) else spec
    pinned = {"schedule": schedule, "turns": turns, **{kernel: tuple(t) for kernel, t in tiles.items()}}
    with overridden(**pinned):
        pass
    planning.PINNED[spec, direction] = pinned
    calls.forget()


def tune(spec: AttentionSpec, problem: Problem, gpu: GPU, device: torch.device, directions: Sequence[str], say: Callable[[str], None] | None = None, **given) -> None:
    """Find the fastest plan of each direction, in the cache or by measuring, and pin it for this process. given: as `make_plan` takes it."""
    say = say or (lambda text: print(text, file=sys.stderr, flush=True))
    for direction in directions:
        if (spec, representative(problem), direction) in planning.TUNED or (spec, direction) in planning.PINNED:
            continue
        key, known = _key(spec, problem, gpu, direction, given), _read()
        if key not in known:
            with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
                found = _measured(spec, problem, gpu, device, direction, say, given)
            known = {**_read(), key: found}
            _write(known)
            tiles = "".join(f", {k}={_value(v)}" for k, v in found.items() if k != "schedule")
            say(f"flashfx autotune: kept; to pin it: flashfx.codegen.tuning.pin({spec.line!r}, {direction!r}, {found['schedule']!r}{tiles})")
        planning.TUNED[spec, representative(problem), direction] = {k: _value(v) for k, v in known[key].items()}


def _value(kept):
    """What JSON keeps of a schedule's name, tiles or a flag."""
    return tuple(kept) if isinstance(kept, (list, tuple)) else kept


def _offers(spec: AttentionSpec, problem: Problem, gpu: GPU, direction: str, given: Mapping) -> list[dict]:
    """What to measure, as `overridden` takes it: the best few of each schedule that can run, kernels of one direction side by side."""
    found, asked = [], functools.partial(ask, spec=spec, problem=problem, gpu=gpu, listed=given["listed"])
    few = lambda *what, **more: [c.tiles for c in ranked(asked(*what, **more)) if not c.unfit][:FEW]
    why = planning.why_not_hopper(spec, problem, gpu, direction, given.get("descriptors") is not False, given["listed"], given.get("needs"))
    if why is None:
        kernel = "forward" if direction == "forward" else "keys"
        with overridden(schedule="hopper"):  # the plan that the model prefers may read none by TMA
            plan = make_plan(spec, problem, gpu, direction, **given)
        own = [{"schedule": "hopper", kernel: t} for t in few("hopper", kernel, tiled=plan.tiled, ordered=plan.ordered)]
        if kernel == "keys" and grouped(spec) and not plan.ordered:  # the best tiles the other way round too
            own = [*({**offer, "turns": plan.turns} for offer in own), *({**offer, "turns": not plan.turns} for offer in own[:1])]
        found += own
    kernels = ("forward",) if direction == "forward" else ("keys", "rows")
    packed = not given["listed"] and bool(packed_axes(spec, problem))
    described = planning.has_descriptors(spec, problem, gpu) and given.get("descriptors") is not False
    lists = {k: few("triton", k, packed=k == "forward" and packed, descriptors=described) for k in kernels}
    if direction == "backward":
        with overridden(schedule="triton"):  # the plan that the model prefers, where it is one for all keys
            plan = make_plan(spec, problem, gpu, direction, **given)
        found += [{"schedule": "triton", "one_tile": plan.tiles}] * (plan.kernel == "one_tile")
    return found + [{"schedule": "triton", **{k: ts[n % len(ts)] for k, ts in lists.items()}} for n in range(max(map(len, lists.values())))]


def _measured(spec, problem, gpu, device, direction, say, given) -> dict:
    clock, offers = Clock(device), _offers(spec, problem, gpu, direction, given)
    times: dict[tuple, float] = {}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):  # the caller's random numbers stay what they are
        operands = Operands(spec, problem, device)
        for n, offer in enumerate(offers):
            with overridden(**offer):
                forward = make_plan(spec, problem, gpu, "forward", **{k: v for k, v in given.items() if k != "needs"})
                backward = make_plan(spec, problem, gpu, "backward", **given) if direction == "backward" else None
            plan = backward or forward
            needs = given["needs"] if backward is not None else (False,) * len(given["needs"])
            runs = launches(load(render(spec, forward, problem, needs, backward).text), operands, direction)
            seconds_of = _by_kernel(plan, [(name, us * 1e-6) for name, us in each(runs, clock)])
            for kernel, seconds in seconds_of.items():
                taken = tuple((k, v) for k, v in offer.items() if k in OPTIONS), kernel, offer.get(kernel)
                times[taken] = min(seconds, times.get(taken, float("inf")))
            told = [f"{k} {'x'.join(map(str, t))} {duration(seconds_of[k])}" for k, t in offer.items() if k not in OPTIONS]
            told += ["heads in turn"] * offer.get("turns", False)
            say(f"flashfx autotune: {direction} of {spec.line} at M={problem.M}, N={problem.N}, {n + 1} of {len(offers)}: {plan.schedule} {', '.join(told)}")
    return fastest(times)


def _by_kernel(plan: Plan, runs: list[tuple[str, float]]) -> dict[str, float]:
    """Seconds by what may be chosen alone: the portable dK/dV and dQ kernels; all else of a plan belongs to its first kernel."""
    found: dict[str, float] = {}
    for name, seconds in runs:
        kernel = "rows" if plan.rows is not None and name == "attention_backward_rows" else plan.kernel
        found[kernel] = found.get(kernel, 0.0) + seconds
    return found


def fastest(times: Mapping[tuple, float]) -> dict:
    """(items of `OPTIONS`, kernel, tiles) -> seconds, to the options whose kernels are fastest together, and their tiles."""
    best: dict[tuple, dict[str, tuple[float, tuple]]] = {}
    for (options, kernel, tiles), seconds in times.items():
        own = best.setdefault((options, kernel == "one_tile"), {})  # which does all that others do
        own[kernel] = min(own.get(kernel, (float("inf"), tiles)), (seconds, tiles))
    way = min(best, key=lambda way: sum(seconds for seconds, _ in best[way].values()))
    return {**dict(way[0]), **{kernel: tiles for kernel, (_, tiles) in best[way].items()}}


def _key(spec, problem, gpu, direction, given) -> str:
    import triton
    plan = make_plan(spec, problem, gpu, "forward", **{k: v for k, v in given.items() if k != "needs"})
    kernels = render(spec, plan, representative(problem), given["needs"] if direction == "backward" else (False,) * len(given["needs"])).text
    parts = (gpu.name, torch.__version__, triton.__version__, spec.line, representative(problem), direction, sorted(given.items()), kernels)
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:32]


def _path() -> str:
    return os.path.join(cache_dir(), "tuned.json")


def _read() -> dict:
    try:
        with open(_path()) as file:
            return json.load(file)
    except (OSError, ValueError):  # none yet, or half of one from an older release
        return {}


def _write(known: dict) -> None:
    os.makedirs(cache_dir(), exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=cache_dir(), suffix=".tmp")
    with os.fdopen(descriptor, "w") as file:
        json.dump(known, file, indent=1)
    os.replace(temporary, _path())
