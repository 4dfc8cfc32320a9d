"""Speed on a GPU: a GPT-2 medium training step against peers in the same run, and the host's time for a launch. Attention alone is measured
by `python -m flashfx bench attention`.

    python -m tests.gpu.speed [gpt2] [launch]
"""
from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import time

import torch

import flashfx  # noqa: F401  (registers the backend in a plain checkout)


def clocks() -> str:
    query = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.draw", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True).stdout.strip()


def median_ms(run, repeats: int) -> float:
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        times.append((start, stop))
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in times)[repeats // 2]


CASES = ("eager:none", "eager:inductor", "sdpa:inductor", "eager:flashfx", "sdpa:flashfx")


def gpt2(cases=CASES, batch: int = 16, length: int = 1024) -> None:
    """GPT-2 medium, bf16 weights, dropout 0.1, forward and backward."""
    from transformers import GPT2Config, GPT2LMHeadModel
    print(f"GPT-2 medium training step, B{batch} N{length}, bf16, dropout 0.1 (ms, peak GiB)")
    for attn, backend in (case.split(":") for case in cases):
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
        torch.manual_seed(0)
        config = GPT2Config(n_embd=1024, n_layer=24, n_head=16, attn_implementation=attn)
        model = GPT2LMHeadModel(config).cuda().bfloat16().train()
        model.loss_type = "ForCausalLM"
        ids = torch.randint(0, 50257, (batch, length), device="cuda")
        fn = model if backend == "none" else torch.compile(model, backend=backend)

        def step():
            model.zero_grad(set_to_none=True)
            fn(input_ids=ids, labels=ids).loss.backward()

        step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        ms = median_ms(step, 10)
        print(f"  {attn:<6} attention, {backend:<9} {ms:8.2f} ms  {torch.cuda.max_memory_allocated() / 2**30:6.2f} GiB   [{clocks()}]", flush=True)
        del model, fn


def host_us(run, repeats: int = 50) -> float:
    """Host time of a call, without waiting for the device."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return spent / repeats * 1e6


def launch() -> None:
    """Host time of the two ops as compiled code calls them: tensors with strides, a bias, grouped queries."""
    from flashfx import op
    text = """\
attention[b, h, g, i, j]
  given   bias: float[3]
  qk    = q[b, h, g, i] . k[b, h, j]
  score = qk * 0.125 + bias[h, i, j]
  where   j <= i
  empty   nan
  out   = softmax_j(score) . v[b, h, j]"""
    plain = "\n".join(line for line in text.splitlines() if "given" not in line).replace(" + bias[h, i, j]", "")
    make = lambda *shape: torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    q, k, v, bias = make(2, 4, 2, 128, 64), make(2, 4, 1, 128, 64), make(2, 4, 1, 128, 64), make(4, 128, 128)
    print("host time of a call (us)       forward  backward")
    for name, spec, aux in (("causal, grouped queries", plain, []), ("bias with gradient, causal", text, [bias])):
        forward = lambda: op.attention(q, k, v, aux, None, [], spec, None, None, False, 1)
        out, lse = forward()
        backward = lambda: op.attention_backward(out, None, q, k, v, aux, None, out, lse, [], spec, [True] * (3 + len(aux)), None, None, False)
        with torch.no_grad():
            backward(), forward(), backward()
            print(f"  {name:<28} {host_us(forward, 300):7.1f}  {host_us(backward, 300):8.1f}", flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["gpt2", "launch"])
    parser.add_argument("--cases", default=",".join(CASES), help="attention:compiler, comma-separated")
    options = parser.parse_args(argv)
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    if "gpt2" in options.what:
        gpt2(options.cases.split(","))
    if "launch" in options.what:
        launch()
    return 0


if __name__ == "__main__":
    sys.exit(main())
