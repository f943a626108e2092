# SPDX-License-Identifier: Apache-2.0
"""Trains the two models whose task needs keys that are far away, and saves their weights. Needs torch and numpy only.

``python models/trained/train.py prompts documents -o DIR --device cuda`` writes ``DIR/NAME.npz`` in fp16.
``--cpu-minutes M`` trains M minutes each on up to 256 bytes: enough to see that the task is learned.

Both models have 2 layers, 2 heads of 64 and a convolution over 6 or 13 bytes before the first of them. ``prompts`` is a causal
language model that is trained on each query's answer and, with less weight, on each other byte. ``documents`` is an encoder of
which the first row's logits are the answer's two letters; rows of queries and records within are trained as well. Lengths
grow from 128 to 4096 bytes.

Rows that have nothing to find attend to few keys in trained language models, mostly to the first one. Small models have no need
to: their task alone leaves such rows spread over all keys. So the loss has the entropy of some rows' attention in nats, with a
small weight.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from retrieval_texts import ANSWER, PADDING, VOCABULARY, Texts, draw_documents, draw_prompts
from torch import Tensor, nn
from torch.nn import functional

LAYERS, HEADS, HEAD_SIZE, HIDDEN, INNER, EMBEDDED = 2, 2, 64, 128, 256, 32
ROTATED, ROTARY_BASE = 16, 10000.0
KERNELS = {"prompts": 6, "documents": 13}  # bytes that the convolution joins
SEED = 20
_SAMPLED_ROWS = 32  # of each head, for the entropy
_OTHER_BYTES = 0.1  # weight of bytes that are no answer
_OWN_VALUES = 0.3  # weight of the letters that an encoder's row at a record says, which are the record's own


class Block(nn.Module):
    """Attention and MLP, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(HIDDEN, bias=False)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.mlp_norm = nn.LayerNorm(HIDDEN, bias=False)
        self.up = nn.Linear(HIDDEN, INNER, bias=False)
        self.down = nn.Linear(INNER, HIDDEN, bias=False)
        with torch.no_grad():  # rows that are alike score high from the start, which is most of what a query needs
            self.qkv.weight[HIDDEN : 2 * HIDDEN] = self.qkv.weight[:HIDDEN]

    def forward(self, x: Tensor, *, is_causal: bool) -> tuple[Tensor, Tensor]:
        """The layer's output [B, S, HIDDEN] of x [B, S, HIDDEN], and the mean entropy of some rows of its attention."""
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, HEAD_SIZE)).permute(2, 0, 3, 1, 4)
        q, k = rotate(q), rotate(k)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        x = x + self.down(functional.silu(self.up(self.mlp_norm(x))))
        return x, sampled_entropy(q, k, is_causal=is_causal) if self.training else x.new_zeros(())


class RetrievalModel(nn.Module):
    """A causal language model, or an encoder."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.is_causal = name == "prompts"
        kernel = KERNELS[name]
        self.padding = (kernel - 1, 0) if self.is_causal else (kernel // 2, kernel // 2)
        self.embedding = nn.Embedding(VOCABULARY, EMBEDDED, padding_idx=PADDING)  # zeros, as beyond the ends
        self.conv = nn.Conv1d(EMBEDDED, HIDDEN, kernel, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(HIDDEN, bias=False)
        self.head = nn.Linear(HIDDEN, VOCABULARY * (1 if self.is_causal else ANSWER), bias=False)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The last norm's output [B, S, HIDDEN] of ids [B, S], and the mean entropy of attention."""
        x = self.conv(functional.pad(self.embedding(ids).transpose(1, 2), self.padding)).transpose(1, 2)
        x = x.float()  # residuals stay fp32 under autocast
        entropies = []
        for block in self.blocks:
            x, entropy = block(x, is_causal=self.is_causal)
            entropies.append(entropy)
        return self.norm(x), torch.stack(entropies).mean()


def rotate(x: Tensor) -> Tensor:
    """Rotary positions in the first ROTATED channels of [B, H, S, D]; channel i rotates with channel i + ROTATED / 2."""
    half = ROTATED // 2
    frequencies = ROTARY_BASE ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b, rest = x.split((half, half, x.shape[-1] - ROTATED), -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


def sampled_entropy(q: Tensor, k: Tensor, *, is_causal: bool) -> Tensor:
    """The mean entropy in nats of some rows of the softmax, of q and k [B, H, S, D]."""
    rows = torch.randint(q.shape[2], (_SAMPLED_ROWS,), device=q.device)
    scores = (q[:, :, rows] @ k.transpose(-1, -2) / math.sqrt(HEAD_SIZE)).float()
    if is_causal:
        scores = scores.masked_fill(torch.arange(k.shape[2], device=q.device) > rows[:, None], float("-inf"))
    log_sum = scores.logsumexp(-1)
    weights = scores.softmax(-1)
    return (log_sum - (weights * scores.masked_fill(weights == 0, 0.0)).sum(-1)).mean()


@dataclass(frozen=True)
class Stage:
    """A length, the texts of a batch, and the share of training that it takes."""

    length: int
    batch: int
    share: float


STAGES = (
    Stage(128, 64, 0.25),
    Stage(256, 64, 0.15),
    Stage(512, 64, 0.15),
    Stage(1024, 32, 0.15),
    Stage(2048, 16, 0.1),
    Stage(4096, 16, 0.2),
)
SMALL_STAGES = (Stage(128, 16, 0.6), Stage(256, 8, 0.4))
STEPS = 4000


def losses(model: RetrievalModel, texts: Texts, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy of a batch, and the mean entropy of its attention."""
    x, entropy = model(ids)
    if model.is_causal:
        logits = model.head(x[:, :-1]).float()
        loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        is_answer = torch.from_numpy(answer_positions(texts)).to(ids.device)[:, 1:].flatten()
        return loss[is_answer].mean() + _OTHER_BYTES * loss[~is_answer].mean(), entropy
    first = np.zeros((len(texts.ids), 1), np.int64)
    asked = np.concatenate([first, texts.asked], 1), np.concatenate([texts.answers[:, None], texts.asked_answers], 1)
    records = texts.records, texts.record_values
    loss = letter_loss(model, x, *asked) + _OWN_VALUES * letter_loss(model, x, *records)
    return loss, entropy


def letter_loss(model: RetrievalModel, x: Tensor, rows: np.ndarray, letters: np.ndarray) -> Tensor:
    """Cross entropy of the two letters [B, Q, 2] that rows [B, Q] of x [B, S, HIDDEN] say; rows of -1 are left out."""
    batch, column = np.nonzero(rows >= 0)
    logits = model.head(x[torch.from_numpy(batch), torch.from_numpy(rows[batch, column])]).float()
    expected = torch.from_numpy(letters[batch, column]).to(x.device)
    return functional.cross_entropy(logits.view(-1, VOCABULARY), expected.flatten())


def answer_positions(texts: Texts) -> np.ndarray:
    """Which bytes of prompts are letters of an answer, [B, S]."""
    found = np.zeros(texts.ids.shape, bool)
    found[:, -ANSWER:] = True
    row, column = np.nonzero(texts.asked >= 0)
    for i in range(ANSWER):
        found[row, texts.asked[row, column] + 5 + i] = True
    return found


def draw_batch(name: str, rng: np.random.Generator, count: int, length: int) -> Texts:
    """Texts of a model's task."""
    return draw_prompts(rng, count, length) if name == "prompts" else draw_documents(rng, count, length)


def accuracy(model: RetrievalModel, name: str, length: int, count: int, device: torch.device, seed: int) -> float:
    """The share of texts of which both letters of the answer are most probable."""
    rng = np.random.default_rng(seed)
    right = total = 0
    model.eval()
    while total < count:
        texts = draw_batch(name, rng, min(count - total, max(1, 65536 // length)), length)
        ids = torch.from_numpy(texts.ids).to(device)
        with torch.no_grad():
            x = model(ids)[0]
            logits = model.head(x[:, -ANSWER - 1 : -1] if model.is_causal else x[:, 0])
        found = logits.view(-1, ANSWER, VOCABULARY).argmax(-1).cpu().numpy()
        right += int((found == texts.answers).all(1).sum())
        total += len(ids)
    model.train()
    return right / total


class Progress:
    """The share of training that is done, by steps, or by minutes where they are given."""

    def __init__(self, steps: int, minutes: float | None) -> None:
        self.steps, self.minutes = steps, minutes
        self.step = 0
        self.started = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.perf_counter() - self.started

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return self.step / self.steps if self.minutes is None else self.seconds / (60 * self.minutes)


def stage_at(stages: tuple[Stage, ...], share: float) -> Stage:
    """The stage that training is in."""
    ends = np.cumsum([stage.share for stage in stages])
    return stages[min(int(np.searchsorted(ends, share, "right")), len(stages) - 1)]


def ramp(share: float) -> float:
    """The entropy's part of its weight: none before the task is learned at the first length, all from 0.6 on."""
    return min(1.0, max(0.0, share - 0.25) / 0.35)


def train(
    name: str, stages: tuple[Stage, ...], progress: Progress, device: torch.device, rate: float, entropy_weight: float
) -> RetrievalModel:
    """Trains a model; prints its loss and the time."""
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    model = RetrievalModel(name).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01, betas=(0.9, 0.98))
    while (share := progress.share) < 1:
        stage = stage_at(stages, share)
        texts = draw_batch(name, rng, stage.batch, stage.length)
        optimizer.param_groups[0]["lr"] = rate * min(1.0, (progress.step + 1) / 100, 0.02 + 2 * (1 - share))
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss, entropy = losses(model, texts, torch.from_numpy(texts.ids).to(device))
        optimizer.zero_grad(set_to_none=True)
        (loss + entropy_weight * ramp(share) * entropy).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if progress.step % 100 == 0:
            print(
                f"{name} step {progress.step}, {stage.length} bytes: loss {loss.item():.4f}, "
                f"entropy {entropy.item():.3f} nats, {progress.seconds:.1f} s",
                flush=True,
            )
        progress.step += 1
    print(f"{name} trained in {progress.step} steps, {progress.seconds:.1f} s", flush=True)
    return model


def save(model: RetrievalModel, path: Path) -> None:
    """Writes the weights in fp16, under the names of torch's modules."""
    path.parent.mkdir(parents=True, exist_ok=True)
    weights = {k: v.detach().cpu().numpy().astype(np.float16) for k, v in model.state_dict().items()}
    np.savez_compressed(path, **weights)
    print(f"{path}: {path.stat().st_size} bytes", flush=True)


def round_to_half(model: RetrievalModel) -> None:
    """Rounds weights to what is saved, so that the printed accuracy is of the saved file."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.half().float())


def main() -> None:
    """Trains the models that are named, prints their accuracy by length and saves them."""
    parser = argparse.ArgumentParser(description="Trains the models of models/trained.")
    parser.add_argument("names", nargs="+", choices=sorted(KERNELS), metavar="NAME", help="prompts, documents")
    parser.add_argument("-o", dest="folder", type=Path, required=True, metavar="DIR", help="for NAME.npz")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--cpu-minutes", type=float, metavar="M", help="train so long on up to 256 bytes, on the CPU")
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate (default 3e-3)")
    parser.add_argument("--entropy", type=float, default=0.03, metavar="W", help="weight of the entropy (default 0.03)")
    arguments = parser.parse_args()
    is_small = arguments.cpu_minutes is not None
    device = torch.device("cpu" if is_small else arguments.device)
    stages = SMALL_STAGES if is_small else STAGES
    for name in arguments.names:
        progress = Progress(arguments.steps, arguments.cpu_minutes)
        model = train(name, stages, progress, device, arguments.rate, arguments.entropy)
        round_to_half(model)
        save(model, arguments.folder / f"{name}.npz")
        for stage in stages:
            count = 200 if is_small else 1000
            share = accuracy(model, name, stage.length, count, device, seed=SEED + 1)
            print(f"{name} accuracy at {stage.length} bytes: {share:.4f} of {count} texts", flush=True)
        print(f"{name} {progress.seconds:.1f} s in all", flush=True)


if __name__ == "__main__":
    main()
