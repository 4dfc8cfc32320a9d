"""Generated kernels in Triton's interpreter. It must be switched on before Triton is imported, hence a process of its own."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def in_a_process(file: str, group: str, marked: str) -> None:
    """Run the tests of a file whose names begin with `group`, and which the markers select, where the interpreter is on."""
    command = [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", str(HERE / file), "-k", f"test_{group}", "-m", marked]
    done = subprocess.run(command, cwd=HERE.parent.parent, env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.parametrize("group", ["product", "more", "listed", "split"])
def test_kernels(group, pytestconfig):
    in_a_process("interpreted.py", group, pytestconfig.getoption("markexpr"))


def test_sums_by_difference(pytestconfig):
    in_a_process("interpreted_differences.py", "gradient", pytestconfig.getoption("markexpr"))


def test_all_keys_in_one_tile(pytestconfig):
    in_a_process("interpreted_one_tile.py", "gradient", pytestconfig.getoption("markexpr"))


def test_gradients_of_pairs(pytestconfig):
    in_a_process("interpreted_pairs.py", "gradient", pytestconfig.getoption("markexpr"))
