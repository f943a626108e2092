# SPDX-License-Identifier: Apache-2.0
"""Times the variants of a decoder in turns: tokens at several lengths, and a prompt; beside them the bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.decoder.devices import DecoderDevice
from bench.decoder.graph import Decoder, DecoderShape
from bench.decoder.steps import Caches, DecoderStep, DecoderTensors
from bench.decoder.variants import (
    CACHED,
    ORIGINAL,
    S2,
    VARIANTS,
    DecoderVariant,
    cache_bytes_read,
    masks_of,
    pair_share,
)
from stof.bench.measure import Timing
from stof.bench.results import Record

ALLOWED = 0.02  # of the range of values, between fp16 results of two legal runs
_S2_SPEEDUP = 8  # of attention in a prompt, by which the bound of S2 is stated
_CHECKED_LAYER = "key"


@dataclass(frozen=True)
class DecoderPlan:
    """What is measured of one decoder.

    Attributes:
        shape: the decoder.
        tokens: the steps of one token.
        prompt: the first prompt; None is none.
        check: a first prompt; its results and those of the next token are compared.
        rounds: turns.
    """

    shape: DecoderShape
    tokens: tuple[DecoderStep, ...]
    prompt: DecoderStep | None
    check: DecoderStep
    rounds: int


class _Sessions:
    """The sessions of a decoder's variants, and why others have none."""

    def __init__(self, device: DecoderDevice, folder: Path) -> None:
        self._device = device
        self._folder = folder
        self.found: dict[str, Any] = {}
        self.captures: set[str] = set()
        self.missing: dict[str, str] = {}
        self.notes: dict[str, str] = {}

    def path(self, variant: DecoderVariant) -> Path:
        """The variant's file."""
        return self._folder / variant.file

    def make(self, variant: DecoderVariant, captures: bool = True) -> None:
        """Makes a session, if possible one whose runs are captured."""
        name, path = variant.name, str(self.path(variant))
        self.found.pop(name, None)
        self.captures.discard(name)
        try:
            self.found[name] = self._device.session(path, stof=variant.optimized, xqa=variant.xqa, captures=captures)
        except Exception as failure:  # whatever its runtime raises: the others are timed without it
            if captures:
                self.give_up_capture(variant, failure)
            else:
                self.missing[name] = reason(failure)
        else:
            self.captures |= {name} if captures else set()

    def give_up_capture(self, variant: DecoderVariant, failure: Exception) -> None:
        """Makes the session again, whose runs are then timed without a captured graph."""
        self.notes[f"{variant.name} is not captured"] = reason(failure)
        self.make(variant, captures=False)

    def leave_out(self, variant: DecoderVariant, why: str) -> None:
        """Times the variant no more."""
        self.found.pop(variant.name, None)
        self.missing[variant.name] = why


def reason(failure: Exception) -> str:
    """A failure in one line."""
    return f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}"


def measure_decoder(
    plan: DecoderPlan,
    decoder: Decoder,
    device: DecoderDevice,
    folder: Path,
    variants: Sequence[DecoderVariant] = VARIANTS,
) -> Iterator[Record]:
    """Measures the prompt, then every token; gives a record of each.

    Args:
        plan: what is measured.
        decoder: whose files lie in ``folder``.
        device: where.
        folder: has a file for every variant, and the weights.
        variants: what is timed.
    """
    rate = device.read_rate()
    machine = {**device.machine(), "read_gbps": round(rate / 1e9, 1)}
    sessions = _Sessions(device, folder)
    for variant in variants:
        if variant.xqa:
            sessions.make(variant)
    errors = _check(plan, device, sessions, variants)

    def complete(record: Record, step: DecoderStep) -> Record:
        shape = plan.shape
        kind = "prompt" if step.is_prompt else "token"
        return {
            "key": [kind, shape.kv_heads, step.batch, step.length, step.capacity],
            "grid": "decoder",
            "step": kind,
            "shape": {
                "B": step.batch, "S": step.tokens, "T": step.length, "capacity": step.capacity, "H": shape.heads,
                "G": shape.kv_heads, "D": shape.head_size, "hidden": shape.hidden, "inner": shape.inner,
                "vocabulary": shape.vocabulary, "layers": shape.layers, "dtype": shape.dtype,
            },
            "rounds": plan.rounds,
            **record,
            "labels": {v.name: v.label for v in variants},
            "error": {k: float(f"{e:.1e}") for k, e in errors.items()},
            "missing": dict(sessions.missing),
            "notes": dict(sessions.notes),
            "captured": sorted(sessions.captures),
            "machine": machine,
        }  # fmt: skip

    if plan.prompt is not None:
        yield complete(_measure_prompt(plan, plan.prompt, device, sessions, variants), plan.prompt)
    for variant in variants:
        if not variant.xqa:
            sessions.make(variant)
    values = max((math.prod(plan.shape.cache_shape(s.batch, s.capacity)) for s in plan.tokens), default=0)
    caches = Caches(device, plan.shape, values)
    for number, step in enumerate(plan.tokens, 1):
        tensors = DecoderTensors(device, plan.shape, step, caches)
        found = _time(plan, device, sessions, tensors, variants, number)
        record = _times(found, variants)
        record["weight_bytes"] = decoder.read_bytes
        record["cache_bytes"] = {
            v.name: cache_bytes_read(sessions.path(v), plan.shape, step.batch, step.length - 1)
            for v in variants
            if v.name in found
        }
        bounds = {k: (decoder.read_bytes + n) / rate for k, n in record["cache_bytes"].items()}
        record["bound_us"] = {k: round(b * 1e6, 2) for k, b in bounds.items()}
        record["of_bound"] = {k: round(b / found[k].median, 4) for k, b in bounds.items()}
        yield complete(record, step)


def _time(
    plan: DecoderPlan,
    device: DecoderDevice,
    sessions: _Sessions,
    tensors: DecoderTensors,
    variants: Sequence[DecoderVariant],
    graph: int,
) -> dict[str, Timing]:
    """Times a step of all variants in turns. Where ``graph`` is not 0, a run replays the captured graph of that number."""

    def first_run(variant: DecoderVariant) -> Callable[[], None]:
        session = sessions.found[variant.name]
        binding = tensors.bind(session)
        number = graph if variant.name in sessions.captures else 0
        device.run(session, binding, number)  # captures
        if not np.isfinite(tensors.logits()).all():
            raise ValueError("a logit is not finite")
        return lambda: device.run(session, binding, number)

    calls = {}
    for variant in variants:
        if variant.name not in sessions.found:
            continue
        try:
            calls[variant.name] = first_run(variant)
            continue
        except Exception as failure:  # as where sessions are made
            if graph and variant.name in sessions.captures:
                sessions.give_up_capture(variant, failure)
            else:
                sessions.leave_out(variant, reason(failure))
        try:
            if variant.name in sessions.found:
                calls[variant.name] = first_run(variant)
        except Exception as failure:  # likewise
            sessions.leave_out(variant, reason(failure))
    return dict(zip(calls, device.time(list(calls.values()), plan.rounds), strict=True)) if calls else {}


def _times(found: dict[str, Timing], variants: Sequence[DecoderVariant]) -> Record:
    """Times, and ratios to the fastest baseline of the same attention and to that of dense attention."""
    ratios: dict[str, dict[str, float]] = {}
    for variant in variants:
        if variant.name not in found or not variant.optimized:
            continue
        own = found[variant.name].median
        for kind, window in (("same attention", variant.window), ("dense", 0)):
            others = [
                found[v.name].median for v in variants if v.name in found and not v.optimized and v.window == window
            ]
            if others and not (kind == "same attention" and variant.sparsify):
                ratios.setdefault(variant.name, {})[kind] = round(min(others) / own, 4)
    return {
        "us": {k: round(t.median * 1e6, 2) for k, t in found.items()},
        "spread_us": {k: [round(t.best * 1e6, 2), round(t.worst * 1e6, 2)] for k, t in found.items()},
        "times_faster": ratios,
    }


def _measure_prompt(
    plan: DecoderPlan, step: DecoderStep, device: DecoderDevice, sessions: _Sessions, variants: Sequence[DecoderVariant]
) -> Record:
    """Times a first prompt, and the part of attention in the dense runs, from which the bound of S2 follows."""
    caches = Caches(device, plan.shape, math.prod(plan.shape.cache_shape(step.batch, step.capacity)))
    tensors = DecoderTensors(device, plan.shape, step, caches)
    found = _time(plan, device, sessions, tensors, variants, 0)
    for session in sessions.found.values():
        device.release(session, tensors.bind(session))
    record = _times(found, variants)
    record["kept_pairs"] = {
        v.name: round(pair_share(masks_of(sessions.path(v))[0], step.length, plan.shape.heads), 4)
        for v in variants
        if v.name in found
    }
    record["attention_share"], record["by_op_us"], record["bounds"] = {}, {}, {}
    for variant in [v for v in variants if v.name in found and not v.window and not v.sparsify]:
        try:
            by_op = device.shares(str(sessions.path(variant)), stof=variant.optimized, bind=tensors.bind)
            inside = sum(by_op.get(op, 0.0) for op in (ORIGINAL, CACHED))
            share, how = inside / sum(by_op.values()), "profile"
            record["by_op_us"][variant.name] = {k: round(v * 1e6, 1) for k, v in by_op.items()}
        except Exception as failure:  # the profiler may fail in any way
            sessions.notes[f"profile of {variant.name}"] = reason(failure)
            estimate = _share_by_difference(record, variant, variants)
            if estimate is None:
                continue
            share, how = estimate, "difference of times"
        record["attention_share"][variant.name] = {"share": round(share, 4), "how": how}
        for sparse in [v for v in variants if v.name in found and v.sparsify == S2]:
            bound = 1 / (1 - share + share / _S2_SPEEDUP)
            times = record["us"][variant.name] / record["us"][sparse.name]
            record["bounds"][f"{sparse.name} over {variant.name}"] = {
                "bound": round(bound, 4), "times_faster": round(times, 4), "of_bound": round(times / bound, 4),
            }  # fmt: skip
    return record


def _share_by_difference(record: Record, dense: DecoderVariant, variants: Sequence[DecoderVariant]) -> float | None:
    """Attention's part of a dense run, from the run of a variant of it that keeps few pairs."""
    sparse = [v for v in variants if v.name in record["us"] and v.optimized and record["kept_pairs"][v.name] < 0.2]
    if not sparse:
        return None
    name = min(sparse, key=lambda v: record["kept_pairs"][v.name]).name
    own = record["us"][dense.name]
    return float((own - record["us"][name]) / own / (1 - record["kept_pairs"][name]))


def _check(
    plan: DecoderPlan, device: DecoderDevice, sessions: _Sessions, variants: Sequence[DecoderVariant]
) -> dict[str, float]:
    """Compares a prompt and the token behind it with the baseline; a declared pattern with its function body.

    Variants that differ are not timed. A body that the runtime refuses is noted.
    """
    shape, prompt = plan.shape, plan.check
    caches = Caches(device, shape, math.prod(shape.cache_shape(prompt.batch, prompt.capacity)))
    token = DecoderStep(prompt.batch, 1, prompt.length + 1, prompt.capacity)
    steps = [DecoderTensors(device, shape, step, caches) for step in (prompt, token)]

    def results(session: Any) -> list[np.ndarray]:
        found = []
        for tensors in steps:
            device.run(session, tensors.bind(session))
            found.append(tensors.logits())
        last = f"{shape.layers - 1}.{_CHECKED_LAYER}"
        return [*found, steps[-1].cache(last, token.length)]

    wanted: dict[str, list[np.ndarray]] = {}
    errors: dict[str, float] = {}
    for variant in variants:
        if variant.name not in sessions.found:
            continue
        try:
            got = results(sessions.found[variant.name])
            if not variant.optimized:
                wanted[variant.name] = got
                continue
            if variant.sparsify:
                expected = results(device.session(str(sessions.path(variant)), stof=False))
            else:
                expected = wanted[variant.baseline]
            errors[variant.name] = max(_difference(a, b) for a, b in zip(expected, got, strict=True))
            if not errors[variant.name] <= ALLOWED:
                sessions.leave_out(variant, f"results differ by {errors[variant.name]:.1e} of the range")
        except Exception as failure:  # as where sessions are made
            sessions.notes[f"{variant.name} is not checked"] = reason(failure)
    return errors


def _difference(expected: np.ndarray, found: np.ndarray) -> float:
    error = np.abs(found - expected).max() / (expected.max() - expected.min())
    return float(error) if np.isfinite(error) else math.inf


def describe_record(record: Record) -> list[str]:
    """The record as text."""
    s = record["shape"]
    what = f"prompt of {s['S']}" if record["step"] == "prompt" else f"token {s['T']}"
    within = f" in caches of {s['capacity']}" if s["capacity"] != s["T"] else ""
    found = [
        f"{what}{within}, B{s['B']} H{s['H']} G{s['G']} D{s['D']}, {s['layers']} layers, {s['dtype']}; median of "
        f"{record['rounds']} rounds; read {record['machine']['read_gbps']:.0f} GB/s"
    ]
    for name, us in record["us"].items():
        low, high = record["spread_us"][name]
        text = f"  {name:18s} {us:12.1f} us ({low:.1f} to {high:.1f})"
        for kind, ratio in record["times_faster"].get(name, {}).items():
            text += f", {ratio:.3f}x {kind}"
        if "of_bound" in record:
            size = (record["weight_bytes"] + record["cache_bytes"][name]) / 1e6
            text += f"; {size:.0f} MB, bound {record['bound_us'][name]:.0f} us, {record['of_bound'][name]:.1%} of it"
        if "kept_pairs" in record and record["kept_pairs"][name] < 1:
            text += f"; {record['kept_pairs'][name]:.2%} of the pairs"
        if name in record["error"]:
            text += f"; differs by {record['error'][name]:.0e}"
        found.append(text)
    for name, share in record.get("attention_share", {}).items():
        found.append(f"  attention in {name}: p = {share['share']:.1%} by {share['how']}")
    for name, bound in record.get("bounds", {}).items():
        found.append(
            f"  {name}: {bound['times_faster']:.3f}x, bound 1 / (1 - p + p/{_S2_SPEEDUP}) = {bound['bound']:.3f}, "
            f"{bound['of_bound']:.1%} of it"
        )
    found += [f"  missing: {k}: {v}" for k, v in record["missing"].items()]
    return [*found, *(f"  note: {k}: {v}" for k, v in record["notes"].items())]


def summarize(records: Sequence[Record]) -> list[str]:
    """The least value of each figure that has a goal, and where it is."""
    tokens = [r for r in records if r["step"] == "token"]
    longest = max((r["shape"]["T"] for r in tokens), default=0)
    found: dict[str, list[tuple[float, str]]] = {}

    def add(what: str, value: float | None, record: Record) -> None:
        if value is not None:
            s = record["shape"]
            found.setdefault(what, []).append((value, f"B{s['B']} G{s['G']} T{s['T']} in {s['capacity']}"))

    for record in tokens:
        for name, what in (("stof", "dense"), ("stof-window", "window")):
            ratio = record["times_faster"].get(name, {}).get("same attention")
            add(f"a token, {what}, over GroupQueryAttention", ratio, record)
        for name, share in record["of_bound"].items():
            if record["shape"]["T"] == longest:
                add(f"a token at {longest}, {name}, of the byte bound", share, record)
    for record in records:
        for name, bound in record.get("bounds", {}).items():
            add(f"a prompt, {name}, of 1 / (1 - p + p/{_S2_SPEEDUP})", bound["of_bound"], record)
    return [f"least {what}: {value:.3f} ({where})" for what, (value, where) in ((k, min(v)) for k, v in found.items())]
