"""Plans fit and say why; GPU rows check themselves; generated files are read, cached and named by their text."""
from __future__ import annotations

import ast
import inspect
import itertools
import os
import re
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline

from flashfx.codegen import candidates, cost, gpu, load, triton_host
from flashfx.codegen.blocks import pays
from flashfx.codegen.candidates import representative, rounded
from flashfx.codegen.limits import shared_bytes
from flashfx.codegen.registers import LIMIT, registers_per_thread
from flashfx.codegen.packing import packed_axes
from flashfx.codegen.parts import chunks
from flashfx.codegen.override import SCHEDULES
from flashfx.codegen.plan import DIRECTIONS, MARGIN, make_plan, overridden, why_not_hopper
from flashfx.codegen.render import blocks_module, render
from flashfx.codegen.schedules import hopper
from flashfx.codegen.split import number
from flashfx.codegen.writer import WIDTH, Writer, wrapped
from flashfx.errors import PlanError
from flashfx.expr import parse
from flashfx.region import Problem

from ..thinning import thinned
from .cases import CORE, MORE, Variant, problem, spec

ALL = {**CORE, **MORE}


@pytest.mark.parametrize("row", gpu.GPUS, ids=lambda r: r.name)
@pytest.mark.parametrize("head", [8, 16, 40, 64, 72, 80, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_every_plan_fits(row, head, dtype):
    for name in ("full", "causal", "window", "bias", "dropout", "softcap"):
        for direction in DIRECTIONS:
            p = problem("self", head, dtype, M=1024)
            try:
                plan = make_plan(spec(ALL[name]), p, row, direction)
            except PlanError as error:
                assert "bfloat16" in str(error) or "shared memory" in str(error)
                assert row.capability < (8, 0) or row.vendor == "AMD", f"every card from Ampere on runs every head size: {error}"
                continue
            for part in (p for p in (plan, plan.rows, plan.dense) if p):
                assert part.shared <= row.shared_per_block
                if part.schedule == "hopper":
                    assert row.capability == (9, 0) and part.BLOCK_M % hopper.ROWS == 0 and (part.by_thirds or part.BLOCK_N & (part.BLOCK_N - 1) == 0)
                    assert 65536 >= part.options["maxnreg"] * 32 * (part.num_warps + 4)
                    continue
                if gpu.units(p, row) == "wgmma" and part.kernel != "dense":
                    assert registers_per_thread(part.kernel, part.tiles, p, spec(ALL[name])) <= LIMIT[part.kernel]
                assert all(n >= 16 and n & (n - 1) == 0 for n in (part.BLOCK_M, part.BLOCK_N)) and max(part.BLOCK_M, part.BLOCK_N) <= 128


@pytest.mark.parametrize("card, head", thinned(itertools.product(["H200", "B200", "A100", "RTX 4090"], [64, 80, 128, 192, 256]), 3))
def test_plans_fit_lengths_that_no_tile_divides(card, head):
    """A plan is chosen for a range of lengths: what it says of shared memory holds for each of them."""
    row = gpu.BY_NAME[card]
    for (name, variant), N, listed in itertools.product(ALL.items(), (100, 1000, 1008, 8190), (False, True)):
        s, p = spec(variant), Problem((2, 16), N, N, head, head, "bfloat16", "bfloat16")
        for direction in DIRECTIONS:
            plan = make_plan(s, p, row, direction, listed=listed)
            for part in (p for p in (plan, plan.rows) if p and p.schedule == "triton"):
                taken = shared_bytes(part.kernel, part.tiles, p, s, row, part.listed, bool(part.packed), part.descriptors)
                assert taken <= part.shared <= row.shared_per_block, (name, N, listed, part, taken)


@pytest.mark.parametrize("size, same", [(1, 1), (5, 5), (9, 10), (13, 14), (16, 16), (24, 24), (100, 111), (112, 112), (128, 128), (1000, 1023), (1008, 1008), (1024, 1024),
                                        (1025, 1279), (1040, 1264), (1152, 1280), (65537, 81919)])
def test_a_range_of_lengths_holds_what_needs_the_same(size, same):
    p = representative(problem(M=size, N=size))
    assert (p.M, p.N) == (same, same) and (p.N % 128 == 0, p.N % 16 == 0) == (size % 128 == 0, size % 16 == 0) and representative(p) == p
    more, fewer = representative(problem(M=size + 1, N=size)), representative(problem(M=size, N=size + 1))
    assert more.M > more.N and fewer.M <= fewer.N


def test_what_cannot_fit_raises():
    tiny = replace(gpu.BY_NAME["T4"], shared_per_block=4096, shared_per_sm=4096)
    with pytest.raises(PlanError, match="even 16x16 tiles need .* bytes of shared memory .* T4 has 4096 bytes"):
        make_plan(spec(CORE["full"]), problem("self", 256, "float16"), tiny, "forward")
    with pytest.raises(PlanError, match="T4 .* has no bfloat16 matrix unit: use float16"):
        make_plan(spec(CORE["full"]), problem("self", 64, "bfloat16"), gpu.BY_NAME["T4"], "forward")
    with pytest.raises(PlanError, match="float64 runs in the tiled PyTorch schedule"):
        make_plan(spec(CORE["full"]), problem("self", 64, "float64"), gpu.BY_NAME["A100"], "forward")
    with pytest.raises(ValueError, match="direction must be one of"):
        make_plan(spec(CORE["full"]), problem(), gpu.BY_NAME["A100"], "sideways")
    with pytest.raises(ValueError, match="unknown kernels"):
        with overridden(fwd=(16, 16, 4, 1)):
            pass


@pytest.mark.parametrize("name", ALL)
def test_what_is_not_priced_is_no_faster(name):
    """A choice prices what its bounds do not rule out; `ranked` prices everything."""
    for kind, head, length in (("self", 64, 512), ("self", 80, 4096), ("gqa", 128, 2048), ("gqa", 64, 96), ("gqa", 192, 1)):
        s, p = spec(ALL[name], kind), problem(kind, head, "bfloat16", M=length, N=max(length, 512), batch=4, heads=8)
        for row, schedule, kernel in itertools.product(("H200", "A100", "B200"), ("triton", "hopper"), ("forward", "keys", "rows")):
            if schedule == "hopper" and (row != "H200" or kernel == "rows"):
                continue
            for packed in {False, schedule == "triton" and kernel == "forward" and bool(packed_axes(s, p))}:
                asked = candidates.ask(schedule, kernel, s, p, gpu.BY_NAME[row], packed=packed)
                every, (best, compared) = candidates.ranked(asked), candidates.chosen(asked)
                seconds = {c.tiles: c.seconds for c in every if not c.unfit}
                groups = candidates.bounded(asked)
                fitting = [tiles for g in groups for tiles in g.tiles if tiles in seconds]
                assert best == every[0] and compared == (bool(seconds) and not groups[0].spills and max(len(fitting), len(groups)) > 1)
                for group, tiles in ((g, t) for g in groups for t in g.tiles):
                    bound = candidates._least(asked, tiles, group.registers)  # of so many stages or fewer
                    assert group.seconds <= bound <= seconds.get(tiles, float("inf")), (asked, tiles)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_schedule_is_the_one_predicted_faster(name, direction):
    """Both in full; a choice plans the other as far as it takes to tell."""
    row = gpu.BY_NAME["H200"]
    for kind, head, length in itertools.product(("self", "gqa"), (64, 128), (100, 512, 1024, 8192)):
        s, p = spec(ALL[name], kind), problem(kind, head, "bfloat16", M=length, batch=2, heads=4)
        if why_not_hopper(s, p, row, direction, listed=pays(s, p)):
            continue
        plans = {}
        for schedule in SCHEDULES:
            with overridden(schedule=schedule):
                plans[schedule] = make_plan(s, p, row, direction)
        hopper_, portable = (cost.seconds(s, rounded(p), plans[k], exact=False) for k in ("hopper", "triton"))
        best = plans["hopper" if hopper_ <= MARGIN * portable else "triton"]
        assert replace(make_plan(s, p, row, direction), reason="") == replace(best, reason=""), (kind, head, length)


def test_tiles_divide_the_blocks_of_a_list():
    """A kernel over keys steps through blocks of 64 rows: given tiles of 128 would skip half of each."""
    s, p, row = spec({**CORE, **MORE}["documents"]), problem("self", 64, "bfloat16", M=1024), gpu.BY_NAME["A100"]
    assert make_plan(s, p, row, "backward", listed=True).BLOCK_M <= 64
    with overridden(keys=(128, 64, 8, 2)):
        assert make_plan(s, p, row, "backward", listed=False).BLOCK_M == 128
        with pytest.raises(PlanError, match="tiles of 128x64 do not divide the blocks of 64x128"):
            make_plan(s, p, row, "backward", listed=True)


def test_a_plan_is_one_line():
    s, p = spec(MORE["shared_bias"]), problem("self", 128, "bfloat16", M=4096)
    assert_expected_inline(str(make_plan(spec(CORE["causal"]), p, gpu.BY_NAME["H200"], "forward")), """\
hopper on H200: forward 128x128, 8 warps, 2 stages, 192 KiB shared, TMA (192 of 227 KiB shared memory, about 160 of 255 registers, predicted fastest of those that fit)""")
    with overridden(schedule="triton"):
        assert_expected_inline(str(make_plan(spec(CORE["causal"]), p, gpu.BY_NAME["H200"], "forward")), """\
triton on H200: forward 64x64, 4 warps, 3 stages, 113 KiB shared, TMA (113 of 227 KiB shared memory, about 160 of 255 registers, predicted fastest of those that fit; not warp-specialised: the portable schedule was asked for)""")
    assert_expected_inline(str(make_plan(s, p, gpu.BY_NAME["A100"], "backward")), """\
triton on A100: keys 32x64, 8 warps, 1 stages, 56 KiB shared; rows 64x32, 8 warps, 2 stages, 56 KiB shared; dense 64x32, 4 warps, 1 stages, 74 KiB shared (56 of 163 KiB shared memory, the largest tiles that compile without spilling)""")


def test_rows_and_devices():
    assert gpu.current("cpu") == gpu.DEFAULT
    assert gpu.nearest("NVIDIA A100-SXM4-80GB", (8, 0)) == (gpu.BY_NAME["A100"], True)
    assert gpu.nearest("Tesla V100-SXM2-16GB", (7, 0)) == (gpu.BY_NAME["V100"], True)
    assert gpu.nearest("NVIDIA GeForce RTX 4090", (8, 9)) == (gpu.BY_NAME["RTX 4090"], True)
    assert gpu.nearest("NVIDIA H200", (9, 0)) == (gpu.BY_NAME["H200"], True)
    assert gpu.nearest("NVIDIA A100-SXM4-40GB", (8, 0)) == (gpu.BY_NAME["A100-SXM4-40GB"], True)
    assert gpu.nearest("NVIDIA H100 PCIe", (9, 0)) == (gpu.BY_NAME["H100 PCIe"], True)
    assert gpu.nearest("NVIDIA GH200 480GB", (9, 0)) == (gpu.BY_NAME["GH200"], True)
    row, own = gpu.nearest("Some Card", (12, 1))
    assert not own and row.capability == (12, 0)
    with pytest.raises(AssertionError, match="operations per byte"):
        replace(gpu.BY_NAME["H100"], bandwidth=1e13, matrix_rate=1e14)


def test_chunks():
    widths = lambda d: [c.width for c in chunks(d)]
    assert [widths(d) for d in (8, 16, 40, 64, 72, 80, 96, 192, 256)] == [
        [16], [16], [32, 16], [64], [64, 16], [64, 16], [64, 32], [128, 64], [256]]
    assert [c.masked for c in chunks(40)] == [False, True] and not any(c.masked for c in chunks(80))
    assert [c.width for c in chunks(80, 32)] == [32, 32, 16]


def test_files(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    s, p = spec(CORE["causal"]), problem("self", 64, "bfloat16", M=4096)
    source = render(s, make_plan(s, p, gpu.DEFAULT, "forward"), p)
    assert source == render(s, make_plan(s, p, gpu.DEFAULT, "forward"), p)
    path = load.write(source.text)
    assert path == load.write(source.text) and os.listdir(tmp_path / "flashfx") == [os.path.basename(path)]
    module = load.load(source.text)
    assert inspect.getsource(module.attention_forward.fn).strip() in source.text
    assert module.SPEC == s and module.PROBLEM == p
    assert module.__doc__.splitlines()[2:6] == ["    " + line for line in str(s).splitlines()][:4]


def test_a_spec_longer_than_a_line_is_read_back(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    long = " & ".join(f"(j // {n} <= i // {n} + doc[b, j])" for n in range(3, 13))
    s = spec(Variant(("doc: int[2]",), where=long))
    p = problem("self", 64, "bfloat16")
    assert max(map(len, str(s).splitlines())) > WIDTH
    module = load.load(render(s, make_plan(s, p, gpu.DEFAULT, "forward"), p).text)
    assert module.SPEC == s and all(line.strip() in module.__doc__ for line in str(s).splitlines())
    assert str(s.mask()).splitlines()[2] in blocks_module(s.mask()).__doc__


@pytest.mark.parametrize("rate, schedule", [("0.1", "hopper"), ("0.001", "triton"), ("0.97", "triton")])
def test_rates_that_need_whole_words_are_not_warp_specialised(rate, schedule):
    for direction in DIRECTIONS:
        plan = make_plan(spec(replace(MORE["dropout"], drop=rate)), problem("self", 64, "bfloat16", M=4096), gpu.BY_NAME["H200"], direction)
        assert plan.schedule == schedule and ("takes more than 15 random bits" in plan.reason) == (schedule == "triton")


@pytest.mark.parametrize("card", ["A100", "H200"])
@pytest.mark.parametrize("name", ALL)
def test_nothing_goes_by_the_inner_tile_of_another_kernel(name, card):
    """So that a kernel that spills may take another (`spilling`); one with sums beyond the ends of a table may not."""
    from flashfx.codegen.spilling import SUMS
    s, p = spec(ALL[name], "gqa"), problem("gqa", 64, "bfloat16", M=1000)
    with overridden(schedule="triton"):
        text = render(s, make_plan(s, p, gpu.BY_NAME[card], "forward"), p).text
    host = re.sub(r"tiles_of\([^()]*\[[^()]*\)", "", text[text.index("\ndef forward("):])
    assert not re.findall(r"(?:FORWARD|ROWS)\['BLOCK_N'\]", host), host
    assert not re.findall(r"KEYS\['BLOCK_M'\]", host) or all(f" {SUMS}," in call for call in re.findall(r"attention_backward_keys\[grid\]\([^*]*", host)), host


@pytest.mark.parametrize("name", ALL)
def test_a_kernel_takes_only_what_it_uses(name):
    """No argument without a use, no dropout without dropout, no line that only fills space."""
    s, p = spec(ALL[name], "gqa"), problem("gqa", 80, "bfloat16", M=1024)
    source = render(s, make_plan(s, p, gpu.DEFAULT, "forward"), p)
    tree = ast.parse(source.text)
    for function in (f for f in tree.body if isinstance(f, ast.FunctionDef) and f.name.startswith("attention_")):
        names = {n.id for n in ast.walk(function) if isinstance(n, ast.Name)}
        assert {a.arg for a in function.args.args} - names == set(), function.name
        assert ast.get_docstring(function)
    assert ("philox" in source.text) == bool(s.dropout)
    assert "tl.float64" not in source.text and "atomic" not in source.text
    assert max(len(line) for line in source.text.splitlines() if line.strip() not in str(s)) <= 130  # the model's mathematics is as long as it is


@pytest.mark.parametrize("name", ["alibi", "temperature", "t5_table", "bias"])
def test_a_hopper_forward_is_the_same_whatever_gets_gradients(name):
    s, p, found = spec(ALL[name]), problem(D=128, dtype="bfloat16", M=4096), set()
    for needs in ((trained,) * 3 + (captured,) * len(s.aux) for trained, captured in ((False, False), (True, False), (True, True))):
        plans = [make_plan(s, p, gpu.DEFAULT, direction, needs=needs) for direction in ("forward", "backward")]
        assert plans[0].schedule == "hopper"
        text = render(s, plans[0], p, needs, plans[1]).text
        found.add(text[text.index("def attend("):text.index("def attention_forward(")])
    assert len(found) == 1


def test_new_lengths_share_a_module(monkeypatch):
    """Lengths are arguments: only M <= N, tiles and whether they are whole enter the text."""
    monkeypatch.setattr(triton_host.gpu, "current", lambda device: gpu.DEFAULT)
    s = spec(CORE["causal"])
    module = lambda s, m, n: triton_host.module_for(s, problem("self", 64, "float16", M=m, N=n), torch.device("meta"), (False,) * 3, True)
    made = {module(s, m, n) for m, n in [(500, 500), (200, 1500), (65, 700)]}
    assert len(made) == 1
    decoding = {module(spec(CORE["full"]), 1, n) for n in (8193, 9001, 11999)}
    assert len(decoding) == 1 and "parts_of(" in inspect.getsource(decoding.pop().forward)
    assert triton_host.module_for(s, problem("self", 64, "float16", M=1024), torch.device("meta"), (False,) * 3, True) not in made


@pytest.mark.parametrize("card", ["A100", "H200"])
def test_few_tiles_of_rows_split_their_keys(card):
    """Decoding with long caches, a few queries too; not where rows fill the card, nor where keys are few. Fewer parts where there are more rows."""
    def plan_of(extents, M, N, D=128, variant="full"):
        s, p = spec({**ALL, "cached": Variant(where="j <= i + (N - M)")}[variant], "gqa"), Problem(extents, M, N, D, D, "bfloat16", "bfloat16")
        plan = make_plan(s, p, gpu.BY_NAME[card], "forward")
        return plan, cost.parts(cost.facts(s, p), plan), cost.seconds(s, p, plan)

    for variant in ("full", "cached", "padding"):
        alone, parts, _ = plan_of((1, 8, 1), 1, 32768, variant=variant)
        many, fewer, _ = plan_of((2, 16, 4), 5, 32768, variant=variant)
        assert alone.parts == many.parts == 0 and parts > fewer > 1 and "keys in parts" in str(alone)
    for extents, M, N in (((64, 16, 4), 1, 8192), ((4, 8, 4), 4096, 4096), ((1, 8, 4), 1, 256), ((1, 8, 4), 64, 512)):
        plan, parts, _ = plan_of(extents, M, N)
        assert plan.parts == parts == 1 and "parts" not in str(plan)
    with overridden(parts=1):
        whole = plan_of((1, 8, 1), 1, 32768)
    assert whole[:2] == (replace(whole[0], parts=1), 1) and whole[2] > 4 * plan_of((1, 8, 1), 1, 32768)[2]


@pytest.mark.parametrize("variant, group, M, packed", [
    ("full", 8, 1, True), ("full", 4, 5, True), ("full", 8, 17, False), ("full", 1, 1, False), ("padding", 8, 1, True), ("dropout", 8, 1, False),
    ("ended", 8, 1, False), ("own range", 8, 1, False)])
def test_heads_that_share_keys_are_rows_of_a_tile(variant, group, M, packed):
    """Where they fit, and no kernel would have to take one head's number for all rows. Keys and values are then read once."""
    own = {"own range": Variant(("last: int[2]",), where="j < last[b, g]", empty="zero")}
    s, p = spec({**ALL, **own}[variant], "gqa"), Problem((2, 4, group), M, 4096, 64, 64, "bfloat16", "bfloat16")
    plan = make_plan(s, p, gpu.BY_NAME["H200"], "forward", listed=False)
    assert plan.packed == (("g",) if packed else ()) and ("share keys in one tile" in str(plan)) == packed
    with overridden(packed=False):
        alone = make_plan(s, p, gpu.BY_NAME["H200"], "forward", listed=False)
    assert not alone.packed and (cost.moved(s, p, replace(plan, parts=1)) < 0.6 * cost.moved(s, p, replace(alone, parts=1))) == packed
    assert not make_plan(s, p, gpu.BY_NAME["H200"], "forward", listed=True).packed


def test_the_number_of_parts():
    count = lambda M, N, z, slots, visible="j <= i + (N - M)": number(parse(visible, {}), z, M, N, (), 16, 64, slots)
    assert count(1, 2 ** 20, 1, 264) == 128 and count(1, 2 ** 20, 33, 264) == 8          # no more than can be added up; as many as there is room for
    assert count(1, 1024, 1, 264) == 4 and count(1, 255, 1, 264) == 1                    # of 256 keys at least
    assert count(1, 2 ** 20, 300, 264) == 1 and count(17, 2 ** 20, 132, 264) == 1        # rows fill the card alone
    assert count(1, 9 * 64, 1, 264) == 2 and count(1, 33 * 64, 1, 264) == 7              # 5 + 4 tiles; six times 5 and 3: none is left over
    assert count(1, 2 ** 15, 100, 132) == 5                                              # 500 programs in four turns of 132 rather than 100 in one
    assert count(1, 2 ** 20, 1, 264, "(j <= i + (N - M)) & (i + (N - M) - j < 1024)") == 4  # of the keys that a row can see
    assert count(0, 5, 1, 264) == count(5, 0, 1, 264) == count(5, 5, 0, 264) == 1


def test_writer():
    out = Writer()
    section = None
    with out.block("if x:", "why"):
        section = out.section()
        out.assign("y", "1")
    section.line("first = 0")
    assert_expected_inline(out.text, """\
if x:  # why
    first = 0
    y = 1""")
    assert all(len(line) <= WIDTH for line in wrapped("call(", [f"argument_{n}" for n in range(40)], ")", 1))


def test_tf32_follows_either_setting():
    """PyTorch's older switch raises when read after the newer one was set."""
    from flashfx.codegen.plan import matmul_precision
    of = lambda head: [matmul_precision(Problem((2, 8), 512, 512, head, head, "float32", "float32"), gpu.BY_NAME[card]) for card in ("A100", "H200")]
    before, matmul = torch.get_float32_matmul_precision(), torch.backends.cuda.matmul
    try:
        torch.set_float32_matmul_precision("high")
        assert of(64) == ["tf32", "bf16x3"] and of(256) == ["tf32", "tf32"]
        torch.set_float32_matmul_precision("highest")
        assert of(64) == ["ieee", "bf16x6"] and of(256) == ["ieee", "ieee"]
        matmul.fp32_precision = "tf32"
        assert of(64) == ["tf32", "bf16x3"] and of(256) == ["tf32", "tf32"]
    finally:
        matmul.fp32_precision = "none"
        torch.set_float32_matmul_precision(before)


REFUSED = [
    ("full", {"dtype": "float32"}, "forward", "one 16-bit type, not float32"), ("full", {"v_dtype": "float16"}, "forward", "not bfloat16 and float16"),
    ("full", {"D": 20}, "forward", "not aligned to 16 bytes"), ("full", {"D": 320}, "backward", "head sizes above 256"),
    ("full", {"M": 64}, "forward", "64 query rows leave its second warpgroup idle"), ("alibi", {}, "backward", "not read at both row and key need gradients"),
    ("full", {"D": 128, "Dv": 64}, "backward", "of head sizes 128 and 64 it is not known to be faster"), ("window", {"M": 512}, "forward", "the portable schedule is predicted faster"),
]


@pytest.mark.parametrize("variant, sizes, direction, reason", REFUSED)
def test_the_hopper_schedule_says_why_not(variant, sizes, direction, reason):
    s, p = spec(ALL[variant]), problem("self", **{"D": 64, "dtype": "bfloat16", "M": 1024, "batch": 8, "heads": 16} | sizes)
    plan = make_plan(s, p, gpu.BY_NAME["H200"], direction)
    assert plan.schedule == "triton" and reason in plan.reason
    p = problem("self", 64, "bfloat16", M=1024, batch=8, heads=16)
    assert make_plan(spec(CORE["full"]), p, gpu.BY_NAME["H200"], direction).schedule == "hopper"
    assert "is no Hopper card" in why_not_hopper(spec(CORE["full"]), p, gpu.BY_NAME["A100"], direction)
    assert make_plan(spec(CORE["full"]), p, gpu.BY_NAME["H200"], direction, descriptors=False).schedule == "triton"


def test_gradients_in_a_fixed_order_on_demand():
    s, p = spec(CORE["causal"]), problem("self", 64, "bfloat16", M=1024, batch=8, heads=16)
    torch.use_deterministic_algorithms(True)
    try:
        plan = make_plan(s, p, gpu.BY_NAME["H200"], "backward")
        assert plan.schedule == "hopper" and plan.ordered
        plan = make_plan(spec(CORE["full"]), p, gpu.BY_NAME["H200"], "backward")
        assert plan.schedule == "triton" and "wait for each other" in plan.reason
        plan = make_plan(spec(MORE["documents"]), p, gpu.BY_NAME["H200"], "backward", listed=True)
        assert plan.schedule == "triton" and "deterministic" in plan.reason
        assert make_plan(s, p, gpu.BY_NAME["H200"], "forward").schedule == "hopper"
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_summary_pays_where_it_reads_less_than_the_kernels_do():
    p = problem("self", 64, "bfloat16", M=4096)
    assert not pays(spec(MORE["additive_mask"]), p)  # every head has its own, which the score reads anyway
    assert pays(spec(replace(MORE["additive_mask"], score="qk + bias[b, 0, i, j]", where="bias[b, 0, i, j] > (-1.5)", empty="zero")), p)
    assert pays(spec(CORE["bool_mask"]), p)


def test_a_schedule_can_be_forced():
    s, p = spec(CORE["full"]), problem("self", 64, "bfloat16")
    schedule = lambda: make_plan(s, p, gpu.BY_NAME["H200"], "forward").schedule
    assert schedule() == "triton"
    with overridden(schedule="hopper"):
        assert schedule() == "hopper"
    with overridden(schedule="hopper", forward=(128, 64, 8, 2)):
        assert make_plan(s, p, gpu.BY_NAME["H200"], "forward").options["BLOCK_N"] == 64
    with pytest.raises(ValueError, match="schedule must be one of"):
        with overridden(schedule="cuda"):
            pass
