# SPDX-License-Identifier: Apache-2.0
"""The accuracy of trained models whose attentions round as kernels with 8-bit operands do.

Texts have 1,024 bytes, and 4,096 with STOF_TEST_ALL=1. ``models/README.md`` says what the models are.
"""

from __future__ import annotations

import sys
from pathlib import Path

import onnx
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "sparsify"))
from trained_runs import ALL, NAMES, evaluate, texts_of, write_model

# isort: split
import stof
from stof.arguments.precisions import INT8, INT8_FP8
from stof.attention_precision.eight_bit_emulation import emulate_eight_bits
from stof.thresholds.layers import nodes_by_layer

LENGTH, COUNT = (4096, 100) if ALL else (1024, 8)


@pytest.mark.parametrize("name", NAMES)
def test_trained_models_find_records(name: str, tmp_path: Path) -> None:
    """At most 0.5 points fewer than in full precision."""
    model = stof.optimize(onnx.load(write_model(tmp_path, name)), target="cuda", chains="off", verify=False)
    texts = texts_of(name, LENGTH, COUNT, seed=5)
    exact = evaluate(model, name, texts)[0]
    assert exact >= 0.98
    for precision in (INT8, INT8_FP8):
        emulated = emulate_eight_bits(model, dict.fromkeys(nodes_by_layer(model), precision))
        accuracy = evaluate(emulated, name, texts)[0]
        print(f"{name}, {LENGTH} bytes, {precision.name}: {100 * accuracy:.2f} %, full precision {100 * exact:.2f} %")
        assert accuracy >= exact - 0.005
