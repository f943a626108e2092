# SPDX-License-Identifier: Apache-2.0
"""StofCachedAttention nodes as they are written, and the function body, which runs without the library."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from gqa_models import Shape, draw_step, feeds_of, model_of, run_shared, session
from onnx import TensorProto, helper, numpy_helper

from stof.cached_attention.checks.oracle import CacheStep
from stof.cached_attention.emit import emit_caches
from stof.cached_attention.find import find_candidates
from stof.cached_attention.site import OP, CacheSite
from stof.errors import UnsupportedError
from stof.symbolic import Symbolic

FORMS: dict[str, tuple[Shape, ...]] = {
    "plain": (Shape(),),
    "packed": (Shape(packed=True),),
    "rotary": (Shape(rotary=16),),
    "positions": (Shape(rotary=16, positions=True, packed=True),),
    "window": (Shape(window=5),),
    "bias": (Shape(bias=(1, 4)),),
    "sinks": (Shape(packed=True, sink=True),),
    "smooth softmax": (Shape(smooth=True),),
    "softcap, scale": (Shape(softcap=1.5, scale=0.4),),
    "sliding": (Shape(window=6, sliding=True, rotary=16, interleaved=True),),
    "layers alike": (Shape(rotary=16, packed=True),) * 3,
    "two variants": (Shape(rotary=16, packed=True, window=5), Shape(rotary=16, packed=True)),
    "three variants": (Shape(window=5), Shape(), Shape(window=7)),
    "variants with other inputs": (Shape(packed=True, rotary=16, sink=True), Shape(window=5), Shape(smooth=True)),
    "fp16": (Shape(dtype="float16", rotary=16, packed=True), Shape(dtype="float16", rotary=16, packed=True, window=4)),
}


def sites_of(model: onnx.ModelProto) -> list[CacheSite]:
    found = find_candidates(model, Symbolic(model), "cpu")
    assert all(c.site is not None for c in found), found
    return [c.site for c in found if c.site is not None]


def emitted(model: onnx.ModelProto) -> onnx.ModelProto:
    found = emit_caches(model, sites_of(model))
    onnx.checker.check_model(found)
    return found


def nodes_of(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [n for n in model.graph.node if n.op_type == OP]


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def draw(
    shapes: tuple[Shape, ...], lengths: list[int], queries: int, capacity: int
) -> tuple[dict[str, Any], CacheStep]:
    """The same step sizes for each node, other numbers."""
    feeds: dict[str, Any] = {}
    for i, shape in enumerate(shapes):
        step = draw_step(shape, lengths, queries, capacity, seed=i)
        feeds |= feeds_of(shape, step, f"layer{i}/" if len(shapes) > 1 else "")
    return feeds, step


def compare(
    names: list[str], found: list[np.ndarray], wanted: list[np.ndarray], step: CacheStep, tolerance: float
) -> None:
    for name, mine, other in zip(names, found, wanted, strict=True):
        assert mine.shape == other.shape
        if "present_" in name:
            held = np.arange(mine.shape[2])[None] < step.rows[:, None]
            mine, other = (x.swapaxes(1, 2)[held] for x in (mine, other))
        else:
            mine, other = mine[~step.padded], other[~step.padded]
        np.testing.assert_allclose(mine.astype(float), other.astype(float), atol=tolerance, rtol=tolerance)


STEPS = {"prompt": ([9, 9], 9, 12), "padded": ([9, 4], 9, 12), "token": ([12, 7], 1, 14), "chunk": ([11], 3, 14)}


@pytest.mark.parametrize("library", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_runs_as_the_original(name: str, library: bool) -> None:
    """With and without the library, with past and present in one buffer and in two, optimized by the runtime and not."""
    shapes = FORMS[name]
    model = model_of(*shapes)
    made = emitted(model)
    original = session(model, library=False)
    sessions = [session(made, library=library, optimized=o) for o in (True, False)]
    names = [o.name for o in original.get_outputs()]
    tolerance = 4e-3 if shapes[0].dtype == "float16" else 1e-5
    for label, (lengths, queries, capacity) in STEPS.items():
        if shapes[0].sliding and label == "padded":
            continue  # the runtime refuses it
        feeds, step = draw(shapes, lengths, queries, capacity)
        wanted = original.run(None, feeds)
        for one in sessions:
            compare(names, one.run(None, feeds), wanted, step, tolerance)
            compare(names, run_shared(one, feeds), wanted, step, tolerance)


def test_attributes_and_inputs() -> None:
    shape = Shape(H=6, G=2, D=32, packed=True, window=9, rotary=16, interleaved=True, sink=True, softcap=3.0, scale=0.3)
    model = model_of(shape)
    (node,) = nodes_of(emitted(model))
    assert list(node.input) == list(model.graph.node[-1].input)
    assert list(node.output) == list(model.graph.node[-1].output)
    found = attributes_of(node)
    assert found.pop("scale") == pytest.approx(0.3)
    assert found.pop("qk_norm_epsilon") == pytest.approx(1e-6)
    assert found == {
        "num_heads": 6,
        "kv_num_heads": 2,
        "mask": b"k <= q and q - k < 9",
        "mask_id": 0,
        "softcap": 3.0,
        "do_rotary": 1,
        "rotary_interleaved": 1,
        "sliding_window_cache": 0,
    }


def test_the_body_of_one_variant_is_the_node() -> None:
    """No If stands between past and present."""
    made = emitted(model_of(*FORMS["layers alike"]))
    (function,) = made.functions
    assert [n.op_type for n in function.node] == ["GroupQueryAttention"]
    assert list(function.node[0].output) == list(function.output)
    assert list(function.attribute) == []
    assert [attributes_of(n)["mask_id"] for n in nodes_of(made)] == [0, 0, 0]


def test_variants_are_branches() -> None:
    made = emitted(model_of(*FORMS["three variants"]))
    (function,) = made.functions
    assert [n.op_type for n in function.node] == ["Constant", "Constant", "Equal", "If"]
    assert list(function.attribute) == ["mask_id"]
    assert [attributes_of(n)["mask_id"] for n in nodes_of(made)] == [0, 1, 2]
    assert {(o.domain, o.version) for o in function.opset_import} == {("", 18), ("com.microsoft", 1)}


def test_the_cache_of_a_sliding_window() -> None:
    (node,) = nodes_of(emitted(model_of(Shape(window=6, sliding=True))))
    assert attributes_of(node)["sliding_window_cache"] == 6
    assert attributes_of(node)["mask"] == b"k <= q and q - k < 6"


def test_a_sink_of_zeros_is_shared() -> None:
    made = emitted(model_of(Shape(smooth=True), Shape(smooth=True), Shape(H=8, smooth=True)))
    nodes = nodes_of(made)
    sinks = [n.input[11] for n in nodes]
    assert sinks[0] == sinks[1] != sinks[2]
    arrays = {t.name: numpy_helper.to_array(t) for t in made.graph.initializer}
    assert [arrays[s].tolist() for s in sinks[1:]] == [[0.0] * 4, [0.0] * 8]


def test_what_the_node_does_not_read_is_left_out() -> None:
    """Rotary tables without do_rotary, an output of scores that nobody reads."""
    model = model_of(Shape(rotary=16))
    node = model.graph.node[-1]
    kept = [a for a in node.attribute if a.name != "do_rotary"]
    del node.attribute[:]
    node.attribute.extend(kept)
    node.output.append("scores")
    (found,) = nodes_of(emitted(model))
    assert list(found.input) == ["query", "key", "value", "past_key", "past_value", "seqlens_k", "total"]
    assert list(found.output) == ["output", "present_key", "present_value"]


def test_the_rest_of_the_model_stays() -> None:
    model = model_of(Shape(), Shape(window=4), masks=True)
    model.doc_string = "words"
    model.graph.node[-1].metadata_props.add(key="layer", value="7")
    before = model.SerializeToString()
    made = emitted(model)
    assert model.SerializeToString() == before
    assert made.doc_string == "words"
    assert list(made.graph.input) == list(model.graph.input)
    assert list(made.graph.output) == list(model.graph.output)
    assert list(made.graph.node)[:-2] == list(model.graph.node)[:-2]
    assert [(p.key, p.value) for p in made.graph.node[-1].metadata_props] == [("layer", "7")]
    assert len({n.name for n in nodes_of(made)}) == 2


def test_some_of_the_sites() -> None:
    model = model_of(Shape(), Shape(window=4), Shape())
    sites = sites_of(model)
    made = emit_caches(model, [sites[1]])
    assert [n.op_type for n in made.graph.node] == ["GroupQueryAttention", OP, "GroupQueryAttention"]
    assert emit_caches(model, []) == model


def test_a_model_that_holds_the_operator() -> None:
    made = emitted(model_of(Shape()))
    with pytest.raises(UnsupportedError, match="already holds StofCachedAttention"):
        emit_caches(made, [])


def test_the_zero_sink_has_a_fresh_name() -> None:
    model = model_of(Shape(smooth=True))
    model.graph.input.append(helper.make_tensor_value_info("stof_sink", TensorProto.FLOAT, [1]))
    (node,) = nodes_of(emitted(model))
    assert node.input[11] == "stof_sink_2"
