# SPDX-License-Identifier: Apache-2.0
"""External data is read in place, never written to, and copied beside an output in another folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import build
import stof
from stof import cli
from stof.execution import ort_sessions as sessions
from stof.execution import runtime_faults
from stof.execution.ort_sessions import Sessions
from stof.execution.run_limits import RunLimits
from stof.execution.session_worker import SessionSpec
from stof.graph.external_data import read_constants
from stof.graph.load_save import load

NAMES = ("modernbert.dynamo.sdpa", "gemma3.torchscript.eager")


def external(name: str, folder: Path, threshold: int) -> Path:
    """A narrow export with its constants from so many bytes on in a file."""
    (folder / "weights").mkdir(parents=True)
    path = folder / "m.onnx"
    model = build.fill(build.load_graph(f"narrow/{name}"), seed=1)
    onnx.save(
        model,
        str(path),
        save_as_external_data=True,
        location="weights/m.data",
        size_threshold=threshold,
        convert_attribute=threshold == 0,
    )
    return path


def outputs(path: Path, *, library: bool) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if library:
        stof.register(options)
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    mask = np.ones((2, 61), np.int64)
    mask[0, :9] = 0
    mask[1, -20:] = 0
    feeds = {"input_ids": np.random.default_rng(5).integers(0, 90, (2, 61)), "attention_mask": mask}
    found: list[np.ndarray] = session.run(None, feeds)
    return found


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file and folder with the time and size of its last change: also one that came and went shows in its folder."""
    return {str(p): (p.stat().st_mtime_ns, p.stat().st_size) for p in (folder, *folder.rglob("*"))}


@pytest.fixture
def inline(narrow: Callable[[str], Path]) -> Callable[[str], Path]:
    return narrow


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("threshold", [0, 1024])
def test_the_input_stays_alone_and_the_output_is_the_same(
    name: str, threshold: int, tmp_path: Path, inline: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 0 even axes and sizes are external, which runtimes do not load; there the input itself says nothing."""
    source = external(name, tmp_path / "in", threshold)
    (tmp_path / "out").mkdir()
    target = tmp_path / "out" / "m.onnx"
    before = listing(source.parent)
    during: list[bool] = []
    make = Sessions.make

    def watched(self: Sessions, *arguments: Any, **options: Any) -> Any:
        session = make(self, *arguments, **options)
        during.append(listing(source.parent) == before)
        return session

    monkeypatch.setattr(Sessions, "make", watched)
    source.parent.chmod(0o555)
    try:
        report = stof.optimize(source, target)
    finally:
        source.parent.chmod(0o755)
    assert during == [True] * 3
    assert listing(source.parent) == before
    assert report.replaced == len(report.sites) > 0
    assert report.verification is not None
    assert not report.verification.failures
    assert sorted(str(p.relative_to(target.parent)) for p in target.parent.rglob("*.*")) == ["m.onnx", "weights/m.data"]
    plain = inline(name)
    stof.optimize(plain)
    # The same model, so the same result to the bit.
    for a, b in zip(
        outputs(plain.with_name("model.stof.onnx"), library=True), outputs(target, library=True), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_weights_stay_where_they_are_for_an_output_beside_the_input(tmp_path: Path) -> None:
    source = external("modernbert.dynamo.sdpa", tmp_path / "in", 1024)
    before = listing(source.parent)
    stof.optimize(source)
    after = listing(source.parent)
    new = {str(source.with_name("m.stof.onnx"))}
    assert {p for p in after if p not in before} == new
    assert {p: v for p, v in after.items() if p not in new and p != str(source.parent)} == {
        p: v for p, v in before.items() if p != str(source.parent)
    }
    stored = [t for t in onnx.load(str(*new), load_external_data=False).graph.initializer if t.data_location]
    assert len(stored) > 10
    for a, b in zip(outputs(source, library=False), outputs(Path(*new), library=True), strict=True):
        assert np.abs(a - b).max() <= 2e-5 * np.ptp(a)


def test_weights_of_another_model_at_the_output_are_reported_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = external("modernbert.dynamo.sdpa", tmp_path / "in", 1024)
    other = tmp_path / "out" / "weights" / "m.data"
    other.parent.mkdir(parents=True)
    data = source.parent / "weights" / "m.data"
    monkeypatch.setattr(Sessions, "make", lambda *_, **__: pytest.fail("the model ran"))
    for content in (b"other", data.read_bytes()[:-1] + b"?"):
        other.write_bytes(content)
        assert cli.main([str(source), "-o", str(tmp_path / "out" / "m.onnx")]) == 1
        assert f"{other} exists and differs from {data}" in capsys.readouterr().err
        assert other.read_bytes() == content
        assert [p.name for p in (tmp_path / "out").iterdir()] == ["weights"]


def test_small_constants_and_tables_are_read_and_weights_are_not(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    arrays = {
        "axes": np.array([0, 2], np.int64),
        "scale": np.float32(0.125).reshape(()),
        "half": np.float16(0.5).reshape(1),
        "norm": rng.standard_normal(4096).astype(np.float32),
        "weight": rng.standard_normal((64, 64)).astype(np.float32),
        "allowed": np.tril(np.ones((1, 1, 200, 200), bool)),
        "added": np.triu(rng.standard_normal((1, 1, 90, 90)).astype(np.float32)),
        "positions": np.arange(5000),
    }
    nodes = [helper.make_node("Identity", [n], [f"{n}_out"]) for n in arrays]
    infos = [
        helper.make_tensor_value_info(f"{n}_out", helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for n, a in arrays.items()
    ]
    graph = helper.make_graph(nodes, "g", [], infos, [numpy_helper.from_array(a, n) for n, a in arrays.items()])
    path = tmp_path / "m.onnx"
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    onnx.save(model, str(path), save_as_external_data=True, location="m.data", size_threshold=0)
    loaded = load(path)
    read_constants(path, loaded)
    stored = {t.name: t for t in loaded.graph.initializer}
    left = {n for n, t in stored.items() if t.data_location == TensorProto.EXTERNAL}
    assert left == {"norm", "weight"}
    for name in arrays.keys() - left:
        np.testing.assert_array_equal(numpy_helper.to_array(stored[name]), arrays[name], strict=True)


def test_linked_files_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As in the cache of Hugging Face's hub: the model is a link, its weights lie elsewhere under another name."""
    source = external("modernbert.dynamo.sdpa", tmp_path / "blobs", 1024)
    snapshot = tmp_path / "snapshot"
    (snapshot / "weights").mkdir(parents=True)
    (snapshot / "m.onnx").symlink_to(source)
    shutil.move(source.parent / "weights" / "m.data", tmp_path / "blobs" / "abc")
    (snapshot / "weights" / "m.data").symlink_to(tmp_path / "blobs" / "abc")
    assert np.isfinite(outputs(snapshot / "m.onnx", library=False)[0]).all()
    # Runtimes would not follow the link from a new model there.
    assert cli.main([str(snapshot / "m.onnx")]) == 1
    assert "write the output to another folder with -o" in capsys.readouterr().err
    assert sorted(p.name for p in snapshot.iterdir()) == ["m.onnx", "weights"]
    target = tmp_path / "out"
    target.mkdir()
    report = stof.optimize(snapshot / "m.onnx", target / "m.onnx")
    assert report.replaced == 4
    assert report.verification is not None
    assert not report.verification.failures
    assert not (target / "weights" / "m.data").is_symlink()
    assert np.isfinite(outputs(target / "m.onnx", library=True)[0]).all()


def test_old_runtimes_read_through_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a session is made from, in versions that this environment does not have; also where the data is oddly named."""
    folder, scratch = tmp_path / "in", tmp_path / "scratch"
    scratch.mkdir()
    folder.mkdir()
    content = np.random.default_rng(0).standard_normal((40, 40)).astype(np.float32)
    (folder / "model.onnx").write_bytes(content.tobytes())
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=content.shape)
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="model.onnx")
    info = helper.make_tensor_value_info("out", TensorProto.FLOAT, content.shape)
    graph = helper.make_graph([helper.make_node("Identity", ["w"], ["out"])], "g", [], [info], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    seen: list[Path] = []

    def fake(spec: SessionSpec, seconds: float, memory: int) -> None:
        assert isinstance(spec.model, str)
        path = Path(spec.model)
        seen.append(path)
        assert onnx.load(spec.model, load_external_data=False) == model
        assert (path.parent / "model.onnx").read_bytes() == content.tobytes()

    monkeypatch.setattr(runtime_faults, "runtime_version", lambda: (1, 18))
    monkeypatch.setattr(sessions, "create_session", fake)
    for _ in range(2):
        Sessions(folder, scratch, RunLimits(45.0)).make(model, optimized=True, library=False)
    assert len(seen) == 2
    assert {p.parent for p in seen} == {scratch}
    assert (folder / "model.onnx").read_bytes() == content.tobytes()
    assert [p.name for p in folder.iterdir()] == ["model.onnx"]
    assert [p.name for p in scratch.iterdir()] == ["model.onnx"]
