"""How Inductor calls our ops: as Python functions, straight from the code that it generates.

Through PyTorch's dispatcher a call costs the host some 10 microseconds more, nearly as much as all the rest of it. What the dispatcher is there
for (autograd, functionalisation, fake tensors) is done by the time Inductor generates code. C++ wrappers keep the ops.
"""
from __future__ import annotations

import functools

import torch

from . import differences, op


@functools.cache
def register() -> None:
    """Lower our ops as Inductor lowers any custom op, but for the name that the generated code calls."""
    from torch._inductor.lowering import lowerings, make_fallback, register_lowering, tag_to_layout_constraint
    from torch._library.utils import get_layout_constraint_tag
    register_lowering(torch.ops.flashfx.gather_by_difference.default, type_promotion_kind=None)(_gathered)
    ours = (op, "attention"), (op, "attention_backward"), (op, "block_lists"), (op, "document_tiles"), (differences, "gather_by_difference_backward")
    for module, name in ours:
        overload = getattr(torch.ops.flashfx, name).default
        make_fallback(overload, layout_constraint=tag_to_layout_constraint(get_layout_constraint_tag(overload)), warn=False)
        lowerings[overload] = _named(lowerings[overload], module.__name__, name)


def _gathered(source, positions, columns):
    """`flashfx::gather_by_difference`, an element at a time, so that what reads it is computed along with it."""
    from torch._inductor import ir
    from torch._inductor.virtualized import ops
    positions.realize()
    rows, width = source.get_size()[-2:]
    where, element = positions.make_loader(), source.make_loader()

    def inner(index):
        *lead, r, c = index
        return element([*lead, r, ops.indirect_indexing(where([c - r + rows - 1]), width, check=False)])
    return ir.Pointwise.create(device=source.get_device(), dtype=source.get_dtype(), inner_fn=inner, ranges=[*source.get_size()[:-1], columns])


def _named(fallback, module: str, name: str):
    """A fallback whose generated code calls `name` of `module`."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    class Direct(ir.FallbackKernel):
        def codegen(self, wrapper) -> None:
            if not V.graph.cpp_wrapper:
                self.python_kernel_name = f"{module}.{name}"
                wrapper.add_import_once(f"import {module}")
            super().codegen(wrapper)

    def lower(*args, **kwargs):
        results = fallback(*args, **kwargs)
        for node in results if isinstance(results, (list, tuple)) else [results]:
            while isinstance(node, (ir.TensorBox, ir.StorageBox)):
                node = node.data
            node.inputs[0].__class__ = Direct
        return results
    return lower
