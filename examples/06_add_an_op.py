"""Add an op: one row says what PyTorch calls it, what it means, its Triton text and its derivative.

    python examples/06_add_an_op.py

Without the row `erfc` is a refusal that names it; with the row the score function is fused, forward and backward. A row that belongs to
FlashFX stands in flashfx/ops.py.

Output:
    before: erfc stands between the first product and the softmax
    after:  score = erfc(qk * 0.125)
    out                      float64   error …
    gradient of v            float64   error …
    gradient of k            float64   error …
    gradient of q            float64   error …
    in the kernel: raw = (1.0 - tl.erf((qk * 0.125)))
"""
from __future__ import annotations

import math

import torch

import flashfx
from flashfx.ops import BY_ATEN, OPS, Op


def attention(q, k, v):
    return torch.erfc(q @ k.transpose(-1, -2) * 0.125).softmax(-1) @ v


ERFC = Op("erfc", arity=1, aten=("erfc.default",), torch=torch.erfc, triton="(1.0 - tl.erf({x}))", evaluate=math.erfc,
          partials=("-1.1283791670955126 * exp(-(x * x))",), result="float", cost="mufu")


def main() -> None:
    q, k, v = (torch.randn(1, 2, 64, 64, requires_grad=True) for _ in range(3))
    print(f"before: {flashfx.explain(attention, q, k, v)[0].refusal.reason}")

    OPS[ERFC.name] = ERFC
    BY_ATEN.update({name: ERFC for name in ERFC.aten})
    try:
        site, = flashfx.explain(attention, q, k, v)
        print(f"after:  score = {site.spec.score}")
        for checked in flashfx.verify(attention, q, k, v).regions[0].checked:
            if checked.dtype == "float64":
                print(f"{checked.what:<24} {checked.dtype:<9} error {checked.error:.0e}")
        print("in the kernel:", next(line.strip() for line in site.kernel.splitlines() if "tl.erf" in line))
    finally:
        del OPS[ERFC.name]
        for name in ERFC.aten:
            del BY_ATEN[name]


if __name__ == "__main__":
    main()
