"""Generated kernels in Triton's interpreter. It must be switched on before Triton is imported, hence a process of its own."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def in_a_process(files: str, named: str, marked: str) -> None:
    """Run those tests of some files that are `named` so, and which the markers select, where the interpreter is on."""
    command = [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", *(str(HERE / file) for file in files.split()), "-k", named, "-m", marked]
    done = subprocess.run(command, cwd=HERE.parent.parent, env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.parametrize("files, named", [("interpreted.py", "test_more"), ("interpreted.py", "not test_more"), ("interpreted_one_tile.py interpreted_differences.py interpreted_pairs.py", "test")])
def test_kernels(files, named, pytestconfig):
    in_a_process(files, named, pytestconfig.getoption("markexpr"))
