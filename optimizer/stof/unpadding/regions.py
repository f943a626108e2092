# SPDX-License-Identifier: Apache-2.0
"""Finds the regions of a graph that can run on real tokens alone.

A region belongs to one key padding mask. Tokens are followed forwards from the model's inputs of its shape, through nodes
that compute each token by itself and through attention under that mask. Then rows of padding are followed backwards from
whatever reads them: a node is in the region where nothing does.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import replace

import onnx

from stof.graph.index import (
    DOMAIN,
    captured_tensors,
    describe,
    find_needed,
    is_standard,
    node_tensors,
    producer_indices,
    producers,
)
from stof.symbolic import Symbolic
from stof.symbolic.algebra.terms import integer
from stof.symbolic.tensor import Shape
from stof.unpadding.pad_masks import Guard, KeyBias, PadMask, SitePadding, find_added_masks, find_padding, is_attention
from stof.unpadding.padding_values import PaddingValues
from stof.unpadding.region import IndexRead, MaskResult, PositionRead, UnpaddedRegion
from stof.unpadding.rules import attention_layouts, find_row_wise, layout_axes
from stof.unpadding.token_axes import Context, RowWise, TokenAxes

_ONE = integer(1)


def find_regions(
    model: onnx.ModelProto, symbolic: Symbolic, opset: int, zero_outputs: bool = False
) -> list[MaskResult]:
    """The region of each key padding mask of a model whose attentions are nodes of stof.

    Args:
        model: the model.
        symbolic: of the model.
        opset: of the standard domain.
        zero_outputs: outputs of the model may have zeros as rows of padding.
    """
    nodes = model.graph.node
    masks: dict[PadMask, dict[int, SitePadding]] = {}
    writers, added = producers(nodes), find_added_masks(model.graph)
    for i, node in enumerate(nodes):
        if (padding := find_padding(node, symbolic, writers, added)) is not None:
            masks.setdefault(padding.mask, {})[i] = padding
    taken: set[int] = set()
    results: list[MaskResult] = []
    for mask, sites in masks.items():
        result = _find_region(model, symbolic, opset, mask, sites, taken, zero_outputs)
        if result.region is not None:
            taken |= result.region.nodes.keys()
        results.append(result)
    return results


def _find_region(
    model: onnx.ModelProto,
    symbolic: Symbolic,
    opset: int,
    mask: PadMask,
    sites: Mapping[int, SitePadding],
    taken: set[int],
    zero_outputs: bool,
) -> MaskResult:
    """What was found for one mask. Outputs may have zeros only where the region itself writes them."""
    outputs = {o.name for o in model.graph.output} if zero_outputs else set()
    reason = ""
    while True:
        result = _Analysis(model, symbolic, opset, mask, sites, frozenset(outputs)).result(taken)
        reason = reason or result.reason
        written = set() if result.region is None else outputs & result.region.unpadded(model.graph.node).keys()
        others = outputs & result.tokens.keys() - written
        if not others:
            return replace(result, reason=reason) if result.region is None else result
        outputs -= others


class _Analysis:
    """One mask, and what follows from it in a graph."""

    def __init__(
        self,
        model: onnx.ModelProto,
        symbolic: Symbolic,
        opset: int,
        mask: PadMask,
        sites: Mapping[int, SitePadding],
        zero_outputs: frozenset[str],
    ) -> None:
        self.graph = model.graph
        self.nodes = model.graph.node
        self.symbolic = symbolic
        self.opset = opset
        self.mask = mask
        self.zero_outputs = zero_outputs
        self.sites = sites
        self.attentions = frozenset(sites)
        self.shape = self._padded_shape(min(sites))
        self.source = ""
        self.tokens: dict[str, TokenAxes] = {}
        self.padding = PaddingValues(symbolic)
        self.known: dict[int, RowWise] = {}
        self.reads: list[PositionRead] = []
        self.index_reads: list[IndexRead] = []
        self.sizes: dict[int, str] = {}  # Shape nodes, with the tensors whose shape they give
        self.needed: dict[str, str] = {}  # tensors whose rows of padding are read, with what reads them
        self.writers = producer_indices(self.nodes)
        self.captured = {n for node in self.nodes for n in captured_tensors(node)}

    def result(self, taken: set[int]) -> MaskResult:
        """The region, without the nodes that an earlier one has."""
        if self.shape is None or self.shape[1] == _ONE:
            return self._refusal("nothing is known of the sizes of its keys")
        self._follow_tokens()
        if not self.source:
            return self._refusal("no input of the model has a batch of texts as long as the keys are")
        self._follow_padding()
        before = find_needed([self.mask.tensor], self.nodes)  # what the mask is computed from
        deciding = [r.indices for r in self.index_reads] + [p.guard.tensor for p in self.sites.values() if p.guard]
        before_rows = {i for name in deciding for i in self._sources(name)}  # what decides which rows are kept
        inside = {
            i: row_wise
            for i, row_wise in self.known.items()
            if i not in taken
            and i not in before_rows
            and self._is_unread(self.nodes[i])
            and any(a is not None for a in row_wise.outputs)
            and not before.intersection(self.nodes[i].output)
        }
        inside = self._connected(self._without_shared(inside))
        sites = frozenset(i for i in inside if i in self.attentions)
        written = {n for i in inside for n in self.nodes[i].output}
        others = (i for i in self.attentions - sites if not self.sites[i].reads_padding)
        cross = frozenset(i for i in others if self._has_unpadded_keys(self.nodes[i], written))
        if not sites and not cross:
            return self._refusal(self._find_cause())
        region = UnpaddedRegion(self.mask, self.shape, self.source, inside, sites, cross)
        unpadded = region.unpadded(self.nodes)
        region = replace(
            region,
            reads=tuple(r for r in self.reads if self.nodes[r.node].input[0] in unpadded),
            index_reads=tuple(r for r in self.index_reads if self.nodes[r.node].input[0] in unpadded),
            zero=frozenset(self.padding.zero & unpadded.keys()),
            sizes={i: name for i, name in self.sizes.items() if name in unpadded},
            guards=tuple(dict.fromkeys(self._find_guards(sites))),
            has_averaged_padding=any(self.sites[i].has_averaged_padding for i in sites),
        )
        reason = "" if len(sites | cross) == len(self.attentions) else self._find_cause()
        return MaskResult(self.mask, region, len(self.attentions), reason, self.tokens)

    def _find_guards(self, sites: Collection[int]) -> Iterator[Guard]:
        """Those of all attentions. Where one is not of the region, its results at padding may be read."""
        assert self.shape is not None
        for i in sorted(self.attentions):
            guard = self.sites[i].guard
            if isinstance(guard, KeyBias):
                shape = self.symbolic.shape(guard.tensor)
                is_by_query = shape is not None and shape[2] != _ONE
                yield replace(guard, skips_padding=i in sites and is_by_query)
            elif guard is not None:
                yield guard

    def _padded_shape(self, site: int) -> Shape | None:
        """The sizes B and T of the keys of an attention."""
        node = self.nodes[site]
        shape, axes = self.symbolic.shape(node.input[1]), layout_axes(attention_layouts(node)[1])
        return None if shape is None or axes.position is None else (shape[0], shape[axes.position])

    def _refusal(self, reason: str) -> MaskResult:
        return MaskResult(self.mask, None, len(self.attentions), reason, self.tokens)

    # ---- forwards ----
    def _follow_tokens(self) -> None:
        assert self.shape is not None
        for value in self.graph.input:
            shape = self.symbolic.shape(value.name)
            if shape is not None and len(shape) >= 2 and shape[:2] == self.shape:
                self.tokens[value.name] = TokenAxes(0, 1)
                self.source = self.source or value.name
        shape = self.symbolic.shape(self.mask.tensor)
        if shape is not None and len(shape) == 2:
            self.tokens[self.mask.tensor] = TokenAxes(0, 1)
            if not self.mask.is_bound:
                self.padding.set(self.mask.tensor, self.mask.number)
        for i, node in enumerate(self.nodes):
            row_wise = self._row_wise(i, node)
            if row_wise is None:
                continue
            self.known[i] = row_wise
            for name, axes in zip(node.output, row_wise.outputs, strict=False):
                if name and axes is not None:
                    self.tokens[name] = axes
            if node.output and node.output[0] in self.tokens and not self.tokens[node.output[0]].stays_inside:
                self.padding.follow(node)

    def _context(self, node: onnx.NodeProto) -> Context:
        return Context(node, self.tokens, self.padding.zero, self.padding.true, self.symbolic, self.opset)

    def _row_wise(self, i: int, node: onnx.NodeProto) -> RowWise | None:
        context = self._context(node)
        if i in self.attentions:
            return self._attention(context)
        row_wise = None if node.domain == DOMAIN else find_row_wise(context)
        return row_wise if row_wise is not None and self._are_sizes_known(node, row_wise) else None

    def _are_sizes_known(self, node: onnx.NodeProto, row_wise: RowWise) -> bool:
        """Whether the shapes of results are of numbers and the sizes of the batch alone: so they can be written anywhere.

        The axes of the tokens must have the sizes of the batch: a reshape may have its sizes the other way round.
        """
        assert self.shape is not None
        batch, length = self.shape
        for name, axes in zip(node.output, row_wise.outputs, strict=False):
            if not name or axes is None:
                continue
            shape = self.symbolic.shape(name)
            rows = batch * integer(axes.heads_per_sequence)
            if shape is None or any(n.constant is None and n not in (rows, length, batch * length) for n in shape):
                return False
            wanted = {axes.batch: rows, axes.position: batch * length if axes.merged else length}
            if any(a is not None and shape[a] != size for a, size in wanted.items()):
                return False
        return True

    def _attention(self, context: Context) -> RowWise | None:
        """Attention under the mask: the keys and values at padding are not read."""
        layouts = attention_layouts(context.node)
        wanted = [layout_axes(layout) for layout in layouts]
        if any(context.axes_of(i) != wanted[i] for i in range(3)):
            return None
        if _gives_more(context.node):
            return None
        return RowWise((wanted[3],), dict(enumerate(wanted[:3])), None, frozenset({1, 2}))

    # ---- backwards ----
    def _follow_padding(self) -> None:
        """Finds what reads rows of padding, and the nodes that read single rows or a shape alone."""
        for output in self.graph.output:
            axes = self.tokens.get(output.name)
            if axes is not None and (output.name not in self.zero_outputs or axes.stays_inside):
                self._need([output.name], f"output {output.name!r} has a row for every position")
        for name in self.captured & self.tokens.keys():
            self.needed.setdefault(name, f"a subgraph reads {name!r}")  # by its name, with all its rows
        for i in reversed(range(len(self.nodes))):
            node = self.nodes[i]
            names = [n for n in node.input if n in self.tokens]
            if not names:
                continue
            row_wise = self.known.get(i)
            if row_wise is not None:
                if not self._is_unread(node):
                    cause = next(self.needed[n] for n in node.output if n in self.needed)
                    self._need([n for j, n in enumerate(node.input) if j not in row_wise.ignored], cause)
                    if i in self.attentions and self.sites[i].reads_padding:
                        self._need(node.input[1:3], cause)
                if i in self.attentions:
                    self._need_operands(node)
            elif is_standard(node) and node.op_type == "Shape":
                self.sizes[i] = node.input[0]
            elif any(self.tokens[n].stays_inside for n in names):
                self._need(names, f"{describe(node)} reads rows of padding")
            elif (position := self._read_position(node)) is not None:
                self.reads.append(PositionRead(i, position))
            elif node.input[0] not in self.padding.zero and (kind := self._read_indices(node)) is not None:
                self.index_reads.append(IndexRead(i, node.input[1], kind))
            elif is_attention(node):
                self._need_attention(i, node)
            else:
                self._need(names, f"{describe(node)} reads rows of padding")

    def _need(self, names: Iterable[str], cause: str) -> None:
        for name in names:
            if name in self.tokens and name not in self.padding.zero:
                self.needed.setdefault(name, cause)

    def _need_operands(self, node: onnx.NodeProto) -> None:
        """What attention reads by positions, whichever tokens there are: also where it is 0 at padding."""
        for name in node.input[3:]:
            if name in self.tokens and name != self.mask.tensor:
                self.needed.setdefault(name, f"{describe(node)} reads it by positions")

    def _need_attention(self, i: int, node: onnx.NodeProto) -> None:
        """An attention that is not row-wise: under this mask, keys and values at padding are not read all the same."""
        layouts = attention_layouts(node)
        for j, name in enumerate(node.input[:3]):
            reads_real = i in self.attentions and not self.sites[i].reads_padding
            is_masked = reads_real and j in (1, 2) and self.tokens.get(name) == layout_axes(layouts[j])
            if not is_masked:
                self._need([name], f"{describe(node)} reads rows of padding")
        self._need_operands(node)

    def _read_position(self, node: onnx.NodeProto) -> int | None:
        """The position that a node reads of each sequence; None: it reads others, too."""
        axes = self.tokens.get(node.input[0])
        if not is_standard(node) or axes is None or axes.batch is None or axes.position is None:
            return None
        if any(n in self.tokens for n in node.input[1:]):
            return None
        context = self._context(node)
        shape = context.shape(0)
        if shape is None:
            return None
        if node.op_type == "Gather" and context.number("axis", 0) % len(shape) == axes.position:
            indices = context.ints(1)
            return indices[0] if indices is not None and len(indices) == 1 else None
        if node.op_type == "Slice":
            return self._read_slice(context, axes.position, len(shape))
        return None

    def _read_indices(self, node: onnx.NodeProto) -> str | None:
        """The kind of indices by which a node reads single rows; None: it does something else, or indices are of tokens."""
        axes = self.tokens.get(node.input[0])
        if not is_standard(node) or axes is None or any(n in self.tokens for n in node.input[1:]):
            return None
        context = self._context(node)
        shape = context.shape(1)
        if node.op_type == "Gather" and axes.merged and axes.position == 0 and context.number("axis", 0) == 0:
            kind = "rows"
        elif node.op_type == "GatherND" and axes == TokenAxes(0, 1) and shape:
            width, batch_dims = shape[-1].constant, context.number("batch_dims", 0)
            kind = {(2, 0): "pairs", (1, 1): "positions"}.get((width or 0, batch_dims), "")
        elif node.op_type == "GatherElements" and axes == TokenAxes(0, 1) and shape:
            kind = "elements" if context.number("axis", 0) % len(shape) == 1 else ""
        else:
            kind = ""
        return kind if kind and not self._depends_on_tokens(node.input[1]) else None

    def _depends_on_tokens(self, name: str) -> bool:
        """Whether a tensor is computed from results of attention; from shapes of tensors does not count."""
        return any(i in self.attentions or self.nodes[i].domain == DOMAIN for i in self._sources(name))

    def _sources(self, name: str) -> set[int]:
        """The nodes that a tensor is computed by, up to those that read the shape of another one alone."""
        pending, found = [name], set[int]()
        while pending:
            i = self.writers.get(pending.pop())
            if i is None or i in found:
                continue
            found.add(i)
            if self.nodes[i].op_type != "Shape":
                pending.extend(node_tensors(self.nodes[i]))
        return found

    def _read_slice(self, context: Context, axis: int, rank: int) -> int | None:
        starts, ends = context.numbers("starts", 1), context.numbers("ends", 2)
        found = context.attribute("axes")
        axes = list(found.ints) if found is not None else context.ints(3)
        steps = context.ints(4) if context.has(4) else None
        if starts is None or ends is None or (axes is None and context.has(3)) or (context.has(4) and steps is None):
            return None
        axes = list(range(len(starts))) if axes is None else [a % rank for a in axes]
        if any(a == self.tokens[context.node.input[0]].batch for a in axes) or axis not in axes:
            return None
        at = axes.index(axis)
        is_one = ends[at] == starts[at] + 1 or (starts[at] == -1 and ends[at] > 1 << 30)
        return starts[at] if is_one and (steps is None or steps[at] == 1) else None

    # ---- the region ----
    def _is_unread(self, node: onnx.NodeProto) -> bool:
        return not any(n in self.needed for n in node.output)

    def _without_shared(self, inside: dict[int, RowWise]) -> dict[int, RowWise]:
        """Without the nodes whose tensors stay inside of a region, where others write or read these, too."""
        kept: dict[int, RowWise] = {}
        while len(kept) != len(inside):
            kept, inside = inside, {}
            own = [n for n, axes in self.tokens.items() if axes.stays_inside]
            written = {n for i in kept for n in self.nodes[i].output}
            others = (node for i, node in enumerate(self.nodes) if i not in kept and i not in self.sizes)
            read = {n for node in others for n in node_tensors(node)}
            shared = {n for n in own if n not in written or n in read}
            for i, row_wise in kept.items():
                if not shared.intersection((*self.nodes[i].input, *self.nodes[i].output)):
                    inside[i] = row_wise
        return inside

    def _connected(self, inside: Mapping[int, RowWise]) -> dict[int, RowWise]:
        """The nodes that tensors of the region connect with an attention, or with keys and values of other tokens' queries."""
        writers = {n: i for i in inside for n in self.nodes[i].output if n}
        group = {i: i for i in inside}

        def find(i: int) -> int:
            while group[i] != i:
                group[i] = group[group[i]]
                i = group[i]
            return i

        for i in inside:
            for name in self.nodes[i].input:
                if name in writers:
                    group[find(i)] = find(writers[name])
        kept = {find(i) for i in inside if i in self.attentions}
        for node in (self.nodes[i] for i in self.attentions - inside.keys()):
            if node.input[0] not in self.tokens and self._has_unpadded_keys(node, writers):
                kept |= {find(writers[node.input[j]]) for j in (1, 2)}
        return {i: row_wise for i, row_wise in inside.items() if find(i) in kept}

    def _has_unpadded_keys(self, node: onnx.NodeProto, written: Container[str]) -> bool:
        """Whether key and value of an attention are among what the region writes, and its query is not."""
        layouts = attention_layouts(node)
        return (
            all(node.input[j] in written and self.tokens[node.input[j]] == layout_axes(layouts[j]) for j in (1, 2))
            and node.input[0] not in written
            and not _gives_more(node)
        )

    def _find_cause(self) -> str:
        """What reads rows of padding behind the first attention that stays padded."""
        for i in sorted(self.attentions):
            node = self.nodes[i]
            for name in node.output:
                if name in self.needed:
                    return self.needed[name]
            if i not in self.known:
                for name in node.input[1:3]:
                    if name in self.needed:
                        return self.needed[name]
                sources = [n for n in node.input[:3] if n not in self.tokens]
                if sources:
                    return f"the tokens in {sources[0]!r} could not be followed"
        return "its attention is not between tokens of one text"


def _gives_more(attention: onnx.NodeProto) -> bool:
    """Whether a node has further results, which packed sequences do not have."""
    return any(a.s for a in attention.attribute if a.name == "results")
