# SPDX-License-Identifier: Apache-2.0
"""Orders the neurons of an MLP by how often they fire, so that those that never do lie together in the file of weights.

A runtime maps the file, and the system loads whole pages, some at a time. Rows of neurons that never fire stay on disk where they
share no page with others. The same permutation of the rows of all weights changes no neuron, only the order of sums.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx

from stof.graph.index import all_nodes
from stof.sparse_mlp.density import NeuronCounts
from stof.sparse_mlp.site import MlpSite, NeuronOrder

# Of rows that never fire: the system loads 64 KiB and more at the edge of each weight.
_LEAST_BYTES = 1 << 18


def with_orders(model: onnx.ModelProto, sites: Sequence[MlpSite], counts: Mapping[str, NeuronCounts]) -> list[MlpSite]:
    """The sites, with an order where one can be folded into their weights and keeps memory free.

    Args:
        model: holds the sites.
        sites: the sites.
        counts: of firing neurons, by the name of the site.
    """
    readers = Counter(t for n in all_nodes(model.graph.node) for t in n.input)
    return [_with_order(site, counts.get(site.name), readers) for site in sites]


def _with_order(site: MlpSite, counts: NeuronCounts | None, readers: Mapping[str, int]) -> MlpSite:
    if counts is None or (site.selection != "predictor" and not _is_gate_movable(site)):
        return site
    gate = site.gate_weight if site.selection == "predictor" else site.projection and site.projection.weight
    weights = {w.tensor for w in (gate, site.up, site.down) if w is not None}
    if any(readers[t] != 1 for t in weights):
        return site  # another reader would need the weight a second time
    order = make_order(counts.active, 1 if site.quantization is None else site.quantization.block_size)
    idle = site.neurons - order.hot
    return replace(site, order=order) if idle * site.row_bytes >= _LEAST_BYTES else site


def _is_gate_movable(site: MlpSite) -> bool:
    """Whether the gate's matmul, which stays in the graph, can give neurons in another order."""
    gate = site.projection
    if gate is None or not gate.is_movable:
        return False
    # Where it is packed with something else than up, that part of the matmul keeps its order.
    return not gate.is_packed or (site.up is not None and site.up.whole != 0)


def make_order(active: np.ndarray, block: int) -> NeuronOrder:
    """The neurons, or whole blocks of them, from the one that fires most often on; equal ones stay in their order.

    Args:
        active: how often each fired, [F].
        block: neurons that share a scale; 1: none do. It divides F.
    """
    blocks = active.reshape(-1, block).sum(1)
    order = np.argsort(-blocks, kind="stable")
    indices = (order[:, None] * block + np.arange(block)).reshape(-1)
    return NeuronOrder(indices.astype(np.int64), int(np.count_nonzero(blocks)) * block)
