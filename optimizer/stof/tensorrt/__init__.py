# SPDX-License-Identifier: Apache-2.0
"""TensorRT: the plugin library, and engines built from optimized models.

``load_plugins`` makes stof's operators known to TensorRT in this process, ``build_engine`` writes an engine. Both work with
``tensorrt`` and with ``tensorrt_rtx``; neither is needed to import this package.
"""

from __future__ import annotations

from stof.tensorrt.build import BuildOptions, BuildReport, build_engine
from stof.tensorrt.module import load_plugins, plugin_path

__all__ = ["BuildOptions", "BuildReport", "build_engine", "load_plugins", "plugin_path"]
