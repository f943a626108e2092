# SPDX-License-Identifier: Apache-2.0
"""MLPs whose gate and up values one matmul gives: the optimizer splits its weight, which the model holds once."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from mlp_models import VOCABULARY, MlpForm, make_mlp_model
from onnx import TensorProto, helper, numpy_helper

import stof
from stof.graph.external_data import is_external
from stof.options import Options
from stof.sparse_mlp.find import find_mlps
from stof.sparse_mlp.site import OP
from stof.symbolic import Symbolic

pytestmark = pytest.mark.usefixtures("small_mlps_gain")

PACKED = MlpForm(gated=True, packed="gate_up", size=64)
FORMS = [
    PACKED,
    replace(PACKED, packed="up_gate", cut="Slice", bias=False),
    replace(PACKED, gemm=True),
    replace(PACKED, packed="up_gate", gemm=True, cut="Slice"),
    replace(PACKED, activation="threshold_gelu", bias=False),
    replace(PACKED, dtype=TensorProto.FLOAT16, cut="Slice"),
    replace(PACKED, bits=4, zero_points=True),
    replace(PACKED, bits=8, packed="up_gate", cut="Slice", bias=False),
    replace(PACKED, bits=4, accuracy_level=4),
]


def session(path: Path, library: bool) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if library:
        stof.register(options)
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def feeds(form: MlpForm, tokens: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(tokens)
    past = rng.standard_normal((2, 3, form.size)).astype(helper.tensor_dtype_to_np_dtype(form.dtype))
    return {"input_ids": rng.integers(0, VOCABULARY, (2, tokens)), "past": past}


def weight_bytes(model: onnx.ModelProto) -> int:
    return sum(
        int(np.prod(t.dims)) * helper.tensor_dtype_to_np_dtype(t.data_type).itemsize for t in model.graph.initializer
    )


@pytest.mark.usefixtures("dequantized_mlps_gain")
@pytest.mark.parametrize(
    ("form", "external"), [*((f, False) for f in FORMS), *((f, True) for f in FORMS[:3] + FORMS[6:7])], ids=str
)
def test_packed_weights_are_split(form: MlpForm, external: bool, tmp_path: Path) -> None:
    """Each neuron is computed by its own part, with the library and without."""
    source, target = tmp_path / "model.onnx", tmp_path / "out.onnx"
    model = make_mlp_model(form, 2)
    if external:
        onnx.save(model, str(source), save_as_external_data=True, location="w.data", size_threshold=1024)
    else:
        onnx.save(model, str(source))
    report = stof.optimize(source, target)
    rows = report.sections["mlps"].to_json()["mlps"]
    assert [r["replaced"] for r in rows] == [True, True], [r["reason"] for r in rows]
    assert rows[0]["sizes"].startswith("gated, 160 neurons")
    written = onnx.load(str(target), load_external_data=False)
    operators = [n.op_type for n in written.graph.node]
    assert operators.count(OP) == 2
    assert not {"Split", "Slice", "Gather", "Transpose"} & set(operators[1:])
    # Nothing is held twice: a page or less is that of constants that were left.
    assert weight_bytes(written) <= weight_bytes(make_mlp_model(form, 2)) + 4096
    assert not any("both" in t.name and "/by_neuron" not in t.name for t in written.graph.initializer)
    tolerance = 2e-2 if form.dtype == TensorProto.FLOAT16 or form.accuracy_level == 4 else 1e-4
    for tokens, library in itertools.product((1, 9), (True, False)):
        one, other = session(source, False), session(target, library)
        for wanted, found in zip(one.run(None, feeds(form, tokens)), other.run(None, feeds(form, tokens)), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance * np.abs(wanted).max())


def test_rows_of_external_data_stay_where_they_are(tmp_path: Path) -> None:
    """A Gemm's weight has rows of neurons: gate and up are views of the original's bytes."""
    form = replace(PACKED, gemm=True, bias=False)
    source, target = tmp_path / "model.onnx", tmp_path / "out.onnx"
    onnx.save(make_mlp_model(form), str(source), save_as_external_data=True, location="w.data", size_threshold=1024)
    stof.optimize(source, target, Options(chains="off"))
    written = onnx.load(str(target), load_external_data=False)
    stored = {t.name: t for t in written.graph.initializer}
    (node,) = (n for n in written.graph.node if n.op_type == OP)
    up = stored[node.input[3]]
    assert is_external(up)
    entries = {e.key: e.value for e in up.external_data}
    assert entries["location"] == "w.data"
    before = next(t for t in onnx.load(str(source)).graph.initializer if t.name == "layers.0.both.weight")
    np.testing.assert_array_equal(numpy_helper.to_array(up, str(tmp_path)), numpy_helper.to_array(before)[160:])


def test_other_readers_of_the_packed_values_keep_it(tmp_path: Path) -> None:
    """The matmul of both stays; the idle rows of the last one are left out all the same."""
    model = make_mlp_model(PACKED)
    model.graph.output.append(helper.make_tensor_value_info("layers.0.both", TensorProto.FLOAT, None))
    (found,) = find_mlps(model, Symbolic(model))
    assert found.site is not None, found.reason
    assert (found.site.up, found.site.gate) == (None, "layers.0/hidden")
    source, target = tmp_path / "model.onnx", tmp_path / "out.onnx"
    onnx.save(model, str(source))
    stof.optimize(source, target)
    one, other = (session(p, p == target).run(None, feeds(PACKED, 5)) for p in (source, target))
    for wanted, found_values in zip(one, other, strict=True):
        np.testing.assert_allclose(found_values, wanted, rtol=1e-4, atol=1e-4)


def test_three_parts_keep_the_matmul() -> None:
    """A third part belongs to something else, so the matmul is no MLP's alone."""
    model = make_mlp_model(PACKED)
    stored = {t.name: t for t in model.graph.initializer}
    weight = numpy_helper.to_array(stored["layers.0.both.weight"])
    bias = numpy_helper.to_array(stored["layers.0.both.bias"])
    stored["layers.0.both.weight"].CopyFrom(
        numpy_helper.from_array(np.concatenate([weight, weight[:, :160]], 1), "layers.0.both.weight")
    )
    stored["layers.0.both.bias"].CopyFrom(
        numpy_helper.from_array(np.concatenate([bias, bias[:160]]), "layers.0.both.bias")
    )
    split = next(n for n in model.graph.node if n.op_type == "Split")
    split.output.append("third")
    split.attribute[1].i = 3
    model.graph.output.append(helper.make_tensor_value_info("third", TensorProto.FLOAT, None))
    (found,) = find_mlps(model, Symbolic(model))
    assert found.site is not None
    assert found.site.up is None
