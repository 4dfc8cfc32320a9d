"""HuggingFace models for `python -m flashfx explain --hf`: built from their configuration, under fake tensors, so that they need no memory."""
from __future__ import annotations

import difflib
import inspect
from typing import Any

import torch

from .errors import FlashFXError

_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "num_decoder_layers", "num_encoder_layers", "depth")
_KINDS = ("AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq", "AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModel")
"""Tried in turn: the first whose mapping has the configuration; the first two for encoder-decoders alone."""


def configuration(name: str):
    """The configuration of a model type ("gpt2"), or of a model of the hub or a folder. Raises FlashFXError."""
    try:
        from transformers import CONFIG_MAPPING, AutoConfig
    except ModuleNotFoundError:
        raise FlashFXError("transformers is not installed: pip install 'flashfx[hf]'") from None
    if name in CONFIG_MAPPING:
        return AutoConfig.for_model(name)
    try:
        return AutoConfig.from_pretrained(name, local_files_only="/" not in name)  # models of the hub are owner/name
    except Exception as error:
        near = difflib.get_close_matches(name, list(CONFIG_MAPPING), 3)
        meant = f"; close model types: {', '.join(near)}" if near else ""
        raise FlashFXError(f"{name!r} is neither a model type of transformers nor a model that could be read{meant or f' ({str(error).splitlines()[0]})'}") \
            from None


def shorten(config, layers: int) -> None:
    """Cut every stack of layers in `config`, those of its parts too, to `layers`; lists with an entry for each layer are cut with it."""
    for part in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", None) or {})):
        if part is None:
            continue
        counts = {name: value for name in _LAYERS if isinstance(value := getattr(part, name, None), int) and value > layers}
        for name, value in list(vars(part).items()):
            if isinstance(value, (list, tuple)) and len(value) in counts.values():
                setattr(part, name, value[:layers])
        for name in counts:
            setattr(part, name, layers)


def depth(config) -> int:
    """Layers of the longest stack."""
    parts = (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", None) or {}))
    return max((value for part in parts for name in _LAYERS if isinstance(value := getattr(part, name, None), int)), default=0)


def build(config, attn: str, dtype: torch.dtype, train: bool):
    """A model with random weights, in the current device and tensor mode. Raises FlashFXError if it has no such attention."""
    import transformers
    kinds = _KINDS[0 if getattr(config, "is_encoder_decoder", False) else 2:]
    kind = next((k for n in kinds if type(config) in getattr(k := getattr(transformers, n), "_model_mapping", {})), None)
    if kind is None:
        raise FlashFXError(f"transformers has no model class for {config.model_type!r}: none of {', '.join(kinds)} knows it")
    try:
        model = kind.from_config(config, attn_implementation=attn, dtype=dtype)
    except (ValueError, ImportError) as error:
        raise FlashFXError(f"{config.model_type} cannot be built with --attn {attn}: {str(error).splitlines()[0]}") from None
    return model.train(train)


def _size(config, *names: str, default: int):
    parts = (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", None) or {}))
    found = next((v for p in parts for n in names if isinstance(v := getattr(p, n, None), (int, list, tuple)) and v), default)
    return tuple(found)[:2] if isinstance(found, (list, tuple)) else found


def _sides(config) -> tuple[int, int]:
    size = _size(config, "image_size", default=224)
    return size if isinstance(size, tuple) else (size, size)


def inputs(model, batch: int, seq: int) -> dict[str, Any]:
    """Arguments of the model's forward, by what it says its main input is: token ids, pixels, or sound."""
    config, named = model.config, inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    pixels = lambda: torch.zeros(batch, _size(config, "num_channels", "in_channels", default=3), *_sides(config), dtype=dtype)
    if main == "pixel_values":
        found = {main: pixels()}
    elif main == "input_features":
        bins, frames = _size(config, "num_mel_bins", "feature_size", default=80), 2 * _size(config, "max_source_positions", default=seq // 2)
        found = {main: torch.zeros(batch, bins, frames, dtype=dtype)}
    elif main == "input_values":
        found = {main: torch.zeros(batch, seq * 320, dtype=dtype)}  # a sample of speech models covers 20 ms at 16 kHz
    else:
        found = {main: torch.zeros(batch, seq, dtype=torch.long)}
    if {"pixel_values", "input_ids"} <= set(named) and main == "input_ids" and not model.can_generate():  # two towers
        found["pixel_values"] = pixels()
    if "decoder_input_ids" in named and getattr(config, "is_encoder_decoder", False):
        found["decoder_input_ids"] = torch.zeros(batch, min(seq, _size(config, "max_target_positions", default=seq)), dtype=torch.long)
    if "use_cache" in named:
        found["use_cache"] = False
    return found
