"""The cost model: its formulas against tilings that are counted, their limits against FlashAttention's theorems, its times against an H200's."""
from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from flashfx.codegen import cost
from flashfx.codegen.gpu import BY_NAME, GPUS
from flashfx.codegen.plan import make_plan, overridden
from flashfx.codegen.tiles import classify
from flashfx.region import Problem

from .kernels.cases import CORE, MORE, problem, spec

DATA = Path(__file__).parent / "data" / "h200_attention.json"


def counted(s, p, m: int, n: int, inner: str) -> dict[str, int]:
    """Walk the tiles of a causal or full mask one by one, as a program with one tile of each operand in SRAM does, and count."""
    width, vectors = 2, 2 * cost.LSE
    causal = s.is_masked
    found = {"tiles": 0, "products": 0, "exps": 0, "inner": 0}
    for _ in range(math.prod(p.extents)):
        for i0 in range(0, p.M, m):
            for j0 in range(0, p.N, n):
                if causal and j0 > min(i0 + m, p.M) - 1:
                    continue
                found["tiles"] += 1
                found["exps"] += m * n
                found["products"] += 2 * m * n * (p.D + p.Dv)  # Q K^T and P V, or S and dP
                rows = n if inner == "k" else m
                found["inner"] += rows * (p.D + p.Dv) * width + (rows * vectors if inner == "q" else 0)
    return found


@pytest.mark.parametrize("variant", ["full", "causal"])
@pytest.mark.parametrize("m, n, M, D, Dv", [(64, 64, 256, 64, 64), (128, 32, 512, 32, 64), (16, 128, 384, 128, 128)])
def test_formulas_count_what_a_tiling_does(variant, m, n, M, D, Dv):
    s, p = spec(CORE[variant]), Problem((2, 3), M, M, D, Dv, "bfloat16", "bfloat16")
    z, found = 6, counted(s, p, m, n, "k")
    tiles = classify(s, m, n, M, M, p.extents)
    assert tiles.full + tiles.partial == found["tiles"]
    products, exps, once, again, outer = cost._compiled("forward")(z, 1, M, M, D, Dv, 2, m, n, found["tiles"])
    assert (products, exps, outer) == (found["products"], found["exps"], z * -(-M // m))
    assert once + again == found["inner"] + z * M * (D + Dv) * 2 + cost.LSE * z * M  # q, out and the log-sum-exp
    found = counted(s, p, m, n, "q")
    products, _, once, again, _ = cost._compiled("keys")(z, 1, M, M, D, Dv, 2, m, n, found["tiles"])
    assert products == 2 * found["products"]
    assert once + again == found["inner"] + 2 * z * M * (D + Dv) * 2  # k, v and their gradients


def test_the_theorems_are_the_limits():
    """Theta(N^2 d^2 / S) accesses: in bytes, twice (k and v, or q and dO) four (a quarter of S for each tile) W^2."""
    import sympy
    W, D = sympy.symbols("W D", positive=True, integer=True)
    assert sympy.simplify(cost.limit("forward") - 8 * W ** 2) == 0  # Theorem 2
    assert sympy.simplify(cost.limit("rows") - 8 * W ** 2) == 0     # Theorem 5, the queries' share
    assert sympy.simplify(cost.limit("keys") - 8 * W ** 2 * (1 + 4 / (D * W))) == 0  # and the keys', with the two vectors of each row


@pytest.mark.parametrize("share", [0.5, 0.25])
def test_block_sparse_accesses_shrink_with_the_visible_share(share):
    """Proposition 4: Theta(N d + N^2 d^2 s / S)."""
    n, d = 2 ** 14, 64
    read = lambda part: sum(cost._compiled("forward")(1, 1, n, n, d, d, 2, 128, 128, part * (n / 128) ** 2)[2:4])
    fixed = 2 * n * d * 2 + cost.LSE * n  # q and out
    assert math.isclose(read(share) - fixed, share * (read(1.0) - fixed), rel_tol=1e-9)


def recorded():
    rows = json.loads(DATA.read_text())["rows"]
    for row in rows:
        p = Problem((row["batch"], row["heads"]), row["length"], row["length"], row["head_size"], row["head_size"], row["dtype"], row["dtype"])
        for direction in ("forward", "backward"):
            measured = row["ms"]["forward"] if direction == "forward" else row["ms"]["both"] - row["ms"]["forward"]
            with overridden(schedule=row.get("schedule", "hopper")):
                plan = make_plan(spec(CORE[row["variant"]]), p, BY_NAME["H200"], direction)
            yield measured * 1e-3, cost.seconds(spec(CORE[row["variant"]]), p, plan)


def ranks(values) -> list[int]:
    return sorted(range(len(values)), key=values.__getitem__)


def test_predicted_times_follow_measured_ones():
    """In geometric mean within 10 %, each within 30 %, in the same order (Spearman's rank correlation at least 0.98)."""
    measured, predicted = zip(*recorded())
    off = [abs(math.log(b / a)) for a, b in zip(measured, predicted)]
    assert math.exp(sum(off) / len(off)) < 1.10 and math.exp(max(off)) < 1.30
    place = [dict(zip(ranks(v), range(len(v)))) for v in (measured, predicted)]
    n = len(measured)
    assert 1 - 6 * sum((place[0][k] - place[1][k]) ** 2 for k in range(n)) / (n * (n * n - 1)) > 0.98


@pytest.mark.parametrize("variant", [*CORE, *MORE])
def test_every_plan_has_a_cost_that_says_what_binds(variant):
    s, p = spec({**CORE, **MORE}[variant]), problem("self", 64, "float16", M=1024, heads=8)
    for gpu in GPUS[::5]:
        for direction in ("forward", "backward"):
            for one in cost.predict(s, p, make_plan(s, p, gpu, direction)):
                assert 0 < one.seconds < 1 and one.tail >= 1 and one.binds in str(one)


def test_grouped_queries_read_their_keys_once():
    """Two queries to a key: half the bytes of keys and values, the same products."""
    p = Problem((2, 4, 2), 512, 512, 64, 64, "bfloat16", "bfloat16")
    plan = make_plan(spec(CORE["full"], "gqa"), p, BY_NAME["H200"], "forward")
    alone = Problem((2, 8), 512, 512, 64, 64, "bfloat16", "bfloat16")
    found, whole = cost._evaluated("forward", spec(CORE["full"], "gqa"), p, plan), cost._evaluated("forward", spec(CORE["full"]), alone, plan)
    assert found[0] == whole[0]
    assert whole[2] - found[2] == 2 * 4 * 512 * (64 + 64) * 2  # eight batch indices fewer


def test_what_binds_is_what_there_is_most_of():
    p = Problem((4, 16), 4096, 4096, 128, 128, "bfloat16", "bfloat16")
    of = lambda gpu, p, variant: cost.predict(spec({**CORE, **MORE}[variant]), p, make_plan(spec({**CORE, **MORE}[variant]), p, BY_NAME[gpu], "forward"))[0]
    assert of("H200", p, "full").binds == "matrix units"
    assert of("H200", Problem((4, 16), 4096, 4096, 32, 32, "bfloat16", "bfloat16"), "softcap").binds == "special functions"
    assert of("H200", Problem((512, 16), 64, 64, 64, 64, "bfloat16", "bfloat16"), "full").binds == "starting and ending programs"
    assert of("H200", Problem((64, 16), 1, 8192, 64, 64, "bfloat16", "bfloat16"), "full").binds == "device memory"  # decoding
    assert of("L4", p, "full").seconds > of("A100", p, "full").seconds > of("H200", p, "full").seconds > of("B200", p, "full").seconds
    assert of("H200", p, "causal").seconds < 0.6 * of("H200", p, "full").seconds


def test_a_relative_table_costs_no_bytes_of_every_pair():
    """What is read at j - i is M + N elements a head; a bias is M * N."""
    from flashfx.codegen.cost import moved
    from flashfx.codegen.gpu import BY_NAME
    from flashfx.codegen.plan import make_plan
    from .kernels.cases import CORE, MORE, problem, spec
    p = problem("self", 64, "bfloat16", M=4096, heads=8)
    bytes_of = lambda variant: moved(spec(variant), p, make_plan(spec(variant), p, BY_NAME["A100"], "forward"))
    plain, line, bias = bytes_of(CORE["full"]), bytes_of(MORE["relative"]), bytes_of(CORE["bias"])
    assert plain < line < plain * 1.1 and bias > line + p.M * p.N * 8


@pytest.mark.parametrize("extents, M", [((0, 4), 64), ((2, 4), 0)])
def test_nothing_costs_a_launch(extents, M):
    p = Problem(extents, M, M, 64, 64, "float16", "float16")
    for direction in ("forward", "backward"):
        plan = make_plan(spec(CORE["causal"]), p, BY_NAME["H200"], direction)
        assert cost.moved(spec(CORE["causal"]), p, plan) == 0
        assert all(c.seconds == cost.LAUNCH for c in cost.predict(spec(CORE["causal"]), p, plan))
