"""Score and mask programs as Triton text: what depends on the inner loop's index stays in the loop, the rest is hoisted."""
from __future__ import annotations

import contextlib
import keyword
import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import Callable, Iterable

from ..expr import BOOL, FLOAT, INT, QK, Call, Const, Expr, Load, Var, call, nonnegative, substitute, walk
from ..spec import AttentionSpec
from .ramp import ramp
from .writer import Writer

RESERVED = frozenset("""q k v do out lse lse2 delta dq dk dv dp ds qk m l p acc alpha anchor raw m_new empty over weights visible keep
    seed rows cols d e z y g t tile tiles start stop full_start full_stop leading trailing i0 i1 j0 j1 i j M N tl
    some every inside columns row blocks Kinds RowBlocks KeyBlocks RowTiles Cuts KeyEnds window windows cut changed following goes_on begins earlier begin listed larger row_end ends cells row_tile group_seen near near_seen groups_of first_key last_key
    words_ring_0 words_ring_1 words_tile_0 words_tile_1 key_words words_layout random_bits KeyTiles KeyCuts SlotEnds key_end sum0 is_hidden half head cuts_before key_place
    triton torch dense diagonal diagonals all_rows differences value slots end_slot place turned line lines total inside difference length chunks p0 g0 sums beyond upper lower there span shares raw_0 raw_1 place_0 place_1 hidden mean Q K V Out Lse Lse2 Delta Seed dO dQ dK dV gl gluon tma mbarrier barrier
    reduce_add step steps count slot phase full_slot previous scores values rowwise keywise zeros ready turn scale
    row_scale slope first last work turns number own q_slot ticket Taken all groups group size
    rest previous_phase locate q_tile k_tile v_tile out_tile ds_tile dq_tile k_ring v_ring q_ring do_ring lse2_ring
    delta_ring q_full k_full k_empty v_full v_empty kv_full q_empty do_full rows_empty after freeing freeing_phase key0 sum_tile Sum Taken blocks partial_tiles average words kept kept_half positive next_qk next_acc next_dp
    next_dv next_dk next_dq
    front back Turns turn turns seen wanted previous first_before last_before added part parts share PartMax PartSum PartOut part_max part_sum part_out top sums at
    weight parts_of parts_of_rows part_k part_v shared_out combined packed_row kv kv_empty next_count start_ring before group together tile taken lanes lane is_partial is_first is_last told nth
    end work padded next_tile next_number following windows task Order begin is_earlier goes_first other others steps_at others_at mixed is_mixed tell number_at place_in phase_in keys_told rows_told locate_keys dk_tile dv_tile is_cut apart
    lists list_length told_ring place column threads threads_of own_max own_sum across weigh_text weigh_operands weigh_kinds first_of of_threads weighed total raised grown rescaled rescale_text rescale_operands within within_text within_operands ramp ramp_text ramp_operands widened is_row_by_row await_turn pass_turn named_barrier barrier_text leave_rows await_rows own_barrier_text v_held hand_dq await_dq free_place_of_dq await_place_of_dq own_turn exponent exponent_0 exponent_1 p_0 p_1 slope_0 slope_1 bits bits_0 bits_1
    k_rest v_rest p_tile p_rest ds_rest dk_rest dv_rest own_do own_q by_thirds gradients meet third_of_keys third_of_columns K_rest V_rest dK_rest dV_rest next_dv_rest next_dk_rest registers""".split())
"""Names that generated kernels use themselves; an axis, size or tensor of that name gets an underscore."""

HELPERS = {
    "tanh": '''@triton.jit
def tanh(x):
    """From exp: 1 - 2 / (exp(2x) + 1), right at both ends; near 0, where that cancels, the Taylor series."""
    y = x * x
    series = x * (1.0 + y * (-1.0 / 3.0 + y * (2.0 / 15.0 + y * (-17.0 / 315.0 + y * (62.0 / 2835.0)))))
    return tl.where(tl.abs(x) < 0.3, series, 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))''',
    "floor_div": '''@triton.jit
def floor_div(x, y):
    """Rounds down, as Python does; Triton's // rounds towards zero."""
    return x // y - ((x % y != 0) & ((x < 0) != (y < 0))).to(tl.int32)''',
    "floor_mod": '''@triton.jit
def floor_mod(x, y):
    """Has the divisor's sign, as in Python; Triton's % has the dividend's."""
    r = x % y
    return tl.where((r != 0) & ((r < 0) != (y < 0)), r + y, r)''',
}


def local(name: str) -> str:
    """A spec's name as a name in the kernel."""
    return name + "_" if name in RESERVED or keyword.iskeyword(name) or name in HELPERS else name


def literal(value: bool | int | float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return 'float("%s")' % ("nan" if math.isnan(value) else "inf" if value > 0 else "-inf")
    return f"({value!r})" if not isinstance(value, bool) and value < 0 else repr(value)


def pointer(aux: str) -> str:
    return f"{aux}_ptr"


def stride(aux: str, dim: int) -> str:
    return f"stride_{aux}_{dim}"


@dataclass
class Scope:
    """Where text goes: a writer, and the names already assigned there."""

    out: Writer
    names: dict[Expr, str]


class Program:
    """Writes values of one kernel.

    outer    writer above the loops
    inner    the loop's index, "i" or "j"; "" if there is no loop and both are fixed
    columns  the index that runs along the tile's second dimension
    varying  batch axes that change inside the loop; what depends on them is not hoisted
    packed   batch axes whose indices are vectors over the rows, as i is
    beside   another program of the same kernel: their names differ
    nearest  indices that may lie outside, where tiles of captured tensors read the last element instead of asking: what is there is hidden
    """

    def __init__(self, spec: AttentionSpec, outer: Writer, inner: str, columns: str = "j", varying: Iterable[str] = (),
                 beside: Program | None = None, packed: Iterable[str] = (), nearest: Iterable[str] = ()):
        self.spec, self.inner, self.columns, self.varying, self.packed = spec, inner, columns, frozenset(varying), frozenset(packed)
        self.nearest = {Var(x): call("minimum", Var(x), call("sub", Var("M" if x == "i" else "N"), 1)) for x in nearest}
        self.outer = Scope(outer, {})
        self.body: Scope | None = None
        self.certain: frozenset[str] = frozenset()
        self.uses: Counter = Counter()
        self.known: dict[Expr, str] = {}  # values that are there before any loop
        self.others: dict[Load, str] = {}  # what loads read beyond the end, where that is not 0
        self.latest = ""  # a number of the loop, not negative: what sizes alone make is made of it too where nothing is kept, see `late`
        self.ramps = False  # do values that rise along the columns come by the layout of the products qk? See `ramp`
        self.withholds = False  # strides until a batch index is known: their signs would be kept from before all partitions, see `late`
        self._serial: Counter = Counter() if beside is None else beside._serial

    def enter(self, out: Writer, roots: Iterable[Expr], certain: Iterable[str] = ()) -> None:
        """Begin a loop body that will write `roots`; `certain` are the indices that need no bounds check in it."""
        self.body = Scope(out, {})
        self.certain = frozenset(certain)
        self.uses = Counter()
        for node in {n: None for root in roots for n in walk(root)}:
            self.uses.update(node.args_())
        self.uses.update(roots)

    def read_tiles(self, which: Callable[[Load], bool]) -> None:
        """Read now what has an element for every query and key, of the tensors in question."""
        for load in [e for e in self.uses if isinstance(e, Load) and len(self.dims(e)) == 2 and which(e)]:
            self.value(load)

    def here(self, out: Writer) -> Program:
        """A program of the same kernel that writes everything where it is, and keeps nothing for later."""
        program = Program(self.spec, out, "", self.columns, beside=self, packed=self.packed)
        program.latest, program.withholds = self.latest, self.withholds
        program.enter(out, [], "ij")
        return program

    @contextlib.contextmanager
    def branch(self):
        """Names assigned in a branch of the loop's body are unknown after it."""
        before = dict(self.body.names)
        yield
        self.body.names = before

    def forget_rows(self) -> None:
        """Vectors over rows assigned in the loop's body are unknown from here on."""
        self.body.names = {e: name for e, name in self.body.names.items() if self.dims(e) != {"i"}}

    # shapes

    def dims(self, e: Expr) -> frozenset[str]:
        """Which of i and j a value's shape has."""
        return e.variables & {"i", "j"} | ({"i"} if self.packed & e.variables else set())

    def spread(self, text: str, dims: frozenset[str]) -> str:
        """A vector as a row or a column of the tile; scalars and tiles as they are."""
        if len(dims) != 1:
            return text
        return f"{text}[None, :]" if self.columns in dims else f"{text}[:, None]"

    def tile(self, e: Expr) -> str:
        """Text of `e` in a shape that broadcasts to the tile."""
        if self.ramps and self.dims(e) == {self.columns} and (text := ramp(self, e)):
            return text
        return self.spread(self.value(e), self.dims(e))

    def _scope(self, e: Expr) -> Scope:
        depends = not self.inner or self.inner in self.dims(e) or bool(self.varying & e.variables)
        return self.body if depends and self.body is not None else self.outer

    # values

    def value(self, e: Expr) -> str:
        """Text of `e` in its own shape: a scalar, a vector over i or j, or a tile."""
        if isinstance(e, Const):
            return literal(e.value)
        if isinstance(e, Var):
            if e.name in ("M", "N") and self.latest and not self.inner:
                return f"late({e.name}, {self.latest})"
            return e.name if e.name in ("i", "j", "i0", "i1", "j0", "j1", "M", "N") else local(e.name)
        if e == QK:
            return "qk"
        scope = self._scope(e)
        if e in scope.names or e in self.known:
            return scope.names.get(e) or self.known[e]
        if isinstance(e, Load):
            return self._name(scope, e, f"{e.name}_value", self._load(e, scope))
        text = self._call(e)
        hoisted = scope is self.outer and self.body is not None
        if hoisted or self.uses[e] > 1:
            kind = {0: "scalar", 1: "row_term" if "i" in self.dims(e) else "column_term", 2: f"{e.op}_tile"}[len(self.dims(e))]
            return self._name(scope, e, kind, text)
        return text

    def _name(self, scope: Scope, e: Expr, base: str, text: str) -> str:
        self._serial[base] += 1
        name = base if self._serial[base] == 1 else f"{base}_{self._serial[base]}"
        scope.names[e] = scope.out.assign(name, text)
        return name

    def _call(self, e: Call) -> str:
        dims = self.dims(e)
        if self.ramps and len(dims) == 2 and (text := ramp(self, e)):
            return text
        texts = []
        for a in e.args:
            text = self.tile(a) if len(dims) == 2 else self.value(a)
            if e.row.cost == "mufu" and a.kind != FLOAT:
                text = f"tl.cast({text}, tl.float32)"
            texts.append(text)
        if e.op in ("floordiv", "mod") and e.kind == INT and all(nonnegative(a) for a in e.args):
            return f"({texts[0]} {'//' if e.op == 'floordiv' else '%'} {texts[1]})"
        if e.op == "floordiv" and e.kind == FLOAT:
            return f"tl.floor({texts[0]} / {texts[1]})"
        if e.op == "mod" and e.kind == FLOAT:
            return f"({texts[0]} - tl.floor({texts[0]} / {texts[1]}) * {texts[1]})"
        return e.row.triton.format(**dict(zip("xyz", texts)))

    def condition(self, dims: Iterable[str]) -> list[str]:
        """Bounds checks, each in a shape that broadcasts to the tile, for the indices that may lie outside."""
        return [self.spread(f"({x} < {'M' if x == 'i' else 'N'})", frozenset(x)) for x in dims]

    def _load(self, load: Load, scope: Scope) -> str:
        dims = self.dims(load)
        nearest = self.nearest if len(dims) == 2 and all(len(self.dims(a)) < 2 for a in load.index) else {}
        scalar, vectors, tiles = [], {"i": [], "j": []}, []
        for position, index in enumerate(load.index):
            step, own = stride(load.name, position), self.dims(index)
            index = substitute(index, nearest) if nearest else index
            if len(own) == 2:
                tiles.append(f"{self.value(index)} * {step}")
            elif isinstance(index, Const):
                if index.value:
                    scalar.append(f"{literal(index.value)} * {step}")
            else:  # 64 bits: batch offsets, and rows of an N x N bias, pass 2**31
                target = vectors[next(iter(own))] if own else scalar
                target.append(self.offset(load.name, position, index))
        address = pointer(load.name)
        if self.latest and not self.inner and not dims:
            address = f"{address} + late(0, {self.latest})"
        if scalar:
            address = " + ".join([address, *scalar])
        fixed = [x for x in ("i", "j") if vectors[x] and x != self.inner]
        moving = [x for x in ("i", "j") if vectors[x] and x == self.inner]
        moves = self.varying & frozenset().union(*(a.variables for a in load.index if self.inner not in self.dims(a)))
        if scope is self.body and (scalar or fixed) and not moves:  # the part of the address that does not move with the loop, if there is one
            key, above = Load(load.name, (*load.index, Const(True)), load.kind), self.outer if self.inner else self.body
            if key not in above.names:
                parts = [address, *(self._shaped(" + ".join(vectors[x]), x, dims) for x in fixed)]
                self._name(above, key, f"{load.name}_base", " + ".join(parts))
            address, fixed = above.names[key], []
        parts = [address, *(self._shaped(" + ".join(vectors[x]), x, dims) for x in (*fixed, *moving)), *tiles]
        checked = [x for x in sorted(dims) if x not in (self.certain if scope is self.body else ()) and Var(x) not in nearest]
        conditions = self.condition(checked) if len(dims) == 2 else [f"{x} < {'M' if x == 'i' else 'N'}" for x in checked]
        mask = f", mask={' & '.join(conditions)}, other={self.others.get(load, '0')}" if conditions else ""
        text = f"tl.load({' + '.join(parts)}{mask})"
        return f"{text}.to(tl.float32)" if load.kind == FLOAT else f"({text} != 0)" if load.kind == BOOL else text

    def offset(self, name: str, position: int, index: Expr) -> str:
        """Of an index along one dimension of a captured tensor, in elements, 64 bits."""
        text, step = self.value(index), stride(name, position)
        if self.withholds and isinstance(index, Var) and not self.dims(index):
            step = f"late({step}, {text})"
        return f"tl.cast({text}, tl.int64) * {step}"

    def _shaped(self, text: str, x: str, dims: frozenset[str]) -> str:
        return self.spread(f"({text})", frozenset(x)) if len(dims) == 2 else text


FAST_TANH = '''@triton.jit
def tanh(x):
    """From exp: 1 - 2 / (exp(2x) + 1), within 2e-7, which 16-bit operands cannot see."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)'''
NATIVE_TANH = '''@triton.jit
def tanh(x):
    """The card's own instruction, within 2**-10.9 of the value (PTX ISA): no more than a 16-bit score is rounded by."""
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)'''


def helpers(text: str, exact: bool, native: bool = False) -> list[str]:
    """Definitions of the helper functions that `text` calls. exact: float32 operands, where 2e-7 would show; native: the card has a tanh."""
    table = HELPERS if exact else HELPERS | {"tanh": NATIVE_TANH if native else FAST_TANH}
    return [definition for name, definition in table.items() if is_called(text, name)]


def is_called(text: str, name: str) -> bool:
    """Is the function of this name called in a text? `tl.tanh(` is another, and so is `accumulate(` for `late`."""
    return re.search(rf"(?<![\w.]){name}\(", text) is not None
