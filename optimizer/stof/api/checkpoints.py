# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of transformers and sentence-transformers, in folders and on the hub: exported by Optimum, if it is installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from stof import progress
from stof.api.export_script import MODULES, check_modules
from stof.errors import ArgumentError
from stof.files import read_text

_EXPORTER = "optimum-onnx"
_SCRIPT = Path(__file__).with_name("export_script.py")
_WEIGHTS = (".safetensors", ".bin")
_ERROR = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt): ")


def is_checkpoint(files: Collection[Path]) -> bool:
    """Whether a folder with these files holds weights and a configuration, and no ONNX model."""
    names = {str(path) for path in files}
    weights = any(path.suffix in _WEIGHTS and path.parent == Path() for path in files)
    return weights and "config.json" in names and not any(path.suffix == ".onnx" for path in files)


def check_modules_of(folder: Path, files: Collection[Path]) -> None:
    """Refuses a folder whose ``modules.json`` names classes that are not sentence-transformers' own.

    Raises:
        ArgumentError: naming the file and the class.
    """
    for path in files:
        if path.name.lower() == MODULES:  # Windows and macOS open it under any case
            text = read_text("list of modules", folder / path)
            try:
                check_modules(str(folder / path), text)
            except ValueError as error:
                raise ArgumentError(f"{error}; export the checkpoint by its own code, and give that folder") from None


def export_checkpoint(model: str, folder: Path) -> str:
    """Exports a checkpoint into a new folder, in a process of its own.

    Returns:
        A note: the exporter, and the task.

    Raises:
        ArgumentError: without an exporter, and where it fails.
    """
    what = f"{model} is a checkpoint without an .onnx file" if Path(model).is_dir() else f"{model} is no file or folder"
    try:
        exporter = f"{_EXPORTER} {version(_EXPORTER)}"
    except PackageNotFoundError:
        use = "to export it" if Path(model).is_dir() else "to export a model of the hub that has this name"
        raise ArgumentError(f"{what}; {use}: pip install {_EXPORTER}, or give a folder of ONNX models") from None
    # -P: the script's folder holds modules of stof, which must not shadow others.
    command = [sys.executable, "-P", str(_SCRIPT), model, str(folder)]
    with progress.step(f"export by {exporter}"):
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, "PYTHONIOENCODING": "utf-8"},
            check=False,
        )
    if done.returncode:
        raise ArgumentError(
            f"{what}, and {exporter} cannot export it: {_find_reason(done.stderr) or f'status {done.returncode}'}; export it by "
            f"optimum-cli export onnx --model {model} --task TASK FOLDER, and give that folder"
        )
    return f"exported by {exporter} for the task {done.stdout.split()[-1]}"


def _find_reason(errors: str) -> str:
    """The first line of the error that ended a Python program, or the last line of all."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if _ERROR.match(line)), lines[-1] if lines else "")[:400]
