"""Tensors gathered at a position that depends on j - i alone: relative position tables, bucketed (T5) or clipped (Shaw et al. 2018).

The buckets come from float arithmetic and casts in most models, which a kernel may not repeat: a rounding difference picks another bucket. So the
graph goes on computing them, by the same calls in the same order, but for each of the M + N - 1 differences rather than for M x N pairs. The
kernel reads the short table, and the gradient of the model's own is autograd's, over M + N - 1 rows.

Far positions share a bucket. Between which differences they do not is found at run time, from the buckets themselves, and stands in the score: tiles
that lie beyond read one number instead of one for each element, and the gradient of the table's ends is a sum over whole tiles.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flashfx.expr import Const, Expr, call
from flashfx.ops import COMPARISONS
from flashfx.spec import DIFFERENCE

from .index import Affine, Index, NotAffine, Size, SplitAxis, broadcast, same, size
from .maker import Maker, aten
from .rules import RANDOM
from .values import Value
from .views import step_through

if TYPE_CHECKING:
    from .pull import Puller

_FILLS = {"full_like.default": lambda v: v.args[1], "full.default": lambda v: v.args[1], "new_full.default": lambda v: v.args[2],
          **dict.fromkeys(("zeros.default", "zeros_like.default", "new_zeros.default"), lambda v: 0),
          **dict.fromkeys(("ones.default", "ones_like.default", "new_ones.default"), lambda v: 1)}
_INTEGERS = {torch.int32, torch.int64}
_BY_ELEMENT = ("_to_copy.default", "floor_divide.default")
"""Pointwise ops that PyTorch does not tag as such."""


def gathered(p: Puller, v: Value, x: Index) -> Expr | None:
    """Element `x` of a tensor gathered at one tensor of positions, as a load of one with an element for each j - i; None where that is not known,
    or saves nothing.

    before -> after: table[bucket(j - i)][i, j, h] -> rel[h, minimum(maximum(j - i + M - 1, ends[0]), ends[1])], where
                     rel = table[bucket(arange(-(M - 1), N))].permute(1, 0)
    """
    rows, keys = p.extents.get("i"), p.extents.get("j")
    if v.name == "gather.default":
        _note_difference(p, v, x)
    found = _one_gather(v)
    if found is None or p.held is None or None in (rows, keys) or same(rows, 1) or same(keys, 1):
        return None
    source, dim, picks = found
    own, rest = x[dim: dim + len(picks.shape)], x[:dim] + x[dim + len(picks.shape):]
    if any({"i", "j"} & a.axes for a in rest) or source.dtype.is_floating_point and p.has_product(source):
        return None
    known = p.held.vg.relative
    key = (v, own, rows, keys)
    if key not in known:
        lines = _Lines(p, v)
        line = lines.of(picks, own)
        known[key] = None if line is None or not lines.is_line(line) else (
            lines.gather(v, source, dim, line), lines.ends(line) if source.dtype.is_floating_point else None)
        p.held.vg.forget_users()
    if known[key] is None:
        return None
    short, ends = known[key]
    return p.load(short, [*(p.expr(a) for a in rest), DIFFERENCE if ends is None else _clamped(p, ends)])


def _note_difference(p: Puller, v: Value, x: Index) -> None:
    """Note a gather along the keys, row by row, whose positions depend on j - i alone and which is differentiated (`ValueGraph.differences`).

    Of 16 bits: float32 is added atomically by the memory itself, as fast up to 1000 keys (H200, `flashfx/differences.py`).

    before -> after: torch.gather(source, -1, bucket(j - i)) -> flashfx::gather_by_difference(source, bucket(arange(-(M - 1), N)), N)
    """
    source, dim, picks = v.args[:3]
    axes = [a.single for a in x[-2:]]
    if p.held is None or v in p.held.vg.differences or not (p.grad and v.grad) or sorted(map(str, axes)) != ["i", "j"] or dim % len(v.shape) != len(v.shape) - 1:
        return
    whole = all(same(size(s), p.extents[name]) for s, name in zip(v.shape[-2:], axes)) and all(same(size(a), size(b)) for a, b in zip(source.shape[:-1], v.shape[:-1]))
    if not whole or any(same(p.extents[name], 1) for name in axes) or source.dtype not in (torch.float16, torch.bfloat16) or not source.reaches_parameters(through_stops=False):
        return
    lines = _Lines(p, v)
    line = lines.of(picks, x)
    if line is None or not lines.is_line(line):
        return
    p.held.vg.differences[v] = source, line if axes[0] == "i" else lines.make(aten.flip.default, line, [0])
    p.held.vg.forget_users()


def _clamped(p: Puller, ends: Value) -> Expr:
    """The position of j - i, those beyond the ends as the ends themselves."""
    first, last = (p.load(ends, [Const(n)]) for n in range(2))
    p.named[first.name] = "ends"
    return call("minimum", call("maximum", DIFFERENCE, first), last)


def _one_gather(v: Value) -> tuple[Value, int, Value] | None:
    """(source, dim, positions) where `v` is `source` gathered along one dim."""
    if v.name == "embedding.default":  # gradients that count how often a row is read, or hold those rows alone, would be others
        return None if any(v.args[3:]) or v.kwargs else (v.args[0], 0, v.args[1])
    if v.name == "index_select.default":
        return v.args[0], v.args[1] % len(v.shape), v.args[2]
    if v.name == "index.Tensor":
        given = [(d, t) for d, t in enumerate(v.args[1]) if t is not None]
        if len(given) == 1 and given[0][1].dtype != torch.bool:
            return v.args[0], *given[0]
    return None


class _Lines:
    """`of(v, x)`: a tensor whose element j - i + M - 1 is v[x], of the calls that made v; of extent 1 where i and j do not matter."""

    def __init__(self, p: Puller, v: Value):
        self.p, self.make = p, Maker(p.held.vg, v)
        self.rows, self.keys = p.extents["i"], p.extents["j"]
        self.known: dict[tuple[Value, Index], Value | None] = {}

    def is_line(self, v: Value) -> bool:
        return len(v.shape) == 1 and same(size(v.shape[0]), self.rows + self.keys - 1)

    def of(self, v: Value, x: Index) -> Value | None:
        if (v, x) not in self.known:
            made = self._of(v, x)
            fits = made is not None and (made.dtype, made.fake.device) == (v.dtype, v.fake.device) and \
                (made is v or self.is_line(made) or len(made.shape) == 1 and same(size(made.shape[0]), 1))
            self.known[v, x] = made if fits else None
        return self.known[v, x]

    def gather(self, v: Value, source: Value, dim: int, line: Value) -> Value:
        """What `v` gathers, at `line`, with the positions in the last dim.

        Thousands of differences share a bucket: in half precision the table's gradient would be their sum rounded after every addition
        (and Inductor's atomic additions of it the slowest kernel by far), so what has 16 bits is gathered as float32.
        """
        dtype = source.dtype
        if dtype in (torch.float16, torch.bfloat16):
            source = self.make(aten._to_copy.default, source, dtype=torch.float32)
        args = {"embedding.default": (source, line, *v.args[2:]), "index_select.default": (source, dim, line)}
        short = self.make(v.op, *args.get(v.name, (source, [None] * dim + [line])))
        if short.dtype != dtype:
            short = self.make(aten._to_copy.default, short, dtype=dtype)
        rank = len(source.shape)
        if dim == rank - 1:
            return short
        turned = self.make(aten.permute.default, short, [*(d for d in range(rank) if d != dim), dim])
        return self.make(aten.clone.default, turned, memory_format=torch.contiguous_format)

    def ends(self, line: Value) -> Value:
        """Two int32: up to which place all of `line` is its first element, and from which on its last. Of the positions, not of what is gathered
        there: rows of a table that are equal today have gradients of their own.

        before -> after: [5, 5, 5, 0, 1, 2, 2] -> [2, 5]; [5, 5] -> [1, 0]
        """
        make = self.make
        at = make(aten.arange.default, self._number(self.rows + self.keys - 1), dtype=torch.int32, device=line.fake.device)
        one = lambda start: make(aten.slice.Tensor, line, 0, *start)
        changed, before = (make(aten.ne.Tensor, line, end) for end in (one((0, 1)), one((-1,))))
        first = make(aten.where.self, changed, make(aten.sub.Tensor, at, 1), make(aten.slice.Tensor, at, 0, -1))
        last = make(aten.where.self, before, make(aten.add.Tensor, at, 1), make(aten.zeros_like.default, at))
        return make(aten.stack.default, [make(aten.amin.default, first), make(aten.amax.default, last)])

    def _of(self, v: Value, x: Index) -> Value | None:
        if not v.shape:  # a tensor without dims stays one: types are promoted by it in other ways
            return v
        if v.name in _FILLS:
            return self.make(aten.full.default, [1], _FILLS[v.name](v), dtype=v.dtype, device=v.fake.device)
        for exact in (self._affine, self._compared):
            if (line := exact(v, x)) is not None:
                return line
        try:
            through = step_through(v, x, self.p.extents)
        except (NotAffine, SplitAxis):
            return None
        if through is not None:
            return self.of(*through)
        if v.op is None or RANDOM in v.op.tags or not (torch.Tag.pointwise in v.op.tags or v.name in _BY_ELEMENT):
            return None
        inputs = {a: self.of(a, broadcast(x, [size(s) for s in a.shape])) for a in v.inputs}
        if None in inputs.values():
            return None
        args, kwargs = torch.utils._pytree.tree_map_only(Value, inputs.__getitem__, (v.args, dict(v.kwargs)))
        kwargs.pop("memory_format", None)
        return self.make(v.op, *args, **kwargs)

    def _compared(self, v: Value, x: Index) -> Value | None:
        """before -> after: j > i -> j - i > 0, of integers"""
        name, kinds = v.name.partition(".")[0], {a.dtype for a in v.inputs}
        if name not in COMPARISONS or not kinds <= _INTEGERS or self.p.has_product(v):
            return None
        a, b = (self.p.affine(self.p.operand(side, x)) for side in v.args)
        line = None if a is None or b is None else self._line(a + b * -1, torch.int64, v.fake.device)
        return None if line is None else self.make(getattr(aten, name).Scalar, line, 0)

    def _affine(self, v: Value, x: Index) -> Value | None:
        """An integer c * (j - i) + constant."""
        a = None if v.dtype not in _INTEGERS or self.p.has_product(v) else self.p.affine(self.p.pull(v, x))
        return None if a is None else self._line(a, v.dtype, v.fake.device)

    def _line(self, a: Affine, dtype: torch.dtype, device: torch.device) -> Value | None:
        terms, constant, options = dict(a.terms), self._number(a.constant), {"dtype": dtype, "device": device}
        if not terms:
            return self.make(aten.full.default, [1], constant, **options)
        by = terms.get("j")
        if not isinstance(by, int) or terms != {"i": -by, "j": by}:
            return None
        line = self.make(aten.arange.start, self._number(self.rows * -1 + 1), self._number(self.keys), **options)
        line = line if by == 1 else self.make(aten.mul.Tensor, line, by)
        return line if same(a.constant, 0) else self.make(aten.add.Tensor, line, constant)

    def _number(self, s: Size) -> int | torch.SymInt:
        s = size(s)
        return s if isinstance(s, int) else self.p.held.vg.shape_env.create_symintnode(s, hint=None)
