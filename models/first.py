# SPDX-License-Identifier: Apache-2.0
"""The first architectures: at their real width, for benchmarks, and narrow, for tests."""

from __future__ import annotations

from typing import Any

from architectures import TORCH, Architecture, Forms, only

# Sizes of the narrow forms: two to four layers, windows that lengths of 40 exceed.
_NARROW = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 1024}
_NARROW_GQA = {**_NARROW, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DYNAMO = only(TORCH, "dynamo")  # the tracer fails with "unordered_map::at"


def _of(config: str, model: str, settings: dict[str, Any], forms: Forms = TORCH) -> Architecture:
    return Architecture(config, model, settings, forms=forms)


FIRST: dict[str, Architecture] = {
    "modernbert-base": _of("ModernBertConfig", "ModernBertModel", {}),
    "bert-base": _of("BertConfig", "BertModel", {}),
    "mistral-4l": _of(
        "MistralConfig",
        "MistralModel",
        {"num_hidden_layers": 4, "sliding_window": 512, "use_cache": False},
    ),
    "gemma3-6l": _of(
        "Gemma3TextConfig",
        "Gemma3TextModel",
        {
            "num_hidden_layers": 6,
            "hidden_size": 640,
            "intermediate_size": 2048,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 512,
            "vocab_size": 32768,
            "use_cache": False,
        },
    ),
    "embeddinggemma-6l": _of(
        "Gemma3TextConfig",
        "Gemma3TextModel",
        {
            "num_hidden_layers": 6,
            "hidden_size": 768,
            "intermediate_size": 1152,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 512,
            "vocab_size": 32768,
            "use_cache": False,
            "use_bidirectional_attention": True,
        },
        _DYNAMO,
    ),
    "narrow/modernbert": _of(
        "ModernBertConfig",
        "ModernBertModel",
        {
            **_NARROW,
            **_TOKENS,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "local_attention": 32,
            "cls_token_id": 1,
            "sep_token_id": 2,
        },
    ),
    "narrow/bert": _of("BertConfig", "BertModel", {**_NARROW, "num_hidden_layers": 2, "num_attention_heads": 4}),
    "narrow/mistral": _of(
        "MistralConfig",
        "MistralModel",
        {**_NARROW_GQA, "num_hidden_layers": 2, "sliding_window": 20, "use_cache": False},
    ),
    "narrow/gemma3": _of(
        "Gemma3TextConfig",
        "Gemma3TextModel",
        {
            **_NARROW_GQA,
            "num_hidden_layers": 3,
            "sliding_window": 20,
            "use_cache": False,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "narrow/embeddinggemma": _of(
        "Gemma3TextConfig",
        "Gemma3TextModel",
        {
            **_NARROW_GQA,
            "num_hidden_layers": 3,
            "sliding_window": 20,
            "use_cache": False,
            "use_bidirectional_attention": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        _DYNAMO,
    ),
}
