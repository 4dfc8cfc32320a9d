"""A score function and a mask of one's own, written in plain PyTorch: nothing to register, nothing to learn.

    python examples/04_score_function.py

Scores are capped softly, distant keys are damped by a learned amount for each head, and tokens see their own document only, and a window of it.

Output:
    attention[b, h, i, j]
      given   bias: float[1]
      given   ids: int[2]
      qk    = q[b, h, i] . k[b, h, j]
      score = tanh(qk * 0.00625) * 20.0 - bias[h] * log1p(to_float(abs(i - j)))
      where   (abs(i - j) <= 64) & (ids[b, i] == ids[b, j])
      empty   nan
      out   = softmax_j(score) . v[b, h, j]
    flashfx.verify: 1 rewritten site, 1 agree with their originals, 0 differ, 0 not compared; 0 left alone
    gradient of the damping: …
"""
from __future__ import annotations

import torch

import flashfx


def attention(q, k, v, damping, document):
    scores = torch.tanh(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 / 20) * 20
    at = torch.arange(q.shape[-2], device=q.device)
    distance = (at[:, None] - at).abs()
    scores = scores - damping[:, None, None] * distance.float().log1p()
    visible = (document[:, None, :, None] == document[:, None, None, :]) & (distance <= 64)
    return scores.masked_fill(~visible, float("-inf")).softmax(-1) @ v


def main() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 192, 64, requires_grad=True) for _ in range(3))
    damping = torch.tensor([0.1, 0.2, 0.4, 0.8], requires_grad=True)
    document = (torch.arange(192) // 80).expand(2, 192)

    report = flashfx.explain(attention, q, k, v, damping, document)
    print(report[0].spec)
    print(str(flashfx.verify(attention, q, k, v, damping, document)).splitlines()[0])

    fast = torch.compile(attention, backend="flashfx", options={"inner": "aot_eager"})
    fast(q, k, v, damping, document).square().sum().backward()
    print(f"gradient of the damping: {', '.join(f'{g:.1f}' for g in damping.grad.tolist())}")


if __name__ == "__main__":
    main()
