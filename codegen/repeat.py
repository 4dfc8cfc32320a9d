"""Launch a Triton kernel again without asking again what was asked the first time.

`kernel[grid](…)` specialises on every argument of every call. Calls that agree in shapes, strides, dtypes and alignment need
the same compiled kernel: the first call of such a group goes through Triton, the others straight to its launcher.
"""
from __future__ import annotations

import contextlib
import functools
import threading

import torch

from .. import compat

_active = threading.local()


@contextlib.contextmanager
def group(known: dict):
    """Launches inside belong to the group of calls whose compiled kernels `known` collects."""
    before = getattr(_active, "known", None)
    _active.known = known
    try:
        yield
    finally:
        _active.known = before


class Repeated:
    """Stands in for a `triton.jit` function in a generated module."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return functools.partial(self._launch, grid)

    def _launch(self, grid, *args, **options):
        known = getattr(_active, "known", None)
        found = known.get(self) if known is not None else None
        if found is None or compat.launch_hooked():
            compiled = self.kernel[grid](*args, **options)
            if known is not None:
                known[self] = compiled, [options[name] for name in self.kernel.arg_names[len(args):]]
            return
        compiled, constants = found
        stream = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
        compiled.run(grid[0], 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *args, *constants)


def repeat_launches(module) -> None:
    """Replace the kernels of a generated module that its host functions launch. Not under the interpreter."""
    if compat.interpreting():
        return
    from triton.runtime.jit import JITFunction
    for name, value in list(vars(module).items()):
        if name.startswith("attention_") and isinstance(value, JITFunction):
            setattr(module, name, Repeated(value))
