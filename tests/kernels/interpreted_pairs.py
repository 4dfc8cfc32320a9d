"""Gradients of tensors of pairs that batch indices share, in Triton's interpreter; `test_interpreter.py` runs this file in a process where that is on."""
from __future__ import annotations

import pytest

from flashfx.codegen import host, triton_host
from flashfx.codegen.plan import overridden

from .cases import MORE, problem, spec
from .run import run


@pytest.mark.parametrize("programs", [1, 12, 30])
def test_gradient_that_is_summed_in_parts(programs, monkeypatch):
    """Of the tiles of a head's bias: a program goes through all five batch indices that share it, through some of them, or through one or two."""
    monkeypatch.setattr(host, "DENSE_PROGRAMS", programs)
    monkeypatch.setattr(triton_host, "_MODULES", {})
    with overridden(keys=(16, 32, 4, 1), rows=(32, 16, 4, 1), dense=(16, 16, 4, 1)):
        run(spec(MORE["shared_bias"]), problem("self", 16, "bfloat16", M=41, batch=5, heads=1)).within_budget()
