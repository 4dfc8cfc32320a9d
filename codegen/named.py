"""PTX's named barriers, at which warps of different partitions meet. Triton takes the first few of the 16 for partitions. Ours, of which a kernel has the one or the other:
12 to 14 turns; 8 to 11 rows of a slot; 12 dQ in its place; 14 and 15 that place free, for either warpgroup; 8 P or dS of three warpgroups.

Turns of the Hopper forward (FlashAttention-3, section 3.1, ping-pong scheduling): while a warpgroup computes a softmax, the matrix units work for another.

Rows and dQ of the Hopper backward of two warpgroups that hold tiles of keys together (`hopper_keys.adds_apart`): an
arrival at an mbarrier is one thread's, so that Triton makes all of a partition wait for each other in front of it, and behind it. At a named barrier each warp
arrives for itself and goes on."""
from __future__ import annotations

NAMED = '''@gluon.constexpr_function
def barrier_text(ACTION, NAME, THREADS):
    return f"bar.{ACTION} {NAME}, {THREADS}; mov.u32 $0, 0;"


@gluon.jit
def named_barrier(ACTION: gl.constexpr, NAME: gl.constexpr, number, THREADS: gl.constexpr):
    """PTX's barrier of that name, $1 for `number`: "sync" waits until so many threads, its own among them, have come;
    "arrive" does not wait."""
    text: gl.constexpr = barrier_text(ACTION, NAME, THREADS)
    gl.inline_asm_elementwise(text, "=r,r", [number], gl.int32, is_pure=False, pack=1)'''

TURNS = '''@gluon.jit
def await_turn(WARPGROUP: gl.constexpr):
    """A warpgroup issues products when the one before it has issued its own."""
    NAME: gl.constexpr = 12 + WARPGROUP
    named_barrier("sync", NAME, 0, 256)


@gluon.jit
def pass_turn(WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr):
    """Lets the next warpgroup go; behind the last comes the first."""
    NAME: gl.constexpr = 12 + (WARPGROUP + 1) % WARPGROUPS
    named_barrier("arrive", NAME, 0, 256)'''

HANDED = '''@gluon.jit
def leave_rows(slot):
    """Two warpgroups have read the rows of a step, for the warp that copies them."""
    named_barrier("arrive", "$1", 8 + slot, 288)


@gluon.jit
def await_rows(slot):
    """That warp waits for it."""
    named_barrier("sync", "$1", 8 + slot, 288)


@gluon.jit
def hand_dq():
    """The share of dQ of a step of two warpgroups is in its place, for the warp that adds it."""
    named_barrier("arrive", 12, 0, 288)


@gluon.jit
def await_dq():
    """That warp waits for it."""
    named_barrier("sync", 12, 0, 288)


@gluon.jit
def free_place_of_dq():
    """That warp has read the place."""
    named_barrier("arrive", 14, 0, 160)
    named_barrier("arrive", 15, 0, 160)


@gluon.constexpr_function
def own_barrier_text():
    return "{ .reg .u32 t; mov.u32 t, %tid.x; shr.u32 t, t, 7; add.u32 t, t, 14; bar.sync t, 160; mov.u32 $0, 0; }"


@gluon.jit
def await_place_of_dq():
    """A warpgroup waits for it, and not for the other one: threads 0 to 127 or 128 to 255 of the kernel."""
    text: gl.constexpr = own_barrier_text()
    gl.inline_asm_elementwise(text, "=r,r", [0], gl.int32, is_pure=False, pack=1)'''

MET = '''@gluon.jit
def meet():
    """Three warpgroups wait for each other."""
    named_barrier("sync", 8, 0, 384)


@gluon.jit
def third_of_keys(tile, rest, place, PART: gl.constexpr):
    """The 32 keys of one of three warpgroups: two have half of 64 each, the third the rest."""
    if PART < 2:
        return tile.index(place).reshape([64, 64]).slice(PART * 32, 32, 0)
    else:
        return rest.index(place).reshape([32, 64])


@gluon.jit
def third_of_columns(tile, rest, place, PART: gl.constexpr):
    """The same of a tile of all queries."""
    if PART < 2:
        return tile.index(place).slice(PART * 32, 32, 1)
    else:
        return rest.index(place)'''
