"""Calls that are alike are worked out once: the first is recorded on a GPU, the others do again what it did (`replay`)."""
from __future__ import annotations

from typing import Callable, Sequence

import torch

from .. import compat
from .replay import Recording

CALLS: dict[tuple, Call] = {}


def key(what: tuple, operands: Sequence[torch.Tensor | None]) -> tuple:
    """What a call's work depends on beside its tensors' contents and addresses. what: the spec and all that is given with it; operands: q, k, v and more."""
    q, _, v, *_ = operands
    found = [what, q.device, torch.are_deterministic_algorithms_enabled()]
    for t in operands:
        if t is None:
            found.append(None)
        else:
            found += (t.shape, t.stride(), t.dtype, t.data_ptr() % 16)
    if torch.float32 in (q.dtype, v.dtype):
        found.append(compat.tf32_allowed())
    return tuple(found)


class Call:
    """All calls with one key."""

    def __init__(self, run: Callable):
        self.run, self.again = run, None

    def __call__(self, operands: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor]:
        device = operands[0].device
        if device.type != "cuda":
            return self.run(*operands)
        if self.again is not None and device.index == torch._C._cuda_getDevice() and not compat.launch_hooked():
            return self.again(*operands)
        with torch.cuda.device(device):  # kernels launch on the current device
            if self.again is not None and not compat.launch_hooked():
                return self.again(*operands)
            with Recording(operands) as recording:
                results = self.run(*operands)
            self.again = recording.replay(results) or self.run
        return results


def remembered(key: tuple, make: Callable[[], Callable]) -> Call:
    """The call of this key; `make()` is the function of its operands."""
    found = CALLS.get(key)
    if found is None:
        if len(CALLS) >= 4096:  # dynamic shapes must not fill the memory
            CALLS.clear()
        found = CALLS[key] = Call(make())
    return found


def forget() -> None:
    """Work all calls out anew: what plans are made from has changed."""
    CALLS.clear()
