# SPDX-License-Identifier: Apache-2.0
"""What verification needs to know of the batches of regions: their masks, what counts positions, and dynamic quantization."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx
from onnx import TensorProto

from stof.symbolic import Symbolic
from stof.symbolic.algebra.sizes import size_names
from stof.unpadding.region import UnpaddedRegion
from stof.verification.padding.padded_batch import PaddedBatch


def describe_batches(
    model: onnx.ModelProto, symbolic: Symbolic, regions: Iterable[UnpaddedRegion]
) -> tuple[PaddedBatch, ...]:
    """The padded batch of each region.

    Args:
        model: the one that the regions are of.
        symbolic: of that model.
        regions: what runs on real tokens.
    """
    return tuple(_describe_batch(model.graph, symbolic, region) for region in regions)


def _describe_batch(graph: onnx.GraphProto, symbolic: Symbolic, region: UnpaddedRegion) -> PaddedBatch:
    length = region.shape[1]
    dimensions = frozenset(size_names(length))
    axes: dict[str, tuple[int, ...]] = {}
    for value in graph.input:
        shape = symbolic.shape(value.name) or ()
        if found := tuple(axis for axis, size in enumerate(shape) if size == length):
            axes[value.name] = found
        if any(size != length and size_names(size) & dimensions for size in shape):
            dimensions = frozenset()  # another size would have to grow with it
    # Scales of kept rows are others than those of all rows.
    is_quantized = region.has_common_scales(graph)
    mask, number = region.mask, region.mask.number
    if mask.is_bound:  # what most callers write
        is_half = symbolic.dtype(mask.tensor) == TensorProto.FLOAT16
        number = float(np.finfo(np.float16 if is_half else np.float32).min)
    return PaddedBatch(mask.tensor, number, dimensions, axes, is_quantized, mask.number if mask.is_bound else None)
