"""normalise, find, lift, check, splice: one graph in, the rewritten graph and its Regions out."""
from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field, replace

import torch
from sympy import sympify
from torch import fx

from flashfx.compat import size_hint
from flashfx.region import Node, Problem, Refusal, Region

from .algebra import rearrange
from .check import check
from .columns import widened
from .draw import after, before
from .find import DROPOUTS, Site, find, is_flex, is_of_layers
from .index import same, size
from .lift import Lifted, lift
from .measure import Clock, measure
from .normalise import normalise
from .operands import Operand
from .softmax import is_rounding
from .splice import differences_read, splice, still_read, sweep, with_differences
from .values import Refused, Value, ValueGraph, source_line, stack_of
from .verify import verify as validate
from .views import VIEWS

log = logging.getLogger(__name__)


def _refusal(stage: str, site: Site, why: Refused) -> Refusal:
    owner = (why.at or site.out).owner or site.out.owner
    return Refusal(stage, why.reason, owner.name, source_line(owner) or source_line(site.out.owner), why.hint)


OUTPUT = "the graph's output"


def _name(x) -> str:
    node = x if isinstance(x, fx.Node) else x.owner
    return OUTPUT if node.op == "output" else f"{node.name} ({source_line(node)})" if source_line(node) else node.name


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

    def refused(site: Site) -> Refused:
        name = _name(reader(site.weights))
        returned = '; a graph break around an attention function returns them too, which attn_implementation="sdpa" avoids' * (name == OUTPUT)
        return Refused(f"the attention weights are also read by {name}", site.weights, f"do not return or store them, e.g. output_attentions=False{returned}")

    return {site: refused(site) for site in found if site.weights is not None and site.weights in needed}


def _refused(stage: str, site: Site, error: Exception) -> Refusal:
    """A stage's "no"; any other exception is a fault of ours, which must not stop a user's compilation."""
    if not isinstance(error, Refused):
        log.warning("%s: %s failed", site.out.owner.name, stage, exc_info=error)
        error = Refused(f"internal error ({type(error).__name__}: {error})", hint="please report this with the model and the log")
    return _refusal(stage, site, error)


@dataclass
class _Record:
    """What the stages leave behind for one site, on the way to its Region."""

    reached: list[str] = field(default_factory=list)
    lifted: Lifted | None = None
    problem: Problem | None = None
    refusal: Refusal | None = None
    before: tuple[Node, ...] = ()
    after: tuple[Node, ...] = ()
    checked: tuple = ()
    unchecked: str = ""
    measured: tuple = ()
    unmeasured: str = ""


def rewrite(gm: fx.GraphModule, *, dropout_allowed: bool = True, verify: bool = False, clock: Clock | None = None, why_not=None, summarise=None,
            device: torch.device | None = None, label: str = "graph") -> list[Region]:
    """Rewrite `gm` (a Dynamo graph) in place, bodies of higher-order ops included. Returns one Region per site.

    verify compares each rewritten site with its original; what it finds is in `Region.checked`.
    clock times each rewritten site and its original (`flashfx.passes.measure`), equal ones once; what it says is in `Region.measured`.
    device is where the graph will run, the operands' own unless given.
    why_not(spec, problem, device, fixed) says why no kernel can or should run a site there, and a hint, or None; without it every site counts as runnable.
    fixed: it is written out, and none of its sizes is symbolic.
    summarise(spec, problem, device) names the op that makes the run-time summary that a mask is worth, "block_lists" or "document_tiles", "" for none; without it none is.
    """
    regions: list[Region] = []
    for node in gm.graph.nodes:
        body = getattr(gm, node.target, None) if node.op == "get_attr" and isinstance(node.target, str) else None
        if isinstance(body, fx.GraphModule):
            regions += rewrite(body, dropout_allowed=dropout_allowed, verify=verify, clock=clock, why_not=why_not, summarise=summarise,
                               device=device, label=f"{label}/{node.target}")
    vg = _readable(gm)
    sites = find(vg) if vg is not None else []
    if not sites:
        return regions
    records = {site: _Record() for site in sites}
    found = _lift_all(records, vg, dropout_allowed, why_not, device)
    records = {site: record for site, record in records.items() if site in found or not is_of_layers(site)}
    for site, record in records.items():
        record.before = before(site, record.lifted, vg)
    unread = {n for n in gm.graph.nodes if not n.users}
    listed = {site: summarise(found[site].spec, records[site].problem, device or site.out.fake.device) for site in found} if summarise is not None else {}
    replaced = _splice_all(gm, vg, found, records, listed)
    timed: dict = {}
    for site in found:
        pairs = replaced[site.out.owner]
        records[site].after = after(next(iter(pairs.values())), vg) if pairs else ()
        if verify:
            _verify(site, records[site], vg, pairs)
        if clock is not None:
            _measure(site, records[site], vg, pairs, device or site.out.fake.device, clock, timed)
    for owner in dict.fromkeys(site.out.owner for site in found):
        for old, new in replaced[owner].items():
            _same_kind(vg.timeline[old][0][1], new)
            old.replace_all_uses_with(new, delete_user_cb=lambda user, new=new: user is not new)
    try:
        with_differences(gm, vg, list(found.values()))
    except Exception as error:
        log.warning("gathers by differences stay as they are", exc_info=error)
    sweep(gm, vg, still_read(vg, _cut(found)), unread)
    gm.graph.lint()
    gm.recompile()
    own = [_region(site, label, record, device) for site, record in records.items()]
    for r in own:
        log.info("%s: %s", r.site, r.spec if r.fused else r.refusal)
    return regions + own


def _verify(site: Site, record: _Record, vg: ValueGraph, pairs: dict[fx.Node, fx.Node]) -> None:
    try:
        record.checked, record.unchecked = validate(site, record.lifted, vg, pairs)
    except Exception as error:  # an op that runs in no float64, say: a fault of the check, not of the rewrite
        log.debug("%s: verification failed", site.out.owner.name, exc_info=error)
        record.unchecked = f"not verified: the original cannot be run again ({type(error).__name__}: {error})"
    if record.unchecked:
        log.warning("%s: %s", site.out.owner.name, record.unchecked)


def _measure(site: Site, record: _Record, vg: ValueGraph, pairs: dict[fx.Node, fx.Node], device: torch.device, clock: Clock, timed: dict) -> None:
    key = (record.lifted.spec, record.problem, site.weights is None, source_line(site.out.owner))
    if key not in timed:
        try:
            timed[key] = measure(site, record.lifted, vg, pairs, device, clock), ""
        except Exception as error:  # a fault of the clock, not of the rewrite
            log.debug("%s: cannot be measured", site.out.owner.name, exc_info=error)
            timed[key] = (), f"not measured: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    record.measured, record.unmeasured = timed[key]


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


def _lift_all(records: dict[Site, _Record], vg: ValueGraph, dropout_allowed: bool, why_not, device) -> dict[Site, Lifted]:
    """lift, check and plan each site; what may be spliced. Records say why the others may not."""
    found: dict[Site, Lifted] = {}
    planned: dict[tuple, tuple[str, str] | None] = {}
    for site, record in records.items():
        stage = "lift"
        called = "flex_attention" if is_flex(site.out) else "scaled_dot_product_attention"
        record.reached.append(f"a {called} call" if site.weights is None else "a softmax between two matrix products")
        try:
            if is_flex(site.out):
                raise Refused("flex_attention is kept: Inductor has kernels of its own for it, and its block mask may hide more than its functions say", site.out,
                              "write the score function and the mask in eager PyTorch: both are derived from the code, and dropout can be added")
            read = lift(site, vg, record.reached)
            lifted = widened(site, vg, read, record.reached)
            if lifted is read and read.stood:  # then joined, as the model makes it: read apart it is gathered
                record.reached = record.reached[:1]
                lifted = lift(site, vg, record.reached, apart=False)
            stage = "check"
            problem = check(site, lifted, vg.shape_env, dropout_allowed, device)
            record.reached += [f"{v.owner.name} is gathered at positions that depend on j - i alone: its gradient is made by matrix products, not by atomic additions"
                               for v in differences_read(vg, lifted)]
            record.reached.append("sizes, dtypes and device are ones that the kernels take")
            stage = "plan"
            fixed = site.weights is not None and all(isinstance(n, int) for n in (*lifted.extents.values(), *lifted.sizes))
            key = (lifted.spec, problem, device or site.out.fake.device, fixed)  # repeated layers are planned once
            if why_not is not None and key not in planned:
                planned[key] = why_not(*key)
            if (no := planned.get(key)) is not None:
                raise Refused(no[0], site.out, no[1])
            record.reached.append("tiles fit the device")
            found[site] = record.lifted = lifted
            record.problem = problem
        except Exception as error:
            record.refusal = _refused(stage, site, error)
    _drop(found, records, "check", vg)
    return found


def _splice_all(gm, vg, found: dict[Site, Lifted], records: dict[Site, _Record], listed: dict[Site, str]) -> dict[fx.Node, dict[fx.Node, fx.Node]]:
    """Emit the op of each site, node by node. Nothing reads it yet, so that a site may still be refused."""
    seeds: dict = {}
    summaries: dict = {}
    replaced: dict[fx.Node, dict[fx.Node, fx.Node]] = {}
    for owner in dict.fromkeys(site.out.owner for site in found):
        group = {site: lifted for site, lifted in found.items() if site.out.owner is owner}
        try:
            replaced[owner] = splice(gm, vg, group, seeds, {site: (summaries, listed[site]) for site in group if listed.get(site)})
        except Exception as error:
            for site in group:
                records[site].refusal = _refused("splice", site, error)
                del found[site]
    _drop(found, records, "splice", vg)
    return replaced


def _region(site: Site, label: str, record: _Record, device: torch.device | None) -> Region:
    owner, lifted = site.out.owner, record.lifted
    region = Region(owner.name, source_line(owner), label, called=site.weights is None, refusal=record.refusal, stack=stack_of(owner),
                    reached=tuple(record.reached), before=record.before, device=(device or site.out.fake.device).type)
    if lifted is None:
        return region
    return replace(region, spec=lifted.spec, captured=tuple(map(_described, lifted.aux)), problem=record.problem,
                   columns=tuple((n, at, _described(o)) for n, at, o in lifted.columns),
                   sink=_described(lifted.sink[0]) if lifted.sink else "", after=record.after if record.refusal is None else (),
                   checked=record.checked, unchecked=record.unchecked, measured=record.measured, unmeasured=record.unmeasured)


def _same_kind(old: Value, new: fx.Node) -> None:
    """Law of splice: the replacement has the shape and dtype of what it replaces, as it was made: `unsqueeze_` may change a node's own example later."""
    b = new.meta["example_value"]
    if isinstance(b, torch.Tensor):
        assert old.dtype == b.dtype and len(old.shape) == len(b.shape) and all(map(_equal, old.shape, b.shape)), \
            f"{old.owner} is {old.dtype} {old.shape}, its replacement {new} {b.dtype} {tuple(b.shape)}"


def _equal(a, b) -> bool:
    """Proved, or else true of the example: x * (x**2 // x) is not seen to be x**2."""
    envs = [s.node.shape_env for s in (a, b) if isinstance(s, torch.SymInt)]
    return same(size(a), size(b)) or bool(envs) and size_hint(envs[0], sympify(size(a))) == size_hint(envs[0], sympify(size(b)))


def _drop(found: dict[Site, Lifted], records: dict[Site, _Record], stage: str, vg: ValueGraph) -> None:
    """Refuse sites until what is left reads nobody's weights but its own."""
    while refused := _used_elsewhere(vg, found):
        for site, why in refused.items():
            # once spliced, the sites of one node stand or fall together
            for s in [s for s in found if s is site or stage == "splice" and s.out.owner is site.out.owner]:
                records[s].refusal = _refusal(stage, s, why)
                del found[s]
