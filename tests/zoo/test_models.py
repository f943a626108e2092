# SPDX-License-Identifier: Apache-2.0
"""The stored graphs are those of the manifest, and the hash that says so sees what matters."""

from __future__ import annotations

import onnx
import pytest

import build
import export
import store


def test_every_graph_has_an_entry_and_every_entry_a_graph() -> None:
    stored = {str(p.relative_to(build.GRAPHS)).removesuffix(".onnx.xz") for p in build.GRAPHS.rglob("*.onnx.xz")}
    assert stored == set(build.manifest()) == set(export.all_names())


@pytest.mark.parametrize("name", build.names())
def test_the_hash_is_that_of_the_manifest(name: str) -> None:
    graph = build.load_graph(name)
    entry = build.manifest()[name]
    assert (store.node_hash(graph), len(graph.graph.node)) == (entry["node_hash"], entry["nodes"])


def test_the_hash_ignores_names_and_order_but_nothing_else() -> None:
    graph = build.load_graph("narrow/bert.dynamo.eager")
    before = store.node_hash(graph)
    other = onnx.ModelProto.FromString(graph.SerializeToString())
    for node in other.graph.node:
        node.name = ""
        node.output[0] += "'"
        for i, name in enumerate(node.input):
            if any(name + "'" in n.output for n in other.graph.node):
                node.input[i] = name + "'"
    for output in other.graph.output:
        output.name += "'"
    # Constants are independent of everything else: their order is free.
    constants = [n for n in other.graph.node if not n.input]
    rest = [n for n in other.graph.node if n.input]
    copies = [onnx.NodeProto.FromString(n.SerializeToString()) for n in [*reversed(constants), *rest]]
    del other.graph.node[:]
    other.graph.node.extend(copies)
    assert store.node_hash(other) == before
    softmax = next(n for n in other.graph.node if n.op_type == "Softmax")
    softmax.attribute[0].i = 1
    assert store.node_hash(other) != before
    changed = onnx.ModelProto.FromString(graph.SerializeToString())
    tensor = next(t for t in changed.graph.initializer if t.data_type == onnx.TensorProto.INT64 and t.dims)
    values = onnx.numpy_helper.to_array(tensor) + 1
    tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    assert store.node_hash(changed) != before
