# SPDX-License-Identifier: Apache-2.0
"""FlexAttention of ai.onnx.preview: its modifier graphs become masks, biases and soft caps, or keep the node with a reason."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from fused_attention_nodes import forced, run
from onnx import TensorProto, helper, parser
from onnx.backend.test.case.node import collect_testcases
from onnx.reference import ReferenceEvaluator
from score_graphs import POSITIONS, Meaning, allowed, attend

from stof.attention.expand.expanders import make_working_copy
from stof.attention.expand.flex_attention import PREVIEW

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of other operators' tests, which are made with these
    STORED = {c.name: c for c in collect_testcases(None) if c.name.startswith("test_flexattention")}


@dataclass(frozen=True)
class Mod:
    """A score_mod: the body of its graph from s to o, what it means in fp64, and what the site has then."""

    body: str
    meaning: Meaning
    mask: str = ""
    note: str = ""
    extra: tuple[tuple[str, int, tuple[int | str, ...]], ...] = ()  # inputs of the model that it captures


def indices(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The positions of queries [S, 1] and keys [1, T]."""
    return np.arange(scores.shape[2])[:, None], np.arange(scores.shape[3])[None]


WINDOW = """
    d = Sub (qs, ks)
    a = Abs (d)
    two = Constant <value = int64 {2}> ()
    near = LessOrEqual (a, two)
    o = Where (near, s, inf)
"""
CAUSAL = """
    before = LessOrEqual (ks, qs)
    m = Where (before, s, inf)
"""
CAP = """
    cap = Constant <value = float {1.5}> ()
    c1 = Div (s, cap)
    c2 = Tanh (c1)
    o = Mul (c2, cap)
"""
DOCUMENTS = """
    axes1 = Constant <value = int64[2] {1, 3}> ()
    axes2 = Constant <value = int64[2] {1, 2}> ()
    d1 = Unsqueeze (documents, axes1)
    d2 = Unsqueeze (documents, axes2)
    same = Equal (d1, d2)
    o = Where (same, s, inf)
"""
PADDING = """
    axes = Constant <value = int64[2] {1, 2}> ()
    p = Unsqueeze (pad, axes)
    o = Where (p, s, inf)
"""
SLOPES = """
    d = Sub (ks, qs)
    df = Cast <to = 1> (d)
    slopes = Constant <value = float[4, 1, 1] {0.5, 0.25, 0.125, 0.0625}> ()
    b = Mul (df, slopes)
    before = LessOrEqual (ks, qs)
    biased = Add (s, b)
    o = Where (before, biased, inf)
"""


def cap(scores: np.ndarray, _: dict[str, np.ndarray]) -> np.ndarray:
    """A soft cap of 1.5."""
    return 1.5 * np.tanh(scores / 1.5)


def slopes(scores: np.ndarray, _: dict[str, np.ndarray]) -> np.ndarray:
    """ALiBi under a causal mask."""
    q, k = indices(scores)
    rates = np.array([0.5, 0.25, 0.125, 0.0625])[:, None, None]
    return np.where(k <= q, scores + rates * (k - q), -np.inf)


def documents(scores: np.ndarray, feeds: dict[str, np.ndarray]) -> np.ndarray:
    """Queries attend keys of their own document."""
    ids = feeds["documents"]
    return np.where(ids[:, None, :, None] == ids[:, None, None, :], scores, -np.inf)


def padding(scores: np.ndarray, feeds: dict[str, np.ndarray]) -> np.ndarray:
    """Keys that are padding are left out."""
    return np.where(feeds["pad"][:, None, None, :], scores, -np.inf)


MODS = {
    "none": Mod("", lambda s, _: s),
    "causal": Mod(POSITIONS + CAUSAL.replace("m = ", "o = "), allowed(lambda q, k, _: k <= q), "k <= q"),
    "window": Mod(POSITIONS + WINDOW, allowed(lambda q, k, _: abs(q - k) <= 2), "abs(q - k) <= 2"),
    "soft cap": Mod(CAP, cap),
    "slopes under a causal mask": Mod(POSITIONS + SLOPES, slopes, "k <= q", "stays a bias"),
    "documents that it captures": Mod(
        POSITIONS + DOCUMENTS,
        documents,
        "segment_k[b, k] == segment_q[b, q]",
        extra=(("documents", TensorProto.INT64, ("B", "S")),),
    ),
    "padding that it captures": Mod(
        POSITIONS + PADDING, padding, "pad[b, k]", extra=(("pad", TensorProto.BOOL, ("B", "S")),)
    ),
    "an identity": Mod("o = Identity (s)", lambda s, _: s),
}


def graph(body: str, dtype: str = "float") -> onnx.GraphProto:
    """A modifier graph from s to o."""
    text = f"""<ir_version: 10, opset_import: ["" : 24]>
    modifier ({dtype}[B, H, S, T] s) => ({dtype}[B, H, S, T] o) {{ {body} }}"""
    return parser.parse_model(text).graph


def model(
    score_mod: str = "",
    prob_mod: str = "",
    extra: tuple[tuple[str, int, tuple[int | str, ...]], ...] = (),
    shapes: tuple[tuple[int | str, ...], ...] = (("B", 4, "S", 8), ("B", 2, "S", 8), ("B", 2, "S", 6)),
    dtype: int = TensorProto.FLOAT,
    **attributes: object,
) -> onnx.ModelProto:
    """A model of one FlexAttention, by default 4 query heads on 2 key heads."""
    mods = {n: graph(t) for n, t in (("score_mod", score_mod), ("prob_mod", prob_mod)) if t}
    node = helper.make_node("FlexAttention", ["q", "k", "v"], ["y"], "flex", domain=PREVIEW, **mods, **attributes)
    inputs = [helper.make_tensor_value_info(n, dtype, s) for n, s in zip("qkv", shapes, strict=True)]
    inputs += [helper.make_tensor_value_info(n, d, s) for n, d, s in extra]
    output = helper.make_tensor_value_info("y", dtype, ["B", shapes[0][1], shapes[0][2], shapes[2][3]])
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid(PREVIEW, 1)]
    whole = helper.make_graph([node], "model", inputs, [output])
    return helper.make_model(whole, opset_imports=opsets, ir_version=11)


def draw(given: onnx.ModelProto, batch: int, length: int, seed: int) -> dict[str, np.ndarray]:
    """Random inputs: documents in order, the end of each row is padding."""
    rng = np.random.default_rng(seed)
    feeds: dict[str, np.ndarray] = {}
    for value in given.graph.input:
        sizes = {"B": batch, "S": length}
        shape = [sizes.get(d.dim_param, d.dim_value) for d in value.type.tensor_type.shape.dim]
        kind = value.type.tensor_type.elem_type
        if kind == TensorProto.BOOL:
            feeds[value.name] = np.arange(length) < rng.integers(1, length, (batch, 1), endpoint=True)
        elif kind == TensorProto.INT64:
            feeds[value.name] = np.sort(rng.integers(0, 3, shape))
        else:
            feeds[value.name] = rng.standard_normal(shape).astype(helper.tensor_dtype_to_np_dtype(kind))
    return feeds


def define(feeds: dict[str, np.ndarray], meaning: Meaning) -> np.ndarray:
    """FlexAttention in fp64: what its specification says, without its words."""
    return attend(
        feeds["q"], feeds["k"], feeds["v"], feeds["q"].shape[-1] ** -0.5, lambda scores: meaning(scores, feeds)
    )


@pytest.mark.parametrize("name", MODS)
def test_score_mods(name: str, tmp_path: Path) -> None:
    """Each becomes the mask or bias that it means; kernels, function body and the specification's evaluator agree with fp64."""
    mod = MODS[name]
    original = model(mod.body, extra=mod.extra)
    report, target = forced(original, tmp_path)
    (site,) = report.sites
    assert (site.site, site.replaced, site.mask) == ("flex", True, mod.mask), site.reason
    assert mod.note in " ".join(site.notes)
    assert report.verification is not None
    assert report.verification.expanded  # ONNX Runtime has no FlexAttention
    assert not any(n.op_type == "FlexAttention" for n in onnx.load(target).graph.node)
    for seed, (batch, length) in enumerate(((1, 1), (2, 7), (3, 33))):
        feeds = draw(original, batch, length, seed)
        wanted = define(feeds, mod.meaning)
        for library in (True, False):
            np.testing.assert_allclose(run(target, feeds, library=library)[0], wanted, atol=2e-5, rtol=2e-5)
        if not mod.extra:  # onnx's evaluator gives modifier graphs nothing of the graph around them
            np.testing.assert_allclose(ReferenceEvaluator(original).run(None, feeds)[0], wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", sorted(n for n in STORED if not n.endswith("_expanded_ver26")))
def test_stored_outputs(name: str, tmp_path: Path) -> None:
    """Node tests of the onnx package: the stored outputs, or a reason."""
    case = STORED[name]
    report, target = forced(case.model, tmp_path)
    (site,) = report.sites
    reason = {"test_flexattention_double": "DOUBLE", "test_flexattention_prob_mod": "attention weights go to Mul"}.get(
        name, ""
    )
    assert site.replaced == (not reason), site.reason
    assert reason in site.reason
    if not reason:
        for inputs, outputs in case.data_sets:
            feeds = {i.name: np.asarray(a) for i, a in zip(case.model.graph.input, inputs, strict=True)}
            unit = 2.0**-10 if outputs[0].dtype == np.float16 else 0.0
            for library in (True, False):
                found = run(target, feeds, library=library)[0]
                np.testing.assert_allclose(found, outputs[0], rtol=max(case.rtol, 2 * unit), atol=max(case.atol, unit))


def test_a_prob_mod_that_changes_nothing(tmp_path: Path) -> None:
    """Weights that a graph hands through reach the values."""
    original = model(MODS["causal"].body, "o = Identity (s)")
    report, target = forced(original, tmp_path)
    assert [(s.replaced, s.mask) for s in report.sites] == [(True, "k <= q")]
    feeds = draw(original, 2, 9, 0)
    found = run(target, feeds, library=True)[0]
    np.testing.assert_allclose(found, define(feeds, MODS["causal"].meaning), atol=2e-5)


def test_a_modifier_with_initializers_and_a_subgraph() -> None:
    """Initializers become constants, an inner graph follows the new names; the working copy computes the same."""
    original = model("p = Add (s, shift)\n o = Mul (p, factor)")
    modifier = original.graph.node[0].attribute[0].g
    modifier.initializer.append(onnx.numpy_helper.from_array(np.float32([1.5]), "shift"))
    branch = "b () => (float[B, H, S, T] r) { r = Mul (s, factor) }"
    other = "c () => (float[B, H, S, T] s2) { s2 = Neg (s) }"
    text = (
        f"always = Constant <value = bool {{1}}> ()\n o = If (always) <then_branch = {branch}, else_branch = {other}>"
    )
    modifier.node.pop()
    added = graph(text.replace("(s, factor)", "(p, factor)"))
    modifier.node.extend(added.node)
    modifier.initializer.append(onnx.numpy_helper.from_array(np.float32([0.5]), "factor"))
    found = make_working_copy(original)
    assert not found.findings
    onnx.checker.check_model(found.model)
    feeds = draw(original, 2, 5, 0)
    np.testing.assert_allclose(
        run(found.model, feeds)[0], define(feeds, lambda s, _: (s + 1.5) * 0.5), atol=2e-5, rtol=2e-5
    )


def test_a_modifier_whose_first_output_is_absent() -> None:
    """A node is named by its first output that is there, and what is absent needs no node."""
    original = model("b = Clip (s, , high)\n left, right = Split <axis = 3, num_outputs = 2> (b)\n o = Min (s, right)")
    modifier = original.graph.node[0].attribute[0].g
    modifier.node[1].output[0] = ""
    modifier.node[2].input[1] = "peak"
    modifier.node.insert(2, helper.make_node("ReduceMax", ["right"], ["peak"], keepdims=0))
    modifier.node.append(helper.make_node("Split", ["s"], ["", "unused"], axis=3, num_outputs=2))
    modifier.initializer.append(onnx.numpy_helper.from_array(np.float32(0.5), "high"))
    found = make_working_copy(original)
    assert not found.findings
    assert [n.op_type for n in found.model.graph.node].count("Split") == 1
    feeds = draw(original, 2, 8, 0)
    expected = define(feeds, lambda s, _: np.minimum(s, np.minimum(s, 0.5)[..., 4:].max()))
    result = ReferenceEvaluator(found.model).run(None, feeds)[0]  # ONNX Runtime has no Split without its first output
    np.testing.assert_allclose(result, expected, atol=2e-5, rtol=2e-5)


TWO_INPUTS = graph("o = Identity (s)")
TWO_INPUTS.input.append(helper.make_tensor_value_info("more", TensorProto.FLOAT, None))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (model(prob_mod="o = Mul (s, s)"), "the attention weights"),
        (model("o = Softmax <axis = -1> (s)"), "its score_mod has a softmax of its own"),
        (model(score_mod_=1), "attribute 'score_mod_', whose meaning is not known"),
        (model(softmax_precision=TensorProto.DOUBLE), "softmax_precision is DOUBLE"),
        (model(softmax_precision=TensorProto.INT8), "'softmax_precision' is 3, expected one of 1 (FLOAT)"),
        (model(softmax_precision=1.0), "'softmax_precision' is of type FLOAT, expected an integer"),
        (model(scale=1), "'scale' is of type INT, expected a float"),
        (model(scale=float("nan")), "'scale' is nan, expected a finite number"),
        (
            model(shapes=(("B", 4, "S", 8), ("B", 3, "S", 8), ("B", 3, "S", 8))),
            "4 query heads are no multiple of 3 key heads",
        ),
        (
            model(shapes=(("B", 4, "S", 8), ("B", 2, "S", 8), ("B", 4, "S", 8))),
            "2 key heads and 4 value heads",
        ),
        (model(dtype=TensorProto.DOUBLE), "has element type DOUBLE"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_refused(given: onnx.ModelProto, reason: str, tmp_path: Path) -> None:
    """What has no meaning, or none that the operator has, keeps the node with the reason; the file is copied."""
    report, target = forced(given, tmp_path)
    assert {s.site: s.replaced for s in report.sites}["flex"] is False
    assert not report.replaced
    assert reason in next(s.reason for s in report.sites if s.site == "flex")
    assert target.read_bytes() == (tmp_path / "model.onnx").read_bytes()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (helper.make_attribute("score_mod", 3), "'score_mod' is 3, expected a graph"),
        (helper.make_attribute("score_mod", TWO_INPUTS), "has 2 inputs and 1 outputs, expected one of each"),
    ],
)
def test_a_modifier_that_is_none(value: onnx.AttributeProto, reason: str, tmp_path: Path) -> None:
    """An attribute of another type, and a graph of another signature."""
    given = model()
    given.graph.node[0].attribute.append(value)
    report, _ = forced(given, tmp_path)
    assert [s.replaced for s in report.sites] == [False]
    assert reason in report.sites[0].reason
