"""How a portable kernel reads what its spec captures: ahead, through registers, and behind which other loads."""
from __future__ import annotations

import functools
from typing import Iterable

from ..expr import QK, Expr, Load, Var
from ..region import Problem
from ..spec import BLOCK, AttentionSpec
from .ranges import never_empty


ROW = 16
"""Rows of so many elements, or a multiple, begin where 16 bytes at a time can be copied: what Triton knows of a stride is that 16 divides it."""


@functools.lru_cache(maxsize=1024)
def across(spec: AttentionSpec, cut: bool = True) -> tuple[Load, ...]:
    """Reads of tensors with an element for every query and key. cut: is the mask evaluated?"""
    return tuple(load for load in (spec.loads if cut else spec.score.loads) if {"i", "j"} <= load.variables)


@functools.lru_cache(maxsize=4096)
def vectors(kernel: str, spec: AttentionSpec, cut: bool) -> tuple[str, ...]:
    """Kinds of what a loop reads at its own index alone. cut: is the mask evaluated in it?"""
    inner = {"i" if kernel == "keys" else "j"}
    return tuple(load.kind for load in dict.fromkeys(spec.loads if cut else spec.score.loads) if load.variables & {"i", "j"} == inner)


@functools.cache
def is_gathered(load: Load) -> bool:
    """Is a table read at a position that each element computes? Then values come through registers; 32 of a row are exchanged at once."""
    return load.kind == "float" and not any({"i", "j"} & x.variables for x in load.index if isinstance(x, Var)) and all(
        not {"i", "j"} & inner.variables for x in load.index for inner in x.loads)


def is_exchanged(load: Load, kernel: str, problem: Problem) -> bool:
    """Do values of a tensor read across come through registers? So they do, one by one, where its rows are of no multiple of `ROW` elements."""
    return is_gathered(load) or kernel in ("forward", "rows") and problem.N % ROW > 0


@functools.lru_cache(maxsize=4096)
def averages(spec: AttentionSpec, wide: bool = False) -> bool:
    """May there be rows that see no key and average v? wide: M <= N is known."""
    return spec.is_masked and spec.empty_row.averages and not never_empty(spec.visible, wide)


@functools.lru_cache(maxsize=4096)
def told(kernel: str, spec: AttentionSpec, problem: Problem, cut: bool, one: bool) -> bool:
    """In a loop over listed tiles: do weights reach the tile's place through a load first, as q . k does? Then the pipeliner sees it as far from all
    products (loadOpToIndLevel in its AssignLatencies.cpp), and a stage reads places ahead; else none does. It visits operands in order, and sees
    nothing behind loads that are not copied ahead, such as those of a vector of booleans. cut: is the mask evaluated? one: has a thread one element
    of a vector?"""
    keys, mean = kernel == "keys", averages(spec, problem.M <= problem.N)
    if kernel != "rows" and spec.dropout or cut and not keys and problem.N % BLOCK:
        return False  # random bits are made of the place itself, as is j < N
    if cut and keys and mean:
        return True  # through what marks such rows
    order = ([spec.empty_over] if mean and kernel == "rows" else []) + [spec.visible] if cut else []

    def through(e: Expr) -> bool | None:
        """None: the place is not found."""
        if e == QK:
            return True
        if ("i" if keys else "j") not in e.variables:
            return None
        if isinstance(e, Load):
            vector = e.kind == "int" or e.kind == "float" and not one
            return (not keys and not is_exchanged(e, kernel, problem) if {"i", "j"} <= e.variables else vector) or None
        return False if isinstance(e, Var) else first(e.args_())

    def first(visited: Iterable[Expr]) -> bool | None:
        return next((found for found in map(through, visited) if found is not None), None)

    return first((*order, spec.score)) is not False
