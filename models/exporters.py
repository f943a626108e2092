# SPDX-License-Identifier: Apache-2.0
"""Four ways to write a model of transformers as ONNX: torch's two exporters, transformers' own, and optimum's."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx

from feeds import Feed

_KIND = inspect.Parameter.POSITIONAL_OR_KEYWORD
OPSETS = {"dynamo": 20, "torchscript": 18, "transformers": 21, "optimum": 18}


def export(core: Any, feed: Feed, exporter: str, folder: Path) -> onnx.ModelProto:
    """The graph of a model that is fed as ``feed`` says; large weights stay in files of ``folder``."""
    import torch

    warnings.filterwarnings("ignore")
    # Misses torchvision, which nothing here needs; torch sets the levels of its loggers when it is imported.
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)

    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core = core

        def forward(self, *tensors: Any) -> Any:
            return feed.call(self.core, *tensors)

        # torch.export names what it traces after the parameters.
        forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(n.replace(".", "_"), _KIND) for n in ("self", *feed.tensors)]
        )

    path = folder / "model.onnx"
    with torch.no_grad():
        if exporter == "optimum":
            path = _optimum(core, feed, folder)
        else:
            _EXPORTERS[exporter](torch, core, Wrapped().eval(), feed, path)
    return onnx.load(str(path), load_external_data=False)


def _dynamo(torch: Any, core: Any, wrapped: Any, feed: Feed, path: Path) -> None:
    names = {n for axes in feed.axes.values() for n in axes.values()}
    dims = {n: torch.export.Dim(n) for n in names}
    shapes = {t.replace(".", "_"): {a: dims[n] for a, n in feed.axes[t].items()} for t in feed.tensors}
    torch.onnx.export(
        wrapped, tuple(feed.tensors.values()), str(path), dynamo=True, opset_version=OPSETS["dynamo"], verbose=False,
        dynamic_shapes=shapes, external_data=True, input_names=list(feed.tensors),
        output_names=list(feed.outputs),
    )  # fmt: skip


def _torchscript(torch: Any, core: Any, wrapped: Any, feed: Feed, path: Path) -> None:
    first = next(iter(feed.axes.values()))
    axes = {**feed.axes, **{n: feed.output_axes.get(n, first) for n in feed.outputs}}
    torch.onnx.export(
        wrapped, tuple(feed.tensors.values()), str(path), dynamo=False, opset_version=OPSETS["torchscript"],
        dynamic_axes=axes, input_names=list(feed.tensors), output_names=list(feed.outputs),
    )  # fmt: skip


def _transformers(torch: Any, core: Any, wrapped: Any, feed: Feed, path: Path) -> None:
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    exporter = OnnxExporter()
    config = OnnxConfig(dynamic=True, opset_version=OPSETS["transformers"])
    program, _ = exporter.export_program(core, dict(feed.tensors), config)
    exporter.save_program(program, path)


def _optimum(core: Any, feed: Feed, folder: Path) -> Path:
    """Optimum chooses inputs itself, by the task; of several files it is the one that the feed names."""
    from optimum.exporters.onnx import onnx_export_from_model

    task, _, part = feed.task.partition("/")
    onnx_export_from_model(
        core, output=folder, task=task, opset=OPSETS["optimum"], do_validation=False, device="cpu",
    )  # fmt: skip
    return folder / f"{part or 'model'}.onnx"


_EXPORTERS: dict[str, Callable[..., None]] = {
    "dynamo": _dynamo,
    "torchscript": _torchscript,
    "transformers": _transformers,
}
