"""The cost model: its formulas against tilings that are counted, their limits against FlashAttention's theorems, its times against an H200's."""
from __future__ import annotations

import functools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from flashfx.bench.fit import SECONDS, fit, points
from flashfx.bench.sweep import VARIANTS, grid
from flashfx.codegen import cost
from flashfx.codegen.candidates import ask, ranked
from flashfx.codegen.gpu import BY_NAME, GPUS
from flashfx.codegen.plan import make_plan, overridden
from flashfx.codegen.rates import RATES
from flashfx.codegen.spilling import FEW
from flashfx.codegen.tiles import CUT, classify, estimate
from flashfx.region import Problem

from .kernels.cases import CORE, MORE, Variant, problem, spec

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
    products, exps, once, again, outer, *_ = cost._compiled("forward")(z, 1, M, M, D, Dv, 2, m, n, found["tiles"])
    assert (products, exps, outer) == (found["products"], found["exps"], z * -(-M // m))
    assert once + again == found["inner"] + z * M * (D + Dv) * 2 + cost.LSE * z * M  # q, out and the log-sum-exp
    found = counted(s, p, m, n, "q")
    products, _, once, again, *_ = cost._compiled("keys")(z, 1, M, M, D, Dv, 2, m, n, found["tiles"])
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


def ranks(values) -> dict[int, int]:
    return {i: place for place, i in enumerate(sorted(range(len(values)), key=values.__getitem__))}


def spearman(a, b) -> float:
    """Rank correlation."""
    n, x, y = len(a), ranks(a), ranks(b)
    return 1 - 6 * sum((x[k] - y[k]) ** 2 for k in range(n)) / (n * (n * n - 1))


def mean(ratios) -> float:
    """Geometric mean of how far ratios are from 1."""
    return math.exp(sum(abs(math.log(r)) for r in ratios) / len(ratios))


def test_predicted_times_follow_those_of_another_day():
    """None of these was fitted. In geometric mean within 12 % (measured: 8.6 %, forwards under masks being faster since), each within 35 % (17 %), in the same order."""
    measured, predicted = zip(*recorded())
    off = [b / a for a, b in zip(measured, predicted)]
    assert mean(off) < 1.12 and max(map(abs, map(math.log, off))) < math.log(1.35)
    assert spearman(measured, predicted) > 0.98


# ---------------------------------------------------------------------------- the held-out half of the recorded sweep

TILES = Path(__file__).parent / "data" / "h200_tiles.json"
SWEEP = points(TILES)


def measured(point, plan) -> float | None:
    """Seconds of a plan's kernels in the sweep, None if one was not measured."""
    of = lambda schedule, kernel, tiles=(): point.of(schedule, kernel).get(tiles)
    if plan.direction == "forward":
        return of(plan.schedule, "forward" if plan.parts == 1 else "split", plan.tiles)
    if plan.kernel == "one_tile":  # with the gradient of a bias where that stays in registers
        own = [of("triton", "one_tile", plan.tiles), *([of("triton", "delta"), of("triton", "dense", plan.dense.tiles)] if plan.dense else [])]
        return None if None in own else sum(own)
    own = [of(plan.schedule, "one_pass", plan.tiles), of("hopper", "sum")] if plan.schedule == "hopper" else \
        [of("triton", "keys", plan.tiles), of("triton", "rows", plan.rows.tiles)]
    own += [of(plan.schedule, "delta"), *([of("triton", "dense", plan.dense.tiles)] if plan.dense and not plan.stored else [])]
    return None if None in own else sum(own)


def best(point, direction: str) -> float:
    """Seconds of the fastest tiles of the faster schedule."""
    least = lambda schedule, kernel: min(point.of(schedule, kernel).values(), default=math.inf)
    if direction == "forward":
        return min(least("hopper", "forward"), least("triton", "forward"), least("triton", "split"))
    whole = lambda schedule, *kernels: sum(least(schedule, kernel) for kernel in kernels)
    hopper, portable = whole("hopper", "delta", "one_pass", "sum"), whole("triton", "delta", "keys", "rows")  # Hopper's has the gradient of a bias in it
    if not (dense := point.of("triton", "dense")):
        return min(hopper, portable, least("triton", "one_tile"))
    held = min((s for tiles, s in point.of("triton", "one_tile").items() if tiles[0] >= point.problem.M), default=math.inf)
    return min(hopper, min(portable, whole("triton", "delta", "one_tile")) + min(dense.values()), held)


@functools.cache
def judged(fitted: bool) -> list[tuple]:
    """(measured time of the plan, of the best tiles, predicted time) of each point and direction of a half."""
    found = []
    for point in (p for p in SWEEP if p.fitted == fitted):
        for direction in ("forward", "backward") if point.problem.M > 1 else ("forward",):
            plan = make_plan(point.spec, point.problem, BY_NAME["H200"], direction, listed=False, needs=(True,) * 3 + VARIANTS[point.variant][4])
            seconds = measured(point, plan)
            if seconds is not None:
                found.append((seconds, best(point, direction), cost.seconds(point.spec, point.problem, plan)))
    return found


def test_the_choice_is_as_good_as_the_best_measured_tiles():
    """On the held-out half: within 5 % in geometric mean (measured: 0.9 %), each within 25 % (23 %, 64 keys of heads of 128; 5 % of 1024 queries and keys and more)."""
    found = judged(False)
    assert len(found) >= 100
    lost = [own / least for own, least, _ in found]
    assert mean(lost) < 1.05 and max(lost) < 1.25


def test_predicted_times_of_the_held_out_half():
    """Within 25 % in geometric mean (measured: 7.2 %), in the same order (rank correlation 0.996)."""
    own, _, predicted = zip(*judged(False))
    assert mean([p / m for p, m in zip(predicted, own)]) < 1.25
    assert spearman(own, predicted) > 0.9


@pytest.mark.parametrize("schedule, kernel", list(RATES))
def test_rates_are_what_the_fit_finds(schedule, kernel):
    """`python -m flashfx bench fit` prints them."""
    found, count = fit(SWEEP, schedule, kernel, BY_NAME["H200"])
    assert count >= 15
    for name, value in found._asdict().items():
        assert math.isclose(value, getattr(RATES[schedule, kernel], name), rel_tol=0.05, abs_tol=0.03 if name not in SECONDS else 3e-8), name


def test_what_spilled_is_not_proposed():
    """Of all kernels of the sweep that spilled registers, those of one tile of all keys and of the Hopper forward more than a few bytes (ALiBi at head size 128 by
    Triton 3.6 20, behind the loop over keys); what the Hopper backward spills is bounded in tests/kernels/test_compile.py."""
    rows = [dict(zip(("name", "schedule", "arch", "kernel", "m", "n", "warps", "stages", "shared", "registers", "spilled"), b)) for b in json.loads(TILES.read_text())["builds"]]
    known = {str(w): w for w in grid()}
    spilled = [r for r in rows if r["spilled"] > FEW * (r["kernel"] == "one_tile" or r["schedule"] == "hopper") and r["name"] in known and r["kernel"] != "one_pass"]
    assert len(spilled) > 80
    for row in spilled:
        w = known[row["name"]]
        offered = [c.tiles for c in ranked(ask(row["schedule"], row["kernel"], w.spec, w.problems[0], BY_NAME["H200"])) if not c.unfit]
        assert (row["m"], row["n"], row["warps"], row["stages"]) not in offered, row


def test_what_memory_binds_alike_is_decided_by_the_rest():
    """On an H100 memory takes as long as any of these tiles: the larger ones have less to do beside it."""
    s, p = spec(CORE["causal"]), Problem((32, 16), 512, 512, 128, 128, "bfloat16", "bfloat16")
    first, *others = ranked(ask("hopper", "forward", s, p, BY_NAME["H100"]))
    alike = [c for c in others if c.seconds == first.seconds and c.tiles[:2] != first.tiles[:2]]
    assert alike and all(c.busy > first.busy for c in alike) and make_plan(s, p, BY_NAME["H100"], "forward").tiles == first.tiles


@pytest.mark.parametrize("head, variant, stages", [
    (64, MORE["band"], {2, 3}), (128, MORE["band"], {2}), (128, CORE["bias"], {2}),
    (128, Variant(("bias: float[4]", "other: float[4]"), "qk + bias[b, h, i, j] + other[b, h, i, j]"), {1})])
def test_one_stage_of_the_hopper_backward_is_for_what_has_no_place_for_two(head, variant, stages):
    """With one it spills at head sizes above 64."""
    s = spec(variant)
    tiled = tuple(a.name for a in s.aux)
    asked = ask("hopper", "keys", s, Problem((4, 16), 4096, 4096, head, head, "bfloat16", "bfloat16"), BY_NAME["H200"], tiled=tiled)
    assert {c.tiles[3] for c in ranked(asked)} == stages


@pytest.mark.parametrize("variant", [*CORE, *MORE])
def test_every_plan_has_a_cost_that_says_what_binds(variant):
    s, p = spec({**CORE, **MORE}[variant]), problem("self", 64, "float16", M=1024, heads=8)
    for gpu in GPUS[::5]:
        for direction in ("forward", "backward"):
            for one in cost.predict(s, p, make_plan(s, p, gpu, direction)):
                assert 0 < one.seconds < 1 and one.binds in str(one)


def test_grouped_queries_read_their_keys_once():
    """Two queries to a key: half the bytes of keys and values, the same products."""
    p = Problem((2, 4, 2), 512, 512, 64, 64, "bfloat16", "bfloat16")
    alone = Problem((2, 8), 512, 512, 64, 64, "bfloat16", "bfloat16")
    found, whole = (cost.traffic("forward", cost.facts(s, q), 64, 64, 16 * 64) for s, q in ((spec(CORE["full"], "gqa"), p), (spec(CORE["full"]), alone)))
    assert found.products == whole.products
    assert whole.once - found.once == 2 * 4 * 512 * (64 + 64) * 2  # eight batch indices fewer


def test_what_binds_is_what_there_is_most_of():
    p = Problem((4, 16), 4096, 4096, 128, 128, "bfloat16", "bfloat16")
    of = lambda gpu, p, variant: cost.predict(spec({**CORE, **MORE}[variant]), p, make_plan(spec({**CORE, **MORE}[variant]), p, BY_NAME[gpu], "forward"))[0]
    assert of("H200", p, "full").binds == "matrix units"
    assert of("H200", Problem((4, 16), 4096, 4096, 32, 32, "bfloat16", "bfloat16"), "softcap").binds == "special functions"
    assert of("H200", Problem((512, 16), 128, 128, 32, 32, "bfloat16", "bfloat16"), "causal").binds == "starting and ending programs"
    assert of("H200", Problem((64, 16), 1, 8192, 64, 64, "bfloat16", "bfloat16"), "full").binds == "device memory"  # decoding
    assert of("L4", p, "full").seconds > of("A100", p, "full").seconds > of("H200", p, "full").seconds
    assert of("A100", p, "full").seconds > of("B200", p, "full").seconds
    assert of("H200", p, "causal").seconds < 0.6 * of("H200", p, "full").seconds


def test_a_relative_table_costs_no_bytes_of_every_pair():
    """What is read at j - i is M + N elements a head; a bias is M * N."""
    p = problem("self", 64, "bfloat16", M=4096, heads=8)
    bytes_of = lambda variant: cost.moved(spec(variant), p, make_plan(spec(variant), p, BY_NAME["A100"], "forward"))
    plain, line, bias = bytes_of(CORE["full"]), bytes_of(MORE["relative"]), bytes_of(CORE["bias"])
    assert plain < line < plain * 1.1 and bias > line + p.M * p.N * 8


@pytest.mark.parametrize("head, ms", [(64, 5.3), (128, 4.4)])
def test_a_table_that_ends_costs_what_lies_between_its_ends(head, ms):
    """T5's trained table at N = 4096, 16k tokens, forward and backward: what an H200 took, within 25 % (21 % too fast at head size 64). `facts.ENDS` are assumed."""
    p = Problem((4, 2048 // head), 4096, 4096, head, head, "bfloat16", "bfloat16")
    of = lambda s, direction: cost.seconds(s, p, make_plan(s, p, BY_NAME["H200"], direction))
    seconds = lambda variant: of(spec(MORE[variant]), "forward") + of(spec(MORE[variant]), "backward")
    assert abs(seconds("ended") / (ms * 1e-3) - 1) < 0.25 and seconds("relative") > 1.5 * seconds("ended")


def test_keys_in_parts_cost_their_bytes_and_a_launch():
    """Maximum, sum and accumulator of each part of a row are written and read; all else is read as by one program."""
    s, p = spec(CORE["full"]), Problem((1, 8), 1, 32768, 64, 128, "bfloat16", "bfloat16")
    with overridden(forward=(16, 64, 4, 3), parts=1):
        whole = make_plan(s, p, BY_NAME["H200"], "forward")
    parts = replace(whole, parts=5)
    assert cost.moved(s, p, parts) - cost.moved(s, p, whole) == 2 * 8 * 5 * (128 + 2) * 4
    forward, combine = cost.predict(s, p, parts)
    assert combine.kernel == "combine" and cost.LAUNCH <= combine.seconds < 2 * cost.LAUNCH
    assert cost.seconds(s, p, whole) > 3 * forward.seconds


@pytest.mark.parametrize("extents, M", [((0, 4), 64), ((2, 4), 0)])
def test_nothing_costs_a_launch(extents, M):
    p = Problem(extents, M, M, 64, 64, "float16", "float16")
    for direction in ("forward", "backward"):
        plan = make_plan(spec(CORE["causal"]), p, BY_NAME["H200"], direction)
        assert cost.moved(spec(CORE["causal"]), p, plan) == 0
        assert all(c.seconds == cost.LAUNCH for c in cost.predict(spec(CORE["causal"]), p, plan))


@pytest.mark.parametrize("variant", ["lengths", "documents", "additive_mask"])
def test_masks_that_the_data_decide_get_the_faster_forward(variant):
    """On an H200 at head size 64, N = 4096, the Hopper schedule had 450, 190 and 280 TFLOP/s, the portable one 397, 175 and 240."""
    p = Problem((4, 32), 4096, 4096, 64, 64, "bfloat16", "bfloat16")
    assert make_plan(spec(MORE[variant] if variant in MORE else CORE[variant]), p, BY_NAME["H200"], "forward").schedule == "hopper"


def test_tiles_that_the_data_may_cut_are_taken_to_be_cut_in_part():
    """Whatever they may cut, as many tiles are visited; where the data cut none, nothing changes."""
    counted = lambda text: estimate(spec(Variant(("ids: int[1]",), where=text)).visible, 128, 128, 4096, 4096, (("b", 0), ("h", 0)))
    full, partial = counted("j <= i")
    assert (full, partial) == (31 * 32 / 2, 32)
    assert counted("(j <= i) & (ids[i] == ids[j])") == (full * (1 - CUT), partial + full * CUT)
    assert counted("j < ids[b]") == (1024 * (1 - CUT), 1024 * CUT)
