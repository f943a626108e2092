# SPDX-License-Identifier: Apache-2.0
"""Sizes that depend on data, as the number of real tokens does: what estimates take for them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import onnx

from stof.symbolic.algebra.sizes import evaluate_or_none
from stof.symbolic.interpreter import Symbolic


def assume_counted_sizes(model: onnx.ModelProto, symbolic: Symbolic, sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes with those of the results of NonZero: as if no element was 0, which is the most that there can be.

    Args:
        model: whose graph has the NonZero nodes.
        symbolic: of the model.
        sizes: of its dimensions, by name.
    """
    found = dict(sizes)
    for node in model.graph.node:
        if node.op_type != "NonZero":
            continue
        data, counted = symbolic.shape(node.input[0]), symbolic.shape(node.output[0])
        if data is None or counted is None:
            continue
        elements = [evaluate_or_none(size, found) for size in data]
        atoms = counted[1].atoms()
        if len(atoms) == 1 and (atom := next(iter(atoms))).kind == "size" and None not in elements:
            found.setdefault(str(atom.args[0]), math.prod(n for n in elements if n is not None))
    return found
