"""Hopper's kernels without a Hopper card. Those of Triton beside them run in its interpreter, which must be switched on before Triton is imported:
hence a process of its own."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("group", ["cases", "rest"])
def test_kernels(group):
    command = [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", str(HERE / "simulated.py"),
               "-k", f"test_{group}"]
    done = subprocess.run(command, cwd=HERE.parent.parent, env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
