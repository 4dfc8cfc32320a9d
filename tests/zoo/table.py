"""The entries: unmodified `transformers` models of every kind of attention. Nothing is downloaded."""
from __future__ import annotations

import torch

from .entry import Entry
from .inputs import _ids, _mask, extra, in_bbox, in_clip, in_img, in_s2s, in_s2s_long, in_text, in_text_long, in_video, in_wave, rand
from .shrink import B, FFN, HEAD_DIM, HEADS, HID, S, S_DEC, VOCAB

_TABLE: list[Entry] = []


def _add(family, rows, inputs=in_text):
    for r in rows:
        if isinstance(r, str):
            r = (r,)
        name, key, over, opts = (list(r) + [None] * 4)[:4]
        opts = dict(opts or {})
        opts.setdefault("inputs", inputs)
        _TABLE.append(Entry(name=name, family=family, key=key or name, over=over or {}, **opts))


_M = "transformers.models."

_add("encoder", [
    "bert", "albert", "electra", "camembert", "xlm-roberta", "ernie", "megatron-bert",
    ("distilbert", None, {"hidden_dim": FFN}), "mpnet", "convbert", "roformer", "splinter",
    ("xlm-roberta-xl", None, {}), "roberta-prelayernorm", "data2vec-text", "roc_bert", "eurobert",
    ("mobilebert", None, {"embedding_size": 32, "intra_bottleneck_size": 64, "true_hidden_size": 64}),
    ("deberta", None, {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 32}),
    ("deberta-v2", None, {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 16,
                          "share_att_key": True, "norm_rel_ebd": "layer_norm"}),
    ("xlm", None, {"n_words": VOCAB}),
    ("xlnet", None, {"d_head": HEAD_DIM, "n_head": HEADS}),
    ("funnel", None, {"block_sizes": [1, 1], "num_decoder_layers": 1, "d_head": HEAD_DIM}, {"cls": "FunnelModel"}),
    ("longformer", None, {"attention_window": [8, 8]}, {"inputs": in_text_long(32)}),
    ("big_bird-sparse", "big_bird", {"block_size": 4, "num_random_blocks": 2, "attention_type": "block_sparse",
                                     "max_position_embeddings": 96}, {"inputs": in_text_long(64)}),
    ("reformer", None, {"attn_layers": ["local", "lsh"], "local_attn_chunk_length": 8, "lsh_attn_chunk_length": 8,
                        "num_buckets": 4, "num_hashes": 1, "axial_pos_embds": False, "feed_forward_size": FFN,
                        "attention_head_size": HEAD_DIM, "is_decoder": False, "hash_seed": 0,
                        "max_position_embeddings": 64}, {"inputs": in_text_long(32)}),
    # a 2-D mask crashes nystromformer in transformers 5.17 (4-D bidirectional mask vs landmark kernels)
    ("nystromformer", None, {"segment_means_seq_len": S, "num_landmarks": 4}, {"inputs": lambda cfg, g: dict(input_ids=_ids(g))}),
    "fnet",
    ("canine", None, {"local_transformer_stride": 8, "downsampling_rate": 4, "num_hash_buckets": 64},
     {"inputs": in_text_long(32)}),
    ("modernbert", None, {"local_attention": 8, "global_attn_every_n_layers": 2}),
    ("lilt", None, {"hidden_size": 48}, {"inputs": in_bbox}),
    ("luke", None, {"entity_vocab_size": 20, "entity_emb_size": 32}),
    "markuplm",
    ("visual_bert", None, {"visual_embedding_dim": 20},
     {"inputs": extra(in_text, visual_embeds=rand(B, 5, 20), visual_attention_mask=lambda g: torch.ones(B, 5))}),
    ("yoso", None, {"use_expectation": True, "hash_code_len": 4, "num_hash": 4}),
])

_add("decoder", [
    "gpt2", ("gpt2-reorder-upcast", "gpt2", {"reorder_and_upcast_attn": True, "scale_attn_by_inverse_layer_idx": True}),
    "openai-gpt", ("gpt_bigcode", None, {"multi_query": True}),
    ("gpt_neo", None, {"attention_types": [[["global", "local"], 1]], "window_size": 8, "num_layers": 2}),
    ("gptj", None, {"rotary_dim": 8}),
    ("ctrl", None, {"dff": FFN}), "bloom",
    ("falcon-rotary", "falcon", {"num_kv_heads": 1}),
    ("falcon-gqa", "falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("mpt", None, {"d_model": HID, "n_heads": HEADS, "n_layers": 2, "max_seq_len": max(64, 2 * S)}),
    ("opt", None, {"word_embed_proj_dim": HID}), "biogpt",
    ("llama", None, {"num_key_value_heads": 2}), ("mistral", None, {}), ("mixtral", None, {"sliding_window": None}),
    ("qwen2", None, {"num_key_value_heads": 2}),
    ("qwen2_moe", None, {}), ("qwen3", None, {"num_key_value_heads": 2}),
    ("gemma2", None, {"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 24}),
    ("gemma3_text", None, {"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 24}),
    ("phi", None, {"num_key_value_heads": 4}), "phimoe",
    ("starcoder2", None, {"sliding_window": 8}),
    ("cohere", None, {"num_key_value_heads": 2}),
    ("olmo", None, {"clip_qkv": 8.0}), ("olmo2", None, {"num_key_value_heads": 2}), "olmoe",
    ("granite", None, {"attention_multiplier": 0.1, "num_key_value_heads": 2}),
    ("deepseek_v2", None, {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
                           "v_head_dim": 12, "head_dim": 8, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
                           "num_key_value_heads": 4}),
    ("gpt_oss", None, {"num_key_value_heads": 2, "layer_types": ["sliding_attention", "full_attention"]}),
    ("nemotron", None, {"num_key_value_heads": 2}), ("persimmon", None, {}), ("glm", None, {"num_key_value_heads": 2}),
    ("glm4", None, {"num_key_value_heads": 2}),
    ("smollm3", None, {"num_key_value_heads": 2, "pad_token_id": 0, "layer_types": ["full_attention"] * 2}),
    ("diffllama", None, {"num_key_value_heads": 2, "attention_dropout": 0.0}),
    ("doge", None, {"num_key_value_heads": 2, "keep_window_size": 16}), ("bitnet", None, {"num_key_value_heads": 2}),
    ("exaone4", None, {"num_key_value_heads": 2, "layer_types": ["sliding_attention", "full_attention"],
                       "sliding_window": 8}),
    ("modernbert-decoder", None, {"local_attention": 8, "layer_types": ["sliding_attention", "full_attention"]}),
    ("jetmoe", None, {"num_key_value_heads": 2, "kv_channels": HEAD_DIM}),
    ("recurrent_gemma", None, {"num_hidden_layers": 3, "lru_width": HID, "attention_window_size": 8,
                               "num_key_value_heads": 1}),
    ("dbrx", None, {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "attn_pdrop": 0.0, "rope_theta": 10000.0},
                    "ffn_config": {"ffn_hidden_size": FFN, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": HID}}),
    ("minimax", None, {"num_key_value_heads": 2, "layer_types": ["linear_attention", "full_attention"], "block_size": 8}),
    ("longcat_flash", None, {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
                             "v_head_dim": 12, "head_dim": 8, "num_key_value_heads": 4, "zero_expert_num": 2,
                             "n_routed_experts": 4, "moe_topk": 2, "ffn_hidden_size": FFN, "expert_ffn_hidden_size": 32}),
    ("arcee", None, {"num_key_value_heads": 2}), ("seed_oss", None, {"num_key_value_heads": 2}),
    ("apertus", None, {"num_key_value_heads": 2}),
    ("nanochat", None, {"num_key_value_heads": 2}),
    ("granite_swa", None, {"num_key_value_heads": 2}),
    ("decision_transformer", None, {"state_dim": 5, "act_dim": 3, "max_ep_len": 64},
     {"inputs": lambda cfg, g: dict(states=torch.randn(B, 8, 5, generator=g), actions=torch.randn(B, 8, 3, generator=g),
                                    rewards=torch.randn(B, 8, 1, generator=g), returns_to_go=torch.randn(B, 8, 1, generator=g),
                                    timesteps=torch.arange(8).expand(B, 8), attention_mask=_mask(8, pad=3))}),
])

_add("seq2seq", [
    ("t5", None, {"relative_attention_num_buckets": 8}),
    ("umt5", None, {"relative_attention_num_buckets": 8}),
    ("switch_transformers", None, {"num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}),
    ("longt5-tglobal", "longt5", {"local_radius": 3, "global_block_size": 4, "encoder_attention_type": "transient-global"}),
    "bart", "pegasus",
    ("marian", None, {"decoder_vocab_size": VOCAB}), "blenderbot-small", "m2m_100", "plbart", "mvp",
    ("nllb-moe", None, {"encoder_sparse_step": 2, "decoder_sparse_step": 2, "num_experts": 4}),
    ("prophetnet", None, {"num_encoder_layers": 2, "num_decoder_layers": 2, "ngram": 2, "num_buckets": 8,
                          "relative_max_distance": 16}),
    ("led", None, {"attention_window": [8, 8]}, {"inputs": in_s2s_long(32)}),
], inputs=in_s2s)

_RESNET = {"_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1],
           "out_features": ["stage4"]}


def _resnet(out=("stage4",)):
    from transformers import ResNetConfig
    return ResNetConfig(embedding_size=8, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], out_features=list(out),
                        layer_type="basic")


_DETR = lambda out=("stage4",), **k: dict(use_timm_backbone=False, use_pretrained_backbone=False, backbone=None,
                                          backbone_config=_resnet(out), num_queries=10, **k)
_add("vision", [
    "vit", "beit", "dinov2", "vit_mae", "vit_msn", "ijepa", "dinov3_vit",
    ("yolos", None, {"image_size": [32, 32], "num_detection_tokens": 4}),
    ("swin", None, {"patch_size": 2, "embed_dim": 16, "depths": [2, 1], "num_heads": [2, 4], "window_size": 4}),
    ("swin2sr", None, {"image_size": 16, "patch_size": 1, "embed_dim": 16, "depths": [2], "num_heads": [2], "window_size": 4},
     {"inputs": in_img(16)}),
    ("segformer", None, {"depths": [1, 1], "hidden_sizes": [16, 32], "num_encoder_blocks": 2, "sr_ratios": [4, 2],
                         "num_attention_heads": [1, 2], "patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2]}),
    ("pvt", None, {"depths": [1] * 4, "hidden_sizes": [16, 32, 32, 32], "sequence_reduction_ratios": [8, 4, 2, 1], "patch_sizes": [4, 2, 2, 2],
             "num_attention_heads": [1, 2, 2, 2], "strides": [4, 2, 2, 2], "mlp_ratios": [2] * 4, "image_size": 64, "patch_size": 4},
     {"inputs": in_img(64)}),
    ("levit", None, {"image_size": 64, "patch_size": 16, "hidden_sizes": [32, 48, 64], "num_attention_heads": [2, 3, 4], "depths": [1, 1, 1],
                     "key_dim": [8, 8, 8]}, {"inputs": in_img(64)}),
    ("mobilevit", None, {"image_size": 64, "patch_size": 2, "hidden_sizes": [24, 32, 40], "neck_hidden_sizes": [8, 8, 16, 24, 32, 40, 48],
                         "num_attention_heads": 4}, {"inputs": in_img(64)}),
    ("hiera", None, {"image_size": [32, 32], "patch_size": [7, 7], "embed_dim": 16, "depths": [1, 1], "num_heads": [1, 2],
                     "query_stride": [2, 2], "masked_unit_size": [4, 4], "num_query_pool": 1, "patch_stride": [2, 2]}),
    ("dpt", None, {"backbone_out_indices": [0, 1, 2, 3], "num_hidden_layers": 4, "neck_hidden_sizes": [8, 8, 8, 8], "is_hybrid": False}),
    ("detr", None, _DETR(), {"inputs": in_img(64)}),
    ("table-transformer", None, _DETR(), {"inputs": in_img(64)}),
    ("dab-detr", None, _DETR(), {"inputs": in_img(64)}),
    ("deformable_detr", None, _DETR(("stage2", "stage3", "stage4"), num_feature_levels=4), {"inputs": in_img(64)}),
    ("sam-vision", "SamVisionConfig", {"window_size": 2, "global_attn_indexes": [1], "output_channels": 16, "num_pos_feats": 8, "mlp_dim": FFN},
     {"cls": "SamVisionModel"}),
    ("sam", None, {"vision_config": {"window_size": 2, "global_attn_indexes": [1], "output_channels": 16, "num_pos_feats": 8, "mlp_dim": FFN},
                   "prompt_encoder_config": {"hidden_size": 16, "image_size": 32, "patch_size": 8, "mask_input_channels": 4},
                   "mask_decoder_config": {"hidden_size": 16, "mlp_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
                                           "iou_head_hidden_dim": 16}},
     {"inputs": extra(in_img(32), input_points=lambda g: torch.rand(B, 1, 2, 2, generator=g) * 30)}),
    ("vivit", None, {"num_frames": 4, "tubelet_size": [2, 8, 8]}, {"inputs": in_video()}),
    ("timesformer", None, {"num_frames": 4}, {"inputs": in_video()}),
    ("vjepa2", None, {"frames_per_clip": 4, "tubelet_size": 2, "crop_size": 32, "pred_hidden_size": 48, "pred_num_attention_heads": 4,
                      "pred_num_hidden_layers": 2}, {"inputs": lambda cfg, g: dict(pixel_values_videos=torch.randn(B, 4, 3, 32, 32, generator=g))}),
    ("pixtral", None, {}, {"inputs": extra(in_img(32), image_sizes=[(32, 32), (24, 32)])}),
    ("maskformer-swin", None, {"patch_size": 2, "embed_dim": 16, "depths": [2, 1], "num_heads": [2, 4], "window_size": 4}),
    ("glpn", None, {"depths": [1, 1], "hidden_sizes": [16, 32], "num_encoder_blocks": 2, "sr_ratios": [4, 2],
                    "num_attention_heads": [1, 2], "patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2]}),
], inputs=in_img())

_WAV = {"conv_dim": [16, 16], "conv_stride": [5, 4], "conv_kernel": [10, 4], "num_feat_extract_layers": 2,
        "feat_extract_norm": "layer", "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
        "mask_time_prob": 0.0, "mask_feature_prob": 0.0, "apply_spec_augment": False}
_add("audio", [
    ("wav2vec2", None, _WAV), ("wavlm", None, {**_WAV, "num_buckets": 16, "max_bucket_distance": 32}),
    ("unispeech", None, _WAV), ("unispeech-sat", None, _WAV),
    ("wav2vec2-conformer-rotary", "wav2vec2-conformer", {**_WAV, "position_embeddings_type": "rotary", "conv_depthwise_kernel_size": 5}),
    ("sew", None, {**_WAV, "squeeze_factor": 2}),
    ("data2vec-audio", None, {**_WAV, "num_conv_pos_embeddings": 2, "conv_pos_kernel_size": 5}),
    ("wav2vec2-bert", None, {"feature_projection_input_dim": 20, "conv_depthwise_kernel_size": 5, "apply_spec_augment": False,
                             "left_max_position_embeddings": 6, "right_max_position_embeddings": 3},
     {"inputs": lambda cfg, g: dict(input_features=torch.randn(B, S, 20, generator=g), attention_mask=_mask())}),
    ("speech_to_text", None, {"input_feat_per_channel": 16, "conv_channels": 32, "max_source_positions": 64},
     {"inputs": lambda cfg, g: dict(input_features=torch.randn(B, 4 * S, 16, generator=g), attention_mask=_mask(4 * S, pad=28),
                                    decoder_input_ids=_ids(g, S_DEC))}),
    ("speecht5", None, {**_WAV, "encoder_layers": 2, "decoder_layers": 2, "max_speech_positions": 64, "max_text_positions": 64},
     {"cls": "SpeechT5ForSpeechToText",
      "inputs": extra(in_wave(), decoder_input_ids=lambda g: _ids(g, S_DEC))}),
    ("audio-spectrogram-transformer", None, {"num_mel_bins": 16, "max_length": 32, "time_stride": 8, "frequency_stride": 8},
     {"inputs": lambda cfg, g: dict(input_values=torch.randn(B, 32, 16, generator=g))}),
    ("moonshine", None, {"encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2, "encoder_num_attention_heads": 4,
                         "decoder_num_attention_heads": 4, "decoder_start_token_id": 1},
     {"inputs": lambda cfg, g: dict(input_values=torch.randn(B, 6000, generator=g), decoder_input_ids=_ids(g, S_DEC))}),
    ("seamless_m4t-speech-encoder", "seamless_m4t", {"speech_encoder_layers": 2, "speech_encoder_attention_heads": 4,
        "speech_encoder_intermediate_size": FFN, "feature_projection_input_dim": 20, "conv_depthwise_kernel_size": 5},
     {"cls": _M + "seamless_m4t.modeling_seamless_m4t:SeamlessM4TSpeechEncoder",
      "inputs": lambda cfg, g: dict(input_features=torch.randn(B, S, 20, generator=g), attention_mask=_mask())}),
], inputs=in_wave())

_add("multimodal", [
    ("clip", None, {"text_config": {"projection_dim": 32}, "vision_config": {"projection_dim": 32}}), ("blip", None, {}),
    ("altclip", None, {}), ("chinese_clip", None, {}),
    ("blip-text", "blip_text_model", {"encoder_hidden_size": HID, "is_decoder": True}, {"cls": "BlipTextModel",
        "inputs": extra(in_text, encoder_hidden_states=rand(B, 9, HID), encoder_attention_mask=lambda g: _mask(9, pad=3))}),
    ("blip2-qformer", "blip_2_qformer", {"encoder_hidden_size": 48, "cross_attention_frequency": 2},
     {"inputs": lambda cfg, g: dict(query_embeds=torch.randn(B, 6, HID, generator=g), encoder_hidden_states=torch.randn(B, 17, 48, generator=g),
                                    encoder_attention_mask=_mask(17))}),
    ("vilt", None, {"image_size": 32, "patch_size": 8, "max_image_length": -1},
     {"inputs": extra(in_clip, pixel_mask=lambda g: torch.ones(B, 32, 32, dtype=torch.long))}),
    ("lxmert", None, {"l_layers": 1, "x_layers": 1, "r_layers": 1, "visual_feat_dim": 20},
     {"inputs": extra(in_text, visual_feats=rand(B, 6, 20), visual_pos=rand(B, 6, 4))}),
    ("groupvit", None, {"vision_config": {"depths": [1, 1, 0], "num_group_tokens": [4, 2, 0], "num_output_groups": [4, 2, 0]}}),
    ("flava-text", "flava_text_model", {}, {"cls": "FlavaTextModel", "inputs": in_text}),
    ("git", None, {}, {}),
    ("bridgetower", None, {"text_config": {}, "vision_config": {"image_size": 32, "patch_size": 8}},
     {"inputs": extra(in_clip)}),
    ("llava", None, {"text_config": {"_type": "llama", "num_key_value_heads": 2}, "vision_config": {"_type": "clip_vision_model"},
                     "image_token_index": 7, "image_token_id": 7},
     {"inputs": lambda cfg, g: dict(input_ids=torch.cat([torch.full((B, 16), 7), _ids(g, 8)], 1), attention_mask=_mask(pad=4),
                                    pixel_values=torch.randn(B, 3, 32, 32, generator=g))}),
    ("idefics", None, {"additional_vocab_size": 2, "qk_layer_norms": False, "cross_layer_interval": 1, "use_resampler": True,
                       "vision_config": {"embed_dim": HID, "image_size": 32, "patch_size": 8},
                       "perceiver_config": {"resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 2, "resampler_head_dim": 8}},
     {"inputs": extra(in_text, pixel_values=rand(B, 1, 3, 32, 32), image_attention_mask=lambda g: torch.ones(B, S, 1, dtype=torch.long))}),
    ("idefics3", None, {"text_config": {"_type": "llama", "num_key_value_heads": 2}, "scale_factor": 2, "image_token_id": 7},
     {"inputs": lambda cfg, g: dict(input_ids=torch.cat([torch.full((B, 4), 7), _ids(g, 20)], 1), attention_mask=_mask(),
                                    pixel_values=torch.randn(B, 1, 3, 32, 32, generator=g))}),
    ("mllama-text", "mllama_text_model", {"num_hidden_layers": 2, "cross_attention_layers": [1], "num_key_value_heads": 2, "pad_token_id": 0},
     {"cls": "MllamaTextModel", "inputs": extra(in_text, cross_attention_states=rand(B, 9, HID),
                                                cross_attention_mask=lambda g: torch.zeros(B, 1, S, 9),
                                                full_text_row_masked_out_mask=lambda g: torch.ones(B, 1, S, 1))}),
    ("qwen2_vl-text", "qwen2_vl_text", {"num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}, {"inputs": in_text}),
    ("qwen2_vl-vision", "Qwen2VLVisionConfig", {"embed_dim": HID, "depth": 2, "num_heads": 4, "patch_size": 4, "hidden_size": 48},
     {"cls": _M + "qwen2_vl.modeling_qwen2_vl:Qwen2VisionTransformerPretrainedModel",
      "inputs": lambda cfg, g: dict(hidden_states=torch.randn(32, 3 * 2 * 4 * 4, generator=g), grid_thw=torch.tensor([[1, 4, 4], [1, 4, 4]]))}),
    ("udop", None, {"image_size": 32, "patch_size": 8, "relative_attention_num_buckets": 8},
     {"inputs": lambda cfg, g: dict(input_ids=_ids(g), attention_mask=_mask(), bbox=torch.rand(B, S, 4, generator=g).clamp(0, 1),
                                    pixel_values=torch.randn(B, 3, 32, 32, generator=g), decoder_input_ids=_ids(g, S_DEC))}),
    ("x-clip", "xclip", {"projection_dim": HID, "text_config": {"projection_dim": HID}, "vision_config": {"num_frames": 2, "mit_hidden_size": HID, "mit_num_attention_heads": 4, "mit_num_hidden_layers": 1,
                                           "mit_intermediate_size": FFN}, "prompt_layers": 1, "prompt_num_attention_heads": 4},
     {"inputs": lambda cfg, g: dict(input_ids=_ids(g), attention_mask=_mask(), pixel_values=torch.randn(B, 2, 3, 32, 32, generator=g))}),
], inputs=in_clip)


_TS = {"prediction_length": 4, "context_length": 12, "lags_sequence": [1, 2], "num_time_features": 1, "d_model": 32}


def in_ts(cfg, g):
    n = cfg.context_length + max(cfg.lags_sequence)
    return dict(past_values=torch.randn(B, n, generator=g), past_time_features=torch.randn(B, n, 1, generator=g),
                past_observed_mask=torch.ones(B, n), future_values=torch.randn(B, 4, generator=g),
                future_time_features=torch.randn(B, 4, 1, generator=g))


_add("timeseries", [
    ("time_series_transformer", None, _TS), ("informer-full", "informer", {**_TS, "attention_type": "full", "distil": False}), ("informer", None, {**_TS, "attention_type": "prob"}),
    ("autoformer", None, {**_TS, "label_length": 4, "moving_average": 5}),
    ("timesfm", None, {"context_length": 32, "patch_length": 8, "horizon_length": 8},
     {"inputs": lambda cfg, g: dict(past_values=torch.randn(B, 32, generator=g), past_values_padding=torch.zeros(B, 32),
                                    freq=torch.zeros(B, 1, dtype=torch.long))}),
], inputs=in_ts)

_SMALL = {"vocab_size": VOCAB, "hidden_size": HID, "intermediate_size": FFN, "num_hidden_layers": 2, "num_attention_heads": HEADS, "num_key_value_heads": 2,
          "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_PER_LAYER = {"head_dim": HEAD_DIM, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB, "sliding_window": 8,
              "layer_types": ["sliding_attention", "full_attention"]}

_add("decoder", [
    ("gemma4_text", None, {**_SMALL, **_PER_LAYER}, {"raw": True}),
    ("gemma3n_text", None, {**_SMALL, **_PER_LAYER, "num_kv_shared_layers": 0, "laurel_rank": 8, "activation_sparsity_pattern": [0.0, 0.0]}, {"raw": True}),
    # sinks in every layer, a compressed memory beside a window, and softmaxes over streams of the residual
    ("deepseek_v4", None, {"vocab_size": VOCAB, "hidden_size": HID, "num_hidden_layers": 3, "num_attention_heads": HEADS, "head_dim": 32, "q_lora_rank": 32,
                           "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "sliding_window": 8, "o_groups": 2,
                           "o_lora_rank": 16, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4, "max_position_embeddings": 64}, {"raw": True}),
    "deepseek_v32",  # a mask of the keys that a second, smaller attention scores highest: its scores are a matrix of the model's own
    ("falcon_h1", None, {**_SMALL, "mamba_d_ssm": HID, "mamba_n_heads": HEADS, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 8}, {"raw": True}),
    ("dots1", None, {**_SMALL, "moe_intermediate_size": 32, "n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2,
                     "first_k_dense_replace": 1}, {"raw": True}),
])



# Dynamo itself fails on these with *any* backend (transformers 5.17 / torch 2.13): name -> reason
XFAIL: dict[str, str] = {
    "nystromformer": "compiling materialises the bidirectional mask [B,1,S,S] that eager skips; it does not broadcast on landmark kernels",
    "bridgetower": "compiling materialises the cross-attention mask with the wrong kv length (17x17), eager skips it",
    "informer": "compiling materialises a decoder/distilled-encoder mask of the wrong size, eager skips it",
    "autoformer": "same: 4-D mask added to auto-correlation weights of another shape",
    "udop": "boolean setitem with a tuple of 0-d index tensors fails under fake tensors",
}


def entries(names=None, family=None) -> list[Entry]:
    out = []
    for e in _TABLE:
        e.xfail = XFAIL.get(e.name)
        if names is not None and e.name not in names:
            continue
        if family is not None and e.family != family:
            continue
        out.append(e)
    return out
