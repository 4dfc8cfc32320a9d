"""Add a schedule: another order of the same arithmetic, checked by `flashfx.verify` against the model's own calls.

    python examples/08_add_a_schedule.py

A schedule takes a spec and tensors and yields (out, lse); nothing about a model, a mask or a score function enters it. This one makes two passes
over the keys: the log-sum-exp first, then the output, so that no accumulator is rescaled. It takes the place of the tiled PyTorch schedule's
forward. A Triton schedule is a file in codegen/schedules that writes the same loop as text (forward.py is the one to read), and a line in
codegen/plan.py that says when it is preferred.

Output:
    agree: 1 rewritten site, 1 agree with their originals, 0 differ, 0 not compared; 0 left alone
    with a fault: out differs from its original by …
"""
from __future__ import annotations

from unittest.mock import patch

import torch

import flashfx
from flashfx.codegen import torch_tiled
from flashfx.reference import evaluate, index_grid

BLOCK = 32


def scores(spec, q, k, aux, sizes, start: int):
    """Masked scores of all queries and BLOCK keys, and no more than that."""
    keys = slice(start, min(start + BLOCK, k.shape[-2]))
    env = index_grid(spec, sizes, q.shape[-2], k.shape[-2], q.device, cols=keys)
    captured = dict(zip((a.name for a in spec.aux), aux))
    s = evaluate(spec.score, env, captured, q @ k[..., keys, :].mT, q.dtype)
    return s.masked_fill(~evaluate(spec.visible, env, captured, None, q.dtype), float("-inf")), keys


def two_passes(spec, q, k, v, aux, seed, sizes, fault: float = 0.0, **_):
    """(out, lse), as flashfx.codegen.launch.forward, for specs without dropout whose rows all see a key."""
    extents = list(sizes[: len(spec.axes)])
    lse = torch.full((*extents, q.shape[-2]), float("-inf"), dtype=torch.promote_types(q.dtype, torch.float32))
    for start in range(0, k.shape[-2], BLOCK):
        lse = torch.logaddexp(lse, scores(spec, q, k, aux, sizes, start)[0].logsumexp(-1))
    out = torch.zeros((*extents, q.shape[-2], v.shape[-1]), dtype=v.dtype)
    for start in range(0, k.shape[-2], BLOCK):
        s, keys = scores(spec, q, k, aux, sizes, start)
        out += (s - lse[..., None]).exp().to(v.dtype) @ v[..., keys, :]
    return out * (1 + fault), lse


def attention(q, k, v):
    at = torch.arange(q.shape[-2])
    return (q @ k.mT * 0.25 - 0.1 * (at[:, None] - at).abs()).masked_fill(at > at[:, None], float("-inf")).softmax(-1) @ v


def main() -> None:
    q, k, v = (torch.randn(2, 3, 100, 16, requires_grad=True) for _ in range(3))
    with patch.object(torch_tiled, "forward", two_passes):
        print(f"agree: {str(flashfx.verify(attention, q, k, v)).splitlines()[0].removeprefix('flashfx.verify: ')}")
    with patch.object(torch_tiled, "forward", lambda *a, **k: two_passes(*a, **k, fault=1e-6)):
        try:
            flashfx.verify(attention, q, k, v)
        except flashfx.VerifyError as error:
            print(f"with a fault: {str(error).splitlines()[0].split(': ', 2)[2].split(',')[0]}")


if __name__ == "__main__":
    main()
