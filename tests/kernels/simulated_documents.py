"""Tiles that begin where documents do: what lists and turns say, and the Hopper kernels that go by them, in `gluon_simulator`. `test_simulator.py` runs this file too."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashfx.codegen import blocks
from flashfx.codegen.plan import make_plan
from flashfx.codegen.render import render
from flashfx.codegen.schedules import documents
from flashfx.codegen.schedules.tile_order import WINDOW
from flashfx.codegen.selfcheck import inputs
from flashfx.expr import conjunction, conjuncts
from flashfx.reference import evaluate, index_grid
from flashfx.region import Problem
from flashfx.spec import BLOCK, FINE, AttentionSpec

from ..thinning import thinned
from . import gluon_dialect
from .cases import problem, spec
from .run import in_runs, run
from .simulated import CARD, EVERY, simulated  # noqa: F401  a fixture


@pytest.mark.parametrize("head, kind, length, dtype, name", thinned([(64, "self", 700, "bfloat16", "doc"), (128, "gqa", 640, "bfloat16", "doc"),
                                                             (80, "self", 520, "float16", "window"), (192, "self", 450, "bfloat16", "begin")], 2))
def test_tiles_that_begin_where_documents_do(head, kind, length, dtype, name):
    """Ids may be called as the kernels call something else."""
    s, p = spec(EVERY["documents"], kind), problem(kind, head, dtype, M=length, batch=2)
    s = AttentionSpec.parse(str(s).replace("doc", name))
    run(s, p, operands=in_runs(s, inputs(s, p), seed=head), listed=True).within_budget()


@pytest.mark.parametrize("beside, head, schedule, by_rows, by_keys", thinned([("softcap", 128, "hopper", True, True), ("shared_bias", 64, "hopper", False, False),
                                                                      ("t5_table", 64, "hopper", True, False), ("alibi", 64, "triton", True, False), ("bias", 80, "hopper", True, False)], 2))
def test_documents_beside_other_gradients(beside, head, schedule, by_rows, by_keys):
    """Backward goes over tiles that begin with documents unless a captured tensor's gradient belongs to fixed places; then it makes lists for itself."""
    like = EVERY[beside]
    s, p = spec(replace(like, given=(*like.given, *EVERY["documents"].given), where=EVERY["documents"].where, empty="zero")), problem("self", head, "bfloat16", M=384, batch=1)
    forward, backward = (make_plan(s, p, CARD, direction, listed=True) for direction in ("forward", "backward"))
    assert (forward.documents, backward.schedule, backward.documents) == (by_rows, schedule, by_keys)
    run(s, p, operands=in_runs(s, inputs(s, p), seed=head), listed=True).within_budget()


@pytest.mark.parametrize("where, head", thinned([("(doc[b, i] == doc[b, j]) & (j <= i)", 64), ("(doc[b, i] == doc[b, j]) & (j <= i)", 128), ("doc[b, i] == doc[b, j]", 128),
                                                 ("doc[b, i] == doc[b, j]", 64)], 2))
def test_keys_that_no_row_sees(where, head):
    """Their documents have no rows, and yet their tiles visit one."""
    s, p = spec(replace(EVERY["documents"], where=where, empty="zero"), "cross"), problem("cross", head, "bfloat16", M=130, N=700, batch=1)
    q, k, v, (doc,), seed, sizes = inputs(s, p)
    doc[:] = torch.arange(doc.shape[-1]) // 200
    run(s, p, operands=(q, k, v, [doc], seed, sizes), listed=True).within_budget()


@pytest.mark.parametrize("N, counts", [(300, (3, 5)), (20000, (300, 170)), (40000, (257, 1))])
def test_turns(N, counts):
    """Of each WINDOW tiles of keys, counted from the last, those that most rows see come first; those that a batch index has not keep their places."""
    s, M, lines = spec(EVERY["documents"]), 64, 2 * -(-N // BLOCK)
    p = Problem((2, 1), M, N, 64, 64, "bfloat16", "bfloat16")
    plans = [make_plan(s, p, CARD, direction, listed=True) for direction in ("forward", "backward")]
    module = gluon_dialect.load(render(s, plans[0], p, None, plans[1]).text)
    key_tiles = torch.zeros(2, 1 + lines, documents.KEY_HEAD + 2 * documents.SLOTS, dtype=torch.int32)
    seen = torch.randint(0, 9, (2, lines, 2), generator=torch.Generator().manual_seed(N), dtype=torch.int32)
    key_tiles[:, 1:, documents.KEY_HEAD - 2: documents.KEY_HEAD] = seen
    key_tiles[:, 0, documents.OWN] = torch.tensor(counts)
    rows, order = torch.zeros(2, 1, M, 64, dtype=torch.bfloat16), torch.empty(2, lines, dtype=torch.int32)
    made = [torch.empty(2, 1, *shape) for shape in ((M,), (BLOCK,), (BLOCK,), (documents.SLOTS * FINE, 64))]
    module.attention_delta[(8,)](rows, rows, *made[:3], key_tiles, made[3], torch.empty(1, dtype=torch.int32), order, *rows.stride() * 2, 2, 1, M, N, **module.DELTA)
    for b, count in enumerate(counts):
        expected, steps = [*range(lines)], seen[b].sum(-1).tolist()
        for stop in range(count, 0, -WINDOW):
            start = max(0, stop - WINDOW)
            expected[start:stop] = sorted(range(start, stop), key=lambda tile: -steps[tile])
        assert order[b].tolist() == expected


LEAVES = [(visible, *shape) for visible in ("(j <= i) & (doc[b, i] == doc[b, j])", "doc[b, i] == doc[b, j]", "(i - j < 100) & (doc[b, i] == doc[b, j]) & (doc[b, i] <= doc[b, j])",
                                            "(doc[b, i] == doc[b, j]) & (seg[i] == seg[j]) & (j <= i + 40)", "(doc[b, i] == doc[b, j]) & (seg[i] != 3)")
          for shape in ((700, 700), (515, 900), (900, 260), (129, 129), (1, 700))]


@pytest.mark.parametrize("visible, M, N", [pytest.param(*case, marks=[] if n in (7, 18) else pytest.mark.slow) for n, case in enumerate(LEAVES)])
def test_what_documents_leave(visible, M, N):
    """Tiles of rows follow each other, BLOCK rows at most; so do tiles of keys. What each names holds all that is visible, and no more where it says in full."""
    given = "given doc: int[2]" + "; given seg: int[1]" * ("seg" in visible)
    s = AttentionSpec.parse(f"attention[b, i, j]; {given}; qk = q[b, i] . k[b, j]; score = qk; where {visible}; empty zero; out = softmax_j(score) . v[b, j]")
    mask = s.mask()
    if "seg[i] != 3" in visible:
        assert not documents.pairs(mask)  # that is no comparison with a value of the key
        return
    g, length = torch.Generator().manual_seed(M), max(M, N)
    for mean in (1, 30, 160, 10000):
        ids = {"doc": (torch.rand(2, length, generator=g) < 1 / mean).cumsum(-1) * 7 % 11, "seg": torch.arange(length) // 333}
        aux = [ids[a.name] for a in mask.aux]
        tiles, keys = blocks.document_tiles(mask, aux, [2, M, N], torch.empty(0))
        visible_at = evaluate(mask.visible, index_grid(mask, [2], M, N, "cpu"), ids, None, torch.float64).expand(2, M, N)
        of_data = conjunction(c for c in conjuncts(mask.visible) if c.loads)
        compares_alike = evaluate(of_data, index_grid(mask, [2], M, N, "cpu"), ids, None, torch.float64).expand(2, M, N)
        covered = torch.zeros(2, M, N, dtype=torch.int)
        for b, lines in enumerate(tiles[1:].reshape(2, -1, tiles.shape[1]).tolist()):
            rows = [line for line in lines if line[0] < M]
            assert rows == lines[: len(rows)] and [line[0] for line in rows] + [M] == [0] + [line[1] for line in rows] and len(rows) <= int(tiles[0, 0])
            for first, last, begin, partial, full, *listed in rows:
                assert last - first <= BLOCK
                for n, block in enumerate(listed[: partial + full]):
                    part = slice(begin + block * BLOCK, begin + (block + 1) * BLOCK)
                    covered[b, first:last, part] += 1
                    assert n < partial or part.stop <= N and visible_at[b, first:last, part].all()
        assert covered.max() <= 1 and not (visible_at & (covered == 0)).any()
        if mean == 10000 and M == N and "j <= i)" in visible:  # one document: nothing that is hidden is visited
            assert int(covered.sum()) <= (M + BLOCK) * N
        covered[:] = 0
        for b, (head, *lines) in enumerate(keys.reshape(2, -1, keys.shape[1]).tolist()):
            slots = {n: pair for n, pair in enumerate(zip(head[documents.KEY_HEAD::2], head[documents.KEY_HEAD + 1::2])) if pair[1]}
            places = sorted(slots.values())
            assert [0] + [i0 + rows for i0, rows in places] == [i0 for i0, _ in places] + [M] and max(rows for _, rows in places) <= FINE
            assert max(slots) < -(-M // BLOCK) * 2 + int(keys[0, 1])  # so many are set to 0
            columns = [line for line in lines if line[0] < N]
            assert columns == lines[: len(columns)] and [line[0] for line in columns] + [N] == [0] + [line[1] for line in columns] and len(columns) <= int(keys[0, 0])
            for first, last, partial, full, *listed in columns:
                assert last - first <= BLOCK
                for n in range(partial + full):
                    i0, (slot, rows) = listed[2 * n], divmod(listed[2 * n + 1], documents.SHARE)
                    mixed, rows = divmod(rows, documents.MIXED)
                    part = slice(i0, i0 + rows), slice(first, last)
                    assert slots[slot] == (i0, rows)
                    covered[b][part] += 1
                    assert mixed or compares_alike[b][part].all()
                    assert n < partial or not mixed and last - first == BLOCK and visible_at[b][part].all()
        assert covered.max() <= 1 and not (visible_at & (covered == 0)).any()
