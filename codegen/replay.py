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

_active = threading.local()
_EMPTY = {torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default, torch.ops.aten.empty_like.default,
          torch.ops.aten.new_empty.default, torch.ops.aten.new_empty_strided.default}


class Watched:
    """Stands in for a kernel in a generated module and tells the recording under way what was launched.

    The assembler gives a kernel fewer registers than there are when it hopes for more programs at a time, and then spills some. A kernel
    that spills is compiled again with as many as a thread can have.
    """

    def __init__(self, kernel):
        self.kernel, self.more = kernel, None

    def __getitem__(self, grid):
        return functools.partial(self._launch, grid)

    def _launch(self, grid, *args, **options):
        if self.more is None:
            self.more = without_spilling(compat.spilled(self.kernel.warmup(*args, grid=grid, **options)), options)
        compiled = self.kernel[grid](*args, **options, **self.more)
        recording = getattr(_active, "recording", None)
        if recording is not None:
            recording.launched(compiled, (*grid, 1, 1)[:3], [*args, *(options[name] for name in self.kernel.arg_names[len(args):])])


def without_spilling(spilled: int, options: dict) -> dict[str, int]:
    """What to add to a kernel's options, by how much it spilled with these."""
    return {"maxnreg": 255} if spilled and "maxnreg" not in options else {}


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
    """Writes down the steps of a host function while it runs. What cannot be replayed makes `replay` return None."""

    def __init__(self, operands: Sequence[torch.Tensor | None]):
        super().__init__()
        self.tensors = list(operands)  # kept until the end, so that an id means one tensor
        self.aliases: list[torch.Tensor] = []
        self.number = {id(t): n for n, t in enumerate(operands) if t is not None}
        self.operands = len(operands)
        self.steps: list[tuple[Callable, list[int]]] = []
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

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = tree_map_only(torch.Tensor, self._slot, (args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, (tuple, list)) else [result]
        if not all(isinstance(r, torch.Tensor) for r in results):  # a number read from the device
            self.whole = False
        elif func is torch.ops.aten.detach.default:  # PyTorch's way to hand over what it has just made: below autograd, the tensor itself
            self.aliases.append(result)
            self.number[id(result)] = self._slot(args[0])
        elif func in _EMPTY:
            self.steps.append((_allocation(result, self._new(result)), []))
        else:
            self.steps.append((_operation(func, *given, [self._new(r) for r in results]), [s for s in tree_leaves(given) if isinstance(s, _Slot)]))
        return result

    def launched(self, compiled, grid: tuple[int, int, int], args: list) -> None:
        """`args` are the kernel's arguments, constants included; descriptors are expanded as Triton's launcher wants them."""
        launch = compat.direct_launch(compiled)
        described = iter(compat.descriptor_metadata(compiled))
        flat, pointers, maps = [], [], []
        for arg in args:
            if isinstance(arg, torch.Tensor):
                pointers.append((len(flat), self._slot(arg)))
                flat.append(None)
            elif hasattr(arg, "base"):
                metadata = next(described, None)
                if metadata is None:
                    launch = None
                    break
                maps.append((len(flat), self._slot(arg.base), _tensor_map(arg, metadata), {}))
                flat.extend([None, *compat.expanded_descriptor(arg, metadata)[1:]])
            else:
                flat.append(arg)
        self.whole = self.whole and launch is not None
        self.steps.append((_launching(launch, grid, flat, pointers, maps), [slot for _, slot, *_ in (*pointers, *maps)]))

    def replay(self, results: Sequence[torch.Tensor | None]) -> Callable | None:
        """The function of the operands that returns `results` for others like them; None if there is none."""
        wanted = [None if r is None else self._slot(r) for r in results]
        if not self.whole:
            return None
        last = {slot: at for at, (_, used) in enumerate(self.steps) for slot in used}
        kept = {*range(self.operands), *wanted}
        dead = [[int(s) for s, end in last.items() if end == at and s not in kept] for at in range(len(self.steps))]
        return functools.partial(_replay, [(step, gone) for (step, _), gone in zip(self.steps, dead)], len(self.tensors) - self.operands, wanted)


def _replay(steps, made: int, wanted, *operands):
    slots = [*operands, *[None] * made]
    stream = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
    for step, dead in steps:
        step(slots, stream)
        for number in dead:  # memory is free for the steps that follow
            slots[number] = None
    return [None if number is None else slots[number] for number in wanted]


def _allocation(like: torch.Tensor, slot: int) -> Callable:
    empty, shape, stride, dtype = compat.empty_strided(like.device), tuple(like.shape), like.stride(), like.dtype

    def step(slots, stream):
        slots[slot] = empty(shape, stride, dtype)
    return step


def _operation(func, args, kwargs, made: list[int]) -> Callable:
    def step(slots, stream):
        fill = functools.partial(tree_map_only, _Slot, slots.__getitem__)
        result = func(*fill(args), **fill(kwargs))
        for slot, value in zip(made, result if isinstance(result, (tuple, list)) else [result]):
            slots[slot] = value
    return step


def _launching(launch, grid: tuple[int, int, int], flat: list, pointers: list, maps: list) -> Callable:
    def step(slots, stream):
        args = flat.copy()
        for at, slot in pointers:
            args[at] = slots[slot].data_ptr()
        for at, slot, make, known in maps:
            address = slots[slot].data_ptr()
            found = known.get(address)
            if found is None:
                if len(known) >= 256:
                    known.clear()
                found = known[address] = make(slots[slot])
            args[at] = found
        launch(grid, stream, args)
    return step


def _tensor_map(descriptor, metadata) -> Callable:
    """The function from a tensor to its map, for tensors that differ from the descriptor's in their address only."""
    template = copy.copy(descriptor)
    template.base = None

    def make(tensor):
        own = copy.copy(template)
        own.base = tensor
        return compat.expanded_descriptor(own, metadata)[0]
    return make
