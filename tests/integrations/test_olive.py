# SPDX-License-Identifier: Apache-2.0
"""Olive: ``olive run`` finds the pass, whose model gives the original's outputs; GenAI's configuration names the library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from guide_pages import read_blocks
from olive.hardware.accelerator import AcceleratorSpec
from olive.model import ONNXModelHandler
from olive.workflows import run as run_olive
from tests.cached_attention.gqa_models import Shape, model_of
from text_models import LAYERS
from tool_folders import ROOT, assert_close, run_program

import stof
from stof.integrations.olive import StofOptimize, package_config
from stof.runtime.library import LIBRARY

WORKFLOW = json.loads((ROOT / "examples/olive/workflow.json").read_text())


def outputs(model: Path, options: ort.SessionOptions) -> list[np.ndarray]:
    session = ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    mask = (np.arange(24) < np.array([[24], [9], [1]])).astype(np.int64)
    feeds = {
        "input_ids": rng.integers(5, 60, mask.shape) * mask,
        "attention_mask": mask,
        "token_type_ids": np.zeros_like(mask),
    }
    return session.run(None, {node.name: feeds[node.name] for node in session.get_inputs()})


def workflow(folder: Path, model: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """The example's workflow for a model, with settings of the pass."""
    return {
        **WORKFLOW,
        "input_model": {**WORKFLOW["input_model"], **model},
        "passes": {"stof": {**WORKFLOW["passes"]["stof"], **settings}},
        "output_dir": str(folder / "optimized"),
        "cache_dir": str(folder / "cache"),
    }


def test_page_runs_the_example(folders: Path, tmp_path: Path) -> None:
    """The commands of the page, with the workflow that it shows, on a classifier."""
    commands, shown = read_blocks(ROOT / "docs/guide/olive.md")[:2]
    assert json.loads(shown.text) == WORKFLOW
    (tmp_path / "workflow.json").write_text(shown.text)
    (tmp_path / "model.onnx").write_bytes((folders / "classifier/model.onnx").read_bytes())
    assert len(commands.lines()) == 2
    for line in commands.lines():
        run_program(*line.split(), cwd=tmp_path)
    optimized = tmp_path / "optimized/model.onnx"
    nodes = [node for node in onnx.load(str(optimized)).graph.node if node.op_type == "StofAttention"]
    assert len(nodes) == LAYERS
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(optimized.with_name(LIBRARY)))
    wanted = outputs(tmp_path / "model.onnx", ort.SessionOptions())
    for given in (options, ort.SessionOptions()):  # by operators, and by bodies, as Olive's evaluators run it
        for one, other in zip(outputs(optimized, given), wanted, strict=True):
            assert_close(one, other, "olive run")


def test_settings_reach_the_optimizer(folders: Path, tmp_path: Path) -> None:
    model = {"model_path": str(folders / "features/model.onnx")}
    settings = {"unpad": "on", "options": {"verify": False, "only": ["0"], "json": str(tmp_path / "report.json")}}
    run_olive(workflow(tmp_path, model, **settings), package_config=package_config())
    report = json.loads((tmp_path / "report.json").read_text())
    assert [site["replaced"] for site in report["sites"]] == [True] + [False] * (LAYERS - 1)
    assert report["verification"] is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"options": {"verify_bugdet": 3}}, "verify_bugdet"),
        ({"unpad": "maybe"}, "'maybe'"),
        ({"options": {"unpad": "on"}}, "'unpad', which is a setting of the pass"),
        ({"options": {"target": "cuda"}}, "'target', which is a setting of the pass"),
        ({"options": {"output": "fast.onnx"}}, "'output', which is Olive's"),
        ({"options": {"dry_run": True}}, "'dry_run', which would write no model"),
        ({"options": {"explain": "*"}}, "'explain', which would write no model"),
    ],
)
def test_errors_are_those_of_stof(folders: Path, tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    spec = AcceleratorSpec("cpu", "CPUExecutionProvider")
    config = StofOptimize.generate_config(spec, settings, disable_search=True)
    model = ONNXModelHandler(model_path=str(folders / "features/model.onnx"))
    with pytest.raises(stof.ArgumentError, match=words):
        StofOptimize(spec, config).run(model, str(tmp_path / "out"))


@pytest.mark.parametrize(
    ("device", "provider", "target"),
    [
        ("cpu", "CPUExecutionProvider", "cpu"),
        ("gpu", "CUDAExecutionProvider", "cuda"),
        ("gpu", "TensorrtExecutionProvider", "tensorrt"),
        ("cpu", None, "cpu"),
    ],
)
def test_target_follows_the_provider(device: str, provider: str | None, target: str) -> None:
    spec = AcceleratorSpec(device, provider)
    assert StofOptimize.generate_config(spec, {}, disable_search=True).target == target
    assert not StofOptimize.is_accelerator_agnostic(spec)


def test_genai_configuration_names_the_library(tmp_path: Path) -> None:
    """A decoder that Olive keeps with its genai_config.json: what Olive writes loads the library by itself."""
    source = tmp_path / "decoder"
    source.mkdir()
    onnx.save(model_of(Shape(H=4, G=2, D=16, packed=True)), str(source / "model.onnx"))
    config = {"model": {"decoder": {"filename": "model.onnx", "session_options": {}}}}
    (source / "genai_config.json").write_text(json.dumps(config))
    (source / "tokenizer.json").write_text("{}")
    added = [str(source / name) for name in ("genai_config.json", "tokenizer.json")]
    model = {"model_path": str(source / "model.onnx"), "model_attributes": {"additional_files": added}}
    run_olive(workflow(tmp_path, model), package_config=package_config())
    result = tmp_path / "optimized"
    written = json.loads((result / "genai_config.json").read_text())
    assert written["model"]["decoder"]["session_options"] == {"custom_ops_library": LIBRARY}
    assert json.loads((source / "genai_config.json").read_text()) == config
    assert (result / LIBRARY).read_bytes() == Path(stof.get_library_path()).read_bytes()
    assert (result / "tokenizer.json").is_file()
    (node,) = onnx.load(str(result / "model.onnx")).graph.node
    assert node.op_type == "StofCachedAttention"


def test_a_model_with_nothing_to_replace_is_copied(tmp_path: Path) -> None:
    graph = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[2] x) => (float[2] y) {y = Relu (x)}'
    )
    onnx.save(graph, str(tmp_path / "model.onnx"))
    run_olive(workflow(tmp_path, {"model_path": str(tmp_path / "model.onnx")}), package_config=package_config())
    assert onnx.load(str(tmp_path / "optimized/model.onnx")).graph.node == graph.graph.node
    assert not (tmp_path / "optimized" / LIBRARY).exists()


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="cannot be written: No such file or directory"):
        run_program("python", "-m", "stof.integrations.olive", tmp_path / "none/config.json")
