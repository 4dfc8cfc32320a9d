"""Numbers of tiles from a counter in memory, asked for ahead: what a kernel does meanwhile hides the time that the counter takes to answer.

Triton's own `atomic_add` of one number orders all that was written before it (a fence of the whole GPU) and waits for the answer where it stands. The numbers
order nothing: each program gets others, that is all.
"""
from __future__ import annotations

TICKETS = '''@gluon.jit
def take_ticket(Counter, last):
    """Adds 1 to the counter by one lane of a warp, and does not wait: `number_on` says what it was. Behind `last` comes 0."""
    text: gl.constexpr = """{ .reg .pred p; setp.eq.s32 p, $2, 0; mov.b32 $0, 0;
        @p atom.relaxed.gpu.global.inc.u32 $0, [$1], $3; }"""
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    given = [Counter.to(gl.int64, bitcast=True), lane, last]
    return gl.inline_asm_elementwise(text, "=&r,l,r,r", given, gl.int32, is_pure=False, pack=1)


@gluon.jit
def number_on(ticket):
    """The number on a ticket, once the counter has answered."""
    return gl.max(ticket, 0)'''
