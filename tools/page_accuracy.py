# SPDX-License-Identifier: Apache-2.0
"""How many answers a trained model keeps where steps attend the best pages alone: ``python tools/page_accuracy.py``.

The model ``prompts`` of ``models/trained`` reads a text of bytes, and answers the query at its end in two steps of one token.
Both layers attend page 0, the last two pages, and the best k of the others: by minima and maxima of keys, or by the scores of
their means. In fp32 NumPy, since the model has no KV cache of its own.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models" / "trained"))
from retrieval_models import HEADS
from retrieval_numpy import SCALE, Model
from retrieval_texts import ANSWER, draw_prompts


def run(model: Model, x: np.ndarray, first: int, caches: list[list[np.ndarray]], allowed) -> np.ndarray:
    """Logits of rows [S, hidden] from position ``first`` on; caches get their keys and values [H, S, D]."""
    positions = first + np.arange(len(x))
    for layer in range(model.layers):
        q, *new = model.project(layer, x, first)
        cache = caches[layer]
        cache[:] = [np.concatenate([old, rows], 1) for old, rows in zip(cache, new, strict=True)] if cache else new
        out = np.empty_like(q)
        for h in range(HEADS):
            keys, values = cache[0][h], cache[1][h]
            scores = q[h] @ keys.T * np.float32(SCALE)
            scores[~allowed(q[h], keys, positions)] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[h] = weights / weights.sum(-1, keepdims=True) @ values
        x = model.finish(layer, x, out)
    return model.logits(x)


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
    model, rng = Model("prompts"), np.random.default_rng(5)
    pages = -(-a.length // a.rows)
    shares = {0.05: 0, 0.1: 0, 0.25: 0}
    variants = [("all", 0, 0.0), *((rule, max(1, round(s * pages)), s) for rule in ("bounds", "means") for s in shares)]
    right = dict.fromkeys(variants, 0)
    for _ in range(a.texts):
        texts = draw_prompts(rng, 1, a.length)
        ids, answer = texts.ids[0], texts.answers[0]
        x, start = model.embed(ids), a.length - ANSWER - 1  # of the byte before the answer
        prompt: list[list[np.ndarray]] = [[] for _ in range(model.layers)]
        run(model, x[:start], 0, prompt, causal)
        for variant in variants:
            rule, chosen, _ = variant
            allowed = causal if rule == "all" else best_pages(chosen, a.rows, rule)
            caches = [list(c) for c in prompt]
            found = [int(run(model, x[t : t + 1], t, caches, allowed)[0].argmax()) for t in (start, start + 1)]
            right[variant] += found == answer.tolist()
    for (rule, chosen, share), count in right.items():
        print(f"{rule}: {chosen} of {pages} pages of {a.rows} rows ({share:.0%}): {100 * count / a.texts:.1f} % right")


if __name__ == "__main__":
    main()
