"""A repeated launch hands Triton's launcher exactly what Triton itself handed it; without a GPU, by a launcher that records."""
from __future__ import annotations

import pytest
import torch
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver

from flashfx.codegen import repeat
from flashfx.codegen.gpu import BY_NAME
from flashfx.codegen.load import load
from flashfx.codegen.plan import make_plan
from flashfx.codegen.render import render
from flashfx.codegen.selfcheck import captured_tensors
from flashfx.region import Problem
from flashfx.spec import AttentionSpec

from .compiled import _Driver

TEXT = """\
attention[b, h, g, i, j]
  given   bias: float[3]
  qk    = q[b, h, g, i] . k[b, h, j]
  score = qk * 0.125 + bias[h, i, j]
  where   j <= i
  empty   nan
  drop    0.1
  out   = softmax_j(score) . v[b, h, j]"""


@pytest.mark.parametrize("gpu", ["A100", "H100"])  # with pointers, with tensor descriptors
def test_a_repeated_launch_passes_the_same_arguments(gpu, monkeypatch):
    spec, problem = AttentionSpec.parse(TEXT), Problem((2, 2, 2), 128, 128, 64, 64, "bfloat16", "bfloat16")
    card = BY_NAME[gpu]
    launches = []

    def record(grid_x, grid_y, grid_z, stream, function, packed, metadata, enter, leave, *args):
        plain = lambda a: (a.data_ptr(), tuple(a.shape)) if isinstance(a, torch.Tensor) else \
            (plain(a.base), list(a.shape), list(a.strides), list(a.block_shape)) if hasattr(a, "block_shape") else a
        launches.append((grid_x, grid_y, grid_z, stream, packed, [plain(a) for a in args]))

    monkeypatch.setattr(CompiledKernel, "run", property(lambda self: record))
    monkeypatch.setattr(CompiledKernel, "launch_metadata", lambda self, *a: None)
    monkeypatch.setattr(CompiledKernel, "function", None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(repeat.compat, "interpreting", lambda: False)
    module = load(render(spec, make_plan(spec, problem, card, "forward"), problem).text + f"# {gpu}\n")
    repeat.repeat_launches(module)
    shape = lambda *lead: torch.randn(*lead, 128, 64).bfloat16()
    q, k, v = shape(2, 2, 2), shape(2, 2, 1), shape(2, 2, 1)
    aux, seed = captured_tensors(spec, problem, dtype=torch.float32), torch.zeros(1, dtype=torch.int64)
    out, lse = torch.empty_like(q), torch.empty(2, 2, 2, 128)
    monkeypatch.setattr(torch, "empty", _remembering(torch.empty))
    monkeypatch.setattr(module, "empty_output", lambda *a: out)
    monkeypatch.setattr(module, "empty_lse", lambda *a: lse)
    monkeypatch.setattr(driver, "_active", _Driver(card.capability[0] * 10 + card.capability[1]))
    known: dict = {}
    for _ in range(2):
        torch.empty.restart()
        with repeat.group(known):
            module.forward(q, k, v, aux, seed, [2, 2, 2])
            module.backward(out, q, k, v, aux, seed, out, lse, [2, 2, 2])
    half = len(launches) // 2
    assert half == len(known) >= 4
    assert launches[:half] == launches[half:]


def _remembering(make):
    """The same buffers again after `restart`, so that addresses can be compared."""
    made, at = [], [0]

    def empty(*args, **options):
        if at[0] == len(made):
            made.append(make(*args, **options))
        at[0] += 1
        return made[at[0] - 1]

    empty.restart = lambda: at.__setitem__(0, 0)
    return empty


def test_launches_outside_a_group_ask_triton():
    asked = []

    class Kernel:
        arg_names = ("x", "BLOCK")

        def __getitem__(self, grid):
            return lambda *args, **options: asked.append((grid, args, options))

    kernel = repeat.Repeated(Kernel())
    kernel[(3,)](1, BLOCK=2)
    kernel[(3,)](1, BLOCK=2)
    assert asked == [((3,), (1,), {"BLOCK": 2})] * 2
