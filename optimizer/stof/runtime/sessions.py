# SPDX-License-Identifier: Apache-2.0
"""Session options with the operators registered, for tools that hand such an object to ONNX Runtime."""

from __future__ import annotations

from typing import Any

from stof.errors import ArgumentError
from stof.runtime.library import LibraryError, register


def session_options(**settings: Any) -> Any:
    """An ``onnxruntime.SessionOptions`` with the operators registered.

    Args:
        **settings: its attributes by name, ``intra_op_num_threads=1`` for instance.

    Raises:
        LibraryError: when there is no library, or no ONNX Runtime.
        ArgumentError: for an attribute that the options do not have, or a value that they refuse.
    """
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        raise LibraryError("session options need ONNX Runtime: pip install onnxruntime") from error
    options = onnxruntime.SessionOptions()
    known = {name for name in dir(options) if not name.startswith("_") and not callable(getattr(options, name))}
    for name, value in settings.items():
        if name not in known:
            raise ArgumentError(f"SessionOptions has no attribute {name!r}; expected one of {', '.join(sorted(known))}")
        try:
            setattr(options, name, value)
        except (AttributeError, TypeError) as error:
            kind = type(getattr(options, name)).__name__
            raise ArgumentError(f"SessionOptions.{name} is {value!r}, expected {kind}") from error
    register(options)
    return options
