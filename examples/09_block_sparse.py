"""Block-sparse attention (FlashAttention, Algorithm 5) as plain PyTorch: each pattern is recognised, hidden tiles cost nothing.

    python examples/09_block_sparse.py [length]

Six patterns of the literature, each written as its authors describe it: the fixed butterfly of Monarch matrices, a sliding window,
a dilated window, Longformer's window with global tokens, BigBird's window with global and random blocks, the strided pattern of the
Sparse Transformer, and a mask of blocks that arrives as a tensor, one entry for each 128 x 128 block.

Output:
    butterfly       error …   where (bit_xor(i // 128, j // 128) <= 2) | (bit_xor(i // 128, j // 128) == 4) | (bit_xor(i // 128, j // 128) == 8)
                    tiles   1408 (69%) tiles skipped, 640 (31%) full, 0 (0%) partial
    sliding_window  error …   where abs(i - j) <= 256
                    tiles   1512 (74%) tiles skipped, 424 (21%) full, 112 (5%) partial
    dilated_window  error …   where ((i - j) % 4 == 0) & (abs(i - j) <= 1024)
                    tiles   480 (23%) tiles skipped, 0 (0%) full, 1568 (77%) partial
    longformer      error …   where (abs(i - j) <= 256) | (i <= 15) | (j <= 15)
                    tiles   1248 (61%) tiles skipped, 368 (18%) full, 432 (21%) partial
    big_bird        error …   where (abs(i // 128 - j // 128) <= 1) | (i // 128 == 0) | (i // 128 == 15) | (j // 128 == 0) | (j // 128 == 15) | mask[i // 128, j // 128]
                    tiles   0 (0%) tiles skipped, 1184 (29%) full, 0 (0%) partial, 2912 (71%) decided by the data at run time; blocks of 128 that the data hide are skipped too, fully visible ones read without the mask
    strided         error …   where (((i - j) % 512 == 0) | (j > i - 128)) & (j <= i)
                    tiles   1608 (79%) tiles skipped, 0 (0%) full, 440 (21%) partial
    block_mask      error …   where mask[i // 128, j // 128]
                    tiles   0 (0%) tiles skipped, 0 (0%) full, 0 (0%) partial, 4096 (100%) decided by the data at run time; blocks of 128 that the data hide are skipped too, fully visible ones read without the mask
"""
from __future__ import annotations

import shutil
import sys

import torch

import flashfx

BLOCK = 128


def attention(q, k, v, visible):
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return scores.masked_fill(~visible, float("-inf")).softmax(-1) @ v


def expanded(blocks, size: int = BLOCK):
    """A mask with an entry for each block -> one with an entry for each query and key."""
    rows, columns = blocks.shape
    return blocks[:, None, :, None].expand(rows, size, columns, size).reshape(rows * size, columns * size)


def butterfly(q, k, v):
    """Blocks whose numbers differ in at most one binary digit."""
    count = q.shape[-2] // BLOCK
    blocks = torch.eye(count, dtype=torch.bool, device=q.device)
    at, step = torch.arange(count, device=q.device), 1
    while step < count:
        blocks[at, at ^ step] = True
        step *= 2
    return attention(q, k, v, expanded(blocks))


def sliding_window(q, k, v):
    at = torch.arange(q.shape[-2], device=q.device)
    return attention(q, k, v, (at[:, None] - at).abs() <= 256)


def dilated_window(q, k, v):
    """Every fourth key, up to 1024 away."""
    distance = torch.arange(q.shape[-2], device=q.device)[:, None] - torch.arange(k.shape[-2], device=q.device)
    return attention(q, k, v, (distance % 4 == 0) & (distance.abs() <= 1024))


def longformer(q, k, v):
    """A window of 256 on each side; the first 16 tokens see everything and are seen by all."""
    at = torch.arange(q.shape[-2], device=q.device)
    visible = (at[:, None] - at).abs() <= 256
    visible[:16] = True
    visible[:, :16] = True
    return attention(q, k, v, visible)


def big_bird(q, k, v):
    """Blocks: neighbours, the first and last with all, and two at random, drawn once."""
    count = q.shape[-2] // BLOCK
    at = torch.arange(count, device=q.device)
    blocks = (at[:, None] - at).abs() <= 1
    blocks = blocks | (at == 0) | (at == 0)[:, None] | (at == count - 1) | (at == count - 1)[:, None]
    drawn = torch.tensor([[(7 * n + 3) % count, (11 * n + 5) % count] for n in range(count)], device=q.device)
    blocks = blocks | torch.zeros_like(blocks).scatter(1, drawn, True)
    return attention(q, k, v, expanded(blocks))


def strided(q, k, v):
    """The 128 keys before, and every 512th."""
    distance = torch.arange(q.shape[-2], device=q.device)[:, None] - torch.arange(k.shape[-2], device=q.device)
    return attention(q, k, v, (distance >= 0) & ((distance < 128) | (distance % 512 == 0)))


def block_mask(q, k, v, blocks):
    """A tensor says for each block whether it is visible."""
    at = torch.arange(q.shape[-2], device=q.device) // BLOCK
    return attention(q, k, v, blocks[at[:, None], at])


PATTERNS = (butterfly, sliding_window, dilated_window, longformer, big_bird, strided, block_mask)


def main(length: int = 2048) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (torch.randn(1, 2, length, 64, device=device, generator=generator) for _ in range(3))
    blocks = torch.rand(length // BLOCK, length // BLOCK, device=device, generator=generator) < 0.1
    blocks.fill_diagonal_(True)
    # Inductor needs a C++ compiler on a CPU; without one the rewritten graph still runs
    inner = "inductor" if device == "cuda" or shutil.which("g++") else "aot_eager"
    for pattern in PATTERNS:
        given = (q, k, v, *([blocks] if pattern is block_mask else []))
        report = flashfx.explain(pattern, *given)
        compiled = torch.compile(pattern, backend="flashfx", options={"inner": inner})
        expected = pattern(*given)
        error = (compiled(*given) - expected).norm() / expected.norm()
        site, = report
        print(f"{pattern.__name__:<15} error {error:.1e}   where {site.spec.visible if site.fused else site.refusal}")
        print(f"{'':<15} {next(line for line in site.lines() if line.startswith('tiles'))}" if site.fused else "")


if __name__ == "__main__":
    main(*(int(a) for a in sys.argv[1:]))
