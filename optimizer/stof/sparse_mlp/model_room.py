# SPDX-License-Identifier: Apache-2.0
"""How many regrouped weights a model in memory has room for: a protobuf has less than 2 GiB.

Regrouped weights are part of the model until it is written. What is in the model already takes no more room than before, unless
something else reads it, too; weights that were external data do.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx

from stof.graph.external_data import is_external, tensor_bytes
from stof.graph.index import all_nodes
from stof.sparse_mlp.site import MlpSite, MlpWeight

_MOST_BYTES = 1_900_000_000  # of a model in memory: a protobuf has fewer than 2^31


class ModelRoom:
    """The room of one model.

    Args:
        model: the model before its MLPs are replaced.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self._stored = {t.name: t for t in model.graph.initializer}
        self._readers = Counter(t for n in all_nodes(model.graph.node) for t in n.input)
        self._held = model.ByteSize()
        self._made: set[MlpWeight] = set()

    def take(self, site: MlpSite) -> str:
        """Takes the room of a site's regrouped weights. Returns why there is none, where that is so; else an empty text."""
        growth = sum(self._growth(w, w is site.down) for w in site.weights if w not in self._made)
        if self._held + growth > _MOST_BYTES:
            return (
                f"its regrouped weights need {growth / 1e9:.2f} GB in a model that holds {self._held / 1e9:.2f} GB with those of "
                f"other MLPs, and at most {_MOST_BYTES / 1e9:.1f} GB fit"
            )
        self._held += growth
        self._made.update(site.weights)
        return ""

    def _growth(self, weight: MlpWeight, is_down: bool) -> int:
        """Bytes by which the model grows when a weight is regrouped, or transposed beside the one that other nodes read."""
        q = weight.quantization
        if q is None:
            tensor = self._stored[weight.tensor]
            is_copied = not weight.is_by_neuron and not is_external(tensor) and self._readers[weight.tensor] > 1
            return (tensor_bytes(tensor) or 0) if is_copied else 0
        if not is_down and q.dequantize_linear is None:
            return 0
        scales = self._stored[q.scales]
        blocks = weight.outer * (weight.inner // q.block_size)
        item = (tensor_bytes(scales) or 0) // max(1, int(np.prod(scales.dims, dtype=np.int64)))
        made = weight.outer * weight.inner * q.bits // 8 + blocks * item + blocks * q.has_zero_points
        released = 0
        for name in filter(None, (weight.tensor, q.scales, q.zero_points)):
            tensor = self._stored[name]
            if not is_external(tensor) and self._readers[name] == 1 and not weight.whole:
                released += len(tensor.raw_data)
        return made - released
