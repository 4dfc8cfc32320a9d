"""Run-time mask summaries: exact for every family of masks, shared, and a hint that changes no result."""
from __future__ import annotations

import dataclasses

import pytest
import torch

from flashfx.codegen import blocks, launch, torch_tiled
from flashfx.codegen.blocks import block_lists, joined, kinds_of, lists_for
from flashfx.codegen.schedules.blocks import EMPTY, PARTIAL
from flashfx.codegen.selfcheck import inputs
from flashfx.codegen.tiles import classify
from flashfx.reference import evaluate, index_grid
from flashfx.spec import BLOCK, FINE, AttentionSpec, EmptyRow

from .cases import CORE, MORE, problem, spec
from .run import run
from .test_families import FAMILIES, spec as masked

DATA = {name: v for name, v in {**CORE, **MORE}.items() if spec(v).is_data_masked}


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    for module in (launch, blocks):
        monkeypatch.setattr(module, "interpreting", lambda: False)


def brute(s: AttentionSpec, aux, sizes, M: int, N: int, high: int) -> torch.Tensor:
    """Kinds (*extents of the mask's axes, lines, C) of blocks of `high` rows from every element; of FINE rows as kernels over keys see them: where rows that see no
    key average v, in part."""
    visible = evaluate(s.visible, index_grid(s, sizes, M, N, "cpu"), {a.name: t for a, t in zip(s.aux, aux)}, None, torch.float64)
    visible = visible.expand(*[e if a in s.visible.variables else 1 for a, e in zip(s.axes, sizes)], M, N)
    visible = visible.reshape(*[e for a, e in zip(s.axes, sizes) if a in s.visible.variables], M, N)
    kinds = torch.zeros(*visible.shape[:-2], -(-M // high), -(-N // BLOCK), dtype=torch.long)
    for r in range(kinds.shape[-2]):
        for c in range(kinds.shape[-1]):
            block = visible[..., r * high: (r + 1) * high, c * BLOCK: (c + 1) * BLOCK].flatten(-2)
            kinds[..., r, c] = block.any(-1).long() + (block.all(-1) & ((c + 1) * BLOCK <= N)).long()
        if high == FINE and s.empty_row in (EmptyRow.MEAN, EmptyRow.MEAN_ADD):
            kinds[..., r, :] = torch.where(visible[..., r * high: (r + 1) * high, :].any(-1).all(-1)[..., None], kinds[..., r, :], PARTIAL)
    return kinds


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("M, N", [(300, 400), (128, 256), (1, 130), (257, 129), (330, 64)])
def test_lists_say_what_every_element_says(name, M, N):
    s, p = spec(DATA[name]), problem("cross", 16, M=M, N=N)
    q, k, _, aux, _, sizes = inputs(s, p)
    rows, keys, _ = lists_for(s, aux, sizes, q, k)
    kinds, fine = brute(s, aux, sizes, M, N, BLOCK), brute(s, aux, sizes, M, N, FINE)
    assert rows.dtype == keys.dtype == torch.int32 and rows.is_contiguous() and keys.is_contiguous()
    assert torch.equal(kinds_of(rows), kinds) and torch.equal(kinds_of(keys), fine.mT)
    assert s.mask().empty_row is EmptyRow.MEAN or torch.equal(joined(fine), kinds)
    for part in rows.flatten(0, -2):  # each of the three groups ascends
        a, b = int(part[0]), int(part[0] + part[1])
        for group in (part[2: 2 + a], part[2 + a: 2 + b], part[2 + b:]):
            assert (group.diff() > 0).all()


@pytest.mark.parametrize("M, N", [(700, 777), (1024, 1000), (300, 1900)])
def test_whether_a_closed_form_wastes_is_decided_as_by_every_element(M, N):
    """Which looks at a few rows first, and at no more than it takes to decide."""
    answers = set()
    for text in (*FAMILIES.values(), "j <= i * (h + 1)", "(j < 128) | (i - j < 256) & (j <= i)", "(i // 128 + j // 128) % 2 == 0"):
        s = masked(text)
        if s.visible.loads or not s.is_masked:
            continue
        mask = s.mask()
        extents = [2] * len(mask.axes)
        kinds, ranged = brute(mask, [], extents, M, N, BLOCK), classify(mask, BLOCK, BLOCK, M, N, extents)
        seen, partial = int((kinds != EMPTY).sum()), int((kinds == PARTIAL).sum())
        wastes = ranged.full + ranged.partial > 1.25 * seen or ranged.partial > 1.25 * partial + 4
        assert blocks._closed_form_wastes(mask, M, N, ()) == wastes, text
        answers.add(wastes)
    assert answers == {True, False}


def test_a_summary_has_only_the_masks_own_axes():
    s = spec(CORE["padding"], "gqa")
    assert s.mask().axes == ("b",) and [a.name for a in s.mask().aux] == ["pad"]
    assert AttentionSpec.parse(str(s.mask())) == s.mask()
    assert spec(MORE["documents"]).mask().visible == spec(MORE["documents"]).visible


@pytest.mark.parametrize("name", ["causal", "window", "lengths", "prefix", "full"])
def test_masks_that_need_no_summary(name):
    assert not spec({**CORE, **MORE}[name]).is_data_masked


@pytest.mark.parametrize("M, N, batch", [(0, 300, 2), (300, 0, 2), (300, 300, 0)])
def test_nothing_to_summarise(M, N, batch):
    s = spec(CORE["padding"])
    rows, keys = block_lists(s.mask(), [torch.ones(batch, N, dtype=torch.bool)], [batch, M, N], torch.empty(0, device="cpu"))
    assert rows.shape == (batch, -(-M // BLOCK), 2 + -(-N // BLOCK)) and keys.shape == (batch, -(-N // BLOCK), 2 + -(-M // FINE))


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("kind", ["self", "gqa", "cross"])
def test_results_with_a_summary(name, kind):
    run(spec(DATA[name], kind), problem(kind, 24, "float32", M=300), listed=True).within_budget()


@pytest.mark.parametrize("empty", [e.value for e in EmptyRow])
def test_empty_rows_with_a_summary(empty):
    """Rows without a visible key, alone in their block and among others."""
    s = spec(dataclasses.replace(MORE["mean_left_padding"], empty=empty))
    p = problem("self", 16, "float32", M=300)
    q, k, v, (pad,), seed, sizes = inputs(s, p)
    pad[0, :150] = False
    pad[1] = False
    run(s, p, operands=(q, k, v, [pad], seed, sizes), listed=True).within_budget()


def test_the_tiled_schedule_visits_only_what_is_listed(monkeypatch):
    """Four documents in 8 blocks of 128: 16 of 64 tiles are evaluated in forward, none of the full ones with a mask."""
    s = spec(dataclasses.replace(MORE["documents"], where="doc[b, i] == doc[b, j]"))
    p = problem("self", 16, "float32", M=1024)
    q, k, v, _, seed, sizes = inputs(s, p)
    doc = (torch.arange(1024) // 256).expand(2, 1024)
    evaluated = []
    original = torch_tiled.evaluate
    monkeypatch.setattr(torch_tiled, "evaluate", lambda e, *a: evaluated.append(e) or original(e, *a))
    launch.forward(s, q, k, v, [doc], seed, sizes, lists_for(s, [doc], sizes, q, k))
    assert evaluated.count(s.visible) == 0 and evaluated.count(s.score) == 16
