# SPDX-License-Identifier: Apache-2.0
"""Embeds texts by fastembed, from an exported folder and from its optimized one, and compares the vectors.

``python examples/fastembed_texts.py FOLDER NEW_FOLDER`` optimizes ``FOLDER``, which ``optimum-cli export onnx --task
feature-extraction`` writes: a model with the output ``last_hidden_state``, and a tokenizer. It ends with an error unless the
vectors agree. Needs stof with its library, and fastembed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from fastembed import TextEmbedding
from fastembed.common.model_description import ModelSource, PoolingType

import stof
from stof.integrations.fastembed import add_custom_model

TEXTS = ["one short text", "a somewhat longer text that has a few more words than the first one", "two", ""] * 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("new_folder", type=Path)
    parser.add_argument("--processes", type=int, help="of fastembed's own, beside this one")
    arguments = parser.parse_args()
    report = stof.optimize_folder(arguments.folder, arguments.new_folder, unpad="on")
    print(report.to_text())

    settings: dict[str, Any] = {
        "pooling": PoolingType.MEAN,
        "normalization": True,
        "sources": ModelSource(hf="none/none"),  # not read: specific_model_path names the folder
        "dim": json.loads((arguments.folder / "config.json").read_text(encoding="utf-8"))["hidden_size"],
        "model_file": "model.onnx",
    }
    TextEmbedding.add_custom_model("original", **settings)
    add_custom_model("optimized", **settings)
    original = TextEmbedding("original", specific_model_path=str(arguments.folder))
    optimized = TextEmbedding("optimized", specific_model_path=str(arguments.new_folder))
    expected = np.array(list(original.embed(TEXTS, batch_size=8)))
    found = np.array(list(optimized.embed(TEXTS, batch_size=8, parallel=arguments.processes)))
    worst = float(np.abs(found - expected).max())
    print(f"{len(TEXTS)} vectors of {found.shape[1]} elements, largest difference {worst:.1e}")
    return int(worst > 1e-5 or not report.libraries)


if __name__ == "__main__":
    sys.exit(main())
