# SPDX-License-Identifier: Apache-2.0
"""Weights in another layout: they are written once, as external data beside the new model, completely or not at all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from mlp_models import VOCABULARY, MlpForm, make_mlp_model

from stof.errors import ArgumentError
from stof.graph.derived_data import find_derived
from stof.graph.external_data import external_files, is_external
from stof.graph.load_save import load, save
from stof.sparse_mlp.emit import emit_mlps
from stof.sparse_mlp.find import find_mlps
from stof.symbolic import Symbolic

FORM = MlpForm(gated=True, gemm=True, size=64, neurons=192)


def write_source(folder: Path, seed: int = 0) -> Path:
    """A model whose weights are external data."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.onnx"
    model = make_mlp_model(FORM, layers=2, seed=seed)
    onnx.save(model, str(path), save_as_external_data=True, location="model.data", size_threshold=1024)
    return path


def emitted(source: Path) -> onnx.ModelProto:
    model = load(source)
    return emit_mlps(model, [c.site for c in find_mlps(model, Symbolic(model)) if c.site is not None], source.parent)


def run(path: Path) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    feed = {
        "input_ids": rng.integers(0, VOCABULARY, (2, 5)),
        "past": rng.standard_normal((2, 3, FORM.size)).astype(np.float32),
    }
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return [np.asarray(x) for x in session.run(None, feed)]


def data_files(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.name}.*.data"))


def test_transposes_become_external_data(tmp_path: Path) -> None:
    source = write_source(tmp_path)
    model = emitted(source)
    names = {t.name for t in find_derived(model)}
    assert len(names) == 2  # down of two layers; Gemm holds up by neuron already
    target = tmp_path / "out.onnx"
    save(model, target, source)
    (data,) = data_files(target)
    written = onnx.load(str(target), load_external_data=False)
    assert not [n for n in written.graph.node if n.op_type == "Transpose"]
    stored = {t.name: t for t in written.graph.initializer}
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(str(source)).graph.initializer}
    for name in names:
        entries = {e.key: e.value for e in stored[name].external_data}
        assert entries["location"] == data.name
        assert int(entries["offset"]) % 4096 == 0
        values = onnx.numpy_helper.to_array(stored[name], str(tmp_path))
        np.testing.assert_array_equal(values, weights[name.removesuffix("/by_neuron")].T)
    assert not [t.name for t in written.graph.initializer if f"{t.name}/by_neuron" in names]  # each weight is held once
    assert "model.data" in external_files(written)  # of the other weights
    for one, other in zip(run(source), run(target), strict=True):
        np.testing.assert_allclose(other, one, rtol=2e-5, atol=1e-4)


def test_other_folder(tmp_path: Path) -> None:
    source = write_source(tmp_path / "in")
    (tmp_path / "out").mkdir()
    target = tmp_path / "out" / "model.onnx"
    save(emitted(source), target, source)
    assert len(data_files(target)) == 1
    assert (tmp_path / "out" / "model.data").is_file()
    for one, other in zip(run(source), run(target), strict=True):
        np.testing.assert_allclose(other, one, rtol=2e-5, atol=1e-4)


def test_second_run_replaces_the_data(tmp_path: Path) -> None:
    """The same model keeps its file; another one removes it."""
    source, other = write_source(tmp_path / "a"), write_source(tmp_path / "b", seed=1)
    (tmp_path / "out").mkdir()
    target = tmp_path / "out" / "new.onnx"
    save(emitted(source), target, source)
    (first,) = data_files(target)
    save(emitted(source), target, source)
    assert data_files(target) == [first]
    (tmp_path / "out" / "model.data").unlink()  # of other bytes, which a run never overwrites
    save(emitted(other), target, other)
    (second,) = data_files(target)
    assert second != first
    stranger = target.with_name("new.onnx.notes.data")
    stranger.write_text("the user's")
    save(emitted(other), target, other)
    assert stranger.read_text() == "the user's"


def test_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_source(tmp_path)
    model = emitted(source)
    before = sorted(tmp_path.iterdir())

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("stof.files.TemporaryFile.replace", fail)
    with pytest.raises(ArgumentError, match="cannot be written: No space left"):
        save(model, tmp_path / "out.onnx", source)
    assert sorted(tmp_path.iterdir()) == before


def test_models_without_external_data_stay_one_file(tmp_path: Path) -> None:
    source = tmp_path / "model.onnx"
    onnx.save(make_mlp_model(FORM), str(source))
    model = emitted(source)
    assert find_derived(model) == []
    save(model, tmp_path / "out.onnx", source)
    assert data_files(tmp_path / "out.onnx") == []


def test_large_weights_of_stof_alone_move(tmp_path: Path) -> None:
    """A weight of 1 MiB in the model moves where stof's operators alone read it, and where other weights are external."""
    source = write_source(tmp_path)
    model = emitted(source)
    large = np.random.default_rng(0).standard_normal((1024, 256)).astype(np.float32)
    node = next(n for n in model.graph.node if n.domain == "stof")
    node.input.append("extra")
    model.graph.initializer.append(onnx.numpy_helper.from_array(large, "extra"))
    (found,) = [t for t in find_derived(model) if t.name == "extra"]
    assert found.layout is None
    model.graph.node.add(op_type="Identity", input=["extra"], output=["copy"])
    assert not [t for t in find_derived(model) if t.name == "extra"]


def test_weights_with_other_readers_stay(tmp_path: Path) -> None:
    source = write_source(tmp_path)
    model = emitted(source)
    name = find_derived(model)[0].name
    model.graph.node.add(op_type="Identity", input=[name], output=["copy"])
    assert name not in {t.name for t in find_derived(model)}
    assert is_external(next(t for t in model.graph.initializer if t.name == name.removesuffix("/by_neuron")))
