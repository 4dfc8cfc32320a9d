"""What stands around the attention in a graph: regions of their own, transforms, export, mixed dtypes, frozen and shared weights, layers of PyTorch's."""
from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from flashfx import op  # noqa: F401  registers flashfx::attention

from .test_backend import Counting as Rewriting
from .thinning import thinned

HEADS, WIDTH = 4, 32


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Counting(Rewriting):
    """Verifies each site; all must be fused."""

    def __init__(self, inner="aot_eager"):
        super().__init__(inner, verify=True)

    @property
    def fused(self) -> int:
        assert [str(r.refusal) for r in self.regions if not r.fused] == []
        return len(self.regions)


def plain(q, k, v):
    return (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1) @ v


class Attention(nn.Module):
    """Self attention as a model writes it."""

    def __init__(self, tied=False, linear=nn.Linear):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.o = (linear(WIDTH, WIDTH) for _ in range(4))
        if tied:
            self.v = self.k

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        s = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask, float("-inf"))
        return self.o((s.softmax(-1) @ v).transpose(1, 2).flatten(2))


def tokens(n=9, b=2, grad=True):
    return torch.randn(b, n, WIDTH, generator=torch.Generator().manual_seed(n)).requires_grad_(grad)


def same(fn, *args, params=(), sites=1, inner="aot_eager", **options):
    """Outputs and gradients of compiled and eager agree, and every site is fused."""
    backend = Counting(inner)
    compiled = torch.compile(fn, backend=backend, **options)
    wanted = list(dict.fromkeys(t for t in (*args, *params) if isinstance(t, torch.Tensor) and t.requires_grad))
    found = []
    for f in (fn, compiled):
        torch.manual_seed(0)
        out = f(*args)
        for t in wanted:
            t.grad = None
        if wanted and out.requires_grad:
            out.square().sum().backward()
        found.append((out.detach(), *(t.grad for t in wanted)))
    for a, b in zip(*found):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(b, a)
    assert backend.fused == sites
    return backend


# ---------------------------------------------------------------------------------------------------- regions of their own

@pytest.mark.parametrize("reentrant", (False, True))
def test_checkpointed_layers(reentrant):
    layers = nn.ModuleList(Attention() for _ in range(3))

    def fn(x):
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=reentrant)
        return x

    same(fn, tokens(), params=layers.parameters(), sites=3)


def test_repeated_layers_are_planned_once():
    """One spec, one plan: what a site costs at compile time is asked for once."""
    from flashfx.passes.pipeline import rewrite
    layers, asked, regions = nn.Sequential(*(Attention() for _ in range(5))), [], []

    def backend(gm, example_inputs):
        regions.extend(rewrite(gm, why_not=lambda *key: asked.append(key)))
        return gm.forward

    torch.compile(layers, backend=backend)(tokens())
    assert len(regions) == 5 and all(r.fused for r in regions) and len({r.spec for r in regions}) == 1 and len(asked) == 1


def test_nested_compile_regions():
    """One body for all layers (invoke_subgraph), rewritten once."""
    attend = torch.compiler.nested_compile_region(plain)

    def fn(q, k, v):
        return attend(attend(attend(q, k, v), k, v), k, v)

    q, k, v = (torch.randn(2, 3, 7, 8, generator=torch.Generator().manual_seed(n), requires_grad=True) for n in range(3))
    same(fn, q, k, v)


def test_branches():
    """Both bodies of torch.cond are graphs of their own."""
    def fn(q, k, v, causal):
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
        masked = lambda q, k, v, mask: (q @ k.transpose(-1, -2)).masked_fill(~mask, float("-inf")).softmax(-1) @ v
        return torch.cond(causal, masked, lambda q, k, v, mask: plain(q, k, v), (q, k, v, mask))

    q, k, v = (torch.randn(2, 3, 7, 8, generator=torch.Generator().manual_seed(n)) for n in range(3))
    for causal in (True, False):
        torch._dynamo.reset()
        same(fn, q, k, v, torch.tensor(causal), sites=2)


# ---------------------------------------------------------------------------------------------------- transforms and export

@pytest.mark.parametrize("in_dims", [0, (0, None, 0), (1, 1, 1)], ids=str)
def test_vmap_outside(in_dims):
    q, k, v = (torch.randn(3, 5, 3, 8, generator=torch.Generator().manual_seed(n), requires_grad=True) for n in range(3))
    if in_dims == (0, None, 0):
        k = k[0].detach().requires_grad_()
    same(torch.func.vmap(plain, in_dims), q, k, v)


def test_functional_gradient_outside():
    """torch.func.grad differentiates the attention itself: its graph holds forward and backward, and is right."""
    q, k, v = (torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(n)) for n in range(3))
    fn = torch.func.grad(lambda q: plain(q, k, v).square().sum())
    torch.testing.assert_close(torch.compile(fn, backend=Counting())(q), fn(q))


def test_an_exported_program_is_rewritten():
    model, x = Attention().requires_grad_(False), tokens(grad=False)
    exported = torch.export.export(model, (x,)).module()
    same(exported, x)


def test_export_keeps_the_op():
    """A rewritten graph can be exported: the op stays one node."""
    model, x = Attention().requires_grad_(False), tokens(grad=False)
    backend = Counting("eager")
    torch.compile(model, backend=backend)(x)
    graph, = backend.graphs
    inputs = tuple(n.meta["example_value"] for n in graph.graph.nodes if n.op == "placeholder")
    real = {id(t): t for t in (*model.parameters(), x)}
    args = tuple(next(t for t in real.values() if t.shape == i.shape) for i in inputs)
    program = torch.export.export(copy.deepcopy(graph), args)
    assert sum(n.target is torch.ops.flashfx.attention.default for n in program.graph.nodes) == 1
    torch.testing.assert_close(program.module()(*args)[0], graph(*args)[0])


# ---------------------------------------------------------------------------------------------------- dtypes

@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_autocast_around_a_module(dtype):
    model, x = Attention(), tokens()

    def fn(x):
        with torch.autocast("cpu", dtype):
            return model(x)

    backend = Counting()
    found, expected, exact = torch.compile(fn, backend=backend)(x), fn(x), Attention().double()(x.double())
    assert backend.fused == 1 and found.dtype == expected.dtype == dtype
    assert (found - exact).norm() <= 2 * (expected - exact).norm()


def test_values_of_another_dtype():
    q, k = (torch.randn(2, 3, 7, 8, generator=torch.Generator().manual_seed(n), requires_grad=True) for n in range(2))
    v = torch.randn(2, 3, 7, 8).bfloat16().requires_grad_()
    fn = lambda q, k, v: (q @ k.mT).softmax(-1).to(v.dtype) @ v
    backend = Counting()
    found, expected = torch.compile(fn, backend=backend)(q, k, v), fn(q, k, v)
    exact = plain(q * 8 ** 0.5, k, v.float())
    assert backend.fused == 1 and found.dtype == torch.bfloat16
    assert (found - exact).norm() <= 2 * (expected - exact).norm()


# ---------------------------------------------------------------------------------------------------- weights

@pytest.mark.parametrize("context", (torch.no_grad, torch.inference_mode))
def test_without_gradients(context):
    model, x = Attention(), tokens(grad=False)
    with context():
        same(model, x)


def test_adapters_on_frozen_weights(monkeypatch):
    """LoRA on q alone: the backward op is asked for the gradient of q and of nothing else."""
    from flashfx.codegen import launch
    asked = []
    original = launch.backward
    monkeypatch.setattr(launch, "backward", lambda *a: asked.append(a[10]) or original(*a))

    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = Attention().requires_grad_(False)
            self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

        def forward(self, x):
            heads = lambda t: t.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            q = heads(self.base.q(x) + self.up(self.down(x)))
            return self.base.o(plain(q, heads(self.base.k(x)), heads(self.base.v(x))).transpose(1, 2).flatten(2))

    model = Adapted()
    same(model, tokens(grad=False), params=[p for p in model.parameters() if p.requires_grad])
    assert asked and all(needs == [True, False, False] for needs in asked)  # verification asks too


def test_tied_projections():
    model = Attention(tied=True)
    same(model, tokens(), params=model.parameters())


@torch.library.custom_op("flashfx_tests::int8_linear", mutates_args=())
def int8_linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x @ (weight.to(x.dtype) * scale[:, None]).t()


@int8_linear.register_fake
def _(x, weight, scale):
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


class Quantised(nn.Module):
    def __init__(self, inner, outer):
        super().__init__()
        self.register_buffer("weight", torch.randint(-127, 127, (outer, inner), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(outer) / 500)

    def forward(self, x):
        return int8_linear(x, self.weight, self.scale)


def test_quantised_linears():
    same(Attention(linear=Quantised), tokens(grad=False))


# ---------------------------------------------------------------------------------------------------- PyTorch's layers

@pytest.mark.parametrize("training, norm_first", thinned(itertools.product((False, True), (False, True)), 3))
def test_encoder(training, norm_first):
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, dropout=0.0, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[1, 6:] = True
    same(lambda x: model(x, src_key_padding_mask=padding), tokens(), params=model.parameters(), sites=2)


@pytest.mark.parametrize("training", thinned((True, False)))
def test_decoder(training):
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 48, dropout=0.0, batch_first=True)
    model = nn.TransformerDecoder(layer, 2).train(training)
    causal = nn.Transformer.generate_square_subsequent_mask(9)
    same(lambda x, memory: model(x, memory, tgt_mask=causal, tgt_is_causal=True), tokens(), tokens(5), params=model.parameters(), sites=4)


def test_transformer():
    model = nn.Transformer(WIDTH, HEADS, 1, 1, 48, dropout=0.0, batch_first=True)
    same(lambda x, y: model(x, y), tokens(5), tokens(9), params=model.parameters(), sites=3)


@pytest.mark.parametrize("training", (False, True))
def test_encoder_with_dropout(training):
    """In training two runs with one seed agree, and dropout is at work."""
    model = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, dropout=0.2, batch_first=True).train(training)
    backend, x = Counting(), tokens()
    compiled, runs = torch.compile(model, backend=backend), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(compiled(x))
    assert backend.fused == 1 and torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2]) != training


def test_an_axis_of_one_costs_no_copy_of_the_gradient():
    backend = Counting("eager")
    q, k, v = (torch.randn(1, 3, 9, 8, requires_grad=True) for _ in range(3))
    bias = torch.randn(1, 3, 9, 9, requires_grad=True)
    out = torch.compile(lambda q, k, v, bias: (q @ k.mT + bias).softmax(-1) @ v, backend=backend)(q, k, v, bias)
    out.sum().backward()
    assert backend.fused == 1
    views = [n.target for n in backend.graphs[0].graph.nodes if n.op == "call_function"]
    assert views.count(torch.ops.aten.squeeze.dim) == 4 and torch.ops.aten.select.int not in views  # select's gradient fills and copies


# ---------------------------------------------------------------------------------------------------- dynamic sizes

def test_dynamic_batch_and_sequence():
    model, backend = Attention().requires_grad_(False), Counting("eager")
    compiled = torch.compile(model, backend=backend)
    for b, n in ((2, 9), (3, 14), (5, 6)):
        x = tokens(n, b, grad=False)
        for d in (0, 1):
            torch._dynamo.mark_dynamic(x, d)
        torch.testing.assert_close(compiled(x), model(x))
    assert len(backend.graphs) == 1 and backend.fused == 1


def test_dynamic_cross_attention_with_late_normalisation():
    def fn(q, k, v):
        e = torch.exp(q @ k.mT - (q @ k.mT).amax(-1, keepdim=True))
        return (e @ v) / e.sum(-1, keepdim=True)

    backend = Counting("eager")
    compiled = torch.compile(fn, backend=backend, dynamic=True)
    for m, n in ((5, 9), (7, 4)):
        q, k, v = torch.randn(2, 3, m, 8), torch.randn(2, 3, n, 8), torch.randn(2, 3, n, 8)
        torch.testing.assert_close(compiled(q, k, v), fn(q, k, v))
    assert len(backend.graphs) == 1 and backend.fused == 1


def test_sizes_that_cannot_be_proved_equal_are_compared_at_the_example():
    from types import SimpleNamespace

    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    from flashfx.passes.pipeline import _same_kind
    mode = FakeTensorMode(shape_env=ShapeEnv())
    windows = mode.from_tensor(torch.empty(17, 3)).shape[0] // 4
    with mode:
        old, same, other = (torch.empty(n, 2) for n in (windows * windows, windows * (windows * windows // windows), windows * (windows + 1)))
    value = SimpleNamespace(dtype=old.dtype, shape=old.shape, owner="out")
    _same_kind(value, SimpleNamespace(meta={"example_value": same}))
    with pytest.raises(AssertionError, match="its replacement"):
        _same_kind(value, SimpleNamespace(meta={"example_value": other}))
