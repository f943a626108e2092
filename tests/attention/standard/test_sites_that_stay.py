# SPDX-License-Identifier: Apache-2.0
"""Sites that ONNX's Attention does not express, or not faster, stay with a reason; faults in what is written are found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from fused_attention_nodes import INT32, Fused, Given, run
from onnx import parser, version_converter
from score_graphs import allowed
from standard_models import force_standard
from test_forms import CAUSAL, FORMS, PADDING, WINDOW, Form, is_real, ragged

import stof
from stof.attention.expand.flex_attention import PREVIEW
from stof.attention.standard import decide, emit
from stof.attention.standard.form import StandardForm, choose_form
from stof.attention.standard.mask_input import MaskInputs
from stof.attention.standard.runtime import AttentionRuntime
from stof.errors import UnsupportedError, VerifyError
from stof.mask.expression import MaskExpression
from stof.mask.site import AttentionSite, EmptyRows, Layout, LiftedMask, Operand
from stof.options import Options
from stof.symbolic import integer

SINK = """
    m = Identity (s)
    sh = Shape <start = 0, end = 3> (s)
    one1 = Constant <value = int64[1] {1}> ()
    sh1 = Concat <axis = 0> (sh, one1)
    logit = Constant <value = float[1, 4, 1, 1] {0.1, 0.2, 0.3, 0.4}> ()
    logits = Expand (logit, sh1)
    joined = Concat <axis = -1> (m, logits)
"""


def reasons(model: onnx.ModelProto, folder: Path, **options: Any) -> list[str]:
    """Why the sites stay."""
    report, target = force_standard(model, folder, **options)
    assert not report.replaced
    assert target.read_bytes() == (folder / "model.onnx").read_bytes()
    return [s.reason for s in report.sites]


def test_rows_that_are_nan(tmp_path: Path) -> None:
    """Padding of -inf without a guard: NaN, which Attention makes 0; --empty-rows ignore takes that."""
    form = replace(FORMS["padding of -inf"], guard=False)
    (reason,) = reasons(form.model(), tmp_path)
    assert "a row without a key is NaN, which Attention makes 0" in reason
    report, target = force_standard(form.model(), tmp_path, ignore_empty_rows=True)
    assert [(s.replaced, s.kernel) for s in report.sites] == [(True, "Attention-23: boolean attn_mask")]
    feeds = form.feeds(1, 7, 7, 0)
    np.testing.assert_allclose(run(target, feeds)[0], form.define(feeds), atol=3e-5, rtol=3e-5)


def test_masks_of_different_strength(tmp_path: Path) -> None:
    """Two levels of finite numbers: a fully masked row attends by the weaker mask."""
    body = PADDING % "lowest" + "e = LessOrEqual (ks, qs)\n f = Where (e, nothing, lowest)\n m2 = Add (m, f)"
    text = body.replace("m = Add (s, c)", "m1 = Add (s, c)").replace("Add (m, f)", "Add (m1, f)").replace("m2 =", "m =")
    form = Form(text, allowed(is_real), "", "int64[B, T] pad", guard=False, draw={"pad": ragged})
    (reason,) = reasons(form.model(), tmp_path)
    assert "a fully masked row attends by a weaker mask, which Attention cannot" in reason


def test_sinks(tmp_path: Path) -> None:
    """A logit more in every row."""
    text = FORMS["nothing"].model()
    body = onnx.printer.to_text(text)
    body = body.replace("m = Identity (s)", SINK).replace(
        "Softmax <axis: int = -1> (m)", "Softmax <axis: int = -1> (joined)"
    )
    body = body.replace("p0 = ", "pj = ").replace(
        "isnan = IsNaN (p0)", "p0 = Slice (pj, zero1, last1, axis1)\n isnan = IsNaN (p0)"
    )
    body = body.replace(
        "o = MatMul",
        "zero1 = Constant <value = int64[1] {0}> ()\n o = MatMul",
    )
    body = body.replace(
        "s0 = MatMul",
        "axis1 = Constant <value = int64[1] {3}> ()\n last1 = Constant <value = int64[1] {-1}> ()\n s0 = MatMul",
    )
    lines = body.split("\n")
    zero = next(i for i, line in enumerate(lines) if "zero1 = Constant" in line)
    moved = lines.pop(zero)
    lines.insert(next(i for i, line in enumerate(lines) if "axis1 = Constant" in line), moved)
    (reason,) = reasons(parser.parse_model("\n".join(lines)), tmp_path)
    assert "its softmax has a sink" in reason


def test_bf16() -> None:
    """ONNX Runtime's CPU provider has no Attention of bf16."""
    with pytest.raises(UnsupportedError, match="no Attention of BFLOAT16, expected fp32 or fp16"):
        choose_form(replace(SITE, dtype=onnx.TensorProto.BFLOAT16), LiftedMask())


@pytest.mark.parametrize("rows", [EmptyRows.MEAN, EmptyRows.ALL])
def test_fp16_has_no_number_for_rows_without_a_key(rows: EmptyRows) -> None:
    """Neither one beside which scores keep their digits, nor one that absorbs them."""
    lifted = LiftedMask(MaskExpression.parse("pad[b, k]"), empty_rows=rows)
    half = replace(SITE, dtype=onnx.TensorProto.FLOAT16)
    with pytest.raises(UnsupportedError, match="and fp16 has none that leaves or absorbs scores"):
        choose_form(half, lifted)
    assert choose_form(half, lifted, every_row_has_key=True).fill == -np.inf
    assert choose_form(SITE, lifted).fill == {EmptyRows.MEAN: -1e30, EmptyRows.ALL: -1e4}[rows]


def test_fused_nodes(tmp_path: Path) -> None:
    """ONNX's Attention, and nodes with kernels of their own, are not written anew."""
    inputs = tuple(Given(n, ("B", "S", 16)) for n in "qkv")
    node = Fused("MultiHeadAttention", (*inputs, None, Given("pad", ("B", "S"), INT32)), {"num_heads": 2})
    (reason,) = reasons(node.model(), tmp_path)
    assert "is one node already, of which ONNX Runtime has a kernel of its own" in reason
    heads = tuple(Given(n, ("B", 2, "S", 8)) for n in "qkv")
    standard = Fused("Attention", heads, {"is_causal": 1}, rank=4, domain="", opset=24)
    (reason,) = reasons(standard.model(), tmp_path)
    assert "Attention node 'the/node' is Attention of ONNX already" in reason


@pytest.mark.parametrize("has_windows", [False, True])
def test_windows_that_the_runtime_lacks(has_windows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An Attention with windows becomes one with a mask, unless the runtime has them."""
    monkeypatch.setattr("stof.attention.standard.rewrite.installed_runtime", lambda: AttentionRuntime(has_windows))
    heads = tuple(Given(n, ("B", 2, "S", 8)) for n in "qkv")
    node = Fused("Attention", heads, {"is_causal": 1, "left_window_size": 3}, rank=4, domain="", opset=25)
    if has_windows:
        (reason,) = reasons(node.model(), tmp_path)
        assert "is Attention of ONNX already" in reason
        return
    report, target = force_standard(node.model(), tmp_path)
    assert [(s.replaced, s.kernel) for s in report.sites] == [(True, "Attention-23: is_causal, boolean attn_mask")]
    feeds = node.feeds({"B": 2, "S": 9}, seed=0)
    q, k, v = (feeds[n].astype(np.float64) for n in "qkv")
    i, j = np.arange(9)[:, None], np.arange(9)
    scores = np.where((j <= i) & (i - j <= 3), q @ np.swapaxes(k, 2, 3) / np.sqrt(8), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    np.testing.assert_allclose(run(target, feeds)[0], weights / weights.sum(-1, keepdims=True) @ v, atol=3e-5)


def test_flex_attention_needs_no_gain(tmp_path: Path) -> None:
    """No kernel runs it: it becomes Attention by itself, and the preview domain is gone."""
    modifier = parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 24]>
    modifier (float[B, H, S, T] s) => (float[B, H, S, T] m) {{ {CAUSAL} }}""").graph
    heads = tuple(Given(n, ("B", 2, "S", 8)) for n in "qkv")
    model = Fused("FlexAttention", heads, {"score_mod": modifier}, rank=4, domain=PREVIEW, opset=24).model()
    model.opset_import[1].domain = PREVIEW
    onnx.save(model, tmp_path / "model.onnx")
    target = tmp_path / "optimized.onnx"
    report = stof.optimize(tmp_path / "model.onnx", target, Options(emit="standard"))
    assert [(s.replaced, s.kernel) for s in report.sites] == [(True, "Attention-23: is_causal")]
    optimized = onnx.load(target)
    assert [(n.domain, n.op_type) for n in optimized.graph.node] == [("", "Attention")]
    assert [e.domain for e in optimized.opset_import] == [""]


def test_no_gain(tmp_path: Path) -> None:
    """Without masks and guards both take as long: the nodes stay, and so does the file."""
    form = FORMS["nothing"]
    onnx.save(replace(form, guard=False).model(), tmp_path / "model.onnx")
    report = stof.optimize(tmp_path / "model.onnx", tmp_path / "optimized.onnx", Options(emit="standard"))
    assert [s.replaced for s in report.sites] == [False]
    assert "gains nothing over its nodes at S = 128: 1.00x estimated" in report.sites[0].reason
    assert report.copied
    onnx.save(form.model(), tmp_path / "model.onnx")
    report = stof.optimize(tmp_path / "model.onnx", tmp_path / "optimized.onnx", Options(emit="standard"))
    assert [s.replaced for s in report.sites] == [True]
    assert report.sites[0].predicted_gain > 1.3


@pytest.mark.parametrize(("length", "replaced"), [(128, True), (4096, False)])
def test_narrow_windows_lose_at_large_sizes(length: int, replaced: bool, tmp_path: Path) -> None:
    """The kernel takes longer the more pairs are forbidden; the lengths in use decide."""
    body = WINDOW.replace("int64 {2}", "int64 {100}").replace(
        "m = Where (c, s, inf)", "f = Where (c, nothing, inf)\n m = Add (s, f)"
    )
    text = onnx.printer.to_text(Form(body, lambda s, _: s, "", guard=False).model()).replace(",T,", ",S,")
    onnx.save(parser.parse_model(text), tmp_path / "model.onnx")
    options = Options(emit="standard", shapes={"S": length})
    report = stof.optimize(tmp_path / "model.onnx", tmp_path / "optimized.onnx", options)
    assert [s.replaced for s in report.sites] == [replaced]


def test_a_subgraph(tmp_path: Path) -> None:
    """Sites inside of If stay."""
    inner = onnx.printer.to_text(replace(FORMS["causal"], guard=False).model())
    nodes = inner[inner.index("{") + 1 : inner.rindex("}")]
    text = f"""<ir_version: 8, opset_import: ["" : 17]>
    layer (float[B, 4, S, 8] q, float[B, 4, T, 8] k, float[B, 4, T, 8] v, bool c) => (float[B, 4, S, 8] z) {{
        z = If (c) <then_branch = one () => (float[B, 4, S, 8] y) {{ {nodes} }},
            else_branch = other () => (float[B, 4, S, 8] x) {{ x = Identity (q) }}>
    }}"""
    (reason,) = reasons(parser.parse_model(text), tmp_path)
    assert "it is in then_branch of" in reason
    assert "--emit standard writes into the main graph alone" in reason


def test_an_opset_that_cannot_be_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No site is replaced where an operator has no counterpart in the later opset."""

    def refuse(*_: object) -> None:
        raise RuntimeError("no adapter for Something")

    monkeypatch.setattr(version_converter, "convert_version", refuse)
    onnx.save(FORMS["causal"].model(), tmp_path / "model.onnx")
    report = stof.optimize(tmp_path / "model.onnx", tmp_path / "optimized.onnx", Options(emit="standard"))
    assert [s.replaced for s in report.sites] == [False]
    reason = report.sites[0].reason
    assert "the model has opset 17, which cannot be converted to 23 (" in reason
    assert "no adapter for Something" in reason


@pytest.mark.parametrize("name", ["causal", "padding of the lowest number", "a bias of the caller"])
def test_a_wrong_attribute_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale that the node should not have, in the file and in what the check expects: fp64 tells."""
    true = emit.attributes_of

    def wrong(rewrite: decide.StandardRewrite) -> dict[str, Any]:
        return {**true(rewrite), "scale": 0.3}

    for module in ("emit", "checks"):
        monkeypatch.setattr(f"stof.attention.standard.{module}.attributes_of", wrong)
    with pytest.raises(VerifyError, match="verification failed at site 'site'"):
        force_standard(FORMS[name].model(), tmp_path)


def test_a_wrong_window_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attributes are compared as such, however long the inputs are that are tried."""
    true = emit.attributes_of
    monkeypatch.setattr(emit, "attributes_of", lambda r: {**true(r), "softcap": 1e6})
    with pytest.raises(VerifyError, match="its node has"):
        force_standard(FORMS["causal"].model(), tmp_path)


def test_a_wrong_mask_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask of another expression."""
    true = MaskInputs.find

    def wrong(self: MaskInputs, rewrite: decide.StandardRewrite, *given: Any) -> Any:
        form = replace(rewrite.form, mask=MaskExpression.parse("abs(q - k) <= 3"))
        return true(self, replace(rewrite, form=form), *given)

    monkeypatch.setattr(MaskInputs, "find", wrong)
    with pytest.raises(VerifyError, match="verification failed at site 'site'"):
        force_standard(FORMS["window"].model(), tmp_path)


SITE = AttentionSite(
    "site", 0, "site", *(Operand(n, Layout.BHSD) for n in "qkv"), "y", Layout.BHSD, 4, 4, 8, 8, 0.25, onnx.TensorProto.FLOAT
)  # fmt: skip


@pytest.mark.parametrize(
    ("mask", "window", "causal", "rest"),
    [
        ("abs(q - k) <= 5", (5, 5), False, ""),
        ("k <= q and q - k <= 5", (5, -1), True, ""),
        ("k - q <= 1 and q - k <= 3", (3, 1), False, ""),
        ("q == k", (0, 0), False, ""),
        ("k <= q and q - k <= 5 and pad[b, k]", (5, -1), True, "pad[b, k]"),
        ("abs(q - k) <= 5 or k <= 3", (-1, -1), False, "abs(q - k) <= 5 or k <= 3"),
    ],
)
def test_window_attributes(mask: str, window: tuple[int, int], causal: bool, rest: str) -> None:
    """Where the runtime has them, attributes say what they can of a mask, and attn_mask the rest."""
    lifted = LiftedMask(MaskExpression.parse(mask), empty_rows=EmptyRows.ZERO)
    form = choose_form(SITE, lifted, has_windows=True)
    assert (form.window, form.is_causal, form.mask.text) == (window, causal, rest)
    assert form.opset == (25 if window != (-1, -1) else 23)
    without = choose_form(SITE, lifted)
    assert (without.window, without.is_causal) == ((-1, -1), causal)
    assert without.opset == 23


def test_queries_behind_a_past() -> None:
    """The last S of T positions: is_causal would count from the first key, so attn_mask says it."""
    lifted = LiftedMask(MaskExpression.parse("k <= q"))
    sizes = StandardForm(4, mask=lifted.expression)
    dims = (integer(1), integer(4), integer(3), integer(9))
    assert choose_form(replace(SITE, query_offset=1, dims=dims), lifted) == sizes


def test_a_model_that_holds_operators_of_stof(tmp_path: Path) -> None:
    """What was optimized before is refused: its file would need the library."""
    onnx.save(FORMS["causal"].model(), tmp_path / "model.onnx")
    stof.optimize(tmp_path / "model.onnx", tmp_path / "first.onnx", Options(chains="off"))
    with pytest.raises(stof.ArgumentError, match="is for a model without stof's operators"):
        stof.optimize(tmp_path / "first.onnx", tmp_path / "second.onnx", Options(emit="standard"))
