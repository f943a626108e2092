# SPDX-License-Identifier: Apache-2.0
"""Attention of opset 25 in fp64: windows with causal masks, shared heads, pasts and lengths; attributes that are wrong."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from fused_attention_nodes import forced, run
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

H, G, D = 4, 2, 8


@dataclass(frozen=True)
class Node:
    """An Attention of opset 25: its attributes, and whether it reads a past, lengths and a mask."""

    left: int = -1
    right: int = -1
    causal: bool = False
    past: bool = False
    lengths: bool = False
    mask: str = ""  # "bool", "float"
    softcap: float = 0.0
    found: str = ""  # the mask of the site

    def model(self) -> onnx.ModelProto:
        """The node alone, with symbolic sizes."""
        keys = "C" if self.lengths else "S"
        shapes = {"q": ("B", H, "S", D), "k": ("B", G, keys, D), "v": ("B", G, keys, D)}
        names = ["q", "k", "v", "", "", "", ""]
        inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in shapes.items()]
        if self.mask:
            names[3] = "m"
            dtype = TensorProto.BOOL if self.mask == "bool" else TensorProto.FLOAT
            whole = "C" if self.lengths else "T" if self.past else "S"
            inputs.append(helper.make_tensor_value_info("m", dtype, (1, 1, "S", whole)))
        if self.past:
            names[4:6] = ["pk", "pv"]
            inputs += [helper.make_tensor_value_info(n, TensorProto.FLOAT, ("B", G, "P", D)) for n in ("pk", "pv")]
        if self.lengths:
            names[6] = "n"
            inputs.append(helper.make_tensor_value_info("n", TensorProto.INT64, ("B",)))
        while not names[-1]:
            names.pop()
        results = ["y", "uk", "uv"] if self.past else ["y"]
        node = helper.make_node(
            "Attention",
            names,
            results,
            "node",
            left_window_size=self.left,
            right_window_size=self.right,
            is_causal=int(self.causal),
            softcap=self.softcap,
        )
        outputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [None] * 4) for n in results]
        graph = helper.make_graph([node], "model", inputs, outputs)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=11)

    def feeds(self, batch: int, queries: int, past: int, seed: int) -> dict[str, np.ndarray]:
        """Random inputs."""
        rng = np.random.default_rng(seed)
        keys = queries + 5 if self.lengths else queries

        def numbers(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(np.float32)

        feeds = {"q": numbers(batch, H, queries, D), "k": numbers(batch, G, keys, D), "v": numbers(batch, G, keys, D)}
        if self.past:
            feeds |= {"pk": numbers(batch, G, past, D), "pv": numbers(batch, G, past, D)}
            keys += past
        if self.lengths:
            feeds["n"] = rng.integers(queries, keys, batch, endpoint=True)
        if self.mask:
            m = rng.random((1, 1, queries, keys)) < 0.7
            feeds["m"] = m if self.mask == "bool" else numbers(1, 1, queries, keys)
        return feeds

    def define(self, feeds: dict[str, np.ndarray]) -> np.ndarray:
        """The result in fp64, by the text of the specification."""
        q, k, v = (feeds[n].astype(np.float64) for n in "qkv")
        offset = np.zeros((len(q), 1, 1, 1), np.int64)
        if self.past:
            k, v = (np.concatenate([feeds[n].astype(np.float64), x], 2) for n, x in (("pk", k), ("pv", v)))
            offset = offset + feeds["pk"].shape[2]
        if self.lengths:
            offset = feeds["n"][:, None, None, None] - q.shape[2]
        k, v = (np.repeat(x, H // G, axis=1) for x in (k, v))
        scores = q @ np.swapaxes(k, 2, 3) / np.sqrt(D)
        if self.softcap:
            scores = self.softcap * np.tanh(scores / self.softcap)
        p, j = offset + np.arange(q.shape[2])[:, None], np.arange(k.shape[2])
        allowed = np.ones(np.broadcast_shapes(p.shape, j.shape), bool)
        if self.causal:
            allowed &= j <= p
        if self.left >= 0:
            allowed &= p - self.left <= j
        if self.right >= 0:
            allowed &= j <= p + self.right
        if self.lengths:
            allowed &= j < feeds["n"][:, None, None, None]
        if self.mask == "bool":
            allowed = allowed & feeds["m"]
        elif self.mask:
            scores = scores + feeds["m"]
        scores = np.where(allowed, scores, -np.inf)
        top = scores.max(-1, keepdims=True)
        weights = np.exp(scores - np.where(np.isinf(top), 0, top))
        total = weights.sum(-1, keepdims=True)
        return weights / np.where(total == 0, 1, total) @ v


NODES = {
    "left": Node(left=3, found="q - k <= 3"),
    "right": Node(right=2, found="k - q <= 2"),
    "both": Node(left=3, right=1, found="k - q <= 1 and q - k <= 3"),
    "its own key": Node(left=0, right=0, found="q == k"),
    "left and causal": Node(left=4, causal=True, found="k <= q and q - k <= 4"),
    "causal is within right": Node(right=5, causal=True, found="k <= q"),
    "nothing": Node(),
    "a past": Node(left=3, causal=True, past=True, found="k <= q and q - k <= 3"),
    "a past, both": Node(left=3, right=1, past=True, found="k - q <= 1 and q - k <= 3"),
    "a softcap": Node(left=3, right=3, softcap=2.0, found="abs(q - k) <= 3"),
    "a boolean mask": Node(left=3, causal=True, mask="bool", found="k <= q and q - k <= 3"),
    "a float mask": Node(left=6, right=2, mask="float", found="k - q <= 2 and q - k <= 6"),
    "lengths": Node(
        left=2,
        right=1,
        lengths=True,
        found="S + k <= lengths[b] + q + 1 and k + 1 <= lengths[b] and lengths[b] + q <= S + k + 2",
    ),
}


@pytest.mark.parametrize("name", NODES)
def test_windows(name: str, tmp_path: Path) -> None:
    """Kernels, function body and onnx's evaluator give what fp64 gives."""
    node = NODES[name]
    original = node.model()
    report, target = forced(original, tmp_path)
    (site,) = report.sites
    assert site.replaced, site.reason
    assert site.mask == node.found
    for seed, (batch, queries, past) in enumerate(((1, 1, 4), (2, 7, 3), (3, 20, 9), (1, 70, 1))):
        feeds = node.feeds(batch, queries, past, seed)
        wanted = node.define(feeds)
        for library in (True, False):
            np.testing.assert_allclose(run(target, feeds, library=library)[0], wanted, atol=3e-5, rtol=3e-5)
        evaluated = ReferenceEvaluator(original).run(None, feeds)[0]
        np.testing.assert_allclose(evaluated, wanted, atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("mode", range(4))
def test_modes_of_the_scores(mode: int, tmp_path: Path) -> None:
    """A used qk_matmul_output keeps the node, and the report says what it holds; one that nobody reads does not."""
    used = NODES["left and causal"].model()
    used.graph.node[0].attribute.append(helper.make_attribute("qk_matmul_output_mode", mode))
    used.graph.node[0].output.extend(["", "", "scores"])
    unused = onnx.ModelProto.FromString(used.SerializeToString())
    used.graph.output.append(helper.make_tensor_value_info("scores", TensorProto.FLOAT, [None] * 4))
    report, _ = forced(used, tmp_path)
    words = ("scaled scores", "capped scores", "masked scores", "attention weights")[mode]
    assert [(s.replaced, words in s.reason) for s in report.sites] == [(False, True)]
    report, _ = forced(unused, tmp_path)
    assert [s.replaced for s in report.sites] == [True]


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("left_window_size", -2, "window sizes -2 and -1, expected -1 or more"),
        ("right_window_size", -(1 << 40), f"window sizes -1 and {-(1 << 40)}, expected -1 or more"),
        ("left_window_size", 2.0, "'left_window_size' is of type FLOAT, expected an integer"),
        ("right_window_size", "2", "'right_window_size' is of type STRING, expected an integer"),
        ("right_window_size", [1, 2], "'right_window_size' is of type INTS, expected an integer"),
        ("is_causal", 2, "is_causal is 2, expected 0 or 1"),
        ("is_causal", 1.0, "'is_causal' is of type FLOAT, expected an integer"),
        ("scale", 1, "'scale' is of type INT, expected a float"),
        ("scale", float("inf"), "'scale' is inf, expected a finite number"),
        ("softcap", -1.0, "softcap is -1, expected 0 (none) or more"),
        ("softcap", float("nan"), "'softcap' is nan, expected a finite number"),
        ("softmax_precision", 7, "'softmax_precision' is 7, expected one of"),
        ("middle_window_size", 1, "attribute 'middle_window_size', whose meaning is not known"),
    ],
)
def test_wrong_attributes(name: str, value: object, reason: str, tmp_path: Path) -> None:
    """The node stays, with what was found and expected; the file is copied."""
    given = Node().model()
    node = given.graph.node[0]
    kept = [a for a in node.attribute if a.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])
    report, target = forced(given, tmp_path)
    assert [s.replaced for s in report.sites] == [False]
    assert reason in report.sites[0].reason
    assert target.read_bytes() == (tmp_path / "model.onnx").read_bytes()


@pytest.mark.parametrize("opset", [23, 24])
def test_windows_before_they_were(opset: int, tmp_path: Path) -> None:
    """Opsets 23 and 24 have no windows: such a node is of no opset, and is left."""
    given = Node(left=3).model()
    given.opset_import[0].version = opset
    report, _ = forced(given, tmp_path)
    assert [s.replaced for s in report.sites] == [False]
    assert f"'left_window_size', which opset {opset} of the model does not have" in report.sites[0].reason


@pytest.mark.parametrize("left", [1 << 31, (1 << 62) + 1, (1 << 63) - 1])
def test_windows_beyond_all_keys(left: int, tmp_path: Path) -> None:
    """A window of any number of keys is one, or has a reason; it never becomes another one."""
    node = Node(left=left, causal=True)
    report, target = forced(node.model(), tmp_path)
    (site,) = report.sites
    assert site.replaced or site.reason
    if site.replaced:
        feeds = node.feeds(2, 9, 0, 0)
        np.testing.assert_allclose(run(target, feeds, library=True)[0], node.define(feeds), atol=3e-5, rtol=3e-5)
