# SPDX-License-Identifier: Apache-2.0
"""Quantized attention as text: roundings by role, opsets, masks and biases; what is refused, and why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from attention_forms import reason
from quantized_models import Numbers, draw_codes, quantized_attention, run

import stof
from stof.attention.checks.rounded_comparison import compare_rounded_site, round_exactly
from stof.attention.expand.expanders import make_working_copy
from stof.attention.subgraphs import find_scopes
from stof.errors import VerifyError
from stof.mask.roundings import Steps
from stof.mask.site import AttentionSite
from stof.options import Options
from stof.symbolic import Symbolic

FINE = Numbers(score=None)
EVERY = Numbers(scaled_score=(0.03, 2), biased_score=(0.05, -3))
MASKED = Numbers(biased_score=(1.3344e36, 127))


def optimized(model: onnx.ModelProto, folder: Path, options: Options | None = None) -> tuple[stof.Report, Path]:
    source, written = folder / "model.onnx", folder / "written.onnx"
    onnx.save(model, source)
    return stof.optimize(source, written, options or Options(verify_budget=5)), written


def site_of(model: onnx.ModelProto) -> AttentionSite:
    (scope,) = find_scopes(make_working_copy(model))
    assert not scope.findings, scope.findings
    (site,) = scope.sites
    return site


def reason_of(model: onnx.ModelProto, folder: Path) -> str:
    report, _ = optimized(model, folder, Options(dry_run=True))
    (site,) = report.sites
    assert not site.replaced
    return str(site.reason)


@pytest.mark.parametrize("opset", [13, 17, 20])
@pytest.mark.parametrize("codes", ["int8", "uint8"])
@pytest.mark.parametrize(
    ("numbers", "mask", "bias", "roles"),
    [
        (FINE, "", "", {"weight"}),
        (Numbers(), "", "", {"score", "weight"}),
        (Numbers(), "pad", "", {"score", "weight"}),
        (Numbers(), "", "plain", {"score", "weight"}),
        (EVERY, "", "plain", {"score", "scaled_score", "biased_score", "weight"}),
        (EVERY, "", "rounded", {"score", "scaled_score", "biased_score", "weight"}),
        (MASKED, "rounded pad", "", {"score", "biased_score", "weight"}),
    ],
)
def test_roundings_are_those_of_the_graph(
    numbers: Numbers, mask: str, bias: str, roles: set[str], codes: str, opset: int, tmp_path: Path
) -> None:
    model = quantized_attention(numbers, opset=opset, codes=codes, mask=mask, bias=bias)
    site = site_of(model)
    assert site.roundings is not None
    assert set(site.roundings.by_role) == {"query", "key", "value", *roles}
    report, written = optimized(model, tmp_path)
    assert [s.replaced for s in report.sites] == [True], report.sites
    for length in (1, 7, 70):
        feed = draw_codes(model, 2, length, seed=length)
        (wanted,), (body,), (mine,) = run(model, feed), run(written, feed), run(written, feed, library=True)
        assert np.abs(wanted - body).max() <= 1e-5 * max(1.0, np.abs(wanted).max())
        # A number in the middle between two codes may round either way: few rows differ, all others not at all.
        away = np.abs(wanted - mine).max(-1) > 1e-5 * np.abs(wanted).max()
        assert away.mean() <= 0.02
        arrays = captured(model, site, feed, wanted)
        exact = round_exactly(site, arrays, np.arange(4))
        slack = 1e-5 * np.abs(wanted).max()
        assert (mine >= exact.low - slack).all()
        assert (mine <= exact.high + slack).all()


def captured(
    model: onnx.ModelProto, site: AttentionSite, feed: dict[str, np.ndarray], output: np.ndarray
) -> dict[str, np.ndarray]:
    """The tensors of a site in a run of the graph in which it was found."""
    working = make_working_copy(model).model
    names = [site.query.tensor, site.key.tensor, site.value.tensor, *(t.tensor for t in site.terms)]
    asked = onnx.ModelProto()
    asked.CopyFrom(working)
    del asked.graph.output[:]
    known = {i.name for i in asked.graph.input}
    asked.graph.output.extend(onnx.ValueInfoProto(name=n) for n in names if n not in known)
    found = dict(zip([n for n in names if n not in known], run(asked, feed), strict=True))
    assert site.roundings is not None
    constants = {t.name: onnx.numpy_helper.to_array(t) for t in working.graph.initializer}
    return {**constants, **feed, **found, site.output: output}


def test_a_wrong_scale_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import stof.attention.emit as module

    node = module._node

    def with_other_scale(*arguments: object) -> object:
        made = node(*arguments)  # type: ignore[arg-type]
        made.attrs["scale"] *= 1.02
        return made

    model = quantized_attention()
    monkeypatch.setattr(module, "_node", with_other_scale)
    with pytest.raises(VerifyError, match=r"verification failed at site .* beyond what roundings explain"):
        optimized(model, tmp_path, Options(verify_budget=5, inputs=draw_codes(model, 2, 33)))


def test_what_the_operator_refuses_is_a_failed_comparison(tmp_path: Path) -> None:
    model = quantized_attention()
    _, written = optimized(model, tmp_path)
    result = onnx.load(written)
    (node,) = (n for n in result.graph.node if n.op_type == "StofQuantizedAttention")
    next(a for a in node.attribute if a.name == "scale").f = -1.0
    feed, site = draw_codes(model, 1, 5), site_of(model)
    (wanted,) = run(model, feed)
    compared = compare_rounded_site(site, [node], captured(model, site, feed, wanted), wanted)
    assert not compared.ok
    assert "scale" in compared.detail


def test_the_comparison_allows_what_roundings_explain() -> None:
    """A score in the middle between two codes may be either; where scores are not rounded, it is itself."""
    model = quantized_attention(Numbers(query=(0.125, 0), key=(0.25, 0), score=(0.0625, 0)), scale=0.5)
    feed = draw_codes(model, 1, 16, seed=3)
    feed = {n: x if n == "v" else x // 32 for n, x in feed.items()}
    (wanted,) = run(model, feed)
    site = site_of(model)
    arrays = captured(model, site, feed, wanted)
    exact = round_exactly(site, arrays, np.arange(4))
    # Products of codes are multiples of 1/32, so that every second one is in the middle between two multiples of 1/16.
    assert ((exact.high - exact.low).max(-1) > 1e-3).mean() > 0.5
    assert (wanted >= exact.low - 1e-5).all()
    assert (wanted <= exact.high + 1e-5).all()
    assert site.roundings is not None
    smooth = round_exactly(replace(site, roundings=replace(site.roundings, score=None)), arrays, np.arange(4))
    assert ((smooth.high - smooth.low).max(-1) > 1e-3).mean() < 0.1


def test_rounding_is_that_of_the_standard() -> None:
    """Half to even, then the zero point, then the limits of the type."""
    x = np.array([-9.0, -0.15, -0.05, 0.05, 0.15, 0.25, 9.0], np.float32)
    text = (
        '<ir_version: 8, opset_import: ["": 18]>\ng (float[N] x) => (float[N] y) <float s = {0.1}, int8 z = {3}> '
        "{\nc = QuantizeLinear (x, s, z)\ny = DequantizeLinear (c, s, z)\n}"
    )
    (wanted,) = run(onnx.parser.parse_model(text), {"x": x})
    steps = Steps.of(np.array(0.1, np.float32), np.array(3, np.int8))
    assert np.allclose(steps.round(x.astype(np.float64)), wanted, atol=1e-6)
    assert steps.lowest == pytest.approx(-13.1)


REFUSED = {
    "weights that are not rounded": (
        lambda: quantized_attention(Numbers(weight=None)),
        "the scores are rounded to 8 bits, and the attention weights are not",
    ),
    "mask that a rounding behind it limits": (
        lambda: quantized_attention(EVERY, mask="pad"),
        "the rounding behind the mask takes masked scores to -6.25, which does not forbid; --dequantize-attention",
    ),
    "codes of 16 bits": (
        lambda: with_type(quantized_attention(opset=21), "weight_z", np.array(0, np.uint16)),
        "kernels take int8 and uint8",
    ),
    "scale for each channel": (
        lambda: with_type(quantized_attention(), "query_s", np.full(8, 0.02, np.float32), channels=8),
        "scale for each channel",
    ),
}


def shifted() -> onnx.ModelProto:
    """Scores less their row's maximum are rounded: the same codes mean other scores in each row."""
    model = quantized_attention(Numbers(score=None, scaled_score=(0.03, 127)))
    nodes = list(model.graph.node)
    at = next(i for i, n in enumerate(nodes) if n.op_type == "QuantizeLinear" and n.input[0] == "scaled")
    nodes[at].input[0] = "shifted"
    made = [
        onnx.helper.make_node("Constant", [], ["last"], value_ints=[-1]),
        onnx.helper.make_node("ReduceMax", ["scaled", "last"], ["largest"], keepdims=1),
        onnx.helper.make_node("Sub", ["scaled", "largest"], ["shifted"]),
    ]
    del model.graph.node[:]
    model.graph.node.extend([*nodes[:at], *made, *nodes[at:]])
    return model


def test_scores_that_are_shifted_before_a_rounding_stay() -> None:
    assert "which moves each row by a number of its own; --dequantize-attention" in reason(shifted())


def with_type(model: onnx.ModelProto, name: str, array: np.ndarray, channels: int = 0) -> onnx.ModelProto:
    """A model in which an initializer is another array; with channels, its quantizer has them along the last axis."""
    for tensor in model.graph.initializer:
        if tensor.name == name:
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, name))
        elif channels and tensor.name == name.replace("_s", "_z"):
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.zeros(channels, np.int8), tensor.name))
    if channels:
        for node in model.graph.node:
            if name in node.input:
                node.attribute.append(onnx.helper.make_attribute("axis", 3))
    return model


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_operator_does_not_take_stays(name: str, tmp_path: Path) -> None:
    make, words = REFUSED[name]
    assert words in reason_of(make(), tmp_path)


def test_a_mask_that_its_rounding_takes_away_is_a_bias(tmp_path: Path) -> None:
    """Calibrated on texts without padding, the lowest code of the mask's quantizer is 0: nothing is masked."""
    model = quantized_attention(MASKED, mask="rounded pad")
    model = with_type(model, "mask_s", np.array(1.0, np.float32))
    model = with_type(model, "mask_z", np.array(-128, np.int8))
    report, written = optimized(model, tmp_path)
    (site,) = report.sites
    assert site.replaced
    assert not site.mask
    feed = draw_codes(model, 2, 20)
    assert np.abs(run(model, feed)[0] - run(written, feed, library=True)[0]).max() < 0.1


def test_a_library_without_the_operator_keeps_the_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import stof.attention.decide.quantized as module

    limits = {op: value for op, value in module.op_limits().items() if op != "StofQuantizedAttention"}
    monkeypatch.setattr(module, "op_limits", lambda: limits)
    assert "the plugin library has no StofQuantizedAttention" in reason_of(quantized_attention(), tmp_path)


@pytest.mark.parametrize("target", ["cuda", "tensorrt"])
def test_other_targets_have_no_kernels(target: str, tmp_path: Path) -> None:
    report, _ = optimized(quantized_attention(), tmp_path, Options(dry_run=True, target=target))
    (site,) = report.sites
    assert "is rounded to 8 bits" in site.reason


def test_the_standard_operator_does_not_round(tmp_path: Path) -> None:
    report, _ = optimized(quantized_attention(opset=23), tmp_path, Options(dry_run=True, emit="standard"))
    (site,) = report.sites
    assert not site.replaced
    assert "are rounded to 8 bits, which Attention does not do" in site.reason


_OPERATORS = """
<ir_version: 8, opset_import: ["": 18, "com.microsoft": 1]>
g (uint8[B,4,S,8] q, uint8[B,4,8,S] k, uint8[B,4,S,8] v, bool[B,1,1,S] keep) => (uint8[a,b,c,d] out)
<float qs = {0.03}, uint8 qz = {128}, float ks = {0.02}, uint8 kz = {120}, float vs = {0.04}, uint8 vz = {131},
 float ss = {0.09}, uint8 sz = {127}, float fs = {80.0}, uint8 fz = {255}, uint8 fill = {0},
 float ws = {80.0}, uint8 wz = {255}, float ps = {0.00390625}, uint8 pz = {0}, float os = {0.02}, uint8 oz = {128}>
{
  s = QLinearMatMul (q, qs, qz, k, ks, kz, ss, sz)
  m = com.microsoft.QLinearWhere (keep, s, ss, sz, fill, fs, fz, ws, wz)
  p = com.microsoft.QLinearSoftmax <axis = -1, opset = 18> (m, ws, wz, ps, pz)
  out = QLinearMatMul (p, ps, pz, v, vs, vz, os, oz)
}
"""


def test_a_mask_in_operator_form(tmp_path: Path) -> None:
    """QLinearWhere fills with -20400, behind which a code is 80: all allowed scores have one code, and equal weights."""
    model = onnx.parser.parse_model(_OPERATORS)
    site = site_of(model)
    assert site.roundings is not None
    assert set(site.roundings.by_role) == {"query", "key", "value", "score", "biased_score", "weight"}
    report, written = optimized(model, tmp_path)
    (row,) = report.sites
    assert row.replaced, row.reason
    feed = draw_codes(model, 2, 30, seed=1)
    feed["keep"] = np.arange(30)[None, None, None, :] < np.array([30, 17])[:, None, None, None]
    wanted, mine = run(model, feed)[0].astype(int), run(written, feed, library=True)[0].astype(int)
    # QLinearSoftmax divides integers by a table of exponentials: its weights may be a code away, the sum of 30 of them a step.
    assert np.abs(wanted - mine).max() <= 2


def test_shapes_of_operators_on_codes() -> None:
    text = """
    <ir_version: 8, opset_import: ["": 18, "com.microsoft": 1]>
    g (uint8[B,4,S] x, int8[B,2,S] y, bool[S] c) => (uint8[a,b,d] joined, uint8[e,f,h] chosen, uint8[i,j,k] p)
    <float s = {0.1}, uint8 z = {3}, int8 n = {0}>
    {
      t = Neg (y)
      joined = com.microsoft.QLinearConcat <axis = 1> (s, z, x, s, z, x, s, z)
      chosen = com.microsoft.QLinearWhere (c, x, s, z, x, s, z, s, z)
      p = com.microsoft.QLinearSoftmax <axis = -1, opset = 18> (x, s, z, s, z)
    }
    """
    symbolic = Symbolic(onnx.parser.parse_model(text))
    batch, rows, length = symbolic.shape("x") or ()
    assert rows.constant == 4
    assert symbolic.shape("chosen") == symbolic.shape("p") == (batch, rows, length)
    assert symbolic.shape("joined") == (batch, rows + rows, length)
    assert [symbolic.dtype(n) for n in ("joined", "chosen", "p")] == [onnx.TensorProto.UINT8] * 3
