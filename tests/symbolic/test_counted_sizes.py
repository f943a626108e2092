# SPDX-License-Identifier: Apache-2.0
"""Sizes that depend on data: what estimates take for them."""

from __future__ import annotations

import sys
from pathlib import Path

import onnx
from onnx import TensorProto, helper

import stof
from stof.graph.index import DOMAIN
from stof.options import Options
from stof.symbolic import Symbolic
from stof.symbolic.algebra.sizes import evaluate
from stof.symbolic.counted_sizes import assume_counted_sizes

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "models"))
import build


def test_as_many_elements_are_counted_as_there_are() -> None:
    nodes = [
        helper.make_node("NonZero", ["mask"], ["found"]),
        helper.make_node("Transpose", ["found"], ["rows"], perm=[1, 0]),
        helper.make_node("GatherND", ["data", "rows"], ["tokens"]),
    ]
    data = helper.make_tensor_value_info("data", TensorProto.FLOAT, ["B", "S", 8])
    mask = helper.make_tensor_value_info("mask", TensorProto.BOOL, ["B", "S"])
    tokens = helper.make_tensor_value_info("tokens", TensorProto.FLOAT, ["L", 8])
    model = helper.make_model(helper.make_graph(nodes, "g", [data, mask], [tokens]))
    symbolic = Symbolic(model)
    shape = symbolic.shape("tokens")
    assert shape is not None
    sizes = assume_counted_sizes(model, symbolic, {"B": 3, "S": 7})
    assert [evaluate(size, sizes) for size in shape] == [21, 8]
    assert sizes.items() >= {"B": 3, "S": 7}.items()


def test_a_model_without_padding_has_the_chains_of_one_with_it(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(build.fill(build.load_graph("narrow/bert.torchscript.eager"), seed=3), str(path))
    chains = []
    for unpad in ("off", "on"):
        written = tmp_path / f"{unpad}.onnx"
        report = stof.optimize(path, written, Options(target="cuda", unpad=unpad, verify=False))
        assert any(r.replaced for r in report.rows("unpadding")) == (unpad == "on")
        nodes = onnx.load(str(written)).graph.node
        chains.append(sum(n.domain == DOMAIN and n.op_type in ("StofChain", "StofGemm") for n in nodes))
    assert chains[1] >= chains[0] > 0
