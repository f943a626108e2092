# SPDX-License-Identifier: Apache-2.0
"""Checks that all text in a model is UTF-8. Protobuf loads other bytes without a word and returns ``bytes`` for ``str``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.descriptor import FieldDescriptor  # type: ignore[import-untyped]

from stof.errors import ModelError, shown

_SHOWN = 80  # characters of a name


def check_text(path: Path, model: onnx.ModelProto) -> None:
    """Checks that every name, operator type, domain, dimension and documentation string is UTF-8, as ONNX demands.

    Raises:
        ModelError: naming the field that is not, as in ``graph.node[5].name``.
    """
    for field, text in _non_utf8(model):
        raise ModelError(
            f"{path}: {field} is '{shown(text, _SHOWN)}', which is not UTF-8 text; write it anew and save the model"
        )


def _non_utf8(message: Any) -> Iterator[tuple[str, bytes]]:
    """The string fields of a message that hold bytes, as a path and the bytes."""
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_STRING:
            if isinstance(value, str):
                continue
            if isinstance(value, bytes):
                yield field.name, value
                continue
            yield from ((f"{field.name}[{i}]", text) for i, text in enumerate(value) if isinstance(text, bytes))
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            if hasattr(value, "ListFields"):
                yield from ((f"{field.name}.{inner}", text) for inner, text in _non_utf8(value))
                continue
            for i, item in enumerate(value):
                yield from ((f"{field.name}[{i}].{inner}", text) for inner, text in _non_utf8(item))
