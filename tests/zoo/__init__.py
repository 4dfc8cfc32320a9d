"""The zoo: tiny, randomly initialised, unmodified `transformers` models with inputs; `python -m tests.zoo` runs it.

    for e in entries():
        model, kwargs = e.build(attn="eager")
        out = model(**kwargs)
"""
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # ahead of transformers: nothing is downloaded, nor asked for again and again

from .entry import Entry
from .table import entries

__all__ = ["Entry", "entries"]
