"""normalise, find, lift, check, splice: one graph in, the rewritten graph and its Regions out."""
from __future__ import annotations

import logging
import re
from dataclasses import replace

import torch
from torch import fx

from flashfx.errors import VerifyError
from flashfx.region import Problem, Refusal, Region

from .algebra import rearrange
from .check import check
from .find import DROPOUTS, Site, find
from .index import same, size
from .lift import Lifted, lift
from .normalise import normalise
from .operands import Operand
from .softmax import is_rounding
from .splice import splice, still_read, sweep
from .values import Refused, Value, ValueGraph, source_line
from .verify import verify as validate
from .views import VIEWS

log = logging.getLogger(__name__)


def _refusal(stage: str, site: Site, why: Refused) -> Refusal:
    owner = (why.at or site.out).owner or site.out.owner
    return Refusal(stage, why.reason, owner.name, source_line(owner) or source_line(site.out.owner), why.hint)


def _name(x) -> str:
    node = x if isinstance(x, fx.Node) else x.owner
    return "the graph's output" if node.op == "output" else f"{node.name} ({source_line(node)})" if source_line(node) else node.name


def _described(operand: Operand) -> str:
    v = operand.value
    name = re.sub(r"^l_(kwargs_|args_|self_)?(.*?)_?$", r"\2", v.owner.name) if v.owner is not None else "a constant"
    return f"{name}, {str(v.dtype).removeprefix('torch.')}[{', '.join(map(str, v.shape))}]"


def _cut(found: dict[Site, Lifted]) -> dict[Value, list[Value]]:
    """The outputs that will come from our op, and what the op reads instead."""
    return {v: _reads(lifted) for site, lifted in found.items() for v in (site.out, *(s.value for s in lifted.log_sums))}


def _reads(lifted: Lifted) -> list[Value]:
    return [o.value for found in (lifted.q, lifted.k, lifted.v, lifted.sink or []) for o in found[:1]] + [a.value for a in lifted.aux]


def _used_elsewhere(vg: ValueGraph, found: dict[Site, Lifted]) -> dict[Site, Refused]:
    """Sites whose weights somebody else still reads when all of `found` are replaced."""
    needed = still_read(vg, _cut(found))

    def reader(v: Value):
        """Past dropout, casts and views, which read the weights only to hand them on."""
        x = needed[v]
        while isinstance(x, Value) and (x.name in VIEWS and x.name != "copy.default" or x.name in DROPOUTS or is_rounding(x)):
            x = needed[x]
        return x

    return {site: Refused(f"the attention weights are also read by {_name(reader(site.weights))}", site.weights,
                          "do not return or store them, e.g. output_attentions=False")
            for site in found if site.weights is not None and site.weights in needed}


def _refused(stage: str, site: Site, error: Exception) -> Refusal:
    """A stage's "no"; any other exception is a fault of ours, which must not stop a user's compilation."""
    if not isinstance(error, Refused):
        log.warning("%s: %s failed", site.out.owner.name, stage, exc_info=error)
        error = Refused(f"internal error ({type(error).__name__}: {error})", hint="please report this with the model and the log")
    return _refusal(stage, site, error)


def rewrite(gm: fx.GraphModule, *, dropout_allowed: bool = True, verify: bool = False, why_not=None, summarise=None,
            label: str = "graph") -> list[Region]:
    """Rewrite `gm` (a Dynamo graph) in place, bodies of higher-order ops included. Returns one Region per site.

    why_not(spec, problem, device) says why no kernel can run a site there, or None; without it every site counts as runnable.
    summarise(spec, problem) says whether the mask is worth a run-time summary; without it none is.
    """
    regions: list[Region] = []
    for node in gm.graph.nodes:
        body = getattr(gm, node.target, None) if node.op == "get_attr" and isinstance(node.target, str) else None
        if isinstance(body, fx.GraphModule):
            regions += rewrite(body, dropout_allowed=dropout_allowed, verify=verify, why_not=why_not, summarise=summarise,
                               label=f"{label}/{node.target}")
    vg = _readable(gm)
    sites = find(vg) if vg is not None else []
    if not sites:
        return regions
    refusals: dict[Site, Refusal] = {}
    found, problems = _lift_all(sites, vg, refusals, dropout_allowed, verify, why_not)
    unread = {n for n in gm.graph.nodes if not n.users}
    listed = {site for site in found if summarise is not None and summarise(found[site].spec, problems[site])}
    replaced = _splice_all(gm, vg, found, refusals, listed)
    for owner in dict.fromkeys(site.out.owner for site in found):
        for old, new in replaced[owner].items():
            _same_kind(old, new)
            old.replace_all_uses_with(new, delete_user_cb=lambda user, new=new: user is not new)
    sweep(gm, vg, still_read(vg, _cut(found)), unread)
    gm.graph.lint()
    gm.recompile()
    own = [_region(site, label, found.get(site), problems.get(site), refusals.get(site)) for site in sites]
    for r in own:
        log.info("%s: %s", r.site, r.spec if r.fused else r.refusal)
    return regions + own


def _readable(gm: fx.GraphModule) -> ValueGraph | None:
    """The value graph, sites in plain form; as it was traced if a fault of ours stops the identities."""
    vg = normalise(gm)
    if vg is not None:
        try:
            rearrange(vg)
        except Exception as error:
            log.warning("the identities of flashfx.passes.algebra failed", exc_info=error)
            vg = normalise(gm)
    return vg


def _lift_all(sites, vg, refusals, dropout_allowed, verify, why_not) -> tuple[dict[Site, Lifted], dict[Site, Problem]]:
    """lift, check, plan and verify each site; what may be spliced, and why the others may not."""
    found: dict[Site, Lifted] = {}
    problems: dict[Site, Problem] = {}
    planned: dict[tuple, str | None] = {}
    for site in sites:
        stage = "lift"
        try:
            lifted = lift(site, vg)
            stage = "check"
            problem = check(site, lifted, vg.shape_env, dropout_allowed)
            stage = "plan"
            key = (lifted.spec, problem, site.out.fake.device)  # repeated layers are planned once
            if why_not is not None and key not in planned:
                planned[key] = why_not(*key)
            if (reason := planned.get(key)) is not None:
                raise Refused(reason, site.out, "use another dtype or head size, or run this model without FlashFX on this device")
            stage = "verify"
            if verify and (skipped := validate(site, lifted, vg)) is not None:
                log.warning("%s: %s", site.out.owner.name, skipped)
            found[site], problems[site] = lifted, problem
        except VerifyError:
            raise
        except Exception as error:
            refusals[site] = _refused(stage, site, error)
    _drop(found, refusals, "check", vg)
    return found, problems


def _splice_all(gm, vg, found: dict[Site, Lifted], refusals, listed: set[Site]) -> dict[fx.Node, dict[fx.Node, fx.Node]]:
    """Emit the op of each site, node by node. Nothing reads it yet, so that a site may still be refused."""
    seeds: dict = {}
    summaries: dict = {}
    replaced: dict[fx.Node, dict[fx.Node, fx.Node]] = {}
    for owner in dict.fromkeys(site.out.owner for site in found):
        group = {site: lifted for site, lifted in found.items() if site.out.owner is owner}
        try:
            replaced[owner] = splice(gm, vg, group, seeds, {site: summaries for site in group if site in listed})
        except Exception as error:
            for site in group:
                refusals[site] = _refused("splice", site, error)
                del found[site]
    _drop(found, refusals, "splice", vg)
    return replaced


def _region(site: Site, label: str, lifted: Lifted | None, problem: Problem | None, refusal: Refusal | None) -> Region:
    owner = site.out.owner
    region = Region(owner.name, source_line(owner), label, called=site.weights is None, refusal=refusal)
    if lifted is None:
        return region
    return replace(region, spec=lifted.spec, captured=tuple(map(_described, lifted.aux)), problem=problem,
                   sink=_described(lifted.sink[0]) if lifted.sink else "")


def _same_kind(old: fx.Node, new: fx.Node) -> None:
    """Law of splice: the replacement has the shape and dtype of what it replaces."""
    a, b = old.meta.get("example_value"), new.meta["example_value"]
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and len(a.shape) == len(b.shape) and all(same(size(x), size(y)) for x, y in zip(a.shape, b.shape)), \
            f"{old} is {a.dtype} {tuple(a.shape)}, its replacement {new} {b.dtype} {tuple(b.shape)}"


def _drop(found: dict[Site, Lifted], refusals: dict[Site, Refusal], stage: str, vg: ValueGraph) -> None:
    """Refuse sites until what is left reads nobody's weights but its own."""
    while refused := _used_elsewhere(vg, found):
        for site, why in refused.items():
            # once spliced, the sites of one node stand or fall together
            for s in [s for s in found if s is site or stage == "splice" and s.out.owner is site.out.owner]:
                refusals[s] = _refusal(stage, s, why)
                del found[s]

