"""Who is measured: each peer turns a workload into a callable of (q, k, v), or says why it cannot."""
from __future__ import annotations

from typing import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

from .variants import Shape, Variant

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class CannotRun(Exception):
    """The peer cannot say this workload, or is not installed."""


def flashfx(variant: Variant, shape: Shape, tensors) -> Attention:
    compiled = torch.compile(variant.attention, backend="flashfx", dynamic=False)
    return lambda q, k, v: compiled(q, k, v, **tensors)


def eager(variant: Variant, shape: Shape, tensors) -> Attention:
    return lambda q, k, v: variant.attention(q, k, v, **tensors)


def inductor(variant: Variant, shape: Shape, tensors) -> Attention:
    compiled = torch.compile(variant.attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, **tensors)


def flex(variant: Variant, shape: Shape, tensors) -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    if variant.flex is None:
        raise CannotRun("FlexAttention cannot say it")
    score_mod, mask_mod = variant.flex(tensors)
    batch = shape.batch if any("b" in (variant.dims or {}).get(name, "") for name in tensors) else None
    blocks = mask_mod and create_block_mask(mask_mod, batch, None, shape.length, shape.keys, device=shape.device)
    compiled = torch.compile(flex_attention, dynamic=False)
    options = {"score_mod": score_mod, "block_mask": blocks, "enable_gqa": shape.kv_heads != shape.heads}
    if variant.after is None:
        return lambda q, k, v: compiled(q, k, v, **options)
    return lambda q, k, v: variant.after(*compiled(q, k, v, **options, return_lse=True), tensors)


def sdpa(backend: str) -> Callable[[Variant, Shape, dict], Attention]:
    def make(variant: Variant, shape: Shape, tensors) -> Attention:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        if variant.sdpa is None:
            raise CannotRun("scaled_dot_product_attention cannot say it without an N x N tensor")
        options = variant.sdpa(tensors)

        def run(q, k, v):
            with sdpa_kernel(getattr(SDPBackend, backend)):
                return scaled_dot_product_attention(q, k, v, **options)
        return run
    return make


def flash_attn(module: str) -> Callable[[Variant, Shape, dict], Attention]:
    """The packages of Dao-AILab/flash-attention; they take (batch, length, heads, head size)."""
    def make(variant: Variant, shape: Shape, tensors) -> Attention:
        import importlib
        try:
            function = importlib.import_module(module).flash_attn_func
        except ImportError as error:
            raise CannotRun(f"not installed ({error})") from None
        if variant.flash is None:
            raise CannotRun(f"{module} cannot say it")
        options = variant.flash(tensors)

        def run(q, k, v):
            out = function(*(t.transpose(1, 2) for t in (q, k, v)), **options)
            return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)
        return run
    return make


PEERS: dict[str, Callable[[Variant, Shape, dict], Attention]] = {
    "flashfx": flashfx,
    "eager": eager,
    "inductor": inductor,
    "flex": flex,
    "flash": sdpa("FLASH_ATTENTION"),
    "cudnn": sdpa("CUDNN_ATTENTION"),
    "efficient": sdpa("EFFICIENT_ATTENTION"),
    "fa2": flash_attn("flash_attn"),
    "fa3": flash_attn("flash_attn_interface"),
    "fa4": flash_attn("flash_attn.cute"),
}
"""eager and inductor run the same plain PyTorch as flashfx; flash, cudnn and efficient are the backends of PyTorch's own SDPA."""
