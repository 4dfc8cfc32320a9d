"""Tiny configurations: every config class of `transformers`, shrunk by the names of its fields.

The environment variable ZOO_LENGTH gives text another length than 24 tokens.
"""
from __future__ import annotations

import dataclasses
import inspect
import os
import re
import warnings
from typing import Any

warnings.filterwarnings("ignore")
import transformers  # noqa: E402
from transformers import CONFIG_MAPPING  # noqa: E402

transformers.logging.set_verbosity_error()

S = int(os.environ.get("ZOO_LENGTH", "24"))
B, S_DEC = 2, S // 2  # batch, sequence, decoder sequence (q_len != kv_len in cross attention)
HID, HEADS, HEAD_DIM, LAYERS, FFN, VOCAB = 64, 4, 16, 2, 96, 128

# attribute name -> tiny value; applied only when the config class has the attribute
TINY: dict[str, Any] = {}
for _v, _names in (
    (HID, "hidden_size d_model n_embd dim d_embed encoder_hidden_size emb_dim embed_dim"),
    (LAYERS, "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers"
            " num_encoder_layers num_encoder_blocks_ depth"),
    (HEADS, "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads"
           " num_encoder_attention_heads num_decoder_attention_heads"),
    (FFN, "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff ffn_hidden_size inner_dim d_inner hidden_dim"
         " moe_intermediate_size shared_expert_intermediate_size intermediate_dim expert_ffn_dim"
         " dense_intermediate_size shared_intermediate_size expert_hidden_size"),
    (HEAD_DIM, "head_dim d_kv attention_head_size kv_channels"),
    (VOCAB, "vocab_size text_vocab_size decoder_vocab_size"),
    (max(64, 2 * S), "max_position_embeddings n_positions n_ctx max_source_positions max_target_positions max_encoder_position_embeddings"
        " max_decoder_position_embeddings original_max_position_embeddings_ max_seq_len seq_length"),
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    (2, "num_experts_per_tok moe_topk_ moe_k_"),
    (32, "image_size projection_dim"),
    (8, "patch_size"),
):
    for _n in _names.split():
        if not _n.endswith("_"):
            TINY[_n] = _v
KV_NAMES = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num")
DROPOUT_RE = re.compile(r"drop|pdrop")
DROPOUT_SKIP = re.compile(r"layerdrop|drop_path|layer_drop|path_drop|stochastic|token_drop|drop_tokens|mask_|_mask")


def _fields(cls) -> set[str]:
    names = set()
    if dataclasses.is_dataclass(cls):
        names |= {f.name for f in dataclasses.fields(cls)}
    names |= set(inspect.signature(cls.__init__).parameters)
    return names


def tiny_kwargs(cls, dropout: float) -> dict[str, Any]:
    """kwargs that shrink config class `cls` (top level only)."""
    try:
        default = cls()
    except Exception:
        default = None
    names, kw = _fields(cls), {}
    get = lambda n, d=None: getattr(default, n, d) if default is not None else d
    for n in names:
        cur = get(n)
        if n in TINY and not isinstance(cur, (list, tuple, dict)):
            kw[n] = TINY[n]
        elif n.endswith("_token_id") and isinstance(cur, int) and cur >= VOCAB:
            kw[n] = 1 + (len(n) % 7)
        elif DROPOUT_RE.search(n) and isinstance(cur, (int, float)) and not isinstance(cur, bool):
            kw[n] = type(cur)(0) if DROPOUT_SKIP.search(n) else dropout
        elif n == "layer_types" and isinstance(cur, list):
            kinds = list(dict.fromkeys(cur))
            kw[n] = (kinds * LAYERS)[:max(LAYERS, len(kinds))] if len(kinds) <= LAYERS else kinds[:LAYERS]
    heads = next((get(n) for n in ("num_attention_heads", "n_head", "n_heads", "num_heads") if isinstance(get(n), int)), None)
    for n in KV_NAMES:
        cur = get(n)
        if n in names and isinstance(cur, int):
            kw[n] = 1 if cur == 1 else (HEADS if cur == heads else HEADS // 2)
    if "sliding_window" in names and get("sliding_window") is not None:
        kw["sliding_window"] = 8
    return kw


def shrink(key: str, overrides: dict | None = None, dropout: float = 0.1, raw: bool = False):
    """Tiny config for model type `key`; `overrides` wins, nested dicts shrink the nested sub-configs."""
    cls = CONFIG_MAPPING[key] if key in CONFIG_MAPPING else getattr(transformers, key)
    overrides = dict(overrides or {})
    kw = {} if raw else tiny_kwargs(cls, dropout)
    for sub, subcls in (getattr(cls, "sub_configs", None) or {}).items():
        sub_over = overrides.pop(sub, None)
        if sub_over is not None and not isinstance(sub_over, dict):
            kw[sub] = sub_over
            continue
        sub_over = dict(sub_over or {})
        subtype = sub_over.pop("_type", None)
        if subtype is None:
            subtype = getattr(subcls, "model_type", None)
        if not subtype and not sub_over:
            continue
        if subtype not in CONFIG_MAPPING and hasattr(subcls, "model_type") and (subcls.model_type or "") == (subtype or ""):
            sc = subcls(**{**tiny_kwargs(subcls, dropout), **sub_over})
        else:
            sc = shrink(subtype, sub_over, dropout)
        kw[sub] = sc
    kw.update(overrides)
    kw.pop("self", None)
    return cls(**kw)
