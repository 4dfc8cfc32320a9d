"""What is measured: attention functions in plain PyTorch, with what each peer needs to compute the same."""
from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Callable, Mapping

import torch

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """Queries (batch, heads, length, head_size), keys (batch, kv_heads, keys, head_size), values (batch, kv_heads, keys, v_head_size); as many keys as
    queries where `other_keys` is 0."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    head_size: int
    v_head_size: int
    dtype: torch.dtype
    device: torch.device
    other_keys: int = 0

    @property
    def keys(self) -> int:
        return self.other_keys or self.length

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)


@dataclass(frozen=True)
class Variant:
    """
    attention   plain PyTorch: (q, k, v, **tensors) -> out
    tensors     captured tensors of a shape, random
    dims        of each captured tensor: "b" batch, "h" head, "n" position, anything else its own
    visible     (shape, tensors) -> visible (query, key) pairs, mean over batch and heads; causal counts N^2 / 2, as FlashAttention-2, section 4.1
    flex        tensors -> (score_mod, mask_mod) of FlexAttention; None if it cannot say it
    sdpa        tensors -> arguments of scaled_dot_product_attention; None if it cannot say it
    flash       tensors -> arguments of flash-attn's functions; None if they cannot say it
    trained     captured tensors that get a gradient
    after       (out, log-sum-exp, tensors) -> out, for peers that return both
    plain       the variant of nothing but products and softmax that it is compared with: "causal", or "full"
    crosses     may there be more or fewer keys than queries?
    """

    about: str
    attention: Callable
    visible: Callable[[Shape, Tensors], float]
    tensors: Callable[[Shape], dict[str, torch.Tensor]] = lambda shape: {}
    dims: Mapping[str, str] = None
    flex: Callable | None = None
    sdpa: Callable | None = None
    flash: Callable | None = None
    trained: tuple[str, ...] = ()
    after: Callable | None = None
    random: bool = False
    kv_ratio: int = 1
    plain: str = "causal"
    crosses: bool = False


def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5


def positions(s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(s.shape[-2], device=s.device)[:, None], torch.arange(s.shape[-1], device=s.device)


def hidden(s: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    return s.masked_fill(where, float("-inf"))


def full(q, k, v):
    return scores(q, k).softmax(-1) @ v


def causal(q, k, v):
    s = scores(q, k)
    i, j = positions(s)
    return hidden(s, j > i).softmax(-1) @ v


def grouped(q, k, v):
    groups = q.shape[1] // k.shape[1]
    return causal(q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))


def padding(q, k, v, lengths):
    s = scores(q, k)
    return hidden(s, positions(s)[1] >= lengths[:, None, None, None]).softmax(-1) @ v


def documents(q, k, v, document):
    s = scores(q, k)
    i, j = positions(s)
    return hidden(s, (j > i) | (document[:, None, :, None] != document[:, None, None, :])).softmax(-1) @ v


WINDOW, SOFTCAP, DROPOUT, BUCKETS, FARTHEST = 1024, 30.0, 0.1, 32, 128


def window(q, k, v):
    s = scores(q, k)
    i, j = positions(s)
    return hidden(s, (j > i) | (i - j >= WINDOW)).softmax(-1) @ v


def prefix(q, k, v, prefix):
    s = scores(q, k)
    i, j = positions(s)
    return hidden(s, (j > i) & (j >= prefix[:, None, None, None])).softmax(-1) @ v


def alibi(q, k, v, slope):
    s = scores(q, k)
    i, j = positions(s)
    return hidden(s + slope[:, None, None] * (j - i), j > i).softmax(-1) @ v


def softcap(q, k, v):
    s = torch.tanh(scores(q, k) / SOFTCAP) * SOFTCAP
    i, j = positions(s)
    return hidden(s, j > i).softmax(-1) @ v


def biased(q, k, v, bias):
    return (scores(q, k) + bias).softmax(-1) @ v


def bucket(i, j):
    """T5's relative positions, both directions: half of the buckets exact, half logarithmic up to FARTHEST (arXiv:1910.10683, section 2.1)."""
    half, exact = BUCKETS // 2, BUCKETS // 4
    distance = (j - i).abs()
    far = exact + (torch.log(distance.clamp(min=1).float() / exact) / math.log(FARTHEST / exact) * (half - exact)).to(torch.int64)
    return torch.where(j > i, half, 0) + torch.where(distance < exact, distance, far.clamp(max=half - 1))


def t5(q, k, v, table):
    s = scores(q, k)
    return (s + table[bucket(*positions(s))].permute(2, 0, 1)).softmax(-1) @ v


def sinks(q, k, v, sink):
    s = scores(q, k)
    i, j = positions(s)
    s = torch.cat([hidden(s, j > i), sink[:, None, None].expand(s.shape[0], -1, s.shape[2], 1)], -1)
    return s.softmax(-1)[..., :-1] @ v


def dropout(q, k, v):
    s = scores(q, k)
    i, j = positions(s)
    return torch.nn.functional.dropout(hidden(s, j > i).softmax(-1), DROPOUT) @ v


def _some_documents(shape: Shape) -> dict[str, torch.Tensor]:
    at = torch.arange(shape.length, device=shape.device)
    return {"document": torch.stack([(at + 137 * b) // 1000 for b in range(shape.batch)])}


def _document_pairs(shape: Shape, tensors: Tensors) -> float:
    sizes = [row.unique(return_counts=True)[1].double() for row in tensors["document"]]
    return sum(float((n * n).sum()) / 2 for n in sizes) / len(sizes)


def _lengths(shape: Shape, low: float, high: float) -> torch.Tensor:
    return torch.linspace(low * shape.keys, high * shape.keys, shape.batch, device=shape.device).long()


def _half(shape: Shape, tensors: Tensors) -> float:
    return shape.length ** 2 / 2


def _all(shape: Shape, tensors: Tensors) -> float:
    return shape.length * shape.keys


def _after_sinks(out, lse, tensors):
    return out * torch.sigmoid(lse - tensors["sink"][:, None])[..., None].to(out.dtype)


def _is_causal(b, h, i, j):
    return j <= i


VARIANTS: dict[str, Variant] = {
    "full": Variant("every key", full, _all, flex=lambda t: (None, None), sdpa=lambda t: {}, flash=lambda t: {}, plain="full", crosses=True),
    "causal": Variant("keys up to the query", causal, _half, flex=lambda t: (None, _is_causal), sdpa=lambda t: {"is_causal": True},
                      flash=lambda t: {"causal": True}),
    "gqa": Variant("causal, eight queries share a key", grouped, _half, flex=lambda t: (None, _is_causal), kv_ratio=8,
                   sdpa=lambda t: {"is_causal": True, "enable_gqa": True}, flash=lambda t: {"causal": True}),
    "padding": Variant("lengths from half to all", padding, lambda s, t: s.length * float(t["lengths"].double().mean()),
                       lambda s: {"lengths": _lengths(s, 0.5, 1.0) if s.batch > 1 else _lengths(s, 0.75, 0.75)}, {"lengths": "b"},
                       flex=lambda t: (None, lambda b, h, i, j: j < t["lengths"][b]), plain="full", crosses=True),
    "documents": Variant("packed documents of 1000, causal", documents, _document_pairs, _some_documents, {"document": "bn"},
                         flex=lambda t: (None, lambda b, h, i, j: (j <= i) & (t["document"][b, i] == t["document"][b, j]))),
    "window": Variant(f"the last {WINDOW} keys", window,
                      lambda s, t: s.length * min(WINDOW, s.length) - min(WINDOW, s.length) ** 2 / 2,
                      flex=lambda t: (None, lambda b, h, i, j: (j <= i) & (i - j < WINDOW)),
                      flash=lambda t: {"causal": True, "window_size": (WINDOW - 1, 0)}),
    "prefix": Variant("causal, but a prefix of a quarter sees itself", prefix,
                      lambda s, t: (s.length ** 2 + float((t["prefix"].double() ** 2).mean())) / 2,
                      lambda s: {"prefix": _lengths(s, 0.25, 0.25)}, {"prefix": "b"},
                      flex=lambda t: (None, lambda b, h, i, j: (j <= i) | (j < t["prefix"][b]))),
    "alibi": Variant("a slope a head, causal", alibi, _half,
                     lambda s: {"slope": torch.logspace(-1, -8, s.heads, 2.0, device=s.device, dtype=torch.float32)}, {"slope": "h"},
                     flex=lambda t: (lambda s, b, h, i, j: s + t["slope"][h] * (j - i), _is_causal),
                     flash=lambda t: {"causal": True, "alibi_slopes": t["slope"]}),
    "softcap": Variant(f"tanh at {SOFTCAP:g}, causal", softcap, _half,
                       flex=lambda t: (lambda s, b, h, i, j: torch.tanh(s / SOFTCAP) * SOFTCAP, _is_causal),
                       flash=lambda t: {"causal": True, "softcap": SOFTCAP}),
    "mask": Variant("an additive (B, H, N, N) tensor", biased, _all, lambda s: {"bias": s.randn(s.batch, s.heads, s.length, s.keys)},
                    {"bias": "bhnn"}, flex=lambda t: (lambda s, b, h, i, j: s + t["bias"][b, h, i, j], None),
                    sdpa=lambda t: {"attn_mask": t["bias"]}, plain="full", crosses=True),
    "bias": Variant("a trained (1, H, N, N) bias", biased, _all, lambda s: {"bias": s.randn(1, s.heads, s.length, s.keys)}, {"bias": "1hnn"},
                    flex=lambda t: (lambda s, b, h, i, j: s + t["bias"][0, h, i, j], None), sdpa=lambda t: {"attn_mask": t["bias"]},
                    trained=("bias",), plain="full", crosses=True),
    "t5": Variant(f"a trained table of {BUCKETS} buckets a head", t5, _all, lambda s: {"table": s.randn(BUCKETS, s.heads)}, {"table": "th"},
                  flex=lambda t: (lambda s, b, h, i, j: s + t["table"][bucket(i, j), h], None), trained=("table",), plain="full"),
    "sinks": Variant("a trained sink a head, causal", sinks, _half, lambda s: {"sink": s.randn(s.heads)}, {"sink": "h"},
                     flex=lambda t: (None, _is_causal), trained=("sink",), after=_after_sinks),
    "dropout": Variant(f"dropout {DROPOUT:g}, causal", dropout, _half, sdpa=lambda t: {"is_causal": True, "dropout_p": DROPOUT},
                       flash=lambda t: {"causal": True, "dropout_p": DROPOUT}, random=True),
}


def plain_workload(name: str, shape: Shape) -> tuple[str, Shape]:
    """Plain attention with as many tokens and as many visible keys for each query: the same products, without what the variant adds to them."""
    variant = VARIANTS[name]
    keys = variant.visible(shape, variant.tensors(shape)) / shape.length
    if shape.other_keys:
        return variant.plain, replace(shape, other_keys=max(1, round(keys)), kv_heads=shape.heads)
    length = max(1, round(2 * keys if variant.plain == "causal" else keys))
    return variant.plain, replace(shape, length=length, kv_heads=shape.heads, batch=max(1, round(shape.batch * shape.length / length)))
