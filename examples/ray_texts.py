# SPDX-License-Identifier: Apache-2.0
"""Embeds many texts by Ray Data in several processes, and compares with one process.

``python examples/ray_texts.py FOLDER [--texts N] [--processes N]`` takes an optimized folder with ``tokenizer.json`` and
``model.onnx``, of which the first output has a row for each token. It ends with an error unless the vectors agree. Needs stof
with its library, ``ray[data]`` and tokenizers.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import ray
from tokenizers import Tokenizer

import stof

BATCH = 64


class Embedder:
    """A process of Ray: one tokenizer and one session with so many threads, made once."""

    def __init__(self, folder: str, threads: int) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would be as many as cores, in each process
        self.tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
        self.tokenizer.enable_padding()
        self.tokenizer.enable_truncation(128)
        options = stof.session_options(intra_op_num_threads=threads)
        self.session = ort.InferenceSession(f"{folder}/model.onnx", options, providers=["CPUExecutionProvider"])
        self.names = [node.name for node in self.session.get_inputs()]

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The mean over real tokens of each text, beside the text's id."""
        encoded = self.tokenizer.encode_batch(list(batch["text"]))
        feeds = {
            "input_ids": np.array([e.ids for e in encoded], np.int64),
            "attention_mask": np.array([e.attention_mask for e in encoded], np.int64),
            "token_type_ids": np.array([e.type_ids for e in encoded], np.int64),
        }
        rows = self.session.run(None, {name: feeds[name] for name in self.names})[0]
        is_real = feeds["attention_mask"][..., None]
        return {"id": batch["id"], "vector": (rows * is_real).sum(1) / is_real.sum(1)}


def embed_by_ray(
    texts: list[str], folder: str, processes: int, threads: int, kind: type[Embedder] = Embedder
) -> list[dict[str, Any]]:
    """The rows of all texts in their order. Ray restarts a process that ends, and repeats its batches."""
    rows = ray.data.from_items([{"id": i, "text": text} for i, text in enumerate(texts)]).map_batches(
        kind,
        fn_constructor_args=(folder, threads),
        batch_size=BATCH,
        num_cpus=threads,
        compute=ray.data.ActorPoolStrategy(size=processes),
    )
    return sorted(rows.take_all(), key=lambda row: int(row["id"]))


def embed_alone(folder: str, texts: list[str]) -> np.ndarray:
    """The vectors of all texts [texts, elements] by this process."""
    embedder = Embedder(folder, threads=1)
    batches = [texts[i : i + BATCH] for i in range(0, len(texts), BATCH)]
    return np.concatenate(
        [embedder({"id": np.arange(len(batch)), "text": np.array(batch, object)})["vector"] for batch in batches]
    )


def draw_texts(count: int) -> list[str]:
    """Texts of 1 to 40 words."""
    rng = random.Random(0)
    words = ["kalo", "miten", "rasun", "vorpel", "tenka", "one", "short", "text"]
    return [" ".join(rng.choices(words, k=rng.randint(1, 40))) for _ in range(count)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--texts", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of a process: for Ray and for ONNX Runtime")
    arguments = parser.parse_args()
    folder = str(arguments.folder.resolve())  # processes of Ray have another current folder
    texts = draw_texts(arguments.texts)
    ray.init(num_cpus=arguments.processes * arguments.threads, include_dashboard=False)
    rows = embed_by_ray(texts, folder, arguments.processes, arguments.threads)
    ray.shutdown()
    found, expected = np.stack([row["vector"] for row in rows]), embed_alone(folder, texts)
    worst = float(np.abs(found - expected).max() / np.abs(expected).max())
    print(f"{len(found)} vectors of {found.shape[1]} elements, largest difference {worst:.1e} of the largest value")
    return int(len(found) != len(texts) or worst > 1e-6)


if __name__ == "__main__":
    sys.exit(main())
