# SPDX-License-Identifier: Apache-2.0
"""Optimizes each model of a folder, as Optimum, sentence-transformers and ONNX Runtime GenAI write them, into a new one.

The plugin library is copied beside models that need it, and ONNX Runtime GenAI's configuration registers it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import onnx

from stof import progress
from stof.api.checkpoints import check_modules_of, export_checkpoint, is_checkpoint
from stof.api.genai_config import GENAI_CONFIG, GenaiConfig, show_key
from stof.api.library_copies import plan_copies, read_configs
from stof.arguments.checks import check_path
from stof.errors import ArgumentError, StofError
from stof.execution.session_process import release_sessions
from stof.files import check_outputs, is_hub_id, stat_file, temporary_file, temporary_folder, write_text
from stof.folder_report import FolderReport
from stof.graph.external_data import external_files
from stof.graph.load_save import load
from stof.html_report import folder_to_html
from stof.options import STANDARD_OUTPUT, Options, PathLike, merge_options
from stof.pipeline import run, write_json
from stof.run_facts.command import command_of
from stof.run_facts.facts import collect_facts
from stof.runtime.library import build_info, library_path
from stof.selection import EVERY_ATTENTION, owner_of
from stof.sparsify.spec import parse_spec

if TYPE_CHECKING:
    from typing import Unpack

    from stof.options import OptionArguments

_SUFFIX = ".onnx"
# Options that name sites or hold decisions of one model.
_OF_ONE_MODEL = {
    "only": "--only",
    "skip": "--skip",
    "masks": "--mask",
    "plan": "--plan",
    "save_plan": "--save-plan",
    "inputs": "--inputs",
}


def optimize_folder(
    folder: PathLike,
    output: PathLike | None = None,
    options: Options | None = None,
    **arguments: Unpack[OptionArguments],
) -> FolderReport:
    """Optimizes each ``.onnx`` file in a folder and below into another folder, and copies all other files.

    A folder without one, but with a ``config.json`` and weights, is exported before by Optimum, if ``optimum-onnx`` is
    installed; so is the id of a model on the hub.

    The new folder appears whole or not at all: when one model fails, nothing is written, and the report has the errors of
    all models. A model with nothing to replace is copied. External data is copied once, where a model needs it. Where a
    result holds stof's operators, the plugin library is copied too: beside a ``genai_config.json`` that names the model,
    which then registers it, else beside the model.

    Args:
        folder: the folder, which is never modified; or the id of a model on the hub.
        output: the new folder, which does not exist or is empty. It may be None where ``options`` asks for a report alone.
        options: for each model. ``shapes`` may name dimensions, and ``explain`` candidates, that only some models have;
            ``tune`` and ``verify_budget`` are seconds for one model.
        **arguments: fields of :class:`stof.Options` by name; each takes the place of that of ``options``.

    Raises:
        ArgumentError: wrong arguments, a folder that cannot be written, files that cannot be copied, a ``genai_config.json``
            that the runtime would not read.
    """
    options = merge_options("stof.optimize_folder", options, arguments)
    source = check_path("folder", folder)
    is_dry = options.dry_run or options.explain is not None
    output = options.output if output is None else check_path("output", output)
    _check_options(options)
    if output is None and not is_dry:
        raise ArgumentError(
            f"{source} is a folder, expected an .onnx file; name a new folder with -o to optimize each .onnx file in it"
        )
    target = None if output is None else Path(os.path.realpath(output))
    if target is not None:
        _check_target(source, target)
    is_on_hub = is_hub_id(source)
    files = [] if is_on_hub else _sorted_files(source)
    if not is_on_hub and not is_checkpoint(files):
        return _optimize_files(source, source, files, target, options, is_dry)
    with contextlib.ExitStack() as stack:
        try:
            scratch = stack.enter_context(temporary_folder(None if target is None else target.parent))
        except OSError as error:
            raise ArgumentError(f"there is no place to export {source} to: {error.strerror or error}") from error
        check_modules_of(source, files)
        note = export_checkpoint(source.as_posix() if is_on_hub else str(source), scratch / "exported")
        return _optimize_files(
            scratch / "exported", source, _sorted_files(scratch / "exported"), target, options, is_dry, [note]
        )


def _optimize_files(
    source: Path,
    given: Path,
    files: Sequence[Path],
    target: Path | None,
    options: Options,
    is_dry: bool,
    notes: Sequence[str] = (),
) -> FolderReport:
    """Optimizes the models among files of a folder.

    Args:
        source: the folder.
        given: what the caller named: the folder itself, or the checkpoint that it was exported from.
        files: paths in the folder.
        target: the new folder; None: none is written.
        options: for each model.
        is_dry: whether a report alone is asked for.
        notes: where the folder comes from.
    """
    models = [f for f in files if f.suffix == _SUFFIX]
    if not models:
        raise ArgumentError(f"{given} holds no .onnx file")
    _check_reports(source, files, options)
    command = command_of(str(given), replace(options, output=None if is_dry else target))
    report = FolderReport(str(given), dry_run=is_dry, facts=collect_facts(command, build_info(), options.tuned_for))
    configs = read_configs(source, files)
    _check_states(options, configs)
    report.notes += notes
    report.notes += _note_absent_models(configs, frozenset(files))
    steps = _FolderRun(source, models, options, report)
    if target is None or is_dry:
        steps.optimize_into(None, source)
        _check_explanation(report, options.explain)
    else:
        _write(steps, files, target, configs)
    write_json(options.json, report.to_json())
    if options.report is not None:
        write_text("HTML report", options.report, [folder_to_html(report)])
    return report


def _sorted_files(folder: Path) -> list[Path]:
    try:
        return sorted(_list_files(folder, (os.path.realpath(folder),)))
    except OSError as error:
        raise ArgumentError(f"{error.filename} cannot be read: {error.strerror}") from error


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
                    model.facts = None if model.facts is None else replace(model.facts, output_bytes=None)
                return
            copies = plan_copies(new, steps.models, configs, steps.target)
            for path in files:
                if path not in steps.models and path not in steps.data and path not in copies.libraries:
                    _copy(steps.source / path, new / path)
                    report.others.append(path.as_posix())
            copies.write(new, library_path())
            report.notes += copies.notes
            report.libraries = [p.as_posix() for p in copies.libraries]
            report.registrations = {p.as_posix(): keys for p, keys in copies.keys.items()}
            if sys.platform == "win32":
                release_sessions()  # a folder with an open file cannot be renamed
                with contextlib.suppress(FileNotFoundError):
                    target.rmdir()  # nor can one take the place of an empty folder, as it does elsewhere
            new.rename(target)
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
        self.target = options.tuned_for
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
        dimensions = set().union(*self._dimensions.values())
        for name in shapes:
            if name not in dimensions:
                named = ", ".join(sorted(dimensions)) or "none, all sizes are fixed"
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
                with progress.step(path.as_posix()):
                    report = run(
                        source,
                        target,
                        options,
                        str(Path(self.report.folder) / path),
                        copies_unchanged=folder is not None,
                        facts=self.report.facts,
                        when_failed=partial(self.report.failed_reports.__setitem__, path.as_posix()),
                    )
            except StofError as error:
                if folder is not None:
                    error.args = (str(error).replace(str(folder), str(shown_as)),)
                self.report.failures[path.as_posix()] = error
                continue
            if report.output is not None:
                report.output = str(shown_as / path)
            self.report.reports[path.as_posix()] = report


def _dimensions_of(model: onnx.ModelProto) -> set[str]:
    return {d.dim_param for i in model.graph.input for d in i.type.tensor_type.shape.dim if d.dim_param}


def _check_options(options: Options) -> None:
    for name, option in _OF_ONE_MODEL.items():
        if getattr(options, name):
            raise ArgumentError(f"{option} is for one model; give the .onnx file instead of the folder")


def _check_states(options: Options, configs: Mapping[Path, GenaiConfig]) -> None:
    """Refuses a third state beside keys and values, which no genai_config.json can name."""
    spec = parse_spec(options.sparsify) if options.sparsify else None
    if configs and spec is not None and spec.pages_clauses:
        raise ArgumentError(
            f"--sparsify {options.sparsify!r}: choose-pages needs bounds of pages beside each layer's keys and values, and "
            "genai_config.json has no names for such a state; skip-scores needs none"
        )


def _check_reports(source: Path, files: Sequence[Path], options: Options) -> None:
    written = {"report": options.json, "HTML report": options.report}
    paths = {name: path for name, path in written.items() if path not in (None, STANDARD_OUTPUT)}
    if paths:
        check_outputs({f"input {f}": source / f for f in files}, paths)


def _note_absent_models(configs: Mapping[Path, GenaiConfig], files: Collection[Path]) -> list[str]:
    """A note for each model that a configuration names and the folder does not hold."""
    return [
        f"{folder / GENAI_CONFIG}: {show_key(s.key)} is {str(s.model)!r}, which is not in the folder"
        for folder, config in configs.items()
        for s in config.sessions
        if folder / s.model not in files
    ]


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
    status = stat_file("output", target)
    if status is not None and not target.is_dir():
        raise ArgumentError(f"the output {target} is a file; of a folder it has to be a folder, too")
    if status is not None and any(target.iterdir()):
        raise ArgumentError(f"the output {target} is not empty; remove it, or choose another folder with -o")
    if not target.parent.is_dir():
        raise ArgumentError(f"the folder {target.parent} of the output does not exist; make it, or choose another one")


def _list_files(folder: Path, above: tuple[str, ...], inside: Path = Path()) -> Iterator[Path]:
    """The files in a folder and below, relative to it. Links are followed: caches of models are made of them.

    Raises:
        ArgumentError: for what is no file, such as a broken link or a pipe.
    """
    with os.scandir(folder / inside) as entries:
        by_name = sorted(entries, key=lambda e: e.name)
    for entry in by_name:
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
