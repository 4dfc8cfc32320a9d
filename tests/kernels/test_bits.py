"""Dropout's random bits in the Hopper kernels (`codegen/gluon.py`): who makes which of Philox's calls and what neighbours exchange, the PTX of it instruction by instruction, against `philox.random_bits`."""
from __future__ import annotations

import itertools
import types

import numpy as np
import pytest
import torch

from flashfx.codegen import gluon, philox

from ..thinning import thinned
from .test_running import run

SEED, Z = -1234567890123456789, 77


class Tensor(np.ndarray):
    """As Gluon's, with every element in one place."""

    def to(self, dtype):
        return self.astype(dtype)

    def reshape(self, shape):
        return np.ndarray.reshape(self, tuple(shape))

    def permute(self, order):
        return self.transpose(order)


def tensor(value, dtype=None) -> Tensor:
    return np.asarray(value, dtype).view(Tensor)


class Threads:
    """A linear layout: which element of a tensor each thread's registers hold."""

    def __init__(self, registers, lanes, warps, blocks, shape):
        places = lambda bases: [np.bitwise_xor.reduce([b for n, b in enumerate(bases) if at >> n & 1] or [[0] * len(shape)]) for at in range(2 ** len(bases))]
        self.lanes, self.shape = len(lanes), shape
        self.at = np.array([[lane ^ register ^ warp for lane in places(lanes)] for warp, register in itertools.product(places(warps), places(registers))])
        self.warp = np.repeat(np.arange(2 ** len(warps)), 2 ** len(registers))


def functions(watch: bool) -> types.SimpleNamespace:
    """Of `gluon.KEEP_TILE`. watch: what is exchanged says instead of bits whose it is."""
    layout: list[Threads] = []

    def linear(*bases):
        layout.append(Threads(*bases))
        return layout[-1]

    def assembled(text, constraints, given, dtype, is_pure, pack):
        threads, kinds = layout[-1], constraints.split(",")
        outputs, operands = sum(kind.startswith("=") for kind in kinds), [np.broadcast_to(x, threads.shape).astype(np.uint32) for x in given]
        found = np.zeros((outputs, *threads.shape), np.uint32)
        for block, warp in zip(threads.at, threads.warp):
            at, registers = tuple(block.T), {}
            for n, x in enumerate(operands):
                registers[f"${outputs + n}"] = x[at].view(np.int32)
            run(text if text.startswith("{") else "{" + text + "}", registers)
            for n in range(outputs):
                found[(n, *at)] = warp * 32 + np.arange(32) if watch else registers[f"${n}"].view(np.uint32)
        return [tensor(x) for x in found]

    same = lambda function: function
    gl = types.SimpleNamespace(
        constexpr=object, uint32=np.uint32, int64=np.int64, int32=np.int32, static_range=range, DistributedLinearLayout=linear, SliceLayout=lambda *_: None,
        BlockedLayout=lambda *_: None, arange=lambda a, b, _: tensor(np.arange(a, b, dtype=np.int32)), zeros=lambda shape, dtype, _: tensor(np.zeros(shape, dtype)),
        join=lambda a, b: np.stack(np.broadcast_arrays(a, b), -1).view(Tensor), convert_layout=lambda x, _: x, inline_asm_elementwise=assembled)
    names = {"gluon": types.SimpleNamespace(jit=same, constexpr_function=same), "gl": gl}
    exec(gluon.KEEP_TILE, names)

    def wide_product(a, FACTOR):
        product = a.astype(np.uint64) * np.uint64(FACTOR)
        return tensor(product.astype(np.uint32)), tensor((product >> np.uint64(32)).astype(np.uint32))
    names["wide_product"] = wide_product
    return types.SimpleNamespace(**names)


def bits(rows: int, columns: int, warps: int, transposed: bool, by_words: bool, a0: int, b0: int, watch: bool = False) -> np.ndarray:
    f = functions(watch)
    seed, z = tensor([SEED], np.int64), tensor([Z], np.int32)
    words = [types.SimpleNamespace(load=lambda _, x=x: x) for x in f.key_words(seed, z, b0, columns)] if by_words else [None, None]
    return f.random_bits(seed, z, a0, b0, 0, *words, rows, columns, warps, transposed, True, None)


SHAPES = [(64, 128, 4, False, False), (64, 64, 4, True, False), (64, 128, 4, False, True), (32, 64, 4, False, False), (64, 32, 4, True, False), (64, 64, 4, False, True), (32, 64, 2, True, False)]


@pytest.mark.parametrize("rows, columns, warps, transposed, by_words", SHAPES)
def test_bits_are_those_of_their_place(rows, columns, warps, transposed, by_words):
    for a0, b0 in ((0, 0), (192, 320), (48, 96)):
        found = bits(rows, columns, warps, transposed, by_words, a0, b0).astype(np.int64)
        halves = torch.from_numpy(np.array(found >> 16 * (np.arange(columns) % 2) & 0x7FFF))  # a thread's two neighbouring columns look at a word's halves
        first, second = torch.arange(rows)[:, None] + a0, torch.arange(columns)[None, :] + b0
        i, j = (second, first) if transposed else (first, second)
        assert torch.equal(halves, philox.random_bits(SEED, torch.tensor(Z), i, j))


@pytest.mark.parametrize("rows, columns, warps, transposed, by_words", thinned([shape for shape in SHAPES if shape[0] == 16 * shape[2]], 2))
def test_bits_lie_where_the_accumulator_has_their_elements(rows, columns, warps, transposed, by_words):
    """So that no thread passes any on but the neighbour that made them (PTX ISA, wgmma, figure of matrix D)."""
    i, j = np.arange(rows)[:, None], np.arange(columns)[None, :]
    assert (bits(rows, columns, warps, transposed, by_words, 0, 0, watch=True) == i // 16 * 32 + i % 8 * 4 + j % 8 // 2).all()
