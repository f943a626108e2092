# SPDX-License-Identifier: Apache-2.0
"""Puts declared patterns on attention without a cache: as a bias that is added to the scores.

Causal patterns are for attention whose mask is ``k <= q``, bidirectional ones for attention without a mask; either may have a
key padding mask.

The ops then find the pattern as a mask of the graph, and what they do not take computes every pair, with the bias.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx
from onnx import TensorProto, numpy_helper

from stof.attention.decide.kernels import kernels_for
from stof.attention.decide.site_decider import SiteDecider
from stof.attention.describe.site_describer import DescribedSite, SiteDescriber
from stof.attention.expand.expanders import make_working_copy
from stof.attention.find import is_softmax
from stof.attention.subgraphs import Scope, find_scopes
from stof.errors import StofError
from stof.graph.index import all_nodes, node_tensors, opset_of, producers
from stof.graph.node_builder import Builder
from stof.graph.protobuf import copy_node, copy_with_nodes
from stof.mask.expression import CAUSAL, PADDING, MaskExpression
from stof.mask.expression_nodes import B, Lookup, Unary
from stof.mask.site import AttentionSite, OperandView, RuntimeOperand
from stof.mask.to_onnx import ScoreSizes, emit_mask
from stof.op_rewrite import Job
from stof.selection import NamedCandidate
from stof.sparsify.bias_nodes import emit_bias, live_nodes
from stof.sparsify.patterns import HeadCounts, Pattern
from stof.sparsify.sparsity import DeclaredPattern

_PREFIX = "stof_pattern_"
_FIRST = Lookup("lengths", (B,))  # the position of each sequence's first token


@dataclass(frozen=True)
class _Padding:
    """The key padding mask of a site: an operand [B or 1, T], its type, and whether it is true for padding."""

    operand: RuntimeOperand
    dtype: int
    is_inverted: bool


@dataclass(frozen=True)
class _Placed:
    """A pattern, and the softmax whose scores get its bias.

    Attributes:
        site: the attention.
        softmax: its output.
        declared: the pattern.
        condition: the pattern, as positions count at the site.
        mask: the site's own one, and the pattern.
        padding: by which positions count from each sequence's first token; None: they count columns of the scores.
    """

    site: AttentionSite
    softmax: str
    declared: DeclaredPattern
    condition: MaskExpression
    mask: MaskExpression
    padding: _Padding | None


def declare_on_sites(job: Job, key: str) -> Job:
    """The job with a model in which the sites that --sparsify names have their pattern.

    Where the model has attention over a KV cache, that alone counts layers, and nothing is done here.

    Args:
        job: the optimization; its ``sparsity`` gets rows and patterns.
        key: of the op, for its selection.

    Raises:
        ArgumentError: when a pattern is one of other layers or heads.
    """
    sparsity = job.sparsity
    if sparsity is None or sparsity.report.rows:
        return job
    main, *inner = find_scopes(make_working_copy(job.model))
    layer = 0
    placed: list[_Placed] = []
    count = sum(len(s.sites) for s in (main, *inner))
    reasons = _Reasons(job, main)
    for scope in (main, *inner):
        for site in scope.sites:
            reason = job.selections[key].reason_left_out(NamedCandidate(site.name, site.index))
            pattern_and_facts = sparsity.pattern_of(layer, count, HeadCounts(site.num_heads, site.kv_num_heads))
            pattern = None if pattern_and_facts is None else pattern_and_facts[0]
            reason = reason or ("it lies in a subgraph" if scope.path else reasons.why_not(site, pattern))
            if reason or pattern_and_facts is None:
                sparsity.keep_dense(site.name, layer, reason or "--sparsify leaves it dense")
            else:
                softmax = reasons.softmax_of(site)
                assert softmax is not None
                declared = DeclaredPattern(*pattern_and_facts, tables={})
                site_mask = reasons.masks[site.name]
                padding = None if declared.pattern.is_of_distances else reasons.padding_of(site, site_mask)
                counts_columns = bool(site_mask.vectors) and padding is None
                sparsity.put(site.name, layer, softmax.output[0], declared, is_padded=counts_columns)
                condition = declared.pattern.condition if padding is None else declared.pattern.count_from(_FIRST)
                placed.append(_Placed(site, softmax.output[0], declared, condition, site_mask & condition, padding))
            layer += 1
    if not placed:
        return job
    model = _add_biases(main.working.expand_for([p.site for p in placed]), placed)
    # Stated masks are checked against the graph, and are shorter than what is recovered of it; they cannot have tables.
    stated = {p.site.name: p.mask.text for p in placed if not p.declared.pattern.tables}
    # A query of padding without a key gives another mixture where biases of mask and pattern add up. Nobody reads it.
    sparsity.ignored_rows.update(p.site.name for p in placed if p.mask.vectors)
    options = replace(job.options, masks={**stated, **job.options.masks})
    return replace(job, model=model, options=options)


class _Reasons:
    """Why sites of the main graph take no pattern."""

    def __init__(self, job: Job, scope: Scope) -> None:
        self.masks: dict[str, MaskExpression] = {}  # of sites that take a pattern
        self._symbolic = scope.symbolic
        self._writers = producers(scope.working.model.graph.node)
        options = replace(job.options, tune=0.0)
        self._operands: dict[str, tuple[RuntimeOperand, ...]] = {}  # of the mask of a site
        folder = job.source.parent
        self._describer = SiteDescriber(scope.working.model, scope.symbolic, options, folder=folder)
        self._decider = SiteDecider(options, kernels_for(options, str(job.library.get("cpu_isa", ""))))

    def softmax_of(self, site: AttentionSite) -> onnx.NodeProto | None:
        """The softmax of a site; None where it has several."""
        softmaxes = [n for name in site.nodes if (n := self._writers.get(name)) is not None and is_softmax(n)]
        return softmaxes[0] if len(softmaxes) == 1 else None

    def why_not(self, site: AttentionSite, pattern: Pattern | None) -> str:
        """Empty where the mask is that of the pattern's kind, ``k <= q`` or none, and padding at most."""
        softmax = self.softmax_of(site)
        shape = None if softmax is None else self._symbolic.shape(softmax.input[0])
        if softmax is None or shape is None or tuple(shape) != site.dims:
            return "its scores are no tensor [B, H, S, T] in front of a softmax"
        try:
            described = self._describer.describe(site)
            decided = self._decider.decide(described)
            row = decided.report
        except StofError as error:
            return str(error)
        if pattern is not None and not pattern.is_causal:
            return self._why_not_bidirectional(site, described, pattern)
        mask = MaskExpression.parse(row.mask) if row.mask else None
        if mask is None or mask.without_padding() != CAUSAL:
            detail = f": {row.mask}" if row.mask else "" if not row.reason else f": {row.reason}"
            return f"its mask is no plain causal one{detail}"
        if mask.vectors and pattern is not None and pattern.reads_run_length:
            return f"its sequences are padded, and {pattern.label!r} needs to know where each of them ends"
        self.masks[site.name] = mask
        if decided.rewrite is not None:
            self._operands[site.name] = decided.rewrite.mask.operands
        return ""

    def _why_not_bidirectional(self, site: AttentionSite, described: DescribedSite, pattern: Pattern) -> str:
        lifted = described.mask
        if lifted is None or not lifted.expression.without_padding().allows_all:
            detail = described.reason if lifted is None else lifted.expression.text
            return f"its mask forbids pairs{f': {detail}' if detail else ''}; {pattern.label!r} is for attention without a mask"
        if site.dims[2] != site.dims[3]:
            return f"its queries and keys may be of two sequences; {pattern.label!r} is for self-attention"
        self.masks[site.name] = lifted.expression
        self._operands[site.name] = lifted.operands
        return ""

    def padding_of(self, site: AttentionSite, mask: MaskExpression) -> _Padding | None:
        """The key padding mask of a site with this mask; None where it has none, or no operator takes the site."""
        operand = next((o for o in self._operands.get(site.name, ()) if o.role == "pad"), None)
        words = {PADDING.root: False, Unary("not", PADDING.root): True}
        negations = [words[c] for c in mask.conjuncts if c in words]
        if operand is None or len(negations) != 1 or operand.at is not None or operand.view is OperandView.FLAT:
            return None
        return _Padding(operand, self._symbolic.dtype(operand.tensor), negations[0])


def _add_biases(model: onnx.ModelProto, placed: list[_Placed]) -> onnx.ModelProto:
    """A copy of a model in which the scores of softmaxes get the biases of patterns."""
    by_softmax = {p.softmax: p for p in placed}
    taken = {t for n in all_nodes(model.graph.node) for t in node_tensors(n)}
    taken |= {t.name for t in model.graph.initializer} | {i.name for i in model.graph.input}
    prefix = _PREFIX
    while any(t.startswith(prefix) for t in taken):
        prefix += "_"
    b = Builder(opset_of(model), prefix)
    tables: dict[tuple[object, ...], str] = {}
    initializers: list[onnx.TensorProto] = []
    biases: dict[tuple[object, ...], str] = {}
    firsts: dict[_Padding, str] = {}
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        placement = by_softmax.get(node.output[0]) if node.output else None
        if placement is None:
            nodes.append(node)
            continue
        start = len(b.nodes)
        pattern, site = placement.declared.pattern, placement.site
        names = {}
        for name, array in pattern.tables.items():
            content = (array.dtype.str, array.shape, array.tobytes())
            if content not in tables:
                tables[content] = f"{prefix}table{len(tables)}"
                initializers.append(numpy_helper.from_array(array, tables[content]))
            names[name] = tables[content]
        dims = tuple(map(str, site.dims if placement.padding else site.dims[2:]))
        key = (pattern.key, dims, site.query_offset, site.dtype, placement.padding)
        if key not in biases:
            if placement.padding is not None and placement.padding not in firsts:
                firsts[placement.padding] = _emit_first(b, placement.padding)
            operands = names if placement.padding is None else {**names, _FIRST.name: firsts[placement.padding]}
            biases[key] = _emit_bias(b, pattern.mask_of(placement.condition), site, node.input[0], operands)
        changed = copy_node(node)
        changed.input[0] = b.add("Add", [node.input[0], biases[key]])
        nodes += [*b.nodes[start:], changed]
    result = copy_with_nodes(model, nodes)
    result.graph.initializer.extend(initializers)
    return result


def _emit_first(b: Builder, padding: _Padding) -> str:
    """Nodes that compute the position [B or 1] of each sequence's first token."""
    operand = padding.operand
    real = operand.tensor
    if padding.dtype != TensorProto.BOOL:
        real = b.add("Cast", [real], to=TensorProto.BOOL)
    if operand.view is OperandView.TURNED:
        real = b.add("Transpose", [real], perm=[1, 0])
    elif operand.view is not OperandView.SAME:
        real = b.add("Flatten", [real], axis=0 if operand.view is OperandView.ROW else 1)
    real = b.add("Not", [real]) if padding.is_inverted else real
    return b.add("ArgMax", [b.add("Cast", [real], to=TensorProto.FLOAT)], axis=1, keepdims=0)


def _emit_bias(b: Builder, mask: MaskExpression, site: AttentionSite, scores: str, operands: dict[str, str]) -> str:
    """Nodes that compute the bias [B or 1, H or 1, S, T] of a mask, where the scores have the name ``scores``."""
    start = len(b.nodes)
    shape = b.add("Shape", [scores])
    queries, keys = (b.add("Gather", [shape, b.constant(axis)], axis=0) for axis in (2, 3))
    past = b.add("Sub", [keys, queries]) if site.query_offset else b.constant(0)
    batch = b.add("Gather", [shape, b.constant(0)], axis=0) if _FIRST.name in operands else b.constant(1)
    sizes = ScoreSizes(B=batch, H=b.constant(site.num_heads), S=queries, T=keys, P=past)
    allowed = emit_mask(b, mask.root, sizes, operands)
    bias = emit_bias(b, allowed, site.dtype)
    b.nodes[start:] = live_nodes(b.nodes[start:], bias)
    return bias
