# SPDX-License-Identifier: Apache-2.0
"""The six models of STOF's paper (PPoPP '26), each with a BigBird mask (bigbird.py), at the sizes that are measured.

Positions go to 2048. The paper does not say which T5 and LLaMA it takes; its code has LLaMA with 24 layers of 16 heads of 64.
A ViT has as many patches as others have tokens, and a class token.
"""

from __future__ import annotations

from typing import Any

from architectures import Architecture

_POSITIONS = 2048
_FORMS = (("dynamo", "sdpa"),)
_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
_IMAGES = {128: (128, 256), 512: (256, 512), 2048: (512, 1024)}  # of patches of 16 x 16


def _of(config: str, model: str, settings: dict[str, Any], inputs: str = "bigbird") -> Architecture:
    return Architecture(config, model, settings, inputs, _FORMS)


PAPER: dict[str, Architecture] = {
    "bert-base": _of("BertConfig", "BertModel", {"max_position_embeddings": _POSITIONS}),
    "bert-large": _of(
        "BertConfig", "BertModel", {**_LARGE, "intermediate_size": 4096, "max_position_embeddings": _POSITIONS}
    ),
    "gpt2": _of("GPT2Config", "GPT2Model", {"n_positions": _POSITIONS, "use_cache": False}),
    "llama": _of(
        "LlamaConfig",
        "LlamaModel",
        {**_LARGE, "intermediate_size": 2816, "max_position_embeddings": _POSITIONS, "use_cache": False},
    ),
    "t5-base": _of(
        "T5Config",
        "T5Model",
        {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "use_cache": False},
        "bigbird-seq2seq",
    ),
    **{
        f"vit-base-{length}": _of("ViTConfig", "ViTModel", {"image_size": list(image)}, "bigbird-pixels")
        for length, image in _IMAGES.items()
    },
}
