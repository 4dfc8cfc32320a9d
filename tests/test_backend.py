"""The backend as a user meets it: options, modes, caches, grad modes, dynamic shapes, checkpointing, dropout seeds."""
from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import flashfx
from flashfx.options import Options, split

from . import forked

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def causal(q, k, v, p=0.0):
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    return F.dropout(scores.masked_fill(~mask, float("-inf")).softmax(-1), p) @ v


def qkv(*shape, dtype=torch.float32, grad=True):
    torch.manual_seed(1)
    return [torch.randn(*(shape or (2, 3, 21, 16)), dtype=dtype, requires_grad=grad) for _ in range(3)]


class Counting:
    """A backend that rewrites and runs the graph as it stands, keeping graphs and regions."""

    def __init__(self, inner="eager", **options):
        self.options, self.graphs, self.regions = Options(inner=inner, **options), [], []

    def __call__(self, gm, example_inputs):
        from flashfx.backend import compile_rewritten
        run, regions = compile_rewritten(gm, example_inputs, self.options, {})
        self.graphs.append(gm)
        self.regions += regions
        return run

    @property
    def ops(self) -> int:
        return sum(n.target is torch.ops.flashfx.attention.default for gm in self.graphs for m in gm.modules()
                   if isinstance(m, torch.fx.GraphModule) for n in m.graph.nodes)


def agree(fn, *args, rewritten=1, **compile_options):
    """Outputs and gradients of eager and rewritten `fn` agree, and `rewritten` ops were put in."""
    seen = Counting(verify=True)
    compiled = torch.compile(fn, backend=seen, **compile_options)
    leaves = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    results = []
    for f in (fn, compiled):
        out = f(*args)
        for leaf in leaves:
            leaf.grad = None
        (out * torch.linspace(0.5, 1.5, out.numel()).reshape(out.shape)).sum().backward()
        results.append((out.detach(), *(leaf.grad for leaf in leaves)))
    for a, b in zip(*results):
        torch.testing.assert_close(b, a)
    assert seen.ops == rewritten, [str(r.refusal) for r in seen.regions]
    return seen


# ---------------------------------------------------------------------------------------------------- options

def test_unknown_option_names_the_known_ones():
    with pytest.raises(flashfx.OptionError, match=r"unknown option 'verfy'. Did you mean 'verify'\? FlashFX's options: inner, verify, disable, dump"):
        split({"verfy": True}, None)


@pytest.mark.parametrize("options, text", [
    ({"inner": "tvm"}, r"option inner='tvm': choose one of 'inductor', 'aot_eager', 'eager'"),
    ({"verify": 1}, r"option verify=1: True or False is expected"),
    ({"dump": 3}, r"option dump=3: the path of a folder is expected"),
    ({"inner": "eager", "max_autotune": True}, r"does not use Inductor, so these options have no effect: max_autotune"),
])
def test_wrong_values_are_refused(options, text):
    with pytest.raises(flashfx.OptionError, match=text):
        split(options, None)


def test_modes_and_inductor_options_pass_through():
    own, patches = split({"inner": "inductor", "max_fusion_size": 7}, "reduce-overhead")
    assert own == Options() and patches["triton.cudagraphs"] is True and patches["max_fusion_size"] == 7
    with pytest.raises(flashfx.OptionError, match="no-such-mode"):
        split({}, "no-such-mode")


def test_the_entry_point_is_registered():
    assert "flashfx" in torch._dynamo.list_backends()


def test_disable_leaves_every_site_alone():
    seen = Counting(disable=True)
    q, k, v = qkv()
    torch.testing.assert_close(torch.compile(causal, backend=seen)(q, k, v), causal(q, k, v))
    assert seen.ops == 0 and seen.regions == []


def test_a_user_pass_is_composed_with_ours():
    """Inductor's joint pass hook holds ours; a user's own still runs."""
    calls = []

    class Mine(torch._inductor.custom_graph_pass.CustomGraphPass):
        def __call__(self, graph):
            calls.append(any(n.target is torch.ops.flashfx.attention.default for n in graph.nodes))

        def uuid(self):
            return "mine"

    q, k, v = qkv()
    with torch._inductor.config.patch(force_disable_caches=True):
        torch.compile(causal, backend="flashfx", options={"joint_custom_post_pass": Mine()})(q, k, v).sum().backward()
    assert calls and all(calls)


# ---------------------------------------------------------------------------------------------------- graphs

def test_inner_eager_runs_the_rewritten_graph():
    seen = agree(causal, *qkv())
    names = [n.name for n in seen.graphs[0].graph.nodes]
    assert not any("softmax" in n or "matmul" in n for n in names), "the old attention is gone"


@pytest.mark.parametrize("inner", ["inductor", "aot_eager"])
def test_fullgraph_with_each_compiler(inner):
    q, k, v = qkv()
    compiled = torch.compile(causal, backend="flashfx", fullgraph=True, options={"inner": inner})
    expected = torch.autograd.grad(causal(q, k, v).square().sum(), (q, k, v))
    found = torch.autograd.grad(compiled(q, k, v).square().sum(), (q, k, v))
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b)


def test_graph_breaks_keep_their_sites():
    def fn(q, k, v):
        first = causal(q, k, v)
        torch._dynamo.graph_break()
        return causal(first, k, v)
    assert len(agree(fn, *qkv(), rewritten=2).graphs) == 2


def test_several_regions_share_keys_and_masks():
    def fn(q, k, v):
        return causal(q, k, v) + causal(causal(q, k, v), k, v)
    seen = agree(fn, *qkv(), rewritten=3)
    assert len({str(r.spec) for r in seen.regions}) == 1


def test_dynamic_shapes_compile_once():
    seen = Counting()
    compiled = torch.compile(causal, backend=seen, dynamic=True)
    for length in (21, 34, 50):
        q, k, v = qkv(2, 3, length, 16)
        torch.testing.assert_close(compiled(q, k, v), causal(q, k, v))
    assert len(seen.graphs) == 1 and seen.ops == 1


def test_mark_dynamic_keeps_one_graph():
    seen = Counting()
    compiled = torch.compile(causal, backend=seen)
    for length in (21, 34):
        q, k, v = qkv(2, 3, length, 16, grad=False)
        for t in (q, k, v):
            torch._dynamo.mark_dynamic(t, 2)
        torch.testing.assert_close(compiled(q, k, v), causal(q, k, v))
    assert len(seen.graphs) == 1 and seen.ops == 1


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients(context):
    q, k, v = qkv(grad=False)
    seen = Counting()
    with context():
        torch.testing.assert_close(torch.compile(causal, backend=seen)(q, k, v), causal(q, k, v))
    assert seen.ops == 1


def test_only_needed_gradients_are_computed(monkeypatch):
    """A frozen operand gets no gradient kernel."""
    from flashfx.codegen import launch
    asked = []
    original = launch.backward
    monkeypatch.setattr(launch, "backward", lambda *a: asked.append(a[10]) or original(*a))
    q, k, v = qkv()
    k.requires_grad_(False)
    torch.compile(causal, backend="flashfx", options={"inner": "aot_eager"})(q, k, v).sum().backward()
    assert asked == [[True, False, True]] and q.grad is not None and k.grad is None


@pytest.mark.parametrize("outside", [False, True])
def test_autocast(outside):
    """Custom ops are not autocast: the casts that the graph shows are put in."""
    def inside(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return causal(q, k, v)
    q, k, v = qkv(2, 3, 40, 16)
    seen = Counting()
    compiled = torch.compile(causal if outside else inside, backend=seen)
    with torch.autocast("cpu", torch.bfloat16, enabled=outside):
        found = compiled(q, k, v)
    expected = inside(q, k, v)
    assert found.dtype == expected.dtype == torch.bfloat16 and seen.ops == 1
    exact = causal(*(t.double() for t in (q, k, v)))
    error = lambda t: (t.double() - exact).norm()
    assert error(found) <= 2 * error(expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    def fn(q, k, v):
        return checkpoint(causal, q, k, v, use_reentrant=reentrant) * 2
    agree(fn, *qkv())


def test_shared_module_is_rewritten_at_each_call():
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(32, 4, batch_first=True, dropout=0.0)

    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            x = self.layer(x, x, x, need_weights=False)[0]
            return self.layer(x, x, x, need_weights=False)[0]

    model = Twice()
    x = torch.randn(2, 19, 32, requires_grad=True)
    seen = Counting(verify=True)
    found, expected = torch.compile(model, backend=seen)(x), model(x)
    torch.testing.assert_close(found, expected)
    for a, b in zip(torch.autograd.grad(found.square().sum(), model.parameters(), retain_graph=True),
                    torch.autograd.grad(expected.square().sum(), model.parameters())):
        torch.testing.assert_close(a, b)
    assert seen.ops == 2


def test_second_derivative_is_a_clear_error():
    q, k, v = qkv()
    compiled = torch.compile(causal, backend="flashfx", options={"inner": "eager"})
    grad, = torch.autograd.grad(compiled(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(flashfx.FlashFXError, match="no second derivative"):
        grad.sum().backward()


def test_a_site_that_no_kernel_can_run_is_refused_when_compiling():
    """Never an error at the first call: a T4 has no bfloat16 matrix unit."""
    from flashfx.codegen.gpu import BY_NAME
    from flashfx.codegen.plan import why_not
    from flashfx.passes.pipeline import rewrite
    found = []

    def backend(gm, example_inputs):
        found.extend(rewrite(gm, why_not=lambda spec, problem, device, fixed: (why_not(spec, problem, BY_NAME["T4"]), "")))
        return gm.forward

    q, k, v = qkv(dtype=torch.bfloat16)
    torch.testing.assert_close(torch.compile(causal, backend=backend)(q, k, v), causal(q, k, v))
    assert found[0].refusal.stage == "plan"
    assert found[0].refusal.reason == "T4 (compute capability 7.5) has no bfloat16 matrix unit: use float16"


# ---------------------------------------------------------------------------------------------------- caches

CACHED = textwrap.dedent("""
    import json, sys, torch
    import torch.nn.functional as F
    from torch._dynamo.utils import counters
    import flashfx.backend
    def fn(q, k, v):
        mask = torch.ones(30, 30, dtype=torch.bool).tril()
        return F.dropout((q @ k.transpose(-1, -2)).masked_fill(~mask, float("-inf")).softmax(-1), 0.2) @ v
    found = []
    for how in sys.argv[1:]:
        torch._dynamo.reset()
        counters.clear()
        if how == "changed source":
            flashfx.backend.source_hash = lambda: "another"
        options = {"max_fusion_size": 32} if how == "changed option" else {"verify": True} if how == "changed own" else {}
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, 30, 16, requires_grad=True) for _ in range(3))
        out = torch.compile(fn, backend="flashfx", options=options)(q, k, v)
        out.sum().backward()
        found.append({"hit": counters["aot_autograd"]["autograd_cache_hit"], "miss": counters["aot_autograd"]["autograd_cache_miss"],
                      "out": out.sum().item(), "grad": q.grad.sum().item()})
    print(json.dumps(found))
""")


def test_warm_cache_across_processes(tmp_path):
    """A second process hits and computes the same; a changed option or changed source of ours misses."""
    script = tmp_path / "cached.py"
    script.write_text(CACHED)

    def run(*hows):
        done = forked.run(script, *hows, cwd=tmp_path, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    cold, = run("plain")
    warm, *changed = run("plain", "changed option", "changed own", "changed source")
    assert (cold["hit"], cold["miss"]) == (0, 1) and (warm["hit"], warm["miss"]) == (1, 0)
    assert cold["out"] == warm["out"] and cold["grad"] == warm["grad"]
    assert [found["hit"] for found in changed] == [0, 0, 0]


# ---------------------------------------------------------------------------------------------------- showing

def test_dump_writes_runnable_files(tmp_path):
    q, k, v = qkv()
    torch.compile(causal, backend="flashfx", options={"inner": "eager", "dump": str(tmp_path)})(q, k, v)
    folder, = tmp_path.iterdir()
    assert {p.name for p in folder.iterdir()} == {"before.py", "after.py", "report.txt", "report.json", "report.html", "kernel_0.py"}
    assert "softmax" in (folder / "before.py").read_text() and "flashfx.attention" in (folder / "after.py").read_text()
    assert json.loads((folder / "report.json").read_text())["sites"][0]["fused"] is True
    done = subprocess.run([sys.executable, str(folder / "kernel_0.py")], capture_output=True, text=True,
                          env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": HERE})
    assert done.returncode == 0 and "relative errors: out" in done.stdout, done.stderr


def test_explain_reports_fused_and_refused():
    def fn(q, k, v):
        first = causal(q, k, v)
        weights = (first @ k.transpose(-1, -2)).softmax(-1)
        return weights @ v, weights
    q, k, v = qkv()
    report = flashfx.explain(fn, q, k, v)
    assert len(report) == 2 and report.fused == 1 and report[0].fused and not report[1].fused
    text = str(report)
    assert "flashfx: 2 attention sites, 1 fused, 1 left alone" in text
    assert "where   j <= i" in text and "attention weights are also read by" in text and "test_backend.py:" in text
    with pytest.raises(flashfx.FlashFXError, match="was left alone, so it has no plan"):
        report[1].kernel


def test_explain_for_another_gpu():
    q, k, v = qkv()
    assert "on A100" in str(flashfx.explain(causal, q, k, v, gpu="A100"))
    with pytest.raises(flashfx.FlashFXError, match="unknown GPU 'H900'; known: .*H100"):
        flashfx.explain(causal, q, k, v, gpu="H900")


def test_explain_does_not_disturb_the_random_state():
    q, k, v = qkv()
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    flashfx.explain(lambda q, k, v: causal(q, k, v, p=0.5), q, k, v)
    assert torch.equal(before, torch.random.get_rng_state())


def test_logging_shows_the_record(caplog):
    q, k, v = qkv()
    with caplog.at_level("INFO", logger="flashfx"):
        torch.compile(causal, backend="flashfx", options={"inner": "eager"})(q, k, v)
    assert any("attention[b, h, i, j]" in r.getMessage() for r in caplog.records)
    assert any("1 attention sites, 1 fused, 0 left alone" in r.getMessage() for r in caplog.records)


def test_verify_catches_a_dropped_mask(monkeypatch):
    """A planted wrong rewrite: lift forgets the mask."""
    from flashfx.expr import TRUE
    from flashfx.passes import lift
    monkeypatch.setattr(lift, "conjunction", lambda parts: TRUE)
    q, k, v = qkv()
    compiled = torch.compile(causal, backend="flashfx", options={"inner": "eager", "verify": True})
    with pytest.raises(Exception, match=r"site \w+ at .*test_backend.py:\d+ in causal: .* differs from its original"):
        compiled(q, k, v)
