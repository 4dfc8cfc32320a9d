"""The op pair that the rewritten graph calls. It carries its whole meaning in its arguments: no registry, no id.

    flashfx::attention(q, k, v, aux, seed, sizes, spec, row_blocks, key_blocks, documents, outer) -> (out, lse)
    flashfx::attention_backward(grad_out, grad_lse, q, k, v, aux, seed, out, lse, sizes, spec, needs, row_blocks, key_blocks,
        documents) -> gradients of q, k, v, *aux
    flashfx::block_lists(like, aux, sizes, mask) -> (row_blocks, key_blocks)
    flashfx::document_tiles(like, aux, sizes, mask) -> (row_tiles, key_tiles)

q (*Bq, M, D), k (*Bk, N, D), v (*Bv, N, Dv): any strides; the leading dims follow the axes of `spec` (the text of an
`AttentionSpec`), with extent 1 where the operand does not vary. `aux` are the captured tensors, `seed` one int64 when the
spec has dropout, `sizes` the values of the spec's named sizes. `row_blocks` and `key_blocks` summarise a mask whose range has
no closed form (`flashfx.codegen.blocks`), on the device of `like`: which tiles to visit. With `documents` they are `row_tiles` and
`key_tiles`, which begin where documents do (`flashfx.codegen.schedules.documents`). Without them the results are the same.
"""
from __future__ import annotations

import functools

import torch

from . import differences  # noqa: F401  (registers an op of its own)
from .codegen import blocks, calls, launch
from .codegen.layout import output_strides
from .compat import interpreting
from .errors import FlashFXError
from .spec import AttentionSpec

_library = torch.library.Library("flashfx", "DEF")
_library.define("attention(Tensor q, Tensor k, Tensor v, Tensor[] aux, Tensor? seed, SymInt[] sizes, str spec, "
                "Tensor? row_blocks, Tensor? key_blocks, bool documents, int outer) -> (Tensor, Tensor)")
_library.define("attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor[] aux, Tensor? seed, Tensor out, "
                "Tensor lse, SymInt[] sizes, str spec, bool[] needs, Tensor? row_blocks, Tensor? key_blocks, bool documents) -> Tensor[]")
_library.define("block_lists(Tensor like, Tensor[] aux, SymInt[] sizes, str mask) -> (Tensor, Tensor)")
_library.define("document_tiles(Tensor like, Tensor[] aux, SymInt[] sizes, str mask) -> (Tensor, Tensor)")


@functools.cache
def _parsed(spec: str) -> tuple[AttentionSpec, tuple[int, ...]]:
    """The spec, and for each batch axis which of (q, k, v) has its extent."""
    parsed = AttentionSpec.parse(spec)
    return parsed, tuple(0 if axis in parsed.q else 1 if axis in parsed.k else 2 for axis in parsed.axes)


def _extents(owners: tuple[int, ...], q, k, v) -> list:
    shapes = (q.shape, k.shape, v.shape)
    return [shapes[owner][d] for d, owner in enumerate(owners)]


def _lists(row_blocks, key_blocks, documents):
    return None if key_blocks is None else (row_blocks, key_blocks, documents)


def attention(q, k, v, aux, seed, sizes, spec, row_blocks, key_blocks, documents, outer):
    key = None
    if q.is_cuda or interpreting():  # calls like one before need nothing of what follows: of a call's host time that is a quarter
        operands = (q, k, v, seed, row_blocks, key_blocks, *aux)
        key = calls.key((spec, *sizes, documents, outer), operands)
        known = calls.CALLS.get(key)
        if known is not None:
            return known(operands)
    parsed, owners = _parsed(spec)
    return launch.forward(parsed, q, k, v, aux, seed, [*_extents(owners, q, k, v), *sizes], _lists(row_blocks, key_blocks, documents),
                          outer, key)


def attention_backward(grad_out, grad_lse, q, k, v, aux, seed, out, lse, sizes, spec, needs, row_blocks, key_blocks, documents):
    key = None
    if q.is_cuda or interpreting():
        operands = (q, k, v, seed, grad_out, out, lse, grad_lse, row_blocks, key_blocks, *aux)
        key = calls.key((spec, *sizes, *needs, documents), operands)
        known = calls.CALLS.get(key)
        if known is not None:
            return known(operands)
    parsed, owners = _parsed(spec)
    return launch.backward(parsed, grad_out, q, k, v, aux, seed, out, lse, [*_extents(owners, q, k, v), *sizes], needs, grad_lse,
                           _lists(row_blocks, key_blocks, documents), key)


def block_lists(like, aux, sizes, mask):
    return blocks.block_lists(AttentionSpec.parse(mask), aux, sizes, like)


def document_tiles(like, aux, sizes, mask):
    return blocks.document_tiles(AttentionSpec.parse(mask), aux, sizes, like)


_library.impl("attention", attention, "CompositeExplicitAutograd")
_library.impl("attention_backward", attention_backward, "CompositeExplicitAutograd")
_library.impl("block_lists", block_lists, "CompositeExplicitAutograd")
_library.impl("document_tiles", document_tiles, "CompositeExplicitAutograd")


@torch.library.register_fake("flashfx::attention", lib=_library)
def _attention_fake(q, k, v, aux, seed, sizes, spec, row_blocks, key_blocks, documents, outer):
    extents, M, Dv = _extents(_parsed(spec)[1], q, k, v), q.shape[-2], v.shape[-1]
    out = v.new_empty_strided((*extents, M, Dv), output_strides(extents, M, Dv, outer))
    lse_dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
    return out, q.new_empty((*extents, M), dtype=lse_dtype)


@torch.library.register_fake("flashfx::attention_backward", lib=_library)
def _attention_backward_fake(grad_out, grad_lse, q, k, v, aux, seed, out, lse, sizes, spec, needs, row_blocks, key_blocks, documents):
    return [t.new_empty(t.shape if need else (0,)) for t, need in zip((q, k, v, *aux), needs)]


@torch.library.register_fake("flashfx::block_lists", lib=_library)
def _block_lists_fake(like, aux, sizes, mask):
    return tuple(like.new_empty(s, dtype=torch.int32) for s in blocks.shape(AttentionSpec.parse(mask), sizes))


@torch.library.register_fake("flashfx::document_tiles", lib=_library)
def _document_tiles_fake(like, aux, sizes, mask):
    return tuple(like.new_empty(s, dtype=torch.int32) for s in blocks.tiles_shape(AttentionSpec.parse(mask), sizes))


def _setup(ctx, inputs, output):
    q, k, v, aux, seed, sizes, spec, row_blocks, key_blocks, documents, _ = inputs
    out, lse = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, seed, out, lse, row_blocks, key_blocks, *aux)
    ctx.sizes, ctx.spec, ctx.documents = sizes, spec, documents


class _Once(torch.autograd.Function):
    """Gradients that a graph is recorded of (create_graph=True): they have the right values and no derivative."""

    @staticmethod
    def forward(ctx, compute, *operands):
        return tuple(compute())

    @staticmethod
    def backward(ctx, *grads):
        raise FlashFXError("flashfx::attention has no second derivative: compile with options={'disable': True} to take one")


def _gradients(ctx, grad_out, grad_lse):
    q, k, v, seed, out, lse, row_blocks, key_blocks, *aux = ctx.saved_tensors
    wanted = ctx.needs_input_grad
    wants_aux = wanted[3] if isinstance(wanted[3], (list, tuple)) else [bool(wanted[3])] * len(aux)
    needs = [bool(w) for w in wanted[:3]] + [bool(w) and t.is_floating_point() for w, t in zip(wants_aux, aux)]

    if grad_out is None:
        grad_out = torch.zeros_like(out)

    def compute():
        return torch.ops.flashfx.attention_backward(grad_out, grad_lse, q, k, v, aux, seed, out, lse, ctx.sizes, ctx.spec, needs,
                                                    row_blocks, key_blocks, ctx.documents)

    recorded = torch.is_grad_enabled() and any(g is not None and g.requires_grad for g in (grad_out, grad_lse))
    grads = _Once.apply(compute, grad_out, grad_lse, q, k, v, *aux) if recorded else compute()
    given = [g if need else None for g, need in zip(grads, needs)]  # the tree of the inputs, lists included
    # PyTorch takes an empty list for a list of tensors, a list of ints for one leaf
    return given[0], given[1], given[2], given[3:], None, None if ctx.sizes else [], None, None, None, None, None


torch.library.register_autograd("flashfx::attention", _gradients, setup_context=_setup, lib=_library)


sac_save_ops = [torch.ops.flashfx.attention.default]
"""For selective activation checkpointing policies: the op that replaces the aten SDPA ops in a save list."""
