# SPDX-License-Identifier: Apache-2.0
"""Regrouped weights take room in the model until it is written: those beyond what a protobuf holds are kept, with a reason."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from mlp_models import MlpForm, make_mlp_model

import stof
from stof.sparse_mlp import model_room
from stof.sparse_mlp.find import find_mlps
from stof.sparse_mlp.model_room import ModelRoom
from stof.symbolic import Symbolic

pytestmark = pytest.mark.usefixtures("small_mlps_gain")

FORM = MlpForm(gated=True, bits=4, size=128, neurons=512)
DOWN = 512 * 128 // 2 + 512 // 32 * 128 * 4  # values and fp32 scales


@pytest.mark.usefixtures("dequantized_mlps_gain")
def test_external_weights_beyond_the_bound_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "model.onnx"
    onnx.save(make_mlp_model(FORM, 3), str(source), save_as_external_data=True, location="w.data", size_threshold=1024)
    held = onnx.load(str(source), load_external_data=False).ByteSize()
    # Small external constants become part of the model when it is read; there is room for two of three layers.
    monkeypatch.setattr(model_room, "_MOST_BYTES", held + 2 * DOWN + 20_000)
    report = stof.optimize(source, tmp_path / "out.onnx")
    rows = report.sections["mlps"].to_json()["mlps"]
    assert [r["replaced"] for r in rows] == [True, True, False]
    assert rows[2]["reason"].startswith("its regrouped weights need 0.00 GB in a model that holds 0.00 GB")


def test_weights_of_the_model_take_no_more_room(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_mlp_model(FORM, 2)
    sites = [c.site for c in find_mlps(model, Symbolic(model)) if c.site is not None]
    monkeypatch.setattr(model_room, "_MOST_BYTES", model.ByteSize() + 100)
    room = ModelRoom(model)
    assert [room.take(s) for s in sites] == ["", ""]
    # A second reader keeps the old weight.
    model.graph.node.add(op_type="Identity", input=[sites[1].down.tensor], output=["copy"], name="copy")
    room = ModelRoom(model)
    assert room.take(sites[0]) == ""
    assert "at most" in room.take(sites[1])


def test_transposed_weights_that_something_else_reads_take_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old layout stays in the model beside the new one."""
    model = make_mlp_model(MlpForm(gated=True, size=64, neurons=256), 2)
    model.graph.node.add(op_type="Identity", input=["layers.1.up.weight"], output=["copy"], name="copy")
    model.graph.output.add(name="copy").type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    source = tmp_path / "model.onnx"
    onnx.save(model, str(source))
    monkeypatch.setattr(model_room, "_MOST_BYTES", model.ByteSize() + 1000)
    rows = stof.optimize(source, tmp_path / "out.onnx").sections["mlps"].to_json()["mlps"]
    assert [r["replaced"] for r in rows] == [True, False]
    assert "its regrouped weights need" in rows[1]["reason"]
