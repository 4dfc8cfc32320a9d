"""Dropout's random bits, defined once: Philox-4x32 with 7 rounds (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC 2011; 7 rounds pass BigCrush), counted by position, so that every schedule, tile and pass sees the same bits.

Element (z, i, j), z being the flattened batch index, is kept iff word w of

    philox(counter = (j without bit 3, i without bit 3, z, 0), key = seed),   w = 2 * bit3(i) + bit3(j)

is at least `threshold(p)`. The four words of one counter thus serve elements 8 rows and 8 columns apart, which one
thread holds together in the accumulator layout of the tensor cores.
"""
from __future__ import annotations

import torch

ROUNDS = 7
_MASK = 0xFFFFFFFF


def threshold(p: float) -> int:
    """Words below this are dropped: p as a fraction of 2**32."""
    return min(round(p * 2.0 ** 32), _MASK)


def _mulhilo(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    product = b * a  # 64-bit, wraps: both halves are right after masking
    return (product >> 32) & _MASK, product & _MASK


def philox(seed: int, c0: torch.Tensor, c1: torch.Tensor, c2: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The four 32-bit words of each counter, as int64 tensors in [0, 2**32)."""
    c0, c1, c2 = torch.broadcast_tensors(c0.long(), c1.long(), c2.long())
    c3 = torch.zeros_like(c0)
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(ROUNDS):
        hi_a, lo_a = _mulhilo(0xD2511F53, c0)
        hi_b, lo_b = _mulhilo(0xCD9E8D57, c2)
        c0, c1, c2, c3 = hi_b ^ c1 ^ k0, lo_b, hi_a ^ c3 ^ k1, lo_a
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def keep_mask(seed: int, z: torch.Tensor, i: torch.Tensor, j: torch.Tensor, p: float) -> torch.Tensor:
    """True where the weight is kept; z, i, j broadcast together."""
    words = philox(seed, j & ~8, i & ~8, z)
    w = ((i >> 3 & 1) * 2 + (j >> 3 & 1))
    word = torch.where(w == 0, words[0], torch.where(w == 1, words[1], torch.where(w == 2, words[2], words[3])))
    return word >= threshold(p)
