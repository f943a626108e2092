# SPDX-License-Identifier: Apache-2.0
"""The plugin library in a real plugin registry: TensorRT's lean runtime or TensorRT for RTX, without a GPU.

Usage: check_registry.py LIBRARY [AUTOREG ...]

Run by an interpreter that has one of tensorrt_lean_cu13_{libs,bindings} or tensorrt_rtx_cu13_{libs,bindings}. Each
AUTOREG is then loaded in a process of its own, which says whether the creator is there: it is where the major version
in the file's name is the runtime's, and nothing happens (no crash either) where it is not.
"""

import ctypes
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType


def load_tensorrt() -> tuple[ModuleType, int]:
    """The bindings and the major version of the interfaces."""
    for name in ("tensorrt_lean", "tensorrt_rtx"):
        try:
            libs = importlib.import_module(f"{name}_libs")
        except ImportError:
            continue
        if name == "tensorrt_rtx":
            # The wheel lacks the name by which the parser looks for the library.
            link = Path(str(libs.__file__)).parent / "libtensorrt_rtx.so"
            if not link.exists():
                link.symlink_to("libtensorrt_rtx.so.1")
        bindings = importlib.import_module(f"{name}_bindings")
        major = int(bindings.__version__.split(".")[0])
        return bindings, 11 if name == "tensorrt_rtx" else major
    sys.exit("neither tensorrt_lean nor tensorrt_rtx is installed")


_kept: list[bytes] = []  # a PluginField only points to its data


def field(trt: ModuleType, name: str, text: str) -> object:
    _kept.append(text.encode() + b"\0")
    return trt.PluginField(name, _kept[-1], trt.PluginFieldType.CHAR)


def check_library(trt: ModuleType, library: str) -> None:
    registry = trt.get_plugin_registry()
    before = len(registry.all_creators)
    assert registry.get_creator("StofAttention", "1", "stof") is None
    handle = registry.load_library(library)
    assert handle is not None, "load_library refused the library"
    assert len(registry.all_creators) == before + 3
    for name in ("StofAttention", "StofChain", "StofGemm"):
        assert registry.get_creator(name, "1", "stof") is not None, name
    creator = registry.get_creator("StofAttention", "1", "stof")
    assert creator is not None
    assert (creator.name, creator.plugin_version, creator.plugin_namespace) == ("StofAttention", "1", "stof")
    types = {f.name: f.type for f in creator.field_names}
    assert types["mask"] == types["constants"] == trt.PluginFieldType.CHAR, types
    assert types["num_heads"] == trt.PluginFieldType.INT32, types
    assert types["scale"] == trt.PluginFieldType.FLOAT32, types
    build = trt.TensorRTPhase.BUILD
    good = trt.PluginFieldCollection([field(trt, "mask", "abs(q - k) <= 64"), field(trt, "layout", "BSHD")])
    plugin = creator.create_plugin("layer", good, build)
    assert plugin is not None
    for bad in ("abs(q - k", "weights[q] < k"):
        assert creator.create_plugin("layer", trt.PluginFieldCollection([field(trt, "mask", bad)]), build) is None, bad
    assert registry.load_library(library) is None, "a library was loaded twice"
    del plugin, creator
    registry.deregister_library(handle)
    assert len(registry.all_creators) == before
    assert registry.get_creator("StofAttention", "1", "stof") is None


def main() -> None:
    trt, major = load_tensorrt()
    library, autoregs = str(Path(sys.argv[1]).resolve()), sys.argv[2:]
    if os.environ.get("STOF_CHECK_AUTOREG"):
        ctypes.CDLL(library)
        found = trt.get_plugin_registry().get_creator("StofAttention", "1", "stof") is not None
        print("registered" if found else "not registered")
        return
    check_library(trt, library)
    for autoreg in autoregs:
        numbers = re.search(r"autoreg(\d+)", autoreg)
        assert numbers is not None, f"{autoreg} has no major version in its name"
        command = [sys.executable, __file__, autoreg]
        environment = {**os.environ, "STOF_CHECK_AUTOREG": "1", "STOF_TRT_LOG": "0"}
        said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()
        expected = "registered" if int(numbers[1]) == major else "not registered"
        assert said == expected, f"{autoreg} with {trt.__name__} {trt.__version__}: {said}, expected {expected}"
    print(f"{trt.__name__} {trt.__version__}: library and {len(autoregs)} self-registering libraries as expected")


if __name__ == "__main__":
    main()
