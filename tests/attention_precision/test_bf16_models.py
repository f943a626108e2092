# SPDX-License-Identifier: Apache-2.0
"""--allow-bf16 in models of other types and forms: half precision, pages, texts without padding, subgraphs."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from onnx import parser
from precision_runs import HAS_KERNEL, flags_of, run, simulate_attribute

# isort: split
import gqa_models
import paged_models
import skip_models
import test_prompts
from encoders import encoder
from test_subgraphs import MERGED

from stof import cli

TYPES = ("float32", "float16", "bfloat16")
WARNING = "this machine has no bf16 kernel: errors and loss, where measured, are those of full precision"


@pytest.fixture(name="known", autouse=True)
def simulated_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_attribute(monkeypatch)


def saved(model: onnx.ModelProto, folder: Path) -> Path:
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


def check_every_node(path: Path, folder: Path, *options: str) -> dict[str, float]:
    """Optimizes a model: every attention gets the attribute, and its error is known. The errors by node."""
    status, target, report = run(folder, path, "--allow-bf16", *options)
    assert status == 0
    flags = flags_of(target)
    assert flags
    assert set(flags.values()) == {1}
    found = report["attention_precision"]
    assert (WARNING in found["warnings"]) != HAS_KERNEL
    assert len(found["warnings"]) == (not HAS_KERNEL)
    return {row["node"]: row["relative_rms"] for row in found["layers"]}


@pytest.mark.parametrize("dtype", TYPES)
def test_caches(dtype: str, tmp_path: Path) -> None:
    """The output's own rounding is part of the error: 2^-11 in fp16, 2^-8 in bf16."""
    model = gqa_models.model_of(gqa_models.Shape(dtype=dtype, rotary=16), masks=True)
    (error,) = check_every_node(saved(model, tmp_path), tmp_path).values()
    assert 0 < error < 0.01


@pytest.mark.parametrize("dtype", TYPES)
def test_pages(dtype: str, tmp_path: Path) -> None:
    model = paged_models.model_of(paged_models.Shape(packed=True, rotary=16, metadata=True, dtype=dtype))
    (error,) = check_every_node(saved(model, tmp_path), tmp_path).values()
    assert 0 < error < 0.01


def test_folders_of_genai(tmp_path: Path) -> None:
    """StofCachedAttention of the model gets the attribute, and the configuration registers the library."""
    source, target, report = tmp_path / "built", tmp_path / "optimized", tmp_path / "report.json"
    source.mkdir()
    test_prompts.decoder(source)
    session = {"filename": "model.onnx", "session_options": {"provider_options": []}}
    config = {"model": {"type": "llama", "decoder": session}, "search": {"past_present_share_buffer": True}}
    (source / "genai_config.json").write_text(json.dumps(config))
    assert (
        cli.main([str(source), "-o", str(target), "--allow-bf16", "--force", "--no-verify", "--json", str(report)]) == 0
    )
    assert list(flags_of(target / "model.onnx").values()) == [1]
    written = json.loads((target / "genai_config.json").read_text())
    assert "custom_ops_library" in json.dumps(written)
    (model,) = json.loads(report.read_text())["files"].values()
    assert [row["op"] for row in model["attention_precision"]["layers"]] == ["StofCachedAttention"]


def test_half_precision(tmp_path: Path) -> None:
    """An encoder in fp16, whose tensors are computed widened and rounded."""
    float16 = pytest.importorskip("onnxruntime.transformers.float16")
    model = float16.convert_float_to_float16(onnx.load(skip_models.encoder(tmp_path / "single.onnx", padding=True)))
    errors = check_every_node(saved(model, tmp_path), tmp_path)
    assert len(errors) == 2
    assert all(1e-5 < error < 0.01 for error in errors.values())


def test_texts_without_padding(tmp_path: Path) -> None:
    """Packed sequences: the node reads other tensors than its site, and has its name."""
    path = saved(encoder("mean"), tmp_path)
    errors = check_every_node(path, tmp_path)
    assert all(0 < error < 0.01 for error in errors.values())
    nodes = [n for n in onnx.load(tmp_path / "out.onnx").graph.node if n.op_type == "StofAttention"]
    assert all(any(a.name == "operands" and b"first_position" in a.s for a in n.attribute) for n in nodes)


def test_subgraphs(tmp_path: Path) -> None:
    """Their tensors are no outputs of the model: errors are not known, and attention keeps full precision without --force."""
    path = saved(parser.parse_model(MERGED), tmp_path)
    status, target, report = run(tmp_path, path, "--allow-bf16")
    assert status == 0
    assert list(flags_of(target).values()) == [0, 0]
    found = report["attention_precision"]
    assert [row["relative_rms"] for row in found["layers"]] == [None, None]
    assert all(row["reason"].startswith("its error is not known: it lies in a subgraph,") for row in found["layers"])
    status, target, report = run(tmp_path, path, "--allow-bf16", "--force")
    assert status == 0
    assert list(flags_of(target).values()) == [1, 1]
    found = report["attention_precision"]
    assert any(
        w.startswith("the error of 2 attentions is not known: it lies in a subgraph,") for w in found["warnings"]
    )
