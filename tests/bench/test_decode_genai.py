# SPDX-License-Identifier: Apache-2.0
"""``python -m bench decode-genai`` with a runtime of its own: what is asked of it, and what becomes of the times."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench import cli
from bench.cpu import decode_genai
from bench.numbers_page import document
from stof.bench.results import store_all


class FakeGenerator:
    """Counts tokens; the next one is their number."""

    def __init__(self, model: Any, parameters: Any) -> None:
        self.model, self.options, self.count = model, parameters.options, 0
        model.generators.append(self)

    def append_tokens(self, ids: np.ndarray) -> None:
        assert ids.dtype == np.int32
        assert (ids >= 3).all()
        assert (ids < 100).all()
        time.sleep(1e-4)
        self.model.appended.append(len(ids))
        self.count += len(ids)

    def generate_next_token(self) -> None:
        time.sleep(1e-4)
        self.count += 1
        assert self.count <= self.options["max_length"]

    def get_next_tokens(self) -> list[int]:
        return [self.count]


class FakeConfig:
    def __init__(self, folder: str) -> None:
        self.folder, self.overlaid = folder, ""

    def overlay(self, text: str) -> None:
        self.overlaid = text


class FakeModel:
    def __init__(self, config: FakeConfig) -> None:
        if config.folder.endswith("refused"):
            raise RuntimeError("no library")
        self.config = config
        self.appended: list[int] = []
        self.generators: list[FakeGenerator] = []
        models.append(self)


class FakeParameters:
    def __init__(self, model: FakeModel) -> None:
        self.options: dict[str, Any] = {}

    def set_search_options(self, **options: Any) -> None:
        self.options = options


models: list[FakeModel] = []


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    runtime = SimpleNamespace(
        Config=FakeConfig, Model=FakeModel, GeneratorParams=FakeParameters, Generator=FakeGenerator, __version__="0"
    )
    monkeypatch.setattr(decode_genai, "require", lambda name: runtime)
    monkeypatch.setattr(decode_genai.measure, "rates", lambda threads: {"read_gbps": 1.0})
    models.clear()
    (tmp_path / "model").mkdir()
    text = json.dumps({"model": {"context_length": 2000, "vocab_size": 100}})
    (tmp_path / "model" / "genai_config.json").write_text(text)
    return tmp_path / "model"


def test_one_sequence_grows_from_context_to_context(folder: Path) -> None:
    folders = {"original": folder, "optimized": folder}
    records = list(decode_genai.measure_contexts(folders, [100, 1200], 5, 2))
    assert [r["shape"]["context"] for r in records] == [100, 1200]
    assert [r["prompt"]["tokens"] for r in records] == [100, 1200 - 108]
    assert [r["same_tokens"] for r in records] == [8, 8]
    for model in models:
        assert model.appended == [100, 512, 512, 68]
        assert model.generators[0].count == 1208
        options = json.loads(model.config.overlaid)["model"]["decoder"]["session_options"]
        assert options["intra_op_num_threads"] == 2
    for record in records:
        for key in ("seconds", "median_seconds", "cpu_seconds", "least_cpu_seconds"):
            assert set(record[key]) == {"original", "optimized"}
        for name in folders:
            assert record["least_cpu_seconds"][name] <= record["cpu_seconds"][name]
        assert "tokens/s" in decode_genai.describe_record(record)[1]


@pytest.mark.parametrize(
    ("contexts", "words"),
    [([100, 104], "context 104 is not above the 108 tokens before it"), ([100, 1995], "2003 tokens exceed")],
)
def test_contexts_that_cannot_be(contexts: list[int], words: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=words):
        list(decode_genai.measure_contexts({"original": folder, "optimized": folder}, contexts, 5, 1))


def test_a_folder_that_the_runtime_refuses_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (refused := folder.parent / "refused").mkdir()
    results = folder.parent / "results"
    arguments = ["decode-genai", str(folder), "--optimized", str(refused), "--contexts", "9", "--threads", "1"]
    assert cli.main([*arguments, "--results", str(results)]) == 1
    assert f"ONNX Runtime GenAI refuses {refused}: no library" in capsys.readouterr().err
    assert not results.exists()


def test_the_page_of_numbers_has_a_row_for_each_context(folder: Path) -> None:
    records = list(decode_genai.measure_contexts({"original": folder, "optimized": folder}, [100, 1200], 5, 2))
    for record, original in zip(records, (0.02, 0.5), strict=True):
        record["machine"]["fma_gflops"] = 1.0
        record["seconds"] = {"original": original, "optimized": 0.01}
        record["cpu_seconds"] = {"original": 0.3, "optimized": 0.1}
    store_all(folder.parent / "results" / "decode-genai.json", records[::-1])
    page = document(folder.parent / "results")
    assert "| model | 100 | 2 | 50.0 | 100.0 | 2.00 | 3.00 |\n| model | 1200 | 2 | 2.0 | 100.0 | 50.00 | 3.00 |" in page
