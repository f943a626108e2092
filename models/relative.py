# SPDX-License-Identifier: Apache-2.0
"""Architectures whose scores have products of queries or keys with rows by relative position, beyond those of the zoo."""

from __future__ import annotations

from typing import Any

from architectures import EAGER, Architecture, Forms, only
from zoo_sizes import ENCODER, SOME_EAGER, SPEECH, VISION

_TRACED = only(EAGER, "torchscript")
_LAYER: dict[str, Any] = {**ENCODER, "num_hidden_layers": 1}
_DEBERTA: dict[str, Any] = {**_LAYER, "relative_attention": True, "position_biased_input": False}
_BUCKETS: dict[str, Any] = {"position_buckets": 16, "norm_rel_ebd": "layer_norm"}
_SPEECH: dict[str, Any] = {**SPEECH, "num_hidden_layers": 1}
_PARAKEET: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "num_mel_bins": 16,
    "subsampling_conv_channels": 8,
    "max_position_embeddings": 500,
}
_BERT2: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "feature_projection_input_dim": 24,
    "left_max_position_embeddings": 12,
    "right_max_position_embeddings": 4,
}


def _deberta(terms: list[str], forms: Forms = SOME_EAGER, **settings: Any) -> Architecture:
    return Architecture(
        "DebertaV2Config", "DebertaV2Model", {**_DEBERTA, "pos_att_type": terms, **settings}, forms=forms
    )


def _conformer(inputs: str) -> Architecture:
    settings = {**_SPEECH, "position_embeddings_type": "relative", "conv_depthwise_kernel_size": 3}
    forms = only(SOME_EAGER, "dynamo")
    return Architecture("Wav2Vec2ConformerConfig", "Wav2Vec2ConformerModel", settings, inputs, forms)


def _parakeet(inputs: str, forms: Forms) -> Architecture:
    return Architecture("ParakeetEncoderConfig", "ParakeetEncoder", _PARAKEET, inputs, forms)


RELATIVE: dict[str, Architecture] = {
    # The projections of queries and keys serve positions as well.
    "deberta-v3": _deberta(["p2c", "c2p"], share_att_key=True, num_hidden_layers=2, **_BUCKETS),
    "deberta-own": _deberta(["p2c", "c2p"], share_att_key=False, position_buckets=-1),
    "deberta-c2p": _deberta(["c2p"], _TRACED, share_att_key=True, **_BUCKETS),
    "deberta-p2c": _deberta(["p2c"], _TRACED, share_att_key=False, **_BUCKETS),
    "deberta-v1": Architecture(
        "DebertaConfig",
        "DebertaModel",
        {**_DEBERTA, "pos_att_type": ["p2c", "c2p"], "talking_head": False},
        forms=SOME_EAGER,
    ),
    "conformer": _conformer("wave"),
    # A frame attends those that are near.
    "conformer-window": _conformer("near-frames"),
    "parakeet": _parakeet("frames", SOME_EAGER),
    "parakeet-window": _parakeet("near-frames", _TRACED),
    "wav2vec2-bert": Architecture(
        "Wav2Vec2BertConfig",
        "Wav2Vec2BertModel",
        {**_BERT2, "position_embeddings_type": "relative_key"},
        "frames",
        SOME_EAGER,
    ),
    "speecht5": Architecture(
        "SpeechT5Config",
        "SpeechT5ForTextToSpeech",
        {
            "vocab_size": 96,
            "hidden_size": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 40,
            "decoder_ffn_dim": 40,
            "encoder_max_relative_position": 16,
        },
        "speecht5-encoder",
        _TRACED,
    ),
    "vits": Architecture(
        "VitsConfig",
        "VitsModel",
        {
            "vocab_size": 96,
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "ffn_dim": 40,
            "window_size": 4,
            "flow_size": 32,
        },
        "vits-encoder",
        _TRACED,
    ),
    "vitdet": Architecture(
        "VitDetConfig",
        "VitDetModel",
        {
            **VISION,
            "num_hidden_layers": 2,
            "pretrain_image_size": 48,
            "window_size": 4,
            "window_block_indices": [0],
            "residual_block_indices": [],
            "use_relative_position_embeddings": True,
        },
        "pixels",
        SOME_EAGER,
    ),
}
