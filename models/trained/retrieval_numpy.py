# SPDX-License-Identifier: Apache-2.0
"""The trained models in NumPy, one text at a time, for attention that no kernel has; which answers are right.

``Model`` gives the parts of a layer around its attention, which the caller computes:

``x = embed(ids); for each layer: q, k, v = project(layer, x); x = finish(layer, x, attention of q, k and v); logits(x)``
"""

from __future__ import annotations

import math

import numpy as np
from retrieval_models import FOLDER, HEAD_SIZE, HEADS, ROTARY_BASE, ROTATED, Weights, read_weights
from retrieval_texts import ANSWER, Texts, draw_documents, draw_prompts

SCALE = 1 / math.sqrt(HEAD_SIZE)
DRAW = {"prompts": draw_prompts, "documents": draw_documents}


class Model:
    """A trained model.

    Args:
        name: of ``retrieval_models.NAMES``.

    Attributes:
        is_causal: whether a row attends the keys up to its own alone.
        layers: how many there are.
    """

    def __init__(self, name: str) -> None:
        self.is_causal = name == "prompts"
        self._weights: Weights = read_weights(FOLDER / f"{name}.npz")
        self.layers = sum(key.endswith("qkv.weight") for key in self._weights)

    def embed(self, ids: np.ndarray) -> np.ndarray:
        """Bytes [S] joined with their neighbours, [S, hidden]."""
        kernel = self._weight("conv")
        size = kernel.shape[2]
        before = size - 1 if self.is_causal else size // 2
        rows = np.pad(self._weight("embedding")[ids], ((before, size - 1 - before), (0, 0)))
        return np.asarray(sum(rows[i : i + len(ids)] @ kernel[:, :, i].T for i in range(size)))

    def project(self, layer: int, x: np.ndarray, first: int = 0) -> tuple[np.ndarray, ...]:
        """Queries, keys and values of a layer, [H, S, D], of rows from position ``first`` on."""
        packed = self._normalize(f"blocks.{layer}.attention_norm", x) @ self._weight(f"blocks.{layer}.qkv").T
        q, k, v = (p.reshape(len(x), HEADS, -1).transpose(1, 0, 2) for p in np.split(packed, 3, 1))
        return _rotate(q, first), _rotate(k, first), v

    def finish(self, layer: int, x: np.ndarray, attended: np.ndarray) -> np.ndarray:
        """The rest of a layer behind its attention [H, S, D]."""
        x = x + attended.transpose(1, 0, 2).reshape(len(x), -1) @ self._weight(f"blocks.{layer}.out").T
        up = self._normalize(f"blocks.{layer}.mlp_norm", x) @ self._weight(f"blocks.{layer}.up").T
        return np.asarray(x + up / (1 + np.exp(-up)) @ self._weight(f"blocks.{layer}.down").T)

    def logits(self, x: np.ndarray) -> np.ndarray:
        """Of the causal model [S, 256], of the encoder [2, 256]: of the letters of its answer."""
        x = self._normalize("norm", x) @ self._weight("head").T
        return x if self.is_causal else x[0].reshape(ANSWER, -1)

    def _weight(self, name: str) -> np.ndarray:
        """A weight by the name that torch has for its module."""
        return self._weights[f"{name}.weight"]

    def _normalize(self, name: str, x: np.ndarray) -> np.ndarray:
        """A layer normalization."""
        centred = x - x.mean(-1, keepdims=True)
        return np.asarray(centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * self._weight(name))


def right_answers(logits: np.ndarray, text: Texts, is_causal: bool) -> np.ndarray:
    """Which queries of a text are answered, bool: of a prompt the last one, then those within; of a document its only one.

    Args:
        logits: of one text, as ``Model.logits`` gives them.
        text: a batch of that text alone.
        is_causal: whether it is a prompt.
    """
    found = logits.argmax(-1)
    if not is_causal:
        return np.array([(found == text.answers[0]).all()])
    within = text.asked[0] >= 0
    ends = np.append(len(found) - ANSWER - 1, text.asked[0, within] + 4)  # of the byte before an answer
    expected = np.concatenate([text.answers[:1], text.asked_answers[0, within]])
    return np.asarray((found[ends[:, None] + np.arange(ANSWER)] == expected).all(1))


def _rotate(x: np.ndarray, first: int) -> np.ndarray:
    """Rotary positions in the first channels of [H, S, D]."""
    half = ROTATED // 2
    positions = first + np.arange(x.shape[1])
    angles = positions[:, None] * (ROTARY_BASE ** (-np.arange(half) / half)).astype(np.float32)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    a, b = x[..., :half], x[..., half:ROTATED]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., ROTATED:]], -1)
