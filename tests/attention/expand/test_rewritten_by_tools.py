# SPDX-License-Identifier: Apache-2.0
"""Graphs rewritten by other tools: ONNX Runtime's optimizers and quantizers, onnxscript's fusions."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from fused_attention_nodes import forced
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_dynamic, quantize_static

from stof.report import Report

Narrow = Callable[[str], Path]


def optimized_by_runtime(source: Path, target: Path) -> None:
    """What a session at the extended level saves: FusedMatMul, SkipLayerNormalization, nodes without a domain."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(target)
    options.log_severity_level = 4
    ort.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])


def optimized_by_scripts(source: Path, target: Path) -> None:
    """ONNX Runtime's Python optimizer, as for BERT."""
    from onnxruntime.transformers import optimizer

    found: Any = optimizer.optimize_model(str(source), "bert", num_heads=0, hidden_size=0, opt_level=0)
    found.save_model_to_file(str(target))


def fused_by_onnxscript(source: Path, target: Path) -> None:
    """Onnxscript's fusions for ONNX Runtime."""
    import onnx_ir
    from onnxscript.rewriter.ort_fusions import optimize_for_ort

    found: Any = optimize_for_ort(onnx_ir.load(str(source)))
    onnx_ir.save(found[0] if isinstance(found, tuple) else found, str(target))


def quantized(source: Path, target: Path) -> None:
    """Dynamic quantization of all MatMuls with weights."""
    quantize_dynamic(str(source), str(target), weight_type=QuantType.QInt8)


class _Samples(CalibrationDataReader):
    def __init__(self, source: Path) -> None:
        names = [i.name for i in onnx.load(source).graph.input]
        rng = np.random.default_rng(0)
        self.samples = iter(
            [
                {
                    n: (rng.integers(0, 90, (2, 24)) if n == "input_ids" else np.ones((2, 24))).astype(np.int64)
                    for n in names
                }
                for _ in range(2)
            ]
        )

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.samples, None)


def quantized_by_samples(source: Path, target: Path) -> None:
    """Static quantization with QuantizeLinear and DequantizeLinear around every MatMul, those of the core among them."""
    quantize_static(str(source), str(target), _Samples(source), op_types_to_quantize=["MatMul"])


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """The tools warn and log about what is none of ours."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def rewritten(
    narrow: Narrow, tmp_path: Path, name: str, tool: Callable[[Path, Path], None]
) -> tuple[Report, Counter[str]]:
    """Optimizes, with verification, what a tool makes of a narrow model; the operators that it wrote."""
    target = tmp_path / "rewritten.onnx"
    tool(narrow(name), target)
    model = onnx.load(target)
    folder = tmp_path / "result"
    folder.mkdir()
    report, _ = forced(model, folder)
    return report, Counter(n.op_type for n in model.graph.node)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("tool", "name", "wrote"),
    [
        (optimized_by_runtime, "bert.torchscript.eager", "FusedMatMul"),
        (optimized_by_runtime, "gemma3.torchscript.sdpa", "SimplifiedLayerNormalization"),
        (optimized_by_runtime, "modernbert.dynamo.sdpa", "FusedMatMul"),
        (optimized_by_scripts, "bert.torchscript.eager", "SkipLayerNormalization"),
        (optimized_by_scripts, "bert.dynamo.sdpa", "SkipLayerNormalization"),
        (fused_by_onnxscript, "bert.dynamo.sdpa", "Attention"),
        (fused_by_onnxscript, "modernbert.dynamo.sdpa", "MultiHeadAttention"),
        (fused_by_onnxscript, "mistral.dynamo.sdpa", "MultiHeadAttention"),
        (quantized, "bert.torchscript.sdpa", "MatMulInteger"),
        (quantized, "mistral.torchscript.sdpa", "MatMulInteger"),
        (quantized, "embeddinggemma.dynamo.eager", "MatMulInteger"),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_replaced(narrow: Narrow, tmp_path: Path, tool: Callable[[Path, Path], None], name: str, wrote: str) -> None:
    """Every site is replaced with the mask that it has in the exported graph, and verification passes."""
    report, operators = rewritten(narrow, tmp_path, name, tool)
    assert operators[wrote] > 0
    assert report.sites
    assert all(s.replaced for s in report.sites), [s.reason for s in report.sites]
    plain_folder = tmp_path / "plain"
    plain_folder.mkdir()
    plain, _ = forced(onnx.load(narrow(name)), plain_folder)
    assert [s.mask for s in report.sites] == [s.mask for s in plain.sites]


@pytest.mark.filterwarnings("ignore")
def test_quantized_core(narrow: Narrow, tmp_path: Path) -> None:
    """Scores and weights that are quantized: the operator rounds them as the graph does."""
    report, operators = rewritten(narrow, tmp_path, "bert.torchscript.sdpa", quantized_by_samples)
    assert operators["QuantizeLinear"] > 0
    assert [s.replaced for s in report.sites] == [True, True]
    assert all("rounded scores" in s.form for s in report.sites)
