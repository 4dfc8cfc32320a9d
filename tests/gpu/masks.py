"""Masks that only the data decide, on a GPU: time against FlexAttention with the same mask, in the same run.

    python -m tests.gpu.masks [documents] [padding] [blocks] [--length 8192]

bf16, head size 64, 16 heads. Both sides get the mask's summary once for many layers (FlexAttention's BlockMask, our flashfx::block_lists), so
it is timed apart. FlexAttention gets its mask as a function; we find ours in the model's plain PyTorch.
"""
from __future__ import annotations

import argparse

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import flashfx  # noqa: F401  (registers the backend in a plain checkout)
from flashfx.codegen import blocks
from flashfx.spec import AttentionSpec

from .speed import clocks, median_ms


def attention(q, k, v, visible):
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return scores.masked_fill(~visible, torch.finfo(q.dtype).min).softmax(-1) @ v


def documents(q, k, v, doc):
    at = torch.arange(q.shape[-2], device=q.device)
    return attention(q, k, v, (doc[:, None, :, None] == doc[:, None, None, :]) & (at <= at[:, None]))


def padding(q, k, v, pad):
    return attention(q, k, v, pad[:, None, None, :])


def block_mask(q, k, v, seen):
    at = torch.arange(q.shape[-2], device=q.device) // 128
    return attention(q, k, v, seen[at[:, None], at])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["documents", "padding", "blocks"])
    parser.add_argument("--length", type=int, default=8192)
    options = parser.parse_args()
    N = options.length
    B, H, D = 2, 16, 64
    g = torch.Generator("cuda").manual_seed(0)
    doc = torch.randint(0, N, (B, 15), device="cuda", generator=g).sort(-1).values
    doc = (torch.arange(N, device="cuda") >= doc[..., None]).sum(1)
    pad = torch.arange(N, device="cuda") < torch.tensor([[N], [N * 5 // 9]], device="cuda")
    seen = (torch.rand(N // 128, N // 128, device="cuda", generator=g) < 0.1) | torch.eye(N // 128, dtype=torch.bool, device="cuda")
    cases = {
        "documents": (documents, doc, lambda b, h, i, j: (doc[b, i] == doc[b, j]) & (j <= i), "(doc[b, i] == doc[b, j]) & (j <= i)", "doc: int[2]"),
        "padding": (padding, pad, lambda b, h, i, j: pad[b, j], "pad[b, j]", "pad: bool[2]"),
        "blocks": (block_mask, seen, lambda b, h, i, j: seen[i // 128, j // 128], "seen[i // 128, j // 128]", "seen: bool[2]"),
    }
    q, k, v, do = (torch.randn(B, H, N, D, device="cuda", dtype=torch.bfloat16, generator=g).requires_grad_() for _ in range(4))
    do = do.detach()
    flex, create = torch.compile(flex_attention, dynamic=False), torch.compile(create_block_mask, dynamic=False)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, B {B}, H {H}, N {N}, D {D}, bf16  [{clocks()}]")
    for name in options.what:
        fn, given, mod, text, what = cases[name]
        torch._dynamo.reset()
        ours = torch.compile(fn, backend="flashfx")
        spec = AttentionSpec.parse(f"attention[b, h, i, j]\n given {what}\n qk = q[b, h, i] . k[b, h, j]\n score = qk * 0.125\n where {text}\n empty mean\n"
                                   " out = softmax_j(score) . v[b, h, j]")
        make = lambda: blocks.lists_for(spec, [given], [B, H], q, k)
        kinds = blocks.kinds_of(make()[0])
        print(f"{name}: {(kinds > 0).float().mean():.0%} of the blocks visible, {(kinds == 2).float().mean():.0%} fully; ms", flush=True)
        result = timed("FlashFX", lambda: ours(q, k, v, given), (q, k, v), do, make)
        mask = create(mod, B, None, N, N, device="cuda")
        expected = timed("FlexAttention", lambda: flex(q, k, v, block_mask=mask), (q, k, v), do, lambda: create(mod, B, None, N, N, device="cuda"))
        print(f"  difference {((result - expected).float().norm() / expected.float().norm()).item():.1e}  [{clocks()}]", flush=True)


def timed(name: str, call, operands, do, make) -> torch.Tensor:
    with torch.no_grad():
        print(f"  {name:<14} forward {median_ms(call, 20):8.3f}", end="", flush=True)
        result = call()
    print(f"   with backward {median_ms(lambda: torch.autograd.grad(call(), operands, do), 10):8.3f}", end="", flush=True)
    print(f"   its mask {median_ms(make, 10):7.3f}", flush=True)
    return result


if __name__ == "__main__":
    main()
