# SPDX-License-Identifier: Apache-2.0
"""PagedAttention nodes: the facts of a site, and the reason for each refusal."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from paged_models import INPUTS as NAMES
from paged_models import Shape, model_of, node_of

from stof.cached_attention.find import CacheCandidate, find_candidates
from stof.cached_attention.paged.site import INPUTS, OUTPUTS, PagedSite
from stof.runtime.library import op_limits
from stof.symbolic import Symbolic


def candidate(model: onnx.ModelProto, target: str = "cpu") -> CacheCandidate:
    (found,) = find_candidates(model, Symbolic(model), target)
    return found


def reason(change: Callable[[onnx.ModelProto], None], shape: Shape | None = None, target: str = "cpu") -> str:
    model = model_of(shape or Shape(rotary=8, norms=True))
    change(model)
    found = candidate(model, target)
    assert found.site is None
    return found.reason


def set_attribute(**values: object) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        node = model.graph.node[0]
        kept = [a for a in node.attribute if a.name not in values]
        del node.attribute[:]
        node.attribute.extend([*kept, *(helper.make_attribute(n, v) for n, v in values.items())])

    return change


def set_input(name: str, tensor: str) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        node = model.graph.node[0]
        index = NAMES.index(name)
        node.input.extend([""] * (index + 1 - len(node.input)))
        node.input[index] = tensor

    return change


def set_dims(name: str, *dims: int | str, dtype: int = 0) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        value = next(i for i in model.graph.input if i.name == name)
        dtype_now = dtype or value.type.tensor_type.elem_type
        value.CopyFrom(helper.make_tensor_value_info(name, dtype_now, list(dims)))

    return change


def set_output(index: int, tensor: str) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        model.graph.node[0].output[index] = tensor
        del model.graph.output[index]

    return change


def add_reader(tensor: str) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        model.graph.node.append(helper.make_node("Identity", [tensor], ["read"]))
        model.graph.output.append(helper.make_tensor_value_info("read", TensorProto.FLOAT, None))

    return change


def test_facts_of_a_node() -> None:
    shape = Shape(H=6, G=2, D=32, block=64, packed=True, window=7, rotary=8, rotary_offset=16, sink=True, slots=True)
    site = candidate(model_of(shape)).site
    assert isinstance(site, PagedSite)
    assert (site.num_heads, site.kv_num_heads, site.head_size, site.window) == (6, 2, 32, 7)
    assert (site.rotary_size, site.rotary_offset, site.block_size.constant) == (8, 16, 64)
    assert site.mask.text == "k <= q and q - k < 7"
    assert site.heads == "6 heads on 2"
    assert site.features == ("pages of 64 rows", "packed QKV", "rotary of 8", "sinks", "slot mapping")


def test_inputs_and_outputs_are_those_of_the_schema() -> None:
    schemas = onnxruntime.capi.onnxruntime_pybind11_state.get_all_operator_schema()
    (schema,) = (s for s in schemas if s.name == "PagedAttention" and s.domain == "com.microsoft")
    assert tuple(i.name for i in schema.inputs) == INPUTS
    assert tuple(o.name for o in schema.outputs) == OUTPUTS


def test_the_limits_are_those_of_the_library() -> None:
    mine, cached = (op_limits()[name]["targets"] for name in ("StofPagedAttention", "StofCachedAttention"))
    assert {t: one["types"] for t, one in mine.items()} == {t: one["types"] for t, one in cached.items()}
    assert {t: set(one) - {"types"} for t, one in mine.items()} == {
        "cpu": {"skips_scores", "chooses_blocks"},
        "cuda": {"skips_scores"},
        "tensorrt": set(),
    }


REFUSED: dict[str, tuple[Callable[[onnx.ModelProto], None], str]] = {
    "latent rows": (set_attribute(kv_cache_layout="LATENT"), "kv_cache_layout is 'LATENT'"),
    "values of another size": (set_attribute(v_head_size=8), "v_head_size is 8"),
    "not causal": (set_attribute(is_causal=0), "is_causal is 0"),
    "quantized by type": (set_attribute(k_quant_type="PER_TENSOR"), "its cache is quantized: k_quant_type"),
    "quantized by name": (set_attribute(v_cache_dtype="int4"), "its cache is quantized: v_cache_dtype"),
    "quantized by scale": (set_input("k_scale", "scale"), "its cache is quantized: it has input k_scale"),
    "quantized by tensor": (
        set_dims("key_cache", "blocks", 16, 2, 16, dtype=TensorProto.INT8),
        "its cache is quantized: key_cache 'key_cache' is INT8",
    ),
    "an unknown attribute": (set_attribute(qk_rotation="HADAMARD"), "'qk_rotation', whose meaning is not known"),
    "an attribute of another type": (set_attribute(softcap=3), "its attribute softcap is 3, expected a float"),
    "a flag": (set_attribute(do_rotary=2), "do_rotary is 2"),
    "a window": (set_attribute(local_window_size=0), "local_window_size is 0"),
    "a softcap": (set_attribute(softcap=1e-38), "softcap is"),
    "a scale": (set_attribute(scale=float("nan")), "scale is nan"),
    "an offset": (set_attribute(rotary_offset=4), "rotary_offset is 4, expected a multiple of 8"),
    "heads": (set_attribute(kv_num_heads=3), "4 query heads on 3 key heads"),
    "an offset beyond the head": (set_attribute(rotary_offset=16), "cos_cache has 4 columns, expected 1 to 0"),
    "no table": (set_input("table", ""), "it has no input block_table"),
    "no value cache": (set_input("value_cache", ""), "it has no input value_cache"),
    "half of a pair": (set_input("k_norm", ""), "it has input q_norm_weight and no k_norm_weight"),
    "no cache output": (set_output(2, ""), "it does not write value_cache_out"),
    "a cache that others read": (add_reader("key_cache"), "key_cache 'key_cache' has 2 readers"),
    "an updated cache that others read": (add_reader("key_out"), "key_cache_out is read by other nodes"),
    "columns of the query": (set_dims("query", "N", 66), "query has 66 columns, no multiple of 4 heads"),
    "the rank of the query": (set_dims("query", 1, "N", 64), "the shape of query 'query' has 3 axes, expected 2"),
    "heads of the cache": (set_dims("key_cache", "blocks", 16, 3, 16), "key_cache has 3 heads, expected 2"),
    "rows of a block": (set_dims("key_cache", "blocks", 24, 2, 16), "blocks of 24 rows, expected a power of two"),
    "caches": (set_dims("value_cache", "blocks", 32, 2, 16), "key_cache has 16 as size 1, value_cache 32"),
    "wide tables": (set_dims("table", "B", "columns", dtype=TensorProto.INT64), "block_table is INT64, expected int32"),
    "a norm": (set_dims("q_norm", 4), "q_norm_weight has shape"),
    "no rotary table": (
        lambda model: (set_input("cos", "")(model), set_input("sin", "")(model), None)[-1],
        "do_rotary is 1, and it has no cos_cache",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    change, words = REFUSED[name]
    assert words in reason(change)


def test_head_sizes_of_the_target() -> None:
    assert "head size 20, expected a multiple of 8" in reason(lambda _: None, Shape(D=20, dtype="float16"), "cuda")
    assert "head size 264" in reason(lambda _: None, Shape(D=264))


def test_nodes_in_subgraphs_stay() -> None:
    inner = helper.make_graph(
        [node_of(Shape(), "x/")], "then", [], [helper.make_tensor_value_info("x/output", 1, None)]
    )
    model = model_of(Shape())
    node = helper.make_node("If", ["flag"], ["chosen"], then_branch=inner, else_branch=inner)
    model.graph.input.append(helper.make_tensor_value_info("flag", TensorProto.BOOL, []))
    model.graph.node.append(node)
    found = find_candidates(model, Symbolic(model), "cpu")
    assert [c.site is None for c in found] == [False, True, True]
    assert "it lies in a subgraph" in found[1].reason
