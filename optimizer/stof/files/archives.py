# SPDX-License-Identifier: Apache-2.0
"""Arrays of .npy and .npz files that may be damaged or made to exhaust memory."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np

from stof.errors import ArgumentError
from stof.files import read_bytes

_MOST_BYTES = 1 << 28


def read_arrays(what: str, path: Path, most: int = _MOST_BYTES) -> dict[str, np.ndarray]:
    """The arrays of an .npz by their names, or that of an .npy under an empty one.

    Raises:
        ArgumentError: when the file is none or has more than ``most`` bytes, or when it holds more bytes of arrays than 256
            MiB and than it has itself.
    """
    data = read_bytes(what, path, most)
    try:
        if data.startswith(b"PK"):
            held = sum(member.file_size for member in zipfile.ZipFile(io.BytesIO(data)).infolist())
            if held > max(_MOST_BYTES, len(data)):  # compressed
                raise ArgumentError(
                    f"{path} holds {held} bytes of arrays, expected up to {max(_MOST_BYTES, len(data))}"
                )
        loaded = np.load(io.BytesIO(data), allow_pickle=False)
        return {n: loaded[n] for n in loaded.files} if isinstance(loaded, np.lib.npyio.NpzFile) else {"": loaded}
    except ArgumentError:
        raise
    except Exception as error:  # whatever NumPy, zipfile, zlib and the tokenizer of headers raise on damaged files
        raise ArgumentError(f"{path} holds no arrays that can be read: {error}") from None
