# SPDX-License-Identifier: Apache-2.0
"""Cache sites before verification: the operator on captured tensors beside the contract in fp64, outputs and caches.

A prompt is captured at each site. From its tensors three steps are made: the prompt itself, several tokens and one token
behind pasts of different lengths. The original's output of the prompt is held against fp64, too: it says whether the contract
is what the node means.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx
from onnx import helper

from stof.arguments.precisions import EightBits, precision_of
from stof.attention.checks.eight_bit_error import EightBitErrors
from stof.cached_attention.checks.attention_step import attention_of_site
from stof.cached_attention.checks.contract_comparison import (
    NarrowResult,
    compare_original,
    compare_with_contract,
    make_failure,
    worst_of,
)
from stof.cached_attention.checks.eight_bit_error import measure_eight_bits_of_step
from stof.cached_attention.checks.emitted_sites import find_emitted_sites, in_type, rounding_of_output, size_or_one
from stof.cached_attention.checks.expand_norms import expand_norms
from stof.cached_attention.checks.mask_tables import fault_of_tables
from stof.cached_attention.checks.oracle import CacheStep, CacheStepResult, compute_step
from stof.cached_attention.checks.quantized import count_steps, is_quantized
from stof.cached_attention.emit import emit_caches
from stof.cached_attention.run_inputs import CacheInputMaker
from stof.cached_attention.run_lengths import RunLengths
from stof.cached_attention.site import INPUT_INDEX, INPUTS, OP, OP_INPUTS, CacheSite
from stof.execution.case import Case
from stof.execution.runtime_faults import RuntimeFault
from stof.graph.node_fields import PlainValue
from stof.runtime.library import LibraryError, Op
from stof.symbolic import Symbolic
from stof.verification.array_distance import relative_rms
from stof.verification.model_inputs import ModelInputs
from stof.verification.perturb import Noisy
from stof.verification.result import Comparison, Coverage
from stof.verification.site_checks import SiteChecks

_LONGEST_WINDOW = 1100  # whose end pasts reach beyond
_MOST_ELEMENTS = 1 << 20  # of a cache behind which a step is computed, unless one sequence has more
_PERIOD = 65537  # numbers of a drawn cache; no size of a head divides it
_LENGTHS = INPUT_INDEX["seqlens_k"]
_POISON = 1e4  # what buffers hold before a run
_QUANTIZED_POISON = 77.0  # likewise, of quantized caches
_FLIPS = 0.01  # of a quantized cache's elements, which may be one step away: they lie between two steps


class CacheChecks(SiteChecks):
    """The nodes of a model that became StofCachedAttention.

    Args:
        original: the model as it was read.
        base: the original with the functions inlined that hold such nodes; rewrites start from it.
        symbolic: facts of ``base``.
        cache_sites: what was replaced.
        shapes: the least and the largest size in use of dimensions, by name.
    """

    def __init__(
        self,
        original: onnx.ModelProto,
        base: onnx.ModelProto,
        symbolic: Symbolic,
        cache_sites: Sequence[CacheSite],
        shapes: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        expanded = expand_norms(base, cache_sites)
        # Verification runs the original itself where it is no copy.
        self.working = original if base is original and expanded is base else expanded
        self.symbolic = symbolic if expanded is base else Symbolic(expanded)
        self.cache_sites = tuple(cache_sites)
        self.sites = tuple(s.name for s in cache_sites)
        self.types = frozenset(s.dtype for s in cache_sites)
        self._base = base
        self._lengths = RunLengths(base, symbolic, cache_sites)
        self._maker = CacheInputMaker(base, symbolic, cache_sites, self._lengths, shapes)

    def model_inputs(self) -> ModelInputs:
        return ModelInputs(self.working, self.symbolic, self._maker, self._cases, rows=self._lengths)

    def _cases(self, tokens: float) -> list[Case]:
        is_sliding = any(s.sliding for s in self.cache_sites)
        pads = self._says_padding() and not (is_sliding and RuntimeFault.PADDED_SLIDING_PROMPTS.is_present())
        return self._maker.steps(tokens, pads)

    def _says_padding(self) -> bool:
        """Whether every output but caches is [B, S, ...], so that rows of padded queries can be left out."""
        presents = {o for s in self.cache_sites for o in s.node.output[1:3]}
        batches, queries = {s.batch for s in self.cache_sites}, {s.queries for s in self.cache_sites}
        for output in self._base.graph.output:
            shape = self.symbolic.shape(output.name)
            if output.name in presents:
                continue
            if shape is None or len(shape) < 2 or shape[0] not in batches or shape[1] not in queries:
                return False
        return True

    def tensors(self) -> list[str]:
        inputs = {i.name for i in self._base.graph.input}
        # Of quantized caches both are needed: outputs depend on how they were rounded.
        read = [t for s in self.cache_sites for t in (*s.node.input, *s.node.output[: 3 if s.quantized else 2]) if t]
        return [t for t in dict.fromkeys(read) if t not in inputs]

    def outputs(self) -> dict[str, list[str]]:
        return {s.name: [o for o in s.node.output if o] for s in self.cache_sites}

    def emit(self, sites: Sequence[str]) -> onnx.ModelProto:
        return emit_caches(self._base, [s for s in self.cache_sites if s.name in set(sites)])

    def rounding_errors(self, captured: Mapping[str, np.ndarray]) -> dict[str, Noisy]:
        errors = {}
        for site in self.cache_sites:
            output, key = site.node.output[:2]
            errors[output] = rounding_of_output(site, captured)
            if site.quantized:
                errors |= self._quantizer_inputs(site, captured)
            elif site.does_rotary or site.input("k_norm_weight"):
                rows = captured.get(key)
                held = None if rows is None else self._lengths.cache_rows(key, captured, rows.shape[2])
                rows = rows.swapaxes(1, 2)[held] if rows is not None and held is not None else rows
                errors[key] = Noisy(site.dtype, site.head_size, size_or_one(rows))
        return errors

    def _quantizer_inputs(self, site: CacheSite, captured: Mapping[str, np.ndarray]) -> dict[str, Noisy]:
        """What is rounded to a quantized cache: a difference in the last place moves some elements by a step."""
        counts = {"query": site.num_heads + 2 * site.kv_num_heads} if site.is_packed else {}
        counts |= {} if site.is_packed else dict.fromkeys(("key", "value"), site.kv_num_heads)
        tensors = {site.input(name): heads for name, heads in counts.items()}
        return {
            name: Noisy(site.dtype, heads * site.head_size, size_or_one(captured.get(name)))
            for name, heads in tensors.items()
        }

    def compare(self, emitted: onnx.ModelProto, captured: Mapping[str, np.ndarray]) -> Iterator[Comparison]:
        for emitted_site in find_emitted_sites(emitted, self.cache_sites, captured):
            site = emitted_site.site
            if detail := emitted_site.fault_of_mask or fault_of_tables(
                site, emitted_site.node, emitted_site.values, OP_INPUTS
            ):
                yield make_failure(site, detail)
            elif (step := _read_captured_step(site, emitted_site.node, emitted_site.values)) is not None:
                output, *caches = (captured.get(o) for o in site.node.output[:3])
                yield compare_cache_site(site, emitted_site.attributes, step, output, caches)

    def measure_eight_bits(
        self,
        emitted: onnx.ModelProto,
        captured: Mapping[str, np.ndarray],
        precisions: Sequence[EightBits],
        names: Collection[str],
    ) -> Iterator[tuple[CacheSite, EightBitErrors]]:
        """The errors of some sites with 8-bit operands, by a model of the kernels.

        Args:
            emitted: the model with the nodes.
            captured: values of :meth:`tensors` and of the model's inputs.
            precisions: those to measure.
            names: of the sites; their caches are not quantized.
        """
        for emitted_site in find_emitted_sites(emitted, self.cache_sites, captured):
            site = emitted_site.site
            if site.name not in names:
                continue
            if (step := _read_captured_step(site, emitted_site.node, emitted_site.values)) is not None:
                typed = in_type(step, np.dtype(helper.tensor_dtype_to_np_dtype(site.dtype)))
                yield site, measure_eight_bits_of_step(typed, precisions)


def _read_captured_step(site: CacheSite, node: onnx.NodeProto, values: Mapping[str, np.ndarray]) -> CacheStep | None:
    """The step of a node by its tensors; None where one of them is not known."""
    names = dict(enumerate(node.input[: len(INPUTS)]))
    names[_LENGTHS] = site.input("seqlens_k")
    if any(name and name not in values for name in names.values()):
        return None
    arrays = {INPUTS[i]: values[name] for i, name in names.items() if name}
    layout = site.layout
    return CacheStep(
        query=arrays["query"],
        key=arrays.get("key"),
        value=arrays.get("value"),
        past_key=arrays.get("past_key"),
        past_value=arrays.get("past_value"),
        lengths=arrays["seqlens_k"].astype(np.int64) + site.uncounted_keys,
        total=int(arrays["total_sequence_length"].reshape(-1)[0]),
        sliding=site.sliding,
        position_ids=arrays.get("position_ids"),
        bias=arrays.get("attention_bias"),
        layout=None if layout is None else layout.allowed,
        block_size=0 if layout is None else layout.block_size,
        key_scale=arrays.get("k_scale"),
        value_scale=arrays.get("v_scale"),
        **attention_of_site(site, arrays),
    )


def compare_cache_site(
    site: CacheSite,
    attributes: Mapping[str, PlainValue],
    captured: CacheStep,
    original: np.ndarray | None,
    caches: Sequence[np.ndarray | None] = (),
) -> Comparison:
    """The operator beside the contract in fp64, in the worst of the steps that are made of a captured one.

    Args:
        site: the node that was replaced.
        attributes: of the node in its place.
        captured: a step of the original.
        original: what that computed, or None.
        caches: present keys and values of the original, where they are quantized and known.
    """
    if original is not None and (failure := _compare_original(site, captured, original, caches)) is not None:
        return failure
    results = []
    for label, step in _steps(in_type(captured, np.dtype(helper.tensor_dtype_to_np_dtype(site.dtype)))):
        comparison = _compare_step(site, attributes, label, step)
        if not comparison.ok:
            return comparison
        results.append(comparison)
    return worst_of(results)


def _compare_original(
    site: CacheSite, step: CacheStep, original: np.ndarray, caches: Sequence[np.ndarray | None]
) -> Comparison | None:
    """A failed comparison where the replaced node differs from the contract; None where it agrees."""
    rows = ~step.padded
    held = None
    if step.is_quantized and len(caches) == 2 and caches[0] is not None and caches[1] is not None:
        held = caches[0], caches[1]
    exact, single = compute_step(step, held=held), compute_step(step, np.float32, held=held)
    for name, wanted, cache in zip(
        ("present_key", "present_value"), (exact.key, exact.value), held or (), strict=False
    ):
        compared = _compare_quantized(site, name, wanted, cache, step)
        if not compared.ok:
            return replace(compared, detail=f"the replaced node: {compared.detail}")
    return compare_original(site, original[rows], exact.output[rows], single.output[rows])


def _compare_step(site: CacheSite, attributes: Mapping[str, PlainValue], label: str, step: CacheStep) -> Comparison:
    """Compares output and caches of one step; undefined rows are left out."""
    try:
        result = run_step(attributes, step)
    except LibraryError as error:
        return make_failure(site, f"{label}: {error}")
    caches = (result.key, result.value) if step.is_quantized else None
    dtype = step.query.dtype
    exact, single = compute_step(step, held=caches), compute_step(step, np.float32, dtype, caches)
    rows = ~step.padded
    mine, wanted, rounded = (x.output[rows] for x in (result, exact, single))
    unused = int(result.output[~rows].size)
    narrow = _narrow_output(attributes, step, caches, rows, exact.value)
    compared = compare_with_contract(site, f"{label}, output", mine, wanted, rounded, dtype, unused, narrow)
    results = [replace(compared, relative_rms=relative_rms(mine, wanted))]
    held = np.arange(step.capacity)[None] < step.rows[:, None]
    for name, field in (("present_key", "key"), ("present_value", "value")):
        mine, wanted, rounded = (getattr(x, field) for x in (result, exact, single))
        what = f"{label}, {name}"
        if step.is_quantized:
            results.append(_compare_quantized(site, what, wanted, mine, step))
        else:
            mine, wanted, rounded = (x.swapaxes(1, 2)[held] for x in (mine, wanted, rounded))
            results.append(compare_with_contract(site, what, mine, wanted, rounded, dtype))
    return worst_of(results)


def _narrow_output(
    attributes: Mapping[str, PlainValue],
    step: CacheStep,
    caches: tuple[np.ndarray, np.ndarray] | None,
    rows: np.ndarray,
    values: np.ndarray,
) -> NarrowResult | None:
    """The contract of a node whose attributes allow a narrower precision, in some rows of its output; None: they do not."""
    precision = precision_of(attributes)
    if precision is None:
        return None
    # Rotated queries and keys are rounded to the site's type first: both roundings together may be one step more.
    output = compute_step(replace(step, precision=precision), storage=step.query.dtype, held=caches).output[rows]
    scale = 1.0 if step.value_scale is None else float(np.abs(step.value_scale).max())
    return NarrowResult.of(precision, output, values * scale)


def _compare_quantized(
    site: CacheSite, label: str, wanted: np.ndarray, computed: np.ndarray, step: CacheStep
) -> Comparison:
    """Quantized caches: few elements may differ, and by one step of the quantizer alone."""
    held = np.arange(step.capacity)[None] < step.rows[:, None]
    steps = count_steps(wanted.swapaxes(1, 2)[held], computed.swapaxes(1, 2)[held])
    away, flips = float(steps.max(initial=0)), int(np.count_nonzero(steps))
    ok = away <= 1 and flips <= 1 + _FLIPS * steps.size
    detail = (
        "" if ok else f"{label}: {flips} of {steps.size} elements differ, by up to {away:.0f} steps of the quantizer"
    )
    return Comparison(f"site {site.name!r}", away, 1.0, ok, site.name, detail, Coverage(steps.size))


def run_step(attributes: Mapping[str, PlainValue], step: CacheStep) -> CacheStepResult:
    """Runs the library's operator on a step, into buffers that were filled with large numbers.

    Raises:
        LibraryError: what the operator refuses.
    """
    inputs: list[np.ndarray | None] = [
        step.query,
        step.key,
        step.value,
        step.past_key,
        step.past_value,
        (step.lengths - 1).astype(np.int32),
        np.array(step.total, np.int32),
        step.cos,
        step.sin,
        None if step.position_ids is None else step.position_ids.astype(np.int64),
        step.bias,
        step.sink,
        step.key_scale,
        step.value_scale,
        step.query_norm,
        step.key_norm,
        None,
        *step.tables,
    ]
    while inputs[-1] is None:
        inputs.pop()
    batch, queries = step.query.shape[:2]
    assert step.past_key is not None
    size = step.past_key.shape[3]
    dtype = step.query.dtype
    output = np.full((batch, queries, step.num_heads * size), _POISON, dtype)
    shape = (batch, step.kv_num_heads, step.capacity, size)
    poison = _QUANTIZED_POISON if step.is_quantized else _POISON
    caches = [np.full(shape, poison).astype(step.past_key.dtype) for _ in range(2)]
    operands = [None if x is None else np.ascontiguousarray(x) for x in inputs]
    Op(OP, attributes).run(operands, [output, *caches], threads=2)
    return CacheStepResult(output, caches[0], caches[1])


def _steps(captured: CacheStep) -> Iterator[tuple[str, CacheStep]]:
    """The captured step, and steps made of its tensors: several tokens, and one token, behind pasts of different lengths."""
    yield "the captured step", captured
    if captured.past_key is None:
        return
    queries = captured.query.shape[1]
    window = min(captured.window if captured.pattern is None else captured.pattern.reach, _LONGEST_WINDOW)
    longest = (window or 16) + 21
    if captured.layout is not None:
        described = captured.layout.shape[1] * captured.block_size
        longest = min(_longest_sparse(captured.layout, captured.block_size), described - queries)
    if captured.cos is not None:
        longest = min(longest, len(captured.cos) - queries)
    if longest < 1:
        return
    for label, count in (("several tokens behind a past", queries), ("one token behind a past", 1)):
        if count <= queries and (count > 1 or label.startswith("one")):
            yield label, _behind_past(captured, count, longest)


def _longest_sparse(layout: np.ndarray, block_size: int) -> int:
    """The keys of a past that reaches two blocks beyond the first block that a query leaves out."""
    missing = (layout.sum(2) < 1 + np.arange(layout.shape[1])).any(0)
    first = int(np.argmax(missing)) if missing.any() else 0
    return min((first + 2) * block_size + 5, _LONGEST_WINDOW)


def _behind_past(captured: CacheStep, queries: int, longest: int) -> CacheStep:
    """A step of the first tokens of a captured one behind pasts, the longest of so many keys."""
    rng = np.random.default_rng(queries)
    assert captured.past_key is not None
    row = (longest + queries) * captured.past_key.shape[1] * captured.past_key.shape[3]
    batch = max(1, min(len(captured.lengths), _MOST_ELEMENTS // row))
    before = np.array([longest, *rng.integers(0, longest, batch - 1, endpoint=True)], np.int64)
    lengths = before + queries
    total = int(lengths.max())
    if captured.sliding:
        capacity = int(captured.past_key.shape[2])
    else:
        capacity = total + 3
    sources = [captured.past_key, captured.past_value]
    stored = captured.past_key.dtype if captured.is_quantized else captured.query.dtype
    pasts = [_fill_cache(x[:batch], capacity, rng, stored) for x in sources if x is not None]

    def cut(array: np.ndarray | None) -> np.ndarray | None:
        return None if array is None else np.ascontiguousarray(array[:batch, :queries])

    query = cut(captured.query)
    assert query is not None
    bias = captured.bias
    if bias is not None:
        bias = np.resize(bias, (min(batch, bias.shape[0]), bias.shape[1], queries, total))
    positions = None if captured.position_ids is None else before[:, None] + np.arange(queries)[None]
    return replace(
        captured,
        query=query,
        key=cut(captured.key),
        value=cut(captured.value),
        past_key=pasts[0],
        past_value=pasts[1],
        lengths=lengths,
        total=total,
        position_ids=positions,
        bias=bias,
    )


def _fill_cache(past: np.ndarray, capacity: int, rng: np.random.Generator, dtype: np.dtype) -> np.ndarray:
    """A cache of so many rows, which all differ, with numbers as large as those of a captured one."""
    spread = float(past.astype(np.float32).std()) if past.size else 0.0
    shape = (past.shape[0], past.shape[1], capacity, past.shape[3])
    numbers = rng.standard_normal(_PERIOD) * (spread or 1.0)
    return np.resize((np.clip(numbers, -127, 127) if is_quantized(past) else numbers).astype(dtype), shape)
