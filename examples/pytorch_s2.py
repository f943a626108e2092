# SPDX-License-Identifier: Apache-2.0
"""Trains a small causal model with an S2 pattern, exports it, optimizes it and runs it with ONNX Runtime.

``python examples/pytorch_s2.py [--steps N] [--folder DIR]`` ends with an error unless the model has learned its task, one
StofAttention node stands in each layer, and ONNX Runtime gives the logits of PyTorch. The mask is written once, in ``MASK``.
Needs stof with its library, torch, onnxruntime and onnxscript.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from torch import nn

import stof
import stof.torch

# Blocks of 8 positions. Each head sees the last two blocks, and every fourth block, another one from head to head.
MASK = "k <= q and (q // 8 - k // 8 < 2 or (k // 8 + h) % 4 == 3)"
VOCABULARY, WIDTH, HEADS, LENGTH = 16, 64, 4, 72
PERIOD = 24  # each token is the one of 24 positions before: too far for the last two blocks


class Block(nn.Module):
    """Attention and a feed-forward layer, each with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.join = nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, WIDTH] as it came in, plus what attention and the layer add."""
        B, S, _ = x.shape
        parts = self.project(self.first(x)).chunk(3, -1)
        q, k, v = (t.view(B, S, HEADS, WIDTH // HEADS).transpose(1, 2) for t in parts)
        rows = stof.torch.attention(q, k, v, MASK)
        x = x + self.join(rows.transpose(1, 2).reshape(B, S, WIDTH))
        return x + self.feed(self.second(x))


class Model(nn.Module):
    """A causal model of two layers: tokens [B, S] to logits [B, S, VOCABULARY]."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.last = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits of the token that follows each position."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def draw(count: int, generator: torch.Generator) -> torch.Tensor:
    """Sequences [count, LENGTH] that repeat their first PERIOD tokens, which are random."""
    start = torch.randint(VOCABULARY, (count, PERIOD), generator=generator)
    return start.repeat(1, LENGTH // PERIOD)


def accuracy(logits: torch.Tensor, tokens: torch.Tensor) -> float:
    """The share of tokens that follow from earlier ones and are predicted."""
    found = logits[:, PERIOD - 1 : -1].argmax(-1)
    return float((found == tokens[:, PERIOD:]).float().mean())


def train(model: Model, steps: int) -> float:
    """Trains for a number of steps; the accuracy on sequences that were not trained on."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=steps)
    for step in range(steps):
        tokens = draw(16, generator)
        logits = model(tokens)[:, PERIOD - 1 : -1]
        loss = nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), tokens[:, PERIOD:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    with torch.no_grad():
        tokens = draw(64, generator)
        return accuracy(model(tokens), tokens)


def export(model: Model, path: Path) -> None:
    """Writes the model with dynamic batch and sequence axes."""
    torch.onnx.export(
        model,
        (draw(2, torch.Generator().manual_seed(2)),),
        str(path),
        dynamo=True,
        custom_translation_table=stof.torch.translation_table(),
        dynamic_shapes=({0: "batch", 1: torch.export.Dim("sequence", min=2, max=LENGTH)},),
        input_names=["tokens"],
        output_names=["logits"],
        verbose=False,
    )


def run(path: Path, tokens: torch.Tensor, *, with_library: bool) -> np.ndarray:
    """The logits that ONNX Runtime gives."""
    options = onnxruntime.SessionOptions()
    if with_library:
        stof.register(options)
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"tokens": tokens.numpy()})[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--folder", type=Path, help="keeps the model files")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the tensors are small
    model = Model()
    learned = train(model, arguments.steps)
    print(f"accuracy {learned:.3f}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        exported, optimized = folder / "model.onnx", folder / "model.stof.onnx"
        export(model.eval(), exported)
        subprocess.run([sys.executable, "-m", "stof.cli", str(exported), "-o", str(optimized)], check=True)
        nodes = sum(node.op_type == "StofAttention" for node in onnx.load(optimized).graph.node)
        tokens = draw(5, torch.Generator().manual_seed(3))[:, :61]
        with torch.no_grad():
            expected = model(tokens).numpy()
        worst = {
            f"{path.name}{' with the library' if with_library else ''}": float(
                np.abs(run(path, tokens, with_library=with_library) - expected).max()
            )
            for path, with_library in ((exported, False), (optimized, False), (optimized, True))
        }
    for name, error in worst.items():
        print(f"{name}: logits differ from PyTorch by at most {error:.1e}")
    print(f"{nodes} StofAttention nodes in {len(model.blocks)} layers")
    return int(learned < 0.95 or nodes != len(model.blocks) or max(worst.values()) > 1e-3)


if __name__ == "__main__":
    sys.exit(main())
