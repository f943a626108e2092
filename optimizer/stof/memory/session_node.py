# SPDX-License-Identifier: Apache-2.0
"""A node as a session of ONNX Runtime runs it."""

from __future__ import annotations

from dataclasses import dataclass

import onnx


@dataclass(frozen=True, eq=False)
class SessionNode:
    """One node as a session runs it.

    Attributes:
        proto: the node of the model.
        inputs: tensors that it reads, by their names after removed nodes; "" where an input is not given.
        captured: tensors that its subgraphs read.
        outputs: tensors that it writes.
        rank: of two nodes, that with the larger rank counts as the later one in the graph, and else the later one.
    """

    proto: onnx.NodeProto
    inputs: tuple[str, ...]
    captured: tuple[str, ...]
    outputs: tuple[str, ...]
    rank: int = 0

    @property
    def op(self) -> str:
        """The operator."""
        return str(self.proto.op_type)
