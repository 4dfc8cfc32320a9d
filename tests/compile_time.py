"""python -m tests.compile_time [--layers 48] [--model gpt2|llama] [--no-inductor]: what the rewrite costs beside Inductor's own compile time.

Stages are timed one by one, then the whole compilation (forward and backward, cold caches) with Inductor alone and with FlashFX. On the CPU.
--whole: GPT-2 as it is (12 layers of 768, eager attention), inference and training, each in a fresh process: CPU seconds of it and its children.
--plans: what a first choice of a plan takes (`codegen.plan.make_plan`), over specs, head sizes, lengths, cards and directions.
"""
from __future__ import annotations

import argparse
import cProfile
import inspect
import os
import pstats
import statistics
import subprocess
import sys
import time

import torch
import transformers


def build(name: str, layers: int):
    """A model of `layers` small layers, and its inputs."""
    common = dict(vocab_size=97, attn_implementation="eager")
    if name == "gpt2":
        config = transformers.GPT2Config(n_layer=layers, n_embd=64, n_head=4, n_positions=64, **common)
    else:
        config = transformers.LlamaConfig(num_hidden_layers=layers, hidden_size=64, intermediate_size=96, num_attention_heads=4,
                                          num_key_value_heads=2, max_position_embeddings=64, **common)
    config.use_cache = False
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config, attn_implementation="eager")
    mask = torch.ones(2, 32, dtype=torch.long)
    mask[1, 20:] = 0
    return model.train(), {"input_ids": torch.randint(0, 97, (2, 32)), "attention_mask": mask}


def stages(name: str, layers: int, profile: bool) -> float:
    """Seconds of the rewrite, stage by stage; prints them."""
    from flashfx import op  # noqa: F401  registers flashfx::attention
    from flashfx.passes import pipeline
    spent: dict[str, float] = {}

    def timed(what):
        original = getattr(pipeline, what)

        def run(*args, **kwargs):
            started = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                spent[what] = spent.get(what, 0.0) + time.perf_counter() - started
        return original, run

    originals = {}
    for what in ("normalise", "rearrange", "find", "lift", "check", "splice", "still_read", "sweep"):
        originals[what], replacement = timed(what)
        setattr(pipeline, what, replacement)
    total, regions = [0.0], []
    profiler = cProfile.Profile()

    def backend(gm, example_inputs):
        started = time.perf_counter()
        if profile:
            profiler.enable()
        regions.extend(pipeline.rewrite(gm))
        profiler.disable()
        total[0] += time.perf_counter() - started
        return gm.forward

    torch._dynamo.reset()
    model, inputs = build(name, layers)
    started = time.perf_counter()
    try:
        torch.compile(model, backend=backend)(**inputs)
    finally:
        for what, original in originals.items():
            setattr(pipeline, what, original)
    dynamo = time.perf_counter() - started - total[0]
    print(f"{name}, {layers} layers: {sum(r.fused for r in regions)} of {len(regions)} sites fused, {len({r.spec for r in regions})} specs")
    print(f"  rewrite {total[0]:.2f} s: " + ", ".join(f"{n} {t:.2f}" for n, t in spent.items()) + f"; Dynamo and one run {dynamo:.2f} s")
    if profile:
        pstats.Stats(profiler).sort_stats("cumulative").print_stats(45)
    return total[0]


def whole(name: str, layers: int, backend: str) -> float:
    """Seconds from a fresh model to a finished first training step, caches off."""
    torch._dynamo.reset()
    model, inputs = build(name, layers)
    with torch._inductor.config.patch(force_disable_caches=True):
        started = time.perf_counter()
        torch.compile(model, backend=backend)(**inputs)[0].sum().backward()
        return time.perf_counter() - started


def one(backend: str, mode: str) -> float:
    """CPU seconds of this process and its children to compile GPT-2 and run it once; other work on the machine counts little in them."""
    import flashfx  # noqa: F401  not what is timed
    config = transformers.GPT2Config(attn_implementation="eager", use_cache=False)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").train(mode == "train")
    ids = torch.randint(0, config.vocab_size, (1, 64))
    with torch.set_grad_enabled(mode == "train"):
        model(input_ids=ids)
        before = sum(os.times()[:4])
        out = torch.compile(model, backend=backend)(input_ids=ids)[0]
        if mode == "train":
            out.sum().backward()
    return sum(os.times()[:4]) - before


def gpt2() -> None:
    """Inductor alone and FlashFX, caches off."""
    environment = os.environ | {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    for mode in ("eval", "train"):
        run = lambda backend: float(subprocess.run([sys.executable, "-m", "tests.compile_time", "--one", backend, mode], env=environment, check=True,
                                                   capture_output=True, text=True).stdout.split()[-1])
        alone, ours = run("inductor"), run("flashfx")
        print(f"GPT-2, {mode}: Inductor {alone:.0f} s, FlashFX {ours:.0f} s of CPU, {ours / alone:.2f} of it", flush=True)


SIZED, BY_SPEC = {"problem", "asked", "known", "M", "N"}, {"self", "spec", "visible", "score"}
"""Names of parameters that hold sizes, a spec or its expressions: what such caches know is forgotten before a choice is timed."""


def caches() -> dict:
    """Every memoised function of the package -> names of its parameters."""
    found = [f for name, module in list(sys.modules.items()) if name.startswith("flashfx") for owner in (module, *vars(module).values())
             if owner is module or inspect.isclass(owner) for f in vars(owner).values() if hasattr(f, "cache_clear") and hasattr(f, "__wrapped__")]
    return {f: {*inspect.signature(f).parameters} for f in found if f.__module__.startswith("flashfx")}


def plans() -> None:
    """Milliseconds of a first choice, of this thread's CPU time and of the clock, the least of five (what other work on the machine and the collection
    of garbage add is in none of them for certain). Nothing is remembered that depends on sizes ("known spec"), or on
    the spec either ("new spec", expressions parsed anew); or the site's forward was planned before, as it always is ("behind forward"). What is worked out
    once in a process is not in it: compiling the cost model's formulas. Nor is whether a mask over indices pays for a run-time summary, which evaluates the mask: that is timed by itself."""
    from flashfx.codegen import blocks, plan
    from flashfx.codegen.gpu import BY_NAME
    from flashfx.region import Problem
    from flashfx.spec import AttentionSpec, from_text
    from .kernels.cases import CORE, MORE, spec
    variants = ("full", "causal", "window", "bias", "shared_bias", "bool_mask", "dropout", "documents", "padding", "alibi", "softcap")
    points = [(gpu, spec((CORE | MORE)[v], kind), Problem((2, 4, 4) if kind == "gqa" else (2, 16), n, n, d, d, "bfloat16", "bfloat16"), direction)
              for gpu in ("H200", "A100", "RTX 4090") for v in variants for kind in ("self", "gqa") for d in (64, 80, 128)
              for n in (512, 2048, 8192, 65536) for direction in plan.DIRECTIONS]
    for gpu, s, problem, direction in points:  # imports, formulas, summaries of masks
        plan.make_plan(s, problem, BY_NAME[gpu], direction)
    kept = {blocks._closed_form_wastes, AttentionSpec.parse}
    for what, forgotten in (("known spec", SIZED), ("new spec", SIZED | BY_SPEC), ("new spec, behind forward", SIZED | BY_SPEC)):
        behind = what.endswith("forward")
        cleared = [f for f, names in caches().items() if names & forgotten and f not in kept]
        least = [(float("inf"), float("inf"))] * len(points)
        for _ in range(5):  # whole passes: what else the machine does lasts longer than one choice
            for n, (gpu, s, problem, direction) in enumerate(points):
                if behind and direction == "forward":
                    continue
                s = s if what == "known spec" else from_text(str(s))
                for f in cleared:
                    f.cache_clear()
                if behind:
                    plan.make_plan(s, problem, BY_NAME[gpu], "forward")
                cpu, clock = time.thread_time(), time.perf_counter()
                plan.make_plan(s, problem, BY_NAME[gpu], direction)
                found = (time.thread_time() - cpu) * 1e3, (time.perf_counter() - clock) * 1e3
                least[n] = tuple(map(min, least[n], found))
        taken = {}
        for (gpu, _, _, direction), found in zip(points, least):
            if found[0] < float("inf"):
                taken.setdefault((gpu, direction), []).append(found)
        for name, rows in [("all", sum(taken.values(), [])), *((" ".join(key), rows) for key, rows in taken.items())]:
            shown = []
            for label, values in zip(("CPU", "clock"), map(sorted, zip(*rows))):
                most = values[int(0.95 * len(values))]
                shown.append(f"{label} median {statistics.median(values):.2f}, 95th percentile {most:.2f}, worst {values[-1]:.2f}")
            print(f"{what}, {name}: {len(rows)} first choices, ms: " + "; ".join(shown), flush=True)
    blocks._closed_form_wastes.cache_clear()
    for variant in ("causal", "window"):
        started = time.thread_time()
        blocks.pays(spec(CORE[variant]), Problem((2, 16), 2048, 2048, 64, 64, "bfloat16", "bfloat16"))
        taken = (time.thread_time() - started) * 1e3
        print(f"does a run-time summary pay, {variant}: {taken:.0f} ms of CPU once for a mask and lengths (2048 at most)")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.compile_time", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--model", choices=("gpt2", "llama"), default="gpt2")
    parser.add_argument("--no-inductor", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--plans", action="store_true")
    parser.add_argument("--one", nargs=2, metavar=("BACKEND", "MODE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(one(*args.one))
        return
    if args.whole:
        gpt2()
        return
    if args.plans:
        plans()
        return
    stages(args.model, 2, False)  # imports and first use
    rewrite = stages(args.model, args.layers, args.profile)
    if not args.no_inductor:
        alone = whole(args.model, args.layers, "inductor")
        ours = whole(args.model, args.layers, "flashfx")
        print(f"  Inductor alone {alone:.1f} s, with FlashFX {ours:.1f} s; the rewrite is {100 * rewrite / alone:.1f} % of Inductor's compile time")


if __name__ == "__main__":
    main()
