# SPDX-License-Identifier: Apache-2.0
"""The examples of sentence-transformers and of Optimum's decoders; their other classes: tests/texts, tests/optimum."""

from __future__ import annotations

from pathlib import Path

import torch
from tool_folders import ROOT, run_program
from transformers import LlamaConfig, LlamaForCausalLM


def test_sentence_transformers(folders: Path, tmp_path: Path) -> None:
    program = ROOT / "examples/sentence_transformers_texts.py"
    printed = run_program("python", program, folders / "minilm", tmp_path / "fast")
    assert "32 vectors of 64 elements" in printed
    assert "3 attention sites replaced" in printed


def test_optimum(tmp_path: Path) -> None:
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    # Large weights: the next token depends on the context.
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.15, pad_token_id=0))
    model.save_pretrained(tmp_path / "checkpoint")
    program = ROOT / "examples/optimum_tokens.py"
    printed = run_program("python", program, tmp_path / "checkpoint", tmp_path / "fast", "--tokens", 40)
    tokens = printed.splitlines()[-1].removeprefix("Optimum: ").strip("[]").split(", ")
    assert len(tokens) == 40
    assert len(set(tokens)) > 10, "the model repeats few tokens, which says nothing"
    assert "for the task text-generation-with-past" in printed
