"""The architectures of `transformers` that the table does not name: built from the configuration class alone, with inputs for what forward asks for.

What cannot be built or run so is left out: sizes that must fit each other, packages that are missing, models that are huge even when shrunk.
"""
from __future__ import annotations

import importlib
import inspect
from typing import Callable, Iterable, Iterator

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from .entry import Entry
from .inputs import _ids, _mask
from .shrink import B, S, S_DEC, VOCAB, shrink
from .table import entries

LARGEST = 30_000_000
"""Parameters of a model that a CPU still trains a step of in seconds."""


def others(names: Iterable[str] = ()) -> Iterator[Entry]:
    """names: model types; all that the table lacks unless given."""
    known = {e.key for e in entries()} if not names else set()
    for key in names or CONFIG_MAPPING:
        if key not in known and (entry := _entry(key)) is not None:
            yield entry


def _entry(key: str) -> Entry | None:
    for nested in (True, False):
        try:
            over, cls = _nested(key) if nested else {}, _class(key)
            with torch.device("meta"):
                built = AutoModel.from_config(shrink(key, over)) if cls is None else cls._from_config(shrink(key, over))
            if sum(p.numel() for p in built.parameters()) > LARGEST:
                continue
            entry = Entry(name=key, family="other", key=key, over=over, cls=cls and f"{cls.__module__}:{cls.__name__}", inputs=_inputs(type(built)))
            model, kwargs = entry.build()
            with torch.no_grad():
                model(**kwargs)
            return entry
        except Exception:  # whatever a model says to sizes that nobody chose for it
            continue
    return None


def _nested(key: str) -> dict:
    """Have the configurations inside of it shrunk too where its class does not say which they are: of the types that it takes by default."""
    cls = CONFIG_MAPPING[key]
    default = cls()
    found = {name: getattr(getattr(default, name, None), "model_type", "") for name in getattr(cls, "sub_configs", None) or {}}
    return {name: {"_type": kind} for name, kind in found.items() if kind in CONFIG_MAPPING}


def _class(key: str) -> type | None:
    """The class of an architecture that AutoModel does not know."""
    if key in MODEL_MAPPING_NAMES:
        return None
    config = CONFIG_MAPPING[key]
    module = importlib.import_module(config.__module__.replace("configuration_", "modeling_"))
    found = [c for n, c in vars(module).items() if isinstance(c, type) and issubclass(c, transformers.PreTrainedModel) and c.__module__ == module.__name__
             and c.config_class is config and not n.endswith("PreTrainedModel")]
    return min(found, key=lambda c: (not c.__name__.endswith("Model"), "For" in c.__name__, len(c.__name__)))


def _inputs(model: type) -> Callable:
    """Inputs of the names that forward takes."""
    takes = inspect.signature(model.forward).parameters

    def make(config, g) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        text, vision = config.get_text_config(), getattr(config, "vision_config", config)
        if "input_ids" in takes:
            words = getattr(text, "vocab_size", VOCAB)
            found["input_ids"] = _ids(g, vocab=words if isinstance(words, int) else VOCAB)
            if "attention_mask" in takes:
                found["attention_mask"] = _mask()
        if "decoder_input_ids" in takes:
            found["decoder_input_ids"] = _ids(g, S_DEC)
        if "pixel_values" in takes and ("input_ids" not in takes or takes["pixel_values"].default is inspect.Parameter.empty):
            side = getattr(vision, "image_size", 32) or 32
            found["pixel_values"] = torch.randn(B, getattr(vision, "num_channels", 3) or 3, *(side if isinstance(side, (list, tuple)) else (side, side)), generator=g)
        if not found and "input_values" in takes:
            found["input_values"] = torch.randn(B, 800, generator=g)
        if not found and "input_features" in takes:
            bins = getattr(config, "num_mel_bins", None) or getattr(config, "feature_projection_input_dim", None) or 80
            found["input_features"] = torch.randn(B, S, bins, generator=g)
        length = next((t.shape[1] for name, t in found.items() if name in ("input_values", "input_features")), None)
        if length and "attention_mask" in takes:
            found["attention_mask"] = _mask(length, pad=length // 3)
        return found
    return make
