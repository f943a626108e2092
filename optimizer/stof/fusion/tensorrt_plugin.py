# SPDX-License-Identifier: Apache-2.0
"""Fused chains as TensorRT plugins: which chains can be one, and what its ONNX parser needs in their calls."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
from onnx import helper

from stof.errors import UnsupportedError
from stof.fusion.function_body import bits_of
from stof.fusion.translate import FusedChain

_LARGEST = 1 << 31


def check_plugin(chain: FusedChain) -> None:
    """Refuses a chain with an output dimension that a plugin cannot state (``OutputShape`` in plugins/core/ops/chain.cc).

    A plugin states a dimension as a number, or as a product of at most two input dimensions and numbers, of which the first
    dimension may be divided.

    Raises:
        UnsupportedError: naming the dimension.
    """
    sizes = dict(chain.description.axes)
    for number, out in enumerate(chain.description.outs):
        for dim, axes in enumerate(out.dims):
            symbolic = [sizes[a] for a in axes if sizes[a].input >= 0]
            times = 1
            for axis in axes:
                times *= sizes[axis].number if sizes[axis].input < 0 else 1
            if len(symbolic) > 2 or any(s.number != 1 for s in symbolic[1:]) or times > _LARGEST:
                raise UnsupportedError(
                    f"dimension {dim} of output {number} is a product of {' and '.join(axes)}, and a plugin of TensorRT "
                    "states products of at most two sizes that differ between runs, of which the first may be divided"
                )


def complete_calls(
    calls: Sequence[onnx.NodeProto], dtypes: Sequence[int], branches: int, number: str = "chain_id"
) -> list[onnx.ValueInfoProto]:
    """Completes the calls of one function for TensorRT's parser; returns the types of new tensors.

    A node needs as many named outputs as its function and its plugin have. Outputs that a chain lacks get names; the
    attribute ``spare_outputs`` tells the plugin how many they are. Each call selects its branch by bits.

    Args:
        calls: StofChain nodes.
        dtypes: element types of the function's outputs.
        branches: how many branches the function has.
        number: the attribute that selects a branch.
    """
    infos = []
    for node in calls:
        spare = [i for i, name in enumerate(node.output) if not name]
        for i in spare:
            node.output[i] = f"{node.name}/spare{i}"
            infos.append(helper.make_tensor_value_info(node.output[i], dtypes[i], None))
        branch = next(a.i for a in node.attribute if a.name == number)
        added: dict[str, int | onnx.TensorProto] = {**bits_of(branch, branches, number)}
        if spare:
            added["spare_outputs"] = len(spare)
        node.attribute.extend(helper.make_attribute(k, v) for k, v in added.items())
    return infos
