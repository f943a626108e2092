# SPDX-License-Identifier: Apache-2.0
"""``python -m bench decoder-mlp``: decoders with sparse MLPs beside dense ones: tokens, first tokens, resident memory, bounds.

The decoders have the sizes of public models, random weights, and biases that give a stated share of active neurons. All share one
skeleton: RMS norms, rotary embedding, GroupQueryAttention without cross-attention. The MLP is what differs.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from bench.decoder.build_decoder import build_decoder
from bench.decoder.devices import CudaDevice, DecoderDevice, HostDevice
from bench.decoder.graph import DecoderShape
from bench.decoder.measure_decoder import reason
from bench.decoder.mlp_bytes import bounds
from bench.decoder.mlp_files import MlpFiles
from bench.decoder.mlp_memory import describe_memory, measure_memory
from bench.decoder.mlp_models import MODELS, VARIANTS, MlpDecoderVariant, shape_of
from bench.decoder.steps import Caches, DecoderStep, DecoderTensors
from bench.decoder.variants import file_size, write_weights
from stof.bench import measure
from stof.bench.measure import Timing
from stof.bench.results import Record, store
from stof.files import temporary_folder
from stof.terminal import say

CONTEXT = 512  # keys behind a token
PROMPTS = (128, 512)
_ROUNDS = {"cuda": 7, "cpu": 5}


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints and stores every model that the arguments ask for; 3 where a variant is missing."""
    with measure.pinned(arguments.threads[0]) if arguments.device == "cpu" else nullcontext():
        return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    if unknown := set(arguments.variants or ()) - {v.name for v in VARIANTS}:
        raise ValueError(f"no variant {', '.join(sorted(unknown))}; there are {', '.join(v.name for v in VARIANTS)}")
    device: DecoderDevice
    if arguments.device == "cuda":
        device = CudaDevice()
    else:
        device = HostDevice(arguments.threads[0])
    active, idle = arguments.active, arguments.idle
    shapes = {(n, p): shape_of(n, active, p, idle) for n in arguments.models for p in arguments.precisions}
    missing = 0
    for (name, precision), shape in shapes.items():
        record = measure_model(
            name, precision, shape, MODELS[name].active if active is None else active, device, arguments
        )
        store(arguments.results / f"decoder-mlp-{arguments.device}.json", record)
        say(*describe(record))
        missing += len(record["missing"])
        gc.collect()
    return 3 if missing else 0


def measure_model(
    name: str, precision: str, shape: DecoderShape, active: float, device: DecoderDevice, arguments: argparse.Namespace
) -> Record:
    """The record of one model: microseconds of its steps by variant, active shares, resident bytes, bounds.

    Args:
        name: of the model, for the record.
        precision: likewise.
        shape: of the decoder.
        active: the share of the neurons that its biases make active, and that predictors select.
        device: that runs it.
        arguments: of the command.
    """
    start = time.monotonic()
    rate = device.read_rate()
    wanted = [v for v in VARIANTS if arguments.variants is None or v.name in arguments.variants]
    with temporary_folder() as folder:
        decoder = build_decoder(shape)
        write_weights(decoder, device, folder)
        say(f"{name}, {precision}: weights of {file_size(decoder)}; {time.monotonic() - start:.0f} s")
        files = MlpFiles(decoder, folder, device.name, active)
        for variant in wanted:
            files.write(variant)
        say(f"  files after {time.monotonic() - start:.0f} s")
        variants = [v for v in wanted if v.name in files.paths]
        is_held = device.name == "cpu" and not arguments.no_memory
        memory = measure_memory(files, variants, shape) if is_held else {}
        steps = {} if arguments.no_times else _time_steps(device, shape, files, variants, arguments)
    threads = arguments.threads[0] if device.name == "cpu" else 0
    return {
        "key": [name, precision, arguments.batch, round(active, 4), round(shape.mlp.idle, 4), threads],
        "grid": "decoder-mlp",
        "model": name,
        "precision": precision,
        "shape": {
            "hidden": shape.hidden, "inner": shape.inner, "layers": shape.layers, "vocabulary": shape.vocabulary,
            "H": shape.heads, "G": shape.kv_heads, "D": shape.head_size, "activation": shape.mlp.activation,
            "is_gated": shape.mlp.is_gated,
        },
        "batch": arguments.batch,
        "stated_active": active,
        "stated_idle": shape.mlp.idle,
        "active": files.active,
        "steps": steps,
        "memory": memory,
        "weight_bytes": decoder.size,
        "bound_times_faster": bounds(shape, decoder, files.active, CONTEXT, rate),
        "missing": files.missing,
        "machine": {**device.machine(), "read_gbps": round(rate / 1e9, 1)},
        "seconds": round(time.monotonic() - start, 1),
    }  # fmt: skip


def _time_steps(
    device: DecoderDevice,
    shape: DecoderShape,
    files: MlpFiles,
    variants: Sequence[MlpDecoderVariant],
    arguments: argparse.Namespace,
) -> dict[str, Record]:
    """Microseconds and ratios of a token and of prompts; all variants in turns."""
    sessions: dict[str, Any] = {}
    for variant in variants:
        try:
            path = str(files.paths[variant.name])
            sessions[variant.name] = device.session(path, stof=variant.optimized, captures=device.name == "cuda")
        except Exception as failure:  # whatever its runtime raises
            files.missing[variant.name] = reason(failure)
    steps = {f"token {CONTEXT}": DecoderStep(arguments.batch, 1, CONTEXT, CONTEXT)}
    steps |= {f"prompt {length}": DecoderStep(1, length, length, length) for length in PROMPTS}
    rounds = arguments.rounds or _ROUNDS[device.name]
    caches = Caches(device, shape, max(int(np.prod(shape.cache_shape(s.batch, s.capacity))) for s in steps.values()))
    found = {}
    for number, (label, step) in enumerate(steps.items(), 1):
        tensors = DecoderTensors(device, shape, step, caches)
        calls: dict[str, Callable[[], None]] = {}
        logits = {}
        for name in list(sessions):
            try:
                calls[name] = _first_run(device, sessions[name], tensors, 0 if step.is_prompt else number)
            except Exception as failure:  # likewise
                files.missing[name] = reason(failure)
                del sessions[name]
                continue
            logits[name] = tensors.logits()
        if not calls:
            continue
        times = dict(zip(calls, device.time(list(calls.values()), rounds), strict=True))
        found[label] = _summarize(times, logits, device.name == "cpu")
    return found


def _first_run(device: DecoderDevice, session: Any, tensors: DecoderTensors, graph: int) -> Callable[[], None]:
    """A step as a call, after a first run."""
    binding = tensors.bind(session)
    number = graph if device.name == "cuda" else 0
    device.run(session, binding, number)
    if not np.isfinite(tensors.logits()).all():
        raise ValueError("a logit is not finite")
    return lambda: device.run(session, binding, number)


def _summarize(times: dict[str, Timing], logits: dict[str, np.ndarray], by_minima: bool) -> Record:
    """The record of a step; ``by_minima``: ratios are of the least times, where other processes take the cores."""
    reference = logits.get("original", next(iter(logits.values())))
    spread = float(reference.max() - reference.min())
    seconds = {name: t.best if by_minima else t.median for name, t in times.items()}
    return {
        "us": {name: round(t * 1e6, 1) for name, t in seconds.items()},
        "spread_us": {name: [round(t.best * 1e6, 1), round(t.worst * 1e6, 1)] for name, t in times.items()},
        "times_faster": {
            baseline: {n: round(seconds[baseline] / t, 4) for n, t in seconds.items()}
            for baseline in ("original", "dense")
            if baseline in seconds
        },
        "differs": {n: float(f"{np.abs(x - reference).max() / spread:.1e}") for n, x in logits.items()},
    }


def describe(record: Record) -> list[str]:
    """The record as text."""
    s = record["shape"]
    active = ", ".join(f"{n} {100 * a:.1f} %" for n, a in record["active"].items()) or "not measured"
    found = [
        f"{record['model']}, {record['precision']}: K {s['hidden']} F {s['inner']} {s['activation']}, {s['layers']} layers, "
        f"{record['weight_bytes'] / 1e9:.2f} GB; active {100 * record['stated_active']:.0f} % stated, computed: {active}; "
        f"read {record['machine']['read_gbps']:.1f} GB/s; {record['seconds']:.0f} s"
    ]
    for label, step in record["steps"].items():
        for name, us in step["us"].items():
            low, high = step["spread_us"][name]
            text = f"  {label:10s} {name:10s} {us:12.1f} us ({low:.1f} to {high:.1f})"
            for baseline, ratios in step["times_faster"].items():
                text += f", {ratios[name]:.3f}x {baseline}"
            if label.startswith("token") and name in record["bound_times_faster"]:
                text += f" (bound {record['bound_times_faster'][name]:.2f}x)"
            found.append(f"{text}; differs by {step['differs'][name]:.0e}")
    held = describe_memory(record["memory"]) if record["memory"] else []
    return [*found, *held, *(f"  missing: {k}: {v}" for k, v in record["missing"].items())]
