"""Warpgroups that issue their products in turn (FlashAttention-3, section 3.1, ping-pong scheduling): while one computes a softmax, the matrix units work for
another. Each has one of PTX's named barriers, at which it awaits the one before it; Triton takes the first few of the 16 for partitions, so that these begin at 12."""
from __future__ import annotations

TURNS = '''@gluon.constexpr_function
def barrier_text(ACTION, NAME):
    return f"bar.{ACTION} {NAME}, 256; mov.u32 $0, 0;"


@gluon.jit
def named_barrier(ACTION: gl.constexpr, NAME: gl.constexpr):
    """PTX's barrier of that name, of two warpgroups: "sync" waits until the other has said "arrive"."""
    text: gl.constexpr = barrier_text(ACTION, NAME)
    thread = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(text, "=r,r", [thread], gl.int32, is_pure=False, pack=1)


@gluon.jit
def await_turn(WARPGROUP: gl.constexpr):
    """A warpgroup issues products when the one before it has issued its own."""
    NAME: gl.constexpr = 12 + WARPGROUP
    named_barrier("sync", NAME)


@gluon.jit
def pass_turn(WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr):
    """Lets the next warpgroup go; behind the last comes the first."""
    NAME: gl.constexpr = 12 + (WARPGROUP + 1) % WARPGROUPS
    named_barrier("arrive", NAME)'''
