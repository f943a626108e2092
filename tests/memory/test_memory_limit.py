# SPDX-License-Identifier: Apache-2.0
"""The report's line about memory, and the limit that a user sets."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from memory_bound import GRAPHS
from onnx import helper, numpy_helper
from run_peak import measure_run

import build
import stof
from stof.cli import main
from stof.errors import ArgumentError, MemoryLimitError
from stof.execution.run_limits import parse_bytes
from stof.memory.peak import estimate_peak
from stof.symbolic import Symbolic

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "sparsify"))
from test_prompts import D, G, decoder

_BERT = "narrow/bert.torchscript.eager"
_DEBERTA = "relative/deberta-v3.torchscript.eager"
_READ = "weights that an output reads"  # the first attention of _BERT stays as it is


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("stored")
    models = {name: build.fill(build.load_graph(name)) for name in (_BERT, _DEBERTA)}
    models[_READ] = onnx.ModelProto()
    models[_READ].CopyFrom(models[_BERT])
    graph = models[_READ].graph
    weights = next(node.output[0] for node in graph.node if node.op_type == "Softmax")
    graph.output.append(helper.make_tensor_value_info(weights, onnx.TensorProto.FLOAT, None))
    paths = {name: folder / f"{name.replace('/', '-')}.onnx" for name in models}
    for name, path in paths.items():
        onnx.save(models[name], path)
    return paths


def _run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main([*map(str, words), "-q"])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_line_and_the_tensors_at_the_peak(
    stored: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, report, page = (tmp_path / name for name in ("o.onnx", "r.json", "p.html"))
    words = ("-o", output, "--no-verify", "--shape", "sequence=64..1024", "--json", report, "--report", page)
    code, text, _ = _run(capsys, stored[_BERT], *words)
    assert code == 0
    (line,) = [x for x in text.split("\n") if x.startswith("memory: ")]
    data = json.loads(report.read_text())["memory"]
    assert data["sizes"] == {"batch": 1, "sequence": 1024}
    before, after = data["before"], data["after"]
    assert "of activations at batch 1, sequence 1024 (before: " in line
    assert "; weights " in line
    # Scores of all heads, twice at least.
    heads = next(row for row in json.loads(report.read_text())["sites"])["heads"]
    count = int(str(heads).split()[0])
    assert before["activations"] > 2 * 4 * count * 1024**2
    assert after["activations"] < before["activations"] / 4
    assert 1 <= len(after["tensors"]) <= 8
    assert [t["bytes"] for t in after["tensors"]] == sorted((t["bytes"] for t in after["tensors"]), reverse=True)
    assert all(t["shape"].startswith("[") and t["node"] for t in after["tensors"])
    assert not after["quadratic"]
    assert before["quadratic"]
    html = page.read_text()
    assert "Memory of activations" in html
    assert after["tensors"][0]["name"] in html
    exact = estimate_peak(onnx.load(output), Symbolic(onnx.load(output)), data["sizes"])
    assert after["activations"] == pytest.approx(exact.activations, rel=0.02)


def test_a_limit_is_held(stored: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, report = tmp_path / "o.onnx", tmp_path / "r.json"
    words = (stored[_READ], "-o", output, "--shape", "sequence=1024", "--json", report, "--no-verify")
    code, _, error = _run(capsys, *words, "--memory-limit", "30M")
    assert code == 1
    assert not output.exists()
    assert "--memory-limit is 30 MiB, and nothing was written" in error
    assert "[batch, 4, sequence, sequence]" in error  # tensors at the peak, with their shapes
    assert "quadratic: " in error
    assert "are a graph output or read by a subgraph" in error  # and why they stay
    data = json.loads(report.read_text())["memory"]
    assert data["limit"] == 30 << 20
    assert data["before"]["activations"] > data["limit"]
    code, text, _ = _run(capsys, *words, "--memory-limit", "1G")
    assert code == 0
    assert output.exists()
    assert "quadratic: " in text


def test_the_result_counts_and_not_the_original(
    stored: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (stored[_DEBERTA], "-o", tmp_path / "o.onnx", "--no-verify", "--memory-limit", "20M")
    code, text, _ = _run(capsys, *words, "--shape", "sequence=2048")
    assert code == 0
    assert "(before: " in text
    code, _, error = _run(capsys, *words[:-1], "1M", "--shape", "sequence=2048")
    assert code == 1
    assert "StofAttention" in error


def test_limits_in_python(stored: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(MemoryLimitError, match="nothing was written"):
        stof.optimize(stored[_READ], tmp_path / "o.onnx", memory_limit=1 << 20, verify=False)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ArgumentError, match="memory_limit is -1, expected an integer from 0 on"):
        stof.Options(memory_limit=-1)
    assert [parse_bytes(t) for t in ("3K", "2M", "1G", "4096")] == [3 << 10, 2 << 20, 1 << 30, 4096]


def _unknown(path: Path) -> Path:
    """A model with a tensor whose size depends on data."""
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n"])
    y = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["m"])
    nodes = [helper.make_node("Unique", ["x"], ["u"]), helper.make_node("Neg", ["u"], ["y"])]
    model = helper.make_model(helper.make_graph(nodes, "g", [x], [y]), opset_imports=[helper.make_opsetid("", 17)])
    onnx.save(model, path)
    return path


def test_what_cannot_be_estimated_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = _run(capsys, _unknown(tmp_path / "m.onnx"), "--memory-limit", "1G")
    assert code == 0
    (line,) = [x for x in text.split("\n") if x.startswith("memory: ")]
    assert line.startswith("memory: not estimated: the size of 'u' is not known")
    assert line.endswith("; --memory-limit was not checked")


def test_a_fault_of_the_estimate_fails_nothing(
    stored: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr("stof.memory_bound.stage_memory.estimate_peak", fail)
    code, text, _ = _run(capsys, stored[_BERT], "--dry-run")
    assert code == 0
    assert "memory: not estimated: ZeroDivisionError: by zero" in text


def test_engines_are_not_estimated(stored: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = _run(capsys, stored[_BERT], "--dry-run", "--target", "tensorrt")
    assert code == 0
    assert "memory: not estimated: TensorRT plans the memory of an engine" in text


@pytest.mark.parametrize(
    "name", [_DEBERTA, "relative/wav2vec2-bert.torchscript.eager", "narrow/modernbert.torchscript.sdpa"]
)
def test_estimates_hold(name: str, tmp_path: Path) -> None:
    """Within a quarter of what a fresh process grows by; tests/memory/memory_bound.py has ten graphs at two lengths."""
    source, target = tmp_path / "m.onnx", tmp_path / "o.onnx"
    onnx.save(build.fill(build.load_graph(name)), source)
    stof.optimize(source, target, verify=False)
    for path, sizes in ((source, GRAPHS[name].original[0]), (target, GRAPHS[name].result[0])):
        model = onnx.load(path)
        estimated = estimate_peak(model, Symbolic(model), sizes).activations
        measured = measure_run(path, sizes)
        assert measured > 50 << 20
        assert abs(estimated / measured - 1) <= 0.25, (path.name, estimated, measured)


def test_large_graphs_take_little_time() -> None:
    """5,000 nodes; the time is of this process alone, with room for slow machines."""
    nodes, name = [], "x"
    for i in range(1000):
        nodes += [helper.make_node("MatMul", [name, "w"], [f"m{i}"]), helper.make_node("Relu", [f"m{i}"], [f"r{i}"])]
        nodes += [helper.make_node("Add", [f"r{i}", "b"], [f"a{i}"]), helper.make_node("Exp", [f"a{i}"], [f"e{i}"])]
        nodes += [helper.make_node("Sub", [f"e{i}", name], [f"s{i}"])]
        name = f"s{i}"
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", "sequence", 64])
    weights = [numpy_helper.from_array(np.ones(s, np.float32), n) for n, s in (("w", (64, 64)), ("b", (64,)))]
    graph = helper.make_graph(nodes, "g", [x], [onnx.ValueInfoProto(name=name)], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    symbolic = Symbolic(model)
    start = time.process_time()
    found = estimate_peak(model, symbolic, {"batch": 2, "sequence": 512}, {"batch"})
    assert time.process_time() - start < 3
    tensor = 2 * 512 * 64 * 4
    assert 3 * tensor <= found.activations <= 6 * tensor


@pytest.mark.parametrize("option", ["--memory-limit", "--verify-memory"])
@pytest.mark.parametrize("text", ["4X", "lots", "0", "-1G", ""])
def test_a_wrong_number_of_bytes(capsys: pytest.CaptureFixture[str], option: str, text: str) -> None:
    code, _, error = _run(capsys, "model.onnx", f"{option}={text}")
    assert code == 1
    wanted = f"stof-optimize: {option} is {text!r}, expected a number of bytes above 0: 4G, 512M or 1000000000"
    assert error.splitlines() == [wanted]


def test_bounds_of_pages_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """choose-pages gives the model an output beside each cache. It is alive at the peak, and the limit holds for it, too."""
    model = onnx.load(decoder(tmp_path))
    for value in model.graph.output:
        if len(value.type.tensor_type.shape.dim) == 4:  # presents, as long as the mask
            value.type.tensor_type.shape.dim[2].dim_param = "T"
    onnx.save(model, tmp_path / "model.onnx")
    words = (tmp_path / "model.onnx", "-o", tmp_path / "o.onnx", "--no-verify", "--json", tmp_path / "r.json")
    found = {}
    for rows in (0, 16, 128):
        option = ("--sparsify", f"choose-pages(pages=2,rows={rows})") if rows else ()
        code, _, _ = _run(capsys, *words, *option)
        assert code == 0
        found[rows] = json.loads((tmp_path / "r.json").read_text())["memory"]
    after = {rows: data["after"] for rows, data in found.items()}
    length = found[0]["sizes"]["T"]
    for rows in (16, 128):
        (bounds,) = [t for t in after[rows]["tensors"] if t["name"] == "present_key_page_bounds"]
        assert bounds["bytes"] == 4 * G * -(-length // rows) * 2 * D
        assert after[rows]["activations"] >= after[0]["activations"] + bounds["bytes"]
    assert not [t for t in after[0]["tensors"] if "bounds" in t["name"]]
    limit = after[0]["activations"] + after[0]["weights"] + 1
    (tmp_path / "o.onnx").unlink()
    assert _run(capsys, *words, "--memory-limit", limit)[0] == 0
    (tmp_path / "o.onnx").unlink()
    code, _, error = _run(capsys, *words, "--memory-limit", limit, "--sparsify", "choose-pages(pages=2,rows=16)")
    assert code == 1
    assert not (tmp_path / "o.onnx").exists()
    assert "[B, 2, C_present_pages_16, 2, 16]" in error
