# SPDX-License-Identifier: Apache-2.0
"""stof: sparse attention for exported ONNX Transformers.

``optimize`` rewrites a model, in a file or in memory; ``register`` lets an ONNX Runtime session run it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stof.runtime.library import build_info, get_library_path, library_path, register

if TYPE_CHECKING:
    from stof.api import optimize
    from stof.api.folder import optimize_folder
    from stof.options import Options

__version__ = "0.1.0"
__all__ = [
    "Options",
    "__version__",
    "build_info",
    "get_library_path",
    "library_path",
    "optimize",
    "optimize_folder",
    "register",
]


def __getattr__(name: str) -> Any:
    # onnx and its companions are loaded when they are needed: `import stof; stof.register(...)` stays light.
    if name == "optimize":
        from stof.api import optimize

        return optimize
    if name == "optimize_folder":
        from stof.api.folder import optimize_folder

        return optimize_folder
    if name == "Options":
        from stof.options import Options

        return Options
    raise AttributeError(f"module 'stof' has no attribute {name!r}")
