# SPDX-License-Identifier: Apache-2.0
"""What StofQuantizedAttention refuses, when a node is made and when it runs: an error that names the node and the role."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from quantized_nodes import Codes, Node, codes_for, draw

Changes = Mapping[str, Any]


def usual(
    codes: Changes | None = None,
    attributes: Changes | None = None,
    tensors: Changes | None = None,
    operands: Changes | None = None,
) -> Node:
    """A legal node with changes; None leaves something out."""
    given = draw(10)
    node = Node(given, codes_for(given, score=Codes(0.3, 128)))
    for place, changes in (
        (node.codes, codes),
        (node.attributes, attributes),
        (node.tensors, tensors),
        (node.operands, operands),
    ):
        for name, value in (changes or {}).items():
            if value is None:
                del place[name]
            else:
                place[name] = value
    return node


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (usual({"weight": None}), "attribute operands lacks weight_scale"),
        (usual({"query": None}), "attribute operands lacks query_scale"),
        (usual(attributes={"scale": 0.0}), "attribute scale is 0, expected more than 0"),
        (usual(attributes={"scale": -1.0}), "attribute scale is -1, expected more than 0"),
        (usual(attributes={"softcap": 30.0}), "attribute softcap is given, expected none"),
        (usual(attributes={"skip_threshold": 1.0}), "attribute skip_threshold is given"),
        (usual(attributes={"block_threshold": 0.5}), "attribute block_threshold is given"),
        (usual(attributes={"results": "lse"}), "attribute results is given"),
        (usual(attributes={"weight_range": "dynamic"}), "weight_scale, expected none: weight_range is dynamic"),
        (usual(attributes={"weight_range": "row"}), "attribute weight_range is 'row', expected static or dynamic"),
        (usual(attributes={"weight_range": 1}), "attribute weight_range is of another type, expected a string"),
        (usual(attributes={"operands": "query_scale sink"}), "role 'sink', which this build does not know"),
        (usual(attributes={"operands": "relative_bias"}), "role 'relative_bias', which this build does not know"),
        (
            usual(attributes={"operands": "cumulative_key_length"}),
            "role 'cumulative_key_length', which this build does not know",
        ),
        (usual(attributes={"operands": "pad pad"}), "attribute operands names 'pad' twice"),
        (
            usual(attributes={"operands": "query_scale key_scale value_scale weight_scale score_zero_point"}),
            "attribute operands has score_zero_point without score_scale",
        ),
        (usual(attributes={"layout": "BDHS"}), "attribute layout has 'BDHS'"),
    ],
)
def test_refused_when_made(node: Node, message: str) -> None:
    with pytest.raises(Exception, match="StofQuantizedAttention core") as error:
        node.session()
    assert message in str(error.value)


NAN = float("nan")


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (usual({"key": Codes(0.0, 3, "int8")}), "key_scale is 0, expected a finite number above 0"),
        (usual({"query": Codes(-0.1)}), "query_scale is -0.1, expected a finite number above 0"),
        (usual({"value": Codes(NAN, 0, "int8")}), "value_scale is nan, expected a finite number above 0"),
        (usual({"score": Codes(float("inf"))}), "score_scale is inf, expected a finite number above 0"),
        (usual({"biased_score": Codes(0.0)}), "biased_score_scale is 0, expected a finite number above 0"),
        (usual({"weight": Codes(0.0)}), "weight_scale is 0, expected a finite number above 0"),
        (
            usual({"key": Codes(0.1, 3)}),
            "key_zero_point has shape [] and data type 2, expected [] or [1] and data type 3 of key",
        ),
        (
            usual({"score": Codes(0.1, 0, "int32")}),
            "score_zero_point has shape [] and data type 6, expected [] or [1] and int8 or uint8",
        ),
        (usual({"weight": Codes(0.1, 0, "uint16")}), "weight_zero_point has shape [] and data type 4"),
        (
            usual(operands={"scaled_score_scale": np.ones(2, np.float32)}),
            "scaled_score_scale has shape [2] and data type 1",
        ),
        (usual(operands={"scaled_score_scale": np.ones((1, 1), np.float32)}), "scaled_score_scale has shape [1, 1]"),
        (
            usual(operands={"scaled_score_scale": np.ones((), np.float64)}),
            "scaled_score_scale has shape [] and data type 11",
        ),
        (
            usual(tensors={"value": np.ones((2, 1, 70, 24), np.float32)}),
            "value has data type 1, expected int8 or uint8",
        ),
        (usual(tensors={"key": np.ones((2, 1, 70, 24), np.int8)}), "query and key differ in head size"),
        (usual(tensors={"value": np.ones((2, 1, 71, 24), np.int8)}), "key and value differ in length"),
        (usual(tensors={"query": np.ones((2, 2, 16), np.uint8)}), "query has shape [2, 2, 16], expected rank 4"),
        (
            usual(operands={"pad": np.ones((2, 69), bool)}, attributes={"mask": "pad[b, k]"}),
            "pad has shape [2, 69], expected [2, 70]",
        ),
        (
            usual(operands={"bias": np.ones((1, 1, 21, 3), np.float32)}),
            "bias has shape [1, 1, 21, 3], expected one that broadcasts",
        ),
        (usual(operands={"bias": np.ones((1, 1, 21, 70), np.float16)}), "bias has data type 10"),
    ],
)
@pytest.mark.parametrize("constants", [True, False])
def test_refused_when_run(node: Node, message: str, constants: bool) -> None:
    with pytest.raises(Exception, match="StofQuantizedAttention core") as error:
        node.run(constants=constants)
    assert message in str(error.value)
