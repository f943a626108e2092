# SPDX-License-Identifier: Apache-2.0
"""Inputs that are drawn for decoders agree with each other, and lengths are read from any inputs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import onnx
import pytest
from gqa_models import Shape, model_of, session
from onnx import TensorProto, helper

from stof.cached_attention.checks.site_checks import CacheChecks
from stof.cached_attention.find import find_candidates
from stof.cached_attention.run_lengths import RunLengths
from stof.execution import runtime_faults
from stof.execution.case import Case, Padding
from stof.execution.runtime_faults import RuntimeFault
from stof.symbolic import Symbolic
from stof.verification.model_inputs import ModelInputs

GENAI = Shape(packed=True, rotary=16)


def checks_of(model: onnx.ModelProto, shapes: dict[str, tuple[int, int]] | None = None) -> CacheChecks:
    symbolic = Symbolic(model)
    sites = [c.site for c in find_candidates(model, symbolic, "cpu") if c.site is not None]
    return CacheChecks(model, model, symbolic, sites, shapes)


def drawn(model: onnx.ModelProto) -> tuple[ModelInputs, list[Case], list[dict[str, np.ndarray]]]:
    inputs = checks_of(model).model_inputs()
    cases = inputs.select_cases(1e9)
    return inputs, cases, inputs.draw(cases)


def lengths_of(model: onnx.ModelProto) -> RunLengths:
    checks = checks_of(model)
    rows = checks.model_inputs().rows
    assert isinstance(rows, RunLengths)
    return rows


def renamed(model: onnx.ModelProto, tensor: str, axis: int, name: str) -> onnx.ModelProto:
    value = next(i for i in model.graph.input if i.name == tensor)
    value.type.tensor_type.shape.dim[axis].dim_param = name
    return model


MODELS = {
    "lengths": model_of(GENAI),
    "masks": model_of(GENAI, masks=True),
    "window": model_of(replace(GENAI, window=5), masks=True),
    "sliding": model_of(Shape(window=6, sliding=True), masks=True),
    "positions": model_of(Shape(rotary=16, positions=True)),
    "capacity": model_of(GENAI, capacity=20, masks=True),
    "sum of sizes": renamed(model_of(GENAI, masks=True), "attention_mask", 1, "C + S"),
}


@pytest.mark.parametrize("name", MODELS)
def test_inputs_agree(name: str) -> None:
    """The runtime takes each set of inputs; lengths, total and capacity are legal; positions follow."""
    model = MODELS[name]
    inputs, cases, feeds = drawn(model)
    lengths = inputs.rows
    assert isinstance(lengths, RunLengths)
    (site,) = checks_of(model).cache_sites
    made = session(model, library=False)
    kinds = set()
    for case, feed in zip(cases, feeds, strict=True):
        keys, total = lengths.keys(site, feed), lengths.read(site.input("total_sequence_length"), feed)
        assert keys is not None
        assert total is not None
        queries, rows = feed["query"].shape[1], feed["past_key"].shape[2]
        assert int(total) == keys.max()
        assert keys.min() >= (1 if total == queries else queries)
        assert site.sliding or total - queries <= rows
        made.run(None, feed)
        kinds.add((total == queries, queries == 1, bool(np.ptp(keys))))
        if "position_ids" in feed:
            before = keys - queries if total != queries else 0 * keys
            assert (feed["position_ids"] == before[:, None] + np.arange(queries)).all()
        assert str(case)
    ragged_prompt, ragged_token = (True, False, True), (False, True, True)
    assert ragged_token in kinds or name == "sum of sizes"
    assert ragged_prompt in kinds or name in ("sliding", "sum of sizes")
    assert (False, False, False) in kinds


def test_fixed_sizes() -> None:
    """A graph of one token at a time has no prompts."""
    model = model_of(GENAI, capacity=16)
    for value in model.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == "S":
                dim.dim_value = 1
    _, cases, feeds = drawn(model)
    made = session(model, library=False)
    for feed in feeds:
        assert feed["query"].shape[1] == 1
        assert feed["total"] <= 16
        made.run(None, feed)
    assert cases


def test_a_case_without_sizes() -> None:
    """As times of whole models are measured: a prompt that fills the cache, with heads of their size."""
    model = renamed(model_of(GENAI, masks=True), "past_key", 3, "size")
    checks = checks_of(model)
    feed = checks.model_inputs().maker.draw(Case(1, 32, Padding.NONE), np.random.default_rng(0))
    assert feed["past_key"].shape == (1, 2, 32, 16)
    assert feed["query"].shape[1] == 32
    session(model, library=False).run(None, feed)


@pytest.mark.parametrize("shapes", [{"T": (200, 300)}, {"T": (4, 8)}, {"C": (100, 100)}, {"S": (6, 6)}, {"B": (2, 2)}])
def test_limits_of_a_user(shapes: dict[str, tuple[int, int]]) -> None:
    """Sizes that ``--shape`` limits stay in their ranges, and the runtime takes what follows."""
    model = model_of(GENAI, masks=True)
    inputs = replace(checks_of(model, shapes).model_inputs(), shapes=shapes)
    made = session(model, library=False)
    cases = inputs.select_cases(1e9)
    for feed in inputs.draw(cases):
        sizes = dict(zip("BT", feed["attention_mask"].shape, strict=True))
        sizes |= {"S": feed["query"].shape[1], "C": feed["past_key"].shape[2]}
        (name,) = shapes
        assert shapes[name][0] <= sizes[name] <= shapes[name][1]
        made.run(None, feed)
    assert len(cases) > (shapes.get("S") is None)


def test_lengths_of_inputs() -> None:
    """Counted in masks with padding anywhere, shifted by constants, or stored."""
    model = model_of(GENAI, masks=True)
    (site,) = checks_of(model).cache_sites
    mask = np.array([[1, 1, 0, 1], [0, 1, 0, 0]])
    lengths = lengths_of(model)
    feed = {"attention_mask": mask, "query": np.zeros((2, 4, 128), np.float32)}
    found = lengths.keys(site, feed)
    assert found is not None
    assert found.tolist() == [3, 1]
    padded = lengths.padded_queries(feed)
    assert padded is not None
    assert padded.tolist() == [[False] * 3 + [True], [False] + [True] * 3]
    held = lengths.cache_rows("present_key", feed, 5)
    assert held is not None
    assert held.sum(1).tolist() == [3, 1]
    assert lengths.cache_rows("output", feed, 5) is None
    later = {**feed, "query": np.zeros((2, 1, 128), np.float32)}
    assert not np.any(lengths.padded_queries(later))
    assert lengths.keys(site, {}) is None


def test_rows_of_sliding_window_caches() -> None:
    model = model_of(Shape(window=6, sliding=True), masks=True)
    feed = {"attention_mask": np.ones((1, 20), np.int64), "query": np.zeros((1, 1, 64), np.float32)}
    held = lengths_of(model).cache_rows("present_value", feed, 9)
    assert held is not None
    assert held.sum() == 20 - 4 * 3


@pytest.mark.parametrize("how", ["a matmul", "a loop", "many nodes"])
def test_lengths_that_cannot_be_read(how: str) -> None:
    """Nodes that are not standard, hold graphs or are many are not run here: the lengths are unknown then."""
    model = model_of(GENAI)
    node = model.graph.node[-1]
    node.input[5] = "computed"
    if how == "a matmul":
        nodes = [helper.make_node("FusedMatMul", ["seqlens_k", "seqlens_k"], ["computed"], domain="com.microsoft")]
    elif how == "a loop":
        outputs = [helper.make_tensor_value_info("o", TensorProto.INT32, None)]
        graph = helper.make_graph([helper.make_node("Identity", ["seqlens_k"], ["o"])], "g", [], outputs)
        model.graph.input.append(helper.make_tensor_value_info("flag", TensorProto.BOOL, []))
        nodes = [helper.make_node("If", ["flag"], ["computed"], then_branch=graph, else_branch=graph)]
    else:
        names = ["seqlens_k", *(f"x{i}" for i in range(99)), "computed"]
        nodes = [helper.make_node("Identity", [a], [b]) for a, b in pairwise(names)]
    rest = [onnx.NodeProto.FromString(n.SerializeToString()) for n in model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend([*nodes, *rest])
    (site,) = checks_of(model).cache_sites
    feed = {"seqlens_k": np.array([3], np.int32), "flag": np.array(True), "total": np.array(4, np.int32)}
    assert lengths_of(model).keys(site, feed) is None
    assert lengths_of(model).padded_queries(feed) is None
    assert lengths_of(model).cache_rows("present_key", feed, 5) is None


@pytest.mark.parametrize("kind", MODELS)
def test_token_behind_a_past_runs_at_its_length(kind: str) -> None:
    model = MODELS[kind]
    inputs, _, _ = drawn(model)
    case = inputs.maker.token_case(18)
    assert case is not None
    feeds = inputs.maker.draw(case, np.random.default_rng(0))
    queries = feeds["query"]
    assert queries.shape[:2] == (1, 1)
    assert case.length == 18
    keys = lengths_of(model).keys(checks_of(model).cache_sites[0], feeds)
    assert keys is not None
    assert keys.tolist() == [18]
    session(model, library=False).run(None, feeds)


def test_no_token_is_timed_of_prompts_alone() -> None:
    model = model_of(GENAI)
    for value in model.graph.input:
        if value.name == "query":
            value.type.tensor_type.shape.dim[1].Clear()
            value.type.tensor_type.shape.dim[1].dim_value = 5
    assert drawn(model)[0].maker.token_case(18) is None


def several_behind_a_past(model: onnx.ModelProto) -> list[int]:
    """The batch sizes of runs with several tokens behind a past."""
    _, _, feeds = drawn(model)
    return [len(f["query"]) for f in feeds if 1 < f["query"].shape[1] < f["total"]]


@pytest.mark.parametrize(("version", "runs"), [((1, 19), []), ((1, 22), [1]), ((1, 32), [1])])
def test_steps_that_a_version_computes_wrongly_are_not_run(
    version: tuple[int, int], runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_faults, "runtime_version", lambda: version)
    assert several_behind_a_past(MODELS["lengths"]) == runs


def test_a_version_without_faults_runs_what_others_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults of the known versions are not assumed of all: several tokens of a batch, head norms."""
    four = model_of(Shape(rotary=16))
    for value in four.graph.input:
        if value.name in ("query", "key", "value"):
            value.type.tensor_type.shape.dim[1].dim_value = 4
    normed = model_of(Shape(norms=True))
    assert set(several_behind_a_past(four)) == {1}
    assert checks_of(normed).working is not normed
    monkeypatch.setattr(RuntimeFault, "is_present", lambda self: False)
    assert max(several_behind_a_past(four)) == 3
    assert checks_of(normed).working is normed
