# SPDX-License-Identifier: Apache-2.0
"""Unpadding as an op of the pipeline: what lies between embeddings and pooling runs on real tokens alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import onnx

from stof.graph.index import opset_of
from stof.op_parts import LeavesPaddingOut, LeftOut, StatesOutputs
from stof.op_rewrite import Decisions, Job, OpRewrite
from stof.plan import EntryFormat
from stof.selection import NamedCandidate
from stof.symbolic import Symbolic
from stof.unpadding.capacity import with_capacity
from stof.unpadding.emit import emit_regions
from stof.unpadding.estimate import estimate_gains
from stof.unpadding.pad_masks import ATTENTION, QUANTIZED_ATTENTION, may_have_padding
from stof.unpadding.padded_batches import describe_batches
from stof.unpadding.padded_copies import find_uncopied
from stof.unpadding.plan_entry import UnpadPlan, read_unpad_plan
from stof.unpadding.region import MaskResult, UnpaddedRegion
from stof.unpadding.regions import find_regions
from stof.unpadding.report import KEY, NAMES, UnpadReport, UnpadSection
from stof.unpadding.zero_rows import find_missing, with_zero_rows
from stof.verification.padding.padded_batch import PaddedBatch

_OFF = "see --unpad"
_ADDED = "keys whose mask is -10000 or less are padding: assumed that no two scores of a query differ by more than 9000"


@dataclass(frozen=True, eq=False)
class PaddedBatches:
    """The key padding masks of a model, and what can run on real tokens by each.

    Attributes:
        model: the model; its attentions are StofAttention and StofQuantizedAttention nodes.
        symbolic: of the model; None: it has no padded batch.
        results: one for each mask.
        written: the model that is rewritten, with nodes of the same indices.
    """

    model: onnx.ModelProto | None = None
    symbolic: Symbolic | None = None
    results: tuple[MaskResult, ...] = ()
    written: onnx.ModelProto | None = None


@dataclass(frozen=True, eq=False)
class UnpadDecisions(Decisions):
    """The decision for each padded batch of a model."""

    batches: PaddedBatches
    unpadded: UnpadSection
    regions: tuple[UnpaddedRegion, ...] = ()

    @property
    def section(self) -> UnpadSection:
        return self.unpadded

    @property
    def plan(self) -> tuple[UnpadPlan, ...]:
        return tuple(
            UnpadPlan(r.batch, r.replaced, "" if r.replaced else r.reason, r.capacity) for r in self.unpadded.rows
        )

    @property
    def candidates(self) -> tuple[NamedCandidate, ...]:
        return tuple(NamedCandidate(r.batch, r.index) for r in self.unpadded.rows)

    @property
    def has_replaced(self) -> bool:
        return bool(self.regions)

    def undo(self, reason: str) -> UnpadDecisions:
        return replace(self, unpadded=self.unpadded.without(reason), regions=())


class UnpadRewrite(OpRewrite[PaddedBatches, PaddedBatches, Decisions], LeavesPaddingOut, StatesOutputs):
    """Leaves the rows of padding out of everything that computes each token by itself, and of attention."""

    key = KEY
    op_types: frozenset[str] = frozenset()  # the nodes are StofAttention's
    names = NAMES
    plan_format = EntryFormat("padding mask", read_unpad_plan)

    def find(self, job: Job, model: Callable[[], onnx.ModelProto]) -> PaddedBatches:
        if _is_left_out(job):
            return PaddedBatches()
        written = model()
        before = self.describe_attentions(job, written)
        if not any(may_have_padding(n) for n in before.graph.node):
            return PaddedBatches(before)
        with job.step("unpadding"):
            symbolic = job.facts.of(before)
            zero_outputs = job.options.unpad == "on"
            results = tuple(find_regions(before, symbolic, opset_of(before), zero_outputs))
        return PaddedBatches(before, symbolic if results else None, results, written)

    def describe_attentions(self, job: Job, model: onnx.ModelProto) -> onnx.ModelProto:
        """A model with the same nodes, of which those that compute attention are StofAttention and state their masks."""
        return model

    def computed_region(self, graph: onnx.GraphProto, region: UnpaddedRegion) -> UnpaddedRegion:
        """The nodes of a region that compute real tokens alone, where attention may read padded copies."""
        packed = {i for i in region.sites | region.cross_sites if graph.node[i].op_type == ATTENTION}
        return region.with_packed(packed)

    def write(self, batches: PaddedBatches, regions: Iterable[UnpaddedRegion]) -> onnx.ModelProto:
        """A copy of the model in which regions run on real tokens."""
        assert batches.model is not None
        assert batches.symbolic is not None
        computed = [self.computed_region(batches.model.graph, r) for r in regions]
        return emit_regions(batches.model, batches.symbolic, computed)

    def describe(self, job: Job, batches: PaddedBatches) -> PaddedBatches:
        return batches  # a region is frozen, and no kernel chooses by it

    def decide(self, job: Job, described: PaddedBatches) -> Decisions:
        if _is_left_out(job):
            return LeftOut(self, _OFF)
        candidates = [NamedCandidate(r.mask.tensor, i) for i, r in enumerate(described.results)]
        self.check_plan(job, candidates)
        rows: list[UnpadReport] = []
        regions: list[UnpaddedRegion] = []
        for candidate, result in zip(candidates, described.results, strict=True):
            region, model = result.region, described.model
            outputs = () if region is None or model is None else tuple(region.zero_outputs(model.graph))
            reason = result.reason if region is None else ""
            if outputs and region is not None and (missing := find_missing(job.model, region)):
                reason = f"{missing!r} is no tensor of the original, whose rows of padding would become 0"
            gains: tuple[float, ...] = ()
            if region is not None and model is not None and described.symbolic is not None:
                gains = estimate_gains(model, described.symbolic, [self.computed_region(model.graph, region)])
                if not gains and not region.sites:
                    reason = "no matmul computes the keys and values of its attention from tokens"
            if not job.target.packs_sequences:
                reason = f"the kernels for {job.target.name} take padded sequences"
            elif job.target.copies_sequences and region is not None and model is not None:
                reason = reason or find_uncopied(model.graph, region) or _find_loss(job)
            reason = self.choice(job).reason_kept(candidate, reason)
            row = UnpadReport(candidate.name, candidate.index, False, reason, of_attentions=result.attentions)
            if reason or region is None or model is None or described.symbolic is None:
                rows.append(row)
                continue
            region = replace(region, capacity=self._find_capacity(job, candidate.name, region))
            regions.append(region)
            copies = sum(model.graph.node[i].op_type == QUANTIZED_ATTENTION for i in region.sites)
            rest = f"{copies} {QUANTIZED_ATTENTION} read padded copies" if copies else ""
            rows.append(
                replace(
                    row,
                    replaced=True,
                    reason="replaced",
                    nodes=len(region.nodes),
                    attentions=len(region.sites) - copies,
                    keys_only=len(region.cross_sites),
                    # With a capacity the gain is padded rows ÷ capacity, whatever the share of padding.
                    gains=() if region.capacity else gains,
                    zero_outputs=outputs,
                    rest=result.reason or rest,
                    capacity=region.capacity,
                    assumption=_ADDED if region.mask.is_bound else "",
                )
            )
        return UnpadDecisions(described, UnpadSection(rows), tuple(regions))

    def _find_capacity(self, job: Job, name: str, region: UnpaddedRegion) -> int:
        """The capacity that options or a plan want, or the number of rows of the padded batch where that is smaller."""
        entry = self.choice(job).entry_of(name)
        capacity = job.options.unpad_capacity or (entry.capacity if isinstance(entry, UnpadPlan) else 0)
        rows = (region.shape[0] * region.shape[1]).constant
        return capacity if rows is None or not rows else min(capacity, rows)

    def emit(self, job: Job, decided: Decisions) -> onnx.ModelProto:
        assert isinstance(decided, UnpadDecisions)
        with job.step("emit"):
            return self.write(decided.batches, decided.regions)

    def stated_form(self, model: onnx.ModelProto, decided: Decisions) -> onnx.ModelProto:
        assert isinstance(decided, UnpadDecisions)
        before, symbolic = decided.batches.model, decided.batches.symbolic
        if before is None or symbolic is None:
            return model
        changed = [r for r in decided.regions if r.zero_outputs(before.graph)]
        stated = with_zero_rows(model, before, symbolic, changed) if changed else model
        limited = [r for r in decided.regions if r.capacity]
        return with_capacity(stated, before, symbolic, limited) if limited else stated

    def padded_batches(self, decided: Decisions) -> tuple[PaddedBatch, ...]:
        assert isinstance(decided, UnpadDecisions)
        model, symbolic = decided.batches.model, decided.batches.symbolic
        if model is None or symbolic is None:
            return ()
        return describe_batches(model, symbolic, decided.regions)

    def empty_section(self) -> UnpadSection:
        return UnpadSection()


def _find_loss(job: Job) -> str:
    """Why padding stays on a GPU where nobody asked for it to go: nodes around regions cost small batches more than they save."""
    if job.options.unpad == "on" or job.options.unpad_capacity or job.plan is not None:
        return ""
    return f"small batches may become slower on {job.target.name}; --unpad on and --unpad-capacity ask for it"


def _is_left_out(job: Job) -> bool:
    """Whether options or a plan without a word about padding leave all rows in."""
    return job.options.unpad == "off" or (job.plan is not None and KEY not in job.plan.entries)


UNPADDING = UnpadRewrite()
