"""Unmodified HuggingFace models at real widths on a GPU: sites fused, errors against the budget, time and peak memory.

    python -m tests.gpu.models [--layers 2] [--inner aot_eager] [names…]

Random weights. Errors are relative norms against the model in float64, of the outputs and of every parameter's gradient; the
ratio is ours to eager's in the same dtype, worst over all tensors, and must stay at or below 2 (plus rounding of the dtype).
"""
from __future__ import annotations

import argparse
import copy
import gc
import sys
import time

import torch
import transformers
from transformers import AutoModel

import flashfx

TEXT = dict(batch=4, length=1000, pad=250)


def _config(name: str, layers: int, dropout: float):
    C = transformers
    drop = dict(attention_dropout=dropout)
    return {
        "gpt2": lambda: C.GPT2Config(n_layer=layers, attn_pdrop=dropout, resid_pdrop=0.0, embd_pdrop=0.0),
        "bert": lambda: C.BertConfig(num_hidden_layers=layers, max_position_embeddings=1024, attention_probs_dropout_prob=dropout,
                                     hidden_dropout_prob=0.0),
        "llama": lambda: C.LlamaConfig(hidden_size=2048, intermediate_size=4096, num_hidden_layers=layers, num_attention_heads=32,
                                       num_key_value_heads=8, vocab_size=8192, **drop),
        "mistral": lambda: C.MistralConfig(hidden_size=2048, intermediate_size=4096, num_hidden_layers=layers, num_attention_heads=16,
                                           num_key_value_heads=4, vocab_size=8192, sliding_window=256, **drop),
        "t5": lambda: C.T5Config(d_model=768, d_ff=2048, num_layers=layers, num_heads=12, vocab_size=8192, dropout_rate=dropout),
        "bloom": lambda: C.BloomConfig(hidden_size=1024, n_layer=layers, n_head=16, vocab_size=8192, attention_dropout=dropout,
                                       hidden_dropout=0.0),
        "gemma2": lambda: C.Gemma2Config(hidden_size=1024, intermediate_size=4096, num_hidden_layers=layers, num_attention_heads=8,
                                         num_key_value_heads=4, head_dim=256, vocab_size=8192, sliding_window=512, **drop),
        "vit": lambda: C.ViTConfig(num_hidden_layers=layers, attention_probs_dropout_prob=dropout, hidden_dropout_prob=0.0),
        "speech_to_text": lambda: C.Speech2TextConfig(encoder_layers=layers, decoder_layers=layers, vocab_size=8192, dropout=0.0,
                                                      activation_dropout=0.0, encoder_layerdrop=0.0, decoder_layerdrop=0.0, **drop),
    }[name]()


NAMES = ("gpt2", "bert", "llama", "t5", "mistral", "bloom", "gemma2", "vit", "speech_to_text")


def inputs(name: str, padded: bool, device) -> dict:
    g = torch.Generator().manual_seed(0)
    if name == "vit":
        return {"pixel_values": torch.randn(16, 3, 224, 224, generator=g).to(device)}
    B, N = TEXT["batch"], TEXT["length"]
    mask = torch.ones(B, N, dtype=torch.long)
    if padded:
        mask[1:, N - TEXT["pad"]:] = 0
    if name == "speech_to_text":
        long = torch.ones(B, 2 * N, dtype=torch.long)
        long[1:, 2 * N - 2 * TEXT["pad"]:] = 0
        return {"input_features": torch.randn(B, 2 * N, 80, generator=g).to(device), "attention_mask": long.to(device),
                "decoder_input_ids": torch.randint(8, 8000, (B, 200), generator=g).to(device)}
    out = {"input_ids": torch.randint(8, 8000, (B, N), generator=g)}
    if padded:
        out["attention_mask"] = mask
    if name == "t5":
        out["decoder_input_ids"] = torch.randint(8, 8000, (B, 300), generator=g)
    return {k: v.to(device) for k, v in out.items()} | ({"use_cache": False} if name not in ("bert",) else {})


def run(model, batch) -> dict[str, torch.Tensor]:
    torch.manual_seed(11)
    model.zero_grad()
    floats = {k: v.to(next(model.parameters()).dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in batch.items()}
    out = model(**floats)[0]
    weight = torch.linspace(-1, 1, out.shape[-1], device=out.device, dtype=out.dtype)
    if torch.is_grad_enabled():
        (out * weight).mean().backward()
    return {"output": out.detach(), **{n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}}


def relative(a: torch.Tensor, exact: torch.Tensor) -> float:
    return float((a.double() - exact).norm() / exact.norm().clamp(min=1e-30))


def timed(model, batch) -> tuple[float, float]:
    for _ in range(3):
        run(model, batch)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(5):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run(model, batch)
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return sorted(times)[2], torch.cuda.max_memory_allocated() / 2 ** 30


def compare(name: str, attn: str, train: bool, padded: bool, options, device) -> bool:
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    model = AutoModel.from_config(_config(name, options.layers, 0.0), attn_implementation=attn).to(device, torch.bfloat16).train(train)
    batch = inputs(name, padded, device)
    context = torch.enable_grad() if train else torch.no_grad()
    with context:
        report = flashfx.explain(model, **{k: v.bfloat16() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in batch.items()})
        exact = run(copy.deepcopy(model).double(), batch)
        eager = run(model, batch)
        compiled = torch.compile(model, backend="flashfx", options={"inner": options.inner})
        start = time.perf_counter()
        ours = {n.removeprefix("_orig_mod."): t for n, t in run(compiled, batch).items()}
        seconds = time.perf_counter() - start
        worst, where = 0.0, ""
        for n, e in exact.items():
            a, b = relative(ours[n], e), relative(eager[n], e)
            ratio = a / (b + torch.finfo(torch.bfloat16).eps / 4)
            if not ratio <= worst:
                worst, where = ratio, n
        (t_eager, m_eager), (t_ours, m_ours) = timed(model, batch), timed(compiled, batch)
    good = worst <= 2 and report.fused == len(report) > 0
    refused = "; ".join(sorted({s.refusal.reason for s in report if s.refusal}))
    print(f"{name:<15}{attn:<6}{'train' if train else 'eval':<6}{'padded' if padded else '':<7}{report.fused:>3}/{len(report):<3} "
          f"{relative(eager['output'], exact['output']):.1e} {relative(ours['output'], exact['output']):.1e}  {worst:5.2f} "
          f"{t_eager:8.2f} {t_ours:8.2f} {m_eager:7.2f} {m_ours:7.2f} {seconds:5.0f}s  {'ok' if good else f'FAILED at {where}'} {refused}", flush=True)
    return good


def dropped(name: str, options, device) -> bool:
    """Dropout 0.1: the loss is finite and the same seed gives the same result."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = AutoModel.from_config(_config(name, options.layers, 0.1), attn_implementation="eager").to(device, torch.bfloat16).train()
    batch = inputs(name, False, device)
    compiled = torch.compile(model, backend="flashfx", options={"inner": options.inner})
    a, b = run(compiled, batch), run(compiled, batch)
    good = bool(a["output"].isfinite().all()) and torch.equal(a["output"], b["output"])
    print(f"{name:<15}eager train dropout 0.1: finite and repeatable: {'ok' if good else 'FAILED'}", flush=True)
    return good


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--inner", default="aot_eager")
    options = parser.parse_args(argv)
    transformers.logging.set_verbosity_error()
    device = torch.device("cuda")
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "transformers", transformers.__version__)
    print("model          attn  mode  mask   sites   eager    ours   ratio  ms eager    ours  GiB eager  ours compile")
    good = True
    for name in options.names or NAMES:
        for attn in ("eager", "sdpa"):
            for train, padded in ((False, False), (True, True)):
                try:
                    good &= compare(name, attn, train, padded and name != "vit", options, device)
                except ValueError as error:
                    if "support" not in str(error):
                        raise
                    print(f"{name:<15}{attn:<6}not offered by transformers", flush=True)
                    break
        good &= dropped(name, options, device)
    print("ALL OK" if good else "SOME FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
