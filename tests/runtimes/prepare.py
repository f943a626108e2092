# SPDX-License-Identifier: Apache-2.0
"""Writes models, their optimized forms and inputs for tests/runtimes/check.py: ``prepare.py FOLDER``.

The models are narrow exports: ModernBERT from two exporters (two masks each), the same with a narrower window in one layer
(three masks), and one model that holds ModernBERT and Gemma 3 side by side (four masks, two head counts).
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import compose, helper, numpy_helper

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "models"))
import build
import stof

# Batch, length, padding left of row 0, right of row 1. Windows are 5, 16 and 19.
LENGTHS = ((2, 75, 9, 0), (2, 64, 0, 30), (2, 41, 12, 7), (1, 5, 0, 0), (1, 1, 0, 0))
NARROWER = 5
MASKS = {"modernbert": 2, "three-masks": 3, "four-masks": 4}


def side_by_side(first: onnx.ModelProto, second: onnx.ModelProto) -> onnx.ModelProto:
    """One model that computes both; names of the second are prefixed."""
    second = compose.add_prefix(second, "second/")
    found = onnx.ModelProto()
    found.CopyFrom(first)
    for field in ("node", "initializer", "input", "output", "value_info"):
        getattr(found.graph, field).extend(getattr(second.graph, field))
    known = {(f.domain, f.name) for f in found.functions}
    found.functions.extend(f for f in second.functions if (f.domain, f.name) not in known)
    onnx.checker.check_model(found)
    return found


def with_third_mask(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy in which the last layer that has the window has a narrower one, computed by nodes of its own."""
    edited = onnx.ModelProto()
    edited.CopyFrom(model)
    graph = edited.graph
    start = next(i for i, n in enumerate(graph.node) if n.op_type == "LessOrEqual")
    window = onnx.NodeProto()
    window.CopyFrom(graph.node[start])
    graph.initializer.append(numpy_helper.from_array(np.array(NARROWER, np.int64), "narrower"))
    window.input[1] = "narrower"
    # Everything that follows from the comparison, up to where layers add it to their scores.
    renamed = {window.output[0]: "narrower_0"}
    window.output[0] = "narrower_0"
    window.name = "narrower_0"
    copies = [window]
    adds = []
    for node in graph.node[start + 1 :]:
        if not any(name in renamed for name in node.input):
            continue
        if node.op_type == "Add":
            adds.append(node)
            continue
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.name = f"narrower_{len(copies)}"
        copy.input[:] = [renamed.get(n, n) for n in node.input]
        copy.output[:] = [f"narrower_{len(copies)}"]
        renamed[node.output[0]] = copy.output[0]
        copies.append(copy)
    assert len(adds) > 1, "two layers share the window"
    adds[-1].input[:] = [renamed.get(n, n) for n in adds[-1].input]
    # In front of their first reader, so that nodes stay in an order that every runtime takes.
    place = next(i for i, n in enumerate(graph.node) if n.output[0] == adds[-1].output[0])
    nodes = [*graph.node[:place], *copies, *graph.node[place:]]
    nodes = [onnx.NodeProto.FromString(n.SerializeToString()) for n in nodes]
    del graph.node[:]
    graph.node.extend(nodes)
    onnx.checker.check_model(edited)
    return edited


def models() -> dict[str, onnx.ModelProto]:
    """The originals by name; opset 21 at most, for the oldest runtime."""
    two = {
        n: build.fill(build.load_graph(f"narrow/modernbert.{n}"), seed=3) for n in ("dynamo.sdpa", "torchscript.eager")
    }
    gemma = build.fill(build.load_graph("narrow/gemma3.dynamo.sdpa"), seed=4)
    found = {f"modernbert.{n}": m for n, m in two.items()}
    found |= {f"three-masks.{n}": with_third_mask(m) for n, m in two.items()}
    found["four-masks"] = side_by_side(two["dynamo.sdpa"], gemma)
    for name, model in found.items():
        opset = max(o.version for o in model.opset_import if o.domain in ("", "ai.onnx"))
        if opset > 21:
            raise ValueError(f"{name} has opset {opset}; the oldest runtime reads 21")
    return found


def feeds(model: onnx.ModelProto, batch: int, length: int, left: int, right: int) -> dict[str, np.ndarray]:
    """Random ids and a padded mask for every input."""
    rng = np.random.default_rng(length)
    mask = np.ones((batch, length), np.int64)
    mask[0, :left] = 0
    if batch > 1 and right:
        mask[1, -right:] = 0
    return {
        i.name: mask if i.name.endswith("mask") else rng.integers(0, 90, (batch, length)) for i in model.graph.input
    }


def fewer_outputs(folder: Path) -> None:
    """Nodes that have one output where the operator has two: runtimes up to 1.23 ended the process when told of the second."""
    folder.mkdir(exist_ok=True)
    fields: dict[str, list[int | str]] = {n: [1, 2, 8, 16] for n in "qkv"}
    chain = "axes b = x0.0, n = x0.1; out y0 f32 [b, n] = x0[b, n] + 1; out y1 f32 [b, n] = x0[b, n] * 2"
    attention = helper.make_node("StofAttention", list("qkv"), ["y"], "a", domain="stof", mask="k <= q", results="lse")
    described = helper.make_node("StofChain", ["x"], ["y"], "c", domain="stof", chain=chain)
    for name, node, inputs in (("runs", attention, fields), ("refused", described, {"x": ["b", 16]})):
        values = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, shape) for n, shape in inputs.items()]
        output = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
        imports = [helper.make_opsetid("", 20), helper.make_opsetid("stof", 1)]
        graph = helper.make_graph([node], "g", values, [output])
        onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=9), str(folder / f"{name}.onnx"))


def main(folder: Path) -> None:
    """Writes everything."""
    folder.mkdir(parents=True, exist_ok=True)
    fewer_outputs(folder / "fewer")
    for name, model in models().items():
        path = folder / f"{name}.onnx"
        onnx.save(model, str(path))
        report = stof.optimize(path, folder / f"{name}.stof.onnx")
        masks = sorted({s.mask for s in report.sites if s.replaced})
        done = sum(s.replaced for s in report.sites)
        if done != len(report.sites) or len(masks) != MASKS[name.split(".")[0]]:
            raise SystemExit(f"{name}: {done} of {len(report.sites)} sites replaced, masks {masks}")
        print(f"{name}: {done} sites, masks {'; '.join(masks)}")
        for i, shape in enumerate(LENGTHS):
            np.savez(folder / f"{name}.{i}.npz", **feeds(model, *shape))  # type: ignore[arg-type]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
