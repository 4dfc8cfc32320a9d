"""FlashFX: finds attention in any model's graph, proves what it computes, replaces it with generated tiled kernels.

    model = torch.compile(model, backend="flashfx")

Imports neither triton nor any model library; names are loaded on first use.
"""
from __future__ import annotations

import importlib

__version__ = "0.1.0"

_WHERE = {
    "AttentionSpec": "spec", "EmptyRow": "spec", "Refusal": "region", "Region": "region", "explain": "report", "Report": "report",
    "sac_save_ops": "op", "FlashFXError": "errors", "OptionError": "errors", "PlanError": "errors", "SpecError": "errors",
    "VerifyError": "errors",
}
__all__ = sorted(_WHERE)


def __getattr__(name: str):
    if name not in _WHERE:
        raise AttributeError(f"module 'flashfx' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)


def __dir__():
    return [*__all__, "__version__"]
