# SPDX-License-Identifier: Apache-2.0
"""Optimizes each model of a folder, as Optimum, sentence-transformers and ONNX Runtime GenAI write them, into a new one.

The plugin library is copied beside models that need it, and ONNX Runtime GenAI's configuration registers it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx

from stof import progress, strict_json
from stof.api.genai_config import GENAI_CONFIG, GenaiConfig, show_key
from stof.api.library_copies import plan_copies, read_configs
from stof.errors import ArgumentError, StofError, shown
from stof.files import check_outputs, stat_file, temporary_file, temporary_folder, write_text
from stof.graph.external_data import external_files
from stof.graph.load_save import load
from stof.options import Options
from stof.pipeline import run
from stof.report import Report, describe_registration
from stof.runtime.library import library_path
from stof.selection import EVERY_ATTENTION, owner_of

_SUFFIX = ".onnx"
# Options that name sites or hold decisions of one model.
_OF_ONE_MODEL = {
    "only": "--only",
    "skip": "--skip",
    "masks": "--mask",
    "plan": "--plan",
    "save_plan": "--save-plan",
    "report": "--report",
    "inputs": "--inputs",
}


@dataclass
class FolderReport:
    """What became of each file of a folder.

    Attributes:
        folder: the one that was read.
        output: the one that was written; None: nothing was written.
        dry_run: nothing was to be written.
        reports: of models, by their path in the folder.
        failures: the errors of models, likewise.
        others: paths of files that are no models, nor external data of models.
        libraries: paths of copies of the plugin library.
        registrations: by the path of a ``genai_config.json``, its keys that name the library.
        notes: what the user should know.
    """

    folder: str
    output: str | None = None
    dry_run: bool = False
    reports: dict[str, Report] = field(default_factory=dict)
    failures: dict[str, StofError] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)
    libraries: list[str] = field(default_factory=list)
    registrations: dict[str, tuple[str, ...]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0, or the largest exit status of a failure."""
        return max((e.exit_code for e in self.failures.values()), default=0)

    @property
    def failure(self) -> str:
        """One line on what failed; empty where nothing did."""
        count, models = len(self.failures), len(self.failures) + len(self.reports)
        return f"{count} of {models} models failed; nothing was written" if count else ""

    def to_text(self) -> str:
        """A line for each model and its times, one for the other files, and what was written."""
        lines = []
        for name in sorted({*self.reports, *self.failures}):
            if name in self.failures:
                lines.append(f"{name}: failed: {self.failures[name]}")
            else:
                lines.append(f"{name}: {self.reports[name].summary()}")
                lines += [f"  {line}" for line in self.reports[name].time_lines()]
        if self.output:
            lines += [f"{len(self.others)} other files: copied", *self._library_lines(), f"written: {self.output}"]
        elif self.dry_run:
            lines.append("dry run: no file was written")
        else:
            lines.append(self.failure)
        notes = dict.fromkeys([*self.notes, *(note for report in self.reports.values() for note in report.notes)])
        return "\n".join(shown(line) for line in [*lines, *(f"note: {note}" for note in notes)])

    def _library_lines(self) -> list[str]:
        """Where the plugin library is, and who registers it."""
        folders = {Path(config).parent for config in self.registrations}
        lines = []
        for name in self.libraries:
            path = Path(self.output or "", name)
            how = (
                "onnxruntime_genai loads it by itself"
                if Path(name).parent in folders
                else describe_registration(str(path))
            )
            lines.append(f"{name}: copied; {how}")
        return lines + [
            f"{config}: {', '.join(keys)} {'is' if len(keys) == 1 else 'are'} set"
            for config, keys in self.registrations.items()
        ]

    def explain(self, pattern: str) -> str:
        """How far candidates of each model got; models without one that the pattern names are left out."""
        by_model = {name: report.explain(pattern) for name, report in self.reports.items()}
        return "\n".join(f"{shown(name)}:\n{text}" for name, text in by_model.items() if text)

    def to_json(self) -> str:
        """Every fact as JSON; ``files`` has the report of each model by its path."""
        files: dict[str, Any] = {name: json.loads(report.to_json()) for name, report in self.reports.items()}
        for name, error in self.failures.items():
            path = str(Path(self.folder) / name)
            files[name] = {"model": path, "output": None, "error": str(error), "exit_status": error.exit_code}
        data = {
            "folder": self.folder,
            "output": self.output,
            "dry_run": self.dry_run,
            "exit_status": self.exit_code,
            "files": dict(sorted(files.items())),
            "others": self.others,
            "libraries": self.libraries,
            "registrations": self.registrations,
            "notes": self.notes,
        }
        return strict_json.dumps(data, indent=2, default=str)


def optimize_folder(
    folder: str | os.PathLike[str], output: str | os.PathLike[str] | None = None, options: Options | None = None
) -> FolderReport:
    """Optimizes each ``.onnx`` file in a folder and below into another folder, and copies all other files.

    The new folder appears whole or not at all: when one model fails, nothing is written, and the report has the errors of
    all models. A model with nothing to replace is copied. External data is copied once, where a model needs it. Where a
    result holds stof's operators, the plugin library is copied too: beside a ``genai_config.json`` that names the model,
    which then registers it, else beside the model.

    Args:
        folder: the folder; it is never modified.
        output: the new folder, which does not exist or is empty. It may be None where ``options`` asks for a report alone.
        options: for each model. ``shapes`` may name dimensions, and ``explain`` candidates, that only some models have;
            ``tune`` and ``verify_budget`` are seconds for one model.

    Raises:
        ArgumentError: wrong arguments, a folder that cannot be written, files that cannot be copied, a ``genai_config.json``
            that the runtime would not read.
    """
    options = options or Options()
    source = Path(folder)
    is_dry = options.dry_run or options.explain is not None
    output = output or options.output
    _check_options(options)
    if output is None and not is_dry:
        raise ArgumentError(
            f"{source} is a folder, expected an .onnx file; name a new folder with -o to optimize each .onnx file in it"
        )
    target = None if output is None else Path(os.path.realpath(output))
    if target is not None:
        _check_target(source, target)
    try:
        files = sorted(_list_files(source, (os.path.realpath(source),)))
    except OSError as error:
        raise ArgumentError(f"{error.filename} cannot be read: {error.strerror}") from error
    models = [f for f in files if f.suffix == _SUFFIX]
    if not models:
        raise ArgumentError(f"{source} holds no .onnx file")
    if options.json is not None:
        check_outputs({f"input {f}": source / f for f in files}, {"report": options.json})
    report = FolderReport(str(source), dry_run=is_dry)
    configs = read_configs(source, files)
    known = frozenset(files)
    report.notes += [
        f"{folder / GENAI_CONFIG}: {show_key(s.key)} is {str(s.model)!r}, which is not in the folder"
        for folder, config in configs.items()
        for s in config.sessions
        if folder / s.model not in known
    ]
    steps = _FolderRun(source, models, options, report)
    if target is None or is_dry:
        steps.optimize_into(None, source)
        _check_explanation(report, options.explain)
    else:
        _write(steps, files, target, configs)
    if options.json is not None:
        write_text("report", options.json, [report.to_json()])
    return report


def _write(steps: _FolderRun, files: Sequence[Path], target: Path, configs: Mapping[Path, GenaiConfig]) -> None:
    report = steps.report
    try:
        with temporary_folder(target.parent) as scratch:
            new = scratch / "new"
            new.mkdir()
            steps.optimize_into(new, target)
            if report.failures:
                for model in report.reports.values():
                    model.output, model.copied = None, False
                return
            copies = plan_copies(new, steps.models, configs, steps.target)
            for path in files:
                if path not in steps.models and path not in steps.data and path not in copies.libraries:
                    _copy(steps.source / path, new / path)
                    report.others.append(str(path))
            copies.write(new, library_path())
            report.notes += copies.notes
            report.libraries = [str(p) for p in copies.libraries]
            report.registrations = {str(p): keys for p, keys in copies.keys.items()}
            new.rename(target)  # takes the place of an empty folder, too
    except OSError as error:
        raise ArgumentError(
            f"the folder {target} cannot be written: {error.strerror or error}; choose another one with -o"
        ) from error
    report.output = str(target)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with temporary_file(target.parent) as new:
        new.copy(source)
        new.path.chmod(source.stat().st_mode & 0o777)
        new.replace(target)


class _FolderRun:
    """Optimizes the models of a folder.

    Attributes:
        source: the folder.
        models: paths in it.
        data: paths of the models' external data in it, which they bring along.
        target: what choices are made for.
        report: gets the results.
    """

    def __init__(self, source: Path, models: Sequence[Path], options: Options, report: FolderReport) -> None:
        self.source = source
        self.models = frozenset(models)
        self.data: set[Path] = set()
        self.report = report
        self.target = options.target
        self._dimensions: dict[Path, set[str]] = {}
        for path in models:
            with contextlib.suppress(StofError):  # optimization will say so
                model = load(source / path)
                self.data |= {Path(os.path.normpath(path.parent / location)) for location in external_files(model)}
                self._dimensions[path] = _dimensions_of(model)
        # A pattern may name candidates of some models alone: it is checked when all are analyzed.
        explain = None if options.explain is None else EVERY_ATTENTION
        self._options = replace(options, output=None, json=None, explain=explain)
        self._check_shapes(options.shapes)

    def _check_shapes(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        known = set().union(*self._dimensions.values())
        for name in shapes:
            if name not in known:
                named = ", ".join(sorted(known)) or "none, all sizes are fixed"
                raise ArgumentError(
                    f"--shape {name!r} is no symbolic dimension of the models' inputs; these are: {named}"
                )

    def optimize_into(self, folder: Path | None, shown_as: Path) -> None:
        """Optimizes each model.

        Args:
            folder: where results are written; None: nothing is.
            shown_as: the folder that reports and messages name.
        """
        for path in sorted(self.models):
            source = self.source / path
            target = (folder or self.source) / path.with_suffix(".stof.onnx" if folder is None else _SUFFIX)
            shapes = {n: r for n, r in self._options.shapes.items() if n in self._dimensions.get(path, ())}
            options = replace(self._options, shapes=shapes, dry_run=self._options.dry_run or folder is None)
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                with progress.step(str(path)):
                    report = run(source, target, options, str(source), copies_unchanged=folder is not None)
            except StofError as error:
                if folder is not None:
                    error.args = (str(error).replace(str(folder), str(shown_as)),)
                self.report.failures[str(path)] = error
                continue
            if report.output is not None:
                report.output = str(shown_as / path)
            self.report.reports[str(path)] = report


def _dimensions_of(model: onnx.ModelProto) -> set[str]:
    return {d.dim_param for i in model.graph.input for d in i.type.tensor_type.shape.dim if d.dim_param}


def _check_options(options: Options) -> None:
    for name, option in _OF_ONE_MODEL.items():
        if getattr(options, name):
            raise ArgumentError(f"{option} is for one model; give the .onnx file instead of the folder")


def _check_explanation(report: FolderReport, pattern: str | None) -> None:
    """Refuses a pattern that names no candidate of any model. Models that failed may have had one."""
    if pattern in (None, EVERY_ATTENTION) or report.failures or report.explain(pattern):
        return
    names = {s.names: None for r in report.reports.values() for s in r.sections.values()}
    owner = owner_of(pattern, names)
    kind = "candidate" if owner is None else owner.kind
    others = "".join(f"; {n.prefix}NAME names a {n.kind}" for n in names if n is not owner and n.prefix)
    raise ArgumentError(f"--explain {pattern!r} names no {kind} of the models in {report.folder}{others}")


def _check_target(source: Path, target: Path) -> None:
    """Refuses a new folder that holds something, or is part of what is read."""
    inner = Path(os.path.realpath(source))
    if target == inner or target.is_relative_to(inner):
        where = "is" if target == inner else "lies in"
        raise ArgumentError(f"the output {target} {where} the folder that is read; choose another one with -o")
    found = stat_file("output", target)
    if found is not None and not target.is_dir():
        raise ArgumentError(f"the output {target} is a file; of a folder it has to be a folder, too")
    if found is not None and any(target.iterdir()):
        raise ArgumentError(f"the output {target} is not empty; remove it, or choose another folder with -o")
    if not target.parent.is_dir():
        raise ArgumentError(f"the folder {target.parent} of the output does not exist; make it, or choose another one")


def _list_files(folder: Path, above: tuple[str, ...], inside: Path = Path()) -> Iterator[Path]:
    """The files in a folder and below, relative to it. Links are followed: caches of models are made of them.

    Raises:
        ArgumentError: for what is no file, such as a broken link or a pipe.
    """
    with os.scandir(folder / inside) as entries:
        found = sorted(entries, key=lambda e: e.name)
    for entry in found:
        path = inside / entry.name
        if entry.is_dir():
            real = os.path.realpath(entry.path)
            if real in above:
                raise ArgumentError(
                    f"{entry.path} is a link to a folder above it; remove it, or copy the files without it"
                )
            yield from _list_files(folder, (*above, real), path)
        elif entry.is_file():
            yield path
        else:
            raise ArgumentError(f"{entry.path} is no regular file, or a broken link; remove it")
