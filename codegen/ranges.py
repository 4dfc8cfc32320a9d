"""Which keys a tile of query rows can see at all, and which it sees for certain; and the same for a tile of keys.

`bounds(visible, "j")` reads the mask once and returns four scalar programs over `i0`, `i1` (first and last row of the tile), the
batch indices, the sizes and such loads as depend on neither i nor j:

    hull   lo <= j < hi        holds for every j that some row of the tile sees
    full   flo <= j < fhi      implies that every row of the tile sees j

The kernels skip what lies outside the hull and evaluate no predicate inside the full range. Rules: a conjunction intersects, a
disjunction takes the hull (or the longer of two full ranges), a negation exchanges the two, a comparison is solved for j. What
cannot be solved is visible somewhere (hull: everything) and certain nowhere (full: nothing): always sound, never a guess.
"""
from __future__ import annotations

import functools
from dataclasses import dataclass

from ..expr import FLOAT, INT, Call, Const, Expr, Var, call, is_const, nonnegative, substitute
from ..ops import COMPARISONS

Sum = tuple[dict[Expr, int], int]
"""Integer multiples of atoms, and a constant."""
TILE = {"j": ("i", "i0", "i1", "N"), "i": ("j", "j0", "j1", "M")}
"""For the solved index: the tile's index, the names of its first and last element, the solved index' size."""


@dataclass(frozen=True)
class Interval:
    """lo <= x < hi; None is unbounded."""

    lo: Expr | None = None
    hi: Expr | None = None


EVERYTHING = Interval()
NOTHING = Interval(Const(0), Const(0))


@dataclass(frozen=True)
class Range:
    """What one condition allows: `hull` holds every index it can allow, `full` only ones it surely allows."""

    hull: Interval
    full: Interval


UNKNOWN = Range(EVERYTHING, NOTHING)
ALWAYS = Range(EVERYTHING, EVERYTHING)
NEVER = Range(NOTHING, NOTHING)


@dataclass(frozen=True)
class Bounds:
    """Closed form of a mask's range in one direction; see the module's docstring. All four lie in [0, size]."""

    lo: Expr
    hi: Expr
    full_lo: Expr
    full_hi: Expr

    @functools.cached_property
    def has_full(self) -> bool:
        """Can there be tiles without a predicate at all?"""
        return not is_const(self.full_hi, 0)

    @functools.cached_property
    def is_total(self) -> bool:
        """Is everything visible?"""
        return is_const(self.lo, 0) and is_const(self.full_lo, 0) and self.hi == self.full_hi and self.hi in (Var("N"), Var("M"))

    @functools.cached_property
    def starts_full(self) -> bool:
        """Do the partial tiles all lie behind the full ones?"""
        return is_const(self.lo, 0) and is_const(self.full_lo, 0) and self.has_full

    @functools.cached_property
    def grows(self) -> bool:
        """Of keys: do later tiles of rows see further ones (causal masks)? Then they start first, and short ones fill the gaps."""
        return Var("i1") in self.hi.leaves

    @functools.cached_property
    def only_grows(self) -> bool:
        """And all that rows before them see (no window)?"""
        return self.grows and not {"i0", "i1"} & self.lo.variables

    @functools.cached_property
    def shrinks(self) -> bool:
        """Of rows: do later tiles of keys have fewer that see them, to the last (causal masks)? Then the first tiles start first."""
        return Var("j0") in self.lo.leaves and self.hi == Var("M")


# ------------------------------------------------------------------------------------------- small algebra on integers

def _extreme(op: str, a: Expr, b: Expr) -> Expr:
    if isinstance(a, Const) and isinstance(b, Const):
        return Const((max if op == "maximum" else min)(a.value, b.value))
    for x, y in ((a, b), (b, a)):
        if is_const(x, 0) and nonnegative(y):
            return y if op == "maximum" else x
    return a if a == b else call(op, a, b)


def largest(a: Expr, b: Expr) -> Expr:
    return _extreme("maximum", a, b)


def smallest(a: Expr, b: Expr) -> Expr:
    return _extreme("minimum", a, b)


def linear(e: Expr, less: Expr | None = None) -> Sum:
    """`e`, or `e - less`, as a sum of integer multiples of atoms plus a constant; atoms are whatever is not +, -, * by a constant."""
    terms: dict[Expr, int] = {}
    constant = 0

    def go(x: Expr, c: int) -> None:
        nonlocal constant
        if isinstance(x, Const):
            constant += c * int(x.value)
        elif isinstance(x, Call) and x.op in ("add", "sub"):
            go(x.args[0], c)
            go(x.args[1], c if x.op == "add" else -c)
        elif isinstance(x, Call) and x.op == "neg":
            go(x.args[0], -c)
        elif isinstance(x, Call) and x.op == "mul" and any(isinstance(a, Const) for a in x.args):
            a, b = x.args
            go(b, c * a.value) if isinstance(a, Const) else go(a, c * b.value)
        else:
            terms[x] = terms.get(x, 0) + c

    go(e, 1)
    if less is not None:
        go(less, -1)
    return {x: c for x, c in terms.items() if c}, constant


def unlinear(terms: dict[Expr, int], constant: int) -> Expr:
    """The inverse of `linear`, positive terms first."""
    out: Expr | None = None
    for x, c in sorted(terms.items(), key=lambda t: (t[1] < 0, str(t[0]))) if len(terms) > 1 else terms.items():
        part = x if abs(c) == 1 else call("mul", x, abs(c))
        out = (part if c > 0 else call("neg", part)) if out is None else call("add" if c > 0 else "sub", out, part)
    if out is None:
        return Const(constant)
    return call("add", out, constant) if constant > 0 else call("sub", out, -constant) if constant < 0 else out


def proves(condition: Expr) -> bool:
    """Does the condition hold for all non-negative values of its variables? Sound, not complete."""
    if isinstance(condition, Const):
        return bool(condition.value)
    if isinstance(condition, Call):
        a = condition.args[0]
        b = condition.args[-1]
        if condition.op == "and":
            return proves(a) and proves(b)
        if condition.op == "or":
            return proves(a) or proves(b)
        if condition.op in ("le", "lt", "ge", "gt") and a.kind == b.kind == INT:
            small, big = (a, b) if condition.op in ("le", "lt") else (b, a)
            terms, constant = linear(call("sub", big, small))
            slack = constant - (condition.op in ("lt", "gt"))
            return slack >= 0 and all(c > 0 and nonnegative(x) for x, c in terms.items())
    return False


def never_empty(visible: Expr, wide: bool = False) -> bool:
    """Does every row surely see a key, given N >= 1? Tried with the first key and, if M <= N (`wide`), with the row's own."""
    if wide:
        visible = substitute(visible, {Var("N"): call("add", Var("M"), Var("N - M"))})
    own = wide and proves(substitute(visible, {Var("j"): Var("i")}))
    return own or proves(substitute(visible, {Var("j"): Const(0)}))


def not_behind(hi: Expr) -> bool:
    """Does the range of keys that a tile of rows sees surely end with the last row's own key?"""
    if isinstance(hi, Call) and hi.op == "minimum":
        return any(map(not_behind, hi.args))
    return hi == call("add", Var("i1"), Const(1))


# ------------------------------------------------------------------------------------------------------- the solver

def _intersect(a: Interval, b: Interval) -> Interval:
    if NOTHING in (a, b):
        return NOTHING
    return Interval(b.lo if a.lo is None else a.lo if b.lo is None else largest(a.lo, b.lo),
                    b.hi if a.hi is None else a.hi if b.hi is None else smallest(a.hi, b.hi))


class _Solver:
    """Solves conditions for the index `var` over a tile of the other index."""

    def __init__(self, var: str):
        self.var = var
        self.tile, first, last, size = TILE[var]
        self.first, self.last, self.size = Var(first), Var(last), Var(size)

    # intervals

    def _closed(self, a: Interval) -> tuple[Expr, Expr]:
        return Const(0) if a.lo is None else a.lo, self.size if a.hi is None else a.hi

    def _longer(self, a: Interval, b: Interval) -> Interval:
        if NOTHING in (a, b):
            return b if a == NOTHING else a
        if a.lo == b.lo:
            return Interval(a.lo, None if None in (a.hi, b.hi) else largest(a.hi, b.hi))
        if a.hi == b.hi:
            return Interval(None if None in (a.lo, b.lo) else smallest(a.lo, b.lo), a.hi)
        (alo, ahi), (blo, bhi) = self._closed(a), self._closed(b)
        pick = call("ge", call("sub", ahi, alo), call("sub", bhi, blo))
        lo, hi = call("where", pick, alo, blo), call("where", pick, ahi, bhi)
        return Interval(lo, hi) if lo.nodes + hi.nodes <= 500 else a  # each holds all four: of twenty, one after the other, the text would have no end

    def _given(self, condition: Expr) -> Interval:
        """Everything if the scalar condition holds, else nothing."""
        if_it_does = NOTHING if isinstance(condition, Const) else Interval(None, call("where", condition, self.size, 0))
        return EVERYTHING if proves(condition) else if_it_does

    def _low(self, a: Interval) -> Expr | None:
        """Where it begins; what `_given` leaves empty begins behind the end, so that a union with it begins where the other does."""
        if a.lo is None and isinstance(a.hi, Call) and a.hi.op == "where" and a.hi.args[1:] == (self.size, Const(0)):
            return call("where", a.hi.args[0], 0, self.size)
        return a.lo

    # logic

    def both(self, a: Range, b: Range) -> Range:
        return Range(_intersect(a.hull, b.hull), _intersect(a.full, b.full))

    def either(self, a: Range, b: Range) -> Range:
        if NOTHING in (a.hull, b.hull):
            return b if a.hull == NOTHING else a
        lows = self._low(a.hull), self._low(b.hull)
        hull = Interval(None if None in lows else smallest(*lows),
                        None if None in (a.hull.hi, b.hull.hi) else largest(a.hull.hi, b.hull.hi))
        return Range(hull, self._longer(a.full, b.full))

    def negation(self, a: Range) -> Range:
        def outside(x: Interval, keep_longer: bool) -> Interval:
            if x == NOTHING:
                return EVERYTHING
            if x.lo is None and x.hi is None:
                return NOTHING
            if x.lo is None or x.hi is None:
                return Interval(x.hi, None) if x.lo is None else Interval(None, x.lo)
            return self._longer(Interval(None, x.lo), Interval(x.hi, None)) if keep_longer else EVERYTHING
        return Range(outside(a.full, False), outside(a.hull, True))

    def solve(self, e: Expr) -> Range:
        if isinstance(e, Const):
            return ALWAYS if e.value else NEVER
        if not {"i", "j"} & e.variables:
            if any(load.kind == FLOAT for load in e.loads):
                return UNKNOWN
            return Range(self._given(e), self._given(e))
        if not isinstance(e, Call):
            return UNKNOWN
        if e.op in ("and", "or"):
            return (self.both if e.op == "and" else self.either)(self.solve(e.args[0]), self.solve(e.args[1]))
        if e.op == "not":
            return self.negation(self.solve(e.args[0]))
        if e.op == "where":
            c, a, b = e.args
            return self.solve(call("or", call("and", c, a), call("and", call("not", c), b)))
        if e.op in COMPARISONS and all(a.kind == INT for a in e.args):
            a, b = e.args
            match e.op:
                case "le": return self.at_most(a, b)
                case "lt": return self.at_most(a, b, 1)
                case "ge": return self.at_most(b, a)
                case "gt": return self.at_most(b, a, 1)
            equal = self.both(self.at_most(a, b), self.at_most(b, a))
            return equal if e.op == "eq" else self.negation(equal)
        return UNKNOWN

    # comparisons

    def at_most(self, a: Expr, b: Expr, more: int = 0) -> Range:
        """a + more <= b."""
        terms, constant = linear(a, b)
        constant += more
        mine = [x for x in terms if self.var in x.variables]
        if not mine:
            low, high = self.ends((terms, constant))
            holds_somewhere = EVERYTHING if low is None else self._given(call("le", low, 0))
            holds_everywhere = NOTHING if high is None else self._given(call("le", high, 0))
            return Range(holds_somewhere, holds_everywhere)
        if len(mine) > 1:
            return UNKNOWN
        atom, c = mine[0], terms.pop(mine[0])
        if c == -1:
            return self.atom_at_least(atom, (terms, constant))
        negative = _scaled((terms, constant), -1)
        if abs(c) > 1:
            negative = linear(call("floordiv", unlinear(*negative), abs(c)))
        return self.atom_at_most(atom, negative) if c > 0 else self.atom_at_least(atom, _scaled(negative, -1))

    def atom_at_most(self, atom: Expr, limit: Sum) -> Range:
        if isinstance(atom, Var):
            low, high = self.ends(limit, 1)
            return Range(Interval(None, high), NOTHING if low is None else Interval(None, low))
        if isinstance(atom, Call):
            x, y, t = atom.args[0], atom.args[-1], unlinear(*limit)
            if atom.op == "floordiv" and isinstance(y, Const) and y.value > 0:
                return self.at_most(x, call("add", call("mul", t, y), y.value - 1))
            if atom.op == "abs":
                return self.both(self.at_most(x, t), self.at_most(call("neg", x), t))
            if atom.op in ("minimum", "maximum"):
                join = self.either if atom.op == "minimum" else self.both
                return join(self.at_most(x, t), self.at_most(y, t))
        return UNKNOWN

    def atom_at_least(self, atom: Expr, limit: Sum) -> Range:
        if isinstance(atom, Var):
            low, high = self.ends(limit)
            return Range(Interval(low, None), NOTHING if high is None else Interval(high, None))
        if isinstance(atom, Call):
            x, y, t = atom.args[0], atom.args[-1], unlinear(*limit)
            if atom.op == "floordiv" and isinstance(y, Const) and y.value > 0:
                return self.at_most(call("mul", t, y), x)
            if atom.op == "abs":
                return self.either(self.at_most(t, x), self.at_most(t, call("neg", x)))
            if atom.op in ("minimum", "maximum"):
                join = self.both if atom.op == "minimum" else self.either
                return join(self.at_most(t, x), self.at_most(t, y))
        return UNKNOWN

    def ends(self, form: Sum, more: int = 0) -> tuple[Expr | None, Expr | None]:
        """Smallest and largest value of a sum, as `extent`, and `more`."""
        (terms, constant), tile = form, Var(self.tile)
        if any(x.loads or x != tile and self.tile in x.variables for x in terms):
            return tuple(_plus(x, more) if x is not None and more else x for x in self.extent(unlinear(*form)))
        if tile not in terms:
            return (unlinear(terms, constant + more),) * 2
        ends = (self.first, self.last) if terms[tile] > 0 else (self.last, self.first)
        return tuple(unlinear({end if x == tile else x: c for x, c in terms.items()}, constant + more) for end in ends)

    def extent(self, e: Expr) -> tuple[Expr | None, Expr | None]:
        """Smallest and largest value of `e`, which does not depend on `var`, over the tile; None: cannot say."""
        if self.tile not in e.variables:
            return (None, None) if any(load.kind == FLOAT for load in e.loads) else (e, e)
        if e == Var(self.tile):
            return self.first, self.last
        if not isinstance(e, Call):
            return None, None
        parts = [self.extent(a) for a in e.args]
        (alow, ahigh), (blow, bhigh) = parts[0], parts[-1]
        lift = lambda op, x, y: None if x is None or y is None else call(op, x, y)
        constant = e.args[-1].value if isinstance(e.args[-1], Const) else None
        match e.op:
            case "add": return lift("add", alow, blow), lift("add", ahigh, bhigh)
            case "sub": return lift("sub", alow, bhigh), lift("sub", ahigh, blow)
            case "neg": return tuple(None if x is None else call("neg", x) for x in (ahigh, alow))
            case "minimum" | "maximum": return lift(e.op, alow, blow), lift(e.op, ahigh, bhigh)
            case "mul" if constant is not None:
                ends = [None if x is None else call("mul", x, constant) for x in (alow, ahigh)]
                return (ends[0], ends[1]) if constant >= 0 else (ends[1], ends[0])
            case "floordiv" if constant is not None and constant > 0:
                return tuple(None if x is None else call("floordiv", x, constant) for x in (alow, ahigh))
            case "mod" if constant is not None and constant > 0:
                return Const(0), Const(constant - 1)
            case "where":
                (tlow, thigh), (flow, fhigh) = parts[1], parts[2]
                return lift("minimum", tlow, flow), lift("maximum", thigh, fhigh)
        return None, None


def _scaled(form: Sum, factor: int) -> Sum:
    return {x: c * factor for x, c in form[0].items()}, form[1] * factor


def _plus(e: Expr, more: int) -> Expr:
    terms, constant = linear(e)
    return unlinear(terms, constant + more)


@functools.lru_cache(maxsize=1024)
def bounds(visible: Expr, var: str) -> Bounds:
    """The range of `var` ("j" over a tile of rows, "i" over a tile of keys); see the module's docstring.

    before -> after: bounds(j <= i, "j") -> hull [0, min(N, i1 + 1)), full [0, min(N, i0 + 1))
    """
    solver = _Solver(var)
    found = solver.solve(visible)

    def clamp(interval: Interval) -> tuple[Expr, Expr]:
        lo, hi = solver._closed(interval)
        return largest(Const(0), lo), hi if hi == solver.size else smallest(solver.size, hi)

    (lo, hi), (full_lo, full_hi) = clamp(found.hull), clamp(found.full)
    if lo.loads and hi != solver.size:  # ends from data may cross; rounded to tiles, crossed ends would meet again
        hi = call("where", call("lt", lo, hi), hi, 0)
    if found.full == NOTHING:
        full_lo, full_hi = Const(0), Const(0)
    return Bounds(lo, hi, full_lo, full_hi)

