# SPDX-License-Identifier: Apache-2.0
"""Decoders with a KV cache whose MLPs have true zeros, wide enough for StofSparseMLP."""

from __future__ import annotations

from architectures import Architecture
from zoo_sizes import SOME, TRACED, decoder

_CACHED = {"use_cache": True, "intermediate_size": 160}

MLP: dict[str, Architecture] = {
    # relu(gate - (mean + z · std)) -> gelu in the first layer, gelu alone in the second one.
    "gemma3n": decoder(
        "Gemma3nTextConfig",
        "Gemma3nTextModel",
        "cached",
        TRACED,
        **_CACHED | {"intermediate_size": 640},
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=20,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=96,
        laurel_rank=4,
        num_kv_shared_layers=0,
        activation_sparsity_pattern=[0.95, 0.0],
    ),
    "persimmon": decoder("PersimmonConfig", "PersimmonModel", "cached", SOME, **_CACHED, num_key_value_heads=4),
    "bitnet": decoder("BitNetConfig", "BitNetModel", "cached", SOME, **_CACHED),
    "opt": decoder(
        "OPTConfig",
        "OPTModel",
        "cached",
        SOME,
        **_CACHED,
        num_key_value_heads=4,
        ffn_dim=160,
        word_embed_proj_dim=32,
    ),
    "nemotron": decoder("NemotronConfig", "NemotronModel", "cached", SOME, **_CACHED),
    "arcee": decoder("ArceeConfig", "ArceeModel", "cached", SOME, **_CACHED),
    # Gate and up are one matmul; with relu in place of silu, as fine-tuned checkpoints have it.
    "phi3-relu": decoder("Phi3Config", "Phi3Model", "cached", SOME, **_CACHED, hidden_act="relu"),
    "glm4-relu": decoder("Glm4Config", "Glm4Model", "cached", (("dynamo", "sdpa"),), **_CACHED, hidden_act="relu"),
}
