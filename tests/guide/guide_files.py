# SPDX-License-Identifier: Apache-2.0
"""The files that the pages of docs/guide name, small and of random weights."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from mlp_models import MlpForm, make_mlp_model
from onnx import TensorProto, helper, numpy_helper
from tests.command.test_cli import ATTENTION, OPAQUE, text

import build
import stof

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cached_attention"))
from gqa_models import Shape, model_of

WORDS, WIDTH = 31, 24


def encoder(path: Path) -> None:
    """A text encoder with dense and windowed layers, and padding."""
    onnx.save(build.fill(build.load_graph("narrow/modernbert.dynamo.sdpa"), seed=1), path)


def optimized_encoder(path: Path) -> None:
    """The same encoder, optimized."""
    source = path.with_name("dense.onnx")
    encoder(source)
    stof.optimize(source, path, verify=False)


def features(path: Path) -> None:
    """A BERT that gives a row for each token."""
    onnx.save(build.fill(build.load_graph("narrow/bert.torchscript.sdpa"), seed=1), path)


def embedder(path: Path) -> None:
    """The same BERT, with the mean over real tokens behind it."""
    features(path)
    model = onnx.load(path)
    graph = model.graph
    rows = graph.output.pop()
    graph.initializer.extend(numpy_helper.from_array(np.array([i]), name) for i, name in ((1, "tokens"), (-1, "width")))
    graph.node.extend(
        [
            helper.make_node("Cast", ["attention_mask"], ["is_real"], to=TensorProto.FLOAT),
            helper.make_node("Unsqueeze", ["is_real", "width"], ["weight"]),
            helper.make_node("Mul", [rows.name, "weight"], ["real_rows"]),
            helper.make_node("ReduceSum", ["real_rows", "tokens"], ["total"], keepdims=0),
            helper.make_node("ReduceSum", ["weight", "tokens"], ["count"], keepdims=0),
            helper.make_node("Div", ["total", "count"], ["sentence_embedding"]),
        ]
    )
    size = rows.type.tensor_type.shape.dim[2].dim_value
    graph.output.append(helper.make_tensor_value_info("sentence_embedding", TensorProto.FLOAT, ["batch", size]))
    onnx.save(model, path)


def decoder(path: Path, layers: int = 4) -> None:
    """Tokens, layers of attention over a cache with residual connections, logits."""
    rng = np.random.default_rng(0)
    shape = Shape(H=4, G=2, D=16, packed=True)
    model = model_of(*[shape] * layers, masks=True)
    graph = model.graph
    attention = [n for n in graph.node if n.op_type == "GroupQueryAttention"]
    nodes = [n for n in graph.node if n.op_type != "GroupQueryAttention"]
    nodes.append(helper.make_node("Gather", ["embedding", "input_ids"], ["x0"]))
    weights = {"embedding": (WORDS, WIDTH), "head": (WIDTH, WORDS)}
    for i, node in enumerate(attention):
        weights |= {f"in{i}": (WIDTH, (4 + 2 * 2) * 16), f"out{i}": (4 * 16, WIDTH)}
        nodes += [
            helper.make_node("MatMul", [f"x{i}", f"in{i}"], [node.input[0]]),
            node,
            helper.make_node("MatMul", [node.output[0], f"out{i}"], [f"y{i}"]),
            helper.make_node("Add", [f"x{i}", f"y{i}"], [f"x{i + 1}"]),
        ]
    nodes.append(helper.make_node("MatMul", [f"x{layers}", "head"], ["logits"]))
    stored = [numpy_helper.from_array(rng.standard_normal(d).astype(np.float32) / 4, n) for n, d in weights.items()]
    inputs = [i for i in graph.input if not i.name.endswith("query")]
    inputs.insert(0, helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["B", "S"]))
    outputs = [o for o in graph.output if "present" in o.name]
    outputs.insert(0, helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["B", "S", WORDS]))
    made = helper.make_graph(nodes, "decoder", inputs, outputs, stored)
    onnx.save(helper.make_model(made, opset_imports=model.opset_import, ir_version=10), path)


def prompts(path: Path) -> None:
    """Token ids [8, 280]: longer than a range of positions of the report."""
    np.savez(path, ids=np.random.default_rng(0).integers(0, WORDS, (8, 280)))


def genai_folder(path: Path) -> None:
    """A model folder with the files that the runtime's builder writes beside a model."""
    path.mkdir()
    decoder(path / "model.onnx", layers=3)
    session = {"filename": "model.onnx", "session_options": {"provider_options": []}}
    config = {"model": {"type": "llama", "decoder": session}, "search": {"past_present_share_buffer": True}}
    (path / "genai_config.json").write_text(json.dumps(config, indent=4))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_text("{}")


def exported_folder(path: Path) -> None:
    """A model beside its configuration, as Optimum exports it."""
    path.mkdir()
    encoder(path / "model.onnx")
    (path / "config.json").write_text("{}")


def feed(path: Path) -> None:
    """Inputs of the encoder."""
    ids = np.random.default_rng(0).integers(0, 90, (2, 40))
    np.savez(path, input_ids=ids, attention_mask=np.ones_like(ids))


def feeds_of_a_module(path: Path) -> None:
    """A module with a function that yields such inputs."""
    path.write_text(
        "import numpy as np\n\n\ndef draw():\n    ids = np.random.default_rng(1).integers(0, 90, (1, 30))\n"
        '    yield {"input_ids": ids, "attention_mask": np.ones_like(ids)}\n'
    )


def rank(path: Path) -> None:
    """Attention of one rank of a tensor-parallel model."""
    onnx.save(model_of(Shape(H=16, G=8, D=16)), path)


def opaque_mask(path: Path) -> None:
    """Attention whose mask no rule can read off the graph."""
    onnx.save(text(OPAQUE + ATTENTION), path)


def relu_decoder(path: Path) -> None:
    """A decoder of four MLPs with ReLU."""
    onnx.save(make_mlp_model(MlpForm(neurons=256, has_cache=False, shift=1.0), layers=4), path)


def calibration(path: Path) -> None:
    """Token ids of prompts, a list for each."""
    path.write_text(json.dumps(np.random.default_rng(3).integers(0, WORDS, (12, 48)).tolist()))


MODEL: dict[str, Callable[[Path], None]] = {"model.onnx": encoder}
FILES: dict[str, dict[str, Callable[[Path], None]]] = {
    "docs/guide/decoders.md": {"model_folder": genai_folder, "exported": exported_folder},
    "docs/guide/half-precision.md": {**MODEL, "texts.npz": feed},
    "docs/guide/options.md": {**MODEL, "exported": exported_folder, "feed.npz": feed, "my_feeds.py": feeds_of_a_module},
    "docs/guide/quickstart.md": MODEL,
    "docs/guide/report.md": {**MODEL, "exported": exported_folder},
    "docs/guide/sparse-mlp.md": {"decoder.onnx": relu_decoder, "calibration.json": calibration},
    "docs/guide/sparsify.md": {
        "decoder.onnx": decoder,
        "encoder.stof.onnx": optimized_encoder,
        "prompts.npz": prompts,
        "rank1.onnx": rank,
    },
    "docs/guide/tensorrt.md": MODEL,
    "docs/guide/texts.md": {"model.onnx": embedder, "features.onnx": features},
    "docs/guide/tuning.md": MODEL,
    "docs/guide/writing-a-mask.md": {**MODEL, "opaque.onnx": opaque_mask},
    "docs/guide/benchmarks.md": MODEL,
    "README.md": MODEL,
}
