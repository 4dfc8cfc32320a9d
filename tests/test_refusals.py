"""Every reason for which a site is left alone is provoked by a test that knows its exact text; no text says only "unsupported"."""
from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch._functorch import config as functorch_config

import flashfx
from flashfx.backend import _no_kernel
from flashfx.codegen.gpu import BY_NAME
from flashfx.codegen.plan import make_plan, overridden
from flashfx.passes import index as indexing
from flashfx.passes import lift as lifting
from flashfx.passes import pipeline
from flashfx.passes.check import check
from flashfx.passes.emit import Emitter
from flashfx.passes.index import NotAffine, SplitAxis
from flashfx.passes.pull import Puller
from flashfx.passes.values import Refused
from flashfx.region import Problem
from flashfx.spec import AttentionSpec

from . import test_near_misses, test_near_misses_more
from .capture import rand
from .refusals import all_written

B, H, M, N, D = 2, 3, 8, 12, 4
ROWS: dict[str, tuple] = {}


def row(reason: str, *args, gpu: str | None = None, number: int = 0):
    """A function, called with `args`, whose site `number` is left alone for `reason` (on `gpu`)."""
    def add(fn):
        ROWS[fn.__name__] = reason, fn, args, gpu, number
        return fn
    return add


def qkv(*shape, dtype=torch.float32):
    return [rand(*shape, seed=n, dtype=dtype) for n in range(3)]


def plain(q, k, v):
    return (q @ k.mT).softmax(-1) @ v


@row("device type meta has no schedule", *(torch.empty(2, 3, 8, 4, device="meta") for _ in range(3)))
def on_meta(q, k, v):
    return plain(q, k, v)


@row("the query/key head size is 300, the kernels take at most 256", *qkv(1, 2, 16, 300), gpu="A100")
def wide_heads(q, k, v):
    return plain(q, k, v)


@row("q is float64", *qkv(1, 2, 16, 64, dtype=torch.float64), gpu="A100")
def double_on_a_gpu(q, k, v):
    return plain(q, k, v)


@row("T4 (compute capability 7.5) has no bfloat16 matrix unit: use float16", *qkv(1, 2, 16, 64, dtype=torch.bfloat16), gpu="T4")
def bfloat16_on_turing(q, k, v):
    return plain(q, k, v)


@row("batch axis b appears in the scores but in none of q, k and v", *qkv(1, M, D), rand(5, M, M))
def batched_bias(q, k, v, bias):
    return (q @ k.mT + bias).softmax(-1) @ v


@row("the second product also adds a tensor (baddbmm.default)", *qkv(6, M, D), rand(6, M, D))
def adds_a_tensor(q, k, v, c):
    return torch.baddbmm(c, (q @ k.mT).softmax(-1), v)


@row("the scores do not depend on the matrix product", *qkv(B, H, M, D), rand(M, M))
def scores_replaced(q, k, v, bias):
    return torch.where(torch.ones(M, M, dtype=torch.bool), bias, q @ k.mT).softmax(-1) @ v


@row("the scores do not depend on the matrix product", *qkv(B, H, M, D))
def scores_swallowed(q, k, v):
    return (q @ k.mT + torch.finfo(q.dtype).min).softmax(-1) @ v


@row("a masked score goes through sub, and what becomes of the mask's constant is not known", *qkv(B, H, M, D, dtype=torch.float16), torch.arange(M) < 3)
def distances_in_float32_behind_a_mask_in_float16(q, k, v, seen):
    s = q @ k.mT + torch.where(seen, 0.0, torch.finfo(q.dtype).min).to(q.dtype)
    return (s.float() - (torch.arange(M)[:, None] - torch.arange(M)).abs()).softmax(-1).to(v.dtype) @ v


@row("7 batch axes, at most 6 are supported", *qkv(2, 2, 2, 2, 2, 2, 2, M, D))
def seven_axes(q, k, v):
    return plain(q, k, v)


@row("dropout with p=1.0", *qkv(B, H, M, D))
def all_dropped(q, k, v):
    return F.dropout((q @ k.mT).softmax(-1), 1.0, True) @ v


@row("dropout with activation_memory_budget = 0 would draw other random numbers in backward", *qkv(B, H, M, D))
def no_memory_for_a_seed(q, k, v):
    return F.dropout((q @ k.mT).softmax(-1), 0.5, True) @ v


@row("an attention sink beside a captured tensor that needs a gradient", *qkv(B, H, M, D), rand(H, 1, 1), rand(H, M, M))
def sink_beside_a_bias(q, k, v, sink, bias):
    return torch.cat([q @ k.mT + bias, sink.expand(B, H, M, 1)], -1).softmax(-1)[..., :-1] @ v


@row("two products share one dropout and read it in different orders", *qkv(2, 2, N, D), rand(2, 2, N, D), number=1)
def one_dropout_two_orders(q, k, v, u):
    p = F.dropout((q @ k.mT).softmax(-1), 0.3, True)
    return p @ v + p.transpose(0, 1) @ u


@row("a view mixes axes: i + 4*r does not split by 3", rand(2, 12, D), rand(12, D), rand(12, D))
def rows_folded_anew(q, k, v):
    return (q.reshape(8, 3, D) @ k.mT).softmax(-1).reshape(6, 4, 12) @ v


@pytest.mark.parametrize("name", ROWS)
def test_left_alone(name):
    reason, fn, args, gpu, number = ROWS[name]
    torch._dynamo.reset()
    with functorch_config.patch(activation_memory_budget=0 if name == "no_memory_for_a_seed" else 1):
        site = flashfx.explain(fn, *args, gpu=gpu)[number]
    assert site.refusal is not None and site.refusal.reason == reason
    assert site.refusal.hint and site.refusal.node and site.region.reached
    assert name in site.refusal.source or "in plain: " in site.refusal.source


# ------------------------------------------------------------ what no model provokes today, or only a release of PyTorch could: asked for directly

class Size:
    """A symbolic size: one that only the data decides, or (`known`) one that guards do not make a number."""

    def __init__(self, name: str, known: bool):
        self.name = name
        self.node = SimpleNamespace(has_hint=lambda: known, expr=sympy.Symbol(name), shape_env=SimpleNamespace(evaluate_expr=lambda symbol: None))

    def __int__(self):
        return 8

    def __str__(self):
        return self.name


def tensors(**given):
    made = {n: torch.empty(2, 2, **{"dtype": torch.float32, "device": "cpu"} | given.get(n, {})) for n in "qkv"}
    return SimpleNamespace(**{n: [SimpleNamespace(value=SimpleNamespace(fake=t))] for n, t in made.items()})


def end_of(monkeypatch, raised):
    monkeypatch.setattr(pipeline, "lift", raised)
    return flashfx.explain(plain, *qkv(B, H, M, D))[0].refusal.reason


def without_end(monkeypatch):
    def split(site, vg, frame, reached):
        raise SplitAxis(frame.dims[0][0], 1)
    monkeypatch.setattr(lifting, "_lift_products", split)
    return flashfx.explain(plain, *qkv(2, M, D))[0].refusal.reason


def unequal_groups(monkeypatch):
    monkeypatch.setattr(lifting, "quotient", lambda a, b: None)  # as for symbolic numbers of heads
    fn = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    return flashfx.explain(fn, rand(2, 4, M, D), rand(2, 2, M, D), rand(2, 2, M, D))[0].refusal.reason


def query_no_view(monkeypatch):
    right = lifting.trace_back
    monkeypatch.setattr(lifting, "trace_back", lambda v, index, wanted, *a, **k: ([], 1.0) if wanted[-2:] == ["i", "d"] else right(v, index, wanted, *a, **k))
    return flashfx.explain(plain, *qkv(B, H, M, D))[0].refusal.reason


def column_no_view(monkeypatch):
    right = lifting.trace_back
    monkeypatch.setattr(lifting, "trace_back", lambda v, index, wanted, *a, **k: ([], 1.0) if wanted[-1] == "i" else right(v, index, wanted, *a, **k))
    fn = lambda q, k, v, sink: torch.cat([q @ k.mT, sink.expand(B, H, M, 1)], -1).softmax(-1)[..., :-1] @ v
    return flashfx.explain(fn, *qkv(B, H, M, D), rand(H, 1, 1))[0].refusal.reason


def size_of(monkeypatch, x):
    monkeypatch.setattr(indexing, "size", lambda x: x.node.expr)
    return indexing.head_size(x)


def on_amd(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    return _no_kernel(SPEC, None, torch.device("cuda"), fixed=True)[0]


def fails(site, vg, reached):
    raise ValueError("a fault")


SPEC = AttentionSpec.parse("attention[i, j]\n qk = q[i] . k[j]\n score = qk\n out = softmax_j(score) . v[j]")
TINY = BY_NAME["T4"].__class__(**{**BY_NAME["T4"].__dict__, "shared_per_block": 4096, "shared_per_sm": 65536})


def emitter():
    found = Emitter.__new__(Emitter)
    found.vg = SimpleNamespace(steps={})
    return found


def too_many_rows():
    spec = AttentionSpec.parse("attention[b, i, j]\n given doc: int[2]\n qk = q[b, i] . k[b, j]\n score = qk\n where doc[b, i] == doc[b, j]\n empty nan\n"
                               " out = softmax_j(score) . v[b, j]")
    with overridden(keys=(128, 64, 8, 2)):
        make_plan(spec, Problem((2,), 1024, 1024, 64, 64, "float16", "float16"), BY_NAME["A100"], "backward", listed=True)


def too_many_keys():
    with overridden(one_tile=(32, 32, 4, 1)):
        make_plan(SPEC, Problem((), 40, 40, 64, 64, "float16", "float16"), BY_NAME["H100"], "backward")


DIRECT = {
    "q, k and v live on cpu, meta and cpu": lambda m: check(SimpleNamespace(out=None), tensors(k={"device": "meta"}), None),
    "q is float32 and k is bfloat16": lambda m: check(SimpleNamespace(out=None), tensors(k={"dtype": torch.bfloat16}), None),
    "the query operand is no view with batch, position and head-size dims": query_no_view,
    "the batch axes split without end": without_end,
    "enable_gqa with query heads that are no multiple of the key heads": unequal_groups,
    "the column beside the scores is no view with batch and query dims": column_no_view,
    "internal error (ValueError: a fault)": lambda m: end_of(m, fails),
    "no node of the graph holds the size s7": lambda m: emitter().size(sympy.Symbol("s7")),
    "no node of the graph holds the number zf3": lambda m: emitter().number(type("F", (), {"node": SimpleNamespace(expr=0), "__str__": lambda x: "zf3"})()),
    "the head size u0 depends on data": lambda m: size_of(m, Size("u0", False)),
    "the head size s3 follows from other sizes": lambda m: size_of(m, Size("s3", True)),
    "the generated kernels are for NVIDIA GPUs, and this PyTorch is built for AMD's": lambda m: on_amd(m),
    "tiles of 128x64 do not divide the blocks of 64x128 of the mask's run-time summary": lambda m: too_many_rows(),
    "a tile of 32 keys does not hold all 40": lambda m: too_many_keys(),
    "None is no scalar": lambda m: Puller.operand(None, None, ()),
    "the generated kernels take float16, bfloat16 and float32, not float64; float64 runs in the tiled PyTorch schedule":
        lambda m: make_plan(SPEC, Problem((), 64, 64, 64, 64, "float64", "float64"), BY_NAME["A100"], "forward"),
    "head sizes 64 and 64 in float16: even 16x16 tiles need 15360 bytes of shared memory in the forward kernel; "
    "T4 has 4096 bytes": lambda m: make_plan(SPEC, Problem((), 64, 64, 64, 64, "float16", "float16"), TINY, "forward"),
}


@pytest.mark.parametrize("reason", DIRECT)
def test_asked_for_directly(reason, monkeypatch):
    torch._dynamo.reset()
    try:
        found = DIRECT[reason](monkeypatch)
    except (Refused, NotAffine, flashfx.PlanError) as error:
        found = str(error)
    assert found == reason


# ------------------------------------------------------------------------------------------- the law

EXACT = {r.reason for table in (test_near_misses.ROWS, test_near_misses_more.ROWS) for r in table.values() if r.reason} | set(DIRECT) | {r[0] for r in ROWS.values()}


def test_every_text_is_tested():
    """Each text of the source has a row in a table whose test compares it word for word."""
    missing = [f"{where}: {pattern}" for pattern, where in all_written()
               if not any(re.fullmatch(pattern, reason) or re.fullmatch(pattern, f"{reason} (a.py:1 in f: x)") for reason in EXACT)]
    assert not missing, "\n".join(missing)
    assert len(all_written()) > 40


def test_no_text_says_only_that_something_is_unsupported():
    for pattern, where in all_written():
        words = [w for w in pattern.replace(".+", "X").replace("\\", "").split() if w.lower() not in ("is", "not", "are", "unsupported", "supported")]
        assert len(words) >= 2, where  # X: what the message names
