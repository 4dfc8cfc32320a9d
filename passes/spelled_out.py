"""PyTorch's fused attention layers, written out in the ATen calls that their kernels stand for."""
from __future__ import annotations

import math

import torch

F = torch.nn.functional


def encoder_layer(src, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, use_gelu, norm_first, eps, norm_weight_1, norm_bias_1,
                  norm_weight_2, norm_bias_2, ffn_weight_1, ffn_bias_1, ffn_weight_2, ffn_bias_2, mask=None, mask_type=None):
    """`torch._transformer_encoder_layer_fwd`, which `nn.TransformerEncoderLayer` calls in eval mode without gradients. src: (B, N, E).

    Source: aten/src/ATen/native/transformers/transformer.cpp and attention.cpp. A mask counts as Boolean there, true where a key is hidden, whatever
    its dtype; mask_type says that its shape is (N, N) (0), (B, N) (1) or (B, heads, N, N) (2).
    """
    def norm(x, weight, bias):
        return F.layer_norm(x, (embed_dim,), weight, bias, eps)

    def attend(x):
        q, k, v = (t.unflatten(-1, (num_heads, -1)).transpose(1, 2) for t in F.linear(x, qkv_weight, qkv_bias).chunk(3, -1))
        scores = (q / math.sqrt(embed_dim // num_heads)) @ k.transpose(-1, -2)
        if mask is not None:
            hidden = mask.to(torch.bool)
            scores = scores.masked_fill(hidden[:, None, None] if mask_type == 1 else hidden, -math.inf)
        return F.linear((scores.softmax(-1) @ v).transpose(1, 2).flatten(2), proj_weight, proj_bias)

    def feed_forward(x):
        inner = torch._addmm_activation(ffn_bias_1, x.flatten(0, 1), ffn_weight_1.t(), use_gelu=use_gelu)
        return torch.addmm(ffn_bias_2, inner, ffn_weight_2.t()).unflatten(0, x.shape[:2])

    if norm_first:
        x = src + attend(norm(src, norm_weight_1, norm_bias_1))
        return x + feed_forward(norm(x, norm_weight_2, norm_bias_2))
    x = norm(src + attend(src), norm_weight_1, norm_bias_1)
    return norm(x + feed_forward(x), norm_weight_2, norm_bias_2)
