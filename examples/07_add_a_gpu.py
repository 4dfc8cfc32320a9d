"""Add a GPU: a row of numbers from its data sheet, which plans are made from. A row that belongs to FlashFX stands in codegen/gpu.py.

    python examples/07_add_a_gpu.py

`python -m flashfx gpu --measure` prints the row of the GPU of this machine.

Output:
    H100   forward 128x128, 8 warps, 2 stages, 192 KiB shared, TMA
    small  forward 64x32, 4 warps, 2 stages, 36 KiB shared
    a wrong unit is caught: small
"""
from __future__ import annotations

import dataclasses

import torch

import flashfx
from flashfx.codegen.gpu import BY_NAME, GPU, KIB

SMALL = GPU(name="small", capability=(8, 6), sms=16, shared_per_block=48 * KIB, shared_per_sm=64 * KIB, registers=65536, l2=2 * KIB ** 2,
            bandwidth=192e9, matrix_rate=20e12, clock=1.5e9, source="an imagined card")


def attention(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def main() -> None:
    q, k, v = (torch.empty(1, 16, 4096, 128, dtype=torch.bfloat16) for _ in range(3))
    BY_NAME[SMALL.name] = SMALL
    try:
        for name in ("H100", SMALL.name):
            plan = flashfx.explain(attention, q, k, v, gpu=name)[0].plan
            print(f"{name:<6} {str(plan).split(': ', 1)[1].split(' (')[0]}")
    finally:
        del BY_NAME[SMALL.name]
    try:
        dataclasses.replace(SMALL, bandwidth=192)  # GB/s, not bytes per second
    except AssertionError as error:
        print(f"a wrong unit is caught: {error}")


if __name__ == "__main__":
    main()
