"""Replay a call on a GPU: the first call of a group is recorded, the others do again what it did.

Calls that agree in shapes, strides, dtypes and alignment allocate the same buffers and run the same kernels on the same grids; they
differ in addresses only. The first one runs the generated host function as it stands, a file that can be read, debugged and
run by itself, while its PyTorch operations and kernel launches are written down. A replay is those and nothing else.
"""
from __future__ import annotations

import copy
import functools
import threading
from typing import Callable, Sequence

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from .. import compat
from .counters import Counter, address as counter_address
from .spilling import fitted, settled_here

_active = threading.local()
_EMPTY = {torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default, torch.ops.aten.empty_like.default,
          torch.ops.aten.new_empty.default, torch.ops.aten.new_empty_strided.default}


class Watched:
    """Stands in for a kernel in a generated module and tells the recording under way what was launched. One that spills registers is compiled
    again (`spilling`)."""

    def __init__(self, kernel):
        self.kernel, self.more = kernel, None

    def __getitem__(self, grid):
        return functools.partial(self._launch, grid)

    def _launch(self, grid, *args, **options):
        if self.more is None:
            self.more = settled_here(self.kernel, grid, args, options)
        args, options = fitted(self.kernel, args, self.more), options | self.more
        compiled = self.kernel[grid](*args, **options)
        recording = getattr(_active, "recording", None)
        while recording is not None:  # those around it too: a host function may call another's
            recording.launched(compiled, (*grid, 1, 1)[:3], [*args, *(self._option(name, options) for name in self.kernel.arg_names[len(args):])])
            recording = recording.outer

    def _option(self, name: str, options: dict):
        return options[name] if name in options else self.kernel.signature.parameters[name].default


def watch_launches(module) -> None:
    """Replace the kernels of a generated module, which its host functions launch. Not under the interpreter."""
    if compat.interpreting():
        return
    from triton.runtime.jit import JITFunction
    for name, value in list(vars(module).items()):
        if name.startswith("attention_") and isinstance(value, JITFunction):
            setattr(module, name, Watched(value))


class _Slot(int):
    """A tensor of the call by number: the operands, then what the steps make, in order."""


class Recording(TorchDispatchMode):
    """Writes down the steps of a host function while it runs, as the text of a function that does nothing else. What cannot be replayed makes
    `replay` return None."""

    def __init__(self, operands: Sequence[torch.Tensor | None]):
        super().__init__()
        self.tensors = list(operands)  # kept until the end, so that an id means one tensor
        self.aliases: list[torch.Tensor] = []
        self.number = {id(t): n for n, t in enumerate(operands) if t is not None}
        self.operands = len(operands)
        self.steps: list[tuple[str, list[int]]] = []
        self.names: dict[str, object] = {}
        self.whole = True

    def __enter__(self):
        self.outer, _active.recording = getattr(_active, "recording", None), self
        return super().__enter__()

    def __exit__(self, *raised):
        _active.recording = self.outer
        return super().__exit__(*raised)

    def _slot(self, tensor: torch.Tensor) -> _Slot:
        if id(tensor) not in self.number:  # from outside: nothing says that the next call may use it
            self.whole = False
        return _Slot(self.number.get(id(tensor), -1))

    def _new(self, tensor: torch.Tensor) -> _Slot:
        if id(tensor) not in self.number:
            self.number[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return self._slot(tensor)

    def _name(self, value) -> str:
        """How the text says a value."""
        if value is None or type(value) in (bool, int):
            return repr(value)
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name

    def _said(self, value) -> str:
        """How the text says an argument of one of PyTorch's operations."""
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(self._said, value))}]"
        return f"t{value}" if isinstance(value, _Slot) else self._name(value)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = tree_map_only(torch.Tensor, self._slot, (args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, (tuple, list)) else [result]
        if not results or not all(isinstance(r, torch.Tensor) for r in results):  # a number read from the device
            self.whole = False
        elif func is torch.ops.aten.detach.default:  # PyTorch's way to hand over what it has just made: below autograd, the tensor itself
            self.aliases.append(result)
            self.number[id(result)] = self._slot(args[0])
        elif func in _EMPTY:
            made = (tuple(result.shape), result.stride(), result.dtype)
            self.steps.append((f"t{self._new(result)} = {self._name(compat.empty_strided(result.device))}({', '.join(map(self._name, made))})", []))
        else:
            positional, named = given
            told = [*map(self._said, positional), *(f"{name}={self._said(value)}" for name, value in named.items())]
            made = ", ".join(f"t{self._new(r)}" for r in results) + "," * (results is result)
            self.steps.append((f"{made} = {self._name(func)}({', '.join(told)})", [s for s in tree_leaves(given) if isinstance(s, _Slot)]))
        return result

    def launched(self, compiled, grid: tuple[int, int, int], args: list) -> None:
        """`args` are the kernel's arguments, constants included; descriptors are expanded as Triton's launcher wants them."""
        launch, described, flat, used = compat.direct_launch(compiled), iter(compat.descriptor_metadata(compiled)), [], []
        for arg in args:
            if isinstance(arg, torch.Tensor):
                used.append(self._slot(arg))
                flat.append(f"t{used[-1]}.data_ptr()")
            elif isinstance(arg, Counter):
                flat.append(f"{self._name(counter_address)}({arg.device}, stream)")
            elif hasattr(arg, "base"):
                metadata = next(described, None)
                if metadata is None:
                    launch = None
                    break
                used.append(self._slot(arg.base))
                flat += [f"{self._name(_Maps(arg, metadata))}[t{used[-1]}.data_ptr()]", *map(self._name, compat.expanded_descriptor(arg, metadata)[1:])]
            else:
                flat.append(self._name(arg))
        if launch is None:
            self.whole = False
            return
        call, fixed, separate = launch
        given = [*map(self._name, (*grid,)), "stream", *map(self._name, fixed), ", ".join(flat) if separate else f"[{', '.join(flat)}]"]
        self.steps.append((f"{self._name(call)}({', '.join(given)})", used))

    def replay(self, results: Sequence[torch.Tensor | None]) -> Callable | None:
        """The function of the operands that returns `results` for others like them; None if there is none."""
        wanted = [None if r is None else self._slot(r) for r in results]
        if not self.whole:
            return None
        last = {slot: at for at, (_, used) in enumerate(self.steps) for slot in used}
        kept = {*range(self.operands), *wanted}
        lines = [f"stream = get_stream({self.tensors[0].device.index})"]
        for at, (line, _) in enumerate(self.steps):
            dead = [f"t{slot}" for slot, end in last.items() if end == at and slot not in kept]
            lines += [line, *([f"del {', '.join(dead)}"] if dead else [])]  # memory is free for the steps that follow
        returned = "".join("None, " if slot is None else f"t{slot}, " for slot in wanted)
        lines.append(f"return [{returned}]" if isinstance(results, list) else f"return ({returned})")
        text = f"def again({', '.join(f't{n}' for n in range(self.operands))}):\n    " + "\n    ".join(lines)
        names = {"get_stream": torch._C._cuda_getCurrentRawStream, **self.names}
        exec(text, names)
        return names["again"]


class _Maps(dict):
    """The tensor maps of one descriptor, by address, for tensors that differ from the descriptor's in their address only."""

    def __init__(self, descriptor, metadata):
        self.template, self.metadata = copy.copy(descriptor), metadata
        self.template.base = None

    def __missing__(self, address: int):
        if len(self) >= 256:
            self.clear()
        own = copy.copy(self.template)
        own.base = _At(address)
        found = self[address] = compat.expanded_descriptor(own, self.metadata)[0]
        return found


class _At(int):
    """An address, where a tensor is asked for."""

    def data_ptr(self) -> int:
        return int(self)
