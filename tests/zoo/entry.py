"""One model of the zoo, and how to build it."""
from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass, field
from typing import Callable

import torch
import transformers
from transformers import AutoModel

from .inputs import in_text
from .shrink import shrink


@dataclass
class Entry:
    name: str
    family: str
    key: str                                   # model_type in CONFIG_MAPPING (or a config class name)
    over: dict = field(default_factory=dict)
    cls: str | None = None                     # model class; None: AutoModel
    inputs: Callable = in_text
    raw: bool = False                          # do not auto-shrink the top-level config
    getter: Callable | None = None             # picks a submodule of the built model
    attention: str = "standard"                # coarse tag for humans
    xfail: str | None = None                   # Dynamo fails whatever the backend

    def config(self, dropout: float = 0.1):
        return shrink(self.key, copy.deepcopy(self.over), dropout, raw=self.raw)

    def build(self, attn: str = "eager", train: bool = False, dropout: float = 0.1, seed: int = 0,
              dtype=torch.float32, device="cpu", use_cache: bool | None = None):
        """-> (model, kwargs). Raises ValueError if the architecture does not support `attn`."""
        torch.manual_seed(seed)
        cfg = self.config(dropout if train else 0.0 if dropout is None else dropout)
        if self.cls is None:
            model = AutoModel.from_config(cfg, attn_implementation=attn)
        else:
            path = self.cls.split(":")
            mod = transformers if len(path) == 1 else __import__(path[0], fromlist=["x"])
            model = getattr(mod, path[-1])._from_config(cfg, attn_implementation=attn)
        g = torch.Generator().manual_seed(seed)
        kwargs = self.inputs(cfg, g)
        if self.getter is not None:
            model = self.getter(model)
        if use_cache is not None and "use_cache" in inspect.signature(model.forward).parameters:
            kwargs["use_cache"] = use_cache
        model = model.to(dtype=dtype, device=device).train(train)
        kwargs = {k: (v.to(device=device, dtype=dtype if v.is_floating_point() else v.dtype)
                      if isinstance(v, torch.Tensor) else v) for k, v in kwargs.items()}
        return model, kwargs
