# SPDX-License-Identifier: Apache-2.0
"""Which inputs and outputs attention nodes over a KV cache have, and a check of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx

from stof.errors import UnsupportedError
from stof.graph.node_fields import input_of, output_of


@dataclass(frozen=True)
class NodeSignature:
    """The inputs and outputs of an operator that stof replaces.

    Attributes:
        inputs: the names of the inputs that are known, by index.
        required: the names of those that a node has.
        pairs: names of inputs of which a node has both or neither.
        outputs: the names of the outputs that a node writes.
        other_outputs: how many known outputs follow, which a node may write.
    """

    inputs: Mapping[int, str]
    required: tuple[str, ...]
    pairs: tuple[tuple[str, str], ...]
    outputs: tuple[str, ...]
    other_outputs: int = 0

    def check(self, node: onnx.NodeProto) -> None:
        """Refuses a node with other inputs or outputs.

        Raises:
            UnsupportedError: with what is unknown or missing.
        """
        for i, name in enumerate(node.input):
            if name and i not in self.inputs:
                raise UnsupportedError(f"it has input {i}, {name!r}, whose meaning is not known")
        for i, name in enumerate(node.output):
            if name and i >= len(self.outputs) + self.other_outputs:
                raise UnsupportedError(f"it has output {i}, {name!r}, whose meaning is not known")
        present = {name for i, name in self.inputs.items() if input_of(node, i)}
        for pair in self.pairs:
            has = [name for name in pair if name in present]
            if len(has) == 1:
                raise UnsupportedError(f"it has input {has[0]} and no {next(n for n in pair if n not in present)}")
        for name in self.required:
            if name not in present:
                raise UnsupportedError(f"it has no input {name}")
        for i, name in enumerate(self.outputs):
            if not output_of(node, i):
                raise UnsupportedError(f"it does not write {name}")
