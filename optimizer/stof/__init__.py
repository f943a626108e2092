# SPDX-License-Identifier: Apache-2.0
"""stof: sparse attention for exported ONNX Transformers.

``optimize`` rewrites a model, in a file or in memory; ``register`` lets an ONNX Runtime session run it.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stof.runtime.library import build_info, get_library_path, library_path, register
from stof.runtime.sessions import session_options
from stof.runtime.skip_counts import SkipCounts, reset_skip_counts, skip_counts

if TYPE_CHECKING:
    from stof.api import optimize
    from stof.api.folder import optimize_folder
    from stof.errors import ArgumentError, ModelError, StofError, VerifyError
    from stof.folder_report import FolderReport
    from stof.options import Options
    from stof.report import Report

    __version__: str
__all__ = [
    "ArgumentError",
    "FolderReport",
    "ModelError",
    "Options",
    "Report",
    "SkipCounts",
    "StofError",
    "VerifyError",
    "__version__",
    "build_info",
    "get_library_path",
    "library_path",
    "optimize",
    "optimize_folder",
    "register",
    "reset_skip_counts",
    "session_options",
    "skip_counts",
]
# onnx and its companions are loaded when they are needed: `import stof; stof.register(...)` stays light.
_HOMES = {
    "ArgumentError": "stof.errors",
    "FolderReport": "stof.folder_report",
    "ModelError": "stof.errors",
    "Options": "stof.options",
    "Report": "stof.report",
    "StofError": "stof.errors",
    "VerifyError": "stof.errors",
    "optimize": "stof.api",
    "optimize_folder": "stof.api.folder",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from stof.installation import read_version

        return read_version(Path(__file__).resolve().parent)
    if name not in _HOMES:
        raise AttributeError(f"module 'stof' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
