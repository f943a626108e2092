# SPDX-License-Identifier: Apache-2.0
"""Sessions of ONNX Runtime for models that are not files, with weights that lie elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from stof.errors import ArgumentError, VerifyError
from stof.execution.session_process import Session, create_session, runtime_version
from stof.execution.session_worker import SessionSpec
from stof.files import is_utf8, open_regular
from stof.graph.external_data import all_tensors, external_files, is_external
from stof.runtime.library import library_path

# The first version that reads external data from a folder that an option names; 1.20 looks in the working directory.
_FOLDER_OPTION = (1, 21)
# Before it, this fusion ends the process at a LayerNormalization without bias, which ModernBERT has.
_FUSION_ABORTS = (1, 19)
# A session or a run of the first and the last inputs may take this many budgets, or seconds where the budget is small.
_BUDGETS, _LEAST_SECONDS = 4.0, 60.0


class VerifiedSession:
    """A session whose runs end, with verification, when they take too long."""

    def __init__(self, session: Session, name: str, budget: float) -> None:
        self._session = session
        self._name = name
        self._budget = budget

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names."""
        return self._session.outputs

    def run(self, outputs: Sequence[str] | None, feeds: Mapping[str, np.ndarray]) -> list[Any]:
        """The outputs of these names, by default all.

        Raises:
            RuntimeFailure: what ONNX Runtime raises.
            VerifyError: when it takes too long.
        """
        try:
            return self._session.run(outputs, feeds, _seconds_allowed(self._budget))
        except TimeoutError:
            raise _make_time_limit_error("run", self._name, self._budget) from None


def file_session(path: Path, *, library: bool, seconds: float) -> Session:
    """A session of a model file, as an application makes one: with graph optimizations and prepacked weights.

    Raises:
        RuntimeFailure: what ONNX Runtime raises.
        TimeoutError: when it takes longer than so many seconds.
    """
    with _utf8_path(path.parent) as folder:
        spec = SessionSpec(
            f"{folder}/{path.name}",
            library=str(library_path()) if library else "",
            without=_optimizers_left_out(),
        )
        return create_session(spec, seconds)


def _optimizers_left_out() -> tuple[str, ...]:
    return ("AttentionFusion",) if runtime_version() < _FUSION_ABORTS else ()


def _seconds_allowed(budget: float) -> float:
    """What a session's creation or a run may take."""
    return max(_LEAST_SECONDS, _BUDGETS * budget)


def _make_time_limit_error(step: str, name: str, budget: float) -> VerifyError:
    return VerifyError(
        f"verification was ended: ONNX Runtime took longer than {_seconds_allowed(budget):.0f} s to {step} {name}, which may be "
        f"endless. Nothing was written; where it is slow, raise --verify-budget ({budget:g} s, of which one run may take "
        f"{_BUDGETS:g}, and {_LEAST_SECONDS:g} s anyway), or leave verification out with --no-verify"
    )


class Sessions:
    """Makes sessions of models that are not files; what has to be written goes into a folder of its own.

    Weights in external data are read where they lie, so that neither they nor anything else is written beside the input.

    Args:
        weights: the folder of the model's external data.
        scratch: a folder to write into.
        budget: seconds for verification; a few times as long may a session's creation or a run take.
    """

    def __init__(self, weights: Path, scratch: Path, budget: float) -> None:
        self.weights = weights.absolute()
        self.scratch = scratch.absolute()
        self.budget = budget

    def make(self, model: onnx.ModelProto | Path, *, optimized: bool, library: bool) -> VerifiedSession:
        """A session on the CPU provider.

        Raises:
            RuntimeFailure: what ONNX Runtime raises.
            VerifyError: when it takes too long.
        """
        # Copies of weights in the kernels' own layout would double the memory for runs that are not timed.
        entries = [("session.disable_prepacking", "1")]
        if isinstance(model, Path):
            if is_utf8(model):
                return self._session(str(model.absolute()), entries, optimized, library)
            with open_regular(model) as file:  # ONNX Runtime takes names in UTF-8 only, but bytes, too
                read: onnx.ModelProto = onnx.ModelProto.FromString(file.read())
            model = read
        files = sorted(external_files(model))
        if all((self.scratch / name).exists() for name in files):
            # By way of a file, since the serialized model and the parsed one need not be in memory at once.
            return self._from_file(model, entries, optimized, library)
        if runtime_version() >= _FOLDER_OPTION:
            model, folder = self._relocate_data(model, files)
            with _utf8_path(folder) as text:
                entries.append(("session.model_external_initializers_file_folder_path", text))
                return self._session(model.SerializeToString(), entries, optimized, library)
        for name in files:  # versions without that option follow links, which later ones refuse
            link = self.scratch / name
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.is_symlink():
                link.symlink_to(self.weights / name)
        return self._from_file(model, entries, optimized, library)

    def _relocate_data(self, model: onnx.ModelProto, files: Sequence[str]) -> tuple[onnx.ModelProto, Path]:
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

    def _from_file(
        self, model: onnx.ModelProto, entries: list[tuple[str, str]], optimized: bool, library: bool
    ) -> VerifiedSession:
        path = self.scratch / "model.onnx"
        while path.exists():  # a link to external data of that name
            path = path.with_name(f"{path.stem}_.onnx")
        try:
            path.write_bytes(model.SerializeToString())
            with _utf8_path(path.parent) as folder:
                return self._session(f"{folder}/{path.name}", entries, optimized, library)
        except OSError as error:
            raise ArgumentError(f"{path} cannot be written for verification: {error.strerror}") from error
        finally:
            path.unlink(missing_ok=True)

    def _session(
        self, model: str | bytes, entries: list[tuple[str, str]], optimized: bool, library: bool
    ) -> VerifiedSession:
        spec = SessionSpec(
            model,
            library=str(library_path()) if library else "",
            optimizations="all" if optimized else "none",
            entries=tuple(entries),
            without=_optimizers_left_out(),
        )
        name = "the optimized model" if library else "the original"
        try:
            session = create_session(spec, _seconds_allowed(self.budget))
        except TimeoutError:
            raise _make_time_limit_error("load", name, self.budget) from None
        return VerifiedSession(session, name, self.budget)


@contextmanager
def _utf8_path(folder: Path) -> Iterator[str]:
    """A path of a folder that ONNX Runtime takes: one in UTF-8."""
    if is_utf8(folder):
        yield str(folder)
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield f"/proc/{os.getpid()}/fd/{descriptor}"  # not "self": another process reads it
    finally:
        os.close(descriptor)
