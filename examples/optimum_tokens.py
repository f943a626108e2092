# SPDX-License-Identifier: Apache-2.0
"""Generates tokens by Optimum, in PyTorch and from the optimized checkpoint, and compares them.

``python examples/optimum_tokens.py CHECKPOINT NEW_FOLDER [--tokens N]`` exports and optimizes a folder that
``transformers.AutoModelForCausalLM.from_pretrained`` reads. It ends with an error unless the tokens are the same. Needs stof with
its library, and optimum-onnx.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from optimum.onnxruntime import ORTModelForCausalLM
from transformers import AutoModelForCausalLM

import stof

PROMPT = torch.tensor([[17, 4, 200, 33, 8, 91, 140, 5]])  # token ids; a tokenizer gives those of a text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("new_folder", type=Path)
    parser.add_argument("--tokens", type=int, default=50)
    arguments = parser.parse_args()
    report = stof.optimize_folder(arguments.checkpoint, arguments.new_folder)
    print(report.to_text())
    tokens = []
    for model in (
        AutoModelForCausalLM.from_pretrained(arguments.checkpoint),
        ORTModelForCausalLM.from_pretrained(arguments.new_folder, session_options=stof.session_options()),
    ):
        length = {"max_new_tokens": arguments.tokens, "min_new_tokens": arguments.tokens}
        found = model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), do_sample=False, **length)
        tokens.append(found[0, PROMPT.shape[1] :].tolist())
    expected, found = tokens
    print(f"PyTorch: {expected}\nOptimum: {found}")
    return int(found != expected or not report.libraries)


if __name__ == "__main__":
    sys.exit(main())
