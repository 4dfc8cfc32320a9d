"""HuggingFace models for `python -m flashfx explain --hf`: built from their configuration, under fake tensors, so that they need no memory."""
from __future__ import annotations

import contextlib
import difflib
import inspect
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

from .errors import FlashFXError

_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "num_decoder_layers", "num_encoder_layers", "depth")
_KINDS = ("AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq", "AutoModelForMaskedLM", "AutoModelForCausalLM", "AutoModel")
"""Tried in turn: the first whose mapping has the configuration; the first two for encoder-decoders alone. Encoders can be made causal too, but are
trained as encoders."""
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_source_positions")


def said(error: BaseException) -> str:
    """What went wrong, on one line: the cause, as Dynamo's own text begins with what it was doing."""
    while (cause := error.__cause__ or getattr(error, "inner_exception", None)) is not None:
        error = cause
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:240]}{'…' if len(text) > 240 else ''}"


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


def _parts(config) -> list:
    """The configuration and those of its towers."""
    found = (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", None) or {}))
    return [part for part in found if part is not None]


def change(config, key: str, value: Any) -> None:
    """Set a field, "text_config.hidden_size" that of a part. Raises AttributeError if there is none."""
    *path, name = key.split(".")
    for step in path:
        config = getattr(config, step)
    getattr(config, name)
    setattr(config, name, value)


def shorten(config, layers: int) -> None:
    """Cut every stack of layers in `config`, those of its parts too, to `layers`; lists with an entry for each layer are cut with it."""
    for part in _parts(config):
        counts = {name: value for name in _LAYERS if isinstance(value := getattr(part, name, None), int) and value > layers}
        for name, value in list(vars(part).items()):
            if isinstance(value, (list, tuple)) and len(value) in counts.values():
                setattr(part, name, value[:layers])
        for name in counts:
            setattr(part, name, layers)


def depth(config) -> int:
    """Layers of the longest stack."""
    return max((value for part in _parts(config) for name in _LAYERS if isinstance(value := getattr(part, name, None), int)), default=0)


def build(config, attn: str, dtype: torch.dtype, train: bool, initialised: bool = False):
    """A model in the current device and tensor mode, its weights random if `initialised`, else arbitrary; numbers of tokens that its configuration leaves
    open are chosen, attention does not depend on them. Raises FlashFXError if it has no such attention."""
    import transformers
    from transformers.initialization import no_init_weights
    kinds = _KINDS[0 if getattr(config, "is_encoder_decoder", False) else 2:]
    kind = next((k for n in kinds if type(config) in getattr(k := getattr(transformers, n), "_model_mapping", {})), None)
    if kind is None:
        raise FlashFXError(f"transformers has no model class for {config.model_type!r}: none of {', '.join(kinds)} knows it")
    tokens = ("image_token_id", "image_token_index", "audio_token_id", "video_token_id")  # with which forward compares ids
    if getattr(config, "vocab_size", 0) is None:  # left to the checkpoint, with the ids that depend on it
        config.vocab_size = 1024
        tokens += ("pad_token_id", "mask_token_id")
    for field in tokens:
        if getattr(config, field, 0) is None:
            setattr(config, field, 1)
    try:
        with contextlib.nullcontext() if initialised else no_init_weights():
            model = kind.from_config(config, attn_implementation=attn, dtype=dtype)
    except DataDependentOutputException:
        raise
    except Exception as error:
        open_ = [name for name, value in vars(config).items() if value is None and name.endswith(("_size", "_dim"))]
        lacks = f"; its configuration leaves {', '.join(open_)} open: --set {open_[0]}=…" if isinstance(error, TypeError) and open_ else ""
        raise FlashFXError(f"{config.model_type} cannot be built with --attn {attn}: {said(error)}{lacks}") from None
    return model.train(train)


def _size(config, *names: str, default: int):
    found = next((v for p in _parts(config) for n in names if isinstance(v := getattr(p, n, None), (int, list, tuple)) and v), default)
    return tuple(found)[:2] if isinstance(found, (list, tuple)) else found


def _sides(config) -> tuple[int, int]:
    size = _size(config, "image_size", default=224)
    return size if isinstance(size, tuple) else (size, size)


def positions(model) -> tuple[int, str]:
    """(for how many tokens there are rows in a table of positions, the field that says so); (0, "") if there is no such table."""
    found = [(min(limit, table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)), field)
             for name, table in model.named_modules() if isinstance(table, torch.nn.Embedding) and ("pos" in name.lower() or name.endswith("wpe"))
             for field, limit in _limits(model.config) if limit <= table.num_embeddings <= limit + 2]
    return min(found, default=(0, ""))


def _limits(config) -> list[tuple[str, int]]:
    return [(name, value) for part in _parts(config) for name in _POSITIONS if isinstance(value := getattr(part, name, None), int) and value > 0]


def inputs(model, batch: int, seq: int) -> list[tuple[dict[str, Any], str]]:
    """Arguments of the model's forward, by what it says its main input is: token ids, pixels, or sound; with a note if they are not of length `seq`.

    The first are the likeliest to fit, the others for a model that does not take them.
    """
    table, field = positions(model)
    short = lambda n, field: (_given(model, batch, n), f"{type(model).__name__} has {n} positions ({field} of its configuration, which --set changes): "
                              f"length {n} instead of {seq}")
    found = [short(table, field)] if 0 < table < seq else [(_given(model, batch, seq), "")]
    if "input_features" in found[0][0]:
        found.append((found[0][0] | {"input_features": found[0][0]["input_features"].mT.contiguous()}, found[0][1]))
    if "input_ids" in found[0][0]:
        found += [short(n, field) for field, n in sorted(_limits(model.config), key=lambda x: -x[1]) if n < seq and n != table]
        if "pixel_values" in found[0][0]:
            found.append(({name: t for name, t in found[0][0].items() if name != "pixel_values"}, "it does not take images of zeros: text alone"))
    return found


def _given(model, batch: int, seq: int) -> dict[str, Any]:
    config, named = model.config, inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    ids = lambda n=seq: torch.zeros(batch, n, dtype=torch.long)
    pixels = lambda: torch.zeros(batch, _size(config, "num_channels", "in_channels", default=3), *_sides(config), dtype=dtype)
    if main == "pixel_values":
        found = {main: pixels()}
    elif main == "input_features":
        bins, frames = _size(config, "num_mel_bins", "feature_size", default=80), 2 * _size(config, "max_source_positions", default=seq // 2)
        found = {main: torch.zeros(batch, bins, frames, dtype=dtype)}
    elif main == "input_values":
        found = {main: torch.zeros(batch, seq * 320, dtype=dtype)}  # a sample of speech models covers 20 ms at 16 kHz
    else:
        found = {main: ids()}
    if {"pixel_values", "input_ids"} <= set(named) and main == "input_ids" and not model.can_generate():  # two towers
        found["pixel_values"] = pixels()
    if "input_ids" in named and named["input_ids"].default is inspect.Parameter.empty:
        found.setdefault("input_ids", ids())
    if "decoder_input_ids" in named and getattr(config, "is_encoder_decoder", False):
        found["decoder_input_ids"] = ids(min(seq, _size(config, "max_target_positions", default=seq)))
    if "use_cache" in named:
        found["use_cache"] = False
    return found
