"""`python -m flashfx explain` and `kernels`: targets, HuggingFace models without memory, one-line errors, exit codes."""
from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import flashfx
from flashfx.codegen.load import write
from flashfx.commands import app
from flashfx.errors import FlashFXError
from flashfx.targets import tensor

from . import forked
from .thinning import thinned

ROOT = Path(__file__).parent.parent
MODULE = '''
import torch

def attention(q, k, v):
    return (q @ k.mT).softmax(-1) @ v

def returned(q, k, v):
    weights = (q @ k.mT).softmax(-1)
    return weights @ v, weights

def build():
    layer = torch.nn.MultiheadAttention(64, 4, batch_first=True)
    x = torch.randn(2, 128, 64)
    return layer, {"query": x, "key": x, "value": x, "need_weights": False}

def wrong():
    return 3

def needs(x):
    return x
'''


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "my_model.py"
    path.write_text(MODULE)
    return path


def run(*arguments):
    done = CliRunner().invoke(app, [str(a) for a in arguments])
    return done.exit_code, done.stdout, done.exception


def shell(*arguments, **environment):
    return forked.run("-m", "flashfx", *arguments, **environment)


@pytest.mark.parametrize("gpu, length, split", [("H200", 32768, True), ("A100", 32768, True), ("H200", 256, False)])
def test_the_report_says_into_how_many_parts_keys_are_split(gpu, length, split):
    q, k = torch.empty(1, 8, 1, 128, dtype=torch.bfloat16), torch.empty(1, 8, length, 128, dtype=torch.bfloat16)
    found = flashfx.explain(torch.nn.functional.scaled_dot_product_attention, q, k, k, gpu=gpu)[0]
    assert found.facts()["plan"]["parts"] == found.parts and (found.parts > 8) == split
    assert (f"in {found.parts} parts, a program for each" in str(found)) == ("keys in parts" in str(found)) == split


def test_a_function_that_returns_model_and_inputs(module):
    code, text, _ = run("explain", f"{module}:build")
    assert code == 0 and text.startswith("flashfx: 1 attention site, 1 fused, 0 left alone") and "backward" not in text and "\x1b" not in text
    code, text, _ = run("explain", f"{module}:build", "--train", "--gpu", "A100")
    assert code == 0 and "backward" in text and "on A100" in text


def test_a_function_with_shapes(module):
    shapes = [part for _ in range(3) for part in ("--input", "2x4x256x64")]
    code, text, _ = run("explain", f"{module}:attention", *shapes, "--json", "--gpu", "H100")
    found = json.loads(text)
    assert code == 0 and found["fused"] == 1 and found["sites"][0]["problem"]["dtype"] == "bfloat16" and found["about"].endswith(":attention")
    code, text, _ = run("explain", f"{module}:returned", *shapes, "--strict")
    assert code == 1 and "0 fused, 1 left alone" in text


@pytest.mark.parametrize("target, says", [
    ("nothing", "'nothing' names no object: give module:name or path/to/file.py:name, or --hf MODEL"),
    ("no_such_module:f", "no_such_module cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
    ("missing.py:f", "there is no file missing.py"),
    ("{}:nobody", "{} has no 'nobody'"),
    ("{}:needs", "{}:needs takes x: give --input SHAPE for each argument, or name a function without arguments that returns (model, inputs)"),
    ("{}:wrong", "{}:wrong() returned int: (model, inputs) is expected, inputs a tensor, a tuple or a dict of keyword arguments"),
])
def test_errors_name_the_way_out(module, target, says):
    _, _, error = run("explain", target.replace("{}", str(module)))
    assert isinstance(error, FlashFXError) and str(error) == says.replace("{}", str(module))


@pytest.mark.parametrize("arguments", [(), ("a:b", "--hf", "gpt2"), ("--hf", "gpt2", "--gpu", "H900"), ("--hf", "gpt2", "--input", "2x2"),
                                       ("--hf", "gpt2", "--dtype", "int8"), ("--hf", "gpt2", "--seq", "0")])
def test_wrong_arguments_exit_with_2(arguments):
    assert run("explain", *arguments)[0] == 2


def test_errors_are_one_line_and_exit_with_1():
    done = shell("explain", "--hf", "lama")
    assert done.returncode == 1 and done.stdout == "" and done.stderr.splitlines()[-1].startswith("error: 'lama' is neither a model type")
    assert "llama" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("text, shape", [("2x3", (2, 3)), ("7:bool", (7,)), ("2x2:fp32", (2, 2)), (":int", ())])
def test_shapes(text, shape):
    assert tuple(tensor(text, "bf16").shape) == shape
    for bad in ("2x", "2xa", "2:int9"):
        with pytest.raises(FlashFXError, match="--input"):
            tensor(bad, "bf16")


@pytest.mark.parametrize("model", thinned(["gpt2", "gemma2", "t5", "clip", "whisper"], 3))
def test_huggingface_models_need_no_memory(model, tmp_path):
    pytest.importorskip("transformers")
    page = tmp_path / "page.html"
    code, text, error = run("explain", "--hf", model, "--layers", 2, "--seq", 256, "--train", "--html", page, "--gpu", "A100")
    assert code == 0, error
    assert "0 left alone" in text and page.stat().st_size < 3e6


def test_changes_of_the_configuration():
    pytest.importorskip("transformers")
    code, text, _ = run("explain", "--hf", "bloom", "--layers", 1, "--set", "hidden_size=512", "--set", "n_head=4")
    assert code == 0 and "head size 128" in text
    _, _, error = run("explain", "--hf", "bloom", "--set", "hidden=1")
    assert str(error) == "--set hidden=1: the configuration of bloom has no 'hidden'"


def test_kernels_are_listed_shown_and_run(module, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert run("kernels", "list")[1].startswith("0 kernels in ")
    shapes = [part for _ in range(3) for part in ("--input", "2x64x32:fp32")]
    assert run("explain", f"{module}:attention", *shapes, "--kernels", tmp_path / "k")[0] == 0
    text = (tmp_path / "k" / "kernel_0.py").read_text()
    write(text)
    _, listed, _ = run("kernels", "list")
    assert listed.startswith("1 kernel in ") and "score = qk | extents [2], M 64, N 64" in listed
    name = listed.splitlines()[1].split()[0]
    assert run("kernels", "show", name)[1] == text
    done = shell("kernels", "run", name, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0 and "relative errors: out" in done.stdout, done.stderr
    _, _, error = run("kernels", "show", "nothing")
    assert str(error) == "0 kernels begin with 'nothing': python -m flashfx kernels list names them"


def test_a_report_can_be_read_under_fake_tensors():
    """Masks are evaluated for plans and pictures: with numbers, whatever mode the caller is in."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    with FakeTensorMode():
        q, k, v = (torch.empty(1, 2, 300, 64) for _ in range(3))
        report = flashfx.explain(lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), q, k, v)
        assert "tiles" in str(report) and "skipped" in report.to_json()
