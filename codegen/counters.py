"""Counters of tiles that every kernel leaves as it found them, at 0, so that nothing has to be launched before it to set them.

Kernels of one stream run one after the other and share a counter; those of different streams may run side by side. A CUDA graph may be replayed in any stream
and beside another graph, but never beside itself: each launch that is captured gets a counter of its own for good.
"""
from __future__ import annotations

import threading

import torch
from torch.utils._python_dispatch import _disable_current_modes

PLACES, APART = 1 << 14, 4
"""Counters that are allocated together; integers from one to the next: kernels are compiled for addresses that are multiples of 16."""

_lock = threading.Lock()
_free: dict[int, list[int]] = {}
_kept: list[torch.Tensor] = []
_of_stream: dict[tuple[int, int], int] = {}


class Counter:
    """A counter as Triton takes a tensor: `dtype` and `data_ptr()`."""

    dtype = torch.int32

    def __init__(self, device: int, address: int):
        self.device, self.address = device, address

    def data_ptr(self) -> int:
        """Where it is, in the device's memory."""
        return self.address


def tile_counter(device: torch.device) -> Counter | torch.Tensor:
    """The counter of the current stream, or of the capture that is under way; on a CPU a tensor."""
    if device.type != "cuda":
        return torch.zeros(1, dtype=torch.int32)
    index = torch._C._cuda_getDevice() if device.index is None else device.index
    return Counter(index, address(index, torch._C._cuda_getCurrentRawStream(index)))


def address(device: int, stream: int) -> int:
    """Of that counter. stream: the device's current one."""
    if torch._C._cuda_isCurrentStreamCapturing():
        return _place(device, True)
    found = _of_stream.get((device, stream))
    if found is None:
        found = _of_stream[device, stream] = _place(device, False)
    return found


def prepare(device: torch.device) -> None:
    """Allocate counters of a GPU ahead of calls: those that PyTorch makes before it records a graph may allocate nothing that outlives them."""
    index = torch.cuda.current_device() if device.index is None else device.index
    with _lock, _disable_current_modes():
        if not _free.get(index) and not torch._C._cuda_isCurrentStreamCapturing():
            _allocate(index)


def _allocate(device: int) -> None:
    zeros = torch.zeros(PLACES * APART, dtype=torch.int32, device=f"cuda:{device}")
    torch.cuda.current_stream(device).synchronize()  # other streams may use them next
    _kept.append(zeros)
    _free[device] = [zeros.data_ptr() + 4 * APART * n for n in range(PLACES)]


def _place(device: int, captured: bool) -> int:
    with _lock, _disable_current_modes():
        if not _free.get(device):
            if captured:  # memory of the graph, which each replay sets to 0; what is allocated there next is used behind the kernel
                return torch.zeros(1, dtype=torch.int32, device=f"cuda:{device}").data_ptr()
            _allocate(device)
        return _free[device].pop()
