# SPDX-License-Identifier: Apache-2.0
"""Times StofQuantizedAttention beside ONNX Runtime's own quantized nodes and beside StofAttention in fp32, on the CPU.

``python tools/time_quantized_attention.py [--length 2048] [--window 0] [--threads 1] [--form static] [--rounds 15]``

``static``: QuantizeLinear and DequantizeLinear around both matmuls, of which the runtime makes QLinearMatMul. ``dynamic``:
MatMulInteger on codes of DynamicQuantizeLinear. A window of w keys to each side is a mask that the runtime adds. B 1, H 12,
D 64, random codes. Prints minima of rounds in turns, in ms.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

import stof

H, D = 12, 64
SCALE = 0.125
CODES = {
    "query": (0.02, "int8"),
    "key": (0.02, "int8"),
    "value": (0.02, "int8"),
    "score": (0.2, "int8"),
    "weight": (1 / 255, "uint8"),
}


def _constants(names: list[str]) -> list[onnx.TensorProto]:
    found = []
    for name in names:
        scale, dtype = CODES[name]
        found.append(numpy_helper.from_array(np.array(scale, np.float32), f"{name}_scale"))
        found.append(numpy_helper.from_array(np.array(0, dtype), f"{name}_zero_point"))
    return found


def _session(nodes: list[onnx.NodeProto], length: int, dtype: int, inits: list[onnx.TensorProto], threads: int) -> Any:
    given = [helper.make_tensor_value_info(n, dtype, [1, H, length, D]) for n in ("query", "key", "value")]
    out = helper.make_tensor_value_info("out", TensorProto.FLOAT, None)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("stof", 1)]
    model = helper.make_model(helper.make_graph(nodes, "g", given, [out], inits), opset_imports=opsets, ir_version=8)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    stof.register(options)
    return ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])


def _runtime_nodes(form: str, window: int, length: int, inits: list[onnx.TensorProto]) -> list[onnx.NodeProto]:
    """What ONNX Runtime's quantization leaves of an attention."""
    inits.append(numpy_helper.from_array(np.float32(SCALE), "factor"))
    nodes = [helper.make_node("Transpose", ["key"], ["turned"], perm=[0, 1, 3, 2])]

    def add(op: str, inputs: list[str], output: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(op, inputs, [output], **attributes))
        return output

    def of(name: str, source: str, op: str) -> str:
        return add(op, [source, f"{name}_scale", f"{name}_zero_point"], f"{name}_{op}")

    if form == "static":
        query, key = of("query", "query", "DequantizeLinear"), of("key", "turned", "DequantizeLinear")
        scores = of("score", of("score", add("MatMul", [query, key], "products"), "QuantizeLinear"), "DequantizeLinear")
    else:
        integers = add("MatMulInteger", ["query", "turned", "query_zero_point", "key_zero_point"], "integers")
        units = add("Mul", ["query_scale", "key_scale"], "units")
        scores = add("Mul", [add("Cast", [integers], "floats", to=TensorProto.FLOAT), units], "scores")
    scores = add("Mul", [scores, "factor"], "scaled")
    if window:
        at = np.arange(length)
        mask = np.where(np.abs(at[:, None] - at) <= window, 0.0, -1e9).astype(np.float32)[None, None]
        inits.append(numpy_helper.from_array(mask, "mask"))
        scores = add("Add", [scores, "mask"], "masked")
    weights = add("Softmax", [scores], "weights", axis=-1)
    if form == "static":
        rounded = of("weight", of("weight", weights, "QuantizeLinear"), "DequantizeLinear")
        add("MatMul", [rounded, of("value", "value", "DequantizeLinear")], "out")
        return nodes
    nodes.append(helper.make_node("DynamicQuantizeLinear", [weights], ["codes", "range", "zero"]))
    sums = add("MatMulInteger", ["codes", "value", "zero", "value_zero_point"], "sums")
    unit = add("Mul", ["range", "value_scale"], "unit")
    add("Mul", [add("Cast", [sums], "numbers", to=TensorProto.FLOAT), unit], "out")
    return nodes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--window", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--form", choices=("static", "dynamic"), default="static")
    given = parser.parse_args()
    names = list(CODES) if given.form == "static" else ["query", "key", "value"]
    inits = _constants(names)
    roles = [t.name for t in inits]
    attributes: dict[str, Any] = {"scale": SCALE, "mask": f"abs(q - k) <= {given.window}" if given.window else ""}
    plain = helper.make_node("StofAttention", ["query", "key", "value"], ["out"], domain="stof", **attributes)
    attributes |= {"operands": " ".join(roles), "weight_range": given.form}
    own = helper.make_node(
        "StofQuantizedAttention", ["query", "key", "value", *roles], ["out"], domain="stof", **attributes
    )
    rng = np.random.default_rng(0)
    feed = {
        n: rng.normal(0, 40, (1, H, given.length, D)).clip(-127, 127).astype(np.int8) for n in ("query", "key", "value")
    }
    numbers = {n: np.float32(CODES[n][0]) * a.astype(np.float32) for n, a in feed.items()}
    extended = list(inits)
    runtime = _runtime_nodes(given.form, given.window, given.length, extended)
    sessions = {
        "runtime": (_session(runtime, given.length, TensorProto.INT8, extended, given.threads), feed),
        "fp32": (_session([plain], given.length, TensorProto.FLOAT, [], given.threads), numbers),
        "own": (_session([own], given.length, TensorProto.INT8, inits, given.threads), feed),
    }
    best = dict.fromkeys(sessions, float("inf"))
    for _ in range(given.rounds):
        for name, (session, inputs) in sessions.items():
            begin = time.perf_counter()
            session.run(None, inputs)
            best[name] = min(best[name], 1e3 * (time.perf_counter() - begin))
    print(
        f"{given.form}, S {given.length}, window {given.window}: ONNX Runtime {best['runtime']:.2f} ms, StofAttention in fp32 "
        f"{best['fp32']:.2f} ms, StofQuantizedAttention {best['own']:.2f} ms: {best['runtime'] / best['own']:.1f}x, "
        f"{best['fp32'] / best['own']:.2f}x"
    )


if __name__ == "__main__":
    main()
