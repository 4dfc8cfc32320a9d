"""Dropout's random bits, defined once: Philox-4x32 with 7 rounds (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC 2011; 7 rounds pass BigCrush), counted by position, so that every schedule, tile and pass sees the same bits.

Element (z, i, j), z being the flattened batch index, looks at word w = 2 * (bit0(i) xor bit4(j)) + bit3(j) of

    philox(counter = (j without bits 0 and 3, i without bits 0 and 3, z, 0), key = seed)

A half of that word, 15 of its 16 bits, decides wherever 15 bits say the rate well: the lower half where j is even, the upper one
where it is odd. Two rows share a half, and the one with bit 3 of i set reads its bytes in the other order: its high byte, which mostly
decides, is the other's low byte. Each drops at its exact rate; the two decisions correlate by no more than `CORRELATION`. One counter
thus serves 16 elements, which two neighbours hold together in the accumulator layout of the tensor cores, whether rows or keys run
along its rows; half of the words are the neighbour's, where rows do always the upper two (hence the xor). Other rates compare the whole
word w = 2 * bit3(i) + bit3(j), of a counter (j without bit 3, i without bit 3, z, 0). An element is kept iff its bits are at least
`threshold(p)`.
"""
from __future__ import annotations

import torch

ROUNDS = 7
_MASK = 0xFFFFFFFF
HALF_BITS = 15
"""Of a half: read as float16 those order like integers, so that Hopper compares two at once."""
CORRELATION = 0.01
"""At most, between the decisions of two rows that share a half (0.0035 at p = 0.1): a low byte counts where the 7 bits above it equal the threshold's."""

KEEP_TILE = f'''@triton.jit
def either(a, b):
    """a and b side by side along a new last axis. `tl.join` beside bytes of a mask looks like 4-bit integers
    to Triton 3.6 and 3.7: operands of products are laid out by 32 elements, and products over 16 come out wrong."""
    return tl.where(tl.arange(0, 2) == 0, tl.expand_dims(a, -1), tl.expand_dims(b, -1))


@triton.jit
def swapped_bytes(word):
    """The bytes of each half in the other order."""
    return ((word & 0xFF00FF) << 8) | ((word >> 8) & 0xFF00FF)


@triton.jit
def keep_tile(seed, z, i0, j0, THRESHOLD: tl.constexpr, NARROW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Dropout's decisions for rows i0… and columns j0… of batch index z: one Philox call for 4 elements (+0 and +8),
    or for 8 where NARROW bits suffice (columns +1 too; the same call for the next or last row, by other threads)."""
    r = tl.arange(0, ROWS // 2)
    PIECE: tl.constexpr = 4 if NARROW else 8
    c = tl.arange(0, COLUMNS // 16 * PIECE)
    i = (i0 + r // 8 * 16 + r % 8).to(tl.uint32)[:, None]
    j = (j0 + c // PIECE * 16 + c % PIECE * (8 // PIECE)).to(tl.uint32)[None, :]
    z = (z + tl.zeros([1, 1], tl.int32)).to(tl.uint32)
    odd = i & 1 if NARROW else i * 0
    w0, w1, w2, w3 = tl.philox(seed, j, i - odd, z, tl.zeros([1, 1], tl.uint32), {ROUNDS})
    if NARROW:
        upper = (odd ^ (j >> 4 & 1)) != 0
        near = either(tl.where(upper, w2, w0), tl.where(upper, w3, w1))
        far = swapped_bytes(near)
    else:
        near, far = either(w0, w1), either(w2, w3)
    words = either(near, far)                                      # (r, c, bit 3 of j, bit 3 of i)
    limit = tl.full([1, 1, 1, 1], THRESHOLD, tl.uint32)
    if NARROW:
        low, high = words & {2 ** HALF_BITS - 1}, (words >> 16) & {2 ** HALF_BITS - 1}
        keep = either(low >= limit, high >= limit)                 # (…, bit 0 of j)
        keep = keep.reshape(ROWS // 16, 8, COLUMNS // 16, 4, 2, 2, 2).permute(0, 5, 1, 2, 4, 3, 6)
    else:
        keep = (words >= limit).reshape(ROWS // 16, 8, COLUMNS // 16, 8, 2, 2).permute(0, 5, 1, 2, 4, 3)
    return keep.reshape(ROWS, COLUMNS)'''


def is_narrow(p: float) -> bool:
    """Do 15 bits say p and 1 - p within 2**-10 of their value? Thresholds end below float16's NaNs, at 0.969, and start where the 7 bits
    that mostly decide are not all 0: below, low bytes decide, and two rows that share a half would drop together."""
    steps = round(p * 2.0 ** HALF_BITS)
    return 0x100 <= steps <= 0x7C00 and abs(steps * 2.0 ** -HALF_BITS - p) <= 2.0 ** -10 * min(p, 1.0 - p)


def threshold(p: float) -> int:
    """Bits below this are dropped: p as a fraction of 2**15 or 2**32."""
    return round(p * 2.0 ** HALF_BITS) if is_narrow(p) else min(round(p * 2.0 ** 32), _MASK)


def kept_scale(p: float) -> float:
    """What kept weights are multiplied by: one over their share, which is that of the bits, so that no mean is off by their rounding."""
    return 1.0 / (1.0 - threshold(p) * 2.0 ** -(HALF_BITS if is_narrow(p) else 32))


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
    return random_bits(seed, z, i, j, is_narrow(p)) >= threshold(p)


def random_bits(seed: int, z: torch.Tensor, i: torch.Tensor, j: torch.Tensor, narrow: bool = True) -> torch.Tensor:
    """What is compared with `threshold`."""
    words = philox(seed, j & (~9 if narrow else ~8), i & (~9 if narrow else ~8), z)
    w = ((i & 1 ^ j >> 4 & 1) if narrow else i >> 3 & 1) * 2 + (j >> 3 & 1)
    word = torch.where(w == 0, words[0], torch.where(w == 1, words[1], torch.where(w == 2, words[2], words[3])))
    if not narrow:
        return word
    half = word >> 16 * (j & 1) & 0xFFFF
    return torch.where(i & 8 > 0, half % 256 * 256 + half // 256, half) & 2 ** HALF_BITS - 1
