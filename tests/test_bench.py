"""The bench command: each variant is one function to every peer, is found, and counts its work right; the command runs and says what failed."""
from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask, flex_attention

import flashfx
from flashfx.bench import apart
from flashfx.bench import variants as known
from flashfx.bench.apart import Apart
from flashfx.bench.counters import COUNTERS, COUNTS, count, rows
from flashfx.bench.measure import Row, measure, operands
from flashfx.bench.measure import roofline as known_roofline
from flashfx.bench.table import groups, lines, summary
from flashfx.bench.variants import VARIANTS, Shape, plain_workload
from flashfx.codegen.gpu import BY_NAME

from .thinning import thinned

N = 48


@pytest.fixture(autouse=True)
def small_window(monkeypatch):
    monkeypatch.setattr(known, "WINDOW", 16)


def shape(variant) -> Shape:
    return Shape(2, 8, 8 // variant.kv_ratio, N, 16, 16, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("name", VARIANTS)
def test_flashfx_takes_every_variant(name):
    variant = VARIANTS[name]
    qkv, _, tensors = operands(shape(variant), variant)
    report = flashfx.explain(variant.attention, *qkv, **tensors)
    assert [region.fused for region in report] == [True]


@pytest.mark.parametrize("name", [n for n, v in VARIANTS.items() if v.flex])
def test_flex_computes_the_same(name):
    variant = VARIANTS[name]
    qkv, _, tensors = operands(shape(variant), variant)
    with torch.no_grad():
        score_mod, mask_mod = variant.flex(tensors)
        if mask_mod is not None:  # the mask as part of the score: eager FlexAttention skips nothing
            visible, own = mask_mod, score_mod
            score_mod = lambda s, b, h, i, j: torch.where(visible(b, h, i, j), s if own is None else own(s, b, h, i, j), -float("inf"))
        found = flex_attention(*(t.detach() for t in qkv), score_mod=score_mod, enable_gqa=True, return_lse=variant.after is not None)
        found = variant.after(*found, tensors) if variant.after else found
        torch.testing.assert_close(found, variant.attention(*qkv, **tensors))


@pytest.mark.parametrize("name", [n for n, v in VARIANTS.items() if v.flex])
def test_visible_pairs(name):
    variant = VARIANTS[name]
    given = shape(variant)
    _, _, tensors = operands(given, variant)
    mask_mod = variant.flex(tensors)[1]
    pairs = float(create_mask(mask_mod, given.batch, given.heads, N, N, device="cpu").sum()) / given.batch / given.heads if mask_mod else N * N
    assert pairs - N / 2 <= variant.visible(given, tensors) <= pairs  # a triangle counts n^2 / 2, without half its diagonal


@pytest.mark.parametrize("name", VARIANTS)
def test_plain_workload_has_the_same_products(name):
    given = replace(shape(VARIANTS[name]), batch=16)
    plain, own = known.plain_workload(name, given)
    pairs = lambda variant, s: s.batch * s.heads * VARIANTS[variant].visible(s, VARIANTS[variant].tensors(s))
    assert plain in ("full", "causal") and own.kv_heads == own.heads
    assert pairs(plain, own) == pytest.approx(pairs(name, given), rel=0.1)  # whole batches, whole lengths


def test_buckets_are_those_of_t5():
    from transformers.models.t5.modeling_t5 import T5Attention
    i, j = torch.arange(300)[:, None], torch.arange(300)
    assert torch.equal(known.bucket(i, j), T5Attention._relative_position_bucket(j - i, True, known.BUCKETS, known.FARTHEST))


@pytest.mark.parametrize("name, peer", [("causal", "flashfx"), ("bias", "flashfx"), ("t5", "eager"), ("gqa", "efficient"), ("sinks", "flashfx")])
def test_a_row(name, peer):
    row = measure(name, peer, shape(VARIANTS[name]))
    assert not row.failed or peer == "efficient", row.failed
    if not row.failed:
        assert set(row.ms) == set(row.tflops) == {"forward", "backward", "both"}
        assert row.error < 1e-5 and row.eager_error < 1e-5


def test_a_wrong_peer_shows_in_its_error(monkeypatch):
    from flashfx.bench import peers
    monkeypatch.setitem(peers.PEERS, "eager", lambda variant, shape, tensors: lambda q, k, v: known.full(q, k, v))
    assert measure("causal", "eager", shape(VARIANTS["causal"]), ("both",)).error > 0.1


def test_a_peer_that_fails_is_a_row_that_says_why():
    row = measure("t5", "flash", shape(VARIANTS["t5"]))
    assert row.failed == "scaled_dot_product_attention cannot say it without an N x N tensor" and not row.ms
    rows = [row, Row("t5", "flashfx", 2, 8, 8, N, 16, "float32", {"both": 1.0}, {"both": 2.0})]
    assert lines(rows, ["flash", "flashfx"], ["both"])[0].split()[-4:] == ["-", "2", "-", "-"]
    shown = "\n".join(summary(rows, ["both"]))
    assert f"no number for flash (t5 d=16 N={N}): scaled_dot_product_attention cannot say it" in shown


def test_what_calls_keep_the_host_is_said():
    def row(peer, n, us, by_call=()):
        return Row("full", peer, 1, 8, 8, n, 64, "bfloat16", {"both": 1.0}, {"both": 2.0}, host_us={"both": us}, by_call=by_call)
    said = summary([row("flashfx", 64, 30.0), row("flashfx", 128, 32.0), row("flashfx", 256, 90.0), row("cudnn", 64, 20.0, ("both",)), row("plain", 64, 99.0)], ["both"])
    assert "host time of a call in microseconds, median and most: flashfx both 32 (90); cudnn both 20 (20)" in said
    assert "not recorded as CUDA graphs: cudnn both" in said


def ends_the_process(name, peer, shape, *_):
    if peer == "flex":
        os._exit(3)
    return Row(name, peer, 1, 8, 8, os.getpid(), 64, "bfloat16", {}, {}, failed="an illegal access" * (peer == "flash"))


def test_a_peer_that_ends_its_process_is_a_row_and_the_next_has_another_process(monkeypatch):
    """As FlexAttention's illegal access on a tensor of more than 2**31 elements does to all that a process does on the GPU later."""
    where = shape(VARIANTS["full"])
    with Apart(ends_the_process) as measured:
        first, again = (measured("full", "flashfx", where) for _ in range(2))
        assert first.length == again.length != os.getpid()
        assert measured("full", "flex", where).failed == "it ended the process that measured it"
        assert measured("full", "flashfx", where).length not in (first.length, os.getpid())
        monkeypatch.setattr(apart, "_there", lost_there)
        before = measured("full", "flash", where)
        assert before.failed == "an illegal access" and measured("full", "flash", where).length != before.length


def lost_there(work, *given):
    return work(*given[:-1], *given[-1]), True


def test_rooflines():
    """Products bind plain attention of long sequences, bytes what reads or writes a number for every query and key, exponentials small heads."""
    gpu = BY_NAME["H200"]
    of = lambda name, head: known_roofline(VARIANTS[name], where := Shape(1, 8, 8, 2048, head, head, torch.bfloat16, torch.device("cpu")), VARIANTS[name].tensors(where), gpu)
    found = of("full", 128)
    assert found["forward"] == found["backward"] == found["both"] == pytest.approx(gpu.matrix_rate / 1e12)
    assert of("full", 16)["forward"] == pytest.approx(4 * 16 * gpu.exp_rate / 1e12)
    pairs, operand = 8 * 2048 ** 2, 8 * 2048 * 32 * 2
    assert of("mask", 32)["forward"] == pytest.approx(4 * 32 * pairs / ((4 * operand + 2 * pairs) / gpu.bandwidth) / 1e12)
    assert of("bias", 32)["backward"] == pytest.approx(10 * 32 * pairs / ((8 * operand + 4 * pairs) / gpu.bandwidth) / 1e12)
    row = lambda peer, speed: Row("full", peer, 1, 8, 8, 2048, 128, "bfloat16", {"both": 1.0}, {"both": speed}, found)
    line, = lines([row("flashfx", found["both"] / 2), row("flex", 100.0)], ["flashfx", "flex"], ["both"])
    assert line.split()[-1] == "0.50"


def test_the_command(tmp_path, capsys):
    from typer.testing import CliRunner

    from flashfx.bench.command import app
    arguments = ["attention", "--variant", "causal", "--length", "32", "--head-size", "16:8", "--tokens", "64", "--heads", "2", "--dtype", "fp32",
                 "--peers", "flashfx,eager,fa3", "--device", "cpu", "--json", str(tmp_path / "rows.json"), "--plot", str(tmp_path / "rows.png")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "geometric mean" not in done.output and "no number for fa3" in done.output and "timings are noise" in done.output
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(r["peer"], sorted(r["ms"])) for r in rows] == [("flashfx", ["both", "forward"]), ("eager", ["both", "forward"]), ("fa3", [])]
    assert (tmp_path / "rows.png").stat().st_size > 1000


@pytest.mark.parametrize("variant", thinned((name for name, v in VARIANTS.items() if v.crosses), 3))
def test_other_keys_than_queries(variant):
    """All gradients have their operand's shape, and errors are those of the same workload."""
    where = replace(shape(VARIANTS[variant]), other_keys=19)
    row = measure(variant, "flashfx", where, ("forward", "both"))
    assert not row.failed and row.error < 1e-5 and plain_workload(variant, where)[1].keys <= 19
    assert lines([row], ["flashfx"], ["both"])[0].split()[2] == f"{N}x19"


def test_values_of_another_size_are_another_workload():
    """They have a line, a ratio and a share of the mean of their own."""
    row = lambda peer, values, speed: Row("full", peer, 1, 8, 8, 4096, 192, "bfloat16", {"both": 1.0}, {"both": speed}, other_values=values)
    rows = [row("flashfx", 0, 6.0), row("flex", 0, 2.0), row("flashfx", 128, 8.0), row("flex", 128, 4.0)]
    assert [line.split()[1] for group in groups(rows).values() for line in lines(group, ["flashfx", "flex"], ["both"])] == ["192", "192:128"]
    assert summary(rows, ["both"])[0] == f"both: geometric mean of the ratios {6 ** 0.5:.3f}, least 2.00, 2 workloads"
    where = replace(shape(VARIANTS["full"]), v_head_size=8)
    assert measure("full", "flashfx", where, ("forward",), check=False).other_values == 8


def test_other_keys_by_the_command():
    from typer.testing import CliRunner

    from flashfx.bench.command import app
    done = CliRunner().invoke(app, ["attention", "--variant", "full,causal", "--keys", "77"])
    assert done.exit_code == 2 and "causal need as many keys as queries" in " ".join(done.output.replace("│", " ").split())


@pytest.mark.parametrize("arguments, says", [(["--variant", "windw"], "unknown variant 'windw'; known: full, causal"),
                                             (["--length", "4x"], "numbers separated by commas are expected"),
                                             (["--peers", ""], "unknown peer"), (["--dtype", "int8"], "unknown dtype 'int8'")])
def test_bad_arguments(arguments, says):
    from typer.testing import CliRunner

    from flashfx.bench.command import app
    done = CliRunner().invoke(app, ["attention", *arguments])
    assert done.exit_code == 2 and says in " ".join(done.output.replace("│", " ").split())


def ncu(tmp_path, monkeypatch, launched, code: int = 0) -> None:
    """Put a profiler on the PATH that prints, of each launch (kernel, bytes read, bytes written), what `ncu --csv` does."""
    columns = ["ID", "Process ID", "Kernel Name", "Block Size", "Metric Name", "Metric Unit", "Metric Value"]
    rows = [(str(n), "7", kernel, "(128, 1, 1)", metric, "byte", f"{size:,}") for n, (kernel, *sizes) in enumerate(launched)
            for metric, size in [*zip(COUNTERS, sizes), ("other", 9)]]
    (tmp_path / "printed").write_text("==PROF== Connected\n" + "\n".join(",".join(f'"{cell}"' for cell in row) for row in [columns, *rows]))
    (tmp_path / "ncu").write_text(f"#!/bin/sh\ncat {tmp_path / 'printed'}\nexit {code}\n")
    (tmp_path / "ncu").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


def test_counters_are_read_from_what_ncu_prints(tmp_path, monkeypatch):
    mark = ("at::cuda::detail::spin_kernel(long)", 3, 4)
    ncu(tmp_path, monkeypatch, [("attention_forward", 1000, 24), mark, ("attention_delta", 5, 0), ("attention_backward_keys", 6, 1), mark])
    assert count("bytes", "--watched") == [[("attention_forward", 1024.0)], [("attention_delta", 5.0), ("attention_backward_keys", 7.0)]]
    ncu(tmp_path, monkeypatch, [("attention_forward", 1000, 24), mark, ("attention_delta", 5, 0)])
    with pytest.raises(RuntimeError, match="behind the last mark"):
        count("bytes", "--watched")
    ncu(tmp_path, monkeypatch, [], code=1)
    with pytest.raises(RuntimeError, match="ncu: .*Connected"):
        count("bytes", "--watched")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match="not on the PATH"):
        count("bytes", "--watched")


def test_a_kernel_that_was_not_counted_is_an_error():
    forward, backward = [("attention_forward", 7.0)], [("attention_delta", 1.0), ("attention_backward_keys", 2.0)]
    more = [("attention_delta", 1.0), ("attention_backward_keys", 90.0)]
    counted = [forward] * COUNTS * 7 + [backward] * COUNTS * 2 + [more, backward] * (COUNTS // 2) + [backward]
    assert [row.counted for row in rows(counted, BY_NAME["H200"])] == [7.0] * 7 + [2.0] * 3
    with pytest.raises(RuntimeError, match="counted 1 launches, not 5 of each of 10 kernels"):
        rows([forward], BY_NAME["H200"])


def test_each_line_of_figure_2_has_what_was_counted_of_it():
    from flashfx.bench.figure2 import measured, tables
    _, cases = next(tables(BY_NAME["H200"], None, 1, 256))
    lines = list(measured(cases, None, iter([[("gemm", 2e9), ("softmax", 1e9)]])))
    assert [line.counted for line in lines] == [3.0, None] and [line.measured for line in lines] == [None, None]


def test_figure_2_by_the_model_alone(tmp_path):
    from typer.testing import CliRunner
    from flashfx.commands import app
    done = CliRunner().invoke(app, ["bench", "figure2", str(tmp_path / "figure.svg"), "--batch", "16"])
    assert done.exit_code == 0, done.output
    standard, tiled = ([float(x) for x in line.split()[1:] if x != "-"] for line in done.output.splitlines() if line.startswith(("standard ", "tiled ")) and "," not in line)
    assert tiled[0] > standard[0] and tiled[1] < standard[1] and tiled[2] < standard[2]  # more operations, fewer bytes
    assert (tmp_path / "figure.svg").read_text().startswith("<?xml")


def test_a_partial_sweep_replaces_what_it_measured_anew(tmp_path):
    from flashfx.bench.fit import points
    from flashfx.bench.sweep import Table, grid
    path, (first, second) = tmp_path / "tiles.json", [(str(w).split(" d=")[0], w.problems[0]) for w in grid(True)]
    whole = Table(str(path), "card A")
    whole.add(first, {"triton forward 64x32x4x2": 5.0, "triton forward 64x64x4x2": 6.0, "triton delta": 1.0})
    whole.add(second, {"triton forward 64x32x4x2": 7.0})
    whole.built([["w", "triton", "sm_90", "forward", 64, 32, 4, 2, 100, 50, 0], ["w", "triton", "sm_90", "forward", 64, 64, 4, 2, 200, 50, 0]])
    whole.write()
    part = Table(str(path), "card B", again=True)
    part.add(first, {"triton forward 128x64x4x2": 4.0})
    part.add(first, {"triton forward 128x32x4x2": 3.0})
    part.built([["w", "triton", "sm_90", "forward", 64, 32, 4, 2, 100, 60, 0]])
    part.write()
    found = json.loads(path.read_text())
    assert found["devices"] == ["card A", "card B"]
    assert [p["us"] for p in found["points"]] == [{"triton delta": 1.0, "triton forward 128x64x4x2": 4.0, "triton forward 128x32x4x2": 3.0}, {"triton forward 64x32x4x2": 7.0}]
    assert [p.get("remeasured") for p in found["points"]] == [{"triton forward": 1}, None]
    assert [b[5:] for b in found["builds"]] == [[64, 4, 2, 200, 50, 0], [32, 4, 2, 100, 60, 0]]
    assert [p.number for p in points(path)] == [0, 1]  # which half a point is in stays as it was
    assert Table(str(path), "card C", again=True).remeasured[first] == {"triton forward": 1}


def test_what_a_sweep_measures():
    """Of each workload both schedules, forward and backward; only the portable one decodes."""
    from flashfx.bench.sweep import grid, jobs
    for workload in grid():
        found = {(j.schedule, j.direction) for j in jobs(workload, BY_NAME["H200"])}
        every = {("triton", "forward"), ("triton", "backward"), ("hopper", "forward")}
        assert found == {("triton", "forward")} if workload.problems[0].M == 1 else every <= found, workload
        assert {j.schedule for j in jobs(workload, BY_NAME["H200"], ("hopper",))} <= {"hopper"} and not [j for j in jobs(workload, BY_NAME["A100"]) if j.schedule == "hopper"]


def test_workloads_are_chosen_by_name():
    from typer.testing import CliRunner

    from flashfx.bench.command import app
    from flashfx.bench.sweep import grid
    assert {str(w) for w in grid(only="bias d=64,decode")} == {"bias d=64 bfloat16", "full grouped d=64 bfloat16 decode", "full grouped d=128 bfloat16 decode"}
    done = CliRunner().invoke(app, ["tiles", "--only", "nothing of the kind"])
    assert done.exit_code == 2 and "no workload has any of" in " ".join(done.output.replace("│", " ").split())
