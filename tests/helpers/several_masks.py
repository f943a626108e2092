# SPDX-License-Identifier: Apache-2.0
"""A model of several attention sites, each with a mask of another kind."""

from __future__ import annotations

import onnx
import onnx.parser

_START = """
    at2 = Constant <value = int64 {2}> ()
    zero = Constant <value = int64 {0}> ()
    one = Constant <value = int64 {1}> ()
    shape = Shape (q)
    s = Gather (shape, at2)
    columns = Range (zero, s, one)
    last = Constant <value = int64[1] {1}> ()
    rows = Unsqueeze (columns, last)
    distance = Sub (rows, columns)
    far = Abs (distance)
    kt = Transpose <perm = [0, 1, 3, 2]> (k)
    low = Constant <value = float {-inf}> ()"""
MASKS = {
    "causal": "w_causal = LessOrEqual (columns, rows)",
    "window": "n5 = Constant <value = int64 {5}> ()\n    w_window = Less (far, n5)",
    "dilated": """n4 = Constant <value = int64 {4}> ()
    rest = Mod (distance, n4)
    w_dilated = Equal (rest, zero)""",
    "global": """n6 = Constant <value = int64 {6}> ()
    near = Less (far, n6)
    first = Less (columns, at2)
    w_global = Or (near, first)""",
    "documents": """axis2 = Constant <value = int64[2] {1, 3}> ()
    axis1 = Constant <value = int64[2] {1, 2}> ()
    ids_q = Unsqueeze (ids, axis2)
    ids_k = Unsqueeze (ids, axis1)
    w_documents = Equal (ids_q, ids_k)""",
    "heads": """reach = Constant <value = int64[4,1,1] {2, 9, 30, 9}> ()
    w_heads = Less (far, reach)""",
}


def model_with_masks(*names: str) -> onnx.ModelProto:
    """A model with a site for each kind of ``MASKS``, by default all; its nodes are called like layers of a module."""
    chosen = names or tuple(MASKS)
    body, outputs = [_START], []
    for name in chosen:
        body.append(f"""
    {MASKS[name]}
    s_{name} = MatMul (q, kt)
    m_{name} = Where (w_{name}, s_{name}, low)
    p_{name} = Softmax (m_{name})
    out_{name} = MatMul (p_{name}, v)""")
        outputs.append(f"float[1,4,S,8] out_{name}")
    tensor = "float[1,4,S,8]"
    ids = ", int64[1,S] ids" if "documents" in chosen else ""
    model: onnx.ModelProto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18]>\n'
        f"g ({tensor} q, {tensor} k, {tensor} v{ids}) => ({', '.join(outputs)}) {{{''.join(body)}\n}}"
    )
    layers = (n for n in model.graph.node if n.op_type == "Softmax")
    for i, node in enumerate(layers):
        node.name = f"/model/layers.{i}/attention/Softmax"
    return model
