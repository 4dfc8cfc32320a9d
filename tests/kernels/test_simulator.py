"""Hopper's kernels without a Hopper card. Those of Triton beside them run in its interpreter, hence in a process of its own."""
from __future__ import annotations

import pytest

from .test_interpreter import in_a_process


@pytest.mark.parametrize("group", ["cases", "rest"])
def test_kernels(group, pytestconfig):
    in_a_process("simulated.py", group, pytestconfig.getoption("markexpr"))
