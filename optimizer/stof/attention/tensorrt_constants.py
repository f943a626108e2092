# SPDX-License-Identifier: Apache-2.0
"""The tables of a mask as an attribute of StofAttention for TensorRT, whose plugins cannot read the values of inputs."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import numpy as np

from stof.mask.site import LiftedMask

_FIRST_OPERAND = 3  # operand slots follow query, key and value


def constants_attribute(mask: LiftedMask, slots: Sequence[str]) -> dict[str, str]:
    """The attribute ``constants`` (docs/guide/tensorrt.md), or {} for a mask without tables.

    The value has an entry "INPUT TYPE SHAPE DATA" for each table, joined by ";". DATA is base64 of the elements, row-major
    and little-endian. Booleans are packed: element i is bit i % 8 of byte i // 8.

    Args:
        mask: the mask of a site.
        slots: operand roles of the call in the order of its inputs.
    """
    entries = []
    for name, kind, shape, data in mask.tables:
        array = np.frombuffer(data, np.dtype(kind))
        if array.dtype == np.bool_:
            array = np.packbits(array, bitorder="little")
        text = base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode()
        input_index = _FIRST_OPERAND + list(slots).index(name)
        entries.append(f"{input_index} {np.dtype(kind).name} {'x'.join(str(n) for n in shape)} {text}")
    return {"constants": ";".join(entries)} if entries else {}
