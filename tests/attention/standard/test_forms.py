# SPDX-License-Identifier: Apache-2.0
"""Sites that become ONNX's Attention: plain files that run without the library, held against fp64 NumPy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from fused_attention_nodes import run
from onnx import TensorProto, helper, parser
from onnx.reference import ReferenceEvaluator
from score_graphs import POSITIONS, Feeds, Meaning, allowed, attend
from standard_models import force_standard

from stof.attention.standard import decide
from stof.attention.standard.form import StandardForm
from stof.attention.standard.runtime import installed_runtime
from stof.graph.index import all_nodes, opset_of
from stof.mask.site import AttentionSite

H, D = 4, 8
GUARD = """
    isnan = IsNaN (p0)
    guarded = Constant <value = float {0.0}> ()
    p = Where (isnan, guarded, p0)
"""


@dataclass(frozen=True)
class Form:
    """A graph: nodes from scores s to masked scores m, and what they mean; the form that is written."""

    body: str
    meaning: Meaning
    kernel: str
    inputs: str = ""  # of the model, besides q, k, v
    guard: bool = True
    groups: int = H
    rank: int = 4
    query: str = ""  # nodes from query t0 to t
    draw: dict[str, Callable[[np.random.Generator, int, int, int], np.ndarray]] = field(default_factory=dict)
    opset: int = 23
    dtype: type = np.float32

    def model(self, opset: int = 17) -> onnx.ModelProto:
        """The graph with symbolic sizes."""
        kind = "float" if self.dtype is np.float32 else "float16"
        shapes = (
            (f"B, S, {H * D}", f"B, T, {self.groups * D}", f"B, T, {self.groups * D}")
            if self.rank == 3
            else (f"B, {H}, S, {D}", f"B, {self.groups}, T, {D}", f"B, {self.groups}, T, {D}")
        )
        given = ", ".join(f"{kind}[{s}] {n}" for n, s in zip("qkv", shapes, strict=True))
        split = "".join(
            f"""h{n} = Constant <value = int64[4] {{0, 0, {c}, {D}}}> ()
            r{n} = Reshape ({n}, h{n})
            t{n} = Transpose <perm = [0, 2, 1, 3]> (r{n})
            """
            if self.rank == 3
            else f"t{n} = Identity ({n})\n"
            for n, c in (("q", H), ("k", self.groups), ("v", self.groups))
        )
        repeat = "".join(
            f"""u{n}0 = Constant <value = int64[1] {{2}}> ()
            u{n}1 = Unsqueeze (t{n}, u{n}0)
            e{n} = Constant <value = int64[5] {{1, 1, {H // self.groups}, 1, 1}}> ()
            u{n}2 = Expand (u{n}1, e{n})
            f{n} = Constant <value = int64[4] {{0, {H}, -1, {D}}}> ()
            w{n} = Reshape (u{n}2, f{n})
            """
            if self.groups < H
            else f"w{n} = Identity (t{n})\n"
            for n in "kv"
        )
        merge = (
            f"""o1 = Transpose <perm = [0, 2, 1, 3]> (o)
            hm = Constant <value = int64[3] {{0, 0, {H * D}}}> ()
            y = Reshape (o1, hm)"""
            if self.rank == 3
            else "y = Identity (o)"
        )
        out = f"B, S, {H * D}" if self.rank == 3 else f"B, {H}, S, {D}"
        more = f", {self.inputs}" if self.inputs else ""
        return parser.parse_model(f"""<ir_version: 8, opset_import: ["" : {opset}]>
        layer ({given}{more}) => ({kind}[{out}] y) {{
            {split} {repeat} {self.query.replace("t0", "tq") or "t = Identity (tq)"}
            kt = Transpose <perm = [0, 1, 3, 2]> (wk)
            s0 = MatMul (t, kt)
            quarter = Constant <value = float {{0.25}}> ()
            scale = Cast <to = {1 if kind == "float" else 10}> (quarter)
            s = Mul (s0, scale)
            {self.body}
            [site] p0 = Softmax <axis = -1> (m)
            {GUARD if self.guard else "p = Identity (p0)"}
            o = MatMul (p, wv)
            {merge}
        }}""")

    def feeds(self, batch: int, queries: int, keys: int, seed: int) -> Feeds:
        """Random inputs."""
        rng = np.random.default_rng(seed)
        shapes = {"q": (batch, H, queries, D), "k": (batch, self.groups, keys, D), "v": (batch, self.groups, keys, D)}
        feeds = {n: rng.standard_normal(s).astype(self.dtype) for n, s in shapes.items()}
        if self.rank == 3:
            feeds = {n: x.transpose(0, 2, 1, 3).reshape(batch, x.shape[2], -1) for n, x in feeds.items()}
        return feeds | {n: make(rng, batch, queries, keys) for n, make in self.draw.items()}

    def define(self, feeds: Feeds) -> np.ndarray:
        """The result in fp64."""
        q, k, v = (feeds[n].astype(np.float64) for n in "qkv")
        if self.rank == 3:
            q, k, v = (x.reshape(*x.shape[:2], -1, D).transpose(0, 2, 1, 3) for x in (q, k, v))
        if "temperature" in feeds:
            q = q * feeds["temperature"]
        out = attend(q, k, v, 0.25, lambda scores: self.meaning(scores, feeds))
        out = np.nan_to_num(out) if self.guard else out
        return out.transpose(0, 2, 1, 3).reshape(out.shape[0], out.shape[2], -1) if self.rank == 3 else out


def ragged(rng: np.random.Generator, batch: int, _: int, keys: int) -> np.ndarray:
    """Padding on the right [B, T]; the last row is all padding."""
    lengths = rng.integers(1, keys, (batch, 1), endpoint=True)
    lengths[-1] = 0 if batch > 1 else keys
    return (np.arange(keys) < lengths).astype(np.int64)


def lengths(rng: np.random.Generator, batch: int, _: int, keys: int) -> np.ndarray:
    """Numbers of keys [B], also more than there are and fewer than none."""
    found = rng.integers(0, keys, batch, endpoint=True)
    found[0], found[-1] = keys + 3, -2 if batch > 1 else keys
    return found


CAUSAL = POSITIONS + "c = LessOrEqual (ks, qs)\n m = Where (c, s, inf)"
WINDOW = POSITIONS + (
    "d = Sub (qs, ks)\n a = Abs (d)\n w = Constant <value = int64 {2}> ()\n c = LessOrEqual (a, w)\n m = Where (c, s, inf)"
)
PADDING = (
    POSITIONS
    + """
    ax = Constant <value = int64[2] {1, 2}> ()
    pad4 = Unsqueeze (pad, ax)
    real = Cast <to = 9> (pad4)
    c = Where (real, nothing, %s)
    m = Add (s, c)
"""
)
LENGTHS = (
    POSITIONS
    + """
    ax = Constant <value = int64[3] {1, 2, 3}> ()
    l4 = Unsqueeze (n, ax)
    c = Less (ks, l4)
    m = Where (c, s, inf)
"""
)
BIAS = POSITIONS + "m = Add (s, bias)"
DOCUMENTS = (
    POSITIONS
    + """
    ax1 = Constant <value = int64[2] {1, 3}> ()
    ax2 = Constant <value = int64[2] {1, 2}> ()
    d1 = Unsqueeze (documents, ax1)
    d2 = Unsqueeze (documents, ax2)
    c = Equal (d1, d2)
    m = Where (c, s, inf)
"""
)


def is_real(q: np.ndarray, k: np.ndarray, feeds: Feeds) -> np.ndarray:
    """Keys that are no padding."""
    return feeds["pad"][:, None, None, :] != 0


FORMS = {
    "nothing": Form("m = Identity (s)", lambda s, _: s, "Attention-23"),
    "nothing, rank 3": Form("m = Identity (s)", lambda s, _: s, "Attention-23", rank=3),
    "shared heads": Form("m = Identity (s)", lambda s, _: s, "Attention-23", groups=2),
    "shared heads, rank 3": Form(CAUSAL, allowed(lambda q, k, _: k <= q), "Attention-23: is_causal", groups=2, rank=3),
    "causal": Form(CAUSAL, allowed(lambda q, k, _: k <= q), "Attention-23: is_causal"),
    "causal, no guard": Form(CAUSAL, allowed(lambda q, k, _: k <= q), "Attention-23: is_causal", guard=False),
    "window": Form(WINDOW, allowed(lambda q, k, _: abs(q - k) <= 2), "Attention-23: boolean attn_mask"),
    "padding of -inf": Form(
        PADDING % "inf",
        allowed(is_real),
        "Attention-23: boolean attn_mask",
        "int64[B, T] pad",
        draw={"pad": ragged},
    ),
    "padding of the lowest number": Form(
        PADDING % "lowest",
        allowed(is_real, -1e300),  # the mean of all values where a row has no key
        "Attention-23: float attn_mask",
        "int64[B, T] pad",
        guard=False,
        draw={"pad": ragged},
    ),
    "padding of the lowest number, rank 3": Form(
        PADDING % "lowest",
        allowed(is_real, -1e300),
        "Attention-23: float attn_mask",
        "int64[B, T] pad",
        guard=False,
        rank=3,
        draw={"pad": ragged},
    ),
    "lengths": Form(
        LENGTHS,
        allowed(lambda q, k, f: k < f["n"][:, None, None, None]),
        "Attention-24: nonpad_kv_seqlen",
        "int64[B] n",
        draw={"n": lengths},
        opset=24,
    ),
    "lengths of int32, causal": Form(
        LENGTHS.replace("Unsqueeze (n", "Unsqueeze (n64")
        .replace("ax = ", "n64 = Cast <to = 7> (n)\n ax = ")
        .replace("m = Where (c, s, inf)", "e = LessOrEqual (ks, qs)\n ce = And (c, e)\n m = Where (ce, s, inf)"),
        allowed(lambda q, k, f: (k < f["n"][:, None, None, None]) & (k <= q)),
        "Attention-24: nonpad_kv_seqlen, boolean attn_mask",
        "int32[B] n",
        draw={"n": lambda *a: lengths(*a).astype(np.int32)},
        opset=24,
    ),
    "a bias of the caller": Form(
        BIAS,
        lambda s, f: s + f["bias"],
        "Attention-23: float attn_mask",
        f"float[1, {H}, S, T] bias",
        draw={"bias": lambda rng, _, s, t: rng.standard_normal((1, H, s, t)).astype(np.float32)},
    ),
    "a bias of the caller for all queries": Form(
        BIAS,
        lambda s, f: s + f["bias"],
        "Attention-23: float attn_mask",
        "float[B, 1, 1, T] bias",
        draw={"bias": lambda rng, b, _, t: rng.standard_normal((b, 1, 1, t)).astype(np.float32)},
    ),
    "a bias beside a causal mask": Form(
        CAUSAL.replace("m = Where (c, s, inf)", "s1 = Add (s, bias)\n m = Where (c, s1, inf)"),
        lambda s, f: allowed(lambda q, k, _: k <= q)(s + f["bias"], f),
        "Attention-23: is_causal, float attn_mask",
        f"float[B, {H}, S, T] bias",
        draw={"bias": lambda rng, b, s, t: rng.standard_normal((b, H, s, t)).astype(np.float32)},
    ),
    "documents": Form(
        DOCUMENTS,
        allowed(lambda q, k, f: f["documents"][:, None, :, None] == f["documents"][:, None, None, :]),
        "Attention-23: boolean attn_mask",
        "int64[B, S] documents",
        draw={"documents": lambda rng, b, s, _: np.sort(rng.integers(0, 3, (b, s)))},
    ),
    "a soft cap": Form(
        "cap = Constant <value = float {2.0}> ()\n c1 = Div (s, cap)\n c2 = Tanh (c1)\n m = Mul (c2, cap)",
        lambda s, _: 2 * np.tanh(s / 2),
        "Attention-23",
    ),
    "a temperature": Form(
        "m = Identity (s)",
        lambda s, _: s,
        "Attention-23",
        "float[1] temperature",
        query="t = Mul (t0, temperature)",
        draw={"temperature": lambda rng, *_: rng.random(1).astype(np.float32)},
    ),
}


def check_plain(model: onnx.ModelProto, original: onnx.ModelProto) -> None:
    """No operator, function or opset of another domain than the original has."""
    domains = {n.domain for n in all_nodes(model.graph.node)} | {e.domain for e in model.opset_import}
    assert domains <= {n.domain for n in all_nodes(original.graph.node)} | {""}
    assert not model.functions
    onnx.checker.check_model(model, full_check=True)


@pytest.mark.parametrize("name", FORMS)
def test_forms(name: str, tmp_path: Path) -> None:
    """The node has the form that was decided; ONNX Runtime and onnx's evaluator give what fp64 gives, without the library."""
    form = FORMS[name]
    original = form.model()
    report, target = force_standard(original, tmp_path)
    (site,) = report.sites
    assert site.replaced, site.reason
    assert site.kernel == form.kernel
    assert report.verification is not None
    assert not report.verification.failures
    assert [c.site for c in report.verification.comparisons if c.site] == [site.site]
    optimized = onnx.load(target)
    check_plain(optimized, original)
    assert opset_of(optimized) == form.opset
    assert [n.op_type for n in optimized.graph.node].count("Attention") == 1
    assert not any(n.op_type in ("Softmax", "MatMul") for n in optimized.graph.node)
    is_square = "documents" in form.inputs or "causal" in name or name in ("window", "shared heads, rank 3")
    for seed, (batch, queries, keys) in enumerate(((1, 1, 1), (2, 7, 7), (3, 20, 20), (2, 5, 9), (2, 9, 5))):
        if is_square and queries != keys:
            continue
        feeds = form.feeds(batch, queries, keys, seed)
        wanted = form.define(feeds)
        np.testing.assert_allclose(run(target, feeds)[0], wanted, atol=3e-5, rtol=3e-5)
        evaluated = ReferenceEvaluator(optimized).run(None, feeds)[0]
        np.testing.assert_allclose(evaluated, wanted, atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("opset", [13, 14, 16, 18, 20, 22, 23, 24, 25, 26])
def test_opsets(opset: int, tmp_path: Path) -> None:
    """A model of an older opset gets 23; one of a later opset keeps its own."""
    body = CAUSAL
    if opset < 15:  # Shape takes no range there
        body = body.replace("Shape <start = 2, end = 3> (s)", "Gather (sh, i2)")
        body = body.replace("Shape <start = 3, end = 4> (s)", "Gather (sh, i3)")
        body = (
            "sh = Shape (s)\n i2 = Constant <value = int64[1] {2}> ()\n i3 = Constant <value = int64[1] {3}> ()\n"
            + body
        )
    form = Form(body, FORMS["causal"].meaning, "Attention-23: is_causal", rank=3)
    original = form.model(opset)
    original.graph.node[0].metadata_props.add(key="origin", value="a test")
    report, target = force_standard(original, tmp_path)
    assert [s.replaced for s in report.sites] == [True]
    optimized = onnx.load(target)
    assert opset_of(optimized) == max(opset, 23)
    assert optimized.ir_version == (11 if opset < 23 else original.ir_version)
    feeds = form.feeds(2, 9, 9, 0)
    np.testing.assert_allclose(run(target, feeds)[0], form.define(feeds), atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("opset", [24, 25])
def test_windows_as_attributes(opset: int, tmp_path: Path) -> None:
    """A model of opset 25 states its windows by attributes in runtimes that take them; any other one by a mask."""
    form = FORMS["window"]
    report, target = force_standard(form.model(opset), tmp_path)
    has_attributes = opset == 25 and installed_runtime().has_windows
    wanted = "Attention-25: window (2, 2)" if has_attributes else "Attention-23: boolean attn_mask"
    assert [(s.replaced, s.kernel) for s in report.sites] == [(True, wanted)]
    assert opset_of(onnx.load(target)) == opset
    for seed, length in enumerate((1, 7, 40)):
        feeds = form.feeds(2, length, length, seed)
        np.testing.assert_allclose(run(target, feeds)[0], form.define(feeds), atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("rank", [3, 4])
def test_half_precision(rank: int, tmp_path: Path) -> None:
    """In fp16 the site is verified widened, and the file runs in its own types; the node has rank 4."""
    form = Form("m = Identity (s)", lambda s, _: s, "Attention-23", guard=False, dtype=np.float16, rank=rank)
    report, target = force_standard(form.model(), tmp_path)
    assert [s.replaced for s in report.sites] == [True]
    assert report.verification is not None
    assert report.verification.widened
    (node,) = (n for n in onnx.load(target).graph.node if n.op_type == "Attention")
    assert not any(a.name == "q_num_heads" for a in node.attribute)
    feeds = form.feeds(2, 9, 9, 0)
    np.testing.assert_allclose(run(target, feeds)[0], form.define(feeds), atol=3e-3, rtol=3e-3)


def two_layers(form: Form) -> onnx.ModelProto:
    """The second has the result of the first as its query."""
    first, second = form.model(), form.model()
    names = {n: f"second_{n}" for node in second.graph.node for n in node.output} | {"q": "y", "y": "z"}
    for node in second.graph.node:
        node.name = f"second_{node.name}" if node.name else ""
        for names_of in (node.input, node.output):
            for i, name in enumerate(names_of):
                names_of[i] = names.get(name, name)
    first.graph.node.extend(second.graph.node)
    first.graph.output[0].name = "z"
    return first


def test_layers_share_their_mask(tmp_path: Path) -> None:
    """Two layers with masks of their own in the graph have one attn_mask in the result."""
    form = FORMS["padding of the lowest number"]
    report, target = force_standard(two_layers(form), tmp_path)
    assert [s.replaced for s in report.sites] == [True, True]
    nodes = [n for n in onnx.load(target).graph.node if n.op_type == "Attention"]
    assert len(nodes) == 2
    assert nodes[0].input[3] == nodes[1].input[3]
    feeds = form.feeds(2, 9, 9, 0)
    once = form.define(feeds)
    wanted = form.define(feeds | {"q": once.astype(np.float32)})
    np.testing.assert_allclose(run(target, feeds)[0], wanted, atol=5e-5, rtol=5e-5)


def test_layers_that_treat_a_bias_differently_share_no_mask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one layer it is proven that each row has a key: its bias is not raised, the other's is."""
    choose = decide.choose_form

    def choose_form(site: AttentionSite, *arguments: Any, **options: Any) -> StandardForm:
        return choose(site, *arguments, **{**options, "every_row_has_key": site.name == "site"})

    monkeypatch.setattr(decide, "choose_form", choose_form)
    form = FORMS["a bias of the caller"]
    report, target = force_standard(two_layers(form), tmp_path, verify=False)  # the proof is untrue
    assert [s.replaced for s in report.sites] == [True, True]
    model = onnx.load(target)
    nodes = [n for n in model.graph.node if n.op_type == "Attention"]
    writers = {o: n.op_type for n in model.graph.node for o in n.output}
    assert [writers.get(n.input[3], "") for n in nodes] == ["", "Where"]


def test_a_model_with_other_domains(tmp_path: Path) -> None:
    """ONNX Runtime's own operators and local functions of the original stay, in the raised opset."""
    model = FORMS["causal"].model()
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    model.opset_import.append(helper.make_opsetid("local", 1))
    relu = helper.make_node("Relu", ["x"], ["r"])
    model.functions.append(
        helper.make_function("local", "Rectify", ["x"], ["r"], [relu], [helper.make_opsetid("", 17)])
    )
    model.graph.node[-1].output[0] = "before"
    model.graph.node.append(helper.make_node("Gelu", ["before"], ["gelu"], domain="com.microsoft"))
    model.graph.node.append(helper.make_node("Rectify", ["gelu"], ["y"], domain="local"))
    report, target = force_standard(model, tmp_path)
    assert [s.replaced for s in report.sites] == [True]
    optimized = onnx.load(target)
    assert {e.domain: e.version for e in optimized.opset_import} == {"": 23, "com.microsoft": 1, "local": 1}
    assert [n.op_type for n in optimized.graph.node][-3:] == ["Identity", "Gelu", "Rectify"] or [
        n.op_type for n in optimized.graph.node
    ][-2:] == ["Gelu", "Rectify"]
    feeds = FORMS["causal"].feeds(2, 9, 9, 0)
    for a, b in zip(run(target, feeds), run(model, feeds), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-5, rtol=3e-5)


def test_fp32_types_are_declared(tmp_path: Path) -> None:
    """Types of what is written are stated, and right: onnx's full check infers them anew."""
    _, target = force_standard(FORMS["lengths of int32, causal"].model(), tmp_path)
    optimized = onnx.load(target)
    onnx.checker.check_model(optimized, full_check=True)
    kinds = {v.name: v.type.tensor_type.elem_type for v in optimized.graph.value_info}
    assert {k for n, k in kinds.items() if n.startswith("stof_lengths")} == {TensorProto.INT64}
