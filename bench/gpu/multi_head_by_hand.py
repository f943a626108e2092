# SPDX-License-Identifier: Apache-2.0
"""A model with com.microsoft MultiHeadAttention and an attention bias where stof-optimize has its attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from stof.mask.expression import MaskExpression

_LOWEST = -65504.0


def by_hand(optimized: onnx.ModelProto) -> onnx.ModelProto:
    """com.microsoft MultiHeadAttention with attention_bias in the place of every StofAttention.

    A bias is computed once for all layers that share a mask.

    Raises:
        ValueError: for a mask other than padding with or without a window, another operand, or packed heads.
    """
    model = onnx.ModelProto()
    model.CopyFrom(optimized)
    del model.functions[:]
    nodes: list[onnx.NodeProto] = []
    biases: dict[tuple[str, str], str] = {}
    for node in model.graph.node:
        if node.op_type != "StofAttention":
            nodes.append(node)
            continue
        given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        words = {k: v.decode() if isinstance(v, bytes) else v for k, v in given.items()}
        if words["operands"] != "pad":
            raise ValueError(f"{node.name}: operands {words['operands']!r}, expected pad")
        if "packed" in words:
            raise ValueError(f"{node.name}: reads heads among others (packed), expected tensors of its own heads")
        key = (str(words["mask"]), node.input[3])
        if key not in biases:
            biases[key] = f"bias_by_hand_{len(biases)}"
            nodes += _bias(key[0], key[1], biases[key])
        layouts = str(words["layout"]).split()
        layouts *= 4 // len(layouts)
        parts = []
        for name, layout in zip(node.input[:3], layouts, strict=False):
            parts.append(_packed(nodes, f"{node.name}/{name}", name, layout))
        output = node.output[0] if layouts[3] == "BSN" else f"{node.name}/bsn"
        nodes.append(
            helper.make_node(
                "MultiHeadAttention",
                [*parts, "", "", biases[key]],
                [output],
                f"{node.name}/by_hand",
                domain="com.microsoft",
                num_heads=int(words["num_heads"]),
                scale=float(words["scale"]),
            )
        )
        if layouts[3] != "BSN":
            raise ValueError(f"{node.name}: output of layout {layouts[3]}, expected BSN")
    copies = [onnx.NodeProto.FromString(n.SerializeToString()) for n in nodes]
    del model.graph.node[:]
    model.graph.node.extend(copies)
    kept = [o for o in model.opset_import if o.domain not in ("stof", "com.microsoft")]
    del model.opset_import[:]
    model.opset_import.extend([*kept, helper.make_opsetid("com.microsoft", 1)])
    return model


def _packed(nodes: list[onnx.NodeProto], prefix: str, name: str, layout: str) -> str:
    """The tensor as [B, S, N]."""
    if layout == "BSN":
        return name
    if layout == "BHSD":
        nodes.append(
            helper.make_node("Transpose", [name], [f"{prefix}/bshd"], f"{prefix}/transpose", perm=[0, 2, 1, 3])
        )
        name = f"{prefix}/bshd"
    shape = f"{prefix}/shape"
    nodes.append(helper.make_node("Constant", [], [shape], f"{shape}_node", value_ints=[0, 0, -1]))
    nodes.append(helper.make_node("Reshape", [name, shape], [f"{prefix}/bsn"], f"{prefix}/reshape"))
    return f"{prefix}/bsn"


def _bias(mask: str, pad: str, output: str) -> list[onnx.NodeProto]:
    """[B, 1, S, T] of 0 and the lowest fp16 number, from padding [B, T] of any type."""
    window = MaskExpression.parse(mask).window()
    if window is None or window[0] != window[1]:
        raise ValueError(f"no bias by hand for the mask {mask!r}")
    # Without a window the comparison is with what no distance exceeds.
    width = window[0] if window[0] >= 0 else 1 << 40

    def node(kind: str, inputs: list[str], name: str, **attributes: Any) -> onnx.NodeProto:
        return helper.make_node(kind, inputs, [f"{output}/{name}"], f"{output}/{name}_node", **attributes)

    def constant(name: str, value: Any) -> onnx.NodeProto:
        return node("Constant", [], name, value=numpy_helper.from_array(value))

    at = f"{output}/"
    found = [
        constant("axes", np.array([1, 2], np.int64)),
        constant("zero_index", np.array(0, np.int64)),
        constant("one_index", np.array(1, np.int64)),
        constant("allowed_value", np.array(0, np.float16)),
        constant("forbidden_value", np.array(_LOWEST, np.float16)),
        node("Cast", [pad], "real", to=TensorProto.BOOL),
        node("Unsqueeze", [at + "real", at + "axes"], "keys"),
        node("Shape", [pad], "shape"),
        node("Gather", [at + "shape", at + "one_index"], "length"),
        node("Range", [at + "zero_index", at + "length", at + "one_index"], "positions"),
        constant("column_axis", np.array([1], np.int64)),
        node("Unsqueeze", [at + "positions", at + "column_axis"], "queries"),
        node("Sub", [at + "queries", at + "positions"], "distance"),
        node("Abs", [at + "distance"], "away"),
        constant("width", np.array(width, np.int64)),
        node("LessOrEqual", [at + "away", at + "width"], "near"),
        node("And", [at + "keys", at + "near"], "allowed"),
    ]
    choices = [at + "allowed", at + "allowed_value", at + "forbidden_value"]
    return [*found, helper.make_node("Where", choices, [output], f"{output}_node")]
