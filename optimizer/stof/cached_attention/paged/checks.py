# SPDX-License-Identifier: Apache-2.0
"""Paged sites before verification: the operator on captured tensors beside the contract in fp64, outputs and caches.

ONNX Runtime's CPU provider has no kernel of PagedAttention. The original runs with its nodes expanded to standard ones; what
these compute is held against fp64, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx
from onnx import helper

from stof.arguments.precisions import precision_of
from stof.cached_attention.checks.attention_step import attention_of_site
from stof.cached_attention.checks.contract_comparison import (
    NarrowResult,
    compare_original,
    compare_with_contract,
    make_failure,
    worst_of,
)
from stof.cached_attention.checks.emitted_sites import find_emitted_sites, in_type, rounding_of_output
from stof.cached_attention.checks.mask_tables import fault_of_tables
from stof.cached_attention.paged.emit import emit_pages
from stof.cached_attention.paged.expand import expand_pages
from stof.cached_attention.paged.oracle import PagedStep, PagedStepResult, compute_paged_step
from stof.cached_attention.paged.run_inputs import PagedInputMaker
from stof.cached_attention.paged.site import INPUT_INDEX, INPUTS, OP, OP_INPUTS, PagedSite
from stof.execution.case import Case
from stof.execution.runtime_faults import RuntimeFault
from stof.graph.node_fields import PlainValue, input_of
from stof.runtime.library import LibraryError, Op
from stof.symbolic import Symbolic
from stof.verification.array_distance import relative_rms
from stof.verification.model_inputs import ModelInputs
from stof.verification.perturb import Noisy
from stof.verification.result import Comparison
from stof.verification.site_checks import SiteChecks

_LONGEST_REACH = 1100  # keys of a past behind which a pattern is compared
_MOST_ELEMENTS = 1 << 20  # of such a past, unless one sequence has more
_POISON = 1e4  # what buffers hold before a run


class PagedChecks(SiteChecks):
    """The nodes of a model that became StofPagedAttention.

    Args:
        base: the original with the functions inlined that hold such nodes; rewrites start from it.
        symbolic: facts of ``base``.
        paged_sites: what was replaced.
        shapes: the least and the largest size in use of dimensions, by name.
    """

    def __init__(
        self,
        base: onnx.ModelProto,
        symbolic: Symbolic,
        paged_sites: Sequence[PagedSite],
        shapes: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        self.working = expand_pages(base, paged_sites)  # with their patterns
        self.symbolic = Symbolic(self.working)
        self.paged_sites = tuple(paged_sites)
        self.sites = tuple(s.name for s in paged_sites)
        self.types = frozenset(s.dtype for s in paged_sites)
        self._base = base
        self._maker = PagedInputMaker(base, symbolic, paged_sites, shapes)

    def model_inputs(self) -> ModelInputs:
        sites = [replace(s, declared=None) for s in self.paged_sites]
        original = expand_pages(self._base, sites) if RuntimeFault.NO_PAGED_ATTENTION.is_present() else None
        return ModelInputs(self.working, self.symbolic, self._maker, self._cases, original=original)

    def _cases(self, tokens: float) -> list[Case]:
        return self._maker.steps(tokens)

    def tensors(self) -> list[str]:
        inputs = {i.name for i in self._base.graph.input}
        read = [t for s in self.paged_sites for t in (*s.node.input, *s.node.output[:3]) if t]
        return [t for t in dict.fromkeys(read) if t not in inputs]

    def outputs(self) -> dict[str, list[str]]:
        return {s.name: [o for o in s.node.output if o] for s in self.paged_sites}

    def emit(self, sites: Sequence[str]) -> onnx.ModelProto:
        return emit_pages(self._base, [s for s in self.paged_sites if s.name in set(sites)])

    def rounding_errors(self, captured: Mapping[str, np.ndarray]) -> dict[str, Noisy]:
        return {s.node.output[0]: rounding_of_output(s, captured) for s in self.paged_sites}

    def compare(self, emitted: onnx.ModelProto, captured: Mapping[str, np.ndarray]) -> Iterator[Comparison]:
        for emitted_site in find_emitted_sites(emitted, self.paged_sites, captured):
            site = emitted_site.site
            if detail := emitted_site.fault_of_mask or fault_of_tables(
                site, emitted_site.node, emitted_site.values, OP_INPUTS
            ):
                yield make_failure(site, detail)
            elif (step := _read_captured_step(site, emitted_site.node, emitted_site.values)) is not None:
                yield compare_paged_site(site, emitted_site.attributes, step, captured.get(site.node.output[0]))


def _read_captured_step(site: PagedSite, node: onnx.NodeProto, values: Mapping[str, np.ndarray]) -> PagedStep | None:
    """The step of a node by its tensors; None where one of them is not known."""
    if any(name and name not in values for name in node.input[: len(INPUTS)]):
        return None
    arrays = {n: values[input_of(node, i)] for n, i in INPUT_INDEX.items() if input_of(node, i)}
    return PagedStep(
        query=arrays["query"],
        key=arrays.get("key"),
        value=arrays.get("value"),
        key_cache=arrays["key_cache"],
        value_cache=arrays["value_cache"],
        cumulative=arrays["cumulative_sequence_length"],
        past=arrays["past_seqlens"],
        table=arrays["block_table"],
        rotary_offset=site.rotary_offset,
        **attention_of_site(site, arrays),
    )


def compare_paged_site(
    site: PagedSite, attributes: Mapping[str, PlainValue], captured: PagedStep, original: np.ndarray | None
) -> Comparison:
    """The operator beside the contract in fp64, in a captured step, and in one token of each sequence behind a long past.

    Args:
        site: the node that was replaced.
        attributes: of the node in its place.
        captured: a step of the original.
        original: what its expanded nodes computed, or None.
    """
    if original is not None:
        exact, single = compute_paged_step(captured), compute_paged_step(captured, np.float32)
        if (failure := compare_original(site, original, exact.output, single.output)) is not None:
            return failure
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(site.dtype))
    step = in_type(captured, dtype)
    results = _compare_step(site, attributes, step)
    if site.declared is not None and all(r.ok for r in results) and (behind := _behind_past(step)) is not None:
        results += [
            replace(r, detail=f"one token behind a past, {r.detail}" if r.detail else "")
            for r in _compare_step(site, attributes, behind)
        ]
    return worst_of(results)


def _compare_step(site: PagedSite, attributes: Mapping[str, PlainValue], step: PagedStep) -> list[Comparison]:
    """Output and caches of a step beside the contract; one comparison where the operator fails."""
    dtype = step.query.dtype
    exact, single = compute_paged_step(step), compute_paged_step(step, np.float32, dtype)
    try:
        result = run_paged_step(attributes, step)
    except LibraryError as error:
        return [make_failure(site, str(error))]
    narrow, precision = None, precision_of(attributes)
    if precision is not None:
        output = compute_paged_step(replace(step, precision=precision), storage=dtype).output
        narrow = NarrowResult.of(precision, output, exact.value_cache)
    results = []
    for name in ("output", "key_cache", "value_cache"):
        mine, wanted, rounded = (getattr(x, name) for x in (result, exact, single))
        is_output = name == "output"
        compared = compare_with_contract(site, name, mine, wanted, rounded, dtype, narrow=narrow if is_output else None)
        results.append(replace(compared, relative_rms=relative_rms(mine, wanted) if is_output else None))
    return results


def _behind_past(captured: PagedStep) -> PagedStep | None:
    """One token of each sequence behind as many keys as show the pattern; None where the rotary table has too few rows.

    Sequences share the block of their first positions, as those with a common prefix do.
    """
    assert captured.pattern is not None
    _, size, groups, head_size = captured.key_cache.shape
    longest = min(captured.pattern.reach, _LONGEST_REACH) + 21
    if captured.cos is not None:
        longest = min(longest, len(captured.cos) - 1)
    if longest < 1 or not len(captured.query):
        return None
    rng = np.random.default_rng(longest)
    batch = max(1, min(len(captured.past), len(captured.query), _MOST_ELEMENTS // (longest * groups * head_size)))
    past = np.array([longest, *rng.integers(0, longest, batch - 1, endpoint=True)], np.int32)
    columns = longest // size + 1
    table = 1 + rng.permutation(batch * columns).reshape(batch, columns).astype(np.int32)
    table[past >= size, 0] = 0  # a full block: nothing is written to it
    caches = []
    for cache in (captured.key_cache, captured.value_cache):
        spread = float(cache.astype(np.float32).std()) or 1.0
        numbers = rng.standard_normal((1 + batch * columns, size, groups, head_size)) * spread
        caches.append(numbers.astype(cache.dtype))
    first = [None if x is None else np.ascontiguousarray(x[:batch]) for x in (captured.key, captured.value)]
    return replace(
        captured,
        query=np.ascontiguousarray(captured.query[:batch]),
        key=first[0],
        value=first[1],
        key_cache=caches[0],
        value_cache=caches[1],
        cumulative=np.arange(batch + 1, dtype=np.int32),
        past=past,
        table=table,
    )


def run_paged_step(attributes: Mapping[str, PlainValue], step: PagedStep) -> PagedStepResult:
    """Runs the library's operator on a step, into buffers that were filled with large numbers.

    Raises:
        LibraryError: what the operator refuses.
    """
    inputs: list[np.ndarray | None] = [
        *(step.query, step.key, step.value, step.key_cache, step.value_cache),
        *(x.astype(np.int32) for x in (step.cumulative, step.past, step.table)),
        *(step.cos, step.sin, None, step.sink, step.query_norm, step.key_norm),
        *(None, None, None),  # scales and attention_metadata
        *step.tables,
    ]
    while inputs[-1] is None:
        inputs.pop()
    dtype = step.query.dtype
    output = np.full((len(step.query), step.num_heads * step.key_cache.shape[3]), _POISON, dtype)
    caches = [np.full(step.key_cache.shape, _POISON, dtype) for _ in range(2)]
    operands = [None if x is None else np.ascontiguousarray(x) for x in inputs]
    Op(OP, attributes).run(operands, [output, *caches], threads=2)
    return PagedStepResult(output, caches[0], caches[1])
