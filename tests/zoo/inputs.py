"""Inputs of each modality; text gets a 2-D attention mask with right padding in row 1."""
from __future__ import annotations

import torch

from .shrink import B, S, S_DEC, VOCAB


def _ids(g, n=S, vocab=VOCAB, b=B):
    return torch.randint(8, min(vocab, VOCAB), (b, n), generator=g)


def _mask(n=S, b=B, pad=7):
    m = torch.ones(b, n, dtype=torch.long)
    m[1:, n - pad:] = 0
    return m


def in_text(cfg, g):
    return dict(input_ids=_ids(g), attention_mask=_mask())


def in_text_long(n):
    def f(cfg, g):
        return dict(input_ids=_ids(g, n), attention_mask=_mask(n))
    return f


def in_s2s(cfg, g):
    return dict(input_ids=_ids(g), attention_mask=_mask(), decoder_input_ids=_ids(g, S_DEC))


def in_s2s_long(n, nd=S_DEC):
    def f(cfg, g):
        return dict(input_ids=_ids(g, n), attention_mask=_mask(n), decoder_input_ids=_ids(g, nd))
    return f


def in_img(size=32, ch=3):
    def f(cfg, g):
        return dict(pixel_values=torch.randn(B, ch, size, size, generator=g))
    return f


def in_video(frames=4, size=32):
    def f(cfg, g):
        return dict(pixel_values=torch.randn(B, frames, 3, size, size, generator=g))
    return f


def in_wave(n=800):
    def f(cfg, g):
        return dict(input_values=torch.randn(B, n, generator=g), attention_mask=_mask(n, pad=n // 3))
    return f


def in_clip(cfg, g, size=32):
    return dict(input_ids=_ids(g), attention_mask=_mask(), pixel_values=torch.randn(B, 3, size, size, generator=g))


def in_bbox(cfg, g):
    x = torch.randint(0, 60, (B, S, 2), generator=g)
    return dict(input_ids=_ids(g), attention_mask=_mask(), bbox=torch.cat([x, x + 3], -1))


def extra(base, **kw):
    """base inputs plus tensors given as callables (g) -> tensor"""
    def f(cfg, g):
        d = base(cfg, g) if base else {}
        for k, v in kw.items():
            d[k] = v(g) if callable(v) else v
        return d
    return f


def rand(*shape):
    return lambda g: torch.randn(*shape, generator=g)
