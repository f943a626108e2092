# SPDX-License-Identifier: Apache-2.0
"""What every case must hold: the lifted mask is the drawn one, and the optimized model computes what the original does."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper

import stof
from stof.attention.decide.cost_cpu import refusals
from stof.attention.describe.site_problem import SiteProblem
from stof.attention.emit import Rewrite, emit
from stof.attention.expand.expanders import make_working_copy
from stof.attention.find import find_sites
from stof.errors import UnsupportedError
from stof.mask.accept import accept, with_or_without_guard
from stof.mask.check.checker import MaskChecker, MaskMismatchError
from stof.mask.lift import MAY_FORBID, lift
from stof.mask.relative_bias.lift import with_relative_bias
from stof.mask.site import AttentionSite, LiftedMask, tables_of
from stof.symbolic import Symbolic

from . import oracle
from .attention import Case
from .expr import Mask, Values, evaluate


class Fault(AssertionError):
    """stof is wrong about a case. ``kind`` keeps a shrunk case about the same thing."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class GeneratorFault(AssertionError):
    """The generator wrote a model that is not the mask that it drew."""


@dataclass
class Verdict:
    """What became of a case; ``reason`` why it was refused."""

    lifted: str | None = None
    reason: str = ""
    caught: bool = False  # refused because the check by execution found the lifted mask wrong
    lengths: list[tuple[int, int, int]] = field(default_factory=list)


def session(model: onnx.ModelProto, *, library: bool = False, optimize: bool = False) -> ort.InferenceSession:
    """A session on one thread, as the graph stands unless ``optimize``."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if library:
        stof.register(options)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def judge(case: Case, mask: Mask, rng: random.Random, *, body: bool = False, optimize: bool = False) -> Verdict:
    """Optimizes a case and compares.

    ``body``: the optimized model runs by its function body, without the library; ``optimize``: with ONNX Runtime's own
    optimizations.

    Raises:
        Fault: stof is wrong.
        GeneratorFault: the case is not what was drawn.
    """
    verdict = Verdict()
    before = case.model.SerializeToString()
    working = make_working_copy(case.model)
    symbolic = Symbolic(working.model)
    sites, findings = find_sites(working.model, symbolic, working.materialized)
    findings = [*working.findings, *findings]
    rewrite: Rewrite | None = None
    seen: set[int] = set()
    if sites:
        rewrite = _lifted(working.model, symbolic, sites[0], verdict, seen)
    elif not findings:
        raise Fault("no finding", "the softmax was neither matched nor reported")
    else:
        verdict.reason = findings[0].reason
    if rewrite is None and len(verdict.reason) < 20:
        raise Fault("no reason", f"refused because of {verdict.reason!r}")
    optimized = None if rewrite is None else emit(working.expand_for([rewrite.site]), symbolic, [rewrite])
    if case.model.SerializeToString() != before:
        raise Fault("changed", "the original model was changed")
    original = with_terms(case)
    runner = session(original)
    other = None if optimized is None else session(optimized, library=not body, optimize=optimize)
    usual = _sizes(case, mask, rng, seen)
    for number, sizes in enumerate([*usual, *_edges(case, rng)]):
        feeds = feeds_of(case, sizes, number, rng)
        values = values_of(case, sizes, feeds)
        drawn = evaluate(mask, values)
        try:
            found: list[Any] = runner.run(None, feeds)
        except Exception:
            if number < len(usual):
                raise
            continue  # a graph need not run without rows or keys
        if body and optimize and 0 in (sizes["B"], sizes["S"], sizes["T"]):
            continue  # ONNX Runtime's fusions write -1 into the function body's Reshape, which a size of 0 leaves open
        verdict.lengths.append((sizes["S"], sizes["T"], sizes["P"]))
        count = len(case.model.graph.output)
        check_terms(case, drawn, found[count:])
        if rewrite is None or other is None:
            break
        past = sizes["P"] if rewrite.site.query_offset else 0  # rows count from 0 where the sizes are fixed
        read = {**feeds, **computed(case, rewrite.mask, feeds)}
        check_lifted(rewrite.mask, drawn, {**sizes, "P": past}, read)
        _check_outputs(case, rewrite, drawn, found[:count], other.run(None, feeds))
    return verdict


def _lifted(
    model: onnx.ModelProto, symbolic: Symbolic, site: AttentionSite, verdict: Verdict, seen: set[int]
) -> Rewrite | None:
    def accepted(one: AttentionSite) -> Rewrite:
        verdict.caught = False
        checker = MaskChecker(model, symbolic)
        found = with_relative_bias(checker, one, lift(symbolic, one))
        try:
            accept(checker, one, found)
        except UnsupportedError as error:
            verdict.caught = isinstance(error, MaskMismatchError)
            raise
        finally:
            seen.update(checker.compared_lengths)
        return Rewrite(one, found)

    try:
        rewrite = with_or_without_guard(site, accepted)
    except UnsupportedError as error:
        verdict.reason = str(error)
        return None
    found = rewrite.mask
    if reasons := refusals(SiteProblem.of(rewrite.site, found)):
        verdict.reason = "no kernel: " + "; ".join(reasons)
        return None
    verdict.lifted = found.expression.text
    if (found.bias or found.relative is not None) and found.expression.allows_all:
        verdict.reason = f"bias: {'; '.join(map(str, found.notes))}"
    return rewrite


def with_terms(case: Case) -> onnx.ModelProto:
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    known = {o.name for o in model.graph.output} | {i.name for i in model.graph.input}
    for name, _ in case.terms:
        if name not in known:
            model.graph.output.append(helper.make_empty_tensor_value_info(name))
            known.add(name)
    return model


def _sizes(case: Case, mask: Mask, rng: random.Random, seen: set[int]) -> list[dict[str, int]]:
    """Three sets of sizes at which the lifter did not look; the fixed ones where they are."""
    dims = case.inputs
    fixed = {x: n for x, n in _fixed(case).items() if n is not None}
    found = []
    for number in range(1 if "S" in fixed else 3):
        fresh = [n for n in range(3, 28) if n not in seen]
        S = fixed.get("S") or rng.choice(fresh)
        sizes = {"B": (2, 2, 1)[number], "H": case.heads, "S": S, "P": 0, "T": S}
        if case.form.lengths == "cross":
            sizes["T"] = fixed.get("T") or rng.choice([n for n in fresh if n != S])
        if case.form.lengths == "past":
            sizes["P"] = fixed.get("P") or rng.randint(1, 9)
            sizes["S"] = fixed.get("S") or rng.choice([1, 2, rng.choice(fresh)])
            sizes["T"] = sizes["P"] + sizes["S"]
        found.append(sizes)
    assert dims
    return found


def _edges(case: Case, rng: random.Random) -> list[dict[str, int]]:
    """The least sizes that there are: one or none of a batch, of queries, of keys; more queries than keys."""
    if case.form.fixed:
        return []
    B, H = rng.choice([0, 1, 1, 2]), case.heads
    few = rng.choice([0, 1, 1, 1])
    if case.form.lengths == "cross":
        S, T = rng.choice([(few, 5), (7, few), (9, 4), (few, few)])
        return [{"B": B or 1, "H": H, "S": S, "P": 0, "T": T}]
    if case.form.lengths == "past":
        P, S = rng.choice([(0, 5), (0, 1), (6, few)])
        return [{"B": B or 1, "H": H, "S": S, "P": P, "T": P + S}]
    S = few if B else 5
    return [{"B": B, "H": H, "S": S, "P": 0, "T": S}]


def _fixed(case: Case) -> dict[str, int | None]:
    return dict(case.numbers) if case.form.fixed else {}


def feeds_of(case: Case, sizes: dict[str, int], number: int, rng: random.Random) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(rng.getrandbits(32))
    total = {**sizes, "P + S": sizes["T"]}
    feeds = {}
    for value in case.model.graph.input:
        shape = [d if isinstance(d, int) else total[d] for d in case.inputs[value.name]]
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))
        if value.name == "attention_mask":
            feeds[value.name] = _padding(shape, number, draw).astype(dtype)
        elif value.name == "lengths":
            feeds[value.name] = draw.integers(min(1, sizes["T"]), sizes["T"], shape, endpoint=True).astype(dtype)
        elif value.name.startswith("segment"):
            feeds[value.name] = np.cumsum(draw.random(shape) < 0.3, axis=-1).astype(dtype)
        else:
            feeds[value.name] = draw.standard_normal(shape).astype(dtype)
    return feeds


def _padding(shape: list[int], number: int, draw: np.random.Generator) -> np.ndarray:
    """Padded left, right, and with holes; one row of the batch is not padded, and no row has no key at all."""
    pad = np.ones(shape, np.int64)
    for row in pad[shape[0] - 1 :] if shape[1] else ():
        n = int(draw.integers(1, max(2, shape[1])))
        if number == 0:
            row[: min(n, shape[1] - 1)] = 0
        elif number == 1:
            row[max(1, shape[1] - n) :] = 0
        else:
            row[draw.random(shape[1]) < 0.4] = 0
            row[int(draw.integers(shape[1]))] = 1
    return pad


def values_of(case: Case, sizes: dict[str, int], feeds: dict[str, np.ndarray]) -> Values:
    same = feeds.get("segment_ids")
    return Values(
        **{x: sizes[x] for x in "BHSTP"},
        pad=feeds.get("attention_mask"),
        segq=feeds.get("segment_q", same),
        segk=feeds.get("segment_k", same),
        lengths=feeds.get("lengths"),
    )


def check_terms(case: Case, drawn: np.ndarray, terms: list[np.ndarray]) -> None:
    """The mask's tensors in the model say what was drawn."""
    kept = np.ones(drawn.shape, bool)
    limit = case.fill / 2 if np.isfinite(case.fill) else -1e30
    for (_, kind), value in zip(case.terms, terms, strict=True):
        if kind in ("keep", "drop"):
            kept &= value if kind == "keep" else ~value
        else:
            kept &= (value if kind == "add" else -value).astype(np.float64) > limit
    if not np.array_equal(kept, drawn):
        where = tuple(int(i) for i in np.argwhere(kept != drawn)[0])
        raise GeneratorFault(
            f"the model {'allows' if kept[where] else 'forbids'} (b, h, q, k) = {where}, the mask does not"
        )


def computed(case: Case, mask: LiftedMask, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What a mask reads besides inputs, as the model computes it."""
    names = [o.tensor for o in mask.operands if o.tensor not in feeds]
    if not names:
        return {}
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    model.graph.output.extend(onnx.ValueInfoProto(name=n) for n in dict.fromkeys(names))
    found: list[Any] = session(model).run(names, feeds)
    return dict(zip(names, found, strict=True))


def check_lifted(mask: LiftedMask, drawn: np.ndarray, sizes: dict[str, int], feeds: dict[str, np.ndarray]) -> None:
    operands: dict[str, np.ndarray] = dict(tables_of(mask))
    for operand in mask.operands:
        array = operand.prepare(feeds[operand.tensor])
        operands[operand.role] = array != 0 if operand.role == "pad" else array.astype(np.int64)
    found = oracle.evaluate(mask.expression.text, sizes, operands)
    # What a bias forbids (a finite one: by much) may be left to it.
    wrong = drawn & ~found if mask.bias or mask.relative is not None else found != drawn
    if wrong.any():
        where = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise Fault(
            "lifted", f"'{mask.expression}' {'allows' if found[where] else 'forbids'} (b, h, q, k) = {where} at {sizes}"
        )


def _check_outputs(
    case: Case,
    rewrite: Rewrite,
    drawn: np.ndarray,
    wanted: list[np.ndarray],
    found: list[np.ndarray],
) -> None:
    out, mine = (_bhsd(x[0], case) for x in (wanted, found))
    for a, b in zip(wanted[1:], found[1:], strict=True):
        if not np.array_equal(a, b):
            raise Fault("present", "another output of the model changed")
    empty = ~drawn.any(-1)
    half = case.form.half
    for rows, name in ((~empty, "rows with keys"), (empty, "rows without a key")):
        if rows is empty and MAY_FORBID in rewrite.mask.notes:
            continue  # the pipeline's verification decides about these
        a, b = out[rows].astype(np.float64), mine[rows].astype(np.float64)
        if not np.array_equal(np.isnan(a), np.isnan(b)):
            raise Fault("NaN", f"{name}: {np.isnan(a).sum()} NaN in the original, {np.isnan(b).sum()} in the optimized")
        # The sum of -1e9 and a score keeps no digit of the score, that of -1e4 three: such rows are compared loosely.
        soft = rows is empty and abs(case.fill) < 1e30
        tolerance = 0.02 if half else 5e-3 if soft else 1e-5
        error = np.abs(np.nan_to_num(a) - np.nan_to_num(b)).max(initial=0.0)
        if error > tolerance:
            policy = rewrite.mask.empty_rows.value
            raise Fault(
                "output" if rows is not empty else "empty rows", f"{name} differ by {error:.2e} (empty rows: {policy})"
            )


def _bhsd(x: np.ndarray, case: Case) -> np.ndarray:
    if case.form.layout == "bhsd":
        return x
    if case.form.layout != "bshd":
        x = x.reshape(*x.shape[:2], case.heads, x.shape[2] // case.heads)
    return x.transpose(0, 2, 1, 3)
