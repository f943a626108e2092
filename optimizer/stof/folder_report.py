# SPDX-License-Identifier: Apache-2.0
"""What an optimization of a folder found and did, for the terminal and as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stof.errors import StofError, shown
from stof.files import strict_json
from stof.report import Report, describe_registration

if TYPE_CHECKING:
    from stof.run_facts.facts import RunFacts


@dataclass(repr=False)
class FolderReport:
    """What became of each file of a folder.

    Attributes:
        folder: the one that was read.
        output: the one that was written; None: nothing was written.
        dry_run: nothing was to be written.
        reports: of models, by their path in the folder.
        failures: the errors of models, likewise.
        failed_reports: of models that failed once they were analyzed.
        others: paths of files that are no models, nor external data of models.
        libraries: paths of copies of the plugin library.
        registrations: by the path of a ``genai_config.json``, its keys that name the library.
        notes: what the user should know.
        facts: how, when and where the report was made.
    """

    folder: str
    output: str | None = None
    dry_run: bool = False
    reports: dict[str, Report] = field(default_factory=dict)
    failures: dict[str, StofError] = field(default_factory=dict)
    failed_reports: dict[str, Report] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)
    libraries: list[str] = field(default_factory=list)
    registrations: dict[str, tuple[str, ...]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    facts: RunFacts | None = None

    @property
    def analyzed(self) -> dict[str, Report]:
        """The reports of all models that were analyzed, also of those that failed afterwards."""
        return {**self.reports, **self.failed_reports}

    def __repr__(self) -> str:
        """One line: the whole report is in :meth:`to_text` and :meth:`to_json`."""
        state = f"{len(self.reports)} models, {len(self.failures)} failed, output {shown(self.output)}"
        return f"<stof.FolderReport of {shown(self.folder)}: {state}>"

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
        """A line for each model, what of it stays and its times, one for the other files, and what was written."""
        lines = []
        for name in sorted({*self.reports, *self.failures}):
            if name in self.failures:
                lines.append(f"{name}: failed: {self.failures[name]}")
            else:
                lines.append(f"{name}: {self.reports[name].summary()}")
                report = self.reports[name]
                more = (*report.reasons_kept(), *report.choice_lines(), *report.time_lines())
                lines += [f"  {line}" for line in more]
        if self.output:
            lines += [f"{len(self.others)} other files: copied", *self.library_lines(), f"written: {self.output}"]
        elif self.dry_run:
            lines.append("dry run: no file was written")
        else:
            lines.append(self.failure)
        return "\n".join(shown(line) for line in [*lines, *(f"note: {note}" for note in self.all_notes())])

    def all_notes(self) -> list[str]:
        """The folder's notes and those of its models, each once."""
        return list(dict.fromkeys([*self.notes, *(note for r in self.analyzed.values() for note in r.notes)]))

    def library_lines(self) -> list[str]:
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
        by_model = {name: report.explain(pattern) for name, report in self.analyzed.items()}
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
            "run": None if self.facts is None else self.facts.to_json(),
        }
        return strict_json.dumps(data, indent=2, default=str)
