"""GPT-2, unmodified, with its attention rewritten: the report, outputs and gradients against eager, and on a GPU time and memory.

    python examples/01_quickstart.py [--attn eager|sdpa] [--length 256] [--layers 12]

Output:
    flashfx: 12 attention sites, 12 fused, 0 left alone
    …
    [0..11] fused: attn_output
    …
    compiled in …
    relative error against float64, logits and 148 gradients: eager …, flashfx …, budget …
    OK
"""
from __future__ import annotations

import argparse
import copy
import shutil
import sys
import time

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel

import flashfx


def build(attn: str, length: int, layers: int, device: str) -> tuple[GPT2LMHeadModel, dict]:
    """GPT-2 small with random weights, and a batch whose second row is padded."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=layers, n_positions=max(length, 256), attn_implementation=attn, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
    model = GPT2LMHeadModel(config).to(device).train()
    model.loss_type = "ForCausalLM"
    ids = torch.randint(0, config.vocab_size, (2, length), device=device)
    mask = torch.ones_like(ids)
    mask[1, -length // 4:] = 0
    return model, {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def step(model, batch) -> dict[str, torch.Tensor]:
    """One forward and backward: the logits and the gradient of every parameter, by name."""
    model.zero_grad()
    out = model(**batch)
    out.loss.backward()
    gradients = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": out.logits.detach(), **gradients}


def error(found: dict, exact: dict) -> float:
    """The largest relative error (norm of the difference over the norm) among all tensors."""
    return max(float((found[n].double() - e).norm() / e.norm().clamp(min=1e-12)) for n, e in exact.items())


def measure(run, device: str) -> str:
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(10):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return f"{sorted(times)[5]:7.2f} ms, peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attn", default="eager", choices=("eager", "sdpa"))
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--layers", type=int, default=12)
    options = parser.parse_args(argv)
    transformers.logging.set_verbosity_error()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, batch = build(options.attn, options.length, options.layers, device)

    report = flashfx.explain(model, **batch)
    print(report, end="\n\n")

    # Inductor needs a C++ compiler on a CPU; without one the rewritten graph still runs
    inner = "inductor" if device == "cuda" or shutil.which("g++") or shutil.which("clang++") else "aot_eager"
    compiled = torch.compile(model, backend="flashfx", options={"inner": inner})
    print(f"compiling with inner={inner!r} …", flush=True)
    start = time.perf_counter()
    ours = step(compiled, batch)
    print(f"compiled in {time.perf_counter() - start:.0f} s")
    eager = step(model, batch)
    exact = step(copy.deepcopy(model).double(), batch)
    ours = {n.removeprefix("_orig_mod."): t for n, t in ours.items()}
    of_ours, of_eager = error(ours, exact), error(eager, exact)
    budget = 2 * of_eager + 4 * torch.finfo(torch.float32).eps
    good = of_ours <= budget and report.fused == len(report) == model.config.n_layer
    print(f"relative error against float64, logits and {len(exact) - 1} gradients: eager {of_eager:.1e}, flashfx {of_ours:.1e}, "
          f"budget {budget:.1e}")

    if device == "cuda":
        print(f"training step, eager    {measure(lambda: step(model, batch), device)}")
        print(f"training step, flashfx  {measure(lambda: step(compiled, batch), device)}")
    print("OK" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
