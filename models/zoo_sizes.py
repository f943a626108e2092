# SPDX-License-Identifier: Apache-2.0
"""What architectures of the zoo share: tiny sizes, with windows of 20 and less, so that lengths of 40 exceed them."""

from __future__ import annotations

from typing import Any

from architectures import ALL, TORCH, Architecture, Forms, only

NARROW = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 40, "max_position_embeddings": 512}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4}
ENCODER = {**NARROW, **LAYERS}
DECODER = {**ENCODER, **TOKENS, "num_key_value_heads": 2, "head_dim": 8, "use_cache": False}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20}
MODERNBERT = {**ENCODER, **TOKENS, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 16}
TRACED = only(TORCH, "torchscript")
UNFUSED: Forms = (("optimum", "eager"),)
FEW = (("dynamo", "sdpa"), ("dynamo", "eager"), ("torchscript", "eager"))
SOME: Forms = (("torchscript", "eager"), ("dynamo", "sdpa"))
SOME_EAGER: Forms = (("torchscript", "eager"), ("dynamo", "eager"))
GPT = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
GROUPS = ("q_groups", "k_groups", "v_groups", "post_attention_groups", "intermediate_groups", "output_groups")
SEQ2SEQ = {
    "vocab_size": 96,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": 256,
    "use_cache": False,
    **TOKENS,
    "decoder_start_token_id": 2,
}
T5 = {
    "vocab_size": 96,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 40,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "use_cache": False,
    "decoder_start_token_id": 0,
}
VISION = {"image_size": 48, "patch_size": 8, "hidden_size": 32, "intermediate_size": 40, **LAYERS}
SPEECH = {
    "hidden_size": 32,
    "intermediate_size": 40,
    **LAYERS,
    "conv_dim": (16, 16),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 8),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "feat_extract_norm": "layer",
    "apply_spec_augment": False,
}


def decoder(config: str, model: str, inputs: str = "text", forms: Forms = ALL, **settings: Any) -> Architecture:
    """A decoder of the shared sizes."""
    return Architecture(config, model, {**DECODER, **settings}, inputs, forms)
