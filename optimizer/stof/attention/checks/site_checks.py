# SPDX-License-Identifier: Apache-2.0
"""Attention sites before verification: query, key, value and masks are captured where they enter a site.

The site is computed in fp64 from the captured tensors, and the emitted op's error is held against that of the original's
own nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import onnx
from onnx import helper

from stof.arguments.precisions import EightBits
from stof.attention.checks.eight_bit_error import EightBitErrors, measure_eight_bits
from stof.attention.checks.rounded_comparison import compare_rounded_site
from stof.attention.checks.site_comparison import (
    OperatorCall,
    compare_site,
    heads_in_layout,
    round_to_site_type,
    scores_shape,
)
from stof.attention.emit import Rewrite, parts_of
from stof.attention.function_body import OP
from stof.attention.quantized.function_body import QUANTIZED_OP
from stof.attention.relative_terms.tables import compute_table
from stof.attention.subgraphs import Scope, emit_scopes, graph_at
from stof.errors import VerifyError
from stof.execution.case import Case, Counts, Padding
from stof.execution.inputs import InputMaker
from stof.execution.narrow_inputs import InputNarrower
from stof.execution.run_limits import LimitReached
from stof.execution.session_process import RuntimeFailure
from stof.graph.node_fields import plain_attributes_of
from stof.mask.check.run_masks import tensors_by_role
from stof.mask.empty_rows.weaker_rows import number_rows
from stof.mask.evaluate import evaluate_mask
from stof.mask.expression import MaskExpression
from stof.mask.relative_roles import RELATIVE_BIAS_FACTOR
from stof.mask.site import AttentionSite, EmptyRows, Layout, MaskTerm, TermKind
from stof.verification.fp64_reference import compute_in_fp64
from stof.verification.model_inputs import BATCH_WITH_ALL_PADDING, ModelInputs
from stof.verification.perturb import Noisy
from stof.verification.result import Comparison
from stof.verification.site_checks import Run, SiteChecks, Tensors

_LONGEST = 700


def cases(expressions: Sequence[MaskExpression], tokens: float = np.inf, last: int = 2) -> list[Case]:
    """Sets of inputs: lengths below and above every window, odd ones, batch 2 with padding on either side.

    The first and the last always run, others as far as time allows; long ones of batch 2 become batch 1 where they have more
    than so many ``tokens``. The last case has ``last`` rows.
    """
    numbers = [n for e in expressions for n in e.literals]
    # Inputs that are longer than a stored table do not run.
    default = 0 if any(e.tables for e in expressions) else 16
    most = max([n for n in numbers if n <= _LONGEST - 60], default=default)
    above = most + 37 if (most + 37) % 2 else most + 38
    batch = 2 if 2 * above <= tokens else 1
    return [
        Case(batch, above, Padding.LEFT),
        Case(batch, above + 6, Padding.RIGHT),
        Case(1, max(3, most // 2), Padding.NONE),
        Case(1, above + 11, Padding.NONE),
        Case(last, 9, Padding.RIGHT),
    ]


class AttentionChecks(SiteChecks):
    """The sites of a model that became StofAttention.

    Args:
        scopes: the main graph, with the original and its working copy, and subgraphs with sites.
        rewrites: what was replaced.
    """

    def __init__(self, scopes: Sequence[Scope], rewrites: Sequence[Rewrite]) -> None:
        self.scopes = scopes
        self.working = scopes[0].working.model
        self.symbolic = scopes[0].symbolic
        self.rewrites = rewrites
        self.sites = tuple(r.site.name for r in rewrites)
        self.types = frozenset(r.site.dtype for r in rewrites)
        added = frozenset(t.tensor for r in rewrites for t in r.mask.by_data if t.kind is TermKind.ADD)
        read = tensors_by_role((r.site, r.mask) for r in rewrites)
        fused = scopes[0].working.base.graph
        scores = [r.site.dims for r in scopes[0].rewrites(rewrites)] or None  # softmaxes of others state no lengths
        self.inputs = InputMaker(self.working, self.symbolic, *read, added=added, fused=fused, scores=scores)
        self.may_carry_nan = any(r.mask.operands or r.mask.by_data for r in rewrites)

    def model_inputs(self) -> ModelInputs:
        return ModelInputs(self.working, self.symbolic, self.inputs, self._cases, self.may_carry_nan)

    def _cases(self, tokens: float) -> list[Case]:
        # A mask of -10000 takes digits from the scores of a row that is all padding, which the operator leaves them.
        soft = any(_absorbs_scores(r) for r in self.rewrites)
        ignores_rows = any(r.ignores_empty_rows for r in self.rewrites)
        run_cases = cases([r.mask.expression for r in self.rewrites], tokens, 2 if soft else BATCH_WITH_ALL_PADDING)
        if self.inputs.pads or self.inputs.switches:
            run_cases.insert(-1, Case(3, run_cases[-1].length + 2, Padding.HOLES))
        if self.inputs.counts and not soft and not ignores_rows:
            *others, short = run_cases
            unusual = [Case(3, short.length, Padding.LEFT, counts=c) for c in (Counts.NEGATIVE, Counts.BEYOND)]
            run_cases = [*others, *unusual, replace(short, counts=Counts.NONE)]
        # NaN of queries without a key spreads further in the original. A case without such queries compares what it hides.
        if self.may_carry_nan and any(r.mask.empty_rows is EmptyRows.NAN for r in self.rewrites):
            run_cases.insert(-1, Case(2, run_cases[-1].length, Padding.LEAST))
        if ignores_rows:
            # Padding is what makes rows without keys; what follows from those of any site is not to be compared.
            run_cases = [Case(c.batch, c.length, Padding.NONE) for c in run_cases]
        return run_cases

    def tensors(self) -> list[str]:
        return self._tensors(self.scopes[0])

    def compare(self, emitted: onnx.ModelProto, captured: Mapping[str, np.ndarray]) -> Iterator[Comparison]:
        return self._compare(self.scopes[0], emitted, captured)

    def compare_subgraphs(self, emitted: onnx.ModelProto, case: Case, run: Run) -> Iterator[Comparison]:
        for scope in self.scopes[1:]:
            if scope.rewrites(self.rewrites):
                yield from self._compare_inside(scope, emitted, case, run)

    def _compare_inside(self, scope: Scope, emitted: onnx.ModelProto, case: Case, run: Run) -> Iterator[Comparison]:
        """The sites of a subgraph, whether an input leads into it or not."""
        some = scope.rewrites(self.rewrites)
        model = onnx.ModelProto()
        model.CopyFrom(scope.working.model)
        del model.graph.output[:]
        wanted = self._tensors(scope)
        for name in wanted:
            model.graph.output.append(helper.make_tensor_value_info(name, scope.symbolic.dtype(name), None))
        try:
            maker = InputMaker(scope.working.model, scope.symbolic, *tensors_by_role((r.site, r.mask) for r in some))
            captured = _run_redrawn(maker, case, model, partial(run, model, wanted))
        except (VerifyError, LimitReached):
            raise
        except Exception as error:  # whatever the runtime raises, and inputs that cannot be drawn
            # The original's own nodes do not run: that is no fault of a site.
            detail = f"the {scope.description} cannot be run by itself: {error}"
            for name in (r.site.name for r in some):
                yield Comparison(f"site {name!r}", 0.0, 0.0, True, name, detail, comparable=False)
            return
        yield from self._compare(scope, emitted, captured)

    def cores(self) -> list[Sequence[str]]:
        return [r.site.nodes for r in self.scopes[0].rewrites(self.rewrites)]

    def rounding_variants(self, working: onnx.ModelProto, dtype: Callable[[str], int]) -> list[onnx.ModelProto]:
        soft = [r.site for r in self.scopes[0].rewrites(self.rewrites) if _absorbs(r)]
        exact = compute_in_fp64(working, [s.nodes for s in soft], dtype) if soft else None
        return [exact] if exact else []

    def rounding_errors(self, captured: Mapping[str, np.ndarray]) -> dict[str, Noisy]:
        noisy = {}
        for site in (r.site for r in self.rewrites):
            if site.roundings is not None:  # what is rounded may be off in its last places, and then by a step
                noisy.update({source: Noisy(site.dtype, 1, 0.0) for source in site.roundings.sources})
                continue
            channels = site.value_head_size * (site.num_heads if site.output_layout is Layout.BSN else 1)
            output = captured.get(site.output)
            largest = 1.0 if output is None else float(np.abs(output[np.isfinite(output)]).max(initial=0.0))
            perm = site.output_perm
            behind = len(perm) - 1 - perm.index(len(perm) - 1) if perm else 0
            noisy[site.output] = Noisy(site.dtype, channels, largest, behind)
        return noisy

    def outputs(self) -> dict[str, list[str]]:
        return {r.site.name: [r.site.output] for r in self.rewrites}

    def emit(self, sites: Sequence[str]) -> onnx.ModelProto:
        return emit_scopes(list(self.scopes), [r for r in self.rewrites if r.site.name in set(sites)])

    def _tensors(self, scope: Scope) -> list[str]:
        tensors: list[str] = []
        initializers = {t.name for t in scope.working.base.graph.initializer}
        inputs = {i.name for i in scope.working.base.graph.input} - initializers
        # Initializers among these are asked of the runtime, too: their data may be in another file.
        heads: list[str] = []
        for rewrite in scope.rewrites(self.rewrites):
            site = rewrite.site
            heads += [site.query.tensor, site.key.tensor, site.value.tensor]
            tensors += [site.output]
            tensors += [t.tensor for t in site.terms] + ([site.sink] if site.sink else [])
            tensors += [] if site.added_values is None else [site.added_values.tensor]
            tensors += [site.query_factor[1]] if site.query_factor is not None else []
            tensors += [] if site.roundings is None else site.roundings.tensors
            tensors += [o.tensor for o in rewrite.mask.operands]
            tensors += [t.table.tensor for t in rewrite.mask.relative_terms if t.table.tensor]
            factor = rewrite.mask.relative_factor
            tensors += [] if factor is None else [factor.tensor]
        drawn = [n for n in tensors if n not in initializers]
        return [n for n in dict.fromkeys([*heads, *drawn]) if n not in inputs]

    def measure_eight_bits(
        self,
        emitted: onnx.ModelProto,
        captured: Mapping[str, np.ndarray],
        precisions: Sequence[EightBits],
        names: Collection[str],
    ) -> Iterator[tuple[Rewrite, EightBitErrors]]:
        """The errors of some sites of the main graph with 8-bit operands, by a model of the kernels.

        Args:
            emitted: the model with the nodes.
            captured: values of :meth:`tensors` and of the model's inputs.
            precisions: those to measure.
            names: of the sites.
        """
        scope = self.scopes[0]
        rewrites = [r for r in scope.rewrites(self.rewrites) if r.site.name in names]
        stored = _read_constants(emitted.graph, scope.working.base.graph, _stored_tensors(rewrites))
        arrays = {**stored, **captured}
        for rewrite in rewrites:
            site = rewrite.site
            operands = (site.query.tensor, site.key.tensor, site.value.tensor)
            read = [t.tensor for t in site.terms] + ([site.sink] if site.sink and not site.sink_values else [])
            if all(n in arrays for n in (*operands, *read)):
                rounded = {n: round_to_site_type(arrays[n], site.dtype) for n in operands}
                yield rewrite, measure_eight_bits(rewrite, {**arrays, **rounded}, precisions)

    def _compare(
        self, scope: Scope, emitted: onnx.ModelProto, captured: Mapping[str, np.ndarray]
    ) -> Iterator[Comparison]:
        graph = graph_at(emitted, scope.path)
        rewrites = scope.rewrites(self.rewrites)
        writers = {o: n for n in graph.node for o in n.output}
        arrays = {**_read_constants(graph, scope.working.base.graph, _stored_tensors(rewrites)), **captured}
        for rewrite in rewrites:
            site = rewrite.site
            nodes = _nodes_of(writers, site.output)
            masks = [part.mask for part in parts_of(rewrite)]
            texts = [str(plain_attributes_of(node).get("mask", "")) for node in nodes]
            if texts != [m.expression.text for m in masks]:
                # Windows longer than any input that is tried show nowhere else.
                detail = f"the masks of its nodes are {', '.join(map(repr, texts))}"
                yield Comparison(f"site {site.name!r}", np.inf, 0.0, False, site.name, detail)
                continue
            rows = _row_numbers(rewrite, arrays)
            for node, mask in zip(nodes, masks, strict=True):
                input_names = dict(
                    zip(str(plain_attributes_of(node)["operands"]).split(), node.input[3:], strict=False)
                )
                if site.sink is not None and site.sink in arrays:  # the emitted graph may reshape it
                    arrays[input_names["sink"]] = arrays[site.sink].reshape(-1)
                for operand in mask.operands:  # likewise
                    input_name = input_names[operand.role]
                    if input_name not in arrays and operand.tensor in arrays:
                        laid = operand.prepare(arrays[operand.tensor])
                        arrays[input_name] = laid if operand.role == "pad" else laid.astype(np.int64)
                if (
                    mask.bias
                    and input_names["bias"] not in arrays
                    and (total := _sum_bias(site, mask.bias, arrays)) is not None
                ):
                    arrays[input_names["bias"]] = total
                factor = mask.relative_factor
                if factor is not None and factor.tensor in arrays:
                    arrays[input_names[RELATIVE_BIAS_FACTOR]] = factor.lay_out(arrays[factor.tensor], site.num_heads)
                for relative in mask.relative_terms:
                    if input_names[relative.role] not in arrays and relative.table.tensor in arrays:
                        table = compute_table(relative, arrays[relative.table.tensor], *scores_shape(site, arrays)[2:])
                        arrays[input_names[relative.role]] = table
                if rows is not None and rewrite.mask.weaker is not None and "segment_q" in input_names:
                    arrays[input_names["segment_q"]] = rows
            if not all(n in arrays for node in nodes for n in node.input[3:]):
                continue  # an operand that the emitted graph computes itself; the outputs tell
            tensors = (site.query.tensor, site.key.tensor, site.value.tensor)
            if not all(n in arrays for n in (*tensors, site.output)):
                continue  # nodes that nothing here computes
            rounded_arrays = {
                n: round_to_site_type(x, site.dtype) if n in {*tensors, site.output} else x for n, x in arrays.items()
            }
            if site.roundings is not None:
                yield compare_rounded_site(site, nodes, arrays, arrays[site.output])
                continue
            second = None if rows is None else rows > 0
            calls = [
                OperatorCall(node, [*tensors, *node.input[3:]], second if i else None) for i, node in enumerate(nodes)
            ]
            yield compare_site(site, calls, rounded_arrays, arrays[site.output], rewrite.ignores_empty_rows)


def _stored_tensors(rewrites: Sequence[Rewrite]) -> set[str | None]:
    """What sites read besides query, key and value, and may be stored in the graph."""
    read: set[str | None] = set()
    for rewrite in rewrites:
        site = rewrite.site
        read |= {term.tensor for term in site.terms} | {site.sink}
        read |= {term.table.tensor for term in rewrite.mask.relative_terms}
        read |= set() if site.roundings is None else set(site.roundings.tensors)
        read |= set() if site.query_factor is None else {site.query_factor[1]}
    return read


def _read_constants(emitted: onnx.GraphProto, base: onnx.GraphProto, names: set[str | None]) -> dict[str, np.ndarray]:
    """The initializers that the rewrite made, and those of ``names`` in the graph before it."""
    made = [t for t in emitted.initializer if t.name.startswith("stof_")]
    kept = [t for t in base.initializer if t.name in names]
    return {
        t.name: onnx.numpy_helper.to_array(t) for t in (*made, *kept) if t.data_location != onnx.TensorProto.EXTERNAL
    }


def _sum_bias(site: AttentionSite, terms: Sequence[MaskTerm], arrays: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """The bias of a site that the emitted graph makes of several tensors or in other axes; None where it is not just a sum."""
    if site.floored or any(t.kind is not TermKind.ADD or t.tensor not in arrays for t in terms):
        return None
    sizes = scores_shape(site, arrays)
    total = np.zeros((1, 1, 1, 1), np.float32)
    with np.errstate(over="ignore"):  # the lowest number twice is -inf in the graph, too
        for term in terms:
            total = total + term.spread(arrays[term.tensor], sizes).astype(np.float32) * np.float32(term.scale)
    return total


def _nodes_of(writers: Mapping[str, onnx.NodeProto], output: str) -> list[onnx.NodeProto]:
    """The operator's nodes that a site became, behind conversions of its layout: two where one computes fully masked rows."""
    node = writers[output]
    while node.op_type not in (OP, QUANTIZED_OP, "Add", "Where"):
        node = writers[node.input[0]]
    return [node] if node.op_type in (OP, QUANTIZED_OP) else [writers[n] for n in node.input[-2:]]


def _row_numbers(rewrite: Rewrite, arrays: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """Which of its masks each row of a site attends by; None where it has one, or what they read is not known."""
    site, mask = rewrite.site, rewrite.mask
    if mask.weaker is None or not all(o.tensor in arrays for o in mask.operands):
        return None
    query, key = (
        heads_in_layout(o.lay_out(arrays[o.tensor]), o.layout, n)
        for o, n in ((site.query, site.num_heads), (site.key, site.kv_num_heads))
    )
    shape = (query.shape[0], 1, query.shape[2], key.shape[2])
    expressions = (mask.expression, *mask.weaker.expressions[:-1])
    return number_rows([evaluate_mask(site, replace(mask, expression=e), arrays, shape)[0] for e in expressions])


def _run_redrawn(maker: InputMaker, case: Case, model: onnx.ModelProto, run: Callable[[Tensors], Tensors]) -> Tensors:
    """The tensors of a run, whose inputs are drawn otherwise as long as the original refuses them.

    Args:
        maker: draws the inputs.
        case: their sizes.
        model: the one that runs.
        run: gives its inputs and outputs.
    """
    narrower = InputNarrower(maker)
    while True:
        feed = maker.draw(case, np.random.default_rng(0))
        try:
            return run(feed)
        except RuntimeFailure as error:
            if not narrower.narrow(model, str(error), case, feed):
                raise


def _absorbs(rewrite: Rewrite) -> bool:
    """Whether large finite numbers may take digits from the scores of a whole row: the mask's own, or a caller's."""
    return _absorbs_scores(rewrite) or any(t.kind is TermKind.ADD for t in rewrite.mask.by_data)


def _absorbs_scores(rewrite: Rewrite) -> bool:
    """The same for the mask's own numbers."""
    weaker = rewrite.mask.weaker
    return rewrite.mask.empty_rows is EmptyRows.ALL or (weaker is not None and weaker.keeps_scores)
