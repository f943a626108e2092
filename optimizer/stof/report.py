# SPDX-License-Identifier: Apache-2.0
"""What an optimization found and did, for the terminal and as JSON."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from stof.arguments.emissions import STOF
from stof.errors import shown
from stof.files import strict_json
from stof.selection import EVERY_ATTENTION, CandidateNames, owner_of
from stof.verification.describe import describe_verification

if TYPE_CHECKING:
    from stof.memory.memory_report import MemoryReport
    from stof.prompts.loss import PromptLoss
    from stof.run_facts.facts import RunFacts
    from stof.sparsify.reduced_report import ReducedPrecisionReport
    from stof.sparsify.report import SparsityReport
    from stof.tuning_cache import EarlierMeasurements
    from stof.verification.float_distance import DequantizedAttention
    from stof.verification.model_times import ModelTimes
    from stof.verification.result import Verification

_MAX_REPR = 120  # characters of a part of a repr
SLOWER_ADVICE = (
    "What to do: --tune SECONDS measures on this machine which operators gain from fusion; --shape NAME=N..M states the "
    "lengths in use, and sites that lose there stay as they are; at these sizes the original is the better one"
)


class Row(Protocol):
    """One candidate of an op."""

    @property
    def replaced(self) -> bool:
        """Whether it became a node of the op."""

    @property
    def reason(self) -> str:
        """Why it was replaced or left."""


@dataclass(frozen=True)
class PageRow:
    """One candidate in a table of the report's page.

    Attributes:
        name: the candidate's.
        replaced: whether it became a node of the op.
        cells: what the table's columns hold, as plain text.
    """

    name: str
    replaced: bool
    cells: tuple[str, ...]


@dataclass(frozen=True)
class PageTable:
    """The candidates of an op for the report's page, in the order of the graph.

    Attributes:
        title: what they are: "Attention sites".
        columns: headings of the cells behind name and result.
        rows: one for each candidate.
        code: the columns whose cells are code, by index.
        group: the column by which rows are grouped, by index; None: they stay in the order of the graph.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[PageRow, ...]
    code: frozenset[int] = frozenset()
    group: int | None = None


@dataclass(frozen=True)
class TileGrid:
    """One mask, or some heads of it, as tiles: ``#`` all, ``+`` some, ``.`` none of a tile's pairs may attend.

    Attributes:
        label: which heads; empty where all are alike.
        rows: a text for each row of tiles, queries from the top to the bottom; a character for each tile.
    """

    label: str
    rows: tuple[str, ...]


@dataclass(frozen=True)
class MaskPicture:
    """A distinct mask for the report's page.

    Attributes:
        title: the mask's kind.
        mask: its text.
        facts: short sentences: where it is used, which share of tiles is computed.
        queries: rows S that the grids show.
        keys: columns T that the grids show.
        grids: one or, where heads differ, a few.
    """

    title: str
    mask: str
    facts: tuple[str, ...]
    queries: int
    keys: int
    grids: tuple[TileGrid, ...]


@dataclass(frozen=True)
class Gain:
    """The time of replaced nodes over that of the op: one bar of the report's page, and one line of its chart.

    Attributes:
        label: what was replaced.
        count: how many times.
        factor: the quotient of the times.
        measured: whether they were measured, not estimated.
        advice: what to do where the factor is below 1.
        points: the factor at several lengths, ascending; empty where it is known at one.
        curve: the label of these.
    """

    label: str
    count: int
    factor: float
    measured: bool
    advice: str = ""
    points: tuple[tuple[int, float], ...] = ()
    curve: str = ""


class Section(ABC):
    """What the report says of one op: a row for each candidate, and how rows are written.

    Attributes:
        names: how options and messages name the op's candidates.
        rows: a row for each candidate, and for others that are none for a reason.
        is_explained_by_default: whether ``--explain`` without a pattern lists the op's candidates.
        loss: by how much next tokens change, of a section that changes outputs; None: not measured.
        earlier: measurements of earlier runs that decided; None: none did.
    """

    names: ClassVar[CandidateNames]
    is_explained_by_default: ClassVar[bool] = False
    rows: Sequence[Row]
    loss: PromptLoss | None = None
    earlier: EarlierMeasurements | None = None

    @property
    def replaced(self) -> int:
        """How many candidates were replaced."""
        return sum(row.replaced for row in self.rows)

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """The rows, and other facts of the op, by their keys in the report's JSON."""

    @abstractmethod
    def lines(self) -> list[str]:
        """A line or a few for each kind of row."""

    @property
    def changes_outputs(self) -> bool:
        """Whether replaced candidates compute something else than the original, as options ask for."""
        return False

    @property
    def verified_form(self) -> str:
        """In which form the outputs were compared, where the section changes them; else empty."""
        return ""

    @property
    def loss_headlines(self) -> list[str]:
        """A line for the loss of whole prompts, and one for that of decoding."""
        return [] if self.loss is None else self.loss.headlines()

    def headline(self, dry_run: bool) -> str:
        """The section in the report's first line; or empty."""
        return ""

    def reasons_kept(self) -> list[str]:
        """Why candidates stay, for the report of a folder, where one line says what was replaced; a line for each."""
        return []

    def mask_pictures(self) -> list[str]:
        """Lines below the rows of all sections."""
        return []

    def reasons_by_site(self) -> Mapping[str, str]:
        """Why sites stay as they are, or what of them does, by their names; for tensors that take memory."""
        return {}

    def page_table(self) -> PageTable:
        """The rows for the report's page."""
        kind = self.names.kind
        rows = (PageRow(f"{kind} {i}", row.replaced, (row.reason,)) for i, row in enumerate(self.rows))
        return PageTable(f"{kind[:1].upper()}{kind[1:]}s", ("reason",), tuple(rows))

    def page_pictures(self) -> Sequence[MaskPicture]:
        """The distinct masks for the report's page."""
        return ()

    def page_gains(self) -> Sequence[Gain]:
        """Estimated and measured gains for the report's page, one for each kind of candidate."""
        return ()

    @property
    def candidates_words(self) -> str:
        """The op's candidates for people, in the plural."""
        return f"{self.names.kind}s"

    def nothing_to_do(self) -> str:
        """That no candidate is replaced, and why where all have one reason; empty where there is no candidate."""
        reasons = {row.reason for row in self.rows if not row.replaced}
        if not reasons or self.replaced:
            return ""
        why = f" ({reasons.pop()})" if len(reasons) == 1 else ""
        return f"0 of {len(self.rows)} {self.candidates_words} are replaced{why}"

    def nothing_found(self) -> str:
        """What the op looks for, where a graph has nothing of any op; empty where other sections say it."""
        return ""

    def hints(self) -> list[str]:
        """What the user may try."""
        return []

    def explain_rows(self, pattern: str) -> list[str]:
        """How far the candidates that a pattern (without the op's prefix) names got, for ``--explain``."""
        return []


@dataclass(repr=False)
class Report:
    """The whole result. ``sections`` are by the key of their op, in the order of ``stof.ops``."""

    model: str
    output: str | None = None
    sections: dict[str, Section] = field(default_factory=dict)
    nodes_before: int = 0
    nodes_after: int = 0
    dry_run: bool = False
    verification: Verification | None = None
    memory: MemoryReport | None = None  # estimated peaks, before and after; None: nothing was looked at
    times: ModelTimes | None = None  # of the whole models, with --time
    seconds: dict[str, float] = field(default_factory=dict)
    library: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # what this installation lacks for the target
    copied: bool = False  # nothing was replaced: the output is a copy of the model
    sparsity: SparsityReport | None = None  # what --sparsify did
    dequantized: DequantizedAttention | None = None  # what --dequantize-attention did
    attention_precision: ReducedPrecisionReport | None = None  # of --allow-bf16 and --attention-precision
    emit: str = STOF.name  # what operators are written
    failure: str = ""  # why nothing was written: verification failed, or memory is above its limit
    facts: RunFacts | None = None  # how, when and where it was made
    converted_opset: tuple[int, int] | None = None  # opsets of the model and of the result, where it was converted
    how_to_run: str = ""  # a line on what runs the result; empty where nothing of it needs more than ONNX Runtime
    optimized_before: dict[str, int] = field(default_factory=dict)  # how many nodes of each of stof's operators it had

    def __repr__(self) -> str:
        """One line: the whole report is in :meth:`to_text` and :meth:`to_json`."""
        return f"<stof.Report of {shown(self.model, _MAX_REPR)}: {shown(self.summary(), _MAX_REPR)}>"

    def rows(self, key: str) -> list[Any]:
        """The rows of an op by its key; empty where the op looked for nothing."""
        return list(self.sections[key].rows) if key in self.sections else []

    @property
    def sites(self) -> list[Any]:
        """The rows of attention sites (:class:`stof.attention.report.SiteReport`)."""
        return self.rows("sites")

    @property
    def caches(self) -> list[Any]:
        """The rows of attention over a KV cache (:class:`stof.cached_attention.report.CacheReport`)."""
        return self.rows("caches")

    @property
    def chains(self) -> list[Any]:
        """The rows of fused chains (:class:`stof.fusion.report.ChainReport`)."""
        return self.rows("chains")

    @property
    def pictures(self) -> dict[str, list[str]]:
        """Pictures of the masks by their text: rows of tiles."""
        pictures: dict[str, list[str]] = (
            self.sections["sites"].to_json()["pictures"] if "sites" in self.sections else {}
        )
        return pictures

    @property
    def replaced(self) -> int:
        """How many candidates of all ops were replaced."""
        return sum(section.replaced for section in self.sections.values())

    @property
    def has_result(self) -> bool:
        """Whether there is another model than the original: an op replaced candidates, or matmuls became StofGemm."""
        precision = self.attention_precision
        return bool(self.replaced or (precision is not None and precision.adds_operators))

    @property
    def earlier_measurements(self) -> EarlierMeasurements | None:
        """Measurements of earlier runs that decided about candidates of any op; None: none did."""
        earlier = [s.earlier for s in self.sections.values() if s.earlier is not None]
        return reduce(lambda a, b: a.join(b), earlier) if earlier else None

    def to_json(self) -> str:
        """Every fact as JSON; errors that are no number are the strings "inf" and "nan"."""
        data: dict[str, Any] = {"model": self.model, "output": self.output}
        for section in self.sections.values():
            data |= section.to_json()
        facts = (
            "emit",
            "copied",
            "nodes_before",
            "nodes_after",
            "dry_run",
            "failure",
            "verification",
            "seconds",
            "library",
            "notes",
        )
        data |= {name: getattr(self, name) for name in (*facts, "optimized_before")}
        if self.verification is not None:
            data["verification"] = {**asdict(self.verification), "ok": not self.verification.failures}
        opsets = self.converted_opset
        data["converted_opset"] = None if opsets is None else dict(zip(("from", "to"), opsets, strict=True))
        data["sparsify"] = None if self.sparsity is None else self.sparsity.to_json()
        data["dequantize_attention"] = None if self.dequantized is None else self.dequantized.to_json()
        precision = self.attention_precision
        data["attention_precision"] = None if precision is None else precision.to_json()
        data["memory"] = None if self.memory is None else self.memory.to_json()
        data["times"] = None if self.times is None else self.times.to_json()
        data["run"] = None if self.facts is None else self.facts.to_json()
        earlier = self.earlier_measurements
        data["earlier_measurements"] = None if earlier is None else earlier.to_json()
        return strict_json.dumps(data, indent=2, default=str)

    def choice_lines(self) -> list[str]:
        """What decided besides the model and the options."""
        earlier = self.earlier_measurements
        return [] if earlier is None else [f"choices: {earlier.to_text()}"]

    def time_lines(self) -> list[str]:
        """What --time measured: the whole model, the longest inputs first, padded texts, and one token of a decoder."""
        if self.times is None:
            return []
        lines = [f"measured: {times.to_text()}" for times in reversed(self.times.lengths)]
        others = {"padded texts": self.times.padded, "one token": self.times.token}
        return lines + [f"measured, {what}: {times.to_text()}" for what, times in others.items() if times is not None]

    def to_text(self) -> str:
        """A table by kind of candidate, a picture of each distinct mask, and what was verified."""
        sections = self.sections.values()
        lines = [f"{self.model}: {self._headline()}"]
        lines += [line for s in sections for line in s.lines()]
        lines += self.sparsity.lines() if self.sparsity is not None else []
        lines += self.dequantized.lines() if self.dequantized is not None else []
        lines += self.attention_precision.lines() if self.attention_precision is not None else []
        lines += [line for s in sections for line in s.mask_pictures()]
        if self.nodes_after:
            lines += ["", f"nodes: {self.nodes_before} -> {self.nodes_after}"]
        if self.converted_opset is not None:
            before, after = self.converted_opset
            lines.append(f"opset: {before} -> {after} (the model was converted by onnx.version_converter)")
        lines += self.choice_lines()
        lines += self.memory.lines() if self.memory is not None else []
        lines += self._verification_lines()
        lines += self.time_lines()
        reasons = self.nothing_to_do
        if self.copied:
            lines.append(f"nothing to do: {reasons}; the model was copied as it is")
        if self.output:
            lines.append(f"written: {self.output}")
        elif self.has_result:
            lines.append("dry run: no file was written" if self.dry_run else "the optimized model is returned")
        else:
            lines.append(f"nothing to do: {reasons}; no file was written")
        lines += [f"hint: {hint}" for s in sections for hint in s.hints()]
        lines += self._slower_lines()
        lines += [f"note: {note}" for note in self.notes]
        lines += [self.how_to_run] if self.how_to_run else []
        return "\n".join(map(shown, lines))

    def _slower_lines(self) -> list[str]:
        """What to do where --time found the result slower than the original."""
        if self.times is None:
            return []
        timed = [*reversed(self.times.lengths), *filter(None, [self.times.padded, self.times.token])]
        slower = [t.label for t in timed if t.is_slower]
        return [f"hint: slower than the original at {'; '.join(slower)}. {SLOWER_ADVICE}"] if slower else []

    def summary(self) -> str:
        """One line: what was replaced, or why nothing was, and whether it was verified."""
        if not self.has_result:
            return f"nothing to do: {self.nothing_to_do}{'; copied' if self.copied else ''}"
        if self.dry_run:
            return self._headline()
        loss = [] if self.sparsity is None else self.sparsity.loss_headlines
        loss += [] if self.attention_precision is None else self.attention_precision.loss_headlines
        loss += [line for s in self.sections.values() for line in s.loss_headlines]
        return "; ".join([self._headline(), self._verdict(), *loss])

    def reasons_kept(self) -> list[str]:
        """What the summary does not say: why candidates of some ops stay as they are."""
        return [reason for s in self.sections.values() for reason in s.reasons_kept()] if self.has_result else []

    def _verdict(self) -> str:
        """Whether the result was verified, in a few words."""
        if self.verification is None:
            return "not verified"
        if self.sparsity is not None and self.sparsity.unverified:
            return "verified without what --sparsify leaves out at run time"
        if self.verification.partial is None:
            return "verified"
        return "verified in part: the original does not run here; sites, types and shapes were compared"

    def _headline(self) -> str:
        parts = (self.sparsity, self.dequantized, self.attention_precision)
        changes = [part.headline for part in parts if part is not None]
        # What changes outputs comes first.
        sections = sorted(self.sections.values(), key=lambda s: not s.changes_outputs)
        return ", ".join(h for h in (*changes, *(s.headline(self.dry_run) for s in sections)) if h)

    @property
    def nothing_to_do(self) -> str:
        """Why nothing is replaced, by the sections that found candidates; else what no section found."""
        if self.optimized_before:
            held = ", ".join(f"{count} {op}" for op, count in sorted(self.optimized_before.items()))
            return f"the model was optimized before (it has {held}); give the one that it was made from"
        sections = self.sections.values()
        reasons = [s.nothing_to_do() for s in sections]
        return ", ".join(filter(None, reasons if any(reasons) else (s.nothing_found() for s in sections)))

    def explain(self, pattern: str) -> str:
        """How far candidates got: a line for each step that they passed, and the reason where they stopped.

        Args:
            pattern: which candidates; ``*``: all attention, with a KV cache and without.
        """
        sections = self.sections.values()
        if pattern == EVERY_ATTENTION:
            explained = [s for s in sections if s.is_explained_by_default]
        else:
            owner = owner_of(pattern, [s.names for s in sections])
            explained = [s for s in sections if s.names is owner]
        return "\n".join(
            shown(line) for s in explained for line in s.explain_rows(pattern.removeprefix(s.names.prefix))
        )

    def _verification_lines(self) -> list[str]:
        if self.verification is None:
            return ["not verified"] if self.output and not self.copied else []
        forms = [s.verified_form for s in self.sections.values() if s.changes_outputs and s.verified_form]
        return describe_verification(self.verification, forms)


def describe_registration(library: str) -> str:
    """How a session gets the plugin library of this path, for the end of a report."""
    call = f"options.register_custom_ops_library({library!r})"
    return f"register it with the session's options: {call}, or stof.register(options)"
