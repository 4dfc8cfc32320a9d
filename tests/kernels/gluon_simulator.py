"""Runs generated Gluon kernels on a CPU: partitions side by side, and Hopper's asynchronous machinery done as late, or as early, as it may be.

The memory, copies, products and barriers of it; `gluon_dialect` has the language. Layouts mean nothing, all else does:

* a partition runs until it waits; then another goes on, drawn at random (`SEED`). Nobody ready and nothing under way: `Deadlock`, which says who
  waits where;
* a copy by the tensor memory accelerator takes place at a random later moment. Until then its destination holds NaN, and who touches it is told
  (`Race`);
* a matrix product reads shared memory from where it is issued to where it is awaited: what changes there meanwhile is a `Race`;
* what a partition has written to shared memory is not for products and copies until it has called `fence_async_shared`;
* barriers count arrivals and bytes, and their phase has one bit; addresses outside a tensor, a copy under way at the end, a product nobody awaited
  are errors.
"""
from __future__ import annotations

import math
import queue
import random
import sys
import threading
import types

import torch

SEED = [0]
RESIDENT = 4
"""Programs at a time."""
STEPS = 2_000_000


class Race(AssertionError):
    """The result would depend on timing."""


class Deadlock(AssertionError):
    """Everybody waits."""


class Task:
    """A partition, or a program's main function: a thread of which one at a time runs."""

    def __init__(self, simulation: Simulation, name: str, program: tuple, run):
        self.simulation, self.name, self.program, self.run = simulation, name, program, run
        self.ready, self.done, self.error = (lambda: True), False, None
        self.products: list[Product] = []
        self.stores: list[Copy] = []
        self.written: set = set()
        self.turn: queue.SimpleQueue = queue.SimpleQueue()  # whatever is in it, somebody may go on; `threading.Semaphore` is slow
        self.thread = threading.Thread(target=self._body, daemon=True)

    def _body(self) -> None:
        self.turn.get()
        _here.task = self
        try:
            if not self.simulation.over:
                self.run()
            if self.products:
                raise Race(f"{self.name} ends with a product that nobody awaited")
            if any(not s.done for s in self.stores):
                raise Race(f"{self.name} ends while a copy still reads shared memory")
        except _Over:
            pass
        except BaseException as error:  # noqa: BLE001  raised again where the kernel was launched
            self.error = error
        self.done = True
        self.simulation.hub.put(None)

    def pause(self, ready=lambda: True) -> None:
        """Let others go on; come back once `ready`."""
        self.ready = ready
        self.simulation.hub.put(None)
        self.turn.get()
        if self.simulation.over:
            raise _Over

    def where(self) -> str:
        frame = sys._current_frames().get(self.thread.ident)
        while frame is not None and "flashfx_generated" not in frame.f_globals.get("__name__", ""):
            frame = frame.f_back
        return f"{self.name} of program {self.program[0]}" + (f", line {frame.f_lineno}" if frame else "")


class _Over(BaseException):
    pass


_here = threading.local()


class Simulation:
    def __init__(self, grid: tuple, seed: int):
        self.grid, self.random, self.hub, self.over = (*grid, 1, 1)[:3], random.Random(seed), queue.SimpleQueue(), False
        self.tasks: list[Task] = []
        self.copies: list[Copy] = []
        self.arrived: dict[tuple, set] = {}  # at named barriers, by program
        self.met: dict[tuple, dict] = {}  # how often partitions of a program came to where they meet
        self.haste = self.random.choice((0.05, 0.5, 5.0))  # of copies beside partitions

    def start(self, name: str, program: tuple, run) -> Task:
        task = Task(self, name, program, run)
        self.tasks.append(task)
        task.thread.start()
        return task

    def launch(self, name: str, run) -> None:
        x, y, z = self.grid
        waiting = [(a, b, c) for c in range(z) for b in range(y) for a in range(x)][::-1]
        mains: list[Task] = []
        try:
            for _ in range(STEPS):
                mains = [m for m in mains if not m.done]
                while waiting and len(mains) < RESIDENT:
                    mains.append(self.start(name, waiting.pop(), run))
                if not mains:
                    return
                self.tasks = [t for t in self.tasks if not t.done]
                self._step()
            raise Deadlock(f"no end after {STEPS} steps")
        finally:
            self.over = True
            for task in self.tasks:
                task.turn.put(None)

    def _step(self) -> None:
        ready = [t for t in self.tasks if t.ready()]
        if not ready and not self.copies:
            raise Deadlock("all wait: " + "; ".join(t.where() for t in self.tasks))
        copies = len(self.copies) * self.haste
        if not ready or self.random.random() * (len(ready) + copies) < copies:
            self.copies.pop(self.random.randrange(len(self.copies))).finish()
            return
        task = self.random.choice(ready)
        task.turn.put(None)
        self.hub.get()
        if task.error is not None:
            raise task.error


# ---------------------------------------------------------------------------------------------------------------- memory

class Place:
    """One index of a shared buffer: what asynchronous reads and writes of it are under way."""

    def __init__(self):
        self.version, self.filling, self.leaving, self.unfenced, self.barrier = 0, 0, 0, set(), None


class Shared:
    """A view of a buffer in shared memory."""

    def __init__(self, data: torch.Tensor, places: list[Place]):
        self.data, self.places, self.dtype, self.shape = data, places, data.dtype, data.shape

    def index(self, n) -> Shared:
        n = int(n)
        assert 0 <= n < len(self.places), f"index {n} of {len(self.places)}"
        return Shared(self.data[n], [self.places[n]])

    def reshape(self, shape) -> Shared:
        return Shared(self.data.view(list(shape)), self.places)

    def permute(self, order) -> Shared:
        return Shared(self.data.permute(order), self.places)

    def slice(self, start, length, dim=0) -> Shared:
        return Shared(self.data.narrow(int(dim), int(start), int(length)), self.places)

    def _reinterpret(self, dtype: torch.dtype, shape, layout=None) -> Shared:
        """Its bytes as another type. A race is one of the whole place, whoever sees it as what."""
        shape = [int(n) for n in shape]
        assert self.data.is_contiguous() and len(self.places) == shape[0] == 1, "of one buffer, as it was allocated"
        data = self.data.view(-1).view(dtype)
        assert data.numel() >= math.prod(shape), "more than there is"
        return Shared(data[: math.prod(shape)].view(shape), self.places)

    def load(self, layout=None) -> torch.Tensor:
        if any(p.filling for p in self.places):
            raise Race("read while a copy still fills it")
        return self.data.clone()

    def store(self, value: torch.Tensor) -> None:
        assert value.shape == self.data.shape and value.dtype == self.data.dtype, (value.shape, value.dtype, self.data.shape, self.data.dtype)
        for p in self.places:
            if p.filling or p.leaving:
                raise Race("written while a copy still " + ("fills" if p.filling else "reads") + " it")
            p.version += 1
            p.unfenced.add(_here.task)
            _here.task.written.add(p)
        self.data.copy_(value)

    def versions(self) -> list[int]:
        """For a product or a copy that reads it."""
        for p in self.places:
            if p.filling:
                raise Race("read while a copy still fills it")
            if p.unfenced:
                raise Race("read by the asynchronous proxy, and no fence after it was written")
        return [p.version for p in self.places]


class Descriptor:
    def __init__(self, given):
        self.base, self.shape, self.strides, self.block = given.base, list(given.shape), list(given.strides), list(given.block_shape)
        self.dtype, self.layout = given.base.dtype, None

    def box(self, coordinates) -> tuple[torch.Tensor, tuple, tuple]:
        """(the whole tensor, slices of it inside, slices of the tile for them)"""
        whole = torch.as_strided(self.base, self.shape, self.strides)
        inside, own = [], []
        for c, size, block in zip(map(int, coordinates), self.shape, self.block):
            low, high = max(c, 0), min(c + block, size)
            inside.append(slice(min(low, size), max(high, min(low, size))))
            own.append(slice(low - c, max(high, low) - c))
        return whole, tuple(inside), tuple(own)


class Pointer:
    def __init__(self, flat: torch.Tensor, offset=0):
        self.flat, self.offset = flat, offset
        self.dtype = types.SimpleNamespace(element_ty=flat.dtype)

    def __add__(self, more) -> Pointer:
        return Pointer(self.flat, self.offset + more)

    def reshape(self, shape) -> Pointer:
        return Pointer(self.flat, self.offset.reshape(list(shape)))

    def permute(self, order) -> Pointer:
        return Pointer(self.flat, self.offset.permute(order))

    def at(self, mask) -> tuple[torch.Tensor, torch.Tensor]:
        """(positions, mask), of one shape"""
        offset, mask = torch.broadcast_tensors(torch.as_tensor(self.offset).long(), torch.as_tensor(True if mask is None else mask))
        if ((offset < 0) | (offset >= self.flat.numel()))[mask].any():
            raise Race("address outside of its tensor")
        return torch.where(mask, offset, 0), mask


def pointer_to(t: torch.Tensor) -> Pointer:
    return Pointer(torch.as_strided(t, (t.untyped_storage().nbytes() // t.element_size() - t.storage_offset(),), (1,)))


# --------------------------------------------------------------------------------------------------------- copies, products

class Copy:
    """One copy of the tensor memory accelerator, until `finish`."""

    def __init__(self, shared: Shared, finish):
        self.shared, self._finish, self.done = shared, finish, False
        _here.task.simulation.copies.append(self)

    def finish(self) -> None:
        self._finish()
        self.done = True


def _load_tile(descriptor: Descriptor, coordinates, barrier: Shared, shared: Shared, pred=True) -> None:
    if not pred:
        return
    place, = shared.places
    if place.filling or place.leaving:
        raise Race("a copy fills what another still " + ("fills" if place.filling else "reads"))
    assert list(shared.data.shape) == descriptor.block, (shared.data.shape, descriptor.block)
    place.filling, place.version, place.unfenced = 1, place.version + 1, set()
    shared.data.fill_(float("nan") if shared.data.is_floating_point() else 77)

    def finish() -> None:
        whole, inside, own = descriptor.box(coordinates)
        shared.data.zero_()
        shared.data[own] = whole[inside]
        place.filling, place.version = 0, place.version + 1
        barrier.places[0].barrier.bytes_came(shared.data.numel() * shared.data.element_size())
    Copy(shared, finish)
    _here.task.pause()


def _store_tile(descriptor: Descriptor, coordinates, shared: Shared, add: bool = False) -> None:
    versions, (place,) = shared.versions(), shared.places
    place.leaving += 1

    def finish() -> None:
        if [place.version] != versions:
            raise Race("changed while a copy read it")
        whole, inside, own = descriptor.box(coordinates)
        whole[inside] = whole[inside] + shared.data[own] if add else shared.data[own]
        place.leaving -= 1
    task = _here.task
    task.stores = [*(s for s in task.stores if not s.done), Copy(shared, finish)]
    task.pause()


def _store_wait(left: int) -> None:
    stores = _here.task.stores
    _here.task.pause(lambda: all(s.done for s in stores[: len(stores) - left]))


class Product:
    """A matrix product under way; its value after it was awaited."""

    def __init__(self, a, b, c, use_acc: bool):
        self.operands, self.c, self.use_acc, self.value = (a, b), c, use_acc, None
        self.versions = [x.versions() if isinstance(x, Shared) else None for x in (a, b)]

    def finish(self) -> None:
        for x, versions in zip(self.operands, self.versions):
            if isinstance(x, Shared) and x.versions() != versions:
                raise Race("changed while a product read it")
        a, b = ((x.data if isinstance(x, Shared) else x).float() for x in self.operands)
        c = self.c.value if isinstance(self.c, Product) else self.c
        assert a.shape[0] == c.shape[0] and b.shape[1] == c.shape[1] and c.dtype == torch.float32
        self.value = a @ b + c if self.use_acc else a @ b


def warpgroup_mma(a, b, c, *, use_acc=True, is_async=False):
    product = Product(a, b, c, use_acc)
    _here.task.products.append(product)
    return product if is_async else warpgroup_mma_wait(0, [product])


def warpgroup_mma_wait(left: int, products):
    queue = _here.task.products
    while len(queue) > left:
        queue.pop(0).finish()
    _here.task.pause()
    if any(p.value is None for p in products):
        raise Race("the value of a product that may still run")
    values = tuple(p.value for p in products)
    return values[0] if len(values) == 1 else values


class Barrier:
    def __init__(self, count: int):
        self.count = self.pending = int(count)
        self.bytes = self.phase = 0

    def arrive(self, count: int) -> None:
        self.pending -= count
        if self.pending < 0:
            raise Race("more arrivals at a barrier than it counts")
        self._turn()

    def bytes_came(self, number: int) -> None:
        self.bytes -= number
        if self.bytes < 0:
            raise Race("more bytes than a barrier expects")
        self._turn()

    def _turn(self) -> None:
        if self.pending == self.bytes == 0:
            self.pending, self.phase = self.count, self.phase ^ 1


class mbarrier:  # noqa: N801  the names are Gluon's
    MBarrierLayout = staticmethod(lambda *a, **k: None)

    @staticmethod
    def init(at: Shared, count) -> None:
        at.places[0].barrier = Barrier(count)

    @staticmethod
    def arrive(at: Shared, *, count=1, pred=True) -> None:
        if pred:
            at.places[0].barrier.arrive(count)
        _here.task.pause()

    @staticmethod
    def expect(at: Shared, number, pred=True) -> None:
        if pred:
            at.places[0].barrier.bytes += int(number)
            at.places[0].barrier.arrive(1)

    @staticmethod
    def wait(at: Shared, phase, pred=True) -> None:
        if pred:
            barrier, phase = at.places[0].barrier, int(phase)
            assert phase in (0, 1), phase
            _here.task.pause(lambda: barrier.phase != phase)


tma = types.SimpleNamespace(async_copy_global_to_shared=_load_tile, async_copy_shared_to_global=_store_tile, store_wait=_store_wait)


def fence_async_shared() -> None:
    task = _here.task
    for place in task.written:
        place.unfenced.discard(task)
    task.written = set()
