# SPDX-License-Identifier: Apache-2.0
"""MLPs with true zeros as exporters write them from transformers' classes: which are found, and that outputs stay the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import build
import stof
from stof.options import Options
from stof.sparse_mlp.find import find_mlps
from stof.sparse_mlp.site import OP
from stof.symbolic import Symbolic

pytestmark = pytest.mark.usefixtures("small_mlps_gain")

# By architecture: activation, whether up values are computed for active neurons alone, the neurons, and whether one matmul
# gives gate and up.
EXPECTED = {
    "arcee": ("relu2", False, 160, False),
    "bitnet": ("none", False, 160, False),  # a norm stands between gate · up and the last matmul
    "gemma3n": ("none", True, 640, False),
    "glm4-relu": ("relu", True, 160, True),
    "nemotron": ("relu2", False, 160, False),
    "opt": ("relu", False, 160, False),
    "persimmon": ("relu2", False, 160, False),
    "phi3-relu": ("relu", True, 160, True),
}
NAMES = [n for n in build.names() if n.startswith("mlp/")]
# One form of each, of changing exporters.
RUN = ["gemma3n.torchscript.eager", "phi3-relu.dynamo.sdpa", "bitnet.dynamo.sdpa"]


def test_every_architecture_is_there() -> None:
    assert {n.removeprefix("mlp/").partition(".")[0] for n in NAMES} == set(EXPECTED)


@pytest.mark.parametrize("name", NAMES)
def test_mlps_are_found(name: str) -> None:
    model = build.load_graph(name)
    found = find_mlps(model, Symbolic(model))
    architecture = name.removeprefix("mlp/").partition(".")[0]
    assert len(found) == (1 if architecture == "gemma3n" else 2)  # its second layer keeps all neurons
    for candidate in found:
        site = candidate.site
        assert site is not None, candidate.reason
        is_packed = site.projection is not None and site.projection.is_packed
        assert (site.activation, site.up is not None, site.neurons, is_packed) == EXPECTED[architecture]
        # Neurons may be reordered wherever one matmul is behind the activation.
        assert (site.projection is not None and site.projection.is_movable) == (architecture != "bitnet")


def feeds(model: onnx.ModelProto, seed: int, batch: int = 2, tokens: int = 4, past: int = 6) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    found = {}
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        if value.name == "input_ids":
            found[value.name] = rng.integers(3, 90, (batch, tokens))
        elif value.name == "attention_mask":
            found[value.name] = np.ones((batch, past + tokens), np.int64)
        else:
            shape = (batch, dims[1].dim_value, past, dims[3].dim_value)
            found[value.name] = rng.standard_normal(shape).astype(np.float32)
    return found


@pytest.mark.parametrize("name", RUN)
def test_exported_model_gives_the_same(name: str, tmp_path: Path) -> None:
    """Counted on inputs, ordered where that is possible, verified, and run again here."""
    source, target = tmp_path / "model.onnx", tmp_path / "out.onnx"
    build.write(f"mlp/{name}", source)
    model = onnx.load(str(source))
    np.savez(tmp_path / "inputs.npz", **feeds(model, 0))
    options = Options(inputs=(str(tmp_path / "inputs.npz"),), chains="off")
    report = stof.optimize(source, target, options)
    rows = report.sections["mlps"].to_json()["mlps"]
    assert all(r["replaced"] for r in rows), [r["reason"] for r in rows]
    if name.startswith("gemma3n"):
        assert rows[0]["density"] == pytest.approx(0.05, abs=0.015)
        # In front of the op stand Gemma's own gate, threshold and GELU, all of which stay.
        assert [r["sizes"] for r in rows] == ["gated, 640 neurons"]
    assert [n.op_type for n in onnx.load(str(target)).graph.node].count(OP) == len(rows)
    session = ort.SessionOptions()
    stof.register(session)
    one = ort.InferenceSession(str(source), providers=["CPUExecutionProvider"]).run(None, feeds(model, 1))
    other = ort.InferenceSession(str(target), session, providers=["CPUExecutionProvider"]).run(None, feeds(model, 1))
    for wanted, found in zip(one, other, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=2e-4 * np.abs(wanted).max())
