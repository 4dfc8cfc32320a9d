"""Speed on a GPU against peers in the same run: a GPT-2 medium training step, attention alone against FlexAttention, and the host's
time for a launch.

    python -m tests.gpu.speed [gpt2] [attention] [launch] [--lengths 1024,4096,16384]
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


def gpt2(batch: int = 16, length: int = 1024) -> None:
    """GPT-2 medium, bf16 weights, dropout 0.1, forward and backward."""
    from transformers import GPT2Config, GPT2LMHeadModel
    print(f"GPT-2 medium training step, B{batch} N{length}, bf16, dropout 0.1 (ms, peak GiB)")
    for attn, backend in (("eager", None), ("eager", "inductor"), ("sdpa", "inductor"), ("eager", "flashfx"), ("sdpa", "flashfx")):
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
        torch.manual_seed(0)
        config = GPT2Config(n_embd=1024, n_layer=24, n_head=16, attn_implementation=attn)
        model = GPT2LMHeadModel(config).cuda().bfloat16().train()
        model.loss_type = "ForCausalLM"
        ids = torch.randint(0, 50257, (batch, length), device="cuda")
        fn = model if backend is None else torch.compile(model, backend=backend)

        def step():
            model.zero_grad(set_to_none=True)
            fn(input_ids=ids, labels=ids).loss.backward()

        step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        ms = median_ms(step, 10)
        print(f"  {attn:<6} attention, {backend or 'eager':<9} {ms:8.2f} ms  {torch.cuda.max_memory_allocated() / 2**30:6.2f} GiB   [{clocks()}]", flush=True)
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


def attention(lengths: list[int], sizes: list[int]) -> None:
    """16k tokens, hidden size 2048, bf16; TFLOP/s as in FlashAttention-2, section 4.1."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    flex = torch.compile(flex_attention, dynamic=False)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    print(f"bf16 8192^3 matrix product: {2 * 8192**3 / median_ms(lambda: a @ a, 20) / 1e9:.0f} TFLOP/s  [{clocks()}]")
    print("  d causal     N   flex fwd  ours fwd  ratio   flex f+b  ours f+b  ratio   (TFLOP/s)  host us of ours, fwd and f+b")

    def causal_attention(q, k, v):
        s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        rows, cols = torch.arange(q.shape[-2], device=q.device), torch.arange(k.shape[-2], device=q.device)
        return s.masked_fill(cols > rows[:, None], float("-inf")).softmax(-1) @ v

    def full_attention(q, k, v):
        return (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1) @ v

    for d in sizes:
        for causal in (False, True):
            for n in lengths:
                torch._dynamo.reset()
                b, h = 16384 // n, 2048 // d
                q, k, v, do = (torch.randn(b, h, n, d, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(4))
                do = do.detach()
                mask = create_block_mask(lambda b, h, i, j: j <= i, None, None, n, n, device="cuda") if causal else None
                ours = torch.compile(causal_attention if causal else full_attention, backend="flashfx")
                flops = 4 * b * h * n * n * d * (0.5 if causal else 1)
                row = []
                for fn in (lambda: flex(q, k, v, block_mask=mask), lambda: ours(q, k, v)):
                    with torch.no_grad():
                        forward = median_ms(fn, 30)

                    def both():
                        torch.autograd.grad(fn(), (q, k, v), do)
                    row.append((flops / forward / 1e9, 3.5 * flops / median_ms(both, 20) / 1e9))
                with torch.no_grad():
                    host = host_us(lambda: ours(q, k, v))
                (ff, fb), (of, ob) = row
                print(f"{d:>3} {'yes' if causal else 'no':<6}{n:>6}   {ff:8.0f}  {of:8.0f}  {of / ff:5.2f}   {fb:8.0f}  {ob:8.0f}  {ob / fb:5.2f}"
                      f"                {host:6.0f} {host_us(both):6.0f}", flush=True)
    print(f"[{clocks()}]")


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
        forward = lambda: op.attention(q, k, v, aux, None, [], spec, None, None)
        out, lse = forward()
        backward = lambda: op.attention_backward(out, None, q, k, v, aux, None, out, lse, [], spec, [True] * (3 + len(aux)), None, None)
        with torch.no_grad():
            backward(), forward(), backward()
            print(f"  {name:<28} {host_us(forward, 300):7.1f}  {host_us(backward, 300):8.1f}", flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["gpt2", "attention", "launch"])
    parser.add_argument("--lengths", default="1024,4096,16384")
    parser.add_argument("--sizes", default="64,128", help="head sizes")
    options = parser.parse_args(argv)
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    if "gpt2" in options.what:
        gpt2()
    if "attention" in options.what:
        attention(*([int(n) for n in given.split(",")] for given in (options.lengths, options.sizes)))
    if "launch" in options.what:
        launch()
    return 0


if __name__ == "__main__":
    sys.exit(main())
