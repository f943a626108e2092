# SPDX-License-Identifier: Apache-2.0
"""Stored graphs with random weights, and random inputs for them at small sizes."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto

import build

_SAMPLES_A_FRAME = 20  # of the speech models: strides 5 and 4


def fill_graph(name: str) -> onnx.ModelProto:
    """A stored graph with seeded weights."""
    return build.fill(build.load_graph(name))


def draw_feed(model: onnx.ModelProto, rng: np.random.Generator, batch: int, length: int) -> dict[str, np.ndarray]:
    """Inputs of a batch of texts, of which the first is padded on the left and the last on the right; or of other data."""
    stored = {t.name for t in model.graph.initializer}
    feed: dict[str, np.ndarray] = {}
    for value in model.graph.input:
        if value.name in stored:
            continue
        dims = value.type.tensor_type.shape.dim
        factor = _SAMPLES_A_FRAME if value.name == "input_values" and len(dims) == 2 else 1
        factor = 8 if (len(dims) == 3 and dims[2].dim_value == 16) or _is_subsampled(model, value.name) else factor
        shape = [d.dim_value or (batch if axis == 0 else (length + 2) * factor) for axis, d in enumerate(dims)]
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            feed[value.name] = rng.standard_normal(shape).astype(np.float32)
        elif "mask" in value.name:
            mask = np.ones(shape, np.int64)
            if batch > 1:
                mask[0, : shape[1] // 3] = 0
                mask[-1, shape[1] - shape[1] // 4 :] = 0
            feed[value.name] = mask
        else:
            feed[value.name] = rng.integers(3, 90, shape)
    return feed


def _is_subsampled(model: onnx.ModelProto, name: str) -> bool:
    """Whether a mask is that of frames which a model subsamples by 8."""
    frames = [v for v in model.graph.input if len(v.type.tensor_type.shape.dim) == 3]
    return "mask" in name and any(v.type.tensor_type.shape.dim[2].dim_value == 16 for v in frames)
