"""check: what must hold before a lifted site may be spliced; every "no" says what would have to change."""
from __future__ import annotations

import torch

from flashfx.compat import size_hint
from flashfx.region import Problem

from .find import Site
from .lift import Lifted
from .values import Refused

MAX_HEAD = 256
GPU_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CPU_DTYPES = (*GPU_DTYPES, torch.float64)


def check(site: Site, lifted: Lifted, shape_env, dropout_allowed: bool = True, device: torch.device | None = None) -> Problem:
    """The problem's shape for planning on `device`, the operands' own unless given. Raises `Refused`."""
    q, k, v = (operands[0].value.fake for operands in (lifted.q, lifted.k, lifted.v))
    out = site.out
    if len({t.device for t in (q, k, v)}) != 1:
        raise Refused(f"q, k and v live on {q.device}, {k.device} and {v.device}", out, "move them to one device")
    kind = (device or q.device).type
    allowed = GPU_DTYPES if kind == "cuda" else CPU_DTYPES
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dtype not in allowed:
            raise Refused(f"{name} is {str(t.dtype).removeprefix('torch.')}", out,
                          f"supported on {kind}: {', '.join(str(d).removeprefix('torch.') for d in allowed)}")
    if q.dtype != k.dtype:
        raise Refused(f"q is {q.dtype} and k is {k.dtype}".replace("torch.", ""), out, "cast them to one dtype")
    if kind not in ("cpu", "cuda"):
        raise Refused(f"device type {kind} has no schedule", out, "supported: cuda, cpu")
    extents = lifted.extents
    sizes = {n: extents[n] for n in ("i", "j", "d", "e")}
    for n, what in (("d", "query/key head size"), ("e", "value head size")):
        if kind == "cuda" and sizes[n] > MAX_HEAD:
            raise Refused(f"the {what} is {sizes[n]}, the kernels take at most {MAX_HEAD}", out,
                          "split the heads further, or leave this site to PyTorch")
    spec = lifted.spec
    for axis, own in zip(spec.axes, lifted.dims):
        if axis not in spec.q | spec.k | spec.v and extents[own] != 1:
            raise Refused(f"batch axis {axis} appears in the scores but in none of q, k and v", out,
                          "expand q, k or v along it")
    if spec.dropout and not dropout_allowed:
        raise Refused("dropout with activation_memory_budget = 0 would draw other random numbers in backward", out,
                      "set torch._functorch.config.activation_memory_budget above 0")
    hint_of = lambda s: s if isinstance(s, int) else size_hint(shape_env, s)
    name = lambda t: str(t.dtype).removeprefix("torch.")
    return Problem(
        extents=tuple(hint_of(extents[n]) for n in lifted.dims), M=hint_of(sizes["i"]), N=hint_of(sizes["j"]), D=sizes["d"],
        Dv=sizes["e"], dtype=name(q), v_dtype=name(v), sizes=tuple(hint_of(s) for s in lifted.sizes))
