# SPDX-License-Identifier: Apache-2.0
"""Names of models on the hub, where a file or folder is expected."""

from __future__ import annotations

import os
import re
from pathlib import PurePath

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def is_hub_id(path: PurePath) -> bool:
    """Whether a path may be the id of a model on the hub, ``owner/name``: there is no path ``owner``."""
    text = path.as_posix()
    return bool(_ID.fullmatch(text)) and path.suffix != ".onnx" and not os.path.lexists(path.parts[0])
