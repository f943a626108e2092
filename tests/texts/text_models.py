# SPDX-License-Identifier: Apache-2.0
"""Small models of random weights with a WordPiece tokenizer, in the folders that sentence-transformers and Optimum read."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    BertTokenizerFast,
)

LAYERS = 3
WIDTH = 64
_LONGEST = 128
_SYLLABLES = ("ka", "lo", "mi", "ten", "ra", "sun", "vor", "pel")
_WORDS = [first + second for first in _SYLLABLES for second in _SYLLABLES]
_VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *_WORDS, *(f"##{part}" for part in _SYLLABLES)]


def make_tokenizer(folder: Path) -> BertTokenizerFast:
    """A WordPiece tokenizer of 64 words, which their syllables continue."""
    path = folder / "vocab.txt"
    path.write_text("".join(f"{word}\n" for word in _VOCABULARY))
    return BertTokenizerFast(str(path), model_max_length=_LONGEST)


def make_config(labels: int = 2) -> BertConfig:
    """A BERT of three layers. Its large weights make embeddings depend on all words."""
    return BertConfig(
        vocab_size=len(_VOCABULARY),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_attention_heads=4,
        num_hidden_layers=LAYERS,
        max_position_embeddings=_LONGEST,
        initializer_range=0.15,
        num_labels=labels,
    )


def make_embedder(folder: Path, pooling: str) -> None:
    """A model of sentence-transformers: BERT, a pooling, vectors of length 1."""
    torch.manual_seed(0)
    base = folder.with_name(f"{folder.name}-base")
    base.mkdir()
    make_tokenizer(base).save_pretrained(base)
    BertModel(make_config()).save_pretrained(base)
    modules = [Transformer(str(base)), Pooling(WIDTH, pooling_mode=pooling), Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save_pretrained(str(folder))


def make_reranker(folder: Path) -> None:
    """A classifier of pairs with one label."""
    _make_classifier(BertForSequenceClassification, folder, labels=1)


def make_tagger(folder: Path) -> None:
    """A classifier of tokens with five labels."""
    _make_classifier(BertForTokenClassification, folder, labels=5)


def _make_classifier(
    kind: type[BertForSequenceClassification | BertForTokenClassification], folder: Path, labels: int
) -> None:
    torch.manual_seed(1)
    folder.mkdir()
    make_tokenizer(folder).save_pretrained(folder)
    kind(make_config(labels)).save_pretrained(folder)


def draw_texts(count: int, seed: int = 0) -> list[str]:
    """Texts of 0 to 200 words, the longest of which are cut at 128 tokens; some words are unknown."""
    rng = random.Random(seed)
    lengths = [0, 1, 200, *(min(200, int(rng.lognormvariate(2.5, 1.0))) for _ in range(count - 3))]
    return [" ".join(rng.choices([*_WORDS, "kalomi", "unknown"], k=length)) for length in lengths]
