# SPDX-License-Identifier: Apache-2.0
"""``python -m bench decoder``: whole decoders of random weights before and after, and their results as JSON."""

from __future__ import annotations

import argparse
import gc
import time
from contextlib import nullcontext
from pathlib import Path

from bench.decoder.build_decoder import build_decoder
from bench.decoder.devices import CudaDevice, DecoderDevice, HostDevice
from bench.decoder.graph import DecoderShape
from bench.decoder.measure_decoder import DecoderPlan, describe_record, measure_decoder, summarize
from bench.decoder.steps import DecoderStep
from bench.decoder.variants import VARIANTS, DecoderVariant, file_size, write_graphs, write_weights
from stof.bench import measure
from stof.bench.results import Record, store
from stof.files import temporary_folder
from stof.terminal import say

HEADS = {"cuda": (8, 32), "cpu": (2,)}  # of keys
LENGTHS = {"cuda": (16384, 32768, 131072), "cpu": (1024, 4096)}
PROMPT = {"cuda": 32768, "cpu": 1024}
CHECK = {"cuda": 1536, "cpu": 1536}
_ROUNDS = {"cuda": 7, "cpu": 5}
_MOST_CACHE = 18 << 30  # bytes
_LARGER_BATCH = 8


def shape_of(device: str, kv_heads: int, positions: int) -> DecoderShape:
    """The decoder of a device: 7B-shaped with 4 layers on a GPU, a small one on a CPU."""
    if device == "cuda":
        return DecoderShape(4096, 32, kv_heads, 128, 11008, 32000, 4, positions, "float16")
    return DecoderShape(256, 8, kv_heads, 64, 688, 1000, 2, positions, "float32")


def plan_of(
    device: str, kv_heads: int, lengths: tuple[int, ...], batches: tuple[int, ...] | None, prompt: int, rounds: int
) -> DecoderPlan:
    """What is measured of a decoder with so many KV heads.

    Args:
        device: "cuda" or "cpu".
        kv_heads: G.
        lengths: keys after a token.
        batches: B; None: 1 and the largest up to 8 whose caches fit.
        prompt: tokens of the prompt; 0: none is timed.
        rounds: turns.
    """
    check = CHECK[device]
    shape = shape_of(device, kv_heads, max(*lengths, prompt, check + 64))
    steps = []
    for batch_number in range(2 if batches is None else len(batches)):
        for length in lengths:
            batch = batches[batch_number] if batches is not None else 1
            if batches is None and batch_number:
                batch = min(_LARGER_BATCH, _MOST_CACHE // shape.cache_bytes(1, length))
            steps.append(DecoderStep(batch, 1, length, length))
    if batches is None and len(lengths) > 1:
        steps.append(DecoderStep(1, 1, lengths[0], lengths[-1]))  # a short sequence in caches for long ones
    return DecoderPlan(
        shape, tuple(dict.fromkeys(steps)), DecoderStep(1, prompt, prompt, prompt) if prompt else None,
        DecoderStep(1, check, check, check + 64), rounds,
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints and stores every decoder that the arguments ask for; 3 where something is missing."""
    with measure.pinned(arguments.threads[0]) if arguments.device == "cpu" and not arguments.prepare else nullcontext():
        return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    variants = [v for v in VARIANTS if arguments.variants is None or v.name in arguments.variants]
    if unknown := set(arguments.variants or ()) - {v.name for v in VARIANTS}:
        known = ", ".join(v.name for v in VARIANTS)
        raise ValueError(f"no variant {', '.join(sorted(unknown))}; there are {known}")
    if arguments.device == "cpu":
        variants = [v for v in variants if v.xqa]
    device: DecoderDevice | None = None
    if not arguments.prepare and arguments.device == "cuda":
        device = CudaDevice()
    elif not arguments.prepare:
        device = HostDevice(arguments.threads[0])
    start = time.monotonic()
    records: list[Record] = []
    for kv_heads in arguments.heads or HEADS[arguments.device]:
        lengths = tuple(arguments.lengths or LENGTHS[arguments.device])
        batches = tuple(arguments.batches) if arguments.batches else None
        prompt = PROMPT[arguments.device] if arguments.prompt is None else arguments.prompt
        rounds = arguments.rounds or _ROUNDS[arguments.device]
        plan = plan_of(arguments.device, kv_heads, lengths, batches, prompt, rounds)
        if device is None:
            folder = _folder_of(arguments.prepared or Path("build/bench"), plan)
            write_graphs(plan.shape, arguments.device, folder, variants)
            say(str(folder))
            continue
        records += _measure(plan, device, arguments, variants, start)
        gc.collect()
    say(*summarize(records))
    return 3 if any(r["missing"] for r in records) else 0


def _measure(
    plan: DecoderPlan,
    device: DecoderDevice,
    arguments: argparse.Namespace,
    variants: list[DecoderVariant],
    start: float,
) -> list[Record]:
    """Measures one decoder, prints and stores each record."""
    found: list[Record] = []
    with temporary_folder() as folder:
        decoder = build_decoder(plan.shape)
        write_weights(decoder, device, folder)
        prepared = arguments.prepared and _folder_of(arguments.prepared, plan)
        if prepared and prepared.is_dir():
            for path in prepared.glob("*.onnx"):
                (folder / path.name).write_bytes(path.read_bytes())
        else:
            write_graphs(plan.shape, arguments.device, folder, variants)
        say(
            f"decoder with {plan.shape.kv_heads} KV heads: weights of {file_size(decoder)}; {time.monotonic() - start:.0f} s"
        )
        for record in measure_decoder(plan, decoder, device, folder, variants):
            store(arguments.results / f"decoder-{arguments.device}.json", record)
            say(*describe_record(record), f"  at {time.monotonic() - start:.0f} s")
            found.append(record)
    return found


def _folder_of(prepared: Path, plan: DecoderPlan) -> Path:
    shape = plan.shape
    return prepared / f"decoder-{shape.hidden}-{shape.heads}-{shape.kv_heads}-{shape.positions}"
