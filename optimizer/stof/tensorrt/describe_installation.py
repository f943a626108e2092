# SPDX-License-Identifier: Apache-2.0
"""What ``--version`` of each command prints: the version, and for each part of an installation whether it is there."""

from __future__ import annotations


def describe_installation() -> list[str]:
    """The version, and for each part of an installation whether it is there or what adds it."""
    import stof
    from stof.execution.captured_messages import import_onnxruntime
    from stof.installation import CUDA, missing
    from stof.tensorrt.module import TensorrtError, plugin_lacks_cuda, plugin_path

    info = stof.build_info()
    lines = [
        f"stof {stof.__version__}, backends {', '.join(info['backends'])}, CPU {info['cpu_isa']}, {info['build_id']}"
    ]
    try:
        ort = import_onnxruntime()
        lines.append(f"ONNX Runtime: {ort.__version__}, {', '.join(ort.get_available_providers())}")
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == "onnxruntime"
        what = "not installed" if absent else f"does not load ({error})"
        lines.append(f"ONNX Runtime: {what}; to verify and run models: pip install onnxruntime")
    if "cuda" in info["backends"]:
        lines.append(f"CUDA kernels: {', '.join(info['cuda_architectures'])}")
    else:
        lines.append(f"CUDA kernels: {missing(CUDA, stof.library_path().parent)}")
    try:
        plugin = plugin_path()
        lacks = plugin_lacks_cuda(plugin)
        lines.append(f"TensorRT plugin: {plugin}{lacks and f'; {lacks}'}")
    except TensorrtError as error:
        lines.append(f"TensorRT plugin: {error}")
    return lines
