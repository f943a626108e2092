# SPDX-License-Identifier: Apache-2.0
"""Whether every name in a model is text: protobuf reads any bytes, and hands them out as ``bytes`` where it has ``str`` else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.descriptor import FieldDescriptor  # type: ignore[import-untyped]

from stof.errors import ModelError, shown

_SHOWN = 80  # characters of a name


def check_text(path: Path, model: onnx.ModelProto) -> None:
    """Every name, operator type, domain, dimension and piece of documentation is UTF-8, as ONNX demands.

    Raises:
        ModelError: naming the field that is not, as in ``graph.node[5].name``.
    """
    for place, text in _bytes_for_text(model):
        raise ModelError(
            f"{path}: {place} is '{shown(text, _SHOWN)}', which is not UTF-8 text; write it anew and save the model"
        )


def _bytes_for_text(message: Any) -> Iterator[tuple[str, bytes]]:
    """Where in a message text is expected and bytes are found, from the outside in."""
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
                yield from ((f"{field.name}.{place}", text) for place, text in _bytes_for_text(value))
                continue
            for i, part in enumerate(value):
                yield from ((f"{field.name}[{i}].{place}", text) for place, text in _bytes_for_text(part))
