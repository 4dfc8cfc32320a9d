"""Tile ranges against brute force: never skipped where an element is visible, never full where one is hidden."""
from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given, settings, strategies as st

from flashfx.codegen.ranges import bounds, never_empty
from flashfx.codegen.schedules.hopper_locate import cuts_last
from flashfx.codegen.tiles import classify, cut
from flashfx.expr import BOOL, INT, Const, Expr, Load, Var, call, parse
from flashfx.reference import evaluate

from .cases import CORE, MORE, spec

I, J, M, N, B, S = (Var(n) for n in ("i", "j", "M", "N", "b", "S"))
LENGTH = Load("length", (B,), INT)
DOC_I, DOC_J = Load("doc", (B, I), INT), Load("doc", (B, J), INT)
PAD = Load("pad", (B, J), BOOL)
ON = Load("on", (B,), BOOL)

small = st.integers(-9, 40)
atoms = st.sampled_from([I, J, call("sub", I, J), call("sub", J, I), call("add", I, J), M, N, S, LENGTH, call("abs", call("sub", I, J)),
                         call("floordiv", I, 7), call("floordiv", J, 5), call("floordiv", call("sub", J, I), 4), call("mod", J, 6),
                         call("minimum", J, call("add", I, 3)), call("maximum", call("sub", J, 8), I), call("mul", J, 3), call("mul", I, -2),
                         call("where", call("lt", I, 9), I, J), DOC_I, DOC_J])
terms = st.one_of(atoms, small.map(Const), st.tuples(atoms, small).map(lambda t: call("add", *t)))
comparisons = st.builds(lambda op, a, b: call(op, a, b), st.sampled_from(["lt", "le", "gt", "ge", "eq", "ne"]), terms, terms)
conditions = st.recursive(
    st.one_of(comparisons, comparisons, st.sampled_from([PAD, ON, Const(True), Const(False)])),
    lambda inner: st.one_of(st.builds(lambda op, a, b: call(op, a, b), st.sampled_from(["and", "or", "xor"]), inner, inner),
                            st.builds(lambda a: call("not", a), inner),
                            st.builds(lambda a, b, c: call("where", a, b, c), inner, inner, inner)), max_leaves=5)


def environment(m: int, n: int, seed: int):
    """(sizes and tensors) of random small problems."""
    g = torch.Generator().manual_seed(seed)
    size = max(m, n)
    tensors = {"length": torch.randint(0, n + 4, (2,), generator=g), "doc": torch.randint(0, 3, (2, size), generator=g).sort(-1).values,
               "pad": torch.rand(2, size, generator=g) < 0.7, "on": torch.rand(2, generator=g) < 0.5}
    return {"M": m, "N": n, "S": int(torch.randint(0, 12, (), generator=g))}, tensors


def brute(visible: Expr, m: int, n: int, sizes, tensors, b: int) -> torch.Tensor:
    env = sizes | {"b": b, "i": torch.arange(m)[:, None], "j": torch.arange(n)[None, :]}
    return evaluate(visible, env, tensors, None, torch.float64).expand(m, n)


ends = st.one_of(st.sampled_from([ON, call("ge", I, J), call("lt", J, LENGTH), call("lt", J, S), call("le", J, I)]),
                 st.integers(-140, 140).map(lambda c: call("le", J, call("add", I, c))))
up_to_rows = st.recursive(ends, lambda inner: st.builds(lambda op, a, b: call(op, a, b), st.sampled_from(["and", "or"]), inner, inner), max_leaves=4)


@settings(max_examples=400, deadline=None)
@given(up_to_rows, st.integers(1, 400), st.integers(1, 400), st.integers(0, 2 ** 16), st.sampled_from([(64, 64), (64, 128), (128, 128)]))
def test_the_last_tile_alone_is_cut(visible, m, n, seed, tile):
    """As a Hopper forward that goes from the last keys to the first takes for granted."""
    (rows, columns), found = tile, bounds(visible, "j")
    if not cuts_last(found, rows, columns):
        return
    sizes, tensors = environment(m, n, seed)
    for b in range(2):
        truth = brute(visible, m, n, sizes, tensors, b)
        for start in range(0, m, rows):
            group = truth[start: start + rows]
            env = sizes | {"b": b, "i0": start, "i1": min(start + rows, m) - 1}
            last = max(0, int(evaluate(found.hi, env, tensors, None, torch.float64)) - 1) // columns * columns
            assert group[:, :last].all() and not group[:, last + columns:].any()
            assert group[:, last:].any(1).all() or last == 0


def test_where_the_last_tile_alone_is_cut():
    cut = lambda text, rows=64, columns=128: cuts_last(bounds(parse(text, {}), "j"), rows, columns)
    assert cut("j <= i") and cut("j <= i", 128) and cut("j <= i", 64, 64)
    assert not cut("j <= i", 128, 64) and not cut("j <= i", 192)  # rows of one tile end in several
    assert cut("j <= i + 128") and not cut("j <= i + 100") and not cut("j < i")
    assert not cut("(j <= i) & (i - j < 64)") and not cut("j <= i + N - M") and not cut("j >= i")


@settings(max_examples=600, deadline=None)
@given(conditions, st.integers(1, 33), st.integers(1, 33), st.integers(0, 2 ** 16), st.sampled_from([4, 8, 16]))
def test_bounds_are_sound(visible, m, n, seed, block):
    sizes, tensors = environment(m, n, seed)
    for b in range(2):
        truth = brute(visible, m, n, sizes, tensors, b)
        for var, rows, columns, grid in (("j", m, n, truth), ("i", n, m, truth.T)):
            found, (first, last) = bounds(visible, var), ("i0", "i1") if var == "j" else ("j0", "j1")
            for start in range(0, rows, block):
                stop = min(start + block, rows)
                env = sizes | {"b": b, first: start, last: stop - 1}
                lo, hi, full_lo, full_hi = (int(evaluate(e, env, tensors, None, torch.float64))
                                            for e in (found.lo, found.hi, found.full_lo, found.full_hi))
                tile = grid[start:stop]
                outside = torch.tensor([not lo <= x < hi for x in range(columns)])
                inside = torch.tensor([full_lo <= x < full_hi for x in range(columns)])
                assert not tile[:, outside].any(), f"a visible element is skipped: {visible}, {var} for {start}..{stop - 1}: {found}"
                assert tile[:, inside].all(), f"a hidden element counts as full: {visible}, {var} for {start}..{stop - 1}: {found}"
                assert lo >= 0 and full_lo >= 0 and max(hi, full_hi) <= columns
                a, fa, fb, z = cut(lo, hi, full_lo, full_hi, block)
                assert a <= fa <= fb <= max(z, fb) and (fa == fb or (fa % block == 0 and fb % block == 0)) and a % block == 0


@settings(max_examples=300, deadline=None)
@given(conditions, st.integers(1, 20), st.integers(1, 20), st.integers(0, 2 ** 16))
def test_never_empty_is_sound(visible, m, n, seed):
    sizes, tensors = environment(m, n, seed)
    if never_empty(visible, wide=m <= n):
        assert all(brute(visible, m, n, sizes, tensors, b).any(-1).all() for b in range(2))


@pytest.mark.parametrize("name", ["causal", "window", "lengths", "prefix", "chunked", "band", "documents", "padding", "global"])
def test_classify_counts_every_tile(name):
    s, (m, n) = spec({**CORE, **MORE}[name]), (200, 260)
    _, tensors = environment(m, n, 3)
    tensors = {"length": tensors["length"], "prefix": torch.tensor([40, 90]), "doc": tensors["doc"], "pad": tensors["pad"]}
    named = {a.name: tensors[a.name] for a in s.aux}
    counts = classify(s, 32, 16, m, n, [2, 3], named)
    assert counts.exact and counts.total == 2 * 3 * 7 * 17
    truth = [brute(s.visible, m, n, {"M": m, "N": n, "h": 0}, named, b) for b in range(2)]
    full = skipped = 0
    for grid in truth:
        for i in range(0, m, 32):
            for j in range(0, n, 16):
                tile = grid[i:i + 32, j:j + 16]
                full += 3 * int(bool(tile.all()) and j + 16 <= n)
                skipped += 3 * int(not tile.any())
    assert counts.full <= full and counts.skipped <= skipped
    if name in ("causal", "window", "lengths", "prefix", "band"):  # nothing left on the table
        assert (counts.full, counts.skipped) == (full, skipped)


def test_classify_without_tensors_says_so():
    counts = classify(spec(MORE["documents"]), 16, 16, 64, 64, [1, 1])
    assert not counts.exact and counts.full == 0 and counts.skipped == 6
    assert_expected_inline(str(counts), "6 (38%) tiles skipped, 0 (0%) full, 4 (25%) partial, 6 (38%) decided by the data at run time")


@pytest.mark.parametrize("count", [3, 40])
def test_of_many_ranges_one_is_full(count):
    """Which one is the longest is told by all of both, again and again: of forty, one after the other, by more than fits a machine."""
    text = "(j <= i)" + "".join(f" | ((j >= {40 * n}) & (j < {40 * n + 20 + n}))" for n in range(count))
    visible, tile = parse(text, {}), torch.arange(64)[:, None]
    found = bounds(visible, "j")
    assert found.full_lo.nodes + found.full_hi.nodes < 1000
    lo, hi = (int(evaluate(e, {"i0": 0, "i1": 63, "M": 64, "N": 2000}, {}, None, torch.float64)) for e in (found.full_lo, found.full_hi))
    assert hi - lo >= 20 and evaluate(visible, {"i": tile, "j": torch.arange(lo, hi)}, {}, None, torch.float64).all()


def test_bounds_read_like_the_mask():
    show = lambda text, var="j": "{0.lo} <= x < {0.hi}, full {0.full_lo} <= x < {0.full_hi}".format(bounds(parse(text, {"n": INT}), var))
    assert_expected_inline(show("j <= i"), "0 <= x < minimum(N, i1 + 1), full 0 <= x < minimum(N, i0 + 1)")
    assert_expected_inline(show("j <= i", "i"), "j0 <= x < M, full j1 <= x < M")
    assert_expected_inline(show("(j <= i) & (i - j < 128)"),
                           "maximum(0, i0 - 127) <= x < minimum(N, i1 + 1), full maximum(0, i1 - 127) <= x < minimum(N, i0 + 1)")
    assert_expected_inline(show("j < n[b]"), "0 <= x < minimum(N, n[b]), full 0 <= x < minimum(N, n[b])")
    assert_expected_inline(show("(j - i) % 4 == 0"), "0 <= x < N, full 0 <= x < 0")


@pytest.mark.parametrize("text, wide, expected", [("j <= i", False, True), ("(j <= i) & (i - j < 9)", True, True), ("j <= i + N - M", True, True),
                                                  ("(j <= i) & (i - j < 9)", False, False), ("j < i", True, False), ("j <= i + N - M", False, False)])
def test_never_empty(text, wide, expected):
    assert never_empty(parse(text, {}), wide) is expected


