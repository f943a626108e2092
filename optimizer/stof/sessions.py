# SPDX-License-Identifier: Apache-2.0
"""Sessions of ONNX Runtime for models that are not files, with weights that lie elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx

from stof.errors import ArgumentError
from stof.external_data import all_tensors, external_files, is_external
from stof.files import is_utf8, open_regular
from stof.runtime import register

# The first version that reads external data from a folder that an option names; 1.20 looks in the working directory.
_FOLDER_OPTION = (1, 21)
# Before it, this fusion ends the process at a LayerNormalization without bias, which ModernBERT has.
_FUSION_ABORTS = (1, 19)


def _runtime() -> Any:
    try:
        import onnxruntime as ort
    except ImportError:
        raise ArgumentError(
            "verification needs onnxruntime, which is not installed: pip install onnxruntime, or use --no-verify"
        ) from None
    return ort


class Sessions:
    """Makes sessions of models that are not files; what has to be written goes into a folder of its own.

    Weights in external data are read where they lie, so that neither they nor anything else is written beside the input.
    """

    def __init__(self, weights: Path, scratch: Path) -> None:
        self.weights = weights
        self.scratch = scratch

    def make(self, model: onnx.ModelProto | Path, *, optimized: bool, library: bool) -> Any:
        """A session on the CPU provider."""
        ort = _runtime()
        options = ort.SessionOptions()
        options.log_severity_level = 3
        if not optimized:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        # Copies of weights in the kernels' own layout would double the memory for runs that are not timed.
        options.add_session_config_entry("session.disable_prepacking", "1")
        if library:
            register(options)
        if isinstance(model, Path):
            if is_utf8(model):
                return self._session(str(model), options)
            with open_regular(model) as file:  # ONNX Runtime takes names in UTF-8 only, but bytes, too
                read: onnx.ModelProto = onnx.ModelProto.FromString(file.read())
            model = read
        files = sorted(external_files(model))
        if all((self.scratch / name).exists() for name in files):
            # By way of a file, since the serialized model and the parsed one need not be in memory at once.
            return self._from_file(model, options)
        if _version() >= _FOLDER_OPTION:
            model, folder = self._located(model, files)
            with _text_of(folder) as text:
                options.add_session_config_entry("session.model_external_initializers_file_folder_path", text)
                return self._session(model.SerializeToString(), options)
        for name in files:  # versions without that option follow links, which later ones refuse
            link = self.scratch / name
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.is_symlink():
                link.symlink_to(self.weights / name)
        return self._from_file(model, options)

    def _located(self, model: onnx.ModelProto, files: Sequence[str]) -> tuple[onnx.ModelProto, Path]:
        """The model and the folder of its data, without links that lead out of it, which runtimes refuse."""
        places = {name: (self.weights / name).resolve() for name in files}
        if all(place.is_relative_to(self.weights) for place in places.values()):
            return model, self.weights
        folder = Path(os.path.commonpath([place.parent for place in places.values()]))
        located = onnx.ModelProto()
        located.CopyFrom(model)
        for tensor in all_tensors(located):
            for entry in tensor.external_data if is_external(tensor) else ():
                if entry.key == "location":
                    entry.value = str(places[entry.value].relative_to(folder))
        return located, folder

    def _from_file(self, model: onnx.ModelProto, options: Any) -> Any:
        path = self.scratch / "model.onnx"
        while path.exists():  # a link to external data of that name
            path = path.with_name(f"{path.stem}_.onnx")
        try:
            path.write_bytes(model.SerializeToString())
            with _text_of(path.parent) as folder:
                return self._session(f"{folder}/{path.name}", options)
        except OSError as error:
            raise ArgumentError(f"{path} cannot be written for verification: {error.strerror}") from error
        finally:
            path.unlink(missing_ok=True)

    @staticmethod
    def _session(model: str | bytes, options: Any) -> Any:
        disabled = ["AttentionFusion"] if _version() < _FUSION_ABORTS else []
        return _runtime().InferenceSession(
            model, options, providers=["CPUExecutionProvider"], disabled_optimizers=disabled
        )


@contextmanager
def _text_of(folder: Path) -> Iterator[str]:
    """A path of a folder that ONNX Runtime takes: one in UTF-8."""
    if is_utf8(folder):
        yield str(folder)
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _version() -> tuple[int, ...]:
    return tuple(int(n) for n in _runtime().__version__.split(".")[:2])
