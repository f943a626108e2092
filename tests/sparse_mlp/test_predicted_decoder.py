# SPDX-License-Identifier: Apache-2.0
"""--sparse-mlp on a decoder with a KV cache: calibration on its inputs, and the loss of whole prompts and of decoding."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import stof
from stof.errors import VerifyError
from stof.execution.inputs import InputMaker
from stof.options import Options
from stof.prompt_runs.feeds import make_feed
from stof.sparse_mlp.report import MlpSection
from stof.symbolic import Symbolic

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cached_attention"))
from gqa_models import Shape, model_of

pytestmark = pytest.mark.usefixtures("small_mlps_gain")

WORDS, NEURONS = 31, 192
SHAPE = Shape(H=4, G=2, D=16, packed=True, rotary=16)
SIZE = SHAPE.H * SHAPE.D


def decoder(path: Path) -> Path:
    """Tokens, embedding, attention over a cache, a gated MLP with its residual, logits; lengths from an attention mask."""
    rng = np.random.default_rng(1)
    model = model_of(SHAPE, masks=True)
    graph = model.graph
    width = (SHAPE.H + 2 * SHAPE.G) * SHAPE.D
    sizes = {
        "embedding": (WORDS, width),
        "gate": (SIZE, NEURONS),
        "up": (SIZE, NEURONS),
        "down": (NEURONS, SIZE),
        "head": (SIZE, WORDS),
    }
    tables = {n: rng.standard_normal(s) / (1 if n == "embedding" else np.sqrt(s[0])) for n, s in sizes.items()}
    angles = np.arange(512)[:, None] * 0.7 / (1 + np.arange(8))
    tables |= {"cos": np.cos(angles), "sin": np.sin(angles)}
    graph.initializer.extend(numpy_helper.from_array(a.astype(np.float32), n) for n, a in tables.items())
    kept = [i for i in graph.input if i.name not in ("query", "cos", "sin")]
    del graph.input[:]
    graph.input.extend([helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["B", "S"]), *kept])
    graph.node.insert(0, helper.make_node("Gather", ["embedding", "input_ids"], ["query"]))
    for op, inputs, output in (
        ("MatMul", ["output", "gate"], "gated"),
        ("Sigmoid", ["gated"], "sigmoid"),
        ("Mul", ["gated", "sigmoid"], "silu"),
        ("MatMul", ["output", "up"], "upper"),
        ("Mul", ["silu", "upper"], "hidden"),
        ("MatMul", ["hidden", "down"], "lower"),
        ("Add", ["output", "lower"], "residual"),
        ("MatMul", ["residual", "head"], "logits"),
    ):
        graph.node.append(helper.make_node(op, inputs, [output], name=f"/{output}"))
    presents = list(graph.output)[1:]
    del graph.output[:]
    graph.output.extend([helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["B", "S", WORDS]), *presents])
    onnx.save(model, path)
    return path


def test_decoder_is_calibrated_and_measured_with_its_cache(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    prompts = tmp_path / "p.npz"
    np.savez(prompts, *[rng.integers(0, WORDS, 24) for _ in range(10)])
    options = Options(sparse_mlp=f"{prompts},kind=svd,active=0.5,rank=24", max_kl=1e9)
    report = stof.optimize(decoder(tmp_path / "model.onnx"), tmp_path / "out.onnx", options)
    section = report.sections["mlps"]
    assert isinstance(section, MlpSection)
    assert [r.selection for r in section.rows] == ["predictor"]
    assert report.caches[0].replaced
    assert section.loss is not None
    assert section.loss.whole.tokens == 48
    assert 0 < section.loss.whole.kl < 1
    assert section.loss.decoded is not None
    assert section.loss.decoded.tokens == 16
    # Each token of a prompt has the same neurons, decoded or not: both losses are of the same kind of numbers.
    assert 0 < section.loss.decoded.kl < 10 * section.loss.whole.kl
    assert "loss of decoding on 2 prompts, 16 tokens" in report.to_text()


def test_patterns_and_predicted_neurons_have_one_loss(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    prompts = tmp_path / "p.npz"
    np.savez(prompts, *[rng.integers(0, WORDS, 24) for _ in range(5)])
    options = Options(sparse_mlp=f"{prompts},active=0.5", sparsify="window=8,sink=2", max_kl=1e9)
    report = stof.optimize(decoder(tmp_path / "model.onnx"), tmp_path / "out.onnx", options)
    section = report.sections["mlps"]
    assert report.sparsity is not None
    assert report.sparsity.loss is not None
    assert section.loss is not None
    assert section.loss.whole == report.sparsity.loss
    first = report.to_text().split("\n")[0]
    assert "--sparsify puts a pattern on 1 of 1 attentions" in first
    assert "--sparse-mlp computes only selected neurons in 1 of 1 MLPs" in first
    with pytest.raises(VerifyError, match="--sparsify with --sparse-mlp changes outputs too much"):
        stof.optimize(tmp_path / "model.onnx", tmp_path / "out.onnx", replace(options, max_kl=1e-9))


def test_inputs_of_a_prompt_without_padding_and_past() -> None:
    """Masks hold ones, token types zeros, positions count from 0, and pasts that Concat continues have no row."""
    value = helper.make_tensor_value_info
    inputs = [
        value(n, TensorProto.INT64, ["B", s])
        for n, s in (("input_ids", "S"), ("attention_mask", "P + S"), ("position_ids", "S"))
    ]
    inputs += [
        value("token_type_ids", TensorProto.INT64, ["B", "S"]),
        value("past", TensorProto.FLOAT, ["B", 2, "P", 4]),
    ]
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["rows"]),
        helper.make_node("Concat", ["past", "rows"], ["present"], axis=2),
        helper.make_node("Add", ["attention_mask", "token_type_ids"], ["sum"]),
        helper.make_node("Identity", ["position_ids"], ["positions"]),
    ]
    outputs = [
        value("present", TensorProto.FLOAT, None),
        value("sum", TensorProto.INT64, None),
        value("positions", TensorProto.INT64, None),
    ]
    table = numpy_helper.from_array(np.ones((9, 2, 1, 4), np.float32), "table")
    model = helper.make_model(helper.make_graph(nodes, "g", inputs, outputs, [table]))
    maker = InputMaker(model, Symbolic(model), frozenset())
    feed = make_feed(maker, np.array([3, 1, 4]))
    assert feed["input_ids"].tolist() == [[3, 1, 4]]
    assert feed["attention_mask"].tolist() == [[1, 1, 1]]
    assert feed["token_type_ids"].tolist() == [[0, 0, 0]]
    assert feed["position_ids"].tolist() == [[0, 1, 2]]
    assert feed["past"].shape == (1, 2, 0, 4)
