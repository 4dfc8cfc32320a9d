"""The torch.compile backend: rewrite the Dynamo graph, then let Inductor (or `inner`) compile it.

The rewrite runs on the pre-grad graph, before AOTAutograd, so one rule serves training and inference and every cache below
us keys on the rewritten graph. What that key cannot see, our own source and options, enters it through the uuid of the
joint pass.
"""
from __future__ import annotations

import functools
import hashlib
import logging
import os
import warnings
from dataclasses import replace
from pathlib import Path

import torch
from torch import fx

from .compat import keep_transformers_whole
from .errors import FlashFXWarning
from .options import Options, split
from .region import Region

log = logging.getLogger(__name__)

keep_transformers_whole()


@functools.cache
def source_hash() -> str:
    """Of every source file of the package: changed code must miss every compile cache."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(p for folder in (here, here / "passes", here / "codegen") for p in folder.rglob("*.py")):
        digest.update(path.relative_to(here).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


class KeepSeeds:
    """Joint-graph pass: a dropout seed drawn in forward is saved for backward, never drawn again.

    With `activation_memory_budget < 1` the partitioner would recompute it and backward would drop other weights.
    """

    def __init__(self, options: Options, then=None):
        self.options, self.then = options, then

    def __call__(self, graph: fx.Graph) -> None:
        from torch.utils.checkpoint import CheckpointPolicy
        for node in graph.nodes:
            if node.op == "call_function" and node.target is torch.ops.flashfx.attention.default and node.args[4] is not None:
                node.args[4].meta["recompute"] = CheckpointPolicy.MUST_SAVE
        if self.then is not None:
            self.then(graph)

    def uuid(self):
        theirs = self.then.uuid() if self.then is not None else ""
        return None if theirs is None else ("flashfx", source_hash(), repr(self.options), theirs)


def _joint_pass(options: Options, theirs):
    from torch._inductor.custom_graph_pass import CustomGraphPass
    kind = type("FlashFXKeepSeeds", (KeepSeeds, CustomGraphPass), {})
    return kind(options, theirs)


def flashfx(gm: fx.GraphModule, example_inputs, *, mode: str | None = None, options: dict | None = None):
    """Backend entry point (group `torch_dynamo_backends`): `torch.compile(model, backend="flashfx", mode=…, options=…)`.

    Options are those of `flashfx.options.Options`; Inductor's own are passed through. Raises OptionError.
    """
    chosen, patches = split(options, mode)
    return compile_rewritten(gm, example_inputs, chosen, patches)[0]


def _reset() -> None:
    from torch._dynamo.backends.inductor import inductor
    reset = getattr(inductor, "reset", None)
    if reset is not None:
        reset()


flashfx.reset = _reset


def compile_rewritten(gm: fx.GraphModule, example_inputs, options: Options, patches: dict):
    """(callable, Regions)."""
    from . import op  # registers flashfx::attention, which cached artifacts call too
    regions: list[Region] = []
    if not options.disable:
        if options.autotune:
            from .codegen.tuning import enable
            enable()
        regions = rewrite_graph(gm, options)
        _record(gm, regions)
        if any(r.fused for r in regions):
            from .codegen.counters import prepare
            for device in {t.device for t in example_inputs if isinstance(t, torch.Tensor) and t.device.type == "cuda"}:
                prepare(device)
    if options.inner == "eager":
        return gm.forward, regions
    if options.inner == "aot_eager":
        from torch._dynamo.backends.debugging import aot_eager
        return aot_eager(gm, example_inputs), regions
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx
    from .lowering import register
    register()
    patches = dict(patches)
    theirs = patches.get("joint_custom_post_pass", config.joint_custom_post_pass)
    patches["joint_custom_post_pass"] = _joint_pass(replace(options, dump=None), theirs)
    return compile_fx(gm, example_inputs, config_patches=patches), regions


def _record(gm: fx.GraphModule, regions: list[Region]) -> None:
    """The report as an artifact of TORCH_TRACE, for tlparse; and a warning, once for each reason, where FlashFX was asked for and does nothing."""
    from .report import Report, SiteReport
    if not regions:
        return

    def report() -> str:
        from .codegen.gpu import current
        from .capture import needs_gradients
        card, training = current(), needs_gradients(gm)
        return Report(tuple(SiteReport(r, card, training) for r in regions), 1, card, torch.cuda.is_available(), training).to_json()

    torch._logging.trace_structured("artifact", metadata_fn=lambda: {"name": "flashfx_report", "encoding": "json"}, payload_fn=report)
    if not any(r.fused for r in regions):
        _warn_once(len(regions), replace(regions[0].refusal, node=""))


@functools.cache
def _warn_once(sites: int, why) -> None:
    warnings.warn(f"no attention site of a graph was rewritten, {sites} found: {why.reason}{f' (at {why.source})' * bool(why.source)}; "
                  f"{why.hint or 'flashfx.explain says more'}. flashfx.explain(model, ...) reports every site", FlashFXWarning, stacklevel=2)


def _no_kernel(spec, problem, device: torch.device, fixed: bool, card=None, training: bool | None = None) -> tuple[str, str] | None:
    """(why the generated kernels cannot or should not run a site on its device, as `card` if that is given, and a hint), or None; the tiled PyTorch schedule
    runs everything elsewhere. fixed: its sizes are, and it is written out; training: None if a slower site is rewritten all the same."""
    if device.type != "cuda":
        return None
    other = "use another dtype or head size, or run this model without FlashFX on this device"
    if torch.version.hip and card is None:
        return "the generated kernels are for NVIDIA GPUs, and this PyTorch is built for AMD's", other
    from .codegen import original
    from .codegen.gpu import current
    from .codegen.plan import why_not
    card = card or current(device)
    if reason := why_not(spec, problem, card):
        return reason, other
    reason = original.faster(spec, problem, card, training) if fixed and training is not None else None
    return reason and (reason, 'options={"decline": False} rewrites it all the same and saves memory; so may another dtype, or torch.set_float32_matmul_precision("high")')


def _summary(spec, problem, device, card=None) -> str:
    """The op that makes the run-time summary of a mask, "" if none pays. card: as `rewrite_graph`."""
    from .codegen.blocks import pays
    from .codegen.gpu import current
    from .codegen.plan import PlanError, make_plan
    if not pays(spec, problem):
        return ""
    try:
        documents = device.type == "cuda" and make_plan(spec, problem, card or current(device), "forward", listed=True).documents
    except PlanError:
        documents = False
    return "document_tiles" if documents else "block_lists"


def rewrite_graph(gm: fx.GraphModule, options: Options, card=None, clock=None) -> list[Region]:
    """Rewrite `gm` in place under `options`; dumps and verifies if asked to. card: the GPU to rewrite for, wherever the tensors are; clock: times each
    site (`flashfx.passes.pipeline.rewrite`). Raises VerifyError."""
    from torch._functorch import config as functorch_config
    from .capture import needs_gradients
    from .passes.pipeline import rewrite
    from . import op
    before = gm.print_readable(print_output=False) if options.dump else ""
    regions = rewrite(gm, dropout_allowed=functorch_config.activation_memory_budget != 0, verify=options.verify, clock=clock, summarise=functools.partial(_summary, card=card),
                      why_not=functools.partial(_no_kernel, card=card, training=needs_gradients(gm) if options.decline else None), device=None if card is None else torch.device("cuda"))
    if options.verify:
        from .verification import raise_if_wrong
        raise_if_wrong(regions)
    if regions:
        fused = sum(r.fused for r in regions)
        log.info("%d attention sites, %d fused, %d left alone", len(regions), fused, len(regions) - fused)
    if options.dump:
        from .dump import dump
        dump(Path(options.dump), before, gm, regions, os.getpid())
    return regions
