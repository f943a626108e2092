# SPDX-License-Identifier: Apache-2.0
"""Where new nodes lie in an edited graph."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
from onnx import TensorProto, helper

from stof.graph.editor import Editor


def _model() -> onnx.ModelProto:
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [3]) for n in "xy")
    names = ["x", "a", "b", "c", "y"]
    nodes = [helper.make_node("Neg", [one], [other], name=other) for one, other in itertools.pairwise(names)]
    return helper.make_model(helper.make_graph(nodes, "g", [x], [y]))


def test_early_nodes_follow_what_they_read() -> None:
    editor = Editor(_model())
    one = editor.initializer("one", np.ones(3, np.float32))
    made = {n: editor.variable(n, int(TensorProto.FLOAT)) for n in ("of_b", "of_of_b", "of_none", "cast", "of_cast")}

    def add(inputs: list[str], output: str) -> object:
        tensors = [editor.tensors[n] for n in inputs]
        return editor.node("Add", output, [*tensors, one], [made[output]])

    last = editor.producer("y")
    assert last is not None
    early = [add(["b"], "of_b"), add(["of_b", "a"], "of_of_b"), add([], "of_none"), add(["cast"], "of_cast")]
    editor.insert_before(last, [add(["x"], "cast")])
    editor.insert_early(early)
    last.inputs.extend(made[n] for n in ("of_of_b", "of_none", "of_cast"))
    editor.place_inserted()
    order = [node.name for node in editor.graph.nodes]
    assert order == ["of_none", "a", "b", "of_b", "of_of_b", "c", "cast", "of_cast", "y"]
