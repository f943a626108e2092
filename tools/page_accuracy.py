# SPDX-License-Identifier: Apache-2.0
"""How many answers a trained model keeps where steps attend the best pages alone: ``python tools/page_accuracy.py``.

The model ``prompts`` of ``models/trained`` reads a text of bytes, and answers the query at its end in two steps of one token.
Both layers attend page 0, the last two pages, and the best k of the others: by minima and maxima of keys, or by the scores of
their means. In fp32 NumPy, since the model has no KV cache of its own.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models" / "trained"))
from retrieval_models import FOLDER, read_weights
from retrieval_texts import ANSWER, draw_prompts

HEADS, SIZE, ROTATED, BASE = 2, 64, 16, 10000.0


class Model:
    """The causal model, one text at a time."""

    def __init__(self) -> None:
        self.weights = read_weights(FOLDER / "prompts.npz")
        self.layers = sum(k.endswith("qkv.weight") for k in self.weights)

    def _norm(self, name: str, x: np.ndarray) -> np.ndarray:
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * self.weights[f"{name}.weight"]

    def _rotate(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """x: [S, H, D]."""
        half = ROTATED // 2
        angles = (positions[:, None] * BASE ** (-np.arange(half) / half))[:, None].astype(np.float32)
        a, b, rest = x[..., :half], x[..., half:ROTATED], x[..., ROTATED:]
        c, s = np.cos(angles), np.sin(angles)
        return np.concatenate([a * c - b * s, b * c + a * s, rest], -1)

    def embed(self, ids: np.ndarray) -> np.ndarray:
        """Bytes joined with those before, [S, hidden]."""
        kernel = self.weights["conv.weight"]  # [out, in, taps]
        rows = np.pad(self.weights["embedding.weight"][ids], ((kernel.shape[2] - 1, 0), (0, 0)))
        return sum(rows[t : t + len(ids)] @ kernel[:, :, t].T for t in range(kernel.shape[2]))

    def run(self, x: np.ndarray, first: int, caches: list[list[np.ndarray]], allowed) -> np.ndarray:
        """Logits of rows [S, hidden] from position ``first`` on; caches get their keys and values [S, H, D]."""
        positions = first + np.arange(len(x))
        for layer in range(self.layers):
            name = f"blocks.{layer}"
            packed = self._norm(f"{name}.attention_norm", x) @ self.weights[f"{name}.qkv.weight"].T
            q, k, v = (p.reshape(-1, HEADS, SIZE) for p in np.split(packed, 3, 1))
            q, k = self._rotate(q, positions), self._rotate(k, positions)
            cache = caches[layer]
            cache[:] = [np.concatenate([old, new]) for old, new in zip(cache, (k, v), strict=True)] if cache else [k, v]
            out = np.empty_like(q)
            for h in range(HEADS):
                keys, values = cache[0][:, h], cache[1][:, h]
                scores = q[:, h] @ keys.T / math.sqrt(SIZE)
                scores[~allowed(q[:, h], keys, positions)] = -np.inf
                weights = np.exp(scores - scores.max(-1, keepdims=True))
                out[:, h] = weights / weights.sum(-1, keepdims=True) @ values
            x = x + out.reshape(len(x), -1) @ self.weights[f"{name}.out.weight"].T
            up = self._norm(f"{name}.mlp_norm", x) @ self.weights[f"{name}.up.weight"].T
            x = x + (up / (1 + np.exp(-up))) @ self.weights[f"{name}.down.weight"].T
        return self._norm("norm", x) @ self.weights["head.weight"].T


def causal(query: np.ndarray, keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """All keys up to the query's own."""
    del query
    return np.arange(len(keys)) <= positions[:, None]


def best_pages(chosen: int, rows: int, rule: str):
    """Keys in the best pages, for a step of one token."""

    def allowed(query: np.ndarray, keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
        (x,), starts = query, range(0, len(keys), rows)
        if rule == "bounds":
            low, high = (np.stack([f(keys[s : s + rows], 0) for s in starts]) for f in (np.min, np.max))
            scores = np.maximum(x * low, x * high).sum(-1)
        else:
            scores = np.stack([keys[s : s + rows].mean(0) for s in starts]) @ x
        recent = max(0, int(positions[0]) // rows - 1)
        others = np.arange(1, recent)
        taken = others[np.argsort(-scores[others], kind="stable")[:chosen]]
        pages = {0, *range(recent, len(scores)), *taken.tolist()}
        return np.isin(np.arange(len(keys)) // rows, list(pages))[None]

    return allowed


def main() -> None:
    """Prints the share of right answers for each number of pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--texts", type=int, default=100)
    parser.add_argument("--rows", type=int, default=64)
    a = parser.parse_args()
    model, rng = Model(), np.random.default_rng(5)
    pages = -(-a.length // a.rows)
    shares = {0.05: 0, 0.1: 0, 0.25: 0}
    variants = [("all", 0, 0.0), *((rule, max(1, round(s * pages)), s) for rule in ("bounds", "means") for s in shares)]
    right = dict.fromkeys(variants, 0)
    for _ in range(a.texts):
        texts = draw_prompts(rng, 1, a.length)
        ids, answer = texts.ids[0], texts.answers[0]
        x, start = model.embed(ids), a.length - ANSWER - 1  # of the byte before the answer
        prompt: list[list[np.ndarray]] = [[] for _ in range(model.layers)]
        model.run(x[:start], 0, prompt, causal)
        for variant in variants:
            rule, chosen, _ = variant
            allowed = causal if rule == "all" else best_pages(chosen, a.rows, rule)
            caches = [list(c) for c in prompt]
            found = [int(model.run(x[t : t + 1], t, caches, allowed)[0].argmax()) for t in (start, start + 1)]
            right[variant] += found == answer.tolist()
    for (rule, chosen, share), count in right.items():
        print(f"{rule}: {chosen} of {pages} pages of {a.rows} rows ({share:.0%}): {100 * count / a.texts:.1f} % right")


if __name__ == "__main__":
    main()
