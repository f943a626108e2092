# SPDX-License-Identifier: Apache-2.0
"""Resident memory of decoders with sparse MLPs: each in a process of its own that runs tokens with mapped weights.

``python -m bench.decoder.mlp_memory MODEL STOF SHAPE WEIGHTS ...`` prints bytes as JSON. STOF is 1 where the model needs the
plugin library, SHAPE the decoder's layers, KV heads, head size and vocabulary, joined by commas.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.core.resident_memory import drop_cached_pages, mapped_resident_bytes, resident_bytes
from bench.decoder.graph import DecoderShape
from bench.decoder.mlp_bytes import PREDICTED, idle_bytes, predictor_bytes
from bench.decoder.mlp_files import MlpFiles
from bench.decoder.mlp_models import MlpDecoderVariant
from stof.bench.results import Record
from stof.files import strict_json
from stof.terminal import say

_TOKENS = 64  # that run before memory is read: of neurons that 5 % of the tokens need, 4 % were not active by then
_LONGEST = 900  # seconds
_BASELINE = "dense"  # whose memory that of the others is compared with; "original" where it is missing


def measure_memory(files: MlpFiles, variants: Sequence[MlpDecoderVariant], shape: DecoderShape) -> Record:
    """Resident bytes of variants after some tokens, and how much of the bytes of idle neurons each saves.

    Args:
        files: of the variants.
        variants: those to run.
        shape: of the decoder.

    Returns:
        By variant, ``resident_bytes`` (Pss of the process) and ``mapped_bytes`` (its part in mapped weights). By sparse variant,
        ``idle_bytes`` (of neurons that are never active, in the matrices that it leaves out rows of) and ``predictor_bytes``
        (which a predicted one holds beside its neurons). Likewise ``saved_bytes`` and ``saved_of_idle``, against the variant
        that ``baseline`` names. ``tokens`` were run. What fails is left out, and noted as missing.
    """
    gc.collect()  # of mappings in this process: a page that two processes map counts half
    found: dict[str, dict[str, int]] = {}
    for variant in variants:
        try:
            found[variant.name] = _run_apart(files, variant, shape)
        except (subprocess.SubprocessError, ValueError) as failure:
            text = getattr(failure, "stderr", "") or str(failure)
            files.missing[f"memory of {variant.name}"] = text.strip().splitlines()[-1]
    resident = {name: each["resident"] for name, each in found.items()}
    baseline = next((name for name in (_BASELINE, "original") if name in found), "")
    sparse = [v.name for v in variants if v.name in found and v.optimized and not v.dense] if baseline else []
    saved = {name: resident[baseline] - resident[name] for name in sparse}
    idle = {name: idle_bytes(shape, name) for name in sparse}
    return {
        "tokens": _TOKENS,
        "baseline": baseline,
        "resident_bytes": resident,
        "mapped_bytes": {name: each["mapped"] for name, each in found.items()},
        "idle_bytes": idle,
        "predictor_bytes": {PREDICTED: round(shape.layers * predictor_bytes(shape))} if PREDICTED in sparse else {},
        "saved_bytes": saved,
        "saved_of_idle": {name: round(saved[name] / idle[name], 4) for name in sparse if idle[name]},
    }


def _run_apart(files: MlpFiles, variant: MlpDecoderVariant, shape: DecoderShape) -> dict[str, int]:
    for file in files.weights:
        drop_cached_pages(file)
    sizes = ",".join(map(str, (shape.layers, shape.kv_heads, shape.head_size, shape.vocabulary)))
    command = [sys.executable, "-m", "bench.decoder.mlp_memory", str(files.paths[variant.name])]
    command += [str(int(variant.optimized)), sizes, *map(str, files.weights)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_LONGEST, env=environment)
    return {name: int(size) for name, size in json.loads(done.stdout.splitlines()[-1]).items()}


def run_tokens(path: str, is_optimized: bool, sizes: Sequence[int], tokens: int) -> Any:
    """A session that has run tokens of a decoder as a serving process does, with weights where they are mapped.

    Args:
        path: of the model.
        is_optimized: whether it needs the plugin library.
        sizes: layers, KV heads, head size and vocabulary.
        tokens: how many.
    """
    import onnxruntime as ort

    from stof.runtime import library

    layers, kv_heads, head_size, vocabulary = sizes
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.disable_prepacking", "1")  # packed copies of weights would be held, too
    options.log_severity_level = 3
    if is_optimized:
        library.register(options)
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(1)
    names = [f"{i}.{kind}" for i in range(layers) for kind in ("key", "value")]
    kind = next(i.type for i in session.get_inputs() if i.name.startswith("past_key_values."))
    empty = np.zeros((1, kv_heads, 0, head_size), np.float32 if kind == "tensor(float)" else np.float16)
    caches: list[Any] = [empty] * len(names)
    for step in range(tokens):
        feeds = {"input_ids": rng.integers(0, vocabulary, (1, 1)), "attention_mask": np.ones((1, step + 1), np.int64)}
        feeds |= {f"past_key_values.{name}": cache for name, cache in zip(names, caches, strict=True)}
        caches = session.run([f"present.{name}" for name in names], feeds)
    return session


def describe_memory(memory: Record) -> list[str]:
    """The record as text."""
    found = []
    for name, size in memory["resident_bytes"].items():
        text = f"  resident {name:10s} {size / 1e6:10.0f} MB, {memory['mapped_bytes'][name] / 1e6:.0f} of them mapped weights"
        if name in memory["saved_bytes"]:
            text += f"; {memory['saved_bytes'][name] / 1e6:.0f} MB less than {memory['baseline']}"
            share = memory["saved_of_idle"].get(name)
            idle = f"{memory['idle_bytes'][name] / 1e6:.0f} MB of idle neurons"
            text += ", no neuron is idle" if share is None else f", {100 * share:.0f} % of {idle}"
            if name in memory["predictor_bytes"]:
                text += f"; predictors hold {memory['predictor_bytes'][name] / 1e6:.0f} MB"
        found.append(text)
    return found


def main() -> int:
    """Runs tokens and prints what the process then holds."""
    path, stof, sizes, *weights = sys.argv[1:]
    session = run_tokens(path, bool(int(stof)), [int(s) for s in sizes.split(",")], _TOKENS)
    mapped = sum(mapped_resident_bytes(Path(file)) for file in weights)
    say(strict_json.dumps({"resident": resident_bytes(), "mapped": mapped}))
    del session  # it holds the mappings until here
    return 0


if __name__ == "__main__":
    sys.exit(main())
