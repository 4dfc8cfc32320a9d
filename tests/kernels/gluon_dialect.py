"""Gluon's language as generated kernels use it, on PyTorch's tensors: `load(text)` is a generated module whose Gluon kernels `gluon_simulator` runs.
Scalars are tensors without dimensions, so that they have methods too."""
from __future__ import annotations

import functools
import inspect
import re
import types

import torch

from flashfx.codegen import load as generated
from flashfx.codegen import philox

from . import gluon_simulator as simulator
from .gluon_simulator import Descriptor, Pointer, Race, Shared, Simulation, _here, pointer_to

DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "int8", "int32", "int64")} | {"int1": torch.bool}


def scalar(x) -> torch.Tensor:
    if isinstance(x, torch.Tensor):
        return x
    return torch.tensor(x, dtype=torch.bool if isinstance(x, bool) else torch.int32 if isinstance(x, int) and abs(x) < 2 ** 31 else
                        torch.int64 if isinstance(x, int) else torch.float32)


def _load(pointer: Pointer, mask=None, other=None, volatile=False):
    if volatile:
        _here.task.pause()
    at, mask = pointer.at(mask)
    value = pointer.flat[at]
    missing = torch.tensor(float("nan") if other is None and value.is_floating_point() else other or 0).to(value.dtype)
    return torch.where(mask, value, missing)


def _store(pointer: Pointer, value, mask=None) -> None:
    at, mask = pointer.at(mask)
    value = torch.broadcast_to(scalar(value), at.shape).to(pointer.flat.dtype)
    pointer.flat[at[mask]] = value[mask]


def _atomic(change):
    def atomic(pointer: Pointer, value, sem=None, scope=None):
        _here.task.pause()
        at, _ = pointer.at(None)
        before = pointer.flat[at].clone()
        pointer.flat[at] = change(before, scalar(value).to(before.dtype))
        return before
    return atomic


def _inline(text: str, constraints, args, dtype=None, is_pure=True, pack=1):
    if "cp.async.bulk.wait_group 0" in text:
        simulator.tma.store_wait(0)
        return scalar(args[0])
    if text.startswith("tanh.approx"):
        return torch.tanh(args[0])
    if "shr.s32 z, $2, 31" in text:  # `late`: of a number that is not negative
        return scalar(args[0]) + (scalar(args[1]) >> 31)
    raise NotImplementedError(f"the simulator does not know this instruction: {text}")


def _reduction(whole, along):
    def reduce(x, axis=None):
        return whole(x) if axis is None else along(x, axis)
    return reduce


def _split(x):
    if isinstance(x, Pointer):
        return tuple(Pointer(x.flat, x.offset[..., n]) for n in range(2))
    return x[..., 0], x[..., 1]


def _multiple_of(pointer: Pointer, values):
    first = pointer.offset[..., :1] * pointer.flat.element_size()
    assert not (first % values[-1]).any(), "rows do not begin where the compiler is told that they do"
    return pointer


def _pairwise(function):
    return lambda a, b: function(*torch.broadcast_tensors(*_alike(scalar(a), scalar(b))))


def _alike(a, b):
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.to(dtype), b.to(dtype)


def _where(condition, a, b):
    return torch.where(scalar(condition), *_alike(*(scalar(x) for x in (a, b))))


class _Language(types.SimpleNamespace):
    def __getattr__(self, name: str):  # exp, log2, abs, sqrt, …
        function = getattr(torch, name)
        return lambda x, *more: function(scalar(x), *more)


def _specialize(partitions, warps, registers) -> None:
    task = _here.task
    started = [task.simulation.start(function.__name__, task.program, functools.partial(function, *args)) for function, args in partitions]
    task.pause(lambda: all(t.done for t in started))


def _allocate(dtype, shape, layout=None) -> Shared:
    shape = [int(n) for n in shape]
    data = torch.full(shape, float("nan") if dtype.is_floating_point else 77 if dtype in (torch.bool, torch.uint8) else -12345, dtype=dtype)
    return Shared(data, [simulator.Place() for _ in range(shape[0])])


class constexpr:  # noqa: N801  an annotation
    pass


gl = _Language(
    **DTYPES, uint32=torch.int64, constexpr=constexpr,
    program_id=lambda n: scalar(_here.task.program[n]), num_programs=lambda n: scalar(_here.task.simulation.grid[n]),
    arange=lambda start, stop, layout=None: torch.arange(start, stop, dtype=torch.int32),
    zeros=lambda shape, dtype, layout=None: torch.zeros([int(n) for n in shape], dtype=dtype),
    full=lambda shape, value, dtype, layout=None: torch.full([int(n) for n in shape], scalar(value).item(), dtype=dtype),
    full_like=lambda x, value: torch.full_like(x, value),
    cast=lambda x, dtype: scalar(x).to(dtype), cdiv=lambda a, b: (a + b - 1) // b, static_range=range,
    minimum=_pairwise(torch.minimum), maximum=_pairwise(torch.maximum), where=_where,
    max=_reduction(torch.max, torch.amax), min=_reduction(torch.min, torch.amin), sum=_reduction(torch.sum, torch.sum),
    load=_load, store=_store, atomic_add=_atomic(lambda a, b: a + b), atomic_xchg=_atomic(lambda a, b: b),
    convert_layout=lambda x, layout: x, join=lambda a, b: torch.stack(torch.broadcast_tensors(a, b), -1), split=_split,
    broadcast_to=lambda x, shape: torch.broadcast_to(scalar(x), [int(n) for n in shape]),
    multiple_of=_multiple_of, inline_asm_elementwise=_inline, warp_specialize=_specialize, allocate_shared_memory=_allocate,
    NVMMASharedLayout=types.SimpleNamespace(get_default_for=lambda *a: None),
    **{name: lambda *a, **k: None for name in ("NVMMADistributedLayout", "SliceLayout", "DotOperandLayout", "BlockedLayout", "SwizzledSharedLayout",
                                               "DistributedLinearLayout")})


class Kernel:
    """What `gluon.jit` makes of a function: called by kernels, or launched by a host function."""

    def __init__(self, function):
        self.function, self.__name__ = function, function.__name__
        self.parameters = inspect.signature(function).parameters

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)

    def __getitem__(self, grid):
        def launch(*args, **options):
            given = dict(zip(self.parameters, args)) | {n: v for n, v in options.items() if n in self.parameters}
            given = {n: v if self.parameters[n].annotation is constexpr else argument(v) for n, v in given.items()}
            Simulation(grid, simulator.SEED[0]).launch(self.__name__, lambda: self.function(**given))
        return launch


def argument(value):
    if hasattr(value, "block_shape"):
        return Descriptor(value)
    return pointer_to(value) if isinstance(value, torch.Tensor) else scalar(value)


# Dropout's bits pass through registers in ways that a simulation without layouts cannot follow: what they are is written out.

def random_bits(seed, z, a0, b0, unknown, words_a, words_b, ROWS, COLUMNS, WARPS, TRANSPOSED, VARY, LAYOUT):
    first, second = torch.arange(ROWS)[:, None] + int(a0), torch.arange(COLUMNS)[None, :] + int(b0)
    i, j = (second, first) if TRANSPOSED else (first, second)
    return philox.random_bits(int(seed), torch.as_tensor(int(z)), i, j)


def by_thread(tile):
    """(rows, columns) -> what a thread has of a row along dims 1 and 3, the row's four threads along 2."""
    return tile.reshape(tile.shape[0], -1, 4, 2)


def across(own, tile):
    return own[:, None, :, None].expand(by_thread(tile).shape).reshape(tile.shape)


def raised(m, top, FACTOR, LAG):
    top = top.amax(1, keepdim=True)
    grown = top - m > LAG
    return torch.where(grown, top, m), torch.where(grown, torch.exp2((m - top) * FACTOR), 1.0), grown


def weighed(scores, m, FACTOR, DTYPE):
    """Of a row at a time, where a GPU's warp renews the maxima of sixteen."""
    highest = torch.maximum(m, (scores * FACTOR).amax(1, keepdim=True))
    grown = (by_thread(torch.exp2(scores * FACTOR - across(m, scores))).sum((1, 3)) > 256).any(1, keepdim=True) | (m == -torch.inf)
    renewed = torch.where(grown, highest, m)
    p = torch.exp2(scores * FACTOR - across(torch.where(renewed == -torch.inf, 0.0, renewed), scores))
    return p.to(DTYPE), by_thread(p).sum((1, 3)), renewed, torch.where(grown & (renewed > -torch.inf), torch.exp2(m - renewed), 1.0), grown


def within(tile, start, stop, HIDDEN):
    columns = torch.arange(tile.shape[1])
    return torch.where((columns >= (0 if start is None else scalar(start))) & (columns < scalar(stop)), tile, HIDDEN)


def ramp(tile, start, rate, STEP):
    return (start + rate * (STEP * torch.arange(tile.shape[1]).float())).expand(tile.shape)


def sync(*name) -> None:
    """Wait at a named barrier of the program until the other side has arrived."""
    arrived = _arrived()
    _here.task.pause(lambda: name in arrived)
    arrived.remove(name)


def arrive(*name) -> None:
    arrived = _arrived()
    if name in arrived:
        raise Race(f"at a named barrier, {name}, all have arrived already")
    arrived.add(name)
    _here.task.pause()


def meet() -> None:
    """Wait until all three warpgroups have come as often."""
    times = _here.task.simulation.met.setdefault(_here.task.program, {})
    times[_here.task] = mine = times.get(_here.task, 0) + 1
    _here.task.pause(lambda: sum(n >= mine for n in times.values()) == 3)


def _arrived() -> set:
    return _here.task.simulation.arrived.setdefault(_here.task.program, set())


NAMED = dict(await_turn=lambda WARPGROUP: sync("turn", WARPGROUP), pass_turn=lambda WARPGROUP, WARPGROUPS: arrive("turn", (WARPGROUP + 1) % WARPGROUPS),
             leave_rows=lambda slot: arrive("rows", int(slot)), await_rows=lambda slot: sync("rows", int(slot)), hand_dq=lambda: arrive("dQ"), await_dq=lambda: sync("dQ"),
             meet=meet, free_place_of_dq=lambda: arrive("place of dQ"), await_place_of_dq=lambda: sync("place of dQ"))
"""What text of `codegen.named` calls. A partition is one task here: two warpgroups that hold keys together do not wait for each other."""


def take_ticket(counter, last):
    """`atom.inc`: one lane's."""
    number = gl.atomic_add(counter, 1)
    if int(number) == int(last):
        gl.store(counter, 0)
    return number


OVERRIDES = dict(NAMED, within=within, ramp=ramp, widened=lambda tile: tile.float(), take_ticket=take_ticket, number_on=scalar,
                 random_bits=random_bits, key_words=lambda seed, z, j0, COLUMNS: (torch.zeros(2, COLUMNS // 8, dtype=torch.int64),) * 2, kept=lambda p, bits, THRESHOLD: torch.where(bits >= THRESHOLD, p, 0.0),
                 signed_by_keep=lambda p, bits, THRESHOLD: torch.where(bits >= THRESHOLD, p, -p), kept_mask=lambda bits, THRESHOLD: bits >= THRESHOLD,
                 marked_by_keep=lambda x, bits, THRESHOLD: (x.float().view(torch.int32) & -2 | (bits >= THRESHOLD).int()).view(torch.float32),
                 is_marked=lambda x: x.view(torch.int32) & 1 != 0, threads_of=lambda rows: None, raised=raised, weighed=weighed, bounded_exp2=lambda x, FACTOR: torch.exp2(x * FACTOR),
                 own_max=lambda tile: by_thread(tile).amax((1, 3)), own_sum=lambda tile: by_thread(tile).sum((1, 3)), across=across,
                 rescaled=lambda acc, alpha, grown: acc * across(alpha, acc),
                 kept_half=lambda p, bits, THRESHOLD: torch.where(bits >= THRESHOLD, p * 2.0 ** (-7 * (p.dtype == torch.bfloat16)), 0.0), positive=lambda x, DTYPE: x.clamp(min=0.0).to(DTYPE))


def load(text: str):
    """As `flashfx.codegen.load.load`."""
    if "gluon" not in text:
        return generated.load(text)
    own = "import tests.kernels.gluon_dialect as _d\ngluon, gl, range = _d.gluon, _d.gl, _d.steps\n" \
          "from tests.kernels.gluon_simulator import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait\n"
    text = re.sub(r"(^from triton\.experimental.*\n)+", lambda m: own, text, flags=re.M)
    text = re.sub(r"^barrier, reduce_add = .*$", "barrier, reduce_add = _d.barrier, _d.reduce_add", text, flags=re.M)
    text = re.sub(r"^barrier = gluon_barrier\(\)$", "barrier = _d.barrier", text, flags=re.M)
    module = generated.load(text)
    for name, function in OVERRIDES.items():
        if hasattr(module, name):
            setattr(module, name, function)
    return module


def steps(*ends):
    """`range`, of scalars."""
    return map(scalar, range(*map(int, ends)))


gluon = types.SimpleNamespace(jit=lambda f=None, **_: Kernel(f) if f else Kernel, constexpr_function=lambda f: f)
barrier = lambda: None
reduce_add = functools.partial(simulator._store_tile, add=True)
