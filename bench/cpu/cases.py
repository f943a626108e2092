# SPDX-License-Identifier: Apache-2.0
"""The points of the CPU grids: attention (B1 H12 D64), and the attention shapes of the first models."""

from __future__ import annotations

from bench.core.case import AttentionCase, named_mask

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
ATTENTION_MASKS = ("window-64", "window-256", "longformer", "bigbird", "causal", "dense", "causal-256")


def attention_case(name: str, length: int) -> AttentionCase:
    """A point of the attention grid: B1 H12 D64, fp32."""
    expression, tables = named_mask(name, length)
    return AttentionCase("attention", name, expression, 1, 12, 12, length, length, 64, "float32", tables)


# The attention of the first set of models: name, heads, key/value heads, head size, masks.
SITE_SHAPES: tuple[tuple[str, int, int, int, tuple[str, ...]], ...] = (
    ("BERT-base, ModernBERT-base global", 12, 12, 64, ("",)),
    ("ModernBERT-base local", 12, 12, 64, ("abs(q - k) <= 64",)),
    ("Mistral", 32, 8, 128, ("k <= q and q - k <= 511",)),
    ("Gemma 3 global, local", 4, 1, 256, ("k <= q", "k <= q and q - k <= 511")),
    ("EmbeddingGemma global, local", 3, 1, 256, ("", "abs(q - k) <= 256")),
)
SITE_LENGTHS = (128, 512, 2048)


def site_cases() -> list[AttentionCase]:
    """The attention of the first models, with the key padding mask that their exports have."""
    return [
        AttentionCase("sites", name, expression, 1, heads, groups, length, length, size, "float32", pad=True)
        for name, heads, groups, size, expressions in SITE_SHAPES
        for expression in expressions
        for length in SITE_LENGTHS
    ]
