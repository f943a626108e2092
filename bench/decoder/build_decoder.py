# SPDX-License-Identifier: Apache-2.0
"""Builds a decoder's graph in the form of ONNX Runtime GenAI's builder."""

from __future__ import annotations

from onnx import TensorProto, helper

from bench.decoder.graph import ELEMENT, MICROSOFT, Decoder, DecoderGraph, DecoderShape
from bench.decoder.mlp_nodes import add_mlp

_OPSET = 21
_EPSILON = 1e-5


def build_decoder(shape: DecoderShape, window: int = 0) -> Decoder:
    """The graph: GroupQueryAttention over caches, packed projections, rotary embedding in it, RMS norms, an MLP.

    Inputs are input_ids [B, S], attention_mask [B, T] and the caches [B, G, C, D]. Outputs are the last token's logits
    [B, 1, V] and the caches.

    Args:
        shape: the sizes.
        window: keys that a query attends at most, in every layer; 0 is dense.
    """
    graph = DecoderGraph(shape)
    N, D = shape.hidden, shape.head_size
    lengths, total = _lengths(graph)
    tables = [graph.weight(f"{kind}_cache", (shape.positions, D // 2), kind) for kind in ("cos", "sin")]
    embedding = graph.weight("model.embed_tokens.weight", (shape.vocabulary, N), "embedding")
    hidden = graph.add("Gather", "/model/embed_tokens/Gather", [embedding, "input_ids"])[0]
    norm = graph.weight("model.layers.0.input_layernorm.weight", (N,), "norm")
    normed = graph.add(
        "SimplifiedLayerNormalization", "/model/layers.0/input_layernorm/LayerNorm", [hidden, norm],
        axis=-1, epsilon=_EPSILON, stash_type=1,
    )[0]  # fmt: skip
    inputs = [
        helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch_size", "sequence_length"]),
        helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch_size", "total_sequence_length"]),
    ]
    outputs = [helper.make_tensor_value_info("logits", ELEMENT[shape.dtype], ["batch_size", 1, shape.vocabulary])]
    for layer in range(shape.layers):
        path = f"/model/layers.{layer}"
        caches = [f"past_key_values.{layer}.{x}" for x in ("key", "value")]
        presents = [f"present.{layer}.{x}" for x in ("key", "value")]
        for name, length, values in (
            (caches, "past_sequence_length", inputs),
            (presents, "total_sequence_length", outputs),
        ):
            dims: list[int | str] = ["batch_size", shape.kv_heads, length, D]
            values += [helper.make_tensor_value_info(n, ELEMENT[shape.dtype], dims) for n in name]
        packed = graph.matmul(f"{path}/attn/qkv_proj/MatMul", normed, N, (shape.heads + 2 * shape.kv_heads) * D)
        attended = f"{path}/attn/GroupQueryAttention/output_0"
        graph.nodes.append(
            helper.make_node(
                "GroupQueryAttention",
                [packed, "", "", *caches, lengths, total, *tables],
                [attended, *presents],
                name=f"{path}/attn/GroupQueryAttention",
                domain=MICROSOFT,
                num_heads=shape.heads,
                kv_num_heads=shape.kv_heads,
                scale=D**-0.5,
                do_rotary=1,
                rotary_interleaved=0,
                local_window_size=window or -1,
                softcap=0.0,
            )
        )
        added = graph.matmul(f"{path}/attn/o_proj/MatMul", attended, shape.heads * D, N)
        normed, hidden = _skip_norm(graph, f"{path}/post_attention_layernorm", hidden, added)
        added = add_mlp(graph, f"{path}/mlp", normed)
        after = f"/model/layers.{layer + 1}/input_layernorm"
        is_last = layer + 1 == shape.layers
        normed, hidden = _skip_norm(graph, "/model/final_norm" if is_last else after, hidden, added, is_last)
    last = graph.add("Gather", "/lm_head/Gather", [normed, graph.constant("last_token", [-1])], axis=1)[0]
    graph.matmul("/lm_head/MatMul", last, N, shape.vocabulary)
    graph.nodes[-1].output[0] = "logits"
    made = helper.make_graph(graph.nodes, "decoder", inputs, outputs, graph.initializers)
    opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid(MICROSOFT, 1)]
    model = helper.make_model(made, opset_imports=opsets, ir_version=10)
    return Decoder(shape, model, graph.weights, graph.size)


def _lengths(graph: DecoderGraph) -> tuple[str, str]:
    """Nodes that count keys in the attention mask: seqlens_k [B] on the device, total_sequence_length on the host."""
    path = "/model/attn_mask_reformat"
    one = graph.constant("one", [1])
    count = graph.add("ReduceSum", f"{path}/ReduceSum", ["attention_mask", one], keepdims=0)[0]
    last = graph.add("Sub", f"{path}/Sub", [count, one])[0]
    lengths = graph.add("Cast", f"{path}/Sub/Cast", [last], to=TensorProto.INT32)[0]
    shape = graph.add("Shape", f"{path}/Shape", ["attention_mask"])[0]
    length = graph.add("Gather", f"{path}/Gather", [shape, graph.constant("index_of_length", 1)], axis=0)[0]
    total = graph.add("Cast", f"{path}/Gather/Cast", [length], to=TensorProto.INT32)[0]
    return lengths, total


def _skip_norm(graph: DecoderGraph, path: str, hidden: str, added: str, is_last: bool = False) -> tuple[str, str]:
    """The normed sum of hidden states and what a block adds, and the sum, which the last norm does not give."""
    weight = graph.weight(f"{path}.weight", (graph.shape.hidden,), "norm")
    normed, total = f"{path}/SkipLayerNorm/output_0", f"{path}/SkipLayerNorm/output_3"
    graph.nodes.append(
        helper.make_node(
            "SkipSimplifiedLayerNormalization",
            [hidden, added, weight],
            [normed] if is_last else [normed, "", "", total],
            name=f"{path}/SkipLayerNorm",
            domain=MICROSOFT,
            epsilon=_EPSILON,
        )
    )
    return normed, total
