# SPDX-License-Identifier: Apache-2.0
"""Embeds texts by sentence-transformers, in PyTorch and from an optimized export, and compares the vectors.

``python examples/sentence_transformers_texts.py MODEL NEW_FOLDER`` exports ``MODEL``, a folder or a name of
sentence-transformers, and optimizes it. It ends with an error unless the vectors agree. Needs stof with its library,
sentence-transformers and optimum-onnx.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
from sentence_transformers import SentenceTransformer

import stof

TEXTS = ["one short text", "a somewhat longer text that has a few more words than the first one", "two", ""] * 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("new_folder", type=Path)
    arguments = parser.parse_args()
    settings = {"provider": "CPUExecutionProvider"}
    with tempfile.TemporaryDirectory() as exported:
        SentenceTransformer(arguments.model, backend="onnx", model_kwargs=settings).save_pretrained(exported)
        report = stof.optimize_folder(exported, arguments.new_folder, unpad="on")
    print(report.to_text())

    settings["session_options"] = stof.session_options()
    fast = SentenceTransformer(str(arguments.new_folder), backend="onnx", model_kwargs=settings)
    expected = np.asarray(SentenceTransformer(arguments.model, device="cpu").encode(TEXTS))
    found = np.asarray(fast.encode(TEXTS))
    worst = float(np.abs(found - expected).max() / np.abs(expected).max())
    print(f"{len(TEXTS)} vectors of {found.shape[1]} elements, largest difference {worst:.1e} of the largest value")
    return int(worst > 1e-5 or not report.libraries)


if __name__ == "__main__":
    sys.exit(main())
