"""FlashFX: finds attention in any model's graph, proves what it computes, replaces it with generated tiled kernels.

    model = torch.compile(model, backend="flashfx")

Imports neither triton nor any model library; names are loaded on first use.
"""
from __future__ import annotations

import importlib
import sys
from importlib import metadata
from pathlib import Path

__version__ = "0.1.0"

_WHERE = {
    "AttentionSpec": "spec", "EmptyRow": "spec", "Refusal": "region", "Region": "region", "explain": "capture", "Report": "report", "SiteReport": "report",
    "verify": "verification", "Verification": "verification",
    "sac_save_ops": "op", "FlashFXError": "errors", "OptionError": "errors", "PlanError": "errors", "SpecError": "errors",
    "VerifyError": "errors", "FlashFXWarning": "errors",
}
__all__ = sorted(_WHERE)


def __getattr__(name: str):
    if name not in _WHERE:
        raise AttributeError(f"module 'flashfx' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)


def __dir__():
    return [*__all__, "__version__"]


class _Checkout(metadata.Distribution):
    """What an installed package would say of itself, for a plain checkout on the path: `backend="flashfx"` works there too."""

    def read_text(self, filename: str) -> str | None:
        return {"METADATA": f"Metadata-Version: 2.1\nName: flashfx\nVersion: {__version__}\n",
                "entry_points.txt": "[torch_dynamo_backends]\nflashfx = flashfx.backend:flashfx\n"}.get(filename)

    def locate_file(self, path):
        return Path(__file__).parent.parent / path


class _Finder(metadata.DistributionFinder):
    def find_spec(self, fullname, path=None, target=None):
        return None

    def find_distributions(self, context=metadata.DistributionFinder.Context()):
        return iter([_Checkout()] if context.name in (None, "flashfx") else [])


if not metadata.entry_points(group="torch_dynamo_backends", name="flashfx"):
    sys.meta_path.append(_Finder())
