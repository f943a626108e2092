# SPDX-License-Identifier: Apache-2.0
"""Collective operators of tensor-parallel exports: builds of ONNX Runtime without NCCL have none.

Verification runs the graph of one rank alone. The sum over one rank is the tensor itself, in the original and in the result.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import onnx
from onnx import helper

from stof.files import open_regular
from stof.graph.index import all_nodes, domain_of, opset_of

_DOMAIN, _SUM = "com.microsoft", "AllReduce"
_LOWEST_IR = 8  # the first IR version with local functions


def may_hold_collectives(path: Path) -> bool:
    """Whether a file names the operator; it is not parsed, since it may be large."""
    with open_regular(path) as file:
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as raw:
                return raw.find(_SUM.encode()) >= 0
        except ValueError:  # an empty file
            return False


def as_lone_rank(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with a local function that stands for AllReduce; the model itself where it has no such node."""
    nodes = [*all_nodes(model.graph.node), *(n for f in model.functions for n in all_nodes(f.node))]
    if not any((domain_of(n), n.op_type) == (_DOMAIN, _SUM) for n in nodes):
        return model
    if any((f.domain, f.name) == (_DOMAIN, _SUM) for f in model.functions):
        return model
    standalone = onnx.ModelProto()
    standalone.CopyFrom(model)
    standalone.ir_version = max(standalone.ir_version, _LOWEST_IR)
    body = [helper.make_node("Identity", ["input"], ["output"], name="sum_over_one_rank")]
    opsets = [helper.make_opsetid("", opset_of(model))]
    standalone.functions.append(helper.make_function(_DOMAIN, _SUM, ["input"], ["output"], body, opsets))
    return standalone
