"""Why a site is left alone, and its cure: the refusal names the reader of the weights, and without it the site is fused.

    python examples/03_why_not.py

Output:
    flashfx: 1 attention site, 0 fused, 1 left alone
    plans are for the H100; without a GPU the tiled PyTorch schedule runs

    [0] left alone: matmul_1
      left alone (check): the attention weights are also read by max_1 (examples/03_why_not.py:42 in forward: self.sharpness = weights.max(-1).values.mean()) [node weights]
        at examples/03_why_not.py:40 in forward: weights = (q @ k.transpose(-1, -2) * 32 ** -0.5).softmax(-1)
        hint: do not return or store them, e.g. output_attentions=False
      matched a softmax between two matrix products
              the second product reads the softmax through views and casts only
              the softmax normalises over the 128 keys that the second product sums over
              the scores are computed element by element from the first product qk: qk * 0.1767766952966369
              nothing is masked
              q, k and v are views with batch, position and head-size dims
              sizes, dtypes and device are ones that the kernels take
              tiles fit the device
    without the statistic: 1 of 1 fused
"""
from __future__ import annotations

import torch

import flashfx


class Attention(torch.nn.Module):
    """Keeps a statistic of its weights, for which all M x N of them must exist."""

    def __init__(self, watch: bool):
        super().__init__()
        self.project = torch.nn.Linear(128, 3 * 128)
        self.watch, self.sharpness = watch, None

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, 4, 32)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2) * 32 ** -0.5).softmax(-1)
        if self.watch:
            self.sharpness = weights.max(-1).values.mean()
        return (weights @ v).transpose(1, 2).flatten(2)


def main() -> None:
    x = torch.randn(2, 128, 128)
    with torch.no_grad():
        print(flashfx.explain(Attention(watch=True), x))
        report = flashfx.explain(Attention(watch=False), x)
    print(f"without the statistic: {report.fused} of {len(report)} fused")


if __name__ == "__main__":
    main()
