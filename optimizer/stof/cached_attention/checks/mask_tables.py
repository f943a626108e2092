# SPDX-License-Identifier: Apache-2.0
"""Whether an emitted node looks up the tables of its site's mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx

from stof.cached_attention.node_site import NodeSite
from stof.graph.node_fields import input_of


def fault_of_tables(
    site: NodeSite, node: onnx.NodeProto, values: Mapping[str, np.ndarray], inputs: Sequence[str]
) -> str:
    """What is wrong with the tables that a node's mask reads; empty where they are those of the site.

    Args:
        site: what was replaced.
        node: in its place.
        values: values of tensors.
        inputs: names of the operator's inputs.
    """
    for name, wanted in site.mask_tables.items():
        tensor = input_of(node, inputs.index(name))
        table = values.get(tensor)
        if table is None or table.dtype != wanted.dtype or not np.array_equal(table, wanted):
            return f"the node's {name} {tensor!r} is not that of its mask"
    return ""
