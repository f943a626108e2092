# SPDX-License-Identifier: Apache-2.0
"""What an installation lacks to run models that are made for a target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stof.fusion.search.measure_cuda import has_cuda_provider
from stof.installation import CUDA, missing
from stof.options import Options
from stof.runtime.library import library_path
from stof.tensorrt.module import TensorrtError, plugin_lacks_cuda, plugin_path


def missing_for(options: Options, library: Mapping[str, Any]) -> tuple[str, ...]:
    """What this installation lacks to run a model that is made for the target, each with what adds it.

    ``library`` is ``build_info()``. Another installation may run the model, so nothing here is an error.
    """
    notes = []
    if options.tuned_for.uses_cuda_provider:
        if "cuda" not in library["backends"]:
            notes.append(
                "this installation runs stof's operators on the CPU, in the CUDA provider too, since the CUDA kernels are "
                f"{missing(CUDA, library_path().parent)}"
            )
        if options.tune and not has_cuda_provider():
            notes.append(
                "--tune estimates chains instead of measuring them, since no ONNX Runtime with a CUDA provider is installed: "
                "pip install onnxruntime-gpu"
            )
    elif options.tuned_for.keeps_plugins:
        try:
            plugin = plugin_path()
            if lacks := plugin_lacks_cuda(plugin):
                notes.append(f"the TensorRT plugin of this installation is {plugin}; {lacks}")
        except TensorrtError as error:
            notes.append(f"this installation builds no engines of the model: {error}")
    return tuple(notes)
