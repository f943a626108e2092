# SPDX-License-Identifier: Apache-2.0
"""The pass ``StofOptimize`` of Olive, and the package configuration by which ``olive run`` finds it (docs/guide/olive.md).

``python -m stof.integrations.olive FILE`` writes that configuration: all passes of the installed Olive, and this one.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from stof.api import optimize
from stof.api.genai_config import GENAI_CONFIG
from stof.api.library_copies import plan_copies, read_configs
from stof.errors import ArgumentError
from stof.options import Options, merge_options
from stof.runtime.library import library_path
from stof.targets import CPU, CUDA, TARGETS, TENSORRT, Target

try:
    from olive.hardware.accelerator import AcceleratorSpec
    from olive.model import ONNXModelHandler
    from olive.model.utils import resolve_onnx_path
    from olive.package_config import OlivePackageConfig
    from olive.passes import Pass
    from olive.passes.pass_config import BasePassConfig, PassConfigParam
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "olive":
        raise
    raise ImportError("stof.integrations.olive needs Olive: pip install olive-ai") from error

_TARGETS = {"CUDAExecutionProvider": CUDA, "TensorrtExecutionProvider": TENSORRT}


# Options that a pass does not take among "options", and what to do instead.
_REFUSED = {
    "target": 'is a setting of the pass: give it beside "options"',
    "unpad": 'is a setting of the pass: give it beside "options"',
    "output": "is Olive's: give output_dir",
    "dry_run": "would write no model, and a pass has to: run stof-optimize",
    "explain": "would write no model, and a pass has to: run stof-optimize",
}


class StofOptimize(Pass):
    """Optimizes an ONNX model by stof, verified against its input, and copies the plugin library beside it."""

    @staticmethod
    def is_accelerator_agnostic(accelerator_spec: AcceleratorSpec) -> bool:
        """No: what is replaced depends on the execution provider."""
        return False

    @classmethod
    def _default_config(cls, accelerator_spec: AcceleratorSpec) -> dict[str, PassConfigParam]:
        return {
            "target": PassConfigParam(
                type_=str,
                default_value=_target_of(accelerator_spec).name,
                description=f"What the model is optimized for: {', '.join(TARGETS)}. Default: by the execution provider.",
            ),
            "unpad": PassConfigParam(
                type_=str, default_value="auto", description="Leave rows of padding out: on, off, auto."
            ),
            "options": PassConfigParam(
                type_=dict,
                default_value={},
                description="Other options of stof.optimize by name: tune, sparsify, skip.",
            ),
        }

    def _run_for_config(
        self, model: ONNXModelHandler, config: type[BasePassConfig], output_model_path: str
    ) -> ONNXModelHandler:
        if not isinstance(model, ONNXModelHandler):
            raise ArgumentError(f"StofOptimize got a {type(model).__name__}, expected an ONNX model: convert it before")
        for name in config.options:
            if name in _REFUSED:
                raise ArgumentError(f'"options" of StofOptimize name {name!r}, which {_REFUSED[name]}')
        named = {**config.options, "target": config.target, "unpad": config.unpad}
        options = merge_options("StofOptimize", Options(), named)
        source, result = Path(model.model_path), Path(resolve_onnx_path(output_model_path, Path(model.model_path).name))
        optimize(source, result, options)
        attributes = copy.deepcopy(model.model_attributes or {})
        given = attributes.get("additional_files") or []
        added = _add_library(result, [Path(path) for path in given], options.tuned_for)
        if added:
            attributes["additional_files"] = [*given, *map(str, added)]
        is_folder = model.onnx_file_name is not None or bool(attributes.get("additional_files"))
        return ONNXModelHandler(
            model_path=str(result.parent if is_folder else result),
            onnx_file_name=result.name if is_folder else None,
            inference_settings=model.inference_settings,
            use_ort_extensions=model.use_ort_extensions,
            model_attributes=attributes,
        )


def _add_library(model: Path, given: list[Path], target: Target) -> list[Path]:
    """Copies the library beside a model that needs it; a configuration of ONNX Runtime GenAI then names it.

    Args:
        model: the optimized model, in a folder of its own.
        given: the files that Olive keeps beside the model that was read.
        target: what the model was optimized for.

    Returns:
        The files that were written.
    """
    folder = model.parent
    for config in (path for path in given if path.name == GENAI_CONFIG):
        shutil.copy(config, folder / GENAI_CONFIG)  # Olive does not write over it
    configs = read_configs(folder, [Path(p.name) for p in folder.iterdir()])
    copies = plan_copies(folder, [Path(model.name)], configs, target)
    copies.write(folder, library_path())
    return [folder / path for path in (*copies.libraries, *copies.texts)]


def _target_of(accelerator: AcceleratorSpec) -> Target:
    return _TARGETS.get(str(accelerator.execution_provider), CPU)


def package_config() -> dict[str, Any]:
    """Olive's package configuration with ``StofOptimize`` among its passes, for ``olive.workflows.run(..., package_config=)``."""
    config: dict[str, Any] = json.loads(Path(OlivePackageConfig.get_default_config_path()).read_text(encoding="utf-8"))
    config["passes"][StofOptimize.__name__] = {
        "module_path": f"stof.integrations.olive.{StofOptimize.__name__}",
        "supported_providers": ["CPUExecutionProvider", *_TARGETS],
        "supported_accelerators": ["cpu", "gpu"],
        "supported_precisions": ["*"],
        "supported_algorithms": [],
        "supported_quantization_encodings": [],
    }
    return config


def main() -> int:
    """Writes the package configuration to the file that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m stof.integrations.olive", description="Write Olive's package "
                                     "configuration with the pass StofOptimize: olive run --package-config FILE ...")  # fmt: skip
    parser.add_argument("file", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    try:
        arguments.file.write_text(json.dumps(package_config(), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        print(f"{arguments.file} cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
