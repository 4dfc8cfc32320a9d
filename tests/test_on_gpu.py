"""What only a GPU can show: repeated launches, CUDA graphs, streams, threads, deterministic repeats."""
from __future__ import annotations

import threading

import pytest
import torch

import flashfx  # noqa: F401

from .kernels import interpreted_differences as differences

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def attention(q, k, v, pad, bias, p: float = 0.0):
    s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + bias
    rows, cols = (torch.arange(n, device=q.device) for n in (q.shape[-2], k.shape[-2]))
    hidden = (cols > rows[:, None]) | ~pad[:, None, None, :]
    return torch.dropout(s.masked_fill(hidden, float("-inf")).softmax(-1), p, p > 0) @ v


def operands(n: int, layout: str = "bhnd"):
    torch.manual_seed(n)
    q, k, v = (torch.randn((2, 4, n, 64) if layout == "bhnd" else (2, n, 4, 64), device="cuda", dtype=torch.bfloat16) for _ in range(3))
    if layout == "bnhd":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    bias = torch.randn(4, n, n, device="cuda", dtype=torch.bfloat16)
    pad = torch.ones(2, n, dtype=torch.bool, device="cuda")
    pad[1, n // 2:] = False
    return [t.detach().requires_grad_() for t in (q, k, v, bias)], pad


def results(function, leaves, pad, *rest):
    out = function(*leaves[:3], pad, leaves[3], *rest)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


def assert_close(found, leaves, pad, what: str) -> None:
    expected = results(attention, [t.detach().double().requires_grad_() for t in leaves], pad)
    for name, a, b in zip(("out", "q", "k", "v", "bias"), found, expected):
        error = float((a.double() - b).norm() / b.norm())
        assert error < 0.02, f"{what}: {name} is off by {error:.1e}"


def test_repeated_launches():
    """Replayed calls give what the first call gives, whatever lengths and layouts come between."""
    compiled = torch.compile(attention, backend="flashfx", dynamic=True)
    for n in (96, 200, 1000, 96, 130, 200, 1000, 96):
        for layout in ("bhnd", "bnhd"):
            leaves, pad = operands(n, layout)
            assert_close(results(compiled, leaves, pad), leaves, pad, f"N={n} {layout}")


def test_repeats_are_bit_identical():
    compiled = torch.compile(attention, backend="flashfx")
    leaves, pad = operands(200)
    first = results(compiled, leaves, pad)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, results(compiled, leaves, pad)))


def test_cuda_graphs():
    compiled = torch.compile(attention, backend="flashfx", mode="reduce-overhead")
    for n in range(5):  # warm-up, recording, replays
        leaves, pad = operands(256)
        torch.compiler.cudagraph_mark_step_begin()
        assert_close([t.clone() for t in results(compiled, leaves, pad)], leaves, pad, f"call {n}")


def test_dropout_differs_between_replays_of_a_cuda_graph():
    compiled = torch.compile(attention, backend="flashfx", mode="reduce-overhead")
    leaves, pad = operands(256)
    outs = []
    for _ in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            outs.append(compiled(*leaves[:3], pad, leaves[3], 0.2).clone())
    assert not any(torch.equal(a, b) for n, a in enumerate(outs) for b in outs[:n])


def test_side_streams():
    compiled = torch.compile(attention, backend="flashfx")
    leaves, pad = operands(300)
    results(compiled, leaves, pad)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # launched elsewhere, the kernels would not wait for this
        late = [t.detach().clone().requires_grad_() for t in leaves]
        found = results(compiled, late, pad)
    torch.cuda.current_stream().wait_stream(stream)
    assert_close(found, leaves, pad, "on a side stream")


def test_kernels_leave_their_counters_at_0():
    """Of every stream and every captured call; graphs that are replayed side by side have counters of their own."""
    from flashfx.codegen import counters
    compiled = torch.compile(attention, backend="flashfx", dynamic=True)
    given = [operands(n) for n in (129, 300, 1000)]
    with torch.no_grad():
        wanted = [compiled(*leaves[:3], pad, leaves[3]) for leaves, pad in given]
    graphs, found, streams = [], [], [torch.cuda.Stream() for _ in given]
    for (leaves, pad), stream in zip(given, streams):
        graphs.append(torch.cuda.CUDAGraph())
        torch.cuda.synchronize()
        with torch.cuda.graph(graphs[-1], stream=stream), torch.no_grad():
            found.append(compiled(*leaves[:3], pad, leaves[3]))
    for _ in range(20):
        for graph, stream in zip(graphs, streams):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted))
    assert all(not bool(t.any()) for t in counters._kept)


def test_threads():
    compiled = torch.compile(attention, backend="flashfx")
    given = [operands(n) for n in (192, 192, 192)]
    for leaves, pad in given:
        results(compiled, leaves, pad)
    found: dict[int, list] = {}

    def work(number: int) -> None:
        for _ in range(20):
            found[number] = results(compiled, *given[number])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(given))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    torch.cuda.synchronize()
    for number, (leaves, pad) in enumerate(given):
        assert_close(found[number], leaves, pad, f"thread {number}")


def test_a_kernel_fused_with_what_follows_the_op():
    """Inductor prints the nodes of a fused kernel, arguments included, into comments of its code: they must be on one line."""
    def sinks(q, k, v, sink):
        s = q @ k.transpose(-1, -2) * 0.125
        s = torch.cat([s, sink[:, None, None].expand(s.shape[0], -1, s.shape[2], 1)], -1)
        return s.softmax(-1)[..., :-1] @ v
    leaves = [torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    leaves.append(torch.randn(4, device="cuda", requires_grad=True))
    out = torch.compile(sinks, backend="flashfx")(*leaves)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    expected = sinks(*exact)
    for a, b in zip((out, *torch.autograd.grad(out.square().sum(), leaves)), (expected, *torch.autograd.grad(expected.square().sum(), exact))):
        assert float((a.double() - b).norm() / b.norm()) < 0.02


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("schedule", ["triton", "hopper"])
def test_what_is_timed_does_its_work(schedule, direction):
    """Time after time: kernels that count what they take find all of it left (`timing.each`), and none is faster than the card's matrix units."""
    from flashfx.codegen import gpu, timing
    from flashfx.codegen.load import load
    from flashfx.codegen.plan import make_plan, overridden
    from flashfx.codegen.render import render
    from flashfx.region import Problem
    from flashfx.spec import AttentionSpec
    spec = AttentionSpec.parse("attention[b, h, i, j]\n qk = q[b, h, i] . k[b, h, j]\n score = qk * 0.125\n where j <= i\n empty nan\n"
                               " out = softmax_j(score) . v[b, h, j]")
    problem, card = Problem((2, 16), 2048, 2048, 64, 64, "bfloat16", "bfloat16"), gpu.current(torch.device("cuda"))
    with overridden(schedule=schedule):
        plans = [make_plan(spec, problem, card, d) for d in ("forward", "backward")]
    if {p.schedule for p in plans} != {schedule}:
        pytest.skip(f"{schedule} does not run on {card.name}")
    module = load(render(spec, plans[0], problem, (True,) * 3, plans[1]).text)
    kept = timing.launches(module, timing.Operands(spec, problem, torch.device("cuda")), direction)
    products = {"forward": 4, "backward": 10}[direction] * 2 * 16 * 2048 * 2049 / 2 * 64
    for _ in range(2):
        microseconds = sum(us for _, us in timing.each(kept, timing.Clock(torch.device("cuda"))))
        assert microseconds * 1e-6 > products / card.matrix_rate


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("positions", [differences.scattered, differences.rising, differences.falling])
def test_the_gradient_of_a_gather_by_difference(positions, dtype):
    for shape in (*differences.SHAPES, (300, 5000, 900)):
        differences.check(*shape, positions, dtype, "cuda")
