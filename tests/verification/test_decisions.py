# SPDX-License-Identifier: Apache-2.0
"""Outputs whose length or index a rounding decides: shown to be that, or a failure.

The kind: the audio of a dynamically quantized voice model has another length with the optimized file (81,000 samples) than with
the original (77,400), which gives the same length at every level of graph optimizations.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.reference
import pytest
from onnx import numpy_helper, parser
from voice_models import HOP, VoiceForm, make_voice_model, quantize_dynamically

from stof import cli
from stof.execution.run_limits import RunLimits
from stof.graph.index import GraphIndex
from stof.symbolic import Symbolic
from stof.verification.decisions.find_decisions import find_decisions, find_held
from stof.verification.decisions.held_models import add_outputs, cut_decision, free_name, hold_tensors
from stof.verification.result import Verification
from stof.verification.verifier import Verifier

_LENGTHS = """<ir_version: 9, opset_import: ["": 18]>
voice (float[1, S] x, float[1, S] tone) => (float[1, samples] audio, int64[1, S] durations)
<float near = {NEAR}, float one = {1.0}, float gain = {GAIN}, int64[1] last = {-1}, int64 zero = {0}, int64 step = {1}>
{
    whole = Floor(x)
    size = Abs(whole)
    value = Add(size, near)
    rounded = DECIDE(value)
    longest = Clip(rounded, one)
    durations = Cast <to = 7> (longest)
    total = ReduceSum <keepdims = 0> (durations)
    frames = Range(zero, total, step)
    times = Cast <to = 1> (frames)
    mean = ReduceMean <keepdims = 1> (tone, last)
    waves = Mul(times, mean)
    sound = Sin(waves)
    loud = Mul(sound, gain)
    audio = Unsqueeze(loud, zero_axis)
}"""


def _model(near: float = 0.4999999, gain: float = 0.5, decide: str = "Round") -> onnx.ModelProto:
    """Durations of whole numbers plus ``near``, which ``decide`` rounds, and audio of as many samples."""
    text = _LENGTHS.replace("NEAR", f"{near:.9f}").replace("GAIN", f"{gain:.6f}").replace("DECIDE", decide)
    text = text.replace("int64 zero =", "int64[1] zero_axis = {0}, int64 zero =")
    return parser.parse_model(text)


def _verify(original: onnx.ModelProto, final: onnx.ModelProto, folder: Path) -> Verification:
    source = folder / "model.onnx"
    onnx.save(original, source)
    return Verifier(original, (), RunLimits(60.0, 1 << 31)).run(source, final, folder)


def test_a_length_that_a_rounding_decides_is_shown_to_be_that(tmp_path: Path) -> None:
    found = _verify(_model(), _model(near=0.5000001), tmp_path)
    assert found.failures == []
    assert found.decisions
    for decision in found.decisions:
        assert decision.explained
        assert decision.node.startswith("Round")
        assert 0 < decision.changed <= decision.elements
        assert 0 < decision.difference < 1e-6
        original, optimized = decision.before
        assert original % 1 < 0.5 < optimized % 1
        (shapes,) = decision.outputs
        assert shapes.startswith("output 'audio': shape (1, ")
    # The audio is compared, too, with the durations of the original.
    held = [c for c in found.comparisons if c.what.endswith("with the original's decisions") and "audio" in c.what]
    assert held
    assert all(c.comparable and c.coverage.compared for c in held)


@pytest.mark.parametrize(
    ("near", "final", "word"),
    [
        (0.4999999, {"near": 0.51}, "Round"),  # the float before differs by more than rounding explains
        (0.3, {"near": 0.3, "decide": "Ceil"}, "Round"),  # the same float is rounded otherwise
        (0.4999999, {"near": 0.5000001, "gain": 0.5005}, "with the original's decisions"),  # and another fault behind it
    ],
)  # fmt: skip
def test_a_length_that_no_rounding_explains_is_a_failure(
    near: float, final: dict[str, Any], word: str, tmp_path: Path
) -> None:
    found = _verify(_model(near), _model(**final), tmp_path)
    assert found.failures
    assert any(word in c.message() for c in found.failures)


_TIE = """<ir_version: 9, opset_import: ["": 18]>
choice (float[2, 3] x) => (int64[2] best)
<float[3] near = {NEAR}, float none = {0.0}>
{
    zeros = Mul(x, none)
    scores = Add(zeros, near)
    best = ArgMax <axis = 1, keepdims = 0> (scores)
}"""


@pytest.mark.parametrize(("second", "is_right"), [(1.0000001, True), (1.1, False)])
def test_an_index_of_numbers_that_are_nearly_equal(second: float, is_right: bool, tmp_path: Path) -> None:
    original, final = (
        parser.parse_model(_TIE.replace("NEAR", f"1.0, {other:.8f}, 0.25")) for other in (0.9999999, second)
    )
    found = _verify(original, final, tmp_path)
    assert (not found.failures) is is_right
    assert found.decisions
    assert all(d.explained is is_right and d.node.startswith("ArgMax") for d in found.decisions)


def _decided(text: str) -> list[str]:
    model = parser.parse_model(text)
    outputs = [o.name for o in model.graph.output]
    return [d.result for d in find_decisions(model.graph, Symbolic(model), outputs)]


def test_what_decides() -> None:
    head = '<ir_version: 9, opset_import: ["": 18]>\n'
    # Clip and Cast decide nothing of whole numbers; quantizers make steps and no lengths; other outputs do not count.
    assert _decided(
        head
        + """g (float[N] x, int64[N] n) => (int64[N] y) <float one = {1.0}> {
            a = Exp(x)
            q, s, z = DynamicQuantizeLinear(a)
            b = DequantizeLinear(q, s, z)
            r = Round(b)
            c = Clip(r, one)
            i = Cast <to = 7> (c)
            m = Cast <to = 1> (n)
            e = Equal(m, one)
            k = Cast <to = 7> (e)
            y = Add(i, k)
        }"""
    ) == ["r"]
    # A comparison of floats, and what is cast without a rounding of its own.
    assert _decided(
        head
        + """g (float[N] x) => (int64[N] y) <float one = {1.0}> {
            a = Exp(x)
            b = Greater(a, one)
            k = Cast <to = 7> (b)
            l = Cast <to = 7> (a)
            y = Add(k, l)
        }"""
    ) == ["b", "l"]
    assert _decided(head + "g (float[N] x) => (float[N] y) { a = Round(x)\n b = Mul(a, x)\n y = Exp(b) }") == []


def test_decisions_inside_of_fused_nodes_are_held_behind_them() -> None:
    model = _model()
    index = GraphIndex(model.graph)
    (decision,) = [d for d in find_decisions(model.graph, Symbolic(model), ["audio"]) if d.node.op_type == "Round"]
    assert find_held(index, decision, {"rounded", "longest"}).tensors == ("rounded",)
    held = find_held(index, decision, {"longest", "durations"})
    assert held.tensors == ("longest",)
    assert find_held(index, decision, {"audio"}).tensors == ()  # sums and ranges of it are no longer the decision
    values = np.array([[0.2, 1.5, 2.5, 7.6]], np.float32)
    alone = cut_decision(model, held, {"value": 1}, {"longest": 1})
    (found,) = onnx.reference.ReferenceEvaluator(alone).run(["longest"], {"value": values})
    np.testing.assert_array_equal(found, [[1, 2, 2, 8]])
    # The float before it is computed in a model that has only what comes before and after.
    fused = onnx.ModelProto()
    fused.CopyFrom(model)
    first = [n for n in fused.graph.node if n.output[0] not in ("value", "rounded", "longest")]
    del fused.graph.node[:]
    fused.graph.node.extend(first)
    extended, names = add_outputs(hold_tensors(fused, {"longest": 1}), model.graph, {"value": 1})
    assert free_name("longest") in [o.name for o in extended.graph.output]
    assert names["value"] != "value"


_FORM = VoiceForm(layers=10, bins=50)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("voice") / "voice.onnx"
    onnx.save(quantize_dynamically(make_voice_model(_FORM)), path)
    return path


@pytest.mark.parametrize("chains", ["auto", "on"])
def test_durations_of_a_quantized_voice_model(
    chains: str, quantized: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--json", str(tmp_path / "r.json"), "--report", str(tmp_path / "r.html"), "-o", str(tmp_path / "o.onnx")]
    assert cli.main([str(quantized), "--chains", chains, "--verify-budget", "200", *files]) == 0
    said = capsys.readouterr().out
    found = json.loads((tmp_path / "r.json").read_text())["verification"]
    assert found["ok"]
    assert found["decisions"]
    for decision in found["decisions"]:
        assert decision["explained"]
        assert "round_durations" in decision["node"]
        assert decision["difference"] <= 5 * decision["spread"]
    assert "decided by rounding" in said
    assert "Decided by rounding" in (tmp_path / "r.html").read_text()


def test_a_fault_of_durations_is_found_among_steps_of_a_quantized_model(
    quantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Verifier.run

    def spoiled(self: Verifier, original: Path, emitted: onnx.ModelProto, *rest: Any) -> Any:
        other = onnx.ModelProto()
        other.CopyFrom(emitted)
        division = next(n for n in other.graph.node if n.op_type == "Div" and "speed" in n.input)
        division.input[1] = "slower"
        other.graph.initializer.append(numpy_helper.from_array(np.full(1, 0.7, np.float32), "slower"))
        # The input stays: it is fed.
        return run(self, original, other, *rest)

    monkeypatch.setattr(Verifier, "run", spoiled)
    command = [
        str(quantized),
        "--chains",
        "off",
        "--only",
        "1",
        "--verify-budget",
        "200",
        "-o",
        str(tmp_path / "o.onnx"),
    ]
    assert cli.main(command) == 2
    assert "round_durations" in capsys.readouterr().err
    assert not (tmp_path / "o.onnx").exists()


def test_audio_is_as_long_as_the_durations() -> None:
    model = make_voice_model(VoiceForm(layers=1))
    rng = np.random.default_rng(0)
    feed = {
        "tokens": rng.integers(0, 50, (1, 9)),
        "style": rng.standard_normal((1, 64)).astype(np.float32),
        "speed": np.ones(1, np.float32),
    }
    audio, durations = onnx.reference.ReferenceEvaluator(model).run(None, feed)
    assert audio.shape == (1, HOP * durations.sum())
