# SPDX-License-Identifier: Apache-2.0
"""Expanded fused nodes give the same outputs in ONNX Runtime, before and after they are replaced."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from fused_attention_nodes import BOOL, FLOAT, INT32, INT64, Fused, Given, expanded, forced, run, same
from onnx.reference import ReferenceEvaluator

import stof
from stof.attention.expand.contrib import expand_multi_head
from stof.attention.expand.expanders import _EXPANDERS, make_working_copy
from stof.attention.expand.working_copy import FusedNode
from stof.attention.plan_entry import SitePlan
from stof.errors import VerifyError
from stof.mask.check import run_masks as mask_run
from stof.options import Options
from stof.plan import Plan

SIZES = ({"B": 2, "S": 5, "T": 5, "U": 9, "P": 4, "PS": 9}, {"B": 3, "S": 17, "T": 17, "U": 6, "P": 1, "PS": 18})
LOWEST = float(np.finfo(np.float32).min)


def qkv(keys: str = "S", width: int = 8, values: int = 8) -> tuple[Given, Given, Given]:
    """Query, key and value [B, length, heads * size]."""
    return Given("q", ("B", "S", width)), Given("k", ("B", keys, width)), Given("v", ("B", keys, values))


PAST = (Given("past_key", ("B", 2, "P", 4)), Given("past_value", ("B", 2, "P", 4)))
BIAS = Given("bias", (24,))
TWO = {"num_heads": 2}

# name: (node, the lifted mask)
MULTI_HEAD = {
    "plain": (Fused("MultiHeadAttention", qkv("U"), TWO), ""),
    "values of another size": (Fused("MultiHeadAttention", qkv("U", 8, 12), {"num_heads": 2, "scale": 0.3}), ""),
    "projection bias": (Fused("MultiHeadAttention", (*qkv(), BIAS), TWO), ""),
    "keys and values of a cache": (
        Fused(
            "MultiHeadAttention",
            (Given("q", ("B", "S", 8)), Given("k", ("B", 2, "U", 4)), Given("v", ("B", 2, "U", 4))),
            TWO,
        ),
        "",
    ),
    "lengths": (
        Fused("MultiHeadAttention", (*qkv("U"), None, Given("lengths", ("B",), INT32, 1, "U")), TWO),
        "k + 1 <= lengths[b]",
    ),
    "padding of keys": (
        Fused("MultiHeadAttention", (*qkv("U"), None, Given("pad", ("B", "U"), INT32)), TWO),
        "pad[b, k]",
    ),
    "padding of keys, another fill": (
        Fused(
            "MultiHeadAttention",
            (*qkv("U"), None, Given("pad", ("B", "U"), INT32)),
            {"num_heads": 2, "mask_filter_value": LOWEST},
        ),
        "pad[b, k]",
    ),
    "attention bias": (
        Fused("MultiHeadAttention", (*qkv("U"), None, None, Given("added", (1, 2, "S", "U"), masked=0.3)), TWO),
        "",
    ),
    "unidirectional": (Fused("MultiHeadAttention", qkv(), {"num_heads": 2, "unidirectional": 1}), "k <= q"),
    "past": (Fused("MultiHeadAttention", (*qkv(), None, None, None, *PAST), TWO, outputs=3), ""),
    "unidirectional, past": (
        Fused(
            "MultiHeadAttention",
            (*qkv(), None, None, None, *PAST),
            {"num_heads": 2, "unidirectional": 1},
            outputs=3,
        ),
        "k <= q",
    ),
}

WEIGHTS = (Given("x", ("B", "S", 6)), Given("weights", (6, 24)), Given("bias", (24,)))
PROJECTING = {
    "plain": (Fused("Attention", WEIGHTS, TWO), ""),
    "values of another size": (
        Fused(
            "Attention",
            (WEIGHTS[0], Given("weights", (6, 28)), Given("bias", (28,))),
            {"num_heads": 2, "qkv_hidden_sizes": [8, 8, 12]},
        ),
        "",
    ),
    "padding of keys": (Fused("Attention", (*WEIGHTS, Given("pad", ("B", "S"), INT32)), TWO), "pad[b, k]"),
    "lengths": (
        Fused("Attention", (*WEIGHTS, Given("lengths", ("B",), INT32, 1, "S")), TWO),
        "k + 1 <= lengths[b]",
    ),
    "unidirectional": (Fused("Attention", WEIGHTS, {"num_heads": 2, "unidirectional": 1}), "k <= q"),
    "past": (
        Fused(
            "Attention",
            (*WEIGHTS, None, Given("past", (2, "B", 2, "P", 4))),
            {"num_heads": 2, "unidirectional": 1},
            outputs=2,
        ),
        "k <= q",
    ),
    "attention bias": (
        Fused("Attention", (*WEIGHTS, None, None, Given("added", (1, 2, "S", "S"), masked=0.2)), TWO),
        "",
    ),
}


def standard(
    inputs: tuple[Given | None, ...], attributes: dict[str, object], outputs: int = 1, opset: int = 24, rank: int = 4
) -> Fused:
    """An Attention of the standard domain."""
    return Fused("Attention", inputs, attributes, outputs, rank, "", opset)


FOUR = (Given("q", ("B", 4, "S", 8)), Given("k", ("B", 2, "U", 8)), Given("v", ("B", 2, "U", 6)))
SELF = (Given("q", ("B", 4, "S", 8)), Given("k", ("B", 4, "S", 8)), Given("v", ("B", 4, "S", 8)))
KEPT = (Given("past_key", ("B", 4, "P", 8)), Given("past_value", ("B", 4, "P", 8)))
PACKED_HEADS = {"q_num_heads": 4, "kv_num_heads": 2}
STANDARD = {
    "grouped, values of another size": (standard(FOUR, {}, opset=23), ""),
    "rank 3": (
        standard(
            (Given("q", ("B", "S", 32)), Given("k", ("B", "U", 16)), Given("v", ("B", "U", 12))),
            PACKED_HEADS,
            rank=3,
            opset=23,
        ),
        "",
    ),
    "causal": (standard(SELF, {"is_causal": 1}, opset=23), "k <= q"),
    "causal, more or fewer keys": (standard(FOUR, {"is_causal": 1}), "k <= q"),
    "softcap and scale": (standard(SELF, {"softcap": 2.5, "scale": 0.7, "is_causal": 1}), "k <= q"),
    "float mask with empty rows": (standard((*FOUR, Given("m", ("S", "U"), masked=0.8)), {}), ""),
    "float mask with lowest rows": (standard((*FOUR, Given("m", ("S", "U"), masked=0.8, fill=LOWEST)), {}), ""),
    "float mask per head, causal": (
        standard((*FOUR, Given("m", (4, "S", "U"), masked=0.2)), {"is_causal": 1}),
        "k <= q",
    ),
    "boolean mask as data, causal": (standard((*FOUR, Given("m", (1, 1, "S", "U"), BOOL)), {"is_causal": 1}), "k <= q"),
    "past and present, causal": (
        standard((*SELF, None, *KEPT), {"is_causal": 1}, outputs=3),
        "k <= q",
    ),
    "present without past": (standard(SELF, {}, outputs=3), ""),
    "lengths of a cache": (
        standard((*FOUR, None, None, None, Given("n", ("B",), INT64, 1, "U")), {}),
        "k + 1 <= lengths[b]",
    ),
    "causal at the end of a cache": (
        standard((*FOUR, None, None, None, Given("n", ("B",), INT64, 1, "U")), {"is_causal": 1}),
        "S + k <= lengths[b] + q",
    ),
    "a softmax of another precision": (standard(SELF, {"softmax_precision": 1, "is_causal": 1}), "k <= q"),
}
CASES = (
    {f"standard Attention, {n}": c for n, c in STANDARD.items()}
    | {f"MultiHeadAttention, {n}": c for n, c in MULTI_HEAD.items()}
    | {f"Attention, {n}": c for n, c in PROJECTING.items()}
)


@pytest.mark.parametrize("name", CASES)
def test_expanded(name: str) -> None:
    """The working copy gives what the fused node gives."""
    node, _ = CASES[name]
    model = node.model()
    working = expanded(model).model
    assert not any(n.op_type == node.op for n in working.graph.node)
    for seed, sizes in enumerate(SIZES):
        feeds = node.feeds(sizes, seed)
        same(run(working, feeds), run(model, feeds))


@pytest.mark.parametrize("name", CASES)
def test_replaced(name: str, tmp_path: Path) -> None:
    """The site is replaced with the mask that the node means, and gives what the fused node gives."""
    node, mask = CASES[name]
    model = node.model()
    report, target = forced(model, tmp_path)
    (site,) = report.sites
    assert site.replaced, site.reason
    assert (site.site, site.mask) == (node.name, mask)
    for seed, sizes in enumerate(SIZES):
        feeds = node.feeds(sizes, seed)
        for library in (True, False):
            same(run(target, feeds, library=library), run(model, feeds))


@pytest.mark.parametrize("op", ["Attention", "MultiHeadAttention"])
def test_masks_of_different_strength(op: str, tmp_path: Path) -> None:
    """Causal by the lowest number, padding by -10000: a row whose keys are padding attends to them, not to later keys."""
    first = WEIGHTS if op == "Attention" else (*qkv(), None)
    node = Fused(op, (*first, Given("pad", ("B", "S"), INT32)), {"num_heads": 2, "unidirectional": 1})
    report, target = forced(node.model(), tmp_path)
    (site,) = report.sites
    assert (site.replaced, site.mask) == (True, "k <= q"), site.reason
    for seed, sizes in enumerate(SIZES):
        feeds = node.feeds(sizes, seed)
        feeds["pad"][0, :3] = 0
        for library in (True, False):
            # Beside -10000, fp32 rounds a score to 0.001.
            same(run(target, feeds, library=library), run(node.model(), feeds), tolerance=2e-3)


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        (Fused("MultiHeadAttention", qkv(), TWO | {"softcap": 2.0}), "attribute 'softcap'"),
        (Fused("Attention", (*WEIGHTS, *[None] * 4, Given("more", (1,))), TWO), "input 7"),
        (Fused("Attention", WEIGHTS, TWO | {"past_present_share_buffer": 1}), "share a buffer"),
        (Fused("Attention", SELF, {"new": 1}, 1, 4, "", 24), "attribute 'new'"),
        (Fused("MultiHeadAttention", qkv("U"), TWO | {"unidirectional": 1}), "which keys come before a query"),
        (
            Fused("MultiHeadAttention", (*qkv("U"), None, None, None, *PAST), TWO | {"unidirectional": 1}, outputs=3),
            "which keys come before a query",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_refused(node: Fused, reason: str) -> None:
    """What is not known, or has no meaning, is left with the reason; so is what an operator may come to mean."""
    found = make_working_copy(node.model())
    assert found.model is not None
    assert [(f.site, f.replaced) for f in found.findings] == [(node.name, False)]
    assert reason in found.findings[0].reason
    assert [n.op_type for n in found.model.graph.node] == [node.op]


def test_projections_without_a_bias(tmp_path: Path) -> None:
    """ONNX Runtime's CPU provider ends the process at this node before version 1.32: the expanded nodes are verified then.

    A fault of one version is no reason to keep a node.
    """
    report, target = forced(Fused("Attention", WEIGHTS[:2], TWO).model(), tmp_path)
    (site,) = report.sites
    assert site.replaced, site.reason
    with_zeros = Fused("Attention", WEIGHTS, TWO)
    for seed, sizes in enumerate(SIZES):
        feeds = with_zeros.feeds(sizes, seed) | {"bias": np.zeros(24, np.float32)}
        given = {name: array for name, array in feeds.items() if name != "bias"}
        for library in (True, False):
            same(run(target, given, library=library), run(with_zeros.model(), feeds))


def test_a_wrong_expansion_is_no_rounding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of expanded nodes show what rounding does to them, not that the fused node may compute something else."""

    def wrong(request: FusedNode) -> None:
        request.attributes["scale"] = 0.6
        expand_multi_head(request)

    monkeypatch.setitem(_EXPANDERS, ("com.microsoft", "MultiHeadAttention"), wrong)
    for padding in ((), (None, Given("pad", ("B", "S"), INT32))):  # with -10000, also computed in fp64
        node = Fused("MultiHeadAttention", (*qkv(), *padding), TWO)
        with pytest.raises(VerifyError, match="differs by"):
            forced(node.model(), tmp_path)


def test_ends_and_starts(tmp_path: Path) -> None:
    """A vector of ends and starts of each row's keys is no vector of lengths: left, with the reason."""
    node = Fused("Attention", (*WEIGHTS, Given("ends", ("B2",), INT32)), TWO)
    report, _ = forced(node.model(), tmp_path)
    assert [(s.site, s.replaced) for s in report.sites] == [("the/node", False)]
    assert "expected the lengths of the batch's rows" in report.sites[0].reason
    assert report.copied


def test_a_node_that_stays_is_as_it_was(tmp_path: Path) -> None:
    """Of two fused nodes one is left out: its NodeProto, byte for byte, is in the optimized model."""
    first = Fused("MultiHeadAttention", qkv(), {"num_heads": 2, "unidirectional": 1}).model()
    second = first.graph.node.add()
    second.CopyFrom(first.graph.node[0])
    second.name, second.output[0] = "other/node", "out1"
    second.metadata_props.add(key="origin", value="a test")
    second.doc_string = "stays"
    second.input[0] = "out0"
    first.graph.output.append(onnx.helper.make_tensor_value_info("out1", FLOAT, [None] * 3))
    onnx.save(first, tmp_path / "model.onnx")
    options = Options(skip=("other/node",))
    report = stof.optimize(tmp_path / "model.onnx", tmp_path / "optimized.onnx", options)
    assert {(s.site, s.replaced) for s in report.sites} == {("the/node", True), ("other/node", False)}
    optimized = onnx.load(tmp_path / "optimized.onnx")
    kept = next(n for n in optimized.graph.node if n.op_type == "MultiHeadAttention")
    assert kept.SerializeToString(deterministic=True) == second.SerializeToString(deterministic=True)
    assert not any("/stof_" in name for name in kept.input)


@pytest.mark.parametrize("skipped", [0, 1])
def test_one_node_feeds_another(skipped: int, tmp_path: Path) -> None:
    """The result of one is the query of the next, one of them stays: nothing is written into what stays."""
    layer = Fused("MultiHeadAttention", qkv(), TWO).model()
    second = layer.graph.node.add()
    second.CopyFrom(layer.graph.node[0])
    second.name, second.input[0], second.output[0] = "other/node", "out0", "out1"
    layer.graph.output[0].name = "out1"
    onnx.save(layer, tmp_path / "model.onnx")
    target = tmp_path / "optimized.onnx"
    names = ["the/node", "other/node"]
    found = stof.optimize(tmp_path / "model.onnx", options=Options(dry_run=True))
    entries = tuple(SitePlan(s.site, s.site != names[skipped], s.mask) for s in found.sites)
    Plan({"sites": entries}).save(tmp_path / "plan.json")
    report = stof.optimize(tmp_path / "model.onnx", target, Options(plan=tmp_path / "plan.json"))
    assert {s.site: s.replaced for s in report.sites} == {n: n != names[skipped] for n in names}
    feeds = Fused("MultiHeadAttention", qkv(), TWO).feeds(SIZES[0], seed=1)
    for library in (True, False):
        same(run(target, feeds, library=library), run(layer, feeds))


def test_many_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that every layer makes for itself is run no more often in many layers than in two."""
    layer = Fused("MultiHeadAttention", (*qkv(), None, Given("pad", ("B", "S"), INT32)), TWO).model()
    node = layer.graph.node[0]
    runs: list[onnx.ModelProto] = []
    execute = mask_run._execute
    monkeypatch.setattr(mask_run, "_execute", lambda model, *given: (runs.append(model), execute(model, *given))[1])
    counts = {}
    for layers in (2, 20):
        while len(layer.graph.node) < layers:
            i = len(layer.graph.node)
            more = layer.graph.node.add()
            more.CopyFrom(node)
            more.name, more.input[0], more.output[0] = f"node{i}", f"out{i - 1}", f"out{i}"
        layer.graph.output[0].name = f"out{layers - 1}"
        onnx.save(layer, tmp_path / "model.onnx")
        runs.clear()
        report = stof.optimize(tmp_path / "model.onnx", options=Options(dry_run=True))
        assert len(report.sites) == layers
        assert {s.mask for s in report.sites} == {"pad[b, k]"}
        counts[layers] = len(runs)
    assert counts[20] == counts[2] > 0


WINDOWS = {
    "causal": ({"is_causal": 1, "left_window_size": 3}, "k <= q and q - k <= 3"),
    "both sides": ({"left_window_size": 2, "right_window_size": 1}, "k - q <= 1 and q - k <= 2"),
    "right side": ({"right_window_size": 4}, "k - q <= 4"),
    "left side": ({"left_window_size": 0}, "q <= k"),
    "causal beats right": ({"is_causal": 1, "right_window_size": 4}, "k <= q"),
}


COMPUTES_WINDOWS = (1, 32)  # the first ONNX Runtime whose CPU provider does


def _version() -> tuple[int, ...]:
    return tuple(map(int, ort.__version__.split(".")[:2]))


@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize("name", WINDOWS)
def test_windows(name: str, past: bool, tmp_path: Path) -> None:
    """Windows of opset 25, held against the onnx package's evaluator, and against ONNX Runtime where it computes them."""
    attributes, mask = WINDOWS[name]
    node = standard((*SELF, None, *KEPT) if past else SELF, attributes, 3 if past else 1, opset=25)
    model = node.model()
    report, target = forced(model, tmp_path)
    (site,) = report.sites
    assert site.replaced, site.reason
    assert site.mask == mask
    assert report.verification is not None
    is_computed = _version() >= COMPUTES_WINDOWS
    assert report.verification.expanded != is_computed
    assert ("ONNX Runtime does not run fused attention nodes of the original" in report.to_text()) != is_computed
    for seed, sizes in enumerate(SIZES):
        feeds = node.feeds(sizes, seed)
        wanted = ReferenceEvaluator(model).run(None, feeds)
        if is_computed:
            same(run(model, feeds), wanted)  # type: ignore[arg-type]
        for library in (True, False):
            same(run(target, feeds, library=library), wanted)  # type: ignore[arg-type]


@pytest.mark.parametrize("parts", [2, 3])
def test_packed(parts: int, tmp_path: Path) -> None:
    """Packed operands, which ONNX Runtime's CPU provider has no kernel for: the same as operands of their own."""
    first = Given("q", ("B", "S", 2, 3, 4)) if parts == 3 else Given("q", ("B", "S", 8))
    inputs = (first,) if parts == 3 else (first, Given("kv", ("B", "U", 2, 2, 4)))
    node = Fused("MultiHeadAttention", inputs, TWO)
    report, target = forced(node.model(), tmp_path)
    assert report.sites[0].replaced, report.sites[0].reason
    apart = Fused("MultiHeadAttention", qkv("U"), TWO).model()
    for seed, sizes in enumerate(SIZES):
        feeds = node.feeds(sizes, seed)
        packed = feeds["q"] if parts == 3 else feeds["kv"]
        split = [np.ascontiguousarray(packed[:, :, :, i]).reshape(*packed.shape[:2], -1) for i in range(parts)]
        operands = split if parts == 3 else [feeds["q"], *split]
        wanted = run(apart, dict(zip(("q", "k", "v"), operands, strict=True)))
        same(run(target, feeds, library=True), wanted)


def test_kinds_are_distinct() -> None:
    """No case is there twice."""
    assert len({(c[0].op, c[0].domain, str(c[0].inputs), str(c[0].attributes)) for c in CASES.values()}) == len(CASES)
    assert all(i is None or i.dtype in (BOOL, FLOAT, INT32, INT64) for c in CASES.values() for i in c[0].inputs)
