"""What a compilation tells besides `explain`: TORCH_LOGS, TORCH_TRACE, one warning, and kernel files that run alone."""
from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import torch

import flashfx
from flashfx.backend import _warn_once

ROOT = Path(__file__).parent.parent
SCRIPT = """
import torch, flashfx
def attention(q, k, v):
    return (q @ k.mT).softmax(-1) @ v
q = torch.randn(2, 16, 8, requires_grad=True)
torch.compile(attention, backend="flashfx", options={"inner": "eager"})(q, q, q)
"""


def returned(q, k, v):
    weights = (q @ k.mT).softmax(-1)
    return weights @ v, weights


def test_logs_and_trace_carry_the_record(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, cwd=ROOT,
                          env=os.environ | {"TORCH_LOGS": "+flashfx", "TORCH_TRACE": str(tmp_path), "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert "1 attention sites, 1 fused, 0 left alone" in done.stderr and "qk    = q[b, i] . k[b, j]" in done.stderr
    trace, = tmp_path.glob("dedicated_log_torch_trace_*.log")
    lines = trace.read_text().splitlines()
    at = next(n for n, line in enumerate(lines) if '"name": "flashfx_report"' in line)
    payload = []
    for line in lines[at + 1:]:
        if not line.startswith("\t"):
            break
        payload.append(line[1:])
    record = json.loads("\n".join(payload))
    assert record["fused"] == 1 and record["training"] and "attention_backward_keys" in next(iter(record["kernels"].values()))


def test_one_warning_says_what_to_do():
    _warn_once.cache_clear()
    q = torch.randn(2, 16, 8)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            torch._dynamo.reset()
            torch.compile(returned, backend="flashfx", options={"inner": "eager"})(q, q, q)
    text, = (str(w.message) for w in seen if w.category is flashfx.FlashFXWarning)
    assert text.startswith("no attention site of a graph was rewritten, 1 found: the attention weights are also read by the graph's output (at tests/test_records.py:")
    assert text.endswith("do not return or store them, e.g. output_attentions=False; a graph break around an attention function returns them too, "
                         'which attn_implementation="sdpa" avoids. flashfx.explain(model, ...) reports every site')


def test_explaining_often_leaves_compiling_alone():
    """Each explain takes no entry of the model's recompilation limit, which is 8."""
    model = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    x, graphs = torch.randn(2, 8, 16), []
    assert {len(flashfx.explain(model, x, x, x, need_weights=False)) for _ in range(10)} == {1}
    torch.compile(model, backend=lambda gm, examples: graphs.append(gm) or gm.forward)(x, x, x, need_weights=False)
    assert len(graphs) == 1


def test_explain_runs_nothing():

    class Loud(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, q):
            self.count += 1
            return (q @ q.mT).softmax(-1) @ q

    model = Loud()
    report = flashfx.explain(torch.compile(model, backend="flashfx"), torch.randn(2, 8, 4))
    assert report.fused == 1 and model.count == 0


def test_a_broken_graph_is_seen_whole():
    def broken(q):
        first = (q @ q.mT).softmax(-1) @ q
        torch._dynamo.graph_break()
        return (first @ q.mT).softmax(-1) @ q
    report = flashfx.explain(broken, torch.randn(2, 8, 4))
    assert (len(report), report.fused, report.graphs) == (2, 2, 2)


def test_a_site_in_a_layer_of_pytorch_has_the_users_line():
    layer = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    site, = flashfx.explain(lambda x: layer(x, x, x, need_weights=False)[0], torch.randn(2, 8, 16))
    assert re.search(r"at \S*test_records\.py:\d+ in <lambda>", str(site)), site


def test_kernel_files_run_alone(tmp_path):
    q = torch.zeros(4, 8, 512, 16, dtype=torch.bfloat16, requires_grad=True)
    path = flashfx.explain(lambda q: torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True), q, gpu="A100")[0].repro(tmp_path / "kernel.py")
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=tmp_path)
    assert done.returncode == 0 and "relative errors: out" in done.stdout and "dq" in done.stdout, done.stderr
    if not torch.cuda.is_available():
        assert "on the CPU: extents" in done.stdout
