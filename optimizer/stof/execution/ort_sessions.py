# SPDX-License-Identifier: Apache-2.0
"""Sessions of ONNX Runtime for models that are not files, with weights that lie elsewhere."""

from __future__ import annotations

import mmap
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

from stof.errors import ArgumentError
from stof.execution.collectives import as_lone_rank, may_hold_collectives
from stof.execution.run_limits import MemoryLimit, RunLimits
from stof.execution.runtime_faults import RuntimeFault
from stof.execution.session_process import Session, create_session
from stof.execution.session_worker import ARRAY_TYPES, SessionSpec
from stof.execution.shared_buffers import find_shared_buffers
from stof.execution.stored_weights import StoredWeights
from stof.files import is_utf8, open_regular
from stof.graph.external_data import all_tensors, external_files, is_external
from stof.graph.index import DOMAIN
from stof.graph.protobuf import copy_with_nodes, remove_named
from stof.runtime.library import library_path
from stof.system.descriptors import READ


class VerifiedSession:
    """A session whose runs end at the limits of a verification."""

    def __init__(self, session: Session, name: str, limits: RunLimits) -> None:
        self._session = session
        self._name = name
        self._limits = limits

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names."""
        return self._session.outputs

    @property
    def is_alive(self) -> bool:
        """Whether it can run; a limit ends the process that holds it."""
        return self._session.is_alive

    def run(
        self, outputs: Sequence[str] | None, feeds: Mapping[str, np.ndarray], until: float | None = None
    ) -> list[Any]:
        """The outputs of these names, by default all.

        Args:
            outputs: names.
            feeds: the inputs by name.
            until: the moment at which the run has to be over, by default the end of the verification.

        Raises:
            RuntimeFailure: what ONNX Runtime raises.
            LimitReached: when it takes too long, or too much memory.
        """
        with _explain_limits(f"run {self._name}", self._limits, until):
            return self._session.run(outputs, feeds, self._limits.seconds_left(until), self._limits.memory)


def file_session(path: Path, *, library: bool, seconds: float) -> Session:
    """A session of a model file, as an application makes one: with graph optimizations and prepacked weights.

    Raises:
        RuntimeFailure: what ONNX Runtime raises.
        TimeoutError: when it takes longer than so many seconds.
    """
    with _utf8_path(path.parent) as folder:
        spec = SessionSpec(
            f"{folder}{os.sep}{path.name}",
            library=str(library_path()) if library else "",
            without=_optimizers_left_out(),
            shared_buffers=_shared_buffers_of(path),
        )
        return create_session(spec, seconds)


def _shared_buffers_of(path: Path) -> tuple[tuple[str, str], ...]:
    """Those of a file, which may be large: it is parsed only where it names an operator that has some."""
    with open_regular(path) as file, suppress(ValueError):  # an empty file
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as raw:
            if raw.find(b"SparseAttention") < 0:
                return ()
        return find_shared_buffers(_read_graph(path))
    return ()


def _read_graph(path: Path) -> onnx.ModelProto:
    """A model without its external data."""
    with open_regular(path) as file:
        model: onnx.ModelProto = onnx.ModelProto.FromString(file.read())
    return model


def _optimizers_left_out() -> tuple[str, ...]:
    return ("AttentionFusion",) if RuntimeFault.ATTENTION_FUSION_ABORTS.is_present() else ()


@contextmanager
def _explain_limits(step: str, limits: RunLimits, until: float | None = None) -> Iterator[None]:
    start = time.monotonic()
    try:
        yield
    except TimeoutError:
        raise limits.end_step(step, time.monotonic() - start, until) from None
    except MemoryLimit as error:
        raise MemoryLimit(
            f"verification was ended: to {step}, {error}. Nothing was written; raise --verify-memory, or leave "
            "verification out with --no-verify"
        ) from None


class Sessions:
    """Makes sessions of models that are not files; what has to be written goes into a folder of its own.

    Weights in external data are read where they lie, so that neither they nor anything else is written beside the input.

    Args:
        weights: the folder of the model's external data.
        scratch: a folder to write into.
        limits: of time and memory.
        lean: memory is short: tensors are freed at their last use, which takes time.
    """

    def __init__(self, weights: Path, scratch: Path, limits: RunLimits, *, lean: bool = False) -> None:
        self.weights = weights.absolute()
        self.scratch = scratch.absolute()
        self.limits = limits
        self.lean = lean
        self._stored = StoredWeights(self.scratch)

    def make(self, model: onnx.ModelProto | Path, *, optimized: bool, library: bool) -> VerifiedSession:
        """A session on the CPU provider.

        Args:
            model: the model, or its file.
            optimized: with graph optimizations.
            library: it is the optimized model, and may have the plugin library: one without stof's operators has to run
                without.

        Raises:
            RuntimeFailure: what ONNX Runtime raises.
            LimitReached: when it takes too long, or too much memory.
        """
        self.limits.check_time()
        path = _library_for(model) if library else None
        shared = _shared_buffers_of(model) if isinstance(model, Path) else find_shared_buffers(model)
        # Copies of weights in the kernels' own layout would double the memory for runs that are not timed.
        entries = [("session.disable_prepacking", "1")]
        if isinstance(model, Path):
            if is_utf8(model) and not may_hold_collectives(model):
                return self._session(str(model.absolute()), entries, optimized, path, shared)
            model = _read_graph(model)  # ONNX Runtime takes names in UTF-8 only, but bytes, too
        model = drop_outputs_without_arrays(as_lone_rank(model))
        files = sorted(external_files(model))
        self._stored.keep_apart_from(files)
        if all((self.scratch / name).exists() for name in files):
            return self._from_file(model, entries, optimized, path, shared)
        if not RuntimeFault.NO_DATA_FOLDER.is_present():
            model, folder = self._relocate_data(model, files)
            with _utf8_path(folder) as text:
                entries.append(("session.model_external_initializers_file_folder_path", text))
                return self._session(model.SerializeToString(), entries, optimized, path, shared)
        for name in files:  # versions without that option follow links, which later ones refuse
            link = self.scratch / name
            link.parent.mkdir(parents=True, exist_ok=True)
            if not os.path.lexists(link):
                _link(link, self.weights / name)
        return self._from_file(model, entries, optimized, path, shared)

    def _relocate_data(self, model: onnx.ModelProto, files: Sequence[str]) -> tuple[onnx.ModelProto, Path]:
        """The model and the folder of its data, without links that lead out of it, which runtimes refuse."""
        paths = {name: (self.weights / name).resolve() for name in files}
        if all(path.is_relative_to(self.weights) for path in paths.values()):
            return model, self.weights
        folder = Path(os.path.commonpath([path.parent for path in paths.values()]))
        located = onnx.ModelProto()
        located.CopyFrom(model)
        for tensor in all_tensors(located):
            for entry in tensor.external_data if is_external(tensor) else ():
                if entry.key == "location":
                    entry.value = paths[entry.value].relative_to(folder).as_posix()
        return located, folder

    def _from_file(
        self,
        model: onnx.ModelProto,
        entries: list[tuple[str, str]],
        optimized: bool,
        library: str | None,
        shared: tuple[tuple[str, str], ...],
    ) -> VerifiedSession:
        path = self.scratch / "model.onnx"
        while path.exists():  # a link to external data of that name
            path = path.with_name(f"{path.stem}_.onnx")
        try:
            path.write_bytes(self._stored.externalize(model).SerializeToString())
            with _utf8_path(path.parent) as folder:
                return self._session(f"{folder}{os.sep}{path.name}", entries, optimized, library, shared)
        except OSError as error:
            raise ArgumentError(
                f"{path}, which ONNX Runtime is to read, cannot be written: {error.strerror}; give the folder room, or the "
                "right to write (TMPDIR names the one for temporary files)"
            ) from error
        finally:
            path.unlink(missing_ok=True)

    def _session(
        self,
        model: str | bytes,
        entries: list[tuple[str, str]],
        optimized: bool,
        library: str | None,
        shared: tuple[tuple[str, str], ...],
    ) -> VerifiedSession:
        spec = SessionSpec(
            model,
            library=library or "",
            optimizations="all" if optimized else "none",
            entries=tuple(entries),
            without=_optimizers_left_out(),
            lean=self.lean,
            shared_buffers=shared,
        )
        name = "the original" if library is None else "the optimized model"
        with _explain_limits(f"load {name}", self.limits):
            session = create_session(spec, self.limits.seconds_left(), self.limits.memory)
        return VerifiedSession(session, name, self.limits)


def _library_for(model: onnx.ModelProto | Path) -> str:
    """The plugin library for a model that holds stof's operators; empty for any other."""
    holds_operators = isinstance(model, Path) or any(e.domain == DOMAIN for e in model.opset_import)
    return str(library_path()) if holds_operators else ""


def _link(link: Path, target: Path) -> None:
    """Gives a file a second name. Windows lets few users make symbolic links: there it is a hard link, or a copy."""
    if sys.platform != "win32":
        link.symlink_to(target)
    else:
        try:
            link.hardlink_to(target)
        except OSError:  # on another drive, or of a file system without hard links
            shutil.copyfile(target, link)


@contextmanager
def _utf8_path(folder: Path) -> Iterator[str]:
    """A path of a folder that ONNX Runtime takes: one in UTF-8."""
    if is_utf8(folder):
        yield str(folder)
        return
    if sys.platform == "linux":
        descriptor = os.open(folder, READ)
        try:
            yield f"/proc/{os.getpid()}/fd/{descriptor}"  # not "self": another process reads it
        finally:
            os.close(descriptor)
    else:  # macOS takes names in UTF-8 alone; on Windows half of a surrogate pair is none
        raise ArgumentError(
            f"the folder {folder} has a name that is no text, which ONNX Runtime does not open; rename it"
        )


def find_without_arrays(values: Iterable[onnx.ValueInfoProto]) -> dict[str, str]:
    """What ONNX Runtime's Python interface takes and gives no arrays of, by name: the element type, or SEQUENCE."""
    type_names = {}
    for value in values:
        if value.type.HasField("sequence_type"):
            type_names[value.name] = "SEQUENCE"
            continue
        kind = value.type.tensor_type.elem_type
        if kind == onnx.TensorProto.UNDEFINED or kind in ARRAY_TYPES or kind not in onnx.TensorProto.DataType.values():
            continue  # no tensor, or of a type that runtimes refuse
        if helper.tensor_dtype_to_np_dtype(kind).isbuiltin != 1:
            type_names[value.name] = onnx.TensorProto.DataType.Name(kind)
    return type_names


def drop_outputs_without_arrays(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of a model without the outputs of such types; the model itself where it has none."""
    names = find_without_arrays(model.graph.output)
    if not names:
        return model
    reduced = copy_with_nodes(model, model.graph.node)
    remove_named(reduced.graph.output, set(names))
    return reduced
