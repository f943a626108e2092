# SPDX-License-Identifier: Apache-2.0
"""Finds attention by data flow from each softmax in both directions. Names of nodes and tensors play no role."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import onnx

from stof.attention.edit.shape_sources import ShapeSources
from stof.attention.layouts import OperandLayout, layout_candidates
from stof.attention.limits import element_types, largest_head_size
from stof.attention.other_softmaxes import explain_other_softmax, name_default_inputs
from stof.attention.quantized.core_form import NOTHING_ROUNDED, RoundedForms
from stof.attention.quantized.score_roundings import RoundedScores, RoundedWay, RoundingError, with_roundings
from stof.attention.scores import Scores, ScoreWalk
from stof.attention.sinks import Sink, find_sink
from stof.attention.softmax_forms import SoftmaxForm, match_softmax
from stof.attention.split_mask_sums import split_term
from stof.attention.weights import OutputCandidate, ScoreFacts, WeightPath, WeightWalk
from stof.errors import UnsupportedError
from stof.graph.index import DOMAIN, GraphIndex, all_nodes, describe, is_standard, needed_tensors
from stof.graph.names import FreshNames
from stof.mask.score_view import name_parts
from stof.mask.site import AttentionSite, Finding, MaskTerm, TermKind
from stof.symbolic import Int, Symbolic, integer
from stof.symbolic.axis_atoms import ONE, size_of
from stof.symbolic.tensor import Shape


@dataclass(frozen=True)
class _ChosenLayouts:
    query: OperandLayout
    key: OperandLayout
    value: OperandLayout
    output: OutputCandidate


def find_sites(
    model: onnx.ModelProto,
    symbolic: Symbolic,
    materialized: frozenset[str] = frozenset(),
    fused_nodes: Mapping[str, int] | None = None,
    *,
    names: FreshNames | None = None,
    first_index: int = 0,
    softmaxes: frozenset[str] | None = None,
    rounded: RoundedForms = NOTHING_ROUNDED,
) -> tuple[list[AttentionSite], list[Finding]]:
    """Finds the attention sites of the main graph; for every other softmax the finding says what is in the way.

    Args:
        model: without external data.
        symbolic: shapes and values of the model's tensors.
        materialized: tensors that the graph computes whatever is replaced: no operand is read from behind them.
        fused_nodes: for each tensor that stands for a part of an expanded fused node, the index of that node. A site's
            result does not reach into another fused node.
        names: of the sites of other graphs; those of this one are added.
        first_index: the index of the first site.
        softmaxes: outputs of the softmaxes to search from; None: all, with those in local functions that were not inlined.
        rounded: what became of quantized attention.
    """
    index = GraphIndex(model.graph, materialized, fused_nodes)
    weight_walk = WeightWalk(index, symbolic, ShapeSources(model, symbolic))
    sites: list[AttentionSite] = []
    findings: list[Finding] = []
    names = FreshNames() if names is None else names
    read = needed_tensors(model.graph)
    forms = [softmax for n in model.graph.node if (softmax := match_softmax(index, symbolic, n)) is not None]
    for number, softmax in enumerate(forms):
        weights = softmax.node.output[0]
        if softmaxes is not None and weights not in softmaxes:
            continue
        name = names.make(softmax.node.name or f"attention_{number}")
        try:
            found = _match_site(index, symbolic, weight_walk, softmax, name, first_index + len(sites))
            site = with_roundings(index, symbolic, *found, rounded.unrounded_masks)
            if site.output not in read:
                raise UnsupportedError(f"no output of the graph depends on its result {site.output!r}")
            sites.append(site)
            # Later sites must read this result, or nothing would need the node that writes it.
            index.materialized.add(site.output)
        except UnsupportedError as error:
            reason = _explain_rounded(rounded, error, weights) or explain_other_softmax(index, symbolic, softmax.node)
            reason = reason or f"{error}{name_default_inputs(index, softmax.node)}"
            findings.append(Finding(name, False, reason, {"softmax": weights}))
    findings += _find_coded_softmaxes(model, rounded, names, softmaxes)
    if softmaxes is None:
        findings.extend(_find_in_functions(model, names))
    return sites, findings


def _explain_rounded(rounded: RoundedForms, error: UnsupportedError, softmax: str) -> str:
    """Why attention that is rounded to 8 bits stays; empty where that is not what is in the way."""
    if isinstance(error, RoundingError):
        return str(error)
    refused = rounded.refused.get(softmax, "")
    return str(RoundingError(refused)) if refused else ""


def is_coded_softmax(node: onnx.NodeProto) -> bool:
    """Whether a node is a softmax of codes."""
    return node.op_type == "QLinearSoftmax" and node.domain == "com.microsoft"


def _find_coded_softmaxes(
    model: onnx.ModelProto, rounded: RoundedForms, names: FreshNames, softmaxes: frozenset[str] | None
) -> list[Finding]:
    """Findings for softmaxes of codes that are in no form in which sites are searched."""
    findings = []
    for node in filter(is_coded_softmax, model.graph.node):
        if softmaxes is not None and node.output[0] not in softmaxes:
            continue
        refused = rounded.refused.get(node.output[0], "it is no attention whose query, key and value are codes")
        name = names.make(node.name or f"softmax of {node.output[0]}")
        findings.append(Finding(name, False, str(RoundingError(refused)), {"softmax": node.output[0]}))
    return findings


def _find_in_functions(model: onnx.ModelProto, names: FreshNames) -> list[Finding]:
    """Findings for the softmaxes in local functions that could not be inlined."""
    findings = []
    for function in (f for f in model.functions if f.domain != DOMAIN):
        where = f"local function {function.domain}::{function.name}"
        for node in all_nodes(function.node):
            if is_softmax(node):
                name = names.make(node.name or f"softmax of {node.output[0]}")
                findings.append(Finding(name, False, f"the softmax is inside {where}, which is not searched"))
    return findings


def is_softmax(node: onnx.NodeProto) -> bool:
    """Whether a node is a softmax of the standard domain."""
    return node.op_type == "Softmax" and is_standard(node)


def _match_site(
    index: GraphIndex, symbolic: Symbolic, weight_walk: WeightWalk, anchor: SoftmaxForm, name: str, number: int
) -> tuple[AttentionSite, RoundedWay]:
    softmax = anchor.node
    sink = find_sink(index, symbolic, softmax)
    start = softmax.input[0] if sink is None else sink.scores
    shape = symbolic.shape(start)
    if shape is None:
        raise UnsupportedError(f"the shape of the scores is unknown{_explain_unknown_shape(index, symbolic, start)}")
    if len(shape) not in (3, 4, 5):
        raise UnsupportedError(f"the scores have {len(shape)} axes, expected batch, heads, queries and keys")
    axis = next((a.i for a in softmax.attribute if a.name == "axis"), -1)
    if axis % len(shape) != len(shape) - 1:
        raise UnsupportedError(f"the softmax runs along axis {axis}, expected the last")
    scores = ScoreWalk(index, symbolic, partial(_match_query_key, index, symbolic)).walk(start)
    rounded = RoundedScores(scores.roundings, scores.factor, len(scores.terms) + (anchor.mask is not None))
    if anchor.mask is not None:
        if sink is not None:
            raise UnsupportedError(
                f"{anchor.mask.tensor!r} makes exponentials 0 that a sink stands beside: where it is 0 for a whole row, the sink "
                "loses its weight, too, and the row is NaN; a mask of the scores, before the sink is joined, makes this plain"
            )
        scores = replace(scores, terms=(anchor.mask, *scores.terms), met=(None, *scores.met))
    scores = replace(scores, nodes=(*anchor.nodes[::-1], *scores.nodes))
    queries, keys = (_prefer_score_axes(shape, layouts) for layouts in _match_query_key(index, symbolic, scores))
    groups = queries[-1].groups
    if groups:
        _check_groups(symbolic, scores.nodes, groups)
        rank = len(symbolic.shape(scores.nodes[-1]) or ())
        scores = replace(scores, terms=tuple(_with_named_parts(t, rank, queries[-1]) for t in scores.terms))
    if len(shape) == 4 or groups:
        scores = replace(scores, terms=tuple(p for t in scores.terms for p in split_term(index, symbolic, t)))
    only_bias = scores.terms[0].tensor if len(scores.terms) == 1 and scores.terms[0].kind is TermKind.ADD else ""
    candidates = _query_key_candidates(scores, queries, keys)
    for queries, keys in candidates:
        kept = (queries[-1].operand.tensor, keys[-1].operand.tensor)
        facts = ScoreFacts(kept, only_bias, sink is not None and sink.first, scores.terms)
        path = weight_walk.walk(softmax, facts, None if sink is None else shape)
        values = _require_layouts(index, symbolic, path.value, "value", path.value_order, grouped=bool(groups))
        values = _prefer_score_axes(shape, values)
        values = [v for v in values if v.batch == keys[-1].batch] or values
        if groups:
            _check_groups(symbolic, path.nodes[:-1], groups)
            if len(symbolic.shape(path.nodes[-2]) or ()) != 5:
                raise UnsupportedError("queries have their heads in two axes, the weights of the values in one")
            values = _match_head_groups(queries, values, "value")
        outputs = weight_walk.output_candidates(path, queries[-1].heads, kept, bool(groups))
        if outputs:
            break
    if len(shape) == 5 and (sink is not None or path.row_guard is not None or path.pair_guard is not None):
        raise UnsupportedError("scores of five axes have a sink or a guard, which is supported for four only")
    if len(shape) == 5 or groups:
        outputs = [o for o in outputs if o.row_guard == path.row_guard]
    make = partial(_make_site, symbolic, name, number, softmax, sink, scores, path)
    site = make(_choose_layouts(queries, keys, values, outputs))
    before_guard = [o for o in outputs if o.row_guard is None]
    if site.row_guard is not None and before_guard:
        site = replace(site, unguarded=make(_choose_layouts(queries, keys, values, before_guard)))
    return site, RoundedWay(rounded, path.rounding)


def _explain_unknown_shape(index: GraphIndex, symbolic: Symbolic, tensor: str) -> str:
    """Words on where the knowledge of a tensor's shape ends: a node whose inputs have shapes, but not its output."""
    pending, seen = [tensor], set[str]()
    while pending:
        name = pending.pop()
        node = index.producer(name)
        if name in seen or symbolic.shape(name) is not None:
            continue
        seen.add(name)
        if node is None:
            return f", as that of {name!r} is"
        unknown = [n for n in node.input if n and symbolic.shape(n) is None]
        if not unknown:
            return f", as that of {name!r} is: what {describe(node)} gives is not known"
        pending.extend(unknown)
    return ""


def _make_site(
    symbolic: Symbolic,
    name: str,
    number: int,
    softmax: onnx.NodeProto,
    sink: Sink | None,
    scores: Scores,
    path: WeightPath,
    layouts: _ChosenLayouts,
) -> AttentionSite:
    """The site of a softmax.

    Longer than 60 lines: more than half of them are the fields of a site.
    """
    query, key = layouts.query, layouts.key
    scale = scores.factor * query.scale * key.scale
    if not math.isfinite(scale):
        raise UnsupportedError(f"the scale of the scores is {scale}")
    operands = (query.operand, key.operand, layouts.value.operand)
    result = symbolic.shape(layouts.output.tensor) or ()
    groups = query.groups
    if any(o.joined != (len(result) == 5 and not groups) for o in operands):
        raise UnsupportedError("query, key, value and result do not all have the batch in two axes, or all in one")
    dims = (query.batch, integer(query.heads), query.rows, key.rows)
    _check_scores(symbolic.shape(softmax.input[0] if sink is None else sink.scores) or (), dims, bool(groups))
    rank = len(symbolic.shape(scores.nodes[-1]) or ())
    terms = tuple(t if query.groups else _with_named_parts(t, rank, query) for t in reversed(scores.terms))
    factor = scores.spread_factor
    if factor is not None and symbolic.dtype(factor[1]) != query.dtype:
        raise UnsupportedError(f"the scores are scaled by {factor[1]!r} of another type than the query's")
    return AttentionSite(
        name=name,
        index=number,
        softmax=softmax.output[0],
        query=query.operand,
        key=key.operand,
        value=layouts.value.operand,
        output=layouts.output.tensor,
        output_layout=layouts.output.layout,
        output_perm=layouts.output.perm,
        output_flat=layouts.output.flat,
        output_joined=query.operand.joined,
        output_grouped=groups if len(result) == 5 else (),
        num_heads=query.heads,
        kv_num_heads=key.heads,
        head_size=query.size,
        value_head_size=layouts.value.size,
        scale=scale,
        dtype=query.dtype,
        terms=terms,
        softcap=scores.softcap,
        floored=scores.floored,
        nan_guard=path.nan_guard,
        pair_guard=path.pair_guard,
        zeroed=path.zeroed,
        added_values=path.added,
        query_factor=factor,
        sink=None if sink is None else sink.logits,
        sink_values=() if sink is None else sink.values,
        row_guard=layouts.output.row_guard,
        query_offset=_query_offset(dims),
        scores_shape=(
            _size_in_words(dims[0]),
            _size_in_words(dims[1]),
            _size_in_words(dims[2]),
            _size_in_words(dims[3]),
        ),
        dims=dims,
        nodes=tuple(
            dict.fromkeys((*reversed(scores.nodes), *(sink.nodes[::-1] if sink else ()), *layouts.output.nodes))
        ),
        form=_describe_form(scores, layouts, path.nan_guard) + (", sink" if sink else ""),
    )


def _require_layouts(
    index: GraphIndex,
    symbolic: Symbolic,
    tensor: str,
    role: str,
    order: tuple[int, ...],
    transposed: bool = False,
    grouped: bool = False,
) -> list[OperandLayout]:
    layouts = layout_candidates(index, symbolic, tensor, transposed=transposed, order=order, grouped=grouped)
    if not layouts:
        raise UnsupportedError(
            f"the {role} operand {tensor!r} has no layout [batch, heads, length, size] of known heads and size"
        )
    return layouts


def _match_query_key(
    index: GraphIndex, symbolic: Symbolic, scores: Scores
) -> tuple[list[OperandLayout], list[OperandLayout]]:
    query, key = symbolic.shape(scores.query), symbolic.shape(scores.key)
    if query is not None and key is not None and len(query) == 5 and (len(key) == 5 or scores.key_order):
        queries = layout_candidates(
            index, symbolic, scores.query, transposed=False, order=scores.query_order, grouped=True
        )
        transposed, order = scores.key_transposed, scores.key_order
        keys = layout_candidates(index, symbolic, scores.key, transposed=transposed, order=order, grouped=True)
        try:
            # Without repeated heads the second axis may belong to the batch: blocks of a sequence.
            if queries and any(k.groups[1] == 1 or k.repeat > 1 for k in keys):
                return queries, _match_head_groups(queries, keys, "key")
        except UnsupportedError:
            if len(key) != 5:
                raise
    queries = _require_layouts(index, symbolic, scores.query, "query", scores.query_order)
    return queries, _require_layouts(index, symbolic, scores.key, "key", scores.key_order, scores.key_transposed)


def _match_head_groups(queries: list[OperandLayout], layouts: list[OperandLayout], role: str) -> list[OperandLayout]:
    """The layouts of keys or values with heads repeated for the heads of each group, where heads lie in two axes."""
    query = queries[-1]
    first, each = query.groups
    for heads in layouts:
        fits = heads.groups in ((first, 1), (1, 1), (first, each))
        # Dimension names may differ for one size. A product of sizes says that the batch holds heads.
        same = heads.batch == query.batch or None not in (heads.batch.atom, query.batch.atom)
        if not fits or not same:
            raise UnsupportedError(
                f"the query has {first} x {each} heads in batches of {_size_in_words(query.batch)}, the {role} "
                f"{' x '.join(map(str, heads.groups))} in batches of {_size_in_words(heads.batch)}"
            )
    return [replace(h, repeat=h.repeat * each) if h.groups == (first, 1) else h for h in layouts]


def _check_groups(symbolic: Symbolic, nodes: Sequence[str], groups: tuple[int, ...]) -> None:
    """Refuses scores and weights that are neither [B, G, R, S, T] of the query's groups nor [B, H, S, T]."""
    for tensor in nodes:
        shape = symbolic.shape(tensor) or ()
        heads = {4: shape[1:2], 5: shape[1:3]}.get(len(shape), ())
        if tuple(s.constant for s in heads) not in (groups, (groups[0] * groups[1],)):
            raise UnsupportedError(f"{tensor!r} has not the heads of its query in axes of {groups[0]} and {groups[1]}")


def _with_named_parts(term: MaskTerm, rank: int, query: OperandLayout) -> MaskTerm:
    """The term with its view by parts of [B, H, S, T]; ``rank`` is that of the result of the MatMul."""
    if term.view is None:
        return term
    view = name_parts(term.view, rank, query.batch, query.heads, is_grouped=bool(query.groups))
    if view is None:
        sizes = ", ".join(_size_in_words(size_of(group)) for group in term.view.axes)
        raise UnsupportedError(
            f"mask {term.tensor!r} is added to scores [{sizes}], whose first axes are not the batch and {query.heads} heads"
        )
    return replace(term, view=view)


def _prefer_score_axes(shape: Shape, layouts: list[OperandLayout]) -> list[OperandLayout]:
    """The layouts with those last (the last one is preferred) whose batch and heads are the axes of the scores."""
    if len(shape) != 4 or shape[1].constant is None:
        return layouts
    heads = shape[1].constant
    return sorted(layouts, key=lambda h: h.batch == shape[0] and (h.heads * h.repeat == heads or h.heads == 1))


def _query_key_candidates(
    scores: Scores, queries: list[OperandLayout], keys: list[OperandLayout]
) -> Iterator[tuple[list[OperandLayout], list[OperandLayout]]]:
    """Queries and keys to try: first those that split [B*H, S, D] as a mask does, if one does; then all."""
    most_heads = max(q.heads for q in queries) if scores.has_merged_heads else 0
    matching_queries = [q for q in queries if q.heads == (scores.heads or most_heads)]
    if matching_queries and len(matching_queries) < len(queries):
        yield matching_queries, [k for k in keys if k.batch == matching_queries[-1].batch] or keys
    yield queries, keys


def _choose_layouts(
    queries: list[OperandLayout], keys: list[OperandLayout], values: list[OperandLayout], outputs: list[OutputCandidate]
) -> _ChosenLayouts:
    """The best output for which query, key and value have a layout of its element type."""
    if not outputs:
        raise UnsupportedError("the result of the second MatMul is not [B, H, S, D]")
    failure: UnsupportedError | None = None
    types = element_types()
    for output in outputs:
        same_type = [[x for x in layouts if x.dtype == output.dtype] for layouts in (queries, keys, values)]
        if output.dtype not in types or not all(same_type):
            failure = failure or UnsupportedError(
                f"query, key and value have element types {queries[0].dtype}, {keys[0].dtype}, {values[0].dtype}, "
                f"the result has {output.dtype}; expected one of fp32, fp16 and bf16"
            )
            continue
        query, key, value = (layouts[-1] for layouts in same_type)
        try:
            _check_heads(query, key, value)
        except UnsupportedError as error:
            failure = failure or error
            continue
        return _ChosenLayouts(query, key, value, output)
    assert failure is not None
    raise failure


def _check_heads(query: OperandLayout, key: OperandLayout, value: OperandLayout) -> None:
    if query.repeat != 1:
        raise UnsupportedError("the query's heads are repeated")
    for heads, role in ((key, "key"), (value, "value")):
        repeat = heads.repeat
        if heads.heads * repeat == 1:  # MatMul broadcasts it to all heads
            repeat = query.heads
        if heads.heads * repeat != query.heads:
            raise UnsupportedError(f"{query.heads} query heads do not fit {heads.heads} x {repeat} {role} heads")
        if heads.batch.constant == 1 != query.batch.constant:
            raise UnsupportedError(f"the {role} has batch size 1, the query {query.batch}")
        for size, wanted in zip(heads.batch_axes, query.batch_axes, strict=False):
            if size != wanted and ONE in (size, wanted):
                raise UnsupportedError(
                    f"of the batch in two axes, the query has {_size_in_words(wanted)} where the {role} has "
                    f"{_size_in_words(size)}"
                )
    if key.heads != value.heads:
        raise UnsupportedError(f"key has {key.heads} heads, value {value.heads}")
    if query.batch.constant == 1 and (key.batch.constant != 1 or value.batch.constant != 1):
        raise UnsupportedError(f"the query has batch size 1, the key {key.batch}")
    # Dimension names may differ: the second MatMul requires equal sizes anyway.
    if key.rows != value.rows and None not in (key.rows.constant, value.rows.constant):
        raise UnsupportedError(f"key has length {key.rows}, value {value.rows}")
    if key.size != query.size:
        raise UnsupportedError(f"query has head size {query.size}, key {key.size}")
    if max(query.size, value.size) > (largest := largest_head_size()):
        raise UnsupportedError(f"head size {max(query.size, value.size)}, at most {largest} is supported")
    if value.scale != 1.0:
        raise UnsupportedError(f"the values are scaled by {value.scale}")


def _check_scores(shape: tuple[Int, ...], dims: tuple[Int, Int, Int, Int], grouped: bool) -> None:
    """Refuses scores whose shape is not that of the operands: a mask may have broadcast them."""
    if len(shape) == 5 and grouped:  # heads in two axes
        shape = (shape[0], shape[1] * shape[2], *shape[3:])
    elif len(shape) == 5:  # batch in two axes
        shape = (shape[0] * shape[1], *shape[2:])
    wanted = dims if len(shape) == 4 else (dims[0] * dims[1], dims[2], dims[3])
    for scores_size, size in zip(shape, wanted, strict=True):
        if scores_size == size:
            continue
        if size.constant == 1:
            raise UnsupportedError(f"a mask broadcasts a size of 1 of the scores to {_size_in_words(scores_size)}")
        if scores_size.constant is not None:
            raise UnsupportedError(
                f"a mask has the fixed size {scores_size.constant} where query and key give {_size_in_words(size)}; "
                "only scores of fixed size can have a mask of fixed size"
            )


def _query_offset(dims: tuple[Int, Int, Int, Int]) -> int:
    """``query_offset``: 1 where the queries are the last S of T positions, since T is S plus another size."""
    past = dims[3] - dims[2]
    return 1 if past.constant is None and all(c > 0 for _, c in past.terms) else 0


def _size_in_words(size: Int) -> str:
    atom = size.atom
    if atom is not None and atom.kind == "size":
        return str(atom.args[0])
    return str(size if size.constant is None else size.constant)


def _describe_form(scores: Scores, layouts: _ChosenLayouts, nan_guard: bool) -> str:
    query, key = layouts.query, layouts.key
    words = list(dict.fromkeys(reversed(scores.words)))
    if query.scale != 1.0 and key.scale != 1.0:
        words.append("scale split over query and key")
    elif query.scale != 1.0 or key.scale != 1.0:
        words.append("scale on query" if query.scale != 1.0 else "scale on key")
    if key.heads != query.heads:
        words.append(f"grouped heads × {query.heads // key.heads}")
    if nan_guard:
        words.append("NaN guard")
    if layouts.output.row_guard is not None:
        words.append("row guard")
    layout_names = f"{query.operand.layout.value}/{key.operand.layout.value} -> {layouts.output.layout.value}"
    return f"{layout_names}: " + ", ".join(words)
