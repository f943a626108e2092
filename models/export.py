# SPDX-License-Identifier: Apache-2.0
"""Exports the graphs from transformers' own classes, with pinned torch and transformers.

``python models/export.py [NAME ...]`` writes graphs and manifest entries; ``--check`` exports again and shows that nodes and
constants are those of the stored graphs. Needs torch 2.13.0, transformers 5.23.0 and onnxscript.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import logging
import lzma
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto

sys.path.insert(0, str(Path(__file__).resolve().parent))
import build

VERSIONS = {"torch": "2.13.0", "transformers": "5.23.0"}
OPSETS = {"dynamo": 20, "torchscript": 18}
_KEEP = 1024  # float tensors up to this many elements stay in the graph: norms, biases, inverse frequencies

# Sizes of the narrow forms: two to four layers, windows that lengths of 40 exceed.
_NARROW = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 1024}
_NARROW_GQA = {**_NARROW, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "modernbert-base": ("ModernBertConfig", "ModernBertModel", {}),
    "bert-base": ("BertConfig", "BertModel", {}),
    "mistral-4l": (
        "MistralConfig",
        "MistralModel",
        {"num_hidden_layers": 4, "sliding_window": 512, "use_cache": False},
    ),
    "gemma3-6l": (
        "Gemma3TextConfig",
        "Gemma3TextModel",
        {
            "num_hidden_layers": 6,
            "hidden_size": 640,
            "intermediate_size": 2048,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 512,
            "vocab_size": 32768,
            "use_cache": False,
        },
    ),
    "embeddinggemma-6l": (
        "Gemma3TextConfig",
        "Gemma3TextModel",
        {
            "num_hidden_layers": 6,
            "hidden_size": 768,
            "intermediate_size": 1152,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 512,
            "vocab_size": 32768,
            "use_cache": False,
            "use_bidirectional_attention": True,
        },
    ),
    "narrow/modernbert": (
        "ModernBertConfig",
        "ModernBertModel",
        {
            **_NARROW,
            **_TOKENS,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "local_attention": 32,
            "cls_token_id": 1,
            "sep_token_id": 2,
        },
    ),
    "narrow/bert": ("BertConfig", "BertModel", {**_NARROW, "num_hidden_layers": 2, "num_attention_heads": 4}),
    "narrow/mistral": (
        "MistralConfig",
        "MistralModel",
        {**_NARROW_GQA, "num_hidden_layers": 2, "sliding_window": 20, "use_cache": False},
    ),
    "narrow/gemma3": (
        "Gemma3TextConfig",
        "Gemma3TextModel",
        {
            **_NARROW_GQA,
            "num_hidden_layers": 3,
            "sliding_window": 20,
            "use_cache": False,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "narrow/embeddinggemma": (
        "Gemma3TextConfig",
        "Gemma3TextModel",
        {
            **_NARROW_GQA,
            "num_hidden_layers": 3,
            "sliding_window": 20,
            "use_cache": False,
            "use_bidirectional_attention": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


def all_names() -> list[str]:
    """Every graph: architecture × exporter × attention implementation. TorchScript cannot trace EmbeddingGemma."""
    found = []
    for architecture in CONFIGS:
        for exporter in ("dynamo", "torchscript"):
            if "embeddinggemma" in architecture and exporter == "torchscript":
                continue  # fails with "unordered_map::at" in the tracer
            found += [f"{architecture}.{exporter}.{attention}" for attention in ("eager", "sdpa")]
    return found


def export(name: str) -> onnx.ModelProto:
    """One graph, freshly exported, with its weights stripped."""
    import torch
    import transformers

    warnings.filterwarnings("ignore")
    # Misses torchvision, which nothing here needs; torch sets the levels of its loggers when it is imported.
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)
    architecture, exporter, attention = name.rsplit(".", 2)
    config_class, model_class, settings = CONFIGS[architecture]
    config = getattr(transformers, config_class)(**settings)
    config._attn_implementation = attention
    torch.manual_seed(0)
    core = getattr(transformers, model_class)(config).eval()

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core = core

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            return self.core(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state

    ids = torch.randint(3, 90, (2, 20))
    mask = torch.ones(2, 20, dtype=torch.int64)
    mask[0, :3] = 0
    names = {"input_names": ["input_ids", "attention_mask"], "output_names": ["last_hidden_state"]}
    axes = {0: "batch", 1: "sequence"}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = str(Path(folder) / "model.onnx")
        if exporter == "dynamo":
            dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")}
            torch.onnx.export(
                Encoder().eval(), (ids, mask), path, dynamo=True, opset_version=OPSETS[exporter], verbose=False,
                dynamic_shapes={"input_ids": dims, "attention_mask": dims}, external_data=True, **names,
            )  # fmt: skip
        else:
            dynamic = dict.fromkeys(("input_ids", "attention_mask", "last_hidden_state"), axes)
            torch.onnx.export(
                Encoder().eval(), (ids, mask), path, dynamo=False, opset_version=OPSETS[exporter],
                dynamic_axes=dynamic, **names,
            )  # fmt: skip
        model = onnx.load(path, load_external_data=False)
        strip(model, Path(folder))
    # Node names and metadata stay where users' files are most likely to have them.
    if not (exporter == "dynamo" and attention == "sdpa"):
        forget_metadata(model)
    return model


def strip(model: onnx.ModelProto, folder: Path) -> None:
    """Replaces large float tensors by placeholders and brings small external ones inline."""
    for tensor in model.graph.initializer:
        count = 1
        for d in tensor.dims:
            count *= d
        if tensor.data_type == TensorProto.FLOAT and count > _KEEP:
            tensor.ClearField("raw_data")
            tensor.ClearField("float_data")
            del tensor.external_data[:]
            tensor.data_location = TensorProto.EXTERNAL
            tensor.external_data.append(onnx.StringStringEntryProto(key="location", value=build.PLACEHOLDER))
        elif tensor.data_location == TensorProto.EXTERNAL:
            onnx.external_data_helper.load_external_data_for_tensor(tensor, str(folder))
            tensor.data_location = TensorProto.DEFAULT
            del tensor.external_data[:]


def forget_metadata(model: onnx.ModelProto) -> None:
    """Drops metadata, doc strings and value_info, which a runtime does not need."""
    del model.metadata_props[:]
    del model.graph.metadata_props[:]
    del model.graph.value_info[:]
    for node in model.graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
    for item in [*model.graph.input, *model.graph.output, *model.graph.initializer]:
        del item.metadata_props[:]


def node_hash(model: onnx.ModelProto) -> str:
    """A hash of all nodes (operators, wiring, attributes) and constants, whatever they are called and in which order
    independent ones stand: transformers computes rotary embeddings in the order of a Python set, which differs from
    process to process. Weights count by type and shape.
    """
    hashes = {i.name: _digest("input", n, i.type.tensor_type.elem_type) for n, i in enumerate(model.graph.input)}
    hashes |= {t.name: _constant_hash(t) for t in model.graph.initializer} | {"": ""}
    nodes = []
    for node in model.graph.node:
        attributes = sorted(a.SerializeToString(deterministic=True).hex() for a in node.attribute)
        nodes.append(_digest(node.domain, node.op_type, [hashes[i] for i in node.input], attributes))
        hashes |= {name: _digest(nodes[-1], n) for n, name in enumerate(node.output) if name}
    return _digest(sorted(nodes), [hashes[o.name] for o in model.graph.output])


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _constant_hash(tensor: onnx.TensorProto) -> str:
    dims = list(tensor.dims)
    if tensor.data_location == TensorProto.EXTERNAL:
        return _digest("weight", tensor.data_type, dims)
    values = onnx.numpy_helper.to_array(tensor)
    if values.dtype.kind != "f":
        return _digest("constant", tensor.data_type, dims, values.tobytes().hex())
    # Vectors are norms, biases and frequencies: up to the last digits, in which processors may differ. The rest is random.
    vector = values.size == max(dims, default=1)
    return _digest("constant", tensor.data_type, dims, [f"{v:.4g}" for v in values.flat] if vector else "random")


def entry(name: str, model: onnx.ModelProto) -> dict[str, Any]:
    """The manifest's record of a graph."""
    architecture, exporter, attention = name.rsplit(".", 2)
    config_class, model_class, settings = CONFIGS[architecture]
    return {
        "model_class": model_class,
        "config_class": config_class,
        "settings": settings,
        "exporter": exporter,
        "attention": attention,
        "opset": OPSETS[exporter],
        "versions": VERSIONS,
        "nodes": len(model.graph.node),
        "node_hash": node_hash(model),
        "softmax": sum(n.op_type == "Softmax" for n in model.graph.node),
        "parameters": build.parameters(model),
        "metadata": bool(model.graph.value_info) or any(n.metadata_props for n in model.graph.node),
    }


def check(name: str, model: onnx.ModelProto) -> bool:
    """Whether a fresh export has the nodes and constants of the stored graph."""
    same = node_hash(model) == node_hash(build.load_graph(name))
    print(f"{'same' if same else 'DIFFERENT'} {name}: {len(model.graph.node)} nodes", flush=True)
    return same


def store(name: str, model: onnx.ModelProto) -> None:
    """Writes a graph and its entry in the manifest."""
    target = build.GRAPHS / f"{name}.onnx.xz"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(lzma.compress(model.SerializeToString(deterministic=True), preset=9 | lzma.PRESET_EXTREME))
    path = build.ROOT / "manifest.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    known[name] = entry(name, model)
    path.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
    print(f"wrote {name}: {len(model.graph.node)} nodes, {target.stat().st_size} bytes", flush=True)


def check_versions() -> None:
    """Other versions write other graphs.

    Raises:
        SystemExit: naming the version that is installed and the one that is expected.
    """
    for package, expected in VERSIONS.items():
        try:
            found = importlib.metadata.version(package).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            raise SystemExit(f"{package} is not installed; pip install {package}=={expected} onnxscript") from None
        if found != expected:
            raise SystemExit(f"{package} {found} is installed, expected {expected}, which wrote the stored graphs")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Exports the graphs, or checks the stored ones.")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--narrow", action="store_true", help="the narrow graphs only: 550 MB of memory, 2 minutes")
    parser.add_argument("--check", action="store_true", help="compare with the stored graphs instead of writing")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - set(all_names())):
        parser.error(f"no graph {unknown[0]!r}; build.py --list shows the names")
    check_versions()
    names = arguments.names or [n for n in all_names() if n.startswith("narrow/") or not arguments.narrow]
    failures = 0
    for name in names:
        try:
            model = export(name)
        except Exception as error:  # each exporter raises kinds of its own; the others go on
            print(f"FAILED {name}: {str(error)[:300]}", flush=True)
            failures += 1
            continue
        if arguments.check:
            failures += not check(name, model)
        else:
            store(name, model)
    if arguments.check:
        print(f"{len(names) - failures} of {len(names)} graphs are what torch and transformers write", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
