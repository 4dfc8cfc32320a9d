"""The meaning of a spec in plain PyTorch: `reference` (float64, N x N in memory), and `to_flex`, a second, independent oracle.

Both take the operands that `flashfx::attention` takes: q (…, M, D), k (…, N, D), v (…, N, Dv) whose leading dims follow
`spec.axes` (extent 1 where the operand does not vary), the captured tensors, and sizes = extents of the axes, then
`spec.sizes`.
"""
from __future__ import annotations

import math
from typing import Mapping, Sequence

import torch

from .errors import SpecError
from .expr import FLOAT, QK, Call, Const, Expr, Load, Var, walk
from .spec import AttentionSpec, EmptyRow


def evaluate(e: Expr, env: Mapping[str, torch.Tensor | int], aux: Mapping[str, torch.Tensor], dot: torch.Tensor | None,
             dtype: torch.dtype) -> torch.Tensor:
    """The value of `e` by PyTorch broadcasting: `env` gives indices and sizes, `dot` the scores, floats are `dtype`."""
    device = next((t.device for t in (dot, *env.values(), *aux.values()) if isinstance(t, torch.Tensor)), None)
    values: dict[Expr, torch.Tensor] = {}
    for x in walk(e):
        if isinstance(x, Const):
            kind = {"bool": torch.bool, "int": torch.int64, "float": dtype}[x.kind]
            values[x] = torch.tensor(x.value, dtype=kind, device=device)
        elif isinstance(x, Var):
            values[x] = torch.as_tensor(env[x.name], device=device)
        elif x == QK:
            values[x] = dot.to(dtype)
        elif isinstance(x, Load):
            t = aux[x.name]
            element = t[tuple(values[a] for a in x.index)] if x.index else t
            values[x] = element.to(dtype) if x.kind == FLOAT else element
        elif isinstance(x, Call):
            args = [values[a] for a in x.args]
            values[x] = args[0].to(dtype) if x.op == "to_float" else x.row.torch(*args)
    return values[e]


def index_grid(spec: AttentionSpec, sizes: Sequence[int], M: int, N: int, device, rows=slice(None), cols=slice(None)) -> dict:
    """Index tensors that broadcast to (*extents, M, N) (or to a tile of it), and the sizes by name."""
    n = len(spec.axes)
    env: dict = {"M": M, "N": N, **dict(zip(spec.sizes, sizes[n:]))}
    shape = lambda position: [-1 if d == position else 1 for d in range(n + 2)]
    for d, (name, extent) in enumerate(zip(spec.axes, sizes)):
        env[name] = torch.arange(extent, device=device).reshape(shape(d))
    env["i"] = torch.arange(M, device=device)[rows].reshape(shape(n))
    env["j"] = torch.arange(N, device=device)[cols].reshape(shape(n + 1))
    return env


def reference(spec: AttentionSpec, q, k, v, aux=(), sizes=(), keep: torch.Tensor | None = None, dtype=torch.float64):
    """out (*extents, M, Dv) in `dtype`, differentiable. `keep` (*extents, M, N) is dropout: what each weight is multiplied by.

    Memory is O(M * N): an oracle, not a kernel. With `spec.dropout` and no `keep` raises ValueError.
    """
    M, N = q.shape[-2], k.shape[-2]
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    extents = list(sizes[: len(spec.axes)])
    env = index_grid(spec, sizes, M, N, q.device)
    tensors = {a.name: t for a, t in zip(spec.aux, aux)}
    s = evaluate(spec.score, env, tensors, q @ k.transpose(-1, -2), dtype).expand(*extents, M, N)
    visible = evaluate(spec.visible, env, tensors, None, dtype).expand(s.shape)
    p = torch.softmax(s.masked_fill(~visible, -math.inf), -1)
    empty = ~visible.any(-1, keepdim=True)
    if spec.empty_row is EmptyRow.ZERO:
        p = p.masked_fill(empty, 0.0)
    elif spec.empty_row.averages:
        over = evaluate(spec.empty_over, env, tensors, None, dtype).expand(s.shape)
        flat = s * 0.0 if spec.empty_row is EmptyRow.MEAN_ADD else torch.zeros_like(s)
        if spec.empty_row is EmptyRow.MEAN_ADD:  # the value of s is lost in the huge constant, its gradient is not
            flat = s - s.detach()
        p = torch.where(empty, torch.softmax(flat.masked_fill(~over, -math.inf), -1), p)
    if spec.dropout:
        if keep is None:
            raise ValueError("this spec has dropout: pass keep, the factor of each weight (flashfx.codegen.selfcheck.kept)")
        p = p * keep.to(dtype)
    return (p @ v).expand(*extents, M, v.shape[-1])


def log_sum_exp(spec: AttentionSpec, q, k, aux=(), sizes=(), dtype=torch.float64):
    """log sum_j exp(score) over the visible keys, (*extents, M) in `dtype`, differentiable; -inf for a row without any."""
    M, N = q.shape[-2], k.shape[-2]
    extents = list(sizes[: len(spec.axes)])
    env = index_grid(spec, sizes, M, N, q.device)
    tensors = {a.name: t for a, t in zip(spec.aux, aux)}
    s = evaluate(spec.score, env, tensors, q.to(dtype) @ k.to(dtype).transpose(-1, -2), dtype).expand(*extents, M, N)
    visible = evaluate(spec.visible, env, tensors, None, dtype).expand(s.shape)
    return torch.logsumexp(s.masked_fill(~visible, -math.inf), -1)


def to_flex(spec: AttentionSpec, aux: Sequence[torch.Tensor] = (), sizes: Sequence[int] = ()):
    """A function (M, N) -> (score_mod, mask_mod) for `torch.nn.attention.flex_attention`; mask_mod is None without a mask.

    Call flex_attention with scale=1.0. FlexAttention's b is the first axis of the spec and its h all the others flattened. Rows without a visible key yield 0 there.
    Raises SpecError for dropout, which FlexAttention does not have.
    """
    if spec.dropout:
        raise SpecError("FlexAttention has no dropout")
    extents, tensors = list(sizes[: len(spec.axes)]), {a.name: t for a, t in zip(spec.aux, aux)}
    fixed = dict(zip(spec.sizes, sizes[len(spec.axes):]))

    def indices(b, h, i, j, M, N) -> dict:
        env = {"i": i, "j": j, "M": M, "N": N, **fixed}
        for name, extent in reversed(list(zip(spec.axes[1:], extents[1:]))):
            env[name], h = h % extent, h // extent
        if spec.axes:
            env[spec.axes[0]] = b
        return env

    def mods(M: int, N: int):
        def score_mod(score, b, h, i, j):
            return evaluate(spec.score, indices(b, h, i, j, M, N), tensors, score, score.dtype)

        def mask_mod(b, h, i, j):
            seen = evaluate(spec.visible, indices(b, h, i, j, M, N), tensors, None, torch.float32)
            return seen & (i >= 0)

        return score_mod, mask_mod if spec.is_masked else None

    return mods
