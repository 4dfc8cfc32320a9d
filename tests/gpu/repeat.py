"""Repeated launches on a GPU give what the first launch gives, whatever calls come between.

    python -m tests.gpu.repeat
"""
from __future__ import annotations

import sys

import torch

import flashfx  # noqa: F401


def attention(q, k, v, pad, bias):
    s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + bias
    rows, cols = (torch.arange(n, device=q.device) for n in (q.shape[-2], k.shape[-2]))
    hidden = (cols > rows[:, None]) | ~pad[:, None, None, :]
    return torch.dropout(s.masked_fill(hidden, float("-inf")).softmax(-1), 0.0, False) @ v


def main() -> int:
    compiled = torch.compile(attention, backend="flashfx", dynamic=True)
    for n in (96, 200, 1000, 96, 130, 200, 1000, 96):
        for layout in ("bhnd", "bnhd"):
            torch.manual_seed(n)
            shape = (2, 4, n, 64) if layout == "bhnd" else (2, n, 4, 64)
            q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
            if layout == "bnhd":
                q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            bias = torch.randn(4, n, n, device="cuda", dtype=torch.bfloat16)
            leaves = [t.detach().requires_grad_() for t in (q, k, v, bias)]
            pad = torch.ones(2, n, dtype=torch.bool, device="cuda")
            pad[1, n // 2:] = False
            exact = [t.detach().double().requires_grad_() for t in leaves]
            out, expected = compiled(*leaves[:3], pad, leaves[3]), attention(*exact[:3], pad, exact[3])
            found, wanted = (torch.autograd.grad(o.square().sum(), ls) for o, ls in ((out, leaves), (expected, exact)))
            for name, a, b in zip(("out", "q", "k", "v", "bias"), (out, *found), (expected, *wanted)):
                error = float((a.double() - b).norm() / b.norm())
                assert error < 0.02, f"N={n} {layout}: {name} is off by {error:.1e}"
    print("repeated launches: ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
