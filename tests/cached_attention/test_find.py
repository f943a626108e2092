# SPDX-License-Identifier: Apache-2.0
"""Which GroupQueryAttention nodes have a cache that can be replaced, and why others stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
import pytest
from gqa_models import Shape, model_of
from onnx import TensorProto, helper

from stof.attention.limits import limits_of
from stof.cached_attention.find import CacheCandidate, find_candidates
from stof.cached_attention.site import OP
from stof.runtime.library import op_limits
from stof.symbolic import Symbolic


def found_in(model: onnx.ModelProto, target: str = "cpu") -> list[CacheCandidate]:
    return find_candidates(model, Symbolic(model), target)


def reason_of(model: onnx.ModelProto, target: str = "cpu") -> str:
    (candidate,) = found_in(model, target)
    assert candidate.site is None
    return candidate.reason


@pytest.mark.parametrize("masks", [False, True])
def test_facts_of_a_node(masks: bool) -> None:
    shape = Shape(H=6, G=2, D=32, packed=True, window=9, rotary=16, interleaved=True, sink=True, softcap=3.0, scale=0.3)
    (candidate,) = found_in(model_of(shape, masks=masks))
    site = candidate.site
    assert site is not None
    assert (site.num_heads, site.kv_num_heads, site.head_size, site.dtype) == (6, 2, 32, TensorProto.FLOAT)
    assert (site.window, site.sliding, site.rotary_size) == (9, False, 16)
    assert site.mask.text == "k <= q and q - k < 9"
    assert [str(d) for d in (site.batch, site.queries, site.capacity)] == ["1*size(B)", "1*size(S)", "1*size(C)"]
    assert (str(site.total) == "1*size(T)") == masks
    assert site.features == ("packed QKV", "rotary of 16, interleaved", "sinks", "softcap 3")
    assert (site.scale, site.softcap) == pytest.approx((0.3, 3.0))


def test_every_input_of_the_schema() -> None:
    """All that the operator takes at once, and a cache of fixed size that slides."""
    everything = Shape(window=6, rotary=16, positions=True, sink=True, norms=True, bias=(1, 4), smooth=True)
    sliding = Shape(window=6, sliding=True)
    assert [c.site is not None for c in found_in(model_of(everything, capacity=12))] == [True]
    (candidate,) = found_in(model_of(sliding, capacity=12))
    assert candidate.site is not None
    assert candidate.site.sliding
    assert candidate.site.features == ("sliding-window cache",)


def test_the_limits_are_those_of_the_library() -> None:
    known = op_limits()[OP]["targets"]
    for target in ("cpu", "cuda"):
        own = {int(t): n for t, n in known[target]["types"].items()}
        assert set(own) == set(limits_of(target))
        for t, limits in limits_of(target).items():
            assert own[t]["largest_head_size"] == limits.largest_head_size
            assert own[t]["head_size_multiple_of"] == limits.head_size_multiple_of


def test_head_size_of_the_cache_where_the_query_has_none() -> None:
    """The width of the query is not known, as behind an operator without a shape rule."""
    model = model_of(Shape())
    model.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "width"
    (candidate,) = found_in(model)
    assert candidate.site is not None
    assert candidate.site.head_size == 16
    for value in model.graph.input:
        if value.name.startswith("past"):
            value.type.tensor_type.shape.dim[3].dim_param = "size"
    assert "head size is not known" in reason_of(model)


def test_nodes_without_a_cache_are_none() -> None:
    """No past, or no present: attention sites cover them."""
    model = model_of(Shape())
    node = model.graph.node[-1]
    before = list(node.output)
    del node.output[1:]
    assert found_in(model) == []
    node.output.extend(before[1:])
    node.input[3] = node.input[4] = ""
    assert found_in(model) == []


def attribute(name: str, value: Any) -> Callable[[onnx.NodeProto], None]:
    def change(node: onnx.NodeProto) -> None:
        kept = [a for a in node.attribute if a.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute(name, value)])

    return change


def given(index: int, name: str) -> Callable[[onnx.NodeProto], None]:
    def change(node: onnx.NodeProto) -> None:
        node.input.extend([""] * (index + 1 - len(node.input)))
        node.input[index] = name

    return change


REFUSED: dict[str, tuple[Callable[[onnx.NodeProto], None], str]] = {
    "k_scale": (given(12, "query"), "it has input k_scale, and k_quant_type is NONE"),
    "v_scale": (given(13, "query"), "it has input v_scale, and v_quant_type is NONE"),
    "quantized keys": (
        attribute("k_quant_type", "PER_TENSOR"),
        "it has no input k_scale, and k_quant_type is PER_TENSOR",
    ),
    "bit width": (attribute("kv_cache_bit_width", 4), "kv_cache_bit_width is 4, and k_quant_type is NONE"),
    "a kind of scales": (attribute("k_quant_type", "PER_TOKEN"), "k_quant_type is 'PER_TOKEN', expected NONE"),
    "ragged queries": (given(16, "seqlens_k"), "it has input query_seqlens"),
    "another input": (given(17, "query"), "it has input 17, 'query', whose meaning is not known"),
    "another attribute": (attribute("turbo", 1), "attribute 'turbo', whose meaning is not known"),
    "not causal": (attribute("causal", 0), "causal is 0"),
    "no window": (attribute("local_window_size", 0), "local_window_size is 0"),
    "a negative window": (attribute("local_window_size", -7), "local_window_size is -7"),
    "slides without window": (attribute("sliding_window_cache", 1), "local_window_size is not given"),
    "a flag": (attribute("smooth_softmax", 2), "its attribute smooth_softmax is 2, expected 0 or 1"),
    "a large flag": (attribute("do_rotary", 1 << 40), "its attribute do_rotary is 1099511627776, expected 0 or 1"),
    "a type": (attribute("local_window_size", 4.0), "its attribute local_window_size is 4.0, expected an integer"),
    "another type": (attribute("k_quant_type", 1), "its attribute k_quant_type is 1, expected a string"),
    "infinite scale": (attribute("scale", float("inf")), "scale is inf"),
    "negative softcap": (attribute("softcap", -1.0), "softcap is -1.0"),
    "tiny softcap": (attribute("softcap", 1e-35), "softcap is 1"),
    "heads": (attribute("num_heads", 5), "5 query heads on 2 key heads"),
    "no heads": (attribute("kv_num_heads", 0), "4 query heads on 0 key heads"),
    "width": (attribute("num_heads", 6), "64 columns, no multiple of 6"),
    "half a past": (given(4, ""), "it has input past_key and no past_value"),
    "half a norm": (given(14, "query"), "it has input q_norm_weight and no k_norm_weight"),
    "no lengths": (given(5, ""), "it has no input seqlens_k"),
    "no total": (given(6, ""), "it has no input total_sequence_length"),
    "rotary without tables": (attribute("do_rotary", 1), "it has no cos_cache"),
    "a sink of another size": (given(11, "seqlens_k"), "head_sink 'seqlens_k' is INT32"),
    "no query": (given(0, ""), "it has no input query"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    change, words = REFUSED[name]
    model = model_of(Shape())
    change(model.graph.node[-1])
    assert words in reason_of(model)


INT8 = Shape(cache="int8", channels=(True, False))


def test_facts_of_quantized_caches() -> None:
    (candidate,) = found_in(model_of(INT8))
    site = candidate.site
    assert site is not None
    assert (site.dtype, site.cache_dtype, site.scales) == (TensorProto.FLOAT, TensorProto.INT8, ("channel", "tensor"))
    assert site.features == ("int8 cache, scales of keys per channel, of values per tensor",)
    (candidate,) = found_in(model_of(Shape(cache="float8", dtype="float16")), "cuda")
    assert candidate.site is not None
    assert candidate.site.features == ("fp8 cache, scales per tensor",)


def typed(name: str, kind: int) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        for value in model.graph.input:
            if value.name == name:
                value.type.tensor_type.elem_type = kind

    return change


def shaped(name: str, *dims: int) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        for value in model.graph.input:
            if value.name == name:
                kind = value.type.tensor_type.elem_type
                value.CopyFrom(helper.make_tensor_value_info(name, kind, list(dims)))

    return change


def on_node(change: Callable[[onnx.NodeProto], None]) -> Callable[[onnx.ModelProto], None]:
    return lambda model: change(model.graph.node[-1])


REFUSED_QUANTIZED: dict[str, tuple[Callable[[onnx.ModelProto], None], str]] = {
    "4 bits": (on_node(attribute("kv_cache_bit_width", 4)), "its cache is quantized to 4 bits"),
    "no bits": (on_node(attribute("kv_cache_bit_width", 0)), "its cache is quantized to 0 bits"),
    "a scale is missing": (on_node(given(13, "")), "it has no input v_scale, and v_quant_type is PER_TENSOR"),
    "uint8": (
        typed("past_key", TensorProto.UINT8),
        "its element type is UINT8 and INT8, expected INT8 or FLOAT8E4M3FN",
    ),
    "fp32": (typed("past_value", TensorProto.FLOAT), "its element type is INT8 and fp32, expected"),
    "fp16 scales": (typed("k_scale", TensorProto.FLOAT16), "k_scale 'k_scale' is ['1', '2', '1', '16'] of fp16"),
    "a scale a head": (shaped("k_scale", 1, 2, 1, 1), "expected [1, 2, 1, 16] or [32] of fp32"),
    "two scales": (shaped("v_scale", 2), "v_scale 'v_scale' is ['2'] of fp32, expected one element of fp32"),
}


@pytest.mark.parametrize("name", REFUSED_QUANTIZED)
def test_refused_quantized_caches(name: str) -> None:
    change, words = REFUSED_QUANTIZED[name]
    model = model_of(INT8)
    change(model)
    assert words in reason_of(model)


def test_keys_quantized_alone() -> None:
    model = model_of(INT8)
    node = model.graph.node[-1]
    attribute("v_quant_type", "NONE")(node)
    given(13, "")(node)
    assert "one of keys and values is quantized alone" in reason_of(model)


def test_refused_outputs() -> None:
    model = model_of(Shape())
    node = model.graph.node[-1]
    node.output.append("scores")
    assert found_in(model)[0].site is not None  # nobody reads it
    model.graph.output.append(helper.make_tensor_value_info("scores", TensorProto.FLOAT, None))
    assert "output_qk" in reason_of(model)
    node.output[2] = ""
    assert "it does not write present_value" in reason_of(model_without_scores(model))


def model_without_scores(model: onnx.ModelProto) -> onnx.ModelProto:
    del model.graph.node[-1].output[3:]
    return model


@pytest.mark.parametrize(
    ("shape", "target", "words"),
    [
        (Shape(D=320), "cpu", "head size 320, expected 1 to 256"),
        (Shape(D=12, dtype="float16"), "cuda", "head size 12, expected a multiple of 8"),
        (Shape(window=6, sliding=True, bias=(1, 1)), "cpu", "sliding_window_cache is 1 beside attention_bias"),
    ],
)
def test_refused_sizes(shape: Shape, target: str, words: str) -> None:
    assert words in reason_of(model_of(shape), target)


def test_a_small_sliding_window_cache() -> None:
    assert "has 5 rows, fewer than the window of 6" in reason_of(model_of(Shape(window=6, sliding=True), capacity=5))


def test_types() -> None:
    model = model_of(Shape())
    for value in model.graph.input:
        if value.name.startswith("past"):
            value.type.tensor_type.elem_type = TensorProto.INT8
    assert "past_key 'past_key' is INT8, expected query's fp32" in reason_of(model)
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.DOUBLE
    assert "the element type of query is DOUBLE, expected fp32, fp16 or bf16" in reason_of(model)


def test_names_are_fresh() -> None:
    model = model_of(Shape(), Shape())
    for node in model.graph.node:
        node.name = "same"
    assert [c.name for c in found_in(model)] == ["same", "same_2"]
    for node in model.graph.node:
        node.name = ""
    assert [c.name for c in found_in(model)] == [
        "GroupQueryAttention of layer0/output",
        "GroupQueryAttention of layer1/output",
    ]


def test_nodes_in_subgraphs_stay() -> None:
    model = model_of(Shape())
    node = model.graph.node.pop()
    inner = [onnx.ValueInfoProto.FromString(o.SerializeToString()) for o in model.graph.output]
    graphs = []
    for word in ("then", "else"):
        own = onnx.NodeProto.FromString(node.SerializeToString())
        own.output[:] = [f"{word}_{o}" for o in node.output]
        infos = [replace_name(i, f"{word}_{i.name}") for i in inner]
        graphs.append(helper.make_graph([own], word, [], infos))
    model.graph.input.append(helper.make_tensor_value_info("flag", TensorProto.BOOL, []))
    choose = helper.make_node(
        "If", ["flag"], list(node.output), name="choose", then_branch=graphs[0], else_branch=graphs[1]
    )
    model.graph.node.append(choose)
    assert [c.reason for c in found_in(model)] == [
        "it lies in a subgraph of If node 'choose', where caches are not replaced"
    ] * 2


def replace_name(info: onnx.ValueInfoProto, name: str) -> onnx.ValueInfoProto:
    found = onnx.ValueInfoProto.FromString(info.SerializeToString())
    found.name = name
    return found
