# SPDX-License-Identifier: Apache-2.0
"""Local functions of domain stof, the bodies of the operators that stof writes into a model."""

from __future__ import annotations

from collections.abc import Iterable

import onnx
from onnx import helper

import stof
from stof.errors import UnsupportedError
from stof.graph.dead_code import remove_dead_nodes
from stof.graph.index import DOMAIN
from stof.graph.names import name_nodes

_VERSION_KEY = "stof_version"
_LOWEST_IR = 8  # the first IR version with local functions


def check_absent(model: onnx.ModelProto, op: str) -> None:
    """Refuses a model that has a local function of an operator's name: all calls share one function.

    Raises:
        UnsupportedError: naming the operator.
    """
    if any((f.domain, f.name) == (DOMAIN, op) for f in model.functions):
        raise UnsupportedError(f"the model already holds {op}; optimize the original instead")


def add_functions(
    model: onnx.ModelProto, functions: Iterable[onnx.FunctionProto], *, names_nodes: bool = False
) -> None:
    """Adds the functions of operators that were written into a model, in place, with all that calls of them need.

    These are the import of domain stof, an IR version with local functions, and the metadata entry ``stof_version``.

    Args:
        model: holds the calls.
        functions: one for each operator; their nodes that nothing reads are left out.
        names_nodes: whether every node gets a name of its own, as TensorRT needs it.
    """
    for function in functions:
        model.functions.append(function)
        remove_dead_nodes(model.functions[-1], function.output)
    if not any(e.domain == DOMAIN for e in model.opset_import):
        model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    model.ir_version = max(model.ir_version, _LOWEST_IR)
    if names_nodes:
        name_nodes(model)
    entry = next((e for e in model.metadata_props if e.key == _VERSION_KEY), None) or model.metadata_props.add()
    entry.key, entry.value = _VERSION_KEY, stof.__version__
