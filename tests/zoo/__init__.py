"""The zoo: tiny, randomly initialised, unmodified `transformers` models with inputs; `python -m tests.zoo` runs it.

    for e in entries():
        model, kwargs = e.build(attn="eager")
        out = model(**kwargs)
"""
from .entry import Entry
from .table import entries

__all__ = ["Entry", "entries"]
