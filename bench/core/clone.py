# SPDX-License-Identifier: Apache-2.0
"""What a clone of the repository has and the installed package has not: stored graphs and results."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

RESULTS = Path("docs/results")


def load_module(path: str) -> Any:
    """Imports a module of the clone that is part of no package.

    Raises:
        ValueError: outside of the clone's folder.
    """
    spec = importlib.util.spec_from_file_location("stof_models_build", path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise ValueError(f"there is no {path} here: run this in the folder of a clone of the repository")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
