"""The tiled PyTorch schedule: the same cases as the kernels, float64 and gradcheck, tiles that do not matter, memory that is O(N)."""
from __future__ import annotations

import itertools

import pytest
import torch

from flashfx.codegen import launch, layout, torch_tiled
from flashfx.codegen.derivative import partial
from flashfx.codegen.selfcheck import inputs
from flashfx.errors import PlanError
from flashfx.expr import QK, Load, parse
from flashfx.ops import OPS
from flashfx.reference import evaluate
from flashfx.spec import AttentionSpec

from .cases import CORE, KINDS, MORE, problem, spec
from .run import lse_gradient, run

ALL = {**CORE, **MORE}
DTYPES = ("float32", "bfloat16", "float16")


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setattr(launch, "interpreting", lambda: False)


@pytest.mark.parametrize("variant, kind, dtype", [(v, kind, DTYPES[(n + m) % 3]) for (n, v), (m, kind) in
                                                   itertools.product(enumerate(ALL), enumerate(KINDS))])
def test_cases(variant, kind, dtype, monkeypatch):
    monkeypatch.setattr(torch_tiled, "tile_sizes", lambda batch, M, N: (16, 11))
    run(spec(ALL[variant], kind), problem(kind, 24, dtype)).within_budget()


@pytest.mark.parametrize("M, N, batch", [(0, 5, 2), (5, 0, 2), (5, 5, 0), (1, 1, 1)])
def test_nothing(M, N, batch):
    run(spec(CORE["causal"]), problem("self", 16, "float32", M=M, N=N, batch=batch)).within_budget()


@pytest.mark.parametrize("variant", ["softcap", "t5_table", "temperature", "sigmoid_gate", "additive_left_padding", "dropout"])
def test_gradcheck(variant):
    s, p = spec(ALL[variant]), problem("self", 3, "float64", M=5, batch=1)
    q, k, v, aux, seed, sizes = inputs(s, p)
    leaves = [t.requires_grad_() if t.is_floating_point() else t for t in (q, k, v, *aux)]

    class Site(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *operands):
            out, lse = launch.forward(s, *operands[:3], operands[3:], seed, sizes)
            ctx.save_for_backward(*operands, out, lse)
            return out

        @staticmethod
        def backward(ctx, grad):
            *operands, out, lse = ctx.saved_tensors
            found = launch.backward(s, grad, *operands[:3], operands[3:], seed, out, lse, sizes, ctx.needs_input_grad)
            return tuple(g if need else None for g, need in zip(found, ctx.needs_input_grad))

    assert torch.autograd.gradcheck(Site.apply, leaves)


def test_repeats_and_tiles():
    s, p = spec(MORE["two_reads"], "gqa"), problem("gqa", 16, "float32")
    q, k, v, aux, seed, sizes = inputs(s, p)
    once, again = (torch_tiled.forward(s, q, k, v, aux, seed, sizes)[0] for _ in range(2))
    other, _ = torch_tiled.forward(s, q, k, v, aux, seed, sizes, tiles=(7, 5))
    assert torch.equal(once, again) and torch.allclose(once, other, rtol=0, atol=p.N * torch.finfo(torch.float32).eps * once.abs().max().item())


def test_no_matrix_of_scores():
    """The largest tensor made is a tile of 64 x 32 scores (as index, 8 bytes each) or a result, not 512 x 512."""
    s = spec(CORE["causal"])
    q, k, v = (torch.randn(1, 1, 512, 8) for _ in range(3))
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(t, torch.Tensor) and not t._is_view():
                    largest = max(largest, t.untyped_storage().nbytes())
            return out

    with Watch():
        out, lse = torch_tiled.forward(s, q, k, v, [], None, [1, 1], tiles=(64, 32))
        torch_tiled.backward(s, out, q, k, v, [], None, out, lse, [1, 1], [True] * 3, tiles=(64, 32))
    assert largest <= 8 * 64 * 32


def test_output_layout():
    """Stored as (B, M, H, Dv): the model's transpose and reshape are views."""
    v = torch.empty(2, 3, 7, 5)
    out = layout.empty_output((2, 3), 11, v)
    assert out.shape == (2, 3, 11, 5) and out.transpose(1, 2).is_contiguous()
    assert layout.empty_output((4,), 11, v).is_contiguous() and layout.empty_output((), 11, v).shape == (11, 5)
    assert layout.empty_output((2, 3), 11, v, 2).is_contiguous() and layout.empty_output((2, 3), 11, v, 0).permute(2, 0, 1, 3).is_contiguous()
    five = layout.empty_output((2, 3, 4), 11, v)
    assert five.permute(0, 3, 1, 2, 4).is_contiguous()


@pytest.mark.parametrize("text", ["qk * 0.125", "tanh(qk / 30.0) * 30.0", "qk * u[h] + w[h, i, j]", "where(qk > 0.5, qk * 2.0, exp(qk) - 1.0)",
                                  "maximum(qk, u[h]) - minimum(qk * qk, w[h, i, j])", "sigmoid(qk * u[h]) / (1.5 + w[h, i, j] * w[h, i, j])",
                                  "abs(qk) + sqrt(1.0 + qk * qk) + log1p(exp(-qk))", "sin(qk) * cos(w[h, i, j]) + erf(qk) - floor(qk)",
                                  "rsqrt(2.0 + qk * qk) + reciprocal(3.0 + u[h] * u[h]) + log(2.0 + exp2(qk)) + qk % 2.0", "-qk"])
def test_derivatives_agree_with_autograd(text):
    score = parse(text, {"u": "float", "w": "float"})
    g = torch.Generator().manual_seed(1)
    dot = torch.randn(3, 4, 5, generator=g, dtype=torch.float64, requires_grad=True)
    tensors = {"u": torch.randn(3, generator=g, dtype=torch.float64), "w": torch.randn(3, 4, 5, generator=g, dtype=torch.float64)}
    for t in tensors.values():
        t.requires_grad_()
    env = {"h": torch.arange(3)[:, None, None], "i": torch.arange(4)[None, :, None], "j": torch.arange(5)}
    value = evaluate(score, env, tensors, dot, torch.float64).expand(3, 4, 5)
    leaves = [QK, *score.loads]
    expected = torch.autograd.grad(value.sum(), [dot, *(tensors[x.name] for x in score.loads)], allow_unused=True)
    for leaf, want in zip(leaves, expected):
        found = evaluate(partial(score, leaf), env, tensors, dot, torch.float64).expand(3, 4, 5)
        if isinstance(leaf, Load) and leaf.name == "u":
            found = found.sum((1, 2))
        assert torch.allclose(found, torch.zeros_like(found) if want is None else want, atol=1e-12), (text, leaf, partial(score, leaf))


def test_every_differentiable_op_has_rules_that_parse():
    for row in OPS.values():
        for n, text in enumerate(row.partials):
            if text is not None:
                arguments = ", ".join("qk" if m == n else "1.5" for m in range(row.arity))
                if row.name != "where":
                    partial(parse(f"{row.name}({arguments})", {}), QK)


def test_spec_text_travels():
    for variant in ALL.values():
        s = spec(variant)
        assert AttentionSpec.parse(str(s)) == s


@pytest.mark.parametrize("variant, kind, dtype", [("full", "self", "float32"), ("causal", "gqa", "bfloat16"), ("softcap", "cross", "float32")])
def test_gradient_of_the_log_sum_exp(variant, kind, dtype):
    lse_gradient(spec(CORE[variant], kind), problem(kind, 24, dtype)).within_budget()


def test_gradient_of_the_log_sum_exp_beside_captured_gradients_is_an_error():
    case, shape = spec(CORE["bias"]), problem("self", 16, "float32")
    q, k, v, aux, seed, sizes = inputs(case, shape)
    out, lse = launch.forward(case, q, k, v, aux, seed, sizes)
    with pytest.raises(PlanError, match="a gradient of the log-sum-exp beside gradients of captured tensors is not supported"):
        launch.backward(case, out, q, k, v, aux, seed, out, lse, sizes, [True] * 4, lse)
