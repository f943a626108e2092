# SPDX-License-Identifier: Apache-2.0
"""Exports the graphs from transformers' own classes, with pinned versions.

``python models/export.py [NAME ...]`` writes graphs and manifest entries; ``--check`` exports again and shows that nodes and
constants are those of the stored graphs. Needs torch 2.13.0, transformers 5.23.0 and onnxscript; the graphs of optimum need
optimum-onnx 0.1.0 with transformers 4.57.6 instead, in an environment of its own.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import onnx

sys.path.insert(0, str(Path(__file__).resolve().parent))
import build
from architectures import Architecture
from bigbird import add_weights
from exporters import OPSETS
from exporters import export as export_model
from feeds import feed, feed_by_task
from first import FIRST
from mlp import MLP
from paper import PAPER
from relative import RELATIVE
from store import forget_metadata, node_hash, strip, write
from texts import TEXTS
from zoo import ZOO

VERSIONS = {"torch": "2.13.0", "transformers": "5.23.0"}
OPTIMUM_VERSIONS = {"torch": "2.13.0", "transformers": "4.57.6", "optimum-onnx": "0.1.0"}
ARCHITECTURES: dict[str, Architecture] = {
    **FIRST,
    **{f"zoo/{name}": a for name, a in ZOO.items()},
    **{f"mlp/{name}": a for name, a in MLP.items()},
    **{f"paper/{name}": a for name, a in PAPER.items()},
    **{f"texts/{name}": a for name, a in TEXTS.items()},
    **{f"relative/{name}": a for name, a in RELATIVE.items()},
}
_TINY = ("zoo/", "mlp/", "relative/")  # architectures with few, narrow layers
_TRAINED_VECTORS = ("paper/", "texts/")  # architectures whose vectors of parameters are drawn, too


def all_names() -> list[str]:
    """Every graph: architecture × exporter × attention implementation."""
    return [f"{name}.{exporter}.{kind}" for name, a in ARCHITECTURES.items() for exporter, kind in a.forms]


def versions(name: str) -> dict[str, str]:
    """The packages that write a graph."""
    return OPTIMUM_VERSIONS if ".optimum." in name else VERSIONS


def export(name: str) -> onnx.ModelProto:
    """One graph, freshly exported, with its weights stripped."""
    import torch
    import transformers

    architecture, exporter, attention = name.rsplit(".", 2)
    what = ARCHITECTURES[architecture]
    config = getattr(transformers, what.config)(**what.settings)
    config._attn_implementation = attention
    if hasattr(config, "num_local_experts"):
        config._experts_implementation = "batched_mm"  # the default is an operator that no exporter knows
    torch.manual_seed(0)
    core = getattr(transformers, what.model)(config).eval().to(getattr(torch, what.dtype))
    has_trained_vectors = name.startswith(_TRAINED_VECTORS)
    if has_trained_vectors:
        _randomize_vectors(torch, core)
    if name.startswith("paper/"):
        add_weights(core, int(architecture.rpartition("-")[2]) + 1 if what.inputs == "bigbird-pixels" else 2048)
    with tempfile.TemporaryDirectory() as folder:
        given = feed_by_task(what.inputs) if exporter == "optimum" else feed(what.inputs, torch, config, what.dtype)
        model = export_model(core, given, exporter, Path(folder))
        unset = zeros(core) if name.startswith(_TINY) else ()
        strip(model, Path(folder), name.startswith(_TINY), unset, has_trained_vectors)
    # Node names and metadata stay where users' files are most likely to have them.
    if name.startswith(_TINY) or not (exporter == "dynamo" and attention == "sdpa"):
        # Of graphs of transformers' exporter, in which every size is dynamic, the names of sizes are part.
        forget_metadata(model, shapes=exporter == "transformers")
    return model


def _randomize_vectors(torch: Any, core: Any) -> None:
    """Biases as after training: exporters leave out those of zeros, and share equal ones."""
    with torch.no_grad():
        for parameter in core.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.02 * torch.randn_like(parameter))


def zeros(core: Any) -> set[str]:
    """Parameters that are zero before training, of which something in the graph is computed: not biases and norms."""
    found = {f"core.{n}" for n, p in core.named_parameters() if not p.any() and (p.dim() > 1 or p.numel() < 8)}
    return found | {n.removeprefix("core.") for n in found}


def facts(name: str) -> dict[str, Any]:
    """What the manifest says of a graph besides what can be counted."""
    architecture, exporter, attention = name.rsplit(".", 2)
    what = ARCHITECTURES[architecture]
    return {
        "model_class": what.model,
        "config_class": what.config,
        "settings": what.settings,
        "exporter": exporter,
        "attention": attention,
        "opset": OPSETS[exporter],
        "versions": versions(name),
        **({"inputs": what.inputs, "dtype": what.dtype} if name.startswith((*_TINY, *_TRAINED_VECTORS)) else {}),
    }


def check(name: str, model: onnx.ModelProto) -> bool:
    """Whether a fresh export has the nodes and constants of the stored graph."""
    same = node_hash(model) == node_hash(build.load_graph(name))
    print(f"{'same' if same else 'DIFFERENT'} {name}: {len(model.graph.node)} nodes", flush=True)
    return same


def is_stored(name: str, model: onnx.ModelProto) -> bool:
    """Whether the stored graph is this one, and the manifest says of it what it should."""
    entry = build.manifest().get(name, {})
    said = json.loads(json.dumps(facts(name)))
    return all(entry.get(k) == v for k, v in said.items()) and node_hash(model) == node_hash(build.load_graph(name))


def missing(name: str) -> str:
    """What has to be installed for a graph to come out as it is stored; empty when nothing has to."""
    for package, expected in versions(name).items():
        try:
            found = importlib.metadata.version(package).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            return f"{package} is not installed; pip install {package}=={expected} onnxscript"
        if found != expected:
            return f"{package} {found} is installed, expected {expected}, which wrote the stored graphs"
    return ""


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Exports the graphs, or checks the stored ones.")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--narrow", action="store_true", help="the narrow graphs only: 550 MB of memory, 2 minutes")
    parser.add_argument("--zoo", action="store_true", help="the zoo only: 600 MB of memory, half an hour")
    parser.add_argument("--check", action="store_true", help="compare with the stored graphs instead of writing")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - set(all_names())):
        parser.error(f"no graph {unknown[0]!r}; build.py --list shows the names")
    prefix = "narrow/" if arguments.narrow else "zoo/" if arguments.zoo else ""
    wanted = arguments.names or [n for n in all_names() if n.startswith(prefix)]
    names = [n for n in wanted if not missing(n)]
    if not names:
        raise SystemExit(missing(wanted[0]))
    if len(names) < len(wanted):
        print(f"left out {len(wanted) - len(names)} graphs of other versions", flush=True)
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
        elif is_stored(name, model):
            print(f"same {name}", flush=True)
        else:
            write(name, model, facts(name))
    if arguments.check:
        print(f"{len(names) - failures} of {len(names)} graphs are what the exporters write", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
