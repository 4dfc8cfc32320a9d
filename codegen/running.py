"""The running maximum and sum of a row's scores that each thread of a Hopper forward keeps to itself, in Gluon (FlashAttention-2, section 3.1; algorithm 1)."""
from __future__ import annotations

RUNNING = '''@gluon.constexpr_function
def threads_of(ROWS):
    """Layout of a number of each thread for each of its rows: four threads of a warp share a row of an accumulator."""
    warps = [[16 << n, 0] for n in range((ROWS // 16).bit_length() - 1)]
    return gl.DistributedLinearLayout([[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], warps, [], [ROWS, 4])


@gluon.jit
def own_max(tile):
    """Each thread's greatest element of each of its rows."""
    found = gl.max(gl.max(tile.reshape([tile.shape[0], tile.shape[1] // 8, 4, 2]), 3), 1)
    return gl.convert_layout(found, threads_of(tile.shape[0]))


@gluon.jit
def own_sum(tile):
    """Each thread's sum of what it has of each of its rows."""
    found = gl.sum(gl.sum(tile.reshape([tile.shape[0], tile.shape[1] // 8, 4, 2]), 3), 1)
    return gl.convert_layout(found, threads_of(tile.shape[0]))


@gluon.constexpr_function
def bounded_text(COUNT):
    """PTX of `bounded_exp2`: COUNT of each, results, numbers, FACTOR. One of four by a polynomial (as in FlashAttention-4): the
    exponent is n + f, n an integer and |f| <= 1 / 2; 0.999928, 0.693261, 0.242611, 0.0551716 are the coefficients of least
    relative error for 2 ** f, a part in 13000. The others by the unit of exp."""
    lines = []
    for n in range(COUNT):
        x, factor = f"${COUNT + n}", f"${2 * COUNT + n}"
        if n % 4 < 3:
            lines.append(f"mul.f32 t, {x}, {factor}; ex2.approx.ftz.f32 ${n}, t;")
            continue
        lines.append(f"fma.rn.f32 t, {x}, {factor}, 0f4B400000; sub.f32 f, 0f4B400000, t; fma.rn.f32 f, {x}, {factor}, f;")
        lines.append("mov.f32 p, 0f3E786F0C; fma.rn.f32 p, f, 0f3D61FB9F, p; fma.rn.f32 p, p, f, 0f3F31798D;")
        lines.append("fma.rn.f32 p, p, f, 0f3F7FFB49; mov.b32 i, t; shl.b32 i, i, 23; add.s32 i, i, 0x3F800000;")
        lines.append(f"mov.b32 t, i; mul.f32 ${n}, p, t;")
    return "{ .reg .f32 t, f, p; .reg .b32 i; " + " ".join(lines) + " }"


@gluon.jit
def bounded_exp2(scores, FACTOR: gl.constexpr):
    """exp2(scores * FACTOR) where the products are between -120 and 120."""
    text: gl.constexpr = bounded_text(4)
    given = [scores, gl.full_like(scores, FACTOR)]
    return gl.inline_asm_elementwise(text, "=&f,=&f,=&f,=&f,f,f,f,f,f,f,f,f", given, gl.float32, is_pure=True, pack=4)


@gluon.jit
def across(own, tile):
    """Each thread's number of a row for all that it has of the row in a tile."""
    four: gl.constexpr = tile.reshape([tile.shape[0], tile.shape[1] // 8, 4, 2]).type.layout
    own = gl.convert_layout(own, gl.SliceLayout(1, gl.SliceLayout(3, four)))[:, None, :, None]
    spread = own + gl.zeros([tile.shape[0], tile.shape[1] // 8, 4, 2], own.dtype, four)
    return gl.convert_layout(spread.reshape(tile.shape), tile.type.layout)


@gluon.jit
def raised(m, top, FACTOR: gl.constexpr, LAG: gl.constexpr):
    """The maximum m that a row's weights exp2((score - m) * FACTOR) are taken from, or its greatest score where one exceeds
    m by more than LAG; the factor of what was summed up from m; does any row of the warp have one but 1? If none, nothing is
    worked out. top: of `own_max`."""
    text: gl.constexpr = """{
        .reg .pred p, q; .reg .f32 a, b, t;
        mov.f32 $0, $6; mov.f32 $1, $7; mov.f32 $2, 0f3F800000; mov.f32 $3, 0f3F800000;
        sub.f32 a, $8, $6; sub.f32 b, $9, $7; setp.gt.f32 p, a, $10; setp.gt.or.f32 p, b, $10, p;
        vote.sync.any.pred q, p, -1; selp.b32 $4, 1, 0, q; mov.b32 $5, $4; @!q bra.uni DONE;
        shfl.sync.bfly.b32 t, $8, 1, 31, -1; max.f32 a, $8, t; shfl.sync.bfly.b32 t, a, 2, 31, -1; max.f32 a, a, t;
        shfl.sync.bfly.b32 t, $9, 1, 31, -1; max.f32 b, $9, t; shfl.sync.bfly.b32 t, b, 2, 31, -1; max.f32 b, b, t;
        sub.f32 t, a, $6; setp.gt.f32 p, t, $10; selp.f32 $0, a, $6, p;
        mul.f32 t, t, $12; ex2.approx.ftz.f32 t, t; selp.f32 $2, t, $2, p;
        sub.f32 t, b, $7; setp.gt.f32 p, t, $10; selp.f32 $1, b, $7, p;
        mul.f32 t, t, $12; ex2.approx.ftz.f32 t, t; selp.f32 $3, t, $3, p;
        DONE: }"""
    kinds: gl.constexpr = (gl.float32, gl.float32, gl.int32)
    given = [m, top, gl.full_like(m, LAG), gl.full_like(m, -FACTOR)]
    return gl.inline_asm_elementwise(text, "=&f,=&f,=&f,=&f,=&r,=&r,f,f,f,f,f,f,f,f", given, kinds, is_pure=False, pack=2)


@gluon.constexpr_function
def weigh_text(COUNT, KIND):
    """PTX of `weighed`. Its operands: weights, two of 16 bits in a register; then COUNT of each: their sum, maximum, factor, has
    it grown; then scores, maximum and FACTOR as given. Element n is of a thread's second row where n & 2. KIND: say bf16."""
    registers = COUNT if KIND == "fp32" else COUNT // 2
    at = lambda kind, n: f"${(kind - 1) * COUNT + registers + n}"
    weight = lambda n: f"${n}" if KIND == "fp32" else f"e{n % 2}"
    row = lambda n: n // 2 % 2
    add = lambda n: f"add.f32 s{row(n)}, s{row(n)}, {weight(n)};" if n % 2 or n > 3 else f"mov.f32 s{row(n)}, {weight(n)};"
    weigh = lambda n: f"fma.rn.f32 t, {at(5, n)}, {at(7, 0)}, from{row(n)}; ex2.approx.ftz.f32 {weight(n)}, t; {add(n)}"
    rounded = lambda n: f"cvt.rn.{KIND.replace('p', '')}x2.f32 ${n // 2}, e1, e0;" if n % 2 and KIND != "fp32" else ""
    weights = [weigh(n) + rounded(n) for n in range(COUNT)]
    lines = ["{ .reg .pred p, q; .reg .b32 g; .reg .f32 s<2>, m<2>, from<2>, top<2>, alpha<2>, e<2>, t;"]
    lines += [f"mov.f32 m{r}, {at(6, 2 * r)}; mov.f32 alpha{r}, 0f3F800000; neg.f32 from{r}, m{r};" for r in range(2)]
    lines += [*weights, "setp.gt.f32 p, s0, 0f43800000; setp.gt.or.f32 p, s1, 0f43800000, p;"]
    lines += [f"setp.eq.or.f32 p, m{r}, 0fFF800000, p;" for r in range(2)]
    lines += ["vote.sync.any.pred q, p, -1; selp.b32 g, 1, 0, q; @!q bra.uni DONE;"]
    for r in range(2):
        first, *others = [n for n in range(COUNT) if row(n) == r]
        lines += [f"mov.f32 top{r}, {at(5, first)};", *(f"max.f32 top{r}, top{r}, {at(5, n)};" for n in others)]
        lines += [f"shfl.sync.bfly.b32 t, top{r}, {lane}, 31, -1; max.f32 top{r}, top{r}, t;" for lane in (1, 2)]
        lines += [f"mul.f32 t, top{r}, {at(7, 0)}; max.f32 t, t, m{r}; setp.gt.f32 p, t, 0fFF800000; sub.f32 top{r}, m{r}, t;",
                  f"mov.f32 m{r}, t; neg.f32 t, t; selp.f32 from{r}, t, 0f00000000, p; @p ex2.approx.ftz.f32 alpha{r}, top{r};"]
    lines += [*weights, "DONE:"]
    for n in range(COUNT):
        lines += [f"mov.f32 {at(k, n)}, {name}{row(n)};" for k, name in ((1, "s"), (2, "m"), (3, "alpha"))]
        lines += [f"mov.b32 {at(4, n)}, g;"]
    return " ".join(lines) + " }"


@gluon.constexpr_function
def weigh_operands(COUNT, KIND):
    weights = ["=&f"] * COUNT if KIND == "fp32" else ["=&r"] * (COUNT // 2)
    return ",".join(weights + ["=&f"] * 3 * COUNT + ["=&r"] * COUNT + ["f"] * 3 * COUNT)


@gluon.constexpr_function
def weigh_kinds(DTYPE):
    return DTYPE, gl.float32, gl.float32, gl.float32, gl.int32


@gluon.jit
def first_of(a, b):
    """Of equal numbers any will do."""
    return a


@gluon.jit
def of_threads(tile):
    """Each thread's number for each of its rows, which all that it has of the row in a tile hold."""
    own = gl.reduce(gl.reduce(tile.reshape([tile.shape[0], tile.shape[1] // 8, 4, 2]), 3, first_of), 1, first_of)
    return gl.convert_layout(own, threads_of(tile.shape[0]))


@gluon.jit
def weighed(scores, m, FACTOR: gl.constexpr, DTYPE: gl.constexpr):
    """Weights exp2(scores * FACTOR - m) as DTYPE, and each thread's sum of a row's before they are rounded. m is the maximum of
    the tiles before, so that no weight waits for the greatest of its own tile; where such a sum exceeds 2 ** 8, or a row has seen
    no key before (m is -inf), all rows of the warp renew theirs and the weights are worked out again. Then the maximum, the
    factor of what was summed up, and has any row of the warp renewed it?"""
    COUNT: gl.constexpr = scores.shape[1] // 2
    text: gl.constexpr = weigh_text(COUNT, DTYPE.name)
    operands: gl.constexpr = weigh_operands(COUNT, DTYPE.name)
    kinds: gl.constexpr = weigh_kinds(DTYPE)
    given = [scores, across(m, scores), gl.full_like(scores, FACTOR)]
    p, total, m, alpha, grown = gl.inline_asm_elementwise(text, operands, given, kinds, is_pure=False, pack=COUNT)
    return p, of_threads(total), of_threads(m), of_threads(alpha), of_threads(grown)


@gluon.constexpr_function
def rescale_text(COUNT):
    lines = lambda form: " ".join(form.format(n, COUNT + n, 2 * COUNT + n) for n in range(COUNT))
    skip = f"setp.eq.s32 p, ${3 * COUNT}, 0; @p bra.uni DONE;"
    return "{ .reg .pred p; " + lines("mov.f32 ${0}, ${1};") + skip + lines("mul.f32 ${0}, ${0}, ${2};") + " DONE: }"


@gluon.constexpr_function
def rescale_operands(COUNT):
    return ",".join(["=&f"] * COUNT + ["f"] * 2 * COUNT + ["r"] * COUNT)


@gluon.jit
def rescaled(acc, alpha, grown):
    """Each row times its factor alpha. Warps whose rows all have a factor of 1 (`raised`, `weighed`) go past the products."""
    COUNT: gl.constexpr = min(32, acc.shape[1] // 2)
    text: gl.constexpr = rescale_text(COUNT)
    operands: gl.constexpr = rescale_operands(COUNT)
    given = [acc, across(alpha, acc), across(grown, acc)]
    return gl.inline_asm_elementwise(text, operands, given, gl.float32, is_pure=True, pack=COUNT)'''
