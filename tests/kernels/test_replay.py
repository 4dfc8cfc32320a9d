"""A replayed call hands Triton's launcher exactly what Triton itself hands it; without a GPU, by a launcher that records."""
from __future__ import annotations

import contextlib
import inspect
import types

import pytest
import torch
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from flashfx import compat
from flashfx.codegen import differences, replay
from flashfx.codegen.gpu import BY_NAME
from flashfx.codegen.load import load
from flashfx.codegen.plan import make_plan, overridden
from flashfx.codegen.render import render
from flashfx.codegen.spilling import FEW, SPARING
from flashfx.codegen.selfcheck import captured_tensors
from flashfx.region import Problem
from flashfx.spec import AttentionSpec

from flashfx.codegen.offline import _Driver

from ..thinning import thinned

TEXT = """\
attention[b, h, g, i, j]
  given   bias: float[3]
  qk    = q[b, h, g, i] . k[b, h, j]
  score = qk * 0.125 + bias[h, i, j]
  where   j <= i
  empty   nan
  drop    0.1
  out   = softmax_j(score) . v[b, h, j]"""


@pytest.fixture
def recorder(monkeypatch):
    """Launches as (who, grid, arguments) instead of a GPU's."""
    launches = []

    def expand(arg, metadata):
        if isinstance(arg, torch.Tensor):
            return [arg.data_ptr()]
        return compat.expanded_descriptor(arg, next(metadata)) if hasattr(arg, "base") else [arg]

    def by_triton(self):
        def run(grid_x, grid_y, grid_z, stream, function, packed, metadata, enter, leave, *args):
            layouts = iter(compat.descriptor_metadata(self))
            launches.append(("triton", self.name, (grid_x, grid_y, grid_z), [e for a in args for e in expand(a, layouts)]))
        return run

    monkeypatch.setattr(CompiledKernel, "run", property(by_triton))
    monkeypatch.setattr(CompiledKernel, "launch_metadata", lambda self, *a: None)
    monkeypatch.setattr(CompiledKernel, "function", None, raising=False)
    monkeypatch.setattr(compat, "spilled", lambda compiled: 0)
    monkeypatch.setattr(compat, "interpreting", lambda: False)
    by_replay = lambda name: lambda x, y, z, stream, *args: launches.append(("replay", name, (x, y, z), list(args)))
    monkeypatch.setattr(compat, "direct_launch", lambda compiled: (by_replay(compiled.name), (), True))
    monkeypatch.setattr(_Driver, "utils", types.SimpleNamespace(fill_tma_descriptor=lambda *a: ("map", *map(str, a)),
                                                                fill_tma_descriptor_tiled=lambda *a: ("map", *map(str, a))), raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    return launches


def operands(text: str, problem: Problem, seed: int):
    spec = AttentionSpec.parse(text)
    torch.manual_seed(seed)
    q = torch.randn(2, 2, 2, 128, 64).bfloat16()
    k, v = (torch.randn(2, 2, 1, 128, 64).bfloat16() for _ in range(2))
    return spec, q, k, v, captured_tensors(spec, problem, dtype=torch.float32), torch.zeros(1, dtype=torch.int64)


@pytest.mark.parametrize("gpu, parts, within", thinned([("A100", 1, False), ("H100", 1, False), ("A100", 3, False), ("H100", 1, True), ("H100", 3, False)], 2))
def test_a_replay_launches_what_triton_launches(gpu, parts, within, recorder, monkeypatch):
    """With pointers, with tensor descriptors; keys in parts; and a call within another, each with a recording of its own."""
    card, problem = BY_NAME[gpu], Problem((2, 2, 2), 128, 128, 64, 64, "bfloat16", "bfloat16")
    monkeypatch.setattr(driver, "_active", _Driver(card.capability[0] * 10 + card.capability[1]))
    spec = AttentionSpec.parse(TEXT)
    with overridden(**{"parts": parts} if parts > 1 else {}):
        plan = make_plan(spec, problem, card, "forward")
    module = load(render(spec, plan, problem).text + f"# {gpu}\n")
    replay.watch_launches(module)

    def both(q, k, v, seed, bias):
        with replay.Recording((q, k, v, seed, bias)) if within else contextlib.nullcontext():
            out, lse = module.forward(q, k, v, (bias,), seed, (2, 2, 2))
        return [out, lse] if parts > 1 else [out, lse, *module.backward(out, q, k, v, (bias,), seed, out, lse, (2, 2, 2))]

    calls = []
    for n in range(2):
        _, q, k, v, aux, seed = operands(TEXT, problem, n)
        calls.append((q, k, v, seed, *aux))
    for launched in _compared(recorder, both, calls):
        assert len(launched) >= 4 if parts == 1 else [grid for _, grid, _ in launched] == [(16, 3, 1), (128, 1, 1)]  # eight of 1024 rows a program, four places for the three parts


def test_a_replayed_mask_is_seen_as_bytes(recorder, monkeypatch):
    """Tiles of booleans come by TMA from a view of each call's own tensor."""
    monkeypatch.setattr(driver, "_active", _Driver(90))
    spec = AttentionSpec.parse("attention[b, i, j]; given keep: bool[3]; qk = q[b, i] . k[b, j]; score = qk; where keep[b, i, j]; empty zero; out = softmax_j(score) . v[b, j]")
    problem = Problem((2,), 256, 256, 64, 64, "bfloat16", "bfloat16")
    with overridden(schedule="hopper"):
        module = load(render(spec, make_plan(spec, problem, BY_NAME["H100"], "forward", listed=False), problem, (False,) * 4).text)
    replay.watch_launches(module)
    calls = [(*(torch.randn(2, 256, 64).bfloat16() for _ in range(3)), torch.rand(2, 256, 256) < 0.5) for _ in range(2)]
    for launched in _compared(recorder, lambda q, k, v, keep: [*module.forward(q, k, v, (keep,), None, (2,))], calls):
        assert [name for name, _, _ in launched] == ["attention_forward"] and "visible_0" in inspect.getsource(module)


@pytest.mark.parametrize("read", [False, True])
def test_a_replayed_backward_of_one_kernel(read, recorder, monkeypatch):
    """read: a gradient reaches the log-sum-exp too; without one the kernel is compiled without that argument."""
    monkeypatch.setattr(driver, "_active", _Driver(90))
    spec = AttentionSpec.parse("attention[b, i, j]; qk = q[b, i] . k[b, j]; score = qk * 0.125; out = softmax_j(score) . v[b, j]")
    problem = Problem((3,), 49, 49, 64, 64, "bfloat16", "bfloat16")
    module = load(render(spec, make_plan(spec, problem, BY_NAME["H100"], "forward"), problem).text)
    replay.watch_launches(module)
    calls = [(*(torch.randn(3, 49, 64).bfloat16() for _ in range(5)), torch.randn(3, 49), torch.randn(49, 3).T) for _ in range(2)]
    run = lambda q, k, v, out, grad, lse, grad_lse: module.backward(grad, q, k, v, (), None, out, lse, (3,), **({"grad_lse": grad_lse} if read else {}))
    for launched in _compared(recorder, run, calls):
        assert [(name, grid) for name, grid, _ in launched] == [("attention_backward", (3, 1, 1))]


@pytest.mark.parametrize("transposed", [False, True])
def test_a_replayed_gradient_of_a_gather(transposed, recorder, monkeypatch):
    monkeypatch.setattr(driver, "_active", _Driver(90))
    grads = [torch.randn(2, 3, 100, 200).bfloat16() for _ in range(2)]
    calls = [(g.mT.contiguous().mT if transposed else g, torch.randint(0, 70, (299,))) for g in grads]
    for launched in _compared(recorder, lambda grad, positions: differences._gradient(grad, positions, 70), calls):
        assert [name for name, _, _ in launched] == ["occurrences", *["copy_tile"] * transposed, "sum_by_position"]


def _compared(recorder, run, calls: list[tuple]) -> list[list[tuple]]:
    """What `run` launches with the operands of each call, which is what a replay of the first one launches."""
    with replay.Recording(calls[0]) as recording:
        first = run(*calls[0])
    again, launched = recording.replay(first), []
    for call in calls:
        del recorder[:]
        results, replayed = run(*call), again(*call)
        assert [(r.shape, r.stride(), r.dtype) for r in results] == [(r.shape, r.stride(), r.dtype) for r in replayed]
        by_triton, by_replay = ([launch[1:] for launch in recorder if launch[0] == who] for who in ("triton", "replay"))
        assert len(by_triton) == len(by_replay)
        place = {t.data_ptr(): t.data_ptr() for t in call}  # an operand is itself; a buffer of the first is one buffer of the second
        for (name, grid, expected), (found_name, found_grid, found) in zip(by_triton, by_replay):
            assert (name, grid, len(expected)) == (found_name, found_grid, len(found))
            for a, b in zip(expected, found):
                assert _same(a, b, place), (name, a, b)
        launched.append(by_triton)
    return launched


def _same(expected, found, place: dict[int, int]) -> bool:
    if isinstance(expected, tuple):  # a tensor map: its address first
        return expected[2:] == found[2:] and _same(int(expected[1]), int(found[1]), place)
    return expected == found or (isinstance(expected, int) and expected > 2 ** 20 and place.setdefault(expected, found) == found)


class _Spilling:
    """A kernel that spills unless it is compiled with `enough`, by one warp as many bytes as `most`."""

    def __init__(self, name: str, enough: dict, most: int = 10 ** 6):
        self.__name__, _, argument = name.partition(" ")
        self.most = most
        self.arg_names, self.enough, self.asked, self.launched = (argument, "BLOCK_N"), enough, [], []

    def warmup(self, *args, grid, **options):
        self.asked.append(options)
        return types.SimpleNamespace(spills=0 if self.enough.items() <= options.items() else self.most // options["num_warps"])

    def __getitem__(self, grid):
        return lambda *args, **options: self.launched.append(options)


def test_a_few_bytes_cost_less_than_more_warps(monkeypatch):
    monkeypatch.setattr(compat, "spilled", lambda compiled: compiled.spills)
    kernel = _Spilling("attention_forward", {"num_warps": 8}, most=4 * FEW)
    replay.Watched(kernel)[(1,)](1, BLOCK_N=64, num_warps=4)
    assert kernel.launched == [{"BLOCK_N": 64, "num_warps": 4}] and len(kernel.asked) == 3


@pytest.mark.parametrize("name, given, enough, expected, asked", [
    ("attention_forward", {"BLOCK_N": 64, "num_warps": 4}, {}, {}, 1),
    ("attention_forward", {"BLOCK_N": 64, "num_warps": 4}, {"maxnreg": 255}, {"maxnreg": 255}, 2),
    ("attention_forward", {"BLOCK_N": 64, "num_warps": 4}, {"num_warps": 8}, {"maxnreg": 255, "num_warps": 8}, 4),
    ("attention_forward", {"BLOCK_N": 64, "num_warps": 4}, {"ptx_options": SPARING}, {"maxnreg": 255, "ptx_options": SPARING}, 3),
    ("attention_forward HOIST", {"BLOCK_N": 64, "num_warps": 4}, {"HOIST": False}, {"maxnreg": 255, "HOIST": False}, 4),
    ("attention_forward", {"BLOCK_N": 64, "num_warps": 8}, {"BLOCK_N": 16}, {"maxnreg": 255, "BLOCK_N": 16}, 5),
    ("attention_forward", {"BLOCK_N": 32, "num_warps": 4}, {"BLOCK_N": 8}, {"maxnreg": 255, "num_warps": 8}, 7),  # spills least
    ("attention_forward", {"BLOCK_N": 32, "num_warps": 8, "num_stages": 2}, {"num_stages": 1}, {"maxnreg": 255, "num_stages": 1}, 5),
    ("attention_forward slots", {"BLOCK_N": 64, "num_warps": 8}, {"BLOCK_N": 32}, {}, 3),  # another kernel goes by its tile
    ("attention_backward_bias", {"BLOCK_N": 64, "num_warps": 8}, {"BLOCK_N": 32}, {}, 3),  # its grid goes by both tiles
    ("attention_forward", {"BLOCK_N": 64, "num_warps": 4, "maxnreg": 168}, {"num_warps": 8}, {}, 2),  # warps have parts of their own
    ("attention_forward", {"BLOCK_N": 64, "num_warps": 4, "maxnreg": 168}, {"ptx_options": SPARING}, {"ptx_options": SPARING}, 2)])
def test_a_kernel_that_spills_is_compiled_again(monkeypatch, name, given, enough, expected, asked):
    monkeypatch.setattr(compat, "spilled", lambda compiled: compiled.spills)
    kernel = _Spilling(name, enough)
    watched = replay.Watched(kernel)
    for _ in range(2):
        watched[(1,)](1, **given)
    assert kernel.launched == [given | expected] * 2 and len(kernel.asked) == asked


def test_tma_copies_tiles_of_the_size_that_was_settled():
    from flashfx.codegen.spilling import fitted
    described = lambda: TensorDescriptor(torch.empty(2, 128, 64), [2, 128, 64], [8192, 64, 1], [1, 64, 64])
    kernel = types.SimpleNamespace(__name__="attention_forward", arg_names=["Q_tiles", "K_tiles_0", "M"])
    q, k, m = fitted(kernel, [q_given := described(), k_given := described(), 5], {"BLOCK_N": 32})
    assert (q, m) == (q_given, 5) and k.block_shape == [1, 32, 64] and k_given.block_shape == [1, 64, 64]
    assert fitted(kernel, [k_given], {"num_warps": 8}) == [k_given]


def test_operations_and_buffers_are_replayed(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)

    def function(x, y):
        buffer = torch.empty(4, 3)
        buffer.copy_(x)
        buffer[..., :2] += y.sum((0,), keepdim=True)
        low, high = torch.aminmax(buffer)
        return [buffer.permute(1, 0), high - low, x, None]

    first = torch.randn(4, 3), torch.randn(5, 2)
    with replay.Recording(first) as recording:
        results = function(*first)
    again = recording.replay(results)
    for _ in range(2):
        x, y = torch.randn(4, 3), torch.randn(5, 2)
        for a, b in zip(again(x, y), function(x, y)):
            assert a is b if b is None or b is x else torch.equal(a, b) and a.stride() == b.stride()
    held = [*again.__globals__.values(), *(c.cell_contents for f in again.__globals__.values() for c in getattr(f, "__closure__", None) or ())]
    assert len(held) > 4 and not any(isinstance(x, torch.Tensor) for x in held)


def test_what_a_replay_could_get_wrong_is_not_replayed():
    constant = torch.ones(3)
    for function in (lambda x: [x * x.sum().item()], lambda x: [x + constant], lambda x: [constant]):
        x = torch.randn(3)
        with replay.Recording([x]) as recording:
            results = function(x)
        assert recording.replay(results) is None


@pytest.mark.parametrize("described", [False, True])
def test_triton_s_launcher_is_driven_as_triton_drives_it(described, monkeypatch):
    """The same C function gets the same arguments from Triton's launcher and from ours."""
    from triton.backends.nvidia import driver as nvidia
    seen = []

    class Launch:
        def __call__(self, *args):
            seen.append(args)

    signature = {"x": "*bf16", "t": "tensordesc<bf16[64, 64]>" if described else "i64", "n": "i32"}
    layout = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [64, 64], "fp4_padded": False}
    fill = lambda *a: ("map", *map(str, a))
    monkeypatch.setattr(driver, "_active", types.SimpleNamespace(utils=types.SimpleNamespace(fill_tma_descriptor=fill, fill_tma_descriptor_tiled=fill)))
    launcher = object.__new__(nvidia.CudaLauncher)
    launcher.__dict__.update(launch=nvidia.wrap_handle_tensordesc(Launch(), signature, [layout] if described else None), num_ctas=1,
                             global_scratch_size=0, global_scratch_align=1, profile_scratch_size=0, profile_scratch_align=1,
                             launch_cooperative_grid=False, launch_pdl=True)
    if "kernel_signature" in nvidia.CudaLauncher.__init__.__code__.co_names:
        launcher.__dict__.update(arg_annotations="annotations", kernel_signature="signature")
    compiled = types.SimpleNamespace(run=launcher, function="function", packed_metadata="packed", metadata=types.SimpleNamespace(tensordesc_meta=[layout]))
    tensor = TensorDescriptor(torch.zeros(128, 64, dtype=torch.bfloat16), [128, 64], [64, 1], [64, 64]) if described else 5
    launcher(7, 2, 3, "stream", "function", "packed", None, None, None, 11, tensor, 3)
    expanded = compat.expanded_descriptor(tensor, layout) if described else [tensor]
    function, fixed, separate = compat.direct_launch(compiled)
    given = [11, *expanded, 3]
    function(7, 2, 3, "stream", *fixed, *(given if separate else [given]))
    flat = [[*a[:-1], *a[-1]] if isinstance(a[-1], (list, tuple)) else list(a) for a in seen]
    assert len(flat) == 2 and flat[0] == flat[1]
