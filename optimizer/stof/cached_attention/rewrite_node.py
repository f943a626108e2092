# SPDX-License-Identifier: Apache-2.0
"""Turns a node of the runtime's into one of stof's operators, in place."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
from onnx import helper

from stof.cached_attention.node_site import NodeSite
from stof.graph.index import DOMAIN
from stof.graph.names import FreshNames


def rewrite_node(
    node: onnx.NodeProto, site: NodeSite, op: str, inputs: Sequence[str], outputs: int, mask_id: int, names: FreshNames
) -> None:
    """Makes a node a call of an operator; its documentation and metadata stay.

    Args:
        node: the node of the site in the new model.
        site: the site.
        op: the operator, of domain ``stof``.
        inputs: its tensors; absent ones at the end are left out.
        outputs: how many outputs the operator has.
        mask_id: the variant of the function body.
        names: of the new model's nodes.
    """
    present = list(inputs)
    while not present[-1]:
        present.pop()
    attributes = site.operator_attributes | {"mask_id": mask_id}
    node.op_type, node.domain = op, DOMAIN
    node.name = names.make(f"{site.name.rpartition('/')[0] or site.name}/{op}")
    for field, values in ((node.input, present), (node.output, list(node.output[:outputs]))):
        del field[:]
        field.extend(values)
    del node.attribute[:]
    node.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
