# SPDX-License-Identifier: Apache-2.0
"""Copies of the plugin library in a folder of models: where they are needed, and which configurations register them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stof.api.genai_config import GENAI_CONFIG, GenaiConfig, GenaiSession, read_genai_config, show_key
from stof.errors import ArgumentError
from stof.files import temporary_file
from stof.graph.external_data import external_files
from stof.graph.index import DOMAIN
from stof.graph.load_save import load
from stof.installation import CUDA, missing
from stof.runtime.library import LIBRARY, build_info, library_path
from stof.targets import Target


@dataclass
class LibraryCopies:
    """What is written beside optimized models.

    Attributes:
        libraries: paths of copies of the library in the folder.
        texts: configurations that register one, by their paths.
        keys: the keys that were set in them.
        notes: what sessions that run on a GPU lack.
    """

    libraries: list[Path] = field(default_factory=list)
    texts: dict[Path, str] = field(default_factory=dict)
    keys: dict[Path, tuple[str, ...]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def write(self, folder: Path, library: Path) -> None:
        """Copies the library, and writes the configurations over those that are there.

        Raises:
            OSError: when a file cannot be written.
        """
        for path in self.libraries:
            with temporary_file((folder / path).parent) as new:
                new.copy(library)
                new.path.chmod(0o755)
                new.replace(folder / path)
        for path, text in self.texts.items():
            mode = (folder / path).stat().st_mode & 0o777
            with temporary_file((folder / path).parent) as new:
                new.write(text.encode())
                new.path.chmod(mode)
                new.replace(folder / path)


def read_configs(folder: Path, files: Iterable[Path]) -> dict[Path, GenaiConfig]:
    """The configurations among files of a folder, by the model folder that each describes.

    Raises:
        ArgumentError: for one that the runtime would not read.
    """
    return {path.parent: read_genai_config(folder / path) for path in files if path.name == GENAI_CONFIG}


def plan_copies(
    folder: Path, models: Iterable[Path], configs: Mapping[Path, GenaiConfig], target: Target
) -> LibraryCopies:
    """Finds the models that hold stof's operators, and where these need the library.

    ONNX Runtime GenAI looks for a library in the model folder: one copy beside the configuration serves all of its sessions.

    Args:
        folder: the folder with the results.
        models: paths of models in it.
        configs: by the model folder that each describes.
        target: what choices were made for.

    Raises:
        ArgumentError: for a session that registers another library; where weights lie in a file that would be written over.
    """
    holders: set[Path] = set()
    data: dict[Path, Path] = {}  # external data in the folder, with a model that reads it
    for path in models:
        model = load(folder / path)
        data |= {Path(os.path.normpath(path.parent / location)): path for location in external_files(model)}
        if any(o.domain == DOMAIN for o in model.opset_import):
            holders.add(path)
    copies = LibraryCopies()
    served: set[Path] = set()
    folders: set[Path] = set()
    for at, config in configs.items():
        named = {s.model for s in config.sessions if at / s.model in holders}
        if named:
            copies.texts[at / GENAI_CONFIG], copies.keys[at / GENAI_CONFIG] = config.add_library(named, LIBRARY)
            copies.notes += _missing_on_gpu(at / GENAI_CONFIG, [s for s in config.sessions if s.model in named], target)
            served |= {at / path for path in named}
            folders.add(at)
    folders |= {path.parent for path in holders - served}
    copies.libraries = [at / LIBRARY for at in sorted(folders)]
    for path in (*copies.libraries, *copies.texts):
        if path in data:
            what = "the plugin library is written" if path.name == LIBRARY else "the library is named"
            raise ArgumentError(
                f"the weights of {data[path]} are in {path}, where {what}; save that model with another file of external data"
            )
    return copies


def _missing_on_gpu(config: Path, sessions: Iterable[GenaiSession], target: Target) -> list[str]:
    """Notes on sessions with the provider cuda for which the library, or the choices, are for the CPU alone."""
    session = next((s for s in sessions if "cuda" in s.providers), None)
    if session is None:
        return []
    where = f"{config}: {show_key(session.options)} names the provider cuda"
    notes = []
    if "cuda" not in build_info()["backends"]:
        notes.append(f"{where}, and the library has no CUDA kernels, which are {missing(CUDA, library_path().parent)}")
    if not target.uses_cuda_provider:
        notes.append(f"{where}; --target cuda makes the choices for a GPU")
    return notes
