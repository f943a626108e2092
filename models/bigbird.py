# SPDX-License-Identifier: Apache-2.0
"""The BigBird mask of the paper's models: two weights, a width and a table of blocks, and what a user would compare with them.

As weights they can be those of another length. Needs numpy and onnx only, and torch for ``mask``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx

BLOCK = 64
FILL = 0.1
WIDTH, BLOCKS = "bigbird_width", "bigbird_blocks"


def width(length: int) -> int:
    """How far a token sees to both sides, and how many tokens see everything."""
    return round(math.sqrt(length))


def blocks(length: int) -> np.ndarray:
    """Blocks [ceil(length / 64), the same] that are allowed, each with probability 0.1."""
    count = -(-length // BLOCK)
    return np.random.default_rng(0).random((count, count)) < FILL


def add_weights(core: Any, length: int) -> None:
    """Gives a module the weights that ``mask`` reads."""
    import torch

    core.register_buffer(WIDTH, torch.tensor(width(length)))
    core.register_buffer(BLOCKS, torch.from_numpy(blocks(length)))


def mask(core: Any, length: Any) -> Any:
    """Which keys a query attends, [1, 1, S, S]: near ones and the first ones, the first queries all, and random blocks."""
    import torch

    side, table = getattr(core, WIDTH), getattr(core, BLOCKS)
    at = torch.arange(length, device=side.device)
    q, k = at[:, None], at[None, :]
    allowed = ((q - k).abs() <= side) | (q < side) | (k < side) | table[q // BLOCK, k // BLOCK]
    return allowed[None, None]


def set_length(model: onnx.ModelProto, length: int) -> bool:
    """Gives an exported graph the mask of another length; False where it has none."""
    found = False
    for tensor in model.graph.initializer:
        if tensor.name.rpartition(".")[2] == WIDTH:
            array = np.array(width(length))
        elif _is_table(tensor):
            array = blocks(length)
        else:
            continue
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
        found = True
    return found


def _is_table(tensor: onnx.TensorProto) -> bool:
    """Whether a tensor is the table of some length: exporters fold it, and call it as they like."""
    if tensor.data_type != onnx.TensorProto.BOOL or len(tensor.dims) != 2:
        return False
    return np.array_equal(onnx.numpy_helper.to_array(tensor), blocks(BLOCK * tensor.dims[0]))
