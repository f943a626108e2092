# SPDX-License-Identifier: Apache-2.0
"""A builder of ONNX nodes with unique names, for function bodies and expanded operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

CAST_LIKE_OPSET = 15  # the first opset with CastLike


@dataclass
class Builder:
    """Collects nodes; names are unique within a prefix."""

    opset: int
    prefix: str
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    count: int = 0

    def name(self) -> str:
        """A fresh tensor name."""
        self.count += 1
        return f"{self.prefix}{self.count}"

    def add(self, op: str, inputs: Sequence[str], **attributes: Any) -> str:
        """Appends a node with one output and returns that."""
        out = self.name()
        self.nodes.append(helper.make_node(op, list(inputs), [out], name=out, **attributes))
        return out

    def constant(self, value: object, dtype: type | np.dtype = np.int64) -> str:
        """A Constant node."""
        return self.add("Constant", [], value=numpy_helper.from_array(np.asarray(value, dtype)))

    def unsqueeze(self, tensor: str, axes: Sequence[int]) -> str:
        """Unsqueeze, with axes as an input (opset 13 and later)."""
        return self.add("Unsqueeze", [tensor, self.constant(list(axes))])

    def reduce_max(self, tensor: str, axis: int) -> str:
        """ReduceMax along one axis that stays."""
        return self.reduce("ReduceMax", tensor, axis)

    def reduce(self, op: str, tensor: str, axis: int) -> str:
        """A reduction, ReduceSum excepted, along one axis that stays: an attribute below opset 18, an input from there."""
        if self.opset >= 18:
            return self.add(op, [tensor, self.constant([axis])], keepdims=1)
        return self.add(op, [tensor], axes=[axis], keepdims=1)
