# SPDX-License-Identifier: Apache-2.0
"""The accuracy of trained models whose attentions round as kernels with 8-bit operands do.

Texts have 1,024 bytes, and 4,096 with STOF_TEST_ALL=1. ``models/README.md`` says what the models are.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "sparsify"))
from trained_runs import ALL, NAMES, evaluate, texts_of, write_model

# isort: split
from retrieval_numpy import SCALE, Model  # in a folder that trained_runs adds

import stof
from stof.arguments.precisions import INT8, INT8_FP8
from stof.attention.checks.eight_bit_model import FULL_PRECISION, SCORES_ALONE, KeyValueHead, Scheme
from stof.attention_precision.eight_bit_emulation import emulate_eight_bits
from stof.thresholds.layers import nodes_by_layer

LENGTH, COUNT = (4096, 100) if ALL else (1024, 8)
ROWS = 512  # of each head, whose errors are measured


@pytest.mark.parametrize("name", NAMES)
def test_errors_of_layers(name: str) -> None:
    """Of sharp attention: few rows have most of the error, those whose largest scores are nearly equal."""
    model, (text,) = Model(name), texts_of(name, LENGTH, 1, seed=3)
    x = model.embed(text.ids[0])
    rows = np.sort(np.random.default_rng(3).permutation(LENGTH)[:ROWS])
    masks = (np.tri(LENGTH, dtype=bool), np.tri(LENGTH, dtype=bool)[rows]) if model.is_causal else (None, None)
    for layer in range(model.layers):
        q, k, v = (a.astype(np.float64) for a in model.project(layer, x))
        heads = range(len(q))
        exact = np.stack([KeyValueHead.of(k[h], v[h], FULL_PRECISION).attend(q[h], SCALE, masks[0]) for h in heads])
        errors = []
        for scheme in (SCORES_ALONE, Scheme()):
            some = [KeyValueHead.of(k[h], v[h], scheme).attend(q[h, rows], SCALE, masks[1]) for h in heads]
            errors.append(float(np.sqrt(np.square(some - exact[:, rows]).sum() / np.square(exact[:, rows]).sum())))
        print(f"{name}, layer {layer}: int8 {100 * errors[0]:.2f} %, int8_fp8 {100 * errors[1]:.2f} %")
        assert 1e-4 < errors[0] < 0.03
        assert errors[0] < errors[1] < INT8_FP8.max_error
        x = model.finish(layer, x, exact.astype(np.float32))


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
