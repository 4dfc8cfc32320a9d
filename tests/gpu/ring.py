"""A ring in shared memory that is right by construction: one warp fills places, four read them, and each awaits the other at an mbarrier.

    python -m tests.gpu.ring

What compute-sanitizer's racecheck says of it is what it cannot follow (`hazards`).
"""
from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

STEPS = 20


@gluon.jit
def read(Out, ring, full, empty, STEPS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    total = gl.zeros([128], gl.float32, layout)
    for at in range(0, STEPS):
        slot = at % 2
        mbarrier.wait(full.index(slot), at // 2 & 1)
        total += ring.index(slot).load(layout)
        mbarrier.arrive(empty.index(slot), count=1)
    gl.store(Out + gl.arange(0, 128, layout), total)


@gluon.jit
def fill(In, ring, full, empty, STEPS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    for at in range(0, STEPS):
        slot = at % 2
        value = gl.load(In + at * 128 + gl.arange(0, 128, layout))
        mbarrier.wait(empty.index(slot), (at // 2 & 1) ^ 1)
        ring.index(slot).store(value)
        mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def sum_rows(In, Out, STEPS: gl.constexpr):
    ring = gl.allocate_shared_memory(gl.float32, [2, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    fence_async_shared()
    gl.warp_specialize([(read, (Out, ring, full, empty, STEPS)), (fill, (In, ring, full, empty, STEPS))], [1], [24])


def main() -> None:
    rows, out = torch.randn(STEPS, 128, device="cuda"), torch.empty(128, device="cuda")
    sum_rows[(1,)](rows, out, STEPS, num_warps=4)
    assert torch.allclose(out, rows.sum(0), atol=1e-4)


if __name__ == "__main__":
    main()
