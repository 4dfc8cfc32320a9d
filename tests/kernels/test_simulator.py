"""Hopper's kernels without a Hopper card. Those of Triton beside them run in its interpreter, hence in a process of its own."""
from __future__ import annotations

import pytest

from .test_interpreter import in_a_process


@pytest.mark.parametrize("files, named", [("simulated.py", "test_rest"), ("simulated.py simulated_documents.py simulated_order.py", "not test_rest")])
def test_kernels(files, named, pytestconfig):
    in_a_process(files, named, pytestconfig.getoption("markexpr"))
