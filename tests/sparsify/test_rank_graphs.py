# SPDX-License-Identifier: Apache-2.0
"""Graphs of one rank of a tensor-parallel export: some of the heads, and an AllReduce behind each attention."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cached_attention"))
from gqa_models import session

import stof
from stof.cached_attention.site import OP
from stof.execution.collectives import as_lone_rank
from stof.options import Options

H, G, D, WIDTH, SIZE = 8, 4, 16, 24, 90


def rank_model(rank: int, ranks: int, layers: int = 1) -> onnx.ModelProto:
    """Attention over a cache with the heads of a rank, its share of the output projection, and the sum over ranks."""
    rng = np.random.default_rng(0)
    heads, groups = H // ranks, G // ranks
    infos = [helper.make_tensor_value_info("hidden", TensorProto.FLOAT, ["B", "S", WIDTH])]
    infos += [helper.make_tensor_value_info(n, TensorProto.INT32, d) for n, d in (("seqlens_k", ["B"]), ("total", []))]
    nodes, stored, outputs = [], [], []
    hidden = "hidden"
    for i in range(layers):
        packed = [rng.standard_normal((WIDTH, n, D)).astype(np.float32) for n in (H, G, G)]
        own = [
            w[:, rank * n : rank * n + n].reshape(WIDTH, -1)
            for w, n in zip(packed, (heads, groups, groups), strict=True)
        ]
        projection = rng.standard_normal((ranks, heads * D, WIDTH)).astype(np.float32)[rank] / 8
        stored += [numpy_helper.from_array(np.concatenate(own, 1), f"qkv_weight{i}")]
        stored += [numpy_helper.from_array(projection, f"o_weight{i}")]
        for kind in ("key", "value"):
            infos.append(helper.make_tensor_value_info(f"past_{kind}{i}", TensorProto.FLOAT, ["B", groups, "C", D]))
            present = ["B", groups, "P", D]
            outputs.append(helper.make_tensor_value_info(f"present_{kind}{i}", TensorProto.FLOAT, present))
        inputs = [f"qkv{i}", "", "", f"past_key{i}", f"past_value{i}", "seqlens_k", "total"]
        attended = [f"attended{i}", f"present_key{i}", f"present_value{i}"]
        sizes = {"num_heads": heads, "kv_num_heads": groups}
        nodes += [
            helper.make_node("MatMul", [hidden, f"qkv_weight{i}"], [f"qkv{i}"]),
            helper.make_node("GroupQueryAttention", inputs, attended, f"node{i}", domain="com.microsoft", **sizes),
            helper.make_node("MatMul", [f"attended{i}", f"o_weight{i}"], [f"share{i}"]),
            helper.make_node("AllReduce", [f"share{i}"], [f"sum{i}"], domain="com.microsoft"),
            helper.make_node("Add", [hidden, f"sum{i}"], [f"hidden{i}"]),
        ]
        hidden = f"hidden{i}"
    outputs.insert(0, helper.make_tensor_value_info(hidden, TensorProto.FLOAT, ["B", "S", WIDTH]))
    graph = helper.make_graph(nodes, "rank", infos, outputs, stored)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def optimized(model: onnx.ModelProto, folder: Path, spec: str = "", *, verify: bool = True) -> onnx.ModelProto:
    onnx.save(model, folder / "model.onnx")
    report = stof.optimize(folder / "model.onnx", folder / "out.onnx", Options(sparsify=spec, verify=verify))
    assert (report.verification is not None) == verify
    found = onnx.load(folder / "out.onnx")
    kinds = [n.op_type for n in found.graph.node]
    assert kinds.count(OP) == kinds.count("AllReduce") == len(model.graph.node) // 5
    assert not [f for f in found.functions if f.name == "AllReduce"]  # that is for verification only
    return found


@pytest.mark.parametrize("spec", ["", "s2:local=1,stride=4,block=16,active_heads=2:4/4"])
def test_layers_behind_a_sum_over_ranks_are_replaced(spec: str, tmp_path: Path) -> None:
    """Also verified, although this runtime has no AllReduce."""
    optimized(rank_model(1, 2, layers=2), tmp_path, spec)


@pytest.mark.parametrize(
    "pattern",
    ["s2:local=1,stride=4,block=16", "s2:local=1,stride=8,block=16,dense_heads=1", "s2:local=1,stride=8,block=16,per=query_head",
     "window=9,sink=2,heads=1:3", "{folder}/t.npz"],
)  # fmt: skip
def test_ranks_sum_up_to_the_whole_model(pattern: str, tmp_path: Path) -> None:
    table = np.tril(np.random.default_rng(1).random((H, 6, 6)) < 0.3) | np.eye(6, dtype=bool)
    np.savez(tmp_path / "t.npz", blocks=table, block_size=16)
    rng = np.random.default_rng(2)
    hidden = rng.standard_normal((2, SIZE, WIDTH)).astype(np.float32)
    found = []
    for rank, ranks in ((0, 1), (0, 2), (1, 2), (None, 1)):
        groups = G // ranks
        spec = pattern.format(folder=tmp_path)
        spec += f",active_heads={rank * groups}:{rank * groups + groups}/{G}" if rank is not None and ranks > 1 else ""
        model = optimized(rank_model(rank or 0, ranks), tmp_path, "" if rank is None else spec, verify=False)
        past = np.zeros((2, groups, SIZE, D), np.float32)
        feeds = {"hidden": hidden, "seqlens_k": np.array([SIZE - 1, 40], np.int32), "total": np.array(SIZE, np.int32)}
        made = session(as_lone_rank(model), library=True)
        out = made.run(None, {**feeds, "past_key0": past, "past_value0": past})[0] - hidden
        found.append(out[np.arange(SIZE)[None] < np.array([[SIZE], [41]])])
    np.testing.assert_allclose(found[1] + found[2], found[0], atol=1e-4, rtol=1e-4)
    assert np.abs(found[0] - found[3]).max() > 0.05  # the dense model
