# SPDX-License-Identifier: Apache-2.0
"""The bench of padded texts: lengths and batches, the stored graphs, the check of candidates, records and exit states."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import build
from bench.cli import main
from bench.core.point import Point, measure_point
from bench.numbers_page import document
from bench.texts import text_models
from bench.texts.candidates import CANDIDATES
from bench.texts.describe import describe_record
from bench.texts.lengths import LENGTHS, WINDOW, Lengths, TextWindow
from bench.texts.problem import TextDevice, TextProblem
from bench.texts.runtimes import CpuRuntime
from bench.texts.text_models import EXPORTED, KINDS, MODELS, TextFiles, write_files

TINY = MODELS["tiny"]
SHORT = Lengths("short", 6, 0.6, 24, padded_to=24)
NAMES = [c.name for c in CANDIDATES]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stof.bench.measure.rates", lambda threads: {"fma_gflops": 1.0, "read_gbps": 1.0})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TextFiles]:
    """The files of the tiny model by precision."""
    folder = tmp_path_factory.mktemp("texts")
    found = {p: write_files(TINY, p, folder, KINDS) for p in text_models.PRECISIONS}
    return lambda precision: found[precision]


def make_problem(files: TextFiles, precision: str = "fp32", lengths: Lengths = SHORT) -> TextProblem:
    window = TextWindow(lengths, TINY.vocabulary, TINY.inputs, 1, size=64)
    return TextProblem(TINY, precision, files, window, 4, 2, CpuRuntime(1))


def test_lengths_are_those_that_are_stated() -> None:
    rng = np.random.default_rng(5)
    drawn = {name: lengths.draw(200_000, rng) for name, lengths in LENGTHS.items()}
    assert {name: int(np.median(found)) for name, found in drawn.items()} == {
        "padded-256": 40,
        "longest": 60,
        "pairs": 120,
    }
    assert np.quantile(drawn["longest"], 0.95) == pytest.approx(250, rel=0.02)
    assert {name: (int(x.min()) >= 1, int(x.max())) for name, x in drawn.items()} == {
        "padded-256": (True, 256), "longest": (True, 512), "pairs": (True, 512),
    }  # fmt: skip
    assert 256 / drawn["padded-256"].mean() == pytest.approx(5.4, abs=0.1)


def test_batches_of_arrival_are_the_first_texts_padded_to_the_length_or_the_longest() -> None:
    fixed = TextWindow(SHORT, 50, TINY.inputs, 0, size=16)
    batches = fixed.arrival(4, 3)
    assert [f["input_ids"].shape for f in batches.feeds] == [(4, 24)] * 3
    assert batches.padded == 3 * 4 * 24
    longest = TextWindow(replace(SHORT, padded_to=None), 50, TINY.inputs, 0, size=16).arrival(4, 3)
    assert longest.real == batches.real == sum(int(f["attention_mask"].sum()) for f in batches.feeds)
    for one, other in zip(batches.feeds, longest.feeds, strict=True):
        counts = other["attention_mask"].sum(1)
        assert other["input_ids"].shape == (4, counts.max())
        np.testing.assert_array_equal(other["attention_mask"], np.arange(counts.max()) < counts[:, None])
        np.testing.assert_array_equal(one["input_ids"][:, : counts.max()], other["input_ids"])
        assert (other["input_ids"] >= 3).tolist() == (other["attention_mask"] == 1).tolist()
        assert not other["token_type_ids"].any()


def test_sorted_batches_are_neighbours_in_length_at_even_distances() -> None:
    window = TextWindow(SHORT, 50, TINY.inputs, 0, size=64)
    all_of_them = [f["attention_mask"].sum(1) for f in window.by_length(4, 16).feeds]
    assert (np.diff(np.concatenate(all_of_them)) >= 0).all()
    assert sum(int(c.sum()) for c in all_of_them) == window.arrival(4, 16).real
    some = [f["attention_mask"] for f in window.by_length(4, 2).feeds]
    assert [m.sum(1).tolist() for m in some] == [all_of_them[i].tolist() for i in (4, 12)]
    assert [m.shape[1] for m in some] == [all_of_them[i].max() for i in (4, 12)]
    assert window.by_length(4, 2).largest["attention_mask"].shape == some[1].shape


def test_pairs_have_a_query_and_a_passage_and_padding_of_neither() -> None:
    feeds = TextWindow(replace(SHORT, is_pairs=True), 50, TINY.inputs, 0).arrival(8, 1).feeds[0]
    for types, mask in zip(feeds["token_type_ids"], feeds["attention_mask"], strict=True):
        count = int(mask.sum())
        assert types.tolist() == [0] * max(count // 8, 1) + [1] * (count - max(count // 8, 1)) + [0] * (24 - count)
    assert set(TextWindow(SHORT, 50, ("input_ids", "attention_mask"), 0).arrival(8, 1).feeds[0]) == {
        "input_ids",
        "attention_mask",
    }


@pytest.mark.parametrize(("rows", "batches"), [(32, 33), (0, 1), (4, 0), (2048, 1)])
def test_more_texts_than_the_window_has_are_refused(rows: int, batches: int) -> None:
    with pytest.raises(ValueError, match=f"of {WINDOW} texts"):
        TextWindow(SHORT, 50, TINY.inputs, 0).arrival(rows, batches)


@pytest.mark.parametrize("name", MODELS)
def test_stored_graphs_are_those_of_the_models(name: str) -> None:
    model = MODELS[name]
    graph = build.load_graph(model.graph).graph
    assert sorted(i.name for i in graph.input) == sorted(model.inputs)
    shapes = [list(t.dims) for t in graph.initializer]
    assert [model.vocabulary, model.hidden] in shapes
    settings = build.manifest()[model.graph]["settings"]
    assert settings.get("num_attention_heads", 12) == model.heads
    assert len(graph.output[0].type.tensor_type.shape.dim) == 2


def test_every_candidate_is_right_and_timed_in_fp32(made: Callable[[str], TextFiles]) -> None:
    files = made("fp32")
    record = measure_point(make_problem(files), CANDIDATES, TextDevice(1), 1)
    assert files.facts["transformers"]["fused"]["Attention"] == 2
    assert files.facts["unpadded"]["unpadded_attentions"] == 2
    assert "unpadded_attentions" not in files.facts["padded"]
    assert list(record["peers"]) == NAMES
    real = record["real_tokens"]
    for name, row in record["peers"].items():
        if name != "openvino" or "us" in row:
            assert row["error"] <= record["tolerance"] == 1e-4
            tokens = real["sorted" if name.endswith("-sorted") else "arrival"]
            assert row["useful_tokens_per_second"] == pytest.approx(tokens / row["us"] * 1e6, rel=0.01)
    peers = record["peers"]
    own = {"ratio": "stof", "ratio_sorted": "stof-sorted"}
    for field, name in own.items():
        assert record[field].keys() == {n for n, row in peers.items() if "us" in row} - {name}
        ratio = peers[name]["useful_tokens_per_second"] / peers["ort"]["useful_tokens_per_second"]
        assert record[field]["ort"] == pytest.approx(ratio, rel=0.01)
    share = record["ratio"]["stof-padded"] / record["padded_over_real"]["arrival"]
    assert record["share_of_padded_over_real"] == pytest.approx(share, rel=0.01)


def test_int8_may_differ_by_what_quantization_changes(made: Callable[[str], TextFiles]) -> None:
    files = made("int8")
    problem = make_problem(files, "int8")
    assert 1e-3 < problem.tolerance < 0.5
    operators = {n.op_type for n in onnx.load(str(files.paths["transformers"])).graph.node}
    assert {"QAttention", "DynamicQuantizeLinear"} <= operators
    rows = Point(problem, [c for c in CANDIDATES if c.engine != "openvino"], TextDevice(1)).rows
    assert all(row["error"] <= problem.tolerance for row in rows.values())


def test_a_candidate_with_other_outputs_is_listed_and_not_timed(made: Callable[[str], TextFiles]) -> None:
    right = made("fp32")
    paths = {**right.paths, "unpadded": made("int8").paths[EXPORTED]}
    wrong = TextFiles(right.fp32, paths, {"transformers": "not made"}, right.facts)
    record = measure_point(make_problem(wrong), CANDIDATES, TextDevice(1), 1)
    for name in ("stof", "stof-sorted"):
        assert "us" not in record["peers"][name]
        assert "wrong result: differs from ONNX Runtime as exported by" in record["peers"][name]["missing"]
    assert record["peers"]["ort-transformers"]["missing"] == "not made"
    assert "ratio" not in record
    assert "us" in record["peers"]["ort"]
    assert any("missing: not made" in line for line in describe_record(record))


def run_tiny(results: Path, *words: str) -> tuple[int, list[dict[str, Any]]]:
    """The command's status, and the records that it stored."""
    words = ("texts", "--models", "tiny", "--batch", "4", "--batches", "1", "--rounds", "1", "--threads", "1", *words)
    status = main([*words, "--results", str(results)])
    path = results / "texts-cpu.json"
    return status, json.loads(path.read_text()) if path.is_file() else []


def test_the_command_stores_times_and_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peers = ("stof", "stof-padded", "ort", "ort-sorted")
    status, (record,) = run_tiny(tmp_path, "--lengths", "padded-256", "--precisions", "fp32", "--peers", *peers)
    assert status == 0
    assert record["key"] == ["tiny", "fp32", "padded-256", 4, 1, 1]
    assert set(record["peers"]) == set(peers)
    assert set(record["memory"]) == set(peers)
    for sizes in record["memory"].values():
        assert sizes["peak"] == sizes["held"] + sizes["above"]
        assert sizes["held"] > 1e7
    row = next(
        line for line in document(tmp_path.parent).splitlines() if line.startswith("| tiny, fp32 | padded-256 |")
    )
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[4] == f"{record['peers']['stof']['useful_tokens_per_second']:,.0f}"
    assert cells[5:10] == [*(f"{record['ratio'][peer]:.2f}" for peer in ("stof-padded", "ort")), "–", "–", cells[9]]
    assert cells[9] == f"{record['ratio']['ort-sorted']:.2f}"
    assert re.fullmatch(r"\d+ MB → \d+ MB", cells[11])
    text = capsys.readouterr().out
    assert "stof, --unpad auto" in text
    assert "tokens/s" in text
    assert "MB, " in text


def test_the_command_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 3 where stof is; a peer that is not installed is no failure."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no such model")

    common = ("--lengths", "pairs", "--precisions", "fp32", "--no-memory", "--peers")
    monkeypatch.setattr("bench.texts.text_models._optimize", refuse)
    status, (record,) = run_tiny(tmp_path / "a", *common, "stof", "ort")
    assert status == 3
    assert record["peers"]["stof"]["missing"] == "RuntimeError: no such model"
    assert "memory" not in record
    monkeypatch.setitem(sys.modules, "openvino", None)
    status, (record,) = run_tiny(tmp_path / "b", *common, "openvino", "ort")
    assert status == 0
    assert "OpenVINO                             absent: openvino is not installed" in capsys.readouterr().out


def test_padding_that_stays_is_a_failure_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    optimize = text_models.optimize
    monkeypatch.setattr(text_models, "optimize", lambda *a: optimize(*a[:2], replace(a[2], skip=("unpad:*",))))
    status, (record,) = run_tiny(
        tmp_path, "--lengths", "pairs", "--precisions", "fp32", "--no-memory", "--peers", "stof", "ort"
    )
    assert status == 3
    assert record["files"]["unpadded"]["unpadded_attentions"] == 0
    assert "padding stays: " in capsys.readouterr().out


def test_wrong_arguments_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tiny(tmp_path, "--peers", "nobody")[0] == 1
    assert "no candidate nobody" in capsys.readouterr().err
    assert main(["texts", "--models", "reranker", "--lengths", "longest", "--threads", "1"]) == 1
    assert "reranker is timed with pairs" in capsys.readouterr().err
