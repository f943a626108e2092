# SPDX-License-Identifier: Apache-2.0
"""Generates tokens by Optimum's ORTModelForCausalLM and ORTModelForSeq2SeqLM, before and after stof-optimize.

``python tests/optimum/check_generation.py [--count N]``: a line for each architecture, and status 1 when one fails. A model of
random weights is exported with its KV cache, and the folder is optimized. Greedy decoding of prompts, padded to the left, has to
give the same tokens. So has the folder that stof-optimize makes of the checkpoint itself. A folder with a wrong mask has to give
others. Runs in an environment with tests/optimum/requirements.txt.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
import transformers
from optimum.exporters.onnx import main_export
from optimum.onnxruntime import ORTModelForCausalLM, ORTModelForSeq2SeqLM

import stof

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = "libstof_ort.so"
_VOCABULARY = 512
_PROMPT, _PADDED = 40, 13
_SIZES = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "max_position_embeddings": 1024,
    # Large weights: the next token depends on the context, and greedy decoding does not fall into one token.
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SEQ2SEQ_SIZES = {
    "vocab_size": _VOCABULARY,
    "d_model": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}


@dataclass(frozen=True)
class Architecture:
    """A model of random weights.

    Attributes:
        model: the name of its class in transformers, without its head.
        sizes: arguments of its configuration.
        attentions: how many are replaced in the folder that Optimum exports.
        is_seq2seq: whether it has an encoder, too.
    """

    model: str
    sizes: dict[str, Any]
    attentions: int
    is_seq2seq: bool = False

    def save_checkpoint(self, folder: Path) -> None:
        """Saves it as transformers does."""
        torch.manual_seed(0)
        head = "ConditionalGeneration" if self.is_seq2seq else "CausalLM"
        config = getattr(transformers, f"{self.model}Config")(**self.sizes)
        model = getattr(transformers, f"{self.model}For{head}")(config).eval()
        model.generation_config.forced_eos_token_id = None  # BART's makes the last token one and the same
        model.save_pretrained(folder)

    @property
    def task(self) -> str:
        """What Optimum calls generation with a cache."""
        return f"{'text2text' if self.is_seq2seq else 'text'}-generation-with-past"


# Files of encoder-decoders: the encoder, the decoder's first step, its others, and both merged.
_BART = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
ARCHITECTURES = {
    "llama": Architecture("Llama", _SIZES, 3),
    "mistral": Architecture("Mistral", {**_SIZES, "sliding_window": 24}, 3),
    "qwen2": Architecture("Qwen2", _SIZES, 3),
    "t5": Architecture(
        "T5",
        {
            **_SEQ2SEQ_SIZES,
            "d_kv": 32,
            "d_ff": 256,
            "num_layers": 2,
            "num_heads": 4,
            "initializer_factor": 0.3,
            "tie_word_embeddings": False,
        },
        18,
        True,
    ),
    "bart": Architecture(
        "Bart",
        {**_SEQ2SEQ_SIZES, **_BART, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256, "init_std": 0.35},
        18,
        True,
    ),
}


def optimize(source: Path, target: Path) -> str:
    """Runs stof-optimize on a folder, and gives its report."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "optimizer")}
    command = [sys.executable, "-m", "stof.cli", str(source), "-o", str(target)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"stof-optimize ended with {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


def count_replaced(folder: Path) -> int:
    """How many attentions of a folder's models are stof's."""
    models = [onnx.load(str(path), load_external_data=False) for path in folder.glob("*.onnx")]
    kinds = ("StofAttention", "StofCachedAttention")
    graphs = [graph for model in models for graph in _graphs(model.graph)]
    return sum(node.op_type in kinds for graph in graphs for node in graph.node)


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph and those inside its nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _graphs(attribute.g)


def damage(source: Path, target: Path) -> None:
    """A copy of an optimized folder whose masks forbid all but the nearest keys."""
    shutil.copytree(source, target)
    for path in target.glob("*.onnx"):
        model = onnx.load(str(path))
        for node in (node for graph in _graphs(model.graph) for node in graph.node):
            for attribute in node.attribute:
                if node.domain == "stof" and attribute.name == "mask":
                    attribute.s = f"({attribute.s.decode() or 'True'}) and q - k < 3".encode()
        onnx.save(model, str(path))


def generate(architecture: Architecture, folder: Path, count: int) -> list[list[int]]:
    """The tokens that follow two prompts of one batch, of which one is shorter; behind an encoder: all tokens."""
    with_library = (folder / LIBRARY).is_file()
    options = stof.session_options() if with_library else ort.SessionOptions()
    options.intra_op_num_threads = 1
    kind = ORTModelForSeq2SeqLM if architecture.is_seq2seq else ORTModelForCausalLM
    model = kind.from_pretrained(folder, session_options=options)
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, _VOCABULARY, (2, _PROMPT)))
    mask = torch.ones_like(ids)
    mask[1, :_PADDED] = 0
    found = model.generate(
        ids, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False, use_cache=True
    )  # fmt: skip
    return [row[0 if architecture.is_seq2seq else _PROMPT :] for row in found.tolist()]


def check(name: str, count: int, folder: Path) -> str:
    """What is wrong with one architecture; empty where nothing is."""
    kinds = ("checkpoint", "original", "stof", "from-checkpoint", "damaged")
    checkpoint, original, optimized, from_checkpoint, damaged = (folder / f"{name}.{kind}" for kind in kinds)
    architecture = ARCHITECTURES[name]
    architecture.save_checkpoint(checkpoint)
    main_export(str(checkpoint), original, task=architecture.task, do_validation=False)
    optimize(original, optimized)
    note = f"exported by optimum-onnx {version('optimum-onnx')} for the task {architecture.task}"
    if note not in optimize(checkpoint, from_checkpoint):
        return f"the report of the checkpoint lacks: {note}"
    for result in (optimized, from_checkpoint):
        replaced = count_replaced(result)
        if replaced != architecture.attentions:
            return f"{replaced} of {architecture.attentions} attentions were replaced in {result.name}"
    wanted = generate(architecture, original, count)
    if len({token for row in wanted for token in row}) < count // 4:
        return "the original repeats few tokens, which says nothing"
    for result in (optimized, from_checkpoint):
        if generate(architecture, result, count) != wanted:
            return f"{result.name} gives other tokens"
    damage(optimized, damaged)
    return "" if generate(architecture, damaged, count) != wanted else "a wrong mask gives the same tokens"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=50, help="of tokens (50)")
    parser.add_argument("--only", nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES))
    arguments = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.only:
            fault = check(name, arguments.count, Path(folder))
            print(f"{name}: {fault or f'{arguments.count} tokens of two prompts are the same'}", flush=True)
            failed += bool(fault)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
