# SPDX-License-Identifier: Apache-2.0
"""Greedy generation by ONNX Runtime GenAI in a process of its own: ``python tests/genai/generation.py REQUEST RESULT``.

A process of its own, since a library that was loaded once serves every later session of the process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

PAD = 0


@dataclass(frozen=True)
class Generation:
    """What a run gave.

    Attributes:
        tokens: [B, N] new tokens.
        logits: [N, B, V] what the runtime chooses each of them from; None where tokens were not forced.
    """

    tokens: np.ndarray
    logits: np.ndarray | None


class GenerationError(Exception):
    """The runtime refused a folder or a request; the message is its own."""


def generate(
    folder: Path,
    prompts: Sequence[Sequence[int]],
    count: int,
    *,
    forced: np.ndarray | None = None,
    chunk: int = 0,
    environment: Mapping[str, str] | None = None,
) -> Generation:
    """Runs a model folder.

    Args:
        folder: the model folder.
        prompts: B prompts; shorter ones are padded on the right.
        count: N, how many tokens are generated for each.
        forced: [B, N] tokens that are taken in place of the chosen ones; the result then has logits.
        chunk: tokens of a prompt that are appended at once, for one prompt alone; 0: all.
        environment: variables of the process.

    Raises:
        GenerationError: with the runtime's message.
    """
    request = {
        "folder": str(folder),
        "prompts": [list(map(int, p)) for p in prompts],
        "count": count,
        "forced": None if forced is None else forced.tolist(),
        "chunk": chunk,
    }
    with tempfile.TemporaryDirectory() as scratch:
        asked, found = Path(scratch) / "request.json", Path(scratch) / "result.npz"
        asked.write_text(json.dumps(request))
        command = [sys.executable, __file__, str(asked), str(found)]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(environment or {})})
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            raise GenerationError(lines[-1] if lines else f"status {done.returncode}")
        with np.load(found) as arrays:
            return Generation(arrays["tokens"], arrays.get("logits", None))


def _run(request: dict[str, Any], result: Path) -> None:
    import onnxruntime_genai as og

    prompts, count, forced = request["prompts"], request["count"], request["forced"]
    batch, longest = len(prompts), max(map(len, prompts))
    model = og.Model(request["folder"])
    params = og.GeneratorParams(model)
    length = longest + count
    # Ends of sequences are no ends here: each row gets as many tokens as were asked for.
    params.set_search_options(max_length=length, min_length=length, do_sample=False, batch_size=batch)
    generator = og.Generator(model, params)
    given = np.full((batch, longest), PAD, np.int32)
    for row, prompt in zip(given, prompts, strict=True):
        row[: len(prompt)] = prompt
    step = request["chunk"] or longest
    for start in range(0, longest, step):
        generator.append_tokens(given[:, start : start + step])
    logits = []
    while not generator.is_done():
        if forced is not None:
            found = np.array(generator.get_logits(), np.float32).reshape(batch, -1)
            chosen = np.full_like(found, -1e9)
            chosen[np.arange(batch), [row[len(logits)] for row in forced]] = 0
            generator.set_logits(chosen)
            logits.append(found)
        generator.generate_next_token()
    tokens = np.array([generator.get_sequence(i)[longest:] for i in range(batch)])
    if forced is None:
        np.savez(result, tokens=tokens)
    else:
        np.savez(result, tokens=tokens, logits=np.stack(logits))


if __name__ == "__main__":
    _run(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
