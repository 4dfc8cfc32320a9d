"""Kernel tests for Triton's interpreter; `test_interpreter.py` runs this file in a process where the interpreter is on."""
from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
import torch

from flashfx.codegen import blocks, gpu, launch, triton_host
from flashfx.codegen.gpu import DEFAULT
from flashfx.codegen.plan import make_plan, overridden
from flashfx.codegen.selfcheck import check, inputs
from flashfx.region import Problem
from flashfx.spec import AttentionSpec, EmptyRow

from ..thinning import thinned
from .cases import CORE, KINDS, MORE, Variant, problem, spec
from .run import lse_gradient, run
from .test_families import FAMILIES, spec as family, tensors

TILES = (
    dict(forward=(32, 16, 4, 1), keys=(16, 32, 4, 1), rows=(32, 16, 4, 1), dense=(16, 16, 4, 1)),
    dict(forward=(16, 32, 4, 1), keys=(32, 16, 4, 1), rows=(16, 32, 4, 1), dense=(32, 32, 4, 1)),
    dict(forward=(64, 32, 4, 1), keys=(32, 32, 4, 1), rows=(32, 32, 4, 1), dense=(16, 32, 4, 1)),
)
DTYPES = ("float16", "bfloat16", "float32")
HEADS = (16, 40, 64, 80, 128)


def product() -> list[tuple[str, str, str, int, int]]:
    """Every variant, kind and dtype; head sizes and lengths take turns, so that each meets every variant and every dtype."""
    points = itertools.product(CORE, KINDS, DTYPES)
    return [(v, kind, dtype, HEADS[n % 5], (37, 45, 21)[n // 5 % 3]) for n, (v, kind, dtype) in enumerate(points)]


@pytest.mark.parametrize("variant, kind, dtype, head, length", thinned(product(), 17))
def test_product(variant, kind, dtype, head, length):
    with overridden(**TILES[(head + length) % 3]):
        run(spec(CORE[variant], kind), problem(kind, head, dtype, M=length, batch=1)).within_budget()


@pytest.mark.parametrize("variant, kind, dtype", thinned([(v, list(KINDS)[n % 3], DTYPES[n // 2 % 3]) for n, v in enumerate(MORE)], 10))
def test_more(variant, kind, dtype):
    with overridden(**TILES[len(variant) % 3]):
        run(spec(MORE[variant], kind), problem(kind, 24, dtype, batch=1 + (kind != "gqa"))).within_budget()


@pytest.mark.parametrize("empty, drop", thinned(itertools.product(["nan", "zero", "mean", "mean, additive", "mean, additive over j <= i + 9"], ["", "0.3"]), 3))
def test_more_empty_rows(empty, drop):
    """Rows without a visible key, in tiles with others and in tiles of their own, by each contract."""
    variant = replace(MORE["mean_left_padding"], empty=empty, drop=drop)
    p = problem("self", 16, "float32")
    q, k, v, (pad,), seed, sizes = inputs(spec(variant), p)
    pad[0, :20] = False
    pad[1] = False
    with overridden(**TILES[0]):
        run(spec(variant), p, operands=(q, k, v, [pad], seed, sizes)).within_budget()


def outputs(text_or_spec, p, tiles, descriptors=True, **kwargs):
    s = text_or_spec if isinstance(text_or_spec, AttentionSpec) else AttentionSpec.parse(text_or_spec)
    q, k, v, aux, seed, sizes = kwargs.get("operands") or inputs(s, p)
    with overridden(**tiles):
        out, lse = launch.forward(s, q, k, v, aux, seed, sizes)
        needs = [t.is_floating_point() for t in (q, k, v, *aux)]
        return [out, lse, *launch.backward(s, torch.ones_like(out), q, k, v, aux, seed, out, lse, sizes, needs)]


@pytest.mark.parametrize("rate", ["0.25", "0.97"])
def test_more_dropout_ignores_tiles(rate):
    """Values of 1 make out the sum of kept weights: a moved bit would show. Equal but for the order of sums, of N terms each. 0.97 takes whole words."""
    s, p = spec(replace(MORE["dropout"], drop=rate)), problem("self", 16, "float32", batch=1)
    run(s, p).within_budget()
    q, k, v, aux, seed, sizes = inputs(s, p)
    operands = (torch.zeros_like(q), k, torch.ones_like(v), aux, seed, sizes)
    first, *others = (outputs(s, p, t, operands=operands) for t in TILES)
    for other in others:
        for a, b in zip(first, other):
            assert torch.allclose(a, b, rtol=0, atol=p.N * torch.finfo(torch.float32).eps * a.abs().max().item())


@pytest.mark.parametrize("variant", ["shared_bias", "t5_table", "dropout_padding", "two_reads"])
def test_more_repeats_are_equal(variant):
    s, p = spec(MORE[variant], "gqa"), problem("gqa", 16, "bfloat16", batch=1, heads=1)
    for a, b in zip(outputs(s, p, TILES[0]), outputs(s, p, TILES[0])):
        assert torch.equal(a, b)


@pytest.mark.parametrize("layout", ["transposed", "expanded", "misaligned", "odd rows", "strided head"])
def test_more_strides(layout):
    """Any strides: what TMA cannot read goes through pointers, with the same result."""
    s, p = spec(CORE["causal"]), problem("self", 24, "bfloat16")
    q, k, v, aux, seed, sizes = inputs(s, p)

    def place(t):
        if layout == "transposed":
            return t.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "expanded":
            return t[:, :1].expand_as(t)
        if layout == "misaligned":
            return torch.empty(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape).copy_(t)
        if layout == "odd rows":
            return torch.empty(*t.shape[:-1], t.shape[-1] + 1, dtype=t.dtype)[..., :-1].copy_(t)
        return torch.empty(*t.shape[:-1], 2 * t.shape[-1], dtype=t.dtype)[..., ::2].copy_(t)

    placed = [place(t) for t in (q, k, v)]
    assert triton_host._describable(s, *placed) == (layout == "transposed")
    with overridden(**TILES[0]):
        run(s, p, operands=(*placed, aux, seed, sizes)).within_budget()


WIDE = (dict(forward=(64, 32, 4, 1), keys=(32, 64, 4, 1), rows=(64, 32, 4, 1), dense=(64, 64, 4, 1)),
        dict(forward=(32, 128, 4, 1), keys=(64, 32, 4, 1), rows=(32, 128, 4, 1), dense=(128, 64, 4, 1)))
"""Tiles that divide a block of a summary in different ways."""
LISTED = [name for name, v in {**CORE, **MORE}.items() if spec(v).is_data_masked]


@pytest.mark.parametrize("variant, kind, dtype, length", thinned([(v, list(KINDS)[n % 3], DTYPES[n // 2 % 3], (290, 256)[n % 2]) for n, v in enumerate(LISTED)], 7))
def test_listed(variant, kind, dtype, length):
    """Tiles from lists of blocks of 128 x 128 and 64 x 128: with tails, and with lengths that every tile divides (no bounds checks)."""
    with overridden(**WIDE[length == 256]):
        run(spec({**CORE, **MORE}[variant], kind), problem(kind, 16, dtype, M=length, heads=1, batch=1 + (kind == "self")), listed=True).within_budget()


@pytest.mark.parametrize("empty", thinned(["nan", "zero", "mean", "mean, additive", "mean, additive over j <= i + 9"], 2))
def test_listed_empty_rows(empty):
    """Rows that average v read every tile, whatever the lists hide."""
    from dataclasses import replace
    s, p = spec(replace(MORE["mean_left_padding"], empty=empty)), problem("self", 16, "float32", M=290, heads=1)
    q, k, v, (pad,), seed, sizes = inputs(s, p)
    pad[0, :150] = False
    pad[1] = False
    with overridden(**WIDE[0]):
        run(s, p, operands=(q, k, v, [pad], seed, sizes), listed=True).within_budget()


BANDS = {
    "sliding documents": "(doc[b, i] == doc[b, j]) & (j <= i) & (i - j < 70)",
    "both sides": "(doc[b, i] == doc[b, j]) & (abs(i - j) <= 40)",
    "ordered": "doc[b, j] <= doc[b, i]",
    "other documents": "(doc[b, i] != doc[b, j]) | (i == j)",
}


@pytest.mark.parametrize("band", thinned(BANDS, 3))
def test_listed_beside_closed_forms(band):
    """The closed form cuts the first and last listed block; gaps between listed blocks stay gaps. Some ids repeat later on."""
    from dataclasses import replace
    s, p = spec(replace(MORE["documents"], where=BANDS[band])), problem("self", 16, "float32", M=400, heads=1, batch=2)
    q, k, v, (doc,), seed, sizes = inputs(s, p)
    doc[:] = torch.arange(400) // 100 % 3
    doc[1] = torch.arange(400) // 150
    with overridden(**WIDE[list(BANDS).index(band) % 2]):
        run(s, p, operands=(q, k, v, [doc], seed, sizes), listed=True).within_budget()


ENDS = {"both sides": (0.3, 0.6), "below": (0.45, 1.0), "above": (0.0, 0.5), "none": (0.0, 1.0), "everything": (1.0, 0.0), "one place": (0.4, 0.4)}


@pytest.mark.parametrize("n, where", thinned(enumerate(ENDS), 2))
def test_more_ends_of_a_table(n, where):
    """Tiles beyond the ends read one number, and the kernel over keys adds up their gradient; tiles of all kernels differ in size."""
    kind, M, N = (("self", 70, 70), ("gqa", 45, 64), ("cross", 96, 37))[n % 3]
    s, p = spec(MORE["ended"], kind), problem(kind, 16, "float32", M=M, N=N, batch=1)
    q, k, v, (ends, rel), seed, sizes = inputs(s, p)
    ends = torch.tensor([int(x * (M + N - 2)) for x in ENDS[where]], dtype=torch.int32)
    rel = torch.randn(rel.shape[0], M + N - 1)
    with overridden(**TILES[(n + n // 3) % 3]):
        run(s, p, operands=(q, k, v, [ends, rel], seed, sizes)).within_budget()


@pytest.mark.parametrize("variant", thinned(LISTED, 5))
def test_listed_kinds(variant):
    """The generated summary kernel against the mask evaluated in PyTorch, on random captured tensors and on sorted large ids."""
    s = spec({**CORE, **MORE}[variant])
    for M, N in ((300, 400), (128, 256), (1, 130)):
        *_, aux, _, sizes = inputs(s, problem("cross", 16, M=M, N=N))
        mask, given = s.mask(), dict(zip((a.name for a in s.aux), aux))
        for shift in (0, 2 ** 40):
            read = [given[a.name] + shift if given[a.name].dtype == torch.int64 else given[a.name] for a in mask.aux]
            extents = [*(sizes[s.axes.index(a)] for a in mask.axes), M, N]
            rows, keys = blocks.block_lists(mask, read, extents, torch.empty(0, device="cpu"))
            kinds = blocks.evaluated(mask, read, extents, torch.device("cpu"))
            through = blocks.over_keys(kinds, mask, read, extents, kinds.device)
            assert torch.equal(rows, blocks._listed(blocks.joined(kinds))) and torch.equal(keys, blocks._listed(through.mT))


@pytest.mark.parametrize("name", thinned((name for name, text in FAMILIES.items() if text != "True"), 11))
def test_listed_families(name):
    """The generated summary kernel for every family of masks, and where rows that they leave empty average v."""
    given = tensors(257, 300, 1)
    for mask in (family(FAMILIES[name]).mask(), replace(family(FAMILIES[name]).mask(), empty_row=EmptyRow.MEAN)):
        aux, sizes = [given[a.name] for a in mask.aux], [*(2 for _ in mask.axes), 257, 300]
        rows, keys = blocks.block_lists(mask, aux, sizes, torch.empty(0, device="cpu"))
        kinds = blocks.evaluated(mask, aux, sizes, torch.device("cpu"))
        through = blocks.over_keys(kinds, mask, aux, sizes, kinds.device)
        assert torch.equal(rows, blocks._listed(blocks.joined(kinds))) and torch.equal(keys, blocks._listed(through.mT))


SHAPES = {
    "no axes": "attention[i, j]\n qk = q[i] . k[j]\n score = qk * 0.25\n out = softmax_j(score) . v[j]",
    "one axis": "attention[b, i, j]\n qk = q[b, i] . k[b, j]\n score = qk / 4.0\n where j <= i\n empty nan\n out = softmax_j(score) . v[b, j]",
    "shared queries": "attention[b, h, i, j]\n qk = q[h, i] . k[b, h, j]\n score = qk * 0.25\n out = softmax_j(score) . v[b, j]",
    "values alone vary": "attention[b, h, i, j]\n qk = q[i] . k[j]\n score = qk * 0.25\n out = softmax_j(score) . v[b, h, j]",
    "odd names": "attention[k, lse, i, j]\n given tl: float[2]\n qk = q[k, lse, i] . k[k, j]\n score = qk * 0.25 + tl[lse, j]\n out = softmax_j(score) . v[k, j]",
    "no product": "attention[b, i, j]\n given w: float[2]\n qk = q[b, i] . k[b, j]\n score = w[b, j]\n out = softmax_j(score) . v[b, j]",
    "sizes": "attention[b, i, j]\n sizes W\n qk = q[b, i] . k[b, j]\n score = qk * 0.25\n where (j <= i) & (i - j < W)\n empty nan\n out = softmax_j(score) . v[b, j]",
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_more_shapes(shape, dtype):
    from flashfx.region import Problem
    s = AttentionSpec.parse(SHAPES[shape])
    p = Problem((2, 3)[: len(s.axes)], 21, 35, 16, 40, dtype, dtype, (5,) if s.sizes else ())
    with overridden(**TILES[0]):
        run(s, p).within_budget()


SHORT = [(1, 37), (37, 1), (1, 1), (16, 16), (32, 64), (37, 128), (128, 128)]


@pytest.mark.parametrize("M, N, variant", [(*lengths, v) for n, lengths in enumerate(SHORT) for v in (("full", "padding"), ("causal", "window"))[n % 2]])
def test_more_lengths(M, N, variant):
    with overridden(**TILES[0]):
        run(spec(CORE[variant]), problem("self", 16, "float16", M=M, N=N, batch=1)).within_budget()


@pytest.mark.parametrize("M, N, batch", [(0, 5, 2), (5, 0, 2), (5, 5, 0)])
def test_more_nothing(M, N, batch):
    result = run(spec(CORE["full"]), problem("self", 16, "float16", M=M, N=N, batch=batch))
    result.within_budget()
    assert not result.actual["out"].isnan().any()


def test_more_mixed_dtypes():
    with overridden(**TILES[0]):
        run(spec(CORE["causal"]), problem("self", 16, "bfloat16", v_dtype="float32")).within_budget()


def test_more_gradients_on_request():
    """What nobody asks for is not computed, and does not change the rest."""
    s, p = spec(MORE["shared_bias"]), problem("self", 16, "float32")
    q, k, v, aux, seed, sizes = inputs(s, p)
    with overridden(**TILES[0]):
        out, lse = launch.forward(s, q, k, v, aux, seed, sizes)
        every = launch.backward(s, out, q, k, v, aux, seed, out, lse, sizes, [True] * 4)
        for only in range(4):
            needs = [n == only for n in range(4)]
            found = launch.backward(s, out, q, k, v, aux, seed, out, lse, sizes, needs)
            assert [g.numel() > 0 for g in found] == needs
            # without gradients of captured tensors delta is not refined: it carries the rounding of a sum of N terms
            assert torch.allclose(found[only], every[only], rtol=0, atol=2 * p.N * torch.finfo(torch.float32).eps * every[only].abs().max().item())


@pytest.mark.parametrize("listed", [False, True])
def test_more_files_check_themselves(listed):
    s, p = spec(MORE["dropout_padding"]), problem("self", 24, "float16")
    with overridden(**TILES[0]):
        module = triton_host.module_for(s, p, torch.device("cpu"), (True, True, True, False), True, listed)
    errors = check(module, "cpu")
    assert set(errors) == {"out", "dq", "dk", "dv"}


@pytest.mark.parametrize("variant, kind, dtype", [("full", "self", "float32"), ("causal", "gqa", "bfloat16"), ("softcap", "cross", "float16")])
def test_more_gradient_of_the_log_sum_exp(variant, kind, dtype):
    with overridden(**TILES[0]):
        lse_gradient(spec(CORE[variant], kind), problem(kind, 16, dtype, batch=1)).within_budget()


# ---------------------------------------------------------------------------------------------- keys in parts, a program for each

CACHED = {
    "cached": Variant(where="j <= i + (N - M)"),
    "cached_window": Variant(where="(j <= i + (N - M)) & (i + (N - M) - j < 40)"),
    "cached_padding": Variant(("pad: bool[2]",), where="pad[b, j] & (j <= i + (N - M))", empty="mean, additive over j <= i + (N - M)"),
    "cached_dropout": Variant(where="j <= i + (N - M)", drop="0.25"),
}
"""Queries behind a cache of keys."""
SPLIT = {**CORE, **MORE, **CACHED}
DECODING = [(1, 150, 3), (5, 77, 4), (37, 100, 2), (1, 128, 5), (3, 192, 40)]
"""(queries, keys, parts): tails and none, fewer tiles than parts, more parts than are read at a time."""


def split(s, p, tiles, parts, operands=None, lists=None):
    """(out, log-sum-exp) with the keys in parts."""
    q, k, v, aux, seed, sizes = operands or inputs(s, p)
    with overridden(**tiles, parts=parts):
        return launch.forward(s, q, k, v, aux, seed, sizes, lists)


@pytest.mark.parametrize("variant, kind, dtype, lengths", thinned([(v, list(KINDS)[n % 3], DTYPES[n // 2 % 3], DECODING[n % 5]) for n, v in enumerate(SPLIT)], 9))
def test_split(variant, kind, dtype, lengths):
    """Against float64, and the log-sum-exp against that of one part."""
    M, N, parts = lengths
    s, p, tiles = spec(SPLIT[variant], kind), problem(kind, HEADS[len(variant) % 5], dtype, M=M, N=N, batch=1, heads=1), TILES[len(variant) % 3]
    with overridden(**tiles, parts=parts):
        run(s, p, gradients=False).within_budget()
    assert torch.allclose(split(s, p, tiles, parts)[1], split(s, p, tiles, 1)[1], rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("variant, kind, dtype, lengths", [("cached", "gqa", "bfloat16", (5, 150, 3)), ("cached_padding", "self", "float32", (37, 100, 2)),
                                                           ("padded_bias", "gqa", "float16", (5, 77, 4))])
def test_split_gradients(variant, kind, dtype, lengths):
    """Backward reads the log-sum-exp that the parts give, and is not split itself."""
    M, N, parts = lengths
    with overridden(**TILES[0], parts=parts):
        run(spec(SPLIT[variant], kind), problem(kind, 40, dtype, M=M, N=N, batch=1)).within_budget()


@pytest.mark.parametrize("empty", ["nan", "zero", "mean", "mean, additive over j <= i + (N - M)"])
@pytest.mark.parametrize("listed", [False, True])
def test_split_empty_rows(empty, listed):
    """Rows that see no key at all, and rows that see none of a part's: as of one part, marks of averages included. With a list of tiles or without."""
    from dataclasses import replace
    s, p, tiles = spec(replace(CACHED["cached_padding"], empty=empty)), problem("self", 16, "float32", M=8, N=290, heads=1), dict(forward=(16, 64, 4, 1))
    q, k, v, (pad,), seed, sizes = inputs(s, p)
    pad[0, :287], pad[0, 287:], pad[1] = False, True, False
    operands, lists = (q, k, v, [pad], seed, sizes), blocks.lists_for(s, [pad], sizes, q, k) if listed else None
    whole, parts = split(s, p, tiles, 1, operands, lists), split(s, p, tiles, 3, operands, lists)
    assert whole[1][0, 0, -1].abs() < 100 and not whole[1].isfinite().all() or (whole[1] > 2.0 ** 90).any()
    for a, b in zip(parts, whole):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("parts", [2, 7])
def test_split_dropout_keeps_its_bits(parts):
    """Values of 1 make out the sum of kept weights: a moved bit would show."""
    s, p = spec(CACHED["cached_dropout"]), problem("self", 16, "float32", M=5, N=120)
    q, k, v, aux, seed, sizes = inputs(s, p)
    operands = (torch.zeros_like(q), k, torch.ones_like(v), aux, seed, sizes)
    assert torch.allclose(split(s, p, TILES[0], parts, operands)[0], split(s, p, TILES[1], 1, operands)[0], rtol=1e-5, atol=0)


PACKED = {**CACHED, "bias": CORE["bias"],
          "slopes": Variant(("slope: float[2]",), score="qk * 0.3 + slope[h, g] * to_float(j - i)", where="j <= i + (N - M)"),
          "biases": Variant(("bias: float[5]",), score="qk * 0.3 + bias[b, h, g, i, j]"),
          "hidden": Variant(("shown: bool[3]",), where="shown[h, g, j] & (j <= i + (N - M))", empty="mean")}
GROUPS = {"(b, h, g)": ("b, h, g", "b, h", (1, 2, 4)), "one key head": ("b, h, g", "b", (2, 2, 2)), "(b, g, h)": ("b, g, h", "b, h", (1, 4, 2))}
"""Axes of q, of k and v, and extents."""


def heads(variant: Variant, group: str) -> AttentionSpec:
    q, k, _ = GROUPS[group]
    text = str(spec(variant, "gqa")).replace("attention[b, h, g,", f"attention[{q},").replace("q[b, h, g,", f"q[{q},")
    return AttentionSpec.parse(text.replace("k[b, h,", f"k[{k},").replace("v[b, h,", f"v[{k},"))


@pytest.mark.parametrize("variant, group, M, parts, tiles", thinned([
    (v, list(GROUPS)[n % 3], (1, 2, 3, 5)[(n + m) % 4], 1 + 2 * ((n + m) % 2), TILES[(n + m) % 3])
    for n, v in enumerate(v for v in PACKED if not PACKED[v].drop) for m in range(3)], 7))
def test_split_packed(variant, group, M, parts, tiles):
    """Heads that share keys as rows of one tile or of several, keys in parts or not: against float64, and as in tiles of their own."""
    s, extents = heads(PACKED[variant], group), GROUPS[group][2]
    p = Problem(extents, M, 90, HEADS[M % 5], HEADS[M % 5], DTYPES[M % 3], DTYPES[M % 3])
    with overridden(**tiles, parts=parts):
        assert set(make_plan(s, p, DEFAULT, "forward").packed) == set(s.axes) - s.k
        run(s, p, gradients=False).within_budget()
    given = inputs(s, p)
    with overridden(**tiles, parts=parts, packed=False):
        own = launch.forward(s, *given[:3], *given[3:], None)
    for a, b in zip(split(s, p, tiles, parts, given), own):
        assert torch.allclose(a.float(), b.float(), rtol=0.02, atol=0.02, equal_nan=True)


def test_split_dropout_is_not_packed():
    """Its bits are drawn for rows of one head."""
    s = heads(PACKED["cached_dropout"], "(b, h, g)")
    assert make_plan(s, Problem((1, 2, 4), 3, 90, 64, 64, "float16", "float16"), DEFAULT, "forward").packed == ()


def test_split_as_the_card_has_room(monkeypatch):
    """Without a number of parts the host function works it out from each call's lengths; one module serves all of them."""
    s, seen = spec(CACHED["cached"], "gqa"), set()
    for N in (1100, 2300):
        p = problem("gqa", 16, "float16", M=1, N=N, batch=1, heads=1)
        with overridden(forward=(16, 128, 4, 1), parts=0):
            module = triton_host.module_for(s, p, torch.device("cpu"), (False,) * 3, True)
            monkeypatch.setattr(module, "parts_of", lambda *a, f=module.parts_of: seen.add((module, N, f(*a))) or f(*a))
            run(s, p, gradients=False).within_budget()
            monkeypatch.undo()
    (one, _, few), (other, _, more) = sorted(seen, key=lambda found: found[1])
    assert one is other and 1 < few < more


def test_more_sweeps(tmp_path, monkeypatch):
    """The first tile of forward and of backward are compiled in a process of their own, measured and written down."""
    from flashfx.bench import sweep
    workload, card, every = sweep.grid(quick=True)[0], gpu.current(torch.device("cpu")), sweep.jobs
    firsts = lambda *args: [next(job for job in every(*args) if job.direction == direction) for direction in ("forward", "backward")]
    monkeypatch.setattr(sweep, "jobs", firsts)
    table, told = sweep.Table(str(tmp_path / "tiles.json"), "this machine"), []
    sweep.sweep([workload], card, torch.device("cpu"), table, 1, 100.0, told.append)
    point, = json.loads((tmp_path / "tiles.json").read_text())["points"]
    assert not table.failed and "2 of 2 modules" in told[-1]
    assert {name.split()[1] for name in point["us"]} == {"forward", "delta", "keys", "rows"} and set(point) == {*vars(workload.problems[0]), "variant", "us"} - {"sizes", "_hash"}
