"""Generated files as texts: what they call is defined, whatever schedule the rest of a file has."""
from __future__ import annotations

import builtins
import itertools
import symtable

import pytest

from flashfx.codegen import gluon, render
from flashfx.codegen.plan import make_plan
from flashfx.codegen.program import is_called

from ..thinning import thinned
from .cases import CORE, KINDS, MORE, problem, spec
from .compiled import BY_ARCH

EVERY = CORE | MORE
CARDS = (("sm_90", 64, "bfloat16"), ("sm_90", 128, "float16"), ("sm_90", 64, "float32"), ("sm_80", 80, "bfloat16"))


def undefined(text: str) -> set[str]:
    """Names that functions of a file read, and nobody defines."""
    module = symtable.symtable(text, "generated", "exec")
    known = {s.get_name() for s in module.get_symbols() if s.is_assigned() or s.is_imported()} | {t.get_name() for t in module.get_children()} | {*dir(builtins), "__file__"}
    found, scopes = set(), [module]
    while scopes:
        scope = scopes.pop()
        scopes += scope.get_children()
        found |= {s.get_name() for s in scope.get_symbols() if s.is_referenced() and (s.is_global() or scope is module)} - known
    return found


def text_of(variant: str, kind: str, arch: str, head: int, dtype: str) -> str:
    s, p = spec(EVERY[variant], kind), problem(kind, head, dtype, M=512, batch=2)
    return render.render(s, make_plan(s, p, BY_ARCH[arch], "forward"), p, None, make_plan(s, p, BY_ARCH[arch], "backward")).text


def test_a_missing_definition_is_seen():
    text = text_of("decomposed", "self", *CARDS[2])
    assert not undefined(text) and undefined(text.replace("import accumulate", "import differences")) == {"accumulate"}
    assert undefined("@gluon.jit\ndef f(x):\n    return g(x)\n") == {"gluon", "g"}


@pytest.mark.parametrize("variant, kind, card", thinned(list(itertools.product(EVERY, KINDS, CARDS)), 3))
def test_names_are_defined(variant, kind, card):
    assert undefined(text_of(variant, kind, *card)) == set()


def test_a_call_is_of_that_name_alone():
    assert is_called("x = late(n, 0)", "late") and is_called("-late(n)", "late")
    assert not is_called("accumulate(n)", "late") and not is_called("tl.tanh(x)", "tanh") and not is_called("gluon_tanh(x)", "tanh")
    assert gluon.helpers("accumulate(SPEC)") == []
