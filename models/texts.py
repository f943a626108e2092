# SPDX-License-Identifier: Apache-2.0
"""Models that embed and rerank texts, with their pooling in the graph, at the sizes of public checkpoints.

Pooling is that of sentence-transformers: the mean of the real tokens, normalized, or the first token. ``tiny`` is for tests.
"""

from __future__ import annotations

from typing import Any

from architectures import Architecture

_FORMS = (("torchscript", "eager"),)  # of which ONNX Runtime's transformers optimizer fuses attention
_MINILM: dict[str, Any] = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
}
_TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}


def _of(config: str, model: str, settings: dict[str, Any], inputs: str) -> Architecture:
    return Architecture(config, model, settings, inputs, _FORMS)


TEXTS: dict[str, Architecture] = {
    "minilm-l6": _of("BertConfig", "BertModel", _MINILM, "texts-mean"),
    "bert-base": _of("BertConfig", "BertModel", {}, "texts-mean"),
    "modernbert-base": _of("ModernBertConfig", "ModernBertModel", {}, "texts-first"),
    "e5-small": _of(
        "BertConfig", "BertModel", {**_MINILM, "num_hidden_layers": 12, "vocab_size": 250037}, "texts-mean"
    ),
    "reranker": _of("BertConfig", "BertForSequenceClassification", {**_MINILM, "num_labels": 1}, "texts-pairs"),
    "tiny": _of("BertConfig", "BertModel", _TINY, "texts-mean"),
}
