"""`python -m flashfx doctor` and `gpu`."""
from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from flashfx.codegen.gpu import BY_NAME
from flashfx.commands import app


def run(*arguments: str):
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, " ".join(done.output.replace("│", " ").split())


def test_doctor_says_what_is_missing(monkeypatch):
    code, text = run("doctor")
    assert code == 0 and "ok torch" in text and "FAIL" not in text
    monkeypatch.setattr("torch.__version__", "2.10.1")
    code, text = run("doctor")
    assert code == 1 and "FAIL torch 2.10.1 (2.11 or newer)" in text


@pytest.mark.parametrize("name", BY_NAME)
def test_gpu_prints_a_row(name):
    code, text = run("gpu", name)
    row = BY_NAME[name]
    assert code == 0 and f"{row.bandwidth / 1e9:.0f} GB/s" in text and row.source.split(",")[0] in text


def test_wrong_arguments():
    assert run("gpu", "H300") == (2, run("gpu", "H300")[1]) and "unknown GPU 'H300'; known: T4, V100" in run("gpu", "H300")[1]
    assert run("gpu", "A100", "--measure")[0] == 2


def test_the_command_line_starts():
    done = subprocess.run([sys.executable, "-m", "flashfx", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and all(word in done.stdout for word in ("bench", "doctor", "gpu"))


def test_without_typer_the_extra_is_named():
    code = "import sys; sys.modules['typer'] = None; from flashfx.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "pip install 'flashfx[report]'" in done.stderr
