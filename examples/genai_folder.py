# SPDX-License-Identifier: Apache-2.0
"""Optimizes a model folder of ONNX Runtime GenAI, and generates tokens from both folders.

``python examples/genai_folder.py FOLDER NEW_FOLDER [--tokens N]`` ends with an error unless something was replaced and both
folders give the same tokens. Needs stof with its library, and onnxruntime-genai. A small folder to try it with:
``python models/genai.py -o build/genai llama-fp32``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import onnxruntime_genai as og

import stof

PROMPT = [17, 4, 200, 33, 8, 91, 140, 5]  # token ids; og.Tokenizer(model).encode(text) gives those of a text


def generate(folder: Path, count: int) -> list[int]:
    """The tokens that greedy decoding adds to the prompt. The folder's configuration names stof's library."""
    model = og.Model(str(folder))
    parameters = og.GeneratorParams(model)
    parameters.set_search_options(max_length=len(PROMPT) + count, do_sample=False)
    generator = og.Generator(model, parameters)
    generator.append_tokens(PROMPT)
    while not generator.is_done():
        generator.generate_next_token()
    return [int(token) for token in generator.get_sequence(0)[len(PROMPT) :]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("new_folder", type=Path)
    parser.add_argument("--tokens", type=int, default=50)
    arguments = parser.parse_args()
    expected = generate(arguments.folder, arguments.tokens)
    report = stof.optimize_folder(arguments.folder, arguments.new_folder)
    print(report.to_text())
    found = generate(arguments.new_folder, arguments.tokens)
    print(f"tokens before: {expected}")
    print(f"tokens after:  {found}")
    return int(not report.libraries or found != expected)  # the library is copied where a model holds stof's operators


if __name__ == "__main__":
    sys.exit(main())
