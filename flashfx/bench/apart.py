"""Measure in a process of its own. A kernel's illegal access ends what a process can do on the GPU; the next row then gets a new process."""
from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Callable

import torch

from .measure import Row, failed_row, measure
from .variants import Shape


def is_lost(device: torch.device) -> bool:
    """Has a kernel's illegal access ended what this process can do on the GPU?"""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def _there(work: Callable[..., Row], name: str, peer: str, shape: Shape, more: tuple) -> tuple[Row, bool]:
    """(the row, is this process lost?)"""
    row = work(name, peer, shape, *more)
    return row, bool(row.failed) and is_lost(shape.device)


class Apart:
    """Calls `work`, which takes and returns what `measure` does, in another process: one for all rows, and a new one behind a row that ended it."""

    def __init__(self, work: Callable[..., Row] = measure) -> None:
        self.work, self.pool = work, None

    def __enter__(self) -> Apart:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """End the process, if there is one."""
        if self.pool is not None:
            self.pool.shutdown()
            self.pool = None

    def __call__(self, name: str, peer: str, shape: Shape, *more) -> Row:
        if self.pool is None:
            self.pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        try:
            row, lost = self.pool.submit(_there, self.work, name, peer, shape, more).result()
        except BrokenProcessPool:
            row, lost = failed_row(name, peer, shape, "it ended the process that measured it"), True
        if lost:
            self.close()
        return row
