# SPDX-License-Identifier: Apache-2.0
"""Decoders with KV caches in 16 bits, whose head sizes kernels with 8-bit operands take or do not."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cached_attention"))
import gqa_models
from gqa_models import TYPES, Shape

WORDS = 64
SHAPE = Shape(H=4, G=2, D=64, packed=True, rotary=64, dtype="float16")


def write_decoder(path: Path, *shapes: Shape, gain: float = 1.0) -> Path:
    """Tokens, and for each shape an embedding and attention over a cache of its own; the sum of the outputs gives logits.

    Args:
        path: of the file.
        shapes: of the attentions, of one type and width; packed.
        gain: of the embeddings: sharper attention.
    """
    rng = np.random.default_rng(1)
    model = gqa_models.model_of(*shapes, masks=True)
    graph, kind = model.graph, TYPES[shapes[0].dtype]
    prefixes = [f"layer{i}/" if len(shapes) > 1 else "" for i in range(len(shapes))]
    made: set[str] = set()

    def store(name: str, array: np.ndarray) -> None:
        made.add(name)
        typed = array.astype(helper.tensor_dtype_to_np_dtype(kind))
        graph.initializer.append(numpy_helper.from_array(typed, name))

    for prefix, s in zip(prefixes, shapes, strict=True):
        store(f"{prefix}embedding", rng.standard_normal((WORDS, (s.H + 2 * s.G) * s.D)) * gain)
        made.add(f"{prefix}query")
        graph.node.insert(0, helper.make_node("Gather", [f"{prefix}embedding", "input_ids"], [f"{prefix}query"]))
        if s.rotary:
            angles = np.arange(gqa_models.TABLE_ROWS)[:, None] * 0.7 / (1 + np.arange(s.rotary // 2))
            store(f"{prefix}cos", np.cos(angles))
            store(f"{prefix}sin", np.sin(angles))
        if s.sink:
            store(f"{prefix}sink", rng.standard_normal(s.H))
    store("head", rng.standard_normal((shapes[0].H * shapes[0].D, WORDS)) * 0.05)
    graph.node.append(helper.make_node("Sum", [f"{p}output" for p in prefixes], ["hidden"]))
    graph.node.append(helper.make_node("MatMul", ["hidden", "head"], ["typed_logits"]))
    graph.node.append(helper.make_node("Cast", ["typed_logits"], ["logits"], to=TensorProto.FLOAT))
    kept = [i for i in graph.input if i.name not in made]
    presents = [o for o in graph.output if "present" in o.name]
    del graph.input[:], graph.output[:]
    graph.input.extend([helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["B", "S"]), *kept])
    graph.output.extend([helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["B", "S", WORDS]), *presents])
    onnx.save(model, path)
    return path


def write_prompts(path: Path, length: int, count: int = 1) -> list[str]:
    """The option with prompts of so many tokens."""
    np.save(path, np.random.default_rng(0).integers(0, WORDS, (count, length)))
    return ["--prompts", str(path)]
