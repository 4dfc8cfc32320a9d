"""Measure one peer on one workload: time of each pass, error against float64, peak memory."""
from __future__ import annotations

import contextlib
import gc
import subprocess
import time
from dataclasses import asdict, dataclass, field
from typing import Callable

import torch

from ..codegen.gpu import GPU, current
from .peers import PEERS, CannotRun
from .variants import VARIANTS, Shape, Variant

PASSES = ("forward", "backward", "both")
WORK = {"forward": 1.0, "backward": 2.5, "both": 3.5}
"""Matrix products of a pass over forward's, as FlashAttention-2, section 4.1, counts them."""


@dataclass(frozen=True)
class Row:
    """One peer on one workload. ms, TFLOP/s, and the TFLOP/s that the card's peaks allow (`roofline`), by pass; error is the relative error (Frobenius norm)
    of the output and of every gradient, the worst of them, on one key head; eager_error is eager's in the same dtype. host_us: microseconds that a call keeps
    the host, by pass, which ms does not count but for the passes in by_call, which cannot be recorded as a CUDA graph or were not asked to be.
    failed: why there are no numbers. other_keys: as in `Shape`. other_values: columns of v where they are not head_size."""

    variant: str
    peer: str
    batch: int
    heads: int
    kv_heads: int
    length: int
    head_size: int
    dtype: str
    ms: dict[str, float]
    tflops: dict[str, float]
    roofline: dict[str, float] = field(default_factory=dict)
    host_us: dict[str, float] = field(default_factory=dict)
    by_call: tuple[str, ...] = ()
    error: float | None = None
    eager_error: float | None = None
    peak_mib: float | None = None
    clocks: str = ""
    failed: str = ""
    other_keys: int = 0
    other_values: int = 0

    def as_dict(self) -> dict:
        return asdict(self)


def clocks(device: torch.device) -> str:
    """SM clock, memory clock, power draw, now; empty where nvidia-smi is absent."""
    if device.type != "cuda":
        return ""
    query = ["nvidia-smi", f"--id={device.index or 0}", "--query-gpu=clocks.sm,clocks.mem,power.draw", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def median_ms(run, device: torch.device, budget_ms: float = 100.0) -> float:
    """Median time of a call, caches flushed between calls on a GPU. On a CPU the figure is noise, good for trying the command."""
    if device.type == "cuda":
        from triton.testing import do_bench
        return do_bench(run, warmup=25, rep=budget_ms, return_mode="median")
    times = []
    for _ in range(3):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    return sorted(times)[1]


def matrix_product(dtype: torch.dtype, device: torch.device, size: int = 8192) -> float:
    """TFLOP/s of PyTorch's product of two square matrices: what the card's matrix units reach today, clocks and power as they are."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size ** 3 / median_ms(lambda: a @ b, device) / 1e9


def replayed(prepare: Callable[[], Callable], device: torch.device) -> Callable:
    """The call that `prepare()` returns, recorded as a CUDA graph: what the device takes for it, without the host's part. Both run in one stream:
    autograd runs a gradient in the stream of its forward, and a recording takes no other."""
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        run = prepare()
        for _ in range(2):  # kernels are compiled and libraries start
            run()
    torch.cuda.synchronize(device)
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph.replay


def host_us(run: Callable, device: torch.device, repeats: int = 20) -> float:
    """Median microseconds that a call keeps the host, which does not wait for the device."""
    for _ in range(2):
        run()
    torch.cuda.synchronize(device)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize(device)
    return sorted(times)[repeats // 2]


def device_ms(prepare: Callable[[], Callable], device: torch.device, graph: bool) -> tuple[float, bool]:
    """(median time of the call that `prepare()` returns, was it replayed as a CUDA graph?). graph: is it asked to be?"""
    if graph and device.type == "cuda":
        try:
            return median_ms(replayed(prepare, device), device), True
        except RuntimeError:  # what it calls waits for the device, or allocates in its own way
            torch.cuda.synchronize(device)
    return median_ms(prepare(), device), False


def seconds(forward: Callable[[], list[torch.Tensor]], leaves: list[torch.Tensor], device: torch.device) -> dict[str, float]:
    """Median seconds of `forward()` and, if there are `leaves`, of the gradients of its results ("backward"). On a GPU both are recorded as CUDA graphs
    and replayed, so that the host's time does not count."""
    grads = lambda outs, seeds: torch.autograd.grad(outs, leaves, seeds, retain_graph=True, allow_unused=True)
    floats = lambda outs: [o for o in outs if o.requires_grad]
    if device.type != "cuda":
        outs = floats(forward())
        found = {"forward": median_ms(forward, device) / 1e3}
        return found | {"backward": median_ms(lambda: grads(outs, [torch.ones_like(o) for o in outs]), device) / 1e3} if outs else found
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(2):  # kernels are compiled and libraries start
            outs = floats(forward())
            seeds = [torch.randn_like(o) for o in outs]
            if outs:
                grads(outs, seeds)
        del outs
    torch.cuda.synchronize(device)
    with torch.cuda.graph(graph, stream=stream):
        outs = floats(forward())
    found = {"forward": median_ms(graph.replay, device) / 1e3}
    if outs:
        backward = torch.cuda.CUDAGraph()
        with torch.cuda.graph(backward, pool=graph.pool(), stream=stream):
            kept = grads(outs, seeds)
        found["backward"] = median_ms(backward.replay, device) / 1e3
        del kept
    return found


def roofline(variant: Variant, shape: Shape, tensors: dict[str, torch.Tensor], gpu: GPU) -> dict[str, float]:
    """TFLOP/s by pass at the card's peaks (Williams et al. 2009, "Roofline"): matrix products, one exp for each visible pair and pass, and every tensor read
    once, every result written once, whichever takes longest. `tensors` are those that the variant captures."""
    pairs = shape.batch * shape.heads * variant.visible(shape, tensors)
    work = 2 * pairs * (shape.head_size + shape.v_head_size)
    rows, keys = shape.batch * shape.heads * shape.length, shape.batch * shape.kv_heads * shape.keys
    q, kv, out = rows * shape.head_size, keys * (shape.head_size + shape.v_head_size), rows * shape.v_head_size
    captured = sum(t.numel() * t.element_size() for t in tensors.values())
    gradients = sum(tensors[name].numel() * tensors[name].element_size() for name in variant.trained)
    width = shape.dtype.itemsize
    moved = {"forward": (q + kv + out) * width + captured, "backward": 2 * (q + kv + out) * width + captured + gradients}
    seconds = {name: max(WORK[name] * work / gpu.matrix_rate, pairs / gpu.exp_rate, bytes_ / gpu.bandwidth) for name, bytes_ in moved.items()}
    seconds["both"] = sum(seconds.values())
    return {name: WORK[name] * work / s / 1e12 for name, s in seconds.items()}


def operands(shape: Shape, variant: Variant, seed: int = 0) -> tuple[list[torch.Tensor], torch.Tensor, dict[str, torch.Tensor]]:
    """(q, k, v), grad_out, captured tensors: standard normal, those that get a gradient marked so."""
    torch.manual_seed(seed)
    q = shape.randn(shape.batch, shape.heads, shape.length, shape.head_size)
    k = shape.randn(shape.batch, shape.kv_heads, shape.keys, shape.head_size)
    v = shape.randn(shape.batch, shape.kv_heads, shape.keys, shape.v_head_size)
    grad_out = shape.randn(shape.batch, shape.heads, shape.length, shape.v_head_size)
    tensors = variant.tensors(shape)
    for t in (q, k, v, *(tensors[name] for name in variant.trained)):
        t.requires_grad_()
    return [q, k, v], grad_out, tensors


def _one_head(variant: Variant, shape: Shape, qkv, grad_out, tensors):
    """The part of a workload that belongs to its first key head, detached."""
    q, k, v = qkv
    heads = shape.heads // shape.kv_heads

    def part(name, t):
        for dim, letter in enumerate(variant.dims[name]):
            if letter == "h":
                t = t.narrow(dim, 0, heads)
        return t
    return [q[:, :heads], k[:, :1], v[:, :1]], grad_out[:, :heads], {n: part(n, t) for n, t in tensors.items()}, heads


def _results(run, leaves: list[torch.Tensor], grad_out) -> list[torch.Tensor]:
    out = run()
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


def errors(variant: Variant, shape: Shape, found: list[torch.Tensor], qkv, grad_out, tensors) -> tuple[float, float]:
    """(worst relative error of `found` = out and the gradients of q, k, v and the trained tensors, eager's own) on the first key head."""
    part, grad, captured, heads = _one_head(variant, shape, qkv, grad_out, tensors)

    def compute(dtype):
        leaves = [t.detach().to(dtype).requires_grad_() for t in part]
        own = {n: t.detach().to(dtype) if t.is_floating_point() else t for n, t in captured.items()}
        trained = [own[n].requires_grad_() for n in variant.trained]
        return _results(lambda: variant.attention(*leaves, **own), [*leaves, *trained], grad.to(dtype))

    exact, eager = compute(torch.float64), compute(shape.dtype)
    size = [heads, heads, 1, 1]
    mine = [t[:, :n] for t, n in zip(found, size)]
    for name, t in zip(variant.trained, found[4:]):
        mine.append(_one_head(variant, shape, qkv, grad_out, {name: t})[2][name])
    worst = lambda given: max(float((a.double() - b).norm() / b.norm().clamp(min=1e-300)) for a, b in zip(given, exact))
    return worst(mine), worst(eager)


def failed_row(variant: str, peer: str, shape: Shape, why: str) -> Row:
    """A row without numbers."""
    return Row(**_workload(variant, peer, shape), ms={}, tflops={}, failed=why)


def _workload(variant: str, peer: str, shape: Shape) -> dict:
    return dict(variant=variant, peer=peer, batch=shape.batch, heads=shape.heads, kv_heads=shape.kv_heads, length=shape.length,
                head_size=shape.head_size, other_keys=shape.other_keys,
                other_values=shape.v_head_size if shape.v_head_size != shape.head_size else 0, dtype=str(shape.dtype).removeprefix("torch."))


def measure(variant_name: str, peer: str, shape: Shape, passes=PASSES, check: bool = True, graph: bool = True) -> Row:
    """One row; whatever the peer raises ends up in `failed`. graph: on a GPU, the time of CUDA graphs of the calls, not that of one call after another, which
    wait for the host where they are short."""
    variant = VARIANTS[variant_name]
    cuda = shape.device.type == "cuda"
    torch._dynamo.reset()
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()  # of the peer before
    keep = torch._functorch.config.patch(donated_buffer=False) if "backward" in passes else contextlib.nullcontext()
    try:
        with keep:  # backward alone runs through one graph many times
            return _measured(variant, peer, shape, passes, check, _workload(variant_name, peer, shape), graph)
    except CannotRun as reason:
        return failed_row(variant_name, peer, shape, str(reason))
    except Exception as error:  # noqa: BLE001  a peer that fails is a row that says why
        said = " ".join(str(error).split())
        return failed_row(variant_name, peer, shape, f"{type(error).__name__}: {said[:300]}")


def _measured(variant: Variant, peer: str, shape: Shape, passes, check: bool, fixed: dict, graph: bool) -> Row:
    cuda = shape.device.type == "cuda"
    qkv, grad_out, tensors = operands(shape, variant)
    run = PEERS[peer](variant, shape, tensors)
    leaves = [*qkv, *(tensors[name] for name in variant.trained)]
    both = lambda: torch.autograd.grad(run(*qkv), leaves, grad_out)
    found = _results(lambda: run(*qkv), leaves, grad_out) if "forward" not in passes or len(passes) > 1 else None
    peak = None
    if cuda and found is not None:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        both()
        peak = (torch.cuda.max_memory_allocated() - before) / 2 ** 20
    wrong = errors(variant, shape, found, qkv, grad_out, tensors) if check and found is not None and not variant.random else (None, None)
    del found

    def backward() -> Callable:
        out = run(*qkv)
        return lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True)

    prepared = {"forward": lambda: lambda: run(*qkv), "backward": backward, "both": lambda: both}
    ms, host, by_call = {}, {}, []
    for name in (name for name in PASSES if name in passes):
        with torch.set_grad_enabled(name != "forward"):
            if cuda:
                host[name] = host_us(prepared[name](), shape.device)
            ms[name], recorded = device_ms(prepared[name], shape.device, graph)
            by_call += [name] * (not recorded)
    work = 2 * shape.batch * shape.heads * variant.visible(shape, tensors) * (shape.head_size + shape.v_head_size)
    tflops = {name: WORK[name] * work / time_ms / 1e9 for name, time_ms in ms.items()}
    peaks = roofline(variant, shape, tensors, current(shape.device)) if cuda and shape.dtype != torch.float32 else {}
    return Row(**fixed, ms=ms, tflops=tflops, roofline=peaks, host_us=host, by_call=tuple(by_call), error=wrong[0], eager_error=wrong[1], peak_mib=peak, clocks=clocks(shape.device))
