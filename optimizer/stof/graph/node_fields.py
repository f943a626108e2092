# SPDX-License-Identifier: Apache-2.0
"""A node's inputs and outputs by index, and its attributes by name."""

from __future__ import annotations

from typing import Any

import onnx
from onnx import helper

PlainValue = int | float | str | list[int]  # of an attribute of stof's operators


def input_of(node: onnx.NodeProto, index: int) -> str:
    """An input's tensor; empty where it is absent."""
    return str(node.input[index]) if index < len(node.input) else ""


def output_of(node: onnx.NodeProto, index: int) -> str:
    """An output's tensor; empty where the node does not write it."""
    return str(node.output[index]) if index < len(node.output) else ""


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    """A node's attributes by name; strings as bytes."""
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def plain_attributes_of(node: onnx.NodeProto) -> dict[str, PlainValue]:
    """The attributes of one of stof's operators, as the library takes them: strings as text."""
    return {n: v.decode() if isinstance(v, bytes) else v for n, v in attributes_of(node).items()}
