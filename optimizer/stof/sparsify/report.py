# SPDX-License-Identifier: Apache-2.0
"""What the report says of --sparsify: the pattern of each attention, and by how much outputs change."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from stof.arguments.threshold_kinds import KINDS, ThresholdKind
from stof.prompts.loss import Loss
from stof.sparsify.measure import PatternFacts
from stof.sparsify.pages_report import PagesReport
from stof.sparsify.patterns import Pattern
from stof.sparsify.threshold_report import ThresholdReport, number_ranges

_NO_INPUT = "no operator took it, and PagedAttention has no input for a pattern"


@dataclass(frozen=True)
class SparsifiedSite:
    """An attention that --sparsify could be for.

    Attributes:
        site: its name.
        layer: its index in the order of the graph.
        sparsified: whether it has a pattern now.
        reason: why it is as before; empty where it has a pattern.
        pattern: the pattern's label.
        mask: the whole mask expression.
        length: tokens of a prompt that densities are of.
        density: allowed pairs over causal ones; over all pairs where the pattern is not causal.
        read_density: the same for keys that some query head of a group attends: what is read.
        is_per_kv_head: whether the query heads of each group attend the same keys.
        is_cache_efficient: whether a key that one query drops is attended by no later one.
        is_causal: whether the pattern is one of causal attention; else it is bidirectional.
        is_by_bias: no operator took it, so that a bias forbids pairs, and every pair is computed.
        needs_right_padding: sequences are padded, and positions count columns of the scores, not tokens.
        needs_operator: the attention stays dense where no operator takes it, since its node has no input for a pattern.
    """

    site: str
    layer: int
    sparsified: bool
    reason: str = ""
    pattern: str = ""
    mask: str = ""
    length: int = 0
    density: float = 1.0
    read_density: float = 1.0
    is_per_kv_head: bool = True
    is_cache_efficient: bool = True
    is_causal: bool = True
    is_by_bias: bool = False
    needs_right_padding: bool = False
    needs_operator: bool = False

    @classmethod
    def of(
        cls, site: str, layer: int, pattern: Pattern, facts: PatternFacts, *, needs_right_padding: bool = False
    ) -> SparsifiedSite:
        """The row of an attention that has a pattern."""
        row = cls(site, layer, True, "", pattern.label, pattern.mask.text, **asdict(facts))
        return replace(row, needs_right_padding=needs_right_padding)


@dataclass
class SparsityReport:
    """What --sparsify did.

    Attributes:
        spec: the text of the option.
        rows: a row for each attention that it could be for.
        loss: measured on whole prompts; None where there were none.
        decode_loss: measured on single tokens over the cache; None where there is none.
        has_patterns: whether the option names a pattern, not thresholds or pages alone.
        threshold_report: what thresholds do; None: the option names none.
        pages: what choose pages does; None: likewise.
        unverified: why the model with run-time masks was not compared with the verified one; empty where it was, and where
            nothing is verified.
    """

    spec: str
    rows: list[SparsifiedSite] = field(default_factory=list)
    loss: Loss | None = None
    decode_loss: Loss | None = None
    has_patterns: bool = True
    threshold_report: ThresholdReport | None = None
    pages: PagesReport | None = None
    unverified: str = ""

    @property
    def changes_outputs(self) -> bool:
        """Whether an attention has a pattern or a threshold, or chooses pages."""
        has_thresholds = self.threshold_report is not None and self.threshold_report.skipping > 0
        return self.sparsified > 0 or self.chooses_pages or has_thresholds

    @property
    def chooses_pages(self) -> bool:
        """Whether an attention chooses pages."""
        return self.pages is not None and self.pages.choosing > 0

    @property
    def thresholds(self) -> Mapping[ThresholdKind, Mapping[str, float]]:
        """Those of each kind by the names of operators; empty without any, and where one is not calibrated yet."""
        return {} if self.threshold_report is None else self.threshold_report.by_plan()

    @property
    def sparsified(self) -> int:
        """How many attentions have a pattern."""
        return sum(r.sparsified for r in self.rows)

    @property
    def headline(self) -> str:
        """For the report's first line."""
        if not self.changes_outputs:
            return "--sparsify changes nothing"
        pattern = f"puts a pattern on {self.sparsified} of {len(self.rows)} attentions" if self.sparsified else ""
        skipped = "" if self.threshold_report is None else self.threshold_report.headline
        pages = "" if self.pages is None else self.pages.headline
        return f"OUTPUTS CHANGE: --sparsify {' and '.join(filter(None, (pattern, skipped, pages)))}"

    def mark_written(self, replaced: Collection[str], reason: str) -> None:
        """Says which attentions an operator took.

        Args:
            replaced: their names. None: no model with patterns is written.
            reason: for attentions without a pattern then.
        """
        if not replaced and self.threshold_report is not None:
            self.threshold_report.mark_unwritten(reason)
        if not replaced and self.pages is not None:
            self.pages.mark_unwritten(reason)
        if not replaced:
            self.rows = [SparsifiedSite(r.site, r.layer, False, reason) if r.sparsified else r for r in self.rows]
        self.rows = [
            SparsifiedSite(r.site, r.layer, False, _NO_INPUT) if r.needs_operator and r.site not in replaced else r
            for r in self.rows
        ]
        self.rows = [replace(r, is_by_bias=r.sparsified and r.site not in replaced) for r in self.rows]

    def lines(self) -> list[str]:
        """A line for each kind of row, and the loss."""
        groups: dict[SparsifiedSite, list[SparsifiedSite]] = defaultdict(list)
        for row in self.rows:
            groups[_without_place(row)].append(row)
        report_lines = [line for group in groups.values() for line in _group_lines(group)]
        if not self.rows and self.has_patterns:
            report_lines = ["  the model has no attention that takes the pattern"]
        if self.threshold_report is not None:
            report_lines += self.threshold_report.lines()
        if self.pages is not None:
            report_lines += self.pages.lines()
        if self.unverified:
            report_lines.append(f"NOT VERIFIED with STOF_SKIP_SCORES=0: {self.unverified}")
        if self.changes_outputs:
            measured = [line for lines in self._loss_lines() for line in lines]
            measured += [] if self.threshold_report is None else self.threshold_report.loss_lines()
            files = "--prompts FILE" if self.threshold_report is None else "--prompts FILE or --inputs FILE"
            report_lines += measured or [f"loss: not measured; {files} measures it"]
        return report_lines

    @property
    def loss_headlines(self) -> list[str]:
        """A line for each loss that was measured."""
        on_inputs = [] if self.threshold_report is None else self.threshold_report.loss_lines()
        return [*(lines[0] for lines in self._loss_lines()), *on_inputs]

    def _loss_lines(self) -> list[list[str]]:
        losses = (("loss", self.loss), ("loss of decoding", self.decode_loss))
        return [loss.lines(what) for what, loss in losses if loss is not None]

    def to_json(self) -> dict[str, Any]:
        """Every fact by its key."""
        return {
            "spec": self.spec,
            "outputs_change": self.changes_outputs,
            "sites": [asdict(row) for row in self.rows],
            "loss": None if self.loss is None else asdict(self.loss),
            "decode_loss": None if self.decode_loss is None else asdict(self.decode_loss),
            **{k.key: None if self.threshold_report is None else self.threshold_report.to_json(k) for k in KINDS},
            "choose_pages": None if self.pages is None else self.pages.to_json(),
            "unverified": self.unverified,
        }


def _without_place(row: SparsifiedSite) -> SparsifiedSite:
    return SparsifiedSite(**{**asdict(row), "site": "", "layer": 0})


def _group_lines(group: list[SparsifiedSite]) -> list[str]:
    first = group[0]
    layers = ", ".join(number_ranges([r.layer for r in group]))
    if not first.sparsified:
        return [f"  dense layer {layers}: {first.reason}"]
    kind = "the causal pairs" if first.is_causal else "all pairs"
    share = f"keeps {100 * first.density:.2f} % of {kind} at {first.length} tokens"
    if first.is_per_kv_head:
        heads = "per KV head"
    else:
        heads = f"heads of a group differ: their union is read, {100 * first.read_density:.2f} %"
    cache = "KV-cache efficient" if first.is_cache_efficient else "not KV-cache efficient: later tokens return to keys"
    cache = cache if first.is_causal else "bidirectional"
    padding = (
        ["        positions count columns of the scores: pad sequences to the right"]
        if first.needs_right_padding
        else []
    )
    bias = ["        every pair is computed, and a bias forbids some: no operator took it"] if first.is_by_bias else []
    return [f"  pattern on layer {layers}: {first.pattern}", f"        {share}; {heads}; {cache}", *padding, *bias]
