# SPDX-License-Identifier: Apache-2.0
"""The decoders of ``bench/`` in NumPy, fp64: what their graphs are compared with."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import NormalDist

import numpy as np

from bench.decoder.graph import WEIGHTS, Decoder, DecoderShape
from bench.decoder.mlp_form import MlpForm

Weights = dict[str, np.ndarray]


def read_weights(decoder: Decoder, folder: Path) -> Weights:
    """The weights of a decoder, fp64; those of 4 bits are dequantized to [in, out] under the name of a dense one."""
    data = (folder / WEIGHTS).read_bytes()
    found: Weights = {}
    for w in decoder.weights:
        dtype = np.uint8 if w.kind == "uint8" else np.dtype(decoder.shape.dtype)
        values = np.frombuffer(data, dtype, math.prod(w.dims), w.offset).reshape(w.dims)
        found[w.name] = values if w.kind == "uint8" else values.astype(np.float64)
    for name in [n for n in found if n.endswith(".qweight")]:
        packed = found.pop(name)
        stem = name.removesuffix(".qweight")
        values = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:2], -1) - 8.0
        scales = found.pop(f"{stem}.scales").reshape(*packed.shape[:2], 1)
        found[f"{stem}.weight"] = (values * scales).reshape(len(packed), -1).T
    return found


def activate(gate: np.ndarray, form: MlpForm) -> np.ndarray:
    """What a form's activation makes of gates [..., F]."""
    if form.has_top_k:
        assert form.active is not None
        threshold = gate.mean(-1, keepdims=True) + NormalDist().inv_cdf(1 - form.active) * gate.std(-1, keepdims=True)
        gate = np.maximum(gate - threshold, 0)
    if form.activation == "silu":
        return gate / (1 + np.exp(-gate))
    if form.activation == "gelu_tanh":
        return 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    return np.maximum(gate, 0) ** {"relu": 1, "relu2": 2}[form.activation]


def run_decoder(
    shape: DecoderShape, weights: Weights, ids: np.ndarray, window: int = 0
) -> tuple[np.ndarray, list[np.ndarray]]:
    """The last token's logits [B, V] of a first prompt, and the activated gates [B, S, F] of each layer.

    Args:
        shape: of the decoder.
        weights: of ``read_weights``.
        ids: [B, S].
        window: keys that a query attends at most; 0: all before it.
    """
    B, S = ids.shape
    H, G, D = shape.heads, shape.kv_heads, shape.head_size
    first, last = ("gate_proj", "down_proj") if shape.mlp.is_gated else ("fc1", "fc2")

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weights[f"{name}.weight"]

    def rotated(x: np.ndarray) -> np.ndarray:
        cos, sin = (weights[f"{n}_cache"][:S, None] for n in ("cos", "sin"))
        a, b = x[..., : D // 2], x[..., D // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    q, k = np.arange(S)[:, None], np.arange(S)[None, :]
    allowed = (k <= q) & (q - k < (window or S))
    x = weights["model.embed_tokens.weight"][ids]
    normed = norm(x, "model.layers.0.input_layernorm")
    activated = []
    for layer in range(shape.layers):
        path = f"/model/layers.{layer}"
        packed = normed @ weights[f"{path}/attn/qkv_proj/MatMul.weight"]
        query, key, value = (
            part.reshape(B, S, -1, D) for part in np.split(packed, [H * D, (H + G) * D], axis=-1)
        )  # fmt: skip
        query, key = rotated(query), rotated(key)
        key, value = (np.repeat(part, H // G, axis=2) for part in (key, value))
        scores = np.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(D)
        scores = np.where(allowed, scores, -np.inf)
        probabilities = np.exp(scores - scores.max(-1, keepdims=True))
        probabilities /= probabilities.sum(-1, keepdims=True)
        attended = np.einsum("bhqk,bkhd->bqhd", probabilities, value).reshape(B, S, -1)
        x = x + attended @ weights[f"{path}/attn/o_proj/MatMul.weight"]
        normed = norm(x, f"{path}/post_attention_layernorm")
        gate = normed @ weights[f"{path}/mlp/{first}/MatMul.weight"] + weights.get(f"{path}/mlp/fc1.bias", 0.0)
        hidden = activate(gate, shape.mlp)
        activated.append(hidden)
        if shape.mlp.is_gated:
            hidden = hidden * (normed @ weights[f"{path}/mlp/up_proj/MatMul.weight"])
        x = x + hidden @ weights[f"{path}/mlp/{last}/MatMul.weight"]
        is_last = layer + 1 == shape.layers
        normed = norm(x, "/model/final_norm" if is_last else f"/model/layers.{layer + 1}/input_layernorm")
    return normed[:, -1] @ weights["/lm_head/MatMul.weight"], activated
