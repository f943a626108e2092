# SPDX-License-Identifier: Apache-2.0
"""Exported graphs in, equivalent graphs out: with the library, without it, and with a planted fault."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

import build
import stof
from stof import cli
from stof.attention.subgraphs import emit_scopes

NAMES = sorted(n.removeprefix("narrow/") for n in build.names(narrow=True))
WINDOWS = {
    "modernbert": {"pad[b, k]", "abs(q - k) <= 16 and pad[b, k]"},
    "bert": {"pad[b, k]"},
    "mistral": {"k <= q and q - k <= 19 and pad[b, k]"},
    "gemma3": {"k <= q and pad[b, k]", "k <= q and q - k <= 19 and pad[b, k]"},
    "embeddinggemma": {"pad[b, k]", "abs(q - k) <= 10 and pad[b, k]"},
}


def session(path: Path, *, library: bool) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if library:
        stof.register(options)
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def feeds(batch: int, length: int, left: int, right: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(length)
    mask = np.ones((batch, length), np.int64)
    mask[0, :left] = 0
    if batch > 1 and right:
        mask[1, -right:] = 0
    return {"input_ids": rng.integers(0, 90, (batch, length)), "attention_mask": mask}


def test_all_narrow_graphs_are_here() -> None:
    assert len(NAMES) == 18


@pytest.mark.parametrize("name", NAMES)
def test_optimized_graph_is_equivalent(name: str, narrow: Callable[[str], Path]) -> None:
    path = narrow(name)
    before = path.read_bytes()
    report = stof.optimize(path)
    assert path.read_bytes() == before
    expected = build.manifest()[f"narrow/{name}"]["softmax"]
    assert report.replaced == expected == len(report.sites)
    assert {s.mask for s in report.sites} == WINDOWS[name.split(".")[0]]
    assert report.verification is not None
    assert not report.verification.failures
    target = path.with_name("model.stof.onnx")
    sessions = [session(path, library=False), session(target, library=True), session(target, library=False)]
    for batch, length, left, right in ((2, 75, 9, 0), (2, 64, 0, 30), (1, 5, 0, 0), (3, 41, 12, 7), (1, 1, 0, 0)):
        given = feeds(batch, length, left, right)
        original, fast, slow = (s.run(None, given)[0] for s in sessions)
        assert np.isfinite(original).all()
        span = float(original.max() - original.min())
        assert np.abs(fast - original).max() <= 2e-5 * span
        assert np.abs(slow - original).max() <= 2e-5 * span


def test_io_names_symbols_and_metadata_survive(narrow: Callable[[str], Path]) -> None:
    path = narrow("modernbert.dynamo.sdpa")
    stof.optimize(path)
    before, after = onnx.load(str(path)), onnx.load(str(path.with_name("model.stof.onnx")))
    assert list(before.graph.input) == list(after.graph.input)
    assert list(before.graph.output) == list(after.graph.output)
    names = {n.name: n for n in before.graph.node}
    kept = [n for n in after.graph.node if n.name in names]
    assert len(kept) > 100
    assert all(names[n.name] == n for n in kept)
    onnx.checker.check_model(after)


def test_second_run_changes_nothing(narrow: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = narrow("bert.dynamo.eager")
    stof.optimize(path)
    target = path.with_name("model.stof.onnx")
    before = target.read_bytes()
    assert cli.main([str(target)]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert target.read_bytes() == before
    assert not target.with_name("model.stof.stof.onnx").exists()


def test_planted_fault_is_caught(
    narrow: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = narrow("modernbert.dynamo.sdpa")
    planted: list[str] = []

    def faulty(*arguments: Any) -> onnx.ModelProto:
        model = emit_scopes(*arguments)
        node = [n for n in model.graph.node if n.op_type == "StofAttention"][1]
        mask = next(a for a in node.attribute if a.name == "mask")
        mask.s = mask.s.replace(b"<= 16", b"<= 15")
        planted.append(node.name.removesuffix("/StofAttention"))
        return model

    monkeypatch.setattr("stof.attention.rewrite.emit_scopes", faulty)
    files = set(path.parent.iterdir())
    assert cli.main([str(path)]) == 2
    error = capsys.readouterr().err
    assert f"verification failed at site {planted[0]!r}" in error
    assert set(path.parent.iterdir()) == files


@pytest.mark.parametrize(
    ("make", "code", "words"),
    [
        (lambda p: p.unlink(), 1, "does not exist"),
        (lambda p: p.write_bytes(b"this is no model"), 3, "no ONNX model"),
        (lambda p: p.write_bytes(p.read_bytes()[:4000]), 3, "ONNX model"),
        (lambda p: p.write_bytes(b""), 3, "no ONNX model"),
    ],
)
def test_bad_input(
    make: Callable[[Path], object],
    code: int,
    words: str,
    narrow: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = narrow("bert.dynamo.eager")
    make(path)
    assert cli.main([str(path)]) == code
    assert words in capsys.readouterr().err
    assert not path.with_name("model.stof.onnx").exists()


def test_output_equal_to_input_is_refused(narrow: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = narrow("bert.dynamo.eager")
    before = path.read_bytes()
    assert cli.main([str(path), "-o", str(path)]) == 1
    assert "is the input" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_calibration_prompts_that_are_no_file_are_refused(
    narrow: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = narrow("bert.dynamo.eager")
    assert cli.main([str(path), "--sparse-mlp", "folder"]) == 1
    assert "--sparse-mlp folder: expected .npy or .npz" in capsys.readouterr().err
    assert cli.main([str(path), "--sparse-mlp", ""]) == 1
    assert "--sparse-mlp is empty" in capsys.readouterr().err


@pytest.mark.parametrize("together", [(2,), (0, 3), (0, 1, 3)])
def test_a_difference_that_no_site_shows_is_traced(
    together: tuple[int, ...],
    narrow: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = narrow("modernbert.dynamo.sdpa")
    guilty: list[str] = []

    def faulty(scopes: Any, rewrites: Any) -> onnx.ModelProto:
        """With these sites replaced, all come out right, but what reads the last of them reads its own query."""
        result = emit_scopes(scopes, rewrites)
        sites = [r.site for r in rewrites if r.site.index in together]
        if len(sites) == len(together):
            guilty[:] = [s.name for s in sites]
            node = next(n for n in result.graph.node if sites[-1].output in n.output)
            reader = next(n for n in result.graph.node if sites[-1].output in n.input)
            query = helper.make_node("Transpose", [node.input[0]], ["planted_t"], perm=[0, 2, 1, 3])
            flat = helper.make_node("Reshape", ["planted_t", "planted_shape"], ["planted"])
            reader.input[list(reader.input).index(sites[-1].output)] = "planted"
            result.graph.initializer.append(numpy_helper.from_array(np.array([0, 0, -1], np.int64), "planted_shape"))
            place = list(result.graph.node).index(reader)
            nodes = [onnx.NodeProto.FromString(n.SerializeToString()) for n in result.graph.node]
            del result.graph.node[:]
            result.graph.node.extend([*nodes[:place], query, flat, *nodes[place:]])
        return result

    for module in (
        "rewrite",
        "checks.site_checks",
    ):  # the model that is written, and those by which the fault is traced
        monkeypatch.setattr(f"stof.attention.{module}.emit_scopes", faulty)
    assert cli.main([str(path)]) == 2
    error = capsys.readouterr().err
    assert "Every site by itself computes what it should" in error
    names = ", ".join(repr(n) for n in guilty)
    assert len(guilty) == len(together)
    words = f"comes with site {names} alone" if len(guilty) == 1 else f"comes when sites {names} are replaced together"
    assert words in error
    assert [p.name for p in path.parent.iterdir()] == ["model.onnx"]
