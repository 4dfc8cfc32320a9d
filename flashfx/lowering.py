"""How Inductor calls our ops: as Python functions, straight from the code that it generates.

Through PyTorch's dispatcher a call costs the host some 10 microseconds more, nearly as much as all the rest of it. What the dispatcher is there
for (autograd, functionalisation, fake tensors) is done by the time Inductor generates code. C++ wrappers keep the ops.
"""
from __future__ import annotations

import functools

import torch

from . import op


@functools.cache
def register() -> None:
    """Lower our ops as Inductor lowers any custom op, but for the name that the generated code calls."""
    from torch._inductor.lowering import lowerings, make_fallback, tag_to_layout_constraint
    from torch._library.utils import get_layout_constraint_tag
    for function in (op.attention, op.attention_backward, op.block_lists, op.document_tiles):
        overload = getattr(torch.ops.flashfx, function.__name__).default
        make_fallback(overload, layout_constraint=tag_to_layout_constraint(get_layout_constraint_tag(overload)), warn=False)
        lowerings[overload] = _named(lowerings[overload], f"{op.__name__}.{function.__name__}")


def _named(fallback, name: str):
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    class Direct(ir.FallbackKernel):
        def codegen(self, wrapper) -> None:
            if not V.graph.cpp_wrapper:
                self.python_kernel_name = name
                wrapper.add_import_once(f"import {op.__name__}")
            super().codegen(wrapper)

    def lower(*args, **kwargs):
        results = fallback(*args, **kwargs)
        for node in results:
            while isinstance(node, (ir.TensorBox, ir.StorageBox)):
                node = node.data
            node.inputs[0].__class__ = Direct
        return results
    return lower
