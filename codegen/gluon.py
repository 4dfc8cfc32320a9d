"""Kernels in Gluon, Triton's lower-level language: the same scalar programs in its dialect, and functions that run side by side.

A warp-specialised kernel is a main function that works out what a program does, reserves shared memory and starts *partitions*: groups
of warps that run different functions with their own number of registers. `WarpSpecialized` writes one such kernel; each function takes
the arguments that its body names.
"""
from __future__ import annotations

import re
from typing import Iterable, Mapping, Sequence

from .named import HANDED, MET, NAMED, TURNS
from .philox import ROUNDS
from .program import HELPERS, NATIVE_TANH, is_called
from .ramp import RAMP
from .running import RUNNING
from .tickets import TICKETS
from .within import IS_ROW_BY_ROW, WITHIN
from .writer import Kernel, Writer, wrapped

SIGMOID = '''@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))'''

KEEP_TILE = f'''@gluon.jit
def wide_product(a, FACTOR: gl.constexpr):
    """(low, high) words of a * FACTOR in one instruction: of a 64-bit product the compiler makes two where it can."""
    text: gl.constexpr = "{{ .reg .b64 p; mul.wide.u32 p, $2, $3; mov.b64 {{$0, $1}}, p; }}"
    both: gl.constexpr = (gl.uint32, gl.uint32)
    return gl.inline_asm_elementwise(text, "=r,=r,r,r", [a, gl.full_like(a, FACTOR)], both, is_pure=True, pack=1)


@gluon.jit
def philox_rounds(c0, c1, c2, c3, k0, k1, COUNT: gl.constexpr):
    """A counter after COUNT rounds, of which (k0, k1) are the first's keys."""
    for _ in gl.static_range(COUNT):
        a, high_a = wide_product(c0, 0xD2511F53)
        b, high_b = wide_product(c2, 0xCD9E8D57)
        c0 = high_b ^ c1 ^ k0
        c2 = high_a ^ c3 ^ k1
        c1 = b
        c3 = a
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@gluon.jit
def philox(seed, c0, c1, c2, vary):
    """Philox-4x32: four words of 32 random bits for the counter (c0, c1, c2, 0). vary: 0; where the compiler does not know that,
    it keeps keys in each thread's registers, not in those that a warp shares, from which an xor starts half as often."""
    return philox_rounds(c0, c1, c2, c2 * 0, seed.to(gl.uint32) + vary, (seed >> 32).to(gl.uint32) + vary, {ROUNDS})


@gluon.jit
def column_of(c, odd):
    """First column of a tile's Philox call c: of two calls side by side, where odd that for the next 16 columns."""
    return c // 4 * 32 + c % 4 * 2 + odd * 16


@gluon.jit
def key_words(seed, z, j0, COLUMNS: gl.constexpr):
    """What a key and a batch index alone make of Philox's first three rounds, for the counters (key, any, z, 0) of keys from j0
    on, by bit 4 of the key and the rest of it: four words, with the round keys that meet them, as two numbers of 64 bits."""
    keys: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [1, 1], [1, 0])
    c = gl.arange(0, COLUMNS // 8, gl.SliceLayout(0, keys))[None, :]
    c0 = (j0 + column_of(c, gl.arange(0, 2, gl.SliceLayout(1, keys))[:, None])).to(gl.uint32)
    k0, k1 = seed.to(gl.uint32), (seed >> 32).to(gl.uint32)
    c1, _ = wide_product(z.to(gl.uint32) + c0 * 0, 0xCD9E8D57)              # round 1
    first, high = wide_product(c0, 0xD2511F53)
    second, high = wide_product(high ^ k1, 0xCD9E8D57)                      # round 2
    fourth, high = wide_product(high ^ c1 ^ (k0 + 0x9E3779B9), 0xD2511F53)  # round 3
    first, second, third = first ^ (k1 + 0xBB67AE85), second ^ (k0 + 0x3C6EF372), high ^ (k1 + 0x76CF5D0A)
    return first.to(gl.int64) | (second.to(gl.int64) << 32), third.to(gl.int64) | (fourth.to(gl.int64) << 32)


@gluon.jit
def philox_by_words(seed, words, c1, c2, vary):
    """`philox` of counters whose `key_words` are known."""
    a, b = words
    k0 = seed.to(gl.uint32) + vary
    k1 = (seed >> 32).to(gl.uint32) + vary
    _, high = wide_product(c2, 0xCD9E8D57)                                  # round 1
    low, high = wide_product(high ^ c1 ^ seed.to(gl.uint32), 0xD2511F53)    # round 2
    c1, high = wide_product(high ^ a.to(gl.uint32), 0xCD9E8D57)             # round 3
    c0 = high ^ (a >> 32).to(gl.uint32)
    c2 = b.to(gl.uint32) ^ low
    c3 = (b >> 32).to(gl.uint32)
    return philox_rounds(c0, c1, c2, c3, k0 + 0xDAA66D2B, k1 + 0x32370B8F, {ROUNDS - 3})


@gluon.constexpr_function
def words_layout(ROWS, COLUMNS, WARPS):
    """Layout of a Philox call for each 16 elements of a (ROWS, COLUMNS) accumulator, by the row, its bit 0 and the column: that
    of the accumulator, without bit 3 of the row and bits 0, 3, 4 of the column. Warps that rows do not need share the
    columns."""
    beside = WARPS * 16 // ROWS
    registers = [[0, 0, 4 << n] for n in range((COLUMNS // 32 // beside).bit_length() - 1)]
    lanes = [[0, 0, 1], [0, 0, 2], [0, 1, 0], [1, 0, 0], [2, 0, 0]]
    warps = [[4 << n, 0, 0] for n in range((WARPS // beside).bit_length() - 1)]
    warps += [[0, 0, COLUMNS // 8 // beside << n] for n in range(beside.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [ROWS // 4, 2, COLUMNS // 8])


@gluon.jit
def parted(one, other, order):
    """Keys along the rows: of two words with halves for two keys, those of a thread's own key, and those of its neighbour's.
    order: of `prmt`, for its own."""
    text: gl.constexpr = "prmt.b32 $0, $2, $3, $4; prmt.b32 $1, $2, $3, $5;"
    given = [one, other, order, order ^ 0x2222]
    return gl.inline_asm_elementwise(text, "=&r,=&r,r,r,r,r", given, (gl.uint32, gl.uint32), is_pure=True, pack=1)


@gluon.jit
def exchanged(own, given, order):
    """Two threads, whose rows differ in bit 0, have each made one call of two, for 16 columns or the next 16, and half of it is
    the other's. A word of either call, and both again with the bytes of each half in the other order. order: of `prmt`, for the
    first call's."""
    text: gl.constexpr = """{{ .reg .b32 o; shfl.sync.bfly.b32 o, $5, 4, 31, -1; prmt.b32 $0, $4, o, $6; prmt.b32 $1, $4, o, $7;
        prmt.b32 $2, $0, $0, 0x2301; prmt.b32 $3, $1, $1, 0x2301; }}"""
    four: gl.constexpr = (gl.uint32, gl.uint32, gl.uint32, gl.uint32)
    operands = [own, given, order, order ^ 0x4444]
    return gl.inline_asm_elementwise(text, "=&r,=&r,=&r,=&r,r,r,r,r", operands, four, is_pure=True, pack=1)


@gluon.jit
def random_bits(seed, z, a0, b0, unknown, words_a, words_b, ROWS: gl.constexpr, COLUMNS: gl.constexpr, WARPS: gl.constexpr,
                TRANSPOSED: gl.constexpr, VARY: gl.constexpr, LAYOUT: gl.constexpr):
    """Dropout's random bits for the score tile at (z, a0, b0), batch index, row and column; TRANSPOSED: keys along the rows.
    unknown: 0; where the compiler does not know that, it keeps nothing in registers that is made of a thread's number alone.
    words_a, words_b: the tile's `key_words` in shared memory, or None."""
    words: gl.constexpr = words_layout(ROWS, COLUMNS, WARPS)
    r = gl.arange(0, ROWS // 4, gl.SliceLayout(1, gl.SliceLayout(2, words)))[:, None, None]
    odd = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, words)))[None, :, None] + unknown
    c = gl.arange(0, COLUMNS // 8, gl.SliceLayout(0, gl.SliceLayout(1, words)))[None, None, :]
    zero = gl.zeros([ROWS // 4, 2, COLUMNS // 8], gl.uint32, words)
    a = a0 + r // 4 * 16 + r % 4 * 2
    b = b0 + column_of(c, odd)
    z = z.to(gl.uint32) + zero
    second = odd.to(gl.uint32) + zero
    if TRANSPOSED:
        w0, w1, w2, w3 = philox(seed, a.to(gl.uint32) + zero, b.to(gl.uint32) + zero, z, zero)
        halves = 0x5410 ^ second * 0x2222 ^ (a // 16 % 2).to(gl.uint32) * 0x4444
        w0, w2 = parted(w0, w2, halves)
        w1, w3 = parted(w1, w3, halves)
    else:
        vary = (a >> 31).to(gl.uint32) + zero if VARY else zero
        if words_a is None:
            w0, w1, w2, w3 = philox(seed, b.to(gl.uint32) + zero, a.to(gl.uint32) + zero, z, vary)
        else:
            flat: gl.constexpr = gl.SliceLayout(0, words)
            found = words_a.load(flat)[None, :, :] + zero.to(gl.int64), words_b.load(flat)[None, :, :] + zero.to(gl.int64)
            w0, w1, w2, w3 = philox_by_words(seed, found, a.to(gl.uint32) + zero, z, vary)
    calls = 0x3210 ^ second * 0x4444
    w0, x0, s0, t0 = exchanged(w0, w2, calls)
    w1, x1, s1, t1 = exchanged(w1, w3, calls)
    if TRANSPOSED:
        low = gl.join(gl.join(w0, s0), gl.join(w1, s1))            # (…, bit 3 of the column, bit 3 of the row)
        high = gl.join(gl.join(x0, t0), gl.join(x1, t1))
    else:
        low = gl.join(gl.join(w0, w1), gl.join(s0, s1))
        high = gl.join(gl.join(x0, x1), gl.join(t0, t1))
    tile = gl.join(low, high)                                      # (…, bit 4 of the column)
    tile = gl.join(tile, tile)                                     # (…, bit 0 of the column): each looks at a half
    tile = tile.reshape([ROWS // 16, 4, 2, COLUMNS // 32, 4, 2, 2, 2, 2]).permute([0, 6, 1, 2, 3, 7, 5, 4, 8])
    return gl.convert_layout(tile.reshape([ROWS, COLUMNS]), LAYOUT)


@gluon.jit
def kept(p, bits, THRESHOLD: gl.constexpr):
    """p where dropout keeps it, else 0. Both of a word's halves at once: 15 bits order alike as integers and as float16,
    whose NaNs, unordered, lie above every threshold."""
    text: gl.constexpr = """{{ .reg .b32 m; .reg .pred a, b; abs.f16x2 m, $4; setp.geu.f16x2 a|b, m, $6;
        selp.f32 $0, $2, 0f00000000, a; selp.f32 $1, $3, 0f00000000, b; }}"""
    limit = gl.full_like(bits, THRESHOLD * 65537)
    return gl.inline_asm_elementwise(text, "=&f,=&f,f,f,r,r,r,r", [p, bits, limit], gl.float32, is_pure=True, pack=2)


@gluon.jit
def kept_half(p, bits, THRESHOLD: gl.constexpr):
    """p of 16 bits where dropout keeps it, else 0, two at a time; compared as in `kept`. The comparison yields float16's 1, which
    reads 2 ** -7 in bfloat16: so many times p comes out."""
    kind: gl.constexpr = "bf16x2" if p.dtype == gl.bfloat16 else "f16x2"
    text: gl.constexpr = "{{ .reg .b32 m; abs.f16x2 m, $2; set.geu.f16x2.f16x2 m, m, $4; mul." + kind + " $0, $1, m; }}"
    limit = gl.full_like(bits, THRESHOLD * 65537)
    return gl.inline_asm_elementwise(text, "=r,r,r,r,r,r", [p, bits, limit], p.dtype, is_pure=True, pack=2)


@gluon.jit
def positive(x, DTYPE: gl.constexpr):
    """x in 16 bits where it is above 0, else 0: the conversion's own doing."""
    kind: gl.constexpr = "bf16x2" if DTYPE == gl.bfloat16 else "f16x2"
    text: gl.constexpr = "cvt.rn.relu." + kind + ".f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(text, "=r,f,f", [x], gl.int16, is_pure=True, pack=2).to(DTYPE, bitcast=True)


@gluon.jit
def signed_by_keep(p, bits, THRESHOLD: gl.constexpr):
    """p where dropout keeps it, else -p; compared as in `kept`."""
    text: gl.constexpr = """{{ .reg .b32 m; .reg .pred a, b; .reg .f32 c, d; abs.f16x2 m, $4; setp.geu.f16x2 a|b, m, $6;
        neg.f32 c, $2; neg.f32 d, $3; selp.f32 $0, $2, c, a; selp.f32 $1, $3, d, b; }}"""
    limit = gl.full_like(bits, THRESHOLD * 65537)
    return gl.inline_asm_elementwise(text, "=&f,=&f,f,f,r,r,r,r", [p, bits, limit], gl.float32, is_pure=True, pack=2)


@gluon.jit
def kept_mask(bits, THRESHOLD: gl.constexpr):
    """Which weights dropout keeps; compared as in `kept`."""
    text: gl.constexpr = """{{ .reg .b32 m; .reg .pred a, b; abs.f16x2 m, $2; setp.geu.f16x2 a|b, m, $4;
        selp.b32 $0, 1, 0, a; selp.b32 $1, 1, 0, b; }}"""
    limit = gl.full_like(bits, THRESHOLD * 65537)
    return gl.inline_asm_elementwise(text, "=&r,=&r,r,r,r,r", [bits, limit], gl.int32, is_pure=True, pack=2) != 0'''


MARK = '''@gluon.jit
def marked_by_keep(x, bits, THRESHOLD: gl.constexpr):
    """x with 1 in its lowest bit where dropout keeps the weight, else 0; compared as in `kept`."""
    text: gl.constexpr = """{ .reg .b32 m, c, d; .reg .pred a, b; abs.f16x2 m, $4; setp.geu.f16x2 a|b, m, $6;
        selp.b32 c, 1, 0, a; selp.b32 d, 1, 0, b; lop3.b32 $0, $2, -2, c, 0xEA; lop3.b32 $1, $3, -2, d, 0xEA; }"""
    limit = gl.full_like(bits, THRESHOLD * 65537)
    return gl.inline_asm_elementwise(text, "=&f,=&f,f,f,r,r,r,r", [x, bits, limit], gl.float32, is_pure=True, pack=2)


@gluon.jit
def is_marked(x):
    return (x.to(gl.int32, bitcast=True) & 1) != 0'''


def in_gluon(text: str) -> str:
    """Triton text in Gluon's dialect. Helper functions get a name of their own: either language calls only its own functions.

    before -> after: tl.minimum(i, N) -> gl.minimum(i, N); tl.range(0, N) -> range(0, N); tanh(x) -> gluon_tanh(x)
    """
    text = text.replace("@triton.jit", "@gluon.jit").replace("tl.sigmoid(", "sigmoid(").replace("tl.range(", "range(")
    for name in (*HELPERS, "sigmoid"):
        text = re.sub(rf"(?<![\w.]){name}\(", f"gluon_{name}(", text)
    return re.sub(r"\btl\.", "gl.", text)


LATE = '''@gluon.jit
def late(size, now):
    """`size`, of which the compiler works out nothing before it knows `now`, which is not negative: in front of all partitions
    it would take a register of each."""
    text: gl.constexpr = "{ .reg .b32 z; shr.s32 z, $2, 31; add.s32 $0, $1, z; }"
    return gl.inline_asm_elementwise(text, "=r,r,r", [size, now], gl.int32, is_pure=True, pack=1)'''


WIDENED = '''@gluon.jit
def widened(tile):
    """A tile of 16 bits in float32. Two neighbours of bfloat16 lie in one register, and of the upper one the compiler makes two
    instructions."""
    if tile.dtype == gl.bfloat16:
        text: gl.constexpr = "{ .reg .b32 a, b; shl.b32 a, $2, 16; and.b32 b, $2, 0xffff0000; mov.b32 $0, a; mov.b32 $1, b; }"
        return gl.inline_asm_elementwise(text, "=f,=f,r", [tile], gl.float32, is_pure=True, pack=2)
    return tile.to(gl.float32)'''


APART = '''@gluon.jit
def apart(values, one):
    """The most that any of some integers differs from `one`: 0 not at all, 1 in the low word alone, 2 in the high one. The
    greatest of small numbers is found sooner than the least and the greatest of 64-bit ones."""
    one = one.to(gl.int64)
    high = (values.to(gl.int64) >> 32) != (one >> 32)
    return gl.max((values != one).to(gl.int32) + high.to(gl.int32), 0)'''


TOLD = '''@gluon.jit
def tell(numbers, place, number):
    """Leaves a number in shared memory, for other warps."""
    numbers.index(place).store(gl.full([1], number, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def number_at(numbers, place, WARPS: gl.constexpr):
    """What a warp has left there, at least 0, for all threads of some warps."""
    return gl.max(numbers.index(place).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)'''


PLACE = '''@gluon.jit
def place_in(at, PLACES: gl.constexpr):
    """Place of a step in a ring. Without sign: of the remainder of a signed count the compiler keeps multiples in registers."""
    return (at.to(gl.uint32) % PLACES).to(gl.int32)


@gluon.jit
def phase_in(at, PLACES: gl.constexpr):
    """Of its barriers there."""
    return (at.to(gl.uint32) // PLACES & 1).to(gl.int32)'''


STORE_ROWS = '''@gluon.jit
def store_rows(tile, cells, stride, row, end, COLUMNS: gl.constexpr, WARPS: gl.constexpr):
    """A tile that lies in shared memory, of rows `row` on, to memory, but not `end` and those behind: they are
    another tile's. cells: where its first row is."""
    ROWS: gl.constexpr = tile.shape[0]
    WIDTH: gl.constexpr = tile.shape[1]
    STEP: gl.constexpr = max(8, 256 // WIDTH * WARPS)  # rows at a time, 16 bytes a thread
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [WARPS, 1], [1, 0])
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))[None, :]
    for first in gl.static_range(0, ROWS, STEP):
        step = first + gl.arange(0, STEP, gl.SliceLayout(1, layout))[:, None]
        places = gl.multiple_of(cells + (step * stride + column), [1, 16])  # bytes: rows start at such
        inside = (step < end - row) & (column < COLUMNS) if COLUMNS < WIDTH else step < end - row
        gl.store(places, tile.slice(first, STEP).load(layout), mask=inside)'''


CALLED = {"random_bits": KEEP_TILE, "apart": APART, "marked_by_keep": MARK, "late": LATE, "threads_of": RUNNING, "within": WITHIN, "ramp": RAMP, "await_turn": TURNS,
          "widened": WIDENED, "take_ticket": TICKETS, "tell": TOLD, "place_in": PLACE, "store_rows": STORE_ROWS, "leave_rows": HANDED, "meet": MET}
"""A function that generated text calls -> what defines it and others beside it."""


def helpers(text: str) -> list[str]:
    """Definitions of the helper functions that Gluon text calls."""
    table = HELPERS | {"tanh": NATIVE_TANH, "sigmoid": SIGMOID}
    found = [in_gluon(definition) for name, definition in table.items() if is_called(text, f"gluon_{name}")]
    found += [definition for name, definition in CALLED.items() if is_called(text, name)]
    calls = lambda name: any(is_called(definition, name) for definition in found)
    return [definition for name, definition in {"named_barrier": NAMED, "is_row_by_row": IS_ROW_BY_ROW}.items() if calls(name)] + found


def words_of(text: str) -> set[str]:
    return set(re.findall(r"[A-Za-z_]\w*", re.sub(r"#.*", "", text)))


class Partition:
    """A function that some of a kernel's warps run. `constants` are its own compile-time arguments."""

    def __init__(self, name: str, doc: str, constants: Sequence[str] = ()):
        self.name, self.doc, self.constants = name, doc, tuple(constants)
        self.own: tuple[str, ...] = ()
        self.body = Writer(1)

    def arguments(self, known: Iterable[str]) -> list[str]:
        """Its own arguments, and those of the names known to the kernel's main function that the body uses, in their order."""
        used = words_of(self.body.text) - {*self.constants, *self.own}
        return [*self.own, *(name for name in known if name in used)]


class WarpSpecialized(Kernel):
    """A Gluon kernel: a main function and its partitions. changing: arguments for whose values Triton shall not compile the kernel anew."""

    def __init__(self, name: str, doc: str, arguments: Mapping[str, str], constexprs: Sequence[str], options: str, changing: Sequence[str] = ()):
        super().__init__(name, doc, arguments, constexprs, options)
        self._changing = list(changing)
        self._functions: list[Partition] = []

    def _known(self) -> list[str]:
        assigned = re.findall(r"^ *(\w+) = ", self.body.text, re.M)
        return list(dict.fromkeys([*self._arguments, *assigned, *self._constexprs]))

    def function(self, function: Partition, own: Sequence[str], returns: Sequence[str]) -> str:
        """Add a function that partitions call; returns the call. The main function must have all names that it takes but its `own`."""
        function.body.line(f"return {', '.join(returns)}")
        function.own = tuple(own)
        self._functions.append(function)
        return f"{function.name}({', '.join(function.arguments(self._known()))})"

    def start(self, partitions: Sequence[tuple[Partition, Sequence[str], int, int]]) -> None:
        """End the main function by starting partitions, each as (function, values of its constants, warps, registers of a thread).

        The first runs on the kernel's own warps and gets the registers that the others leave.
        """
        known = self._known()
        self._functions += {p.name: p for p, *_ in partitions}.values()
        self.body.line("gl.warp_specialize([")
        for p, values, _, _ in partitions:
            for text in wrapped(f"    ({p.name}, (", [*p.arguments(known), *values], ")),", 1):
                self.body.line(text.removeprefix("    "))
        rest = partitions[1:]
        self.body.line(f"], {[warps for *_, warps, _ in rest]}, {[registers for *_, registers in rest]})")

    @property
    def source(self) -> str:
        known = self._known()
        texts = []
        for p in self._functions:
            parameters = [f"{n}: gl.constexpr" if n in (*self._constexprs, *p.constants) else n for n in (*p.arguments(known), *p.constants)]
            texts.append("\n".join(["@gluon.jit", *wrapped(f"def {p.name}(", parameters, "):"), f'    """{p.doc}"""', in_gluon(p.body.text)]))
        main = in_gluon(super().source)
        if self._changing:
            main = main.replace("@gluon.jit", f"@gluon.jit(do_not_specialize={self._changing})", 1)
        return "\n\n\n".join([*texts, main])
