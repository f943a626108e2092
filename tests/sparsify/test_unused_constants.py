# SPDX-License-Identifier: Apache-2.0
"""Models with declared patterns hold no constant that nothing reads: ONNX Runtime warns of each, in every session."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from test_presets import RADIAL, TRIANGLE, bidirectional, unmasked
from test_sites import fused, primitive

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cached_attention"))
import test_caches
from gqa_models import model_of

import stof
from stof.graph.dead_code import remove_dead_nodes
from stof.graph.index import captured_tensors, subgraphs
from stof.options import Options

WINDOW = "window=9,sink=2"
S2 = "s2(stride=4,local=3,block=16)"


def cached() -> onnx.ModelProto:
    return model_of(test_caches.PLAIN)


def unread(graph: onnx.GraphProto | onnx.FunctionProto) -> Iterator[str]:
    """Outputs of nodes, and initializers, that nothing reads, in a graph or function and the subgraphs of its nodes."""
    is_graph = isinstance(graph, onnx.GraphProto)
    read = {o.name for o in graph.output} if is_graph else set(graph.output)
    for node in graph.node:
        read |= {*node.input, *captured_tensors(node)}
    made = [node.output[0] for node in graph.node if not read.intersection(node.output)]
    stored = [t.name for t in graph.initializer] if is_graph else []
    yield from (name for name in [*made, *stored] if name not in read)
    for node in graph.node:
        for inner in subgraphs(node):
            yield from unread(inner)


def leftovers(model: onnx.ModelProto) -> list[str]:
    return [name for graph in (model.graph, *model.functions) for name in unread(graph)]


def save_clean(model: onnx.ModelProto, folder: Path) -> Path:
    """Writes a model without what nothing reads in it: that stays as it was given."""
    remove_dead_nodes(model.graph, [o.name for o in model.graph.output])
    kept = [t for t in model.graph.initializer if t.name not in set(unread(model.graph))]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


def test_what_nothing_reads_is_found() -> None:
    """The check of the other tests sees constants of both kinds."""
    model = fused()
    assert leftovers(model) == []
    model.graph.node.append(onnx.helper.make_node("Constant", [], ["lost"], value_float=1.0))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(3), "left"))
    assert leftovers(model) == ["lost", "left"]


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    ("made", "spec"),
    [
        (fused, TRIANGLE),
        (fused, WINDOW),
        (fused, S2),
        (primitive, TRIANGLE),
        (lambda: primitive(mask="padded"), WINDOW),
        (lambda: primitive(layers=3), f"{WINDOW},layers=1"),
        (bidirectional, RADIAL),
        (lambda: unmasked(is_padded=True), RADIAL),
        (cached, TRIANGLE),
        (cached, S2),
    ],
    ids=[
        "triangle",
        "window",
        "s2",
        "triangle, primitive",
        "window, padded",
        "window, one layer",
        "radial",
        "radial, padded",
        "triangle, cache",
        "s2, cache",
    ],
)
def test_no_constant_is_left(
    made: Callable[[], onnx.ModelProto], spec: str, verify: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither in the written model, nor in those that verification runs; with the library and without."""
    report = stof.optimize(save_clean(made(), tmp_path), tmp_path / "out.onnx", Options(sparsify=spec, verify=verify))
    assert report.sparsity is not None
    assert any(row.sparsified for row in report.sparsity.rows)
    assert leftovers(onnx.load(tmp_path / "out.onnx")) == []
    for library in (True, False):
        options = ort.SessionOptions()
        if library:
            stof.register(options)
        ort.InferenceSession(str(tmp_path / "out.onnx"), options, providers=["CPUExecutionProvider"])
    written = capfd.readouterr()
    assert "Removing initializer" not in written.out + written.err


def test_attention_that_stays_has_its_pattern_alone(tmp_path: Path) -> None:
    """Where no operator takes a site, the bias of its pattern is in the graph, and nothing else of it."""
    options = Options(sparsify=TRIANGLE, target="cuda", verify=False)
    stof.optimize(save_clean(fused(), tmp_path), tmp_path / "out.onnx", options)
    found = onnx.load(tmp_path / "out.onnx")
    assert not any(n.op_type == "StofAttention" for n in found.graph.node)
    assert any(n.op_type == "Or" for n in found.graph.node)
    assert leftovers(found) == []
