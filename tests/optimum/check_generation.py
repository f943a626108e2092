# SPDX-License-Identifier: Apache-2.0
"""Generates tokens by Optimum's ORTModelForCausalLM from exported folders, before and after stof-optimize.

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
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
import transformers
from optimum.exporters.onnx import main_export
from optimum.onnxruntime import ORTModelForCausalLM

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
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 24}),
    "qwen2": ("Qwen2", {}),
}


def save_checkpoint(name: str, folder: Path) -> None:
    """Saves a model of random weights, as transformers does."""
    kind, settings = ARCHITECTURES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**_SIZES, **settings)
    getattr(transformers, f"{kind}ForCausalLM")(config).eval().save_pretrained(folder)


def export(checkpoint: Path, folder: Path) -> None:
    """Exports a checkpoint with its cache, as ``optimum-cli export onnx`` does."""
    main_export(str(checkpoint), folder, task="text-generation-with-past", do_validation=False)


def optimize(source: Path, target: Path) -> str:
    """Runs stof-optimize on a folder, and gives its report."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "optimizer")}
    command = [sys.executable, "-m", "stof.cli", str(source), "-o", str(target)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"stof-optimize ended with {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


def count_replaced(folder: Path) -> int:
    """How many attentions of a folder's model are stof's."""
    model = onnx.load(str(folder / "model.onnx"), load_external_data=False)
    return sum(n.op_type in ("StofAttention", "StofCachedAttention") for n in model.graph.node)


def damage(source: Path, target: Path) -> None:
    """A copy of an optimized folder whose masks forbid all but the nearest keys."""
    shutil.copytree(source, target)
    model = onnx.load(str(target / "model.onnx"))
    for node in model.graph.node:
        for attribute in node.attribute:
            if node.domain == "stof" and attribute.name == "mask":
                attribute.s = f"({attribute.s.decode() or 'True'}) and q - k < 3".encode()
    onnx.save(model, str(target / "model.onnx"))


def generate(folder: Path, count: int) -> list[list[int]]:
    """The tokens that follow two prompts of one batch, of which one is shorter."""
    with_library = (folder / LIBRARY).is_file()
    options = stof.session_options() if with_library else ort.SessionOptions()
    options.intra_op_num_threads = 1
    model = ORTModelForCausalLM.from_pretrained(folder, session_options=options)
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, _VOCABULARY, (2, _PROMPT)))
    mask = torch.ones_like(ids)
    mask[1, :_PADDED] = 0
    found = model.generate(
        ids, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False, use_cache=True
    )  # fmt: skip
    return [row[_PROMPT:] for row in found.tolist()]


def check(name: str, count: int, folder: Path) -> str:
    """What is wrong with one architecture; empty where nothing is."""
    kinds = ("checkpoint", "original", "stof", "from-checkpoint", "damaged")
    checkpoint, original, optimized, from_checkpoint, damaged = (folder / f"{name}.{kind}" for kind in kinds)
    save_checkpoint(name, checkpoint)
    export(checkpoint, original)
    optimize(original, optimized)
    note = f"exported by optimum-onnx {version('optimum-onnx')} for the task text-generation-with-past"
    if note not in optimize(checkpoint, from_checkpoint):
        return f"the report of the checkpoint lacks: {note}"
    for result in (optimized, from_checkpoint):
        replaced = count_replaced(result)
        if replaced != _SIZES["num_hidden_layers"]:
            return f"{replaced} of {_SIZES['num_hidden_layers']} attentions were replaced in {result.name}"
    wanted = generate(original, count)
    if len({token for row in wanted for token in row}) < count // 4:
        return "the original repeats few tokens, which says nothing"
    for result in (optimized, from_checkpoint):
        if generate(result, count) != wanted:
            return f"{result.name} gives other tokens"
    damage(optimized, damaged)
    return "" if generate(damaged, count) != wanted else "a wrong mask gives the same tokens"


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
