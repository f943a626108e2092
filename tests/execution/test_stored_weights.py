# SPDX-License-Identifier: Apache-2.0
"""Large weights of models that sessions read from one file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from stof.errors import ArgumentError
from stof.execution.ort_sessions import Sessions
from stof.execution.run_limits import RunLimits
from stof.execution.session_process import release_sessions
from stof.execution.stored_weights import StoredWeights
from stof.graph.external_data import is_external

_LARGE = np.random.default_rng(0).standard_normal((128, 200)).astype(np.float32)


def _model(weight: np.ndarray, bias: np.ndarray) -> onnx.ModelProto:
    nodes = [
        helper.make_node("MatMul", ["x", "weight"], ["product"]),
        helper.make_node("Add", ["product", "bias"], ["y"]),
    ]
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["T", d]) for n, d in (("x", 128), ("y", 200))]
    graph = helper.make_graph(nodes, "graph", values[:1], values[1:], doc_string="of the graph")
    graph.initializer.append(numpy_helper.from_array(weight, "weight"))
    graph.initializer.append(helper.make_tensor("bias", TensorProto.FLOAT, bias.shape, bias))  # not raw
    graph.initializer[0].doc_string = "of the weight"
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    helper.set_model_props(model, {"key": "value"})
    return model


def _loaded(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    path = folder / "read.onnx"
    path.write_bytes(model.SerializeToString())
    return onnx.load(path)


def _bias() -> np.ndarray:
    return np.random.default_rng(1).standard_normal(200).astype(np.float32)


def test_what_refers_reads_the_same_model(tmp_path: Path) -> None:
    model = _model(_LARGE, _bias())
    before = model.SerializeToString()
    referring = StoredWeights(tmp_path).externalize(model)
    assert model.SerializeToString() == before
    assert [is_external(t) for t in referring.graph.initializer] == [True, False]
    assert len(referring.SerializeToString()) < _LARGE.nbytes // 10
    found = _loaded(referring, tmp_path)
    assert numpy_helper.to_array(found.graph.initializer[0]).tobytes() == _LARGE.tobytes()
    for tensor in found.graph.initializer:  # loading leaves a mark of where the bytes lay
        tensor.ClearField("data_location")
    assert found == model


def test_models_share_what_is_equal(tmp_path: Path) -> None:
    weights = StoredWeights(tmp_path)
    weights.externalize(_model(_LARGE, _bias()))
    size = (tmp_path / "weights.bin").stat().st_size
    weights.externalize(_model(_LARGE, _bias()))
    assert (tmp_path / "weights.bin").stat().st_size == size


def test_other_values_of_a_name_are_stored_apart(tmp_path: Path) -> None:
    weights = StoredWeights(tmp_path)
    other = _LARGE.copy()
    other[-1, -1] += 1
    first, second = (weights.externalize(_model(values, _bias())) for values in (_LARGE, other))
    for model, values in ((first, _LARGE), (second, other)):
        np.testing.assert_array_equal(numpy_helper.to_array(_loaded(model, tmp_path).graph.initializer[0]), values)


def test_values_that_alternate_are_stored_once_each(tmp_path: Path) -> None:
    weights = StoredWeights(tmp_path)
    for values in (_LARGE, -_LARGE, _LARGE, -_LARGE, _LARGE):
        referring = weights.externalize(_model(values, _bias()))
    assert (tmp_path / "weights.bin").stat().st_size < 2 * _LARGE.nbytes + 4096
    np.testing.assert_array_equal(numpy_helper.to_array(_loaded(referring, tmp_path).graph.initializer[0]), _LARGE)


def test_external_data_of_the_files_name_is_not_replaced_by_it(tmp_path: Path) -> None:
    """A model that is stored, then one whose own data is called weights.bin: each reads its own."""
    own, scratch = tmp_path / "own", tmp_path / "scratch"
    own.mkdir()
    scratch.mkdir()
    stored, external = _model(_LARGE, _bias()), _model(-_LARGE, _bias())
    onnx.save(external, str(own / "m.onnx"), save_as_external_data=True, location="weights.bin", size_threshold=1024)
    external = onnx.load(str(own / "m.onnx"), load_external_data=False)
    before = (own / "weights.bin").read_bytes()
    sessions = Sessions(own, scratch, RunLimits(60.0, 0))
    x = np.random.default_rng(2).standard_normal((3, 128)).astype(np.float32)
    try:
        for model, weight in ((stored, _LARGE), (external, -_LARGE), (stored, _LARGE)):
            (found,) = sessions.make(model, optimized=False, library=False).run(None, {"x": x})
            np.testing.assert_allclose(found, x @ weight + _bias(), rtol=1e-4, atol=1e-4)
    finally:
        release_sessions()
    assert (own / "weights.bin").read_bytes() == before


def test_a_scratch_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path, tmp_path / "none", RunLimits(60.0, 0))
    with pytest.raises(
        ArgumentError, match=r"none/model\.onnx, which ONNX Runtime is to read, cannot be written: No such"
    ):
        sessions.make(_model(_LARGE, _bias()), optimized=False, library=False)


def test_a_file_of_that_name_stays(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"a user's")
    referring = StoredWeights(tmp_path).externalize(_model(_LARGE, _bias()))
    assert (tmp_path / "weights.bin").read_bytes() == b"a user's"
    np.testing.assert_array_equal(numpy_helper.to_array(_loaded(referring, tmp_path).graph.initializer[0]), _LARGE)
