# SPDX-License-Identifier: Apache-2.0
"""Models with fused chains load without the library after their conversion to fp16.

With the library they do not: the description of a chain states the types of its outputs (docs/guide/other-tools.md).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from chain_graphs import CHAINS, Builder
from onnxruntime.transformers.float16 import convert_float_to_float16

from stof.fusion.emit import emit_chains
from stof.fusion.fusion_graph import FusionGraph
from stof.fusion.regions import find_chains
from stof.graph.protobuf import copy_model
from stof.symbolic import Symbolic

NAMES = ("residual_layer_norm", "decomposed_gelu", "split_gate", "decomposed_layer_norm")


def _run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [np.asarray(x, np.float32) for x in session.run(None, feeds)]


@pytest.mark.parametrize("make", [c for c in CHAINS if c.__name__ in NAMES], ids=lambda c: c.__name__)
def test_a_converted_chain_loads_and_computes_the_same(make: Callable[[Builder], onnx.ModelProto]) -> None:
    model = make(Builder())
    graph = FusionGraph(model, Symbolic(model))
    chains, _ = find_chains(graph)
    emitted = emit_chains(model, graph.symbolic, chains)
    assert [n.op_type for n in emitted.graph.node].count("StofChain") == len(chains) > 0
    rng = np.random.default_rng(0)
    feeds = {}
    for value in model.graph.input:
        shape = [d.dim_value or {"B": 2, "S": 5}[d.dim_param] for d in value.type.tensor_type.shape.dim]
        feeds[value.name] = rng.standard_normal(shape).astype(np.float32)
    want = _run(model, feeds)
    for keeps_io in (True, False):
        half = convert_float_to_float16(copy_model(emitted), keep_io_types=keeps_io)  # it changes what it is given
        given = feeds if keeps_io else {n: a.astype(np.float16) for n, a in feeds.items()}
        for got, expected in zip(_run(half, given), want, strict=True):
            np.testing.assert_allclose(got, expected, rtol=2e-2, atol=4e-2)
