# SPDX-License-Identifier: Apache-2.0
"""The files that are timed: the decoder as it is, after stof-optimize, and with declared patterns; one file of weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from bench.decoder.build_decoder import build_decoder
from bench.decoder.devices import DecoderDevice
from bench.decoder.graph import RANDOM, WEIGHTS, Decoder, DecoderShape, matrix_gain, rotary_table
from bench.decoder.mlp_form import NORM_SPREAD, gate_bias
from stof.files import write_bytes
from stof.mask.expression import CAUSAL, MaskExpression, causal_window
from stof.targets import TARGETS

ORIGINAL, CACHED = "GroupQueryAttention", "StofCachedAttention"
WINDOW = 1024
S2 = "s2:local=8,stride=16,block=64"
SINKS = f"window={WINDOW},sink=64"
_TABLES = 17  # the first input of StofCachedAttention that is a table of the mask


@dataclass(frozen=True)
class DecoderVariant:
    """One of the decoder's files.

    Attributes:
        name: in results; the file is ``<name>.onnx``.
        label: in words.
        window: keys that a query of the original attends at most; 0 is dense.
        optimized: whether it comes from stof-optimize.
        sparsify: the pattern that is put on it; "" is none.
        baseline: the variant that it is compared with; of a declared pattern, that of another result. "" is none.
        xqa: whether GroupQueryAttention may take its kernel for one query; without it, the file is that of ``file_of``.
        file_of: the variant whose file it runs; "" is its own.
    """

    name: str
    label: str
    window: int = 0
    optimized: bool = False
    sparsify: str = ""
    baseline: str = ""
    xqa: bool = True
    file_of: str = ""

    @property
    def file(self) -> str:
        """The name of its file."""
        return f"{self.file_of or self.name}.onnx"


VARIANTS = (
    DecoderVariant("gqa", "GroupQueryAttention"),
    DecoderVariant("gqa-no-xqa", "GroupQueryAttention without XQA", xqa=False, file_of="gqa"),
    DecoderVariant("stof", "stof-optimize", optimized=True, baseline="gqa"),
    DecoderVariant("gqa-window", f"GroupQueryAttention, window {WINDOW}", WINDOW),
    DecoderVariant(
        "gqa-window-no-xqa",
        f"GroupQueryAttention without XQA, window {WINDOW}",
        WINDOW,
        xqa=False,
        file_of="gqa-window",
    ),
    DecoderVariant("stof-window", f"stof-optimize, window {WINDOW}", WINDOW, optimized=True, baseline="gqa-window"),
    DecoderVariant("stof-s2", f"stof-optimize --sparsify {S2}", optimized=True, sparsify=S2, baseline="gqa"),
    DecoderVariant("stof-sinks", f"stof-optimize --sparsify {SINKS}", optimized=True, sparsify=SINKS, baseline="gqa"),
)


def write_graphs(
    shape: DecoderShape, target: str, folder: Path, variants: Sequence[DecoderVariant] = VARIANTS
) -> Decoder:
    """Writes the file of every variant; returns the decoder of the first.

    ``target`` is "cpu" or "cuda", as of stof-optimize. All files name the same file of weights. Where there is none yet,
    matrices count as zeros, and none is left.

    Raises:
        ValueError: when stof-optimize replaces nothing.
    """
    from stof.options import Options
    from stof.pipeline import optimize

    folder.mkdir(parents=True, exist_ok=True)
    originals = {window: build_decoder(shape, window) for window in sorted({v.window for v in variants})}
    decoder = next(iter(originals.values()))
    is_without_weights = not (folder / WEIGHTS).exists()
    if is_without_weights:
        _write_file(decoder, folder)
    given = {window: folder / f"original-{window}.onnx" for window in originals}
    for window, path in given.items():
        write_bytes("model", path, originals[window].model.SerializeToString())
    for variant in variants:
        path = folder / variant.file
        if not variant.optimized:
            write_bytes("model", path, originals[variant.window].model.SerializeToString())
            continue
        # Results are compared where they are timed: a model of this size takes minutes on a CPU.
        options = Options(
            verify=False, target=target, capability=90 if TARGETS[target].uses_gpu else 0, sparsify=variant.sparsify
        )
        optimize(given[variant.window], path, options)
        found = onnx.load(str(path), load_external_data=False) if path.is_file() else onnx.ModelProto()
        if sum(n.op_type == CACHED for n in found.graph.node) != shape.layers:
            raise ValueError(f"{variant.name}: stof-optimize left attention of some of the {shape.layers} layers")
    for path in [*given.values(), *([folder / WEIGHTS] if is_without_weights else [])]:
        path.unlink()
    return decoder


def write_weights(decoder: Decoder, device: DecoderDevice, folder: Path) -> None:
    """Writes the file of weights. The device draws the matrices; the others are the same on every machine."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_file(decoder, folder)
    with (folder / WEIGHTS).open("r+b") as file:
        for number, weight in enumerate(decoder.weights):
            if weight.kind in RANDOM:
                file.seek(weight.offset)
                if weight.kind == "uint8":
                    file.write(_random_nibbles(math.prod(weight.dims), number).tobytes())
                    continue
                values = device.read(device.normal(weight.dims, decoder.shape.dtype, number, matrix_gain(weight)))
                file.write(values.tobytes())


def _random_nibbles(count: int, seed: int) -> np.ndarray:
    """Bytes of two values from 1 to 15: their mean is MatMulNBits' zero point, so that no matmul has an offset."""
    rng = np.random.default_rng(seed)
    low, high = (rng.integers(1, 16, count, np.uint8) for _ in range(2))
    found: np.ndarray = low | high << 4
    return found


def _write_file(decoder: Decoder, folder: Path) -> None:
    """A file whose matrices are zeros: a hole. stof-optimize reads the others, and makes constants of them."""
    with (folder / WEIGHTS).open("wb") as file:
        file.truncate(decoder.size)
        for number, weight in enumerate(decoder.weights):
            if weight.kind in RANDOM:
                continue
            if weight.kind == "norm":
                values = 1 + NORM_SPREAD * np.random.default_rng(number).standard_normal(weight.dims)
            elif weight.kind == "scales":
                values = np.full(weight.dims, weight.value)
            elif weight.kind == "gate_bias":
                values = gate_bias(decoder.shape.mlp, weight.dims[0], number)
            else:
                values = rotary_table(weight)
            file.seek(weight.offset)
            file.write(values.astype(decoder.shape.dtype).tobytes())


def masks_of(path: Path) -> list[MaskExpression]:
    """The masks of a file's attentions, in the order of the layers."""
    model = onnx.load(str(path), load_external_data=False)
    constants = {t.name: t for t in model.graph.initializer}
    found = []
    for node in model.graph.node:
        values = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        if node.op_type == ORIGINAL:
            window = values.get("local_window_size", -1)
            found.append(causal_window(max(window, 0)))
        elif node.op_type == CACHED:
            tables = {
                f"table{i}": numpy_helper.to_array(constants[name])
                for i, name in enumerate(node.input[_TABLES:])
                if name
            }
            text = values.get("mask", b"").decode()
            found.append(MaskExpression.parse(text, tables) if text else CAUSAL)
    return found


def keys_of_query(mask: MaskExpression, position: int, heads: int, kv_heads: int) -> int:
    """Keys that a query's heads attend, as caches hold them: each of a KV head once; the sum over KV heads."""
    h = np.arange(heads)[:, None]
    k = np.arange(position + 1)[None, :]
    allowed = mask.as_function({"S": 1, "T": position + 1, "P": position})(0, h, position, k)
    allowed = np.broadcast_to(np.asarray(allowed, bool), (heads, position + 1)) & (k <= position)
    return int(allowed.reshape(kv_heads, heads // kv_heads, position + 1).any(axis=1).sum())


def pair_share(mask: MaskExpression, length: int, heads: int, samples: int = 64) -> float:
    """The part of the causal pairs of a prompt that the mask keeps, by evenly spaced queries."""
    queries = np.unique(np.linspace(0, length - 1, min(samples, length)).round().astype(int))
    kept = sum(keys_of_query(mask, int(q), heads, heads) for q in queries)
    return kept / (heads * int((queries + 1).sum()))


def cache_bytes_read(path: Path, shape: DecoderShape, batch: int, position: int) -> int:
    """Bytes of keys and values that a token at a position reads, in all layers."""
    keys: dict[str, int] = {}
    total = 0
    for mask in masks_of(path):
        if mask.text not in keys:
            keys[mask.text] = keys_of_query(mask, position, shape.heads, shape.kv_heads)
        total += keys[mask.text]
    return 2 * batch * total * shape.head_size * shape.item


def file_size(decoder: Decoder) -> str:
    """The size of the weights in words."""
    return f"{decoder.size / 1e9:.2f} GB, {math.ceil(decoder.read_bytes / 1e6)} MB of them read for each token"
