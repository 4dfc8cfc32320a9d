"""What `python -m flashfx explain` is pointed at: module:name, path/to/file.py:name, or a HuggingFace model, with its arguments."""
from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import sys
from dataclasses import dataclass, field, replace
from typing import Any, Callable, ContextManager

import torch

from .errors import FlashFXError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64, "int": torch.int64, "bool": torch.bool}


@dataclass
class Target:
    """A call to explain: `fn(*args, **kwargs)`, inside `mode`. `about` describes it in a few words, `note` says what else was asked for; `others`
    are further calls to try if it fails."""

    fn: Callable
    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    mode: ContextManager = field(default_factory=contextlib.nullcontext)
    about: str = ""
    note: str = ""
    others: tuple[Target, ...] = ()


def load(target: str, shapes: list[str], dtype: str, train: bool) -> Target:
    """The object that `target` names, called with tensors of `shapes`; without any, a function that returns (model, inputs). Raises FlashFXError."""
    where, colon, name = target.rpartition(":")
    if not colon or not name.isidentifier():
        raise FlashFXError(f"{target!r} names no object: give module:name or path/to/file.py:name, or --hf MODEL")
    found = getattr(_module(where), name, None)
    if found is None:
        raise FlashFXError(f"{where} has no {name!r}")
    if not callable(found):
        raise FlashFXError(f"{target} is {type(found).__name__}: a module, or a function, is expected")
    if shapes:
        fn, given = found, tuple(tensor(s, dtype, train) for s in shapes)
    else:
        fn, given = _made(found, target)
    if isinstance(fn, torch.nn.Module):
        fn.train(train)
    args, kwargs = ((), given) if isinstance(given, dict) else (given if isinstance(given, (tuple, list)) else (given,), {})
    return Target(fn, tuple(args), kwargs, about=target)


def _module(where: str):
    try:
        if where.endswith(".py"):
            if not os.path.exists(where):
                raise FlashFXError(f"there is no file {where}")
            spec = importlib.util.spec_from_file_location(os.path.basename(where)[:-3], where)
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            sys.path.insert(0, os.path.dirname(os.path.abspath(where)))
            spec.loader.exec_module(module)
            return module
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        return importlib.import_module(where)
    except FlashFXError:
        raise
    except Exception as error:
        raise FlashFXError(f"{where} cannot be imported: {type(error).__name__}: {error}") from error


def _made(found: Callable, target: str) -> tuple[Callable, Any]:
    """The result of a function without required arguments: (model or function, inputs)."""
    required = [] if isinstance(found, torch.nn.Module) else [
        p.name for p in inspect.signature(found).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if required or isinstance(found, torch.nn.Module):
        takes = f" takes {', '.join(required)}" if required else " is a module"
        raise FlashFXError(f"{target}{takes}: give --input SHAPE for each argument, or name a function without arguments that returns (model, inputs)")
    made = found()
    if not isinstance(made, (tuple, list)) or len(made) != 2 or not callable(made[0]):
        raise FlashFXError(f"{target}() returned {type(made).__name__}: (model, inputs) is expected, inputs a tensor, a tuple or a dict of keyword arguments")
    return made[0], made[1]


def tensor(text: str, dtype: str, train: bool = False) -> torch.Tensor:
    """"2x4x1024x64" or "2x1024:bool" -> a tensor; floats require gradients if `train`. Raises FlashFXError."""
    shape, _, kind = text.partition(":")
    kind = kind or dtype
    try:
        sizes = [int(n) for n in shape.lower().split("x")] if shape else []
    except ValueError:
        raise FlashFXError(f"--input {text}: sizes joined by x are expected, as 2x4x1024x64 or 2x1024:bool") from None
    if kind not in DTYPES:
        raise FlashFXError(f"--input {text}: unknown dtype {kind!r}; known: {', '.join(DTYPES)}")
    made = torch.ones(sizes, dtype=DTYPES[kind])
    return made.requires_grad_(train and made.is_floating_point())


def huggingface(name: str, attn: str, batch: int, seq: int, dtype: str, layers: int, changes: list[str], train: bool,
                real: bool = False) -> Target:
    """A HuggingFace model with random weights of its configuration's sizes: under fake tensors, unless `real`. Raises FlashFXError, and
    DataDependentOutputException if the model reads numbers out of tensors while it is built: then it has to be real."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from . import hf
    import transformers
    transformers.logging.set_verbosity_error()
    config = hf.configuration(name)
    for change in changes:
        key, equals, value = change.partition("=")
        try:
            hf.change(config, key, _value(value))
        except AttributeError:
            raise FlashFXError(f"--set {change}: the configuration of {name} has no {key!r}" if equals else f"--set {change}: key=value is expected") from None
    full = hf.depth(config)
    if layers:
        hf.shorten(config, layers)
    mode = contextlib.nullcontext() if real else FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        model = hf.build(config, attn, DTYPES[dtype], train, initialised=real)
        made = hf.inputs(model, batch, seq)
    of = f", {layers} of {full} layers" if layers and layers < full else ""

    def target(given: dict, note: str) -> Target:
        length = given["input_ids"].shape[-1] if "input_ids" in given else seq
        about = f"{type(model).__name__}, {attn}, batch {batch}, length {length}, {dtype}, {'training' if train else 'inference'}{of}"
        return Target(model, (), given, mode, about, note)

    first, *others = (target(*pair) for pair in made)
    return replace(first, others=tuple(others))


def _value(text: str):
    import ast
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
