# SPDX-License-Identifier: Apache-2.0
"""StofChain on the CPU beside ONNX Runtime's own operators: best of interleaved rounds, in microseconds.

``python tools/chain_peers.py LIBRARY [--threads N] [--rounds N] [--case PART]``. Every pair is compared before it is timed.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import numpy as np
import onnxruntime as ort
from onnx import NodeProto, TensorProto, helper

Shape = tuple[int, ...]
HEAD = "axes b = x0.0, s = x0.1, n = x0.2; "
NORM = "c * rsqrt(mean(c * c) + 1e-5)"


@dataclass(frozen=True)
class Case:
    """A chain and the operators that ONNX Runtime has for it."""

    name: str
    inputs: list[Shape]
    nodes: list[NodeProto]
    chain: str
    outputs: int = 1


def node(kind: str, inputs: str, outputs: str, **attributes: object) -> NodeProto:
    """A node of the standard domain, or of com.microsoft for the fused ones."""
    fused = kind in ("SkipLayerNormalization", "BiasGelu")
    names = ["" if name == "-" else name for name in outputs.split()]
    return helper.make_node(kind, inputs.split(), names, domain="com.microsoft" if fused else "", **attributes)


def cases() -> list[Case]:
    """Chains of BERT and ModernBERT at (1, 128) and (8, 512)."""
    made = []
    for b, s in ((1, 128), (8, 512)):
        at, d, rows = f"({b},{s})", 768, (b, s, 768)
        split = node("Split", "x0", "a g", axis=-1, num_outputs=2)
        rotary = [
            split,
            node("Neg", "g", "m"),
            node("Concat", "m a", "r", axis=-1),
            node("Mul", "x0 x1", "p"),
            node("Mul", "r x2", "q"),
            node("Add", "p q", "y0"),
        ]
        skip = node("SkipLayerNormalization", "x0 x1 x2 x3", "y0 - - y1", epsilon=1e-5)
        made += [
            Case(
                f"LayerNorm {at}",
                [rows, (d,), (d,)],
                [node("LayerNormalization", "x0 x1 x2", "y0", epsilon=1e-5)],
                HEAD + f"let c = x0[b, s, n] - mean(x0[b, s, n]); out y0 f32 [b, s, n] = {NORM} * x1[n] + x2[n]",
            ),
            Case(
                f"add + LayerNorm {at}",
                [rows, rows, (d,), (d,)],
                [skip],
                HEAD + "let r = x0[b, s, n] + x1[b, s, n]; let c = r - mean(r); "
                f"out y0 f32 [b, s, n] = {NORM} * x2[n] + x3[n]; out y1 f32 [b, s, n] = r",
                2,
            ),
            Case(
                f"Gelu {at}",
                [(b, s, 3072)],
                [node("Gelu", "x0", "y0")],
                HEAD + "out y0 f32 [b, s, n] = gelu(x0[b, s, n])",
            ),
            Case(
                f"bias + Gelu {at}",
                [(b, s, 3072), (3072,)],
                [node("BiasGelu", "x0 x1", "y0")],
                HEAD + "out y0 f32 [b, s, n] = gelu(x0[b, s, n] + x1[n])",
            ),
            Case(
                f"GEGLU, unfused {at}",
                [(b, s, 2304)],
                [split, node("Gelu", "a", "e"), node("Mul", "e g", "y0")],
                "axes b = x0.0, s = x0.1, n = x0.2 / 2; out y0 f32 [b, s, n] = gelu(x0[b, s, n]) * x0[b, s, n + 1152]",
            ),
            Case(
                f"SwiGLU, unfused {at}",
                [(b, s, 2304), (b, s, 2304)],
                [node("Sigmoid", "x0", "g"), node("Mul", "x0 g", "e"), node("Mul", "e x1", "y0")],
                HEAD + "out y0 f32 [b, s, n] = silu(x0[b, s, n]) * x1[b, s, n]",
            ),
            Case(
                f"Softmax {at}",
                [(12 if b == 1 else 32, s, s)],
                [node("Softmax", "x0", "y0", axis=-1)],
                HEAD + "let e = exp(x0[b, s, n] - max_of(x0[b, s, n])); out y0 f32 [b, s, n] = e / sum(e)",
            ),
            Case(
                f"rotary, unfused {at}",
                [(b, 12, s, 64), (s, 64), (s, 64)],
                rotary,
                "axes b = x0.0, h = x0.1, s = x0.2, d = 64; "
                "let t = select(d < 32, -x0[b, h, s, d + 32], x0[b, h, s, d - 32]); "
                "out y0 f32 [b, h, s, d] = x0[b, h, s, d] * x1[s, d] + t * x2[s, d]",
            ),
        ]
    return made


class Bound:
    """A session whose inputs and outputs stay where they are."""

    def __init__(
        self, case: Case, nodes: list[NodeProto], arrays: list[np.ndarray], library: str, threads: int
    ) -> None:
        given = [helper.make_tensor_value_info(f"x{i}", TensorProto.FLOAT, a.shape) for i, a in enumerate(arrays)]
        self.names = [f"y{i}" for i in range(case.outputs)]
        results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in self.names]
        imports = [helper.make_opsetid(*pair) for pair in (("", 20), ("stof", 1), ("com.microsoft", 1))]
        graph = helper.make_graph(nodes, "g", given, results)
        model = helper.make_model(graph, opset_imports=imports, ir_version=9)
        options = ort.SessionOptions()
        options.register_custom_ops_library(library)
        options.intra_op_num_threads = threads
        self.session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        first = self.session.run(None, {f"x{i}": a for i, a in enumerate(arrays)})
        self.values = [ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(value)) for value in first]
        self.binding = self.session.io_binding()
        for i, array in enumerate(arrays):
            self.binding.bind_cpu_input(f"x{i}", array)
        for name, value in zip(self.names, self.values, strict=True):
            self.binding.bind_ortvalue_output(name, value)

    def best(self, repeats: int) -> float:
        """The shortest of some runs, in microseconds."""
        shortest = float("inf")
        for _ in range(repeats):
            begin = time.perf_counter()
            self.session.run_with_iobinding(self.binding)
            shortest = min(shortest, time.perf_counter() - begin)
        return shortest * 1e6


def main() -> None:
    """Prints a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--case", default="")
    arguments = parser.parse_args()
    random = np.random.default_rng(0)
    for case in cases():
        if arguments.case not in case.name:
            continue
        arrays = [random.normal(size=shape).astype(np.float32) for shape in case.inputs]
        inputs, outputs = [f"x{i}" for i in range(len(arrays))], [f"y{i}" for i in range(case.outputs)]
        call = helper.make_node("StofChain", inputs, outputs, "chain", domain="stof", chain=case.chain)
        theirs = Bound(case, case.nodes, arrays, arguments.library, arguments.threads)
        ours = Bound(case, [call], arrays, arguments.library, arguments.threads)
        for a, b in zip(theirs.values, ours.values, strict=True):
            np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=2e-5, atol=2e-5)
        times = [(theirs.best(5), ours.best(5)) for _ in range(arguments.rounds)]
        peer, own = min(t[0] for t in times), min(t[1] for t in times)
        print(f"{case.name:26s} {peer:9.1f} {own:9.1f}  {peer / own:5.2f}x", flush=True)


if __name__ == "__main__":
    main()
