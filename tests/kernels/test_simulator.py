"""Hopper's kernels without a Hopper card. Those of Triton beside them run in its interpreter, hence in a process of its own."""
from __future__ import annotations

import pytest

from .test_interpreter import in_a_process


@pytest.mark.parametrize("file, group", [("simulated.py", "cases"), ("simulated.py", "rest"), ("simulated_documents.py", "")])
def test_kernels(file, group, pytestconfig):
    in_a_process(file, group, pytestconfig.getoption("markexpr"))
