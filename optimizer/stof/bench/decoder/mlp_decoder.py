# SPDX-License-Identifier: Apache-2.0
"""``stof-bench decoder-mlp``: decoders with sparse MLPs beside dense ones: tokens, first tokens, resident memory, bounds.

The decoders have the sizes of public models, random weights, and biases that give a stated share of active neurons. All share one
skeleton: RMS norms, rotary embedding, GroupQueryAttention without cross-attention. The MLP is what differs.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from stof.bench.core import measure
from stof.bench.core.measure import Timing
from stof.bench.core.resident_memory import drop_cached_pages
from stof.bench.core.results import Record, store
from stof.bench.decoder.devices import CudaDevice, DecoderDevice, HostDevice
from stof.bench.decoder.graph import WEIGHTS, Decoder, DecoderShape, build_decoder
from stof.bench.decoder.measure_decoder import reason
from stof.bench.decoder.mlp_form import MlpForm
from stof.bench.decoder.steps import Caches, DecoderStep, DecoderTensors
from stof.bench.decoder.variants import file_size, write_weights
from stof.files import temporary_folder, write_bytes
from stof.terminal import say

CONTEXT = 512  # keys behind a token
PROMPTS = (128, 512)
_CALIBRATION = (8, 64)  # prompts, and tokens of each
_TOKENS_HELD = 16  # that run before resident memory is read
_ROUNDS = {"cuda": 7, "cpu": 5}
_BLOCK = 32  # of int4
PRECISIONS = ("float32", "float16", "int4", "int4a8")  # a8: tokens are rounded to 8 bits, accuracy_level 4


@dataclass(frozen=True)
class MlpVariant:
    """One of the files that are timed.

    Attributes:
        name: in results.
        label: in words.
        optimized: whether it comes from stof-optimize.
        predicted: whether neurons are predicted by ``kind=svd``; else only zeros are left out.
        dense: whether the MLPs stay as they are.
    """

    name: str
    label: str
    optimized: bool = True
    predicted: bool = False
    dense: bool = False


VARIANTS = (
    MlpVariant("original", "ONNX Runtime", optimized=False),
    MlpVariant("dense", "stof-optimize, MLPs dense", dense=True),
    MlpVariant("exact", "stof-optimize: zeros are left out"),
    MlpVariant("predicted", "stof-optimize --sparse-mlp kind=svd", predicted=True),
)
# Sizes from the models' configurations; layers and vocabulary are cut alike where it is said.
_LLAMA_3B = DecoderShape(3072, 24, 8, 128, 8192, 36644, 8, 1024, "float32")  # 8 of 28 layers
MODELS: dict[str, tuple[DecoderShape, MlpForm, float]] = {
    "llama-3b-relu": (_LLAMA_3B, MlpForm("relu"), 0.25),
    "llama-3b-silu": (_LLAMA_3B, MlpForm("silu"), 0.25),
    "opt-1.3b": (
        DecoderShape(2048, 32, 32, 64, 8192, 50272, 24, 1024, "float32"), MlpForm("relu", is_gated=False), 0.05,
    ),
    "nllb-1.3b": (  # the decoder without cross-attention, a quarter of the vocabulary
        DecoderShape(1024, 16, 16, 64, 8192, 64052, 24, 1024, "float32"), MlpForm("relu", is_gated=False), 0.05,
    ),
    "nemotron-4b": (  # 8 of 32 layers
        DecoderShape(3072, 24, 8, 128, 9216, 64000, 8, 1024, "float32"), MlpForm("relu2", is_gated=False), 0.1,
    ),
    "gemma-3n-e2b": (  # the 10 layers with the threshold of 30, an eighth of the vocabulary
        DecoderShape(2048, 8, 2, 256, 8192, 32768, 10, 1024, "float32"), MlpForm("gelu_tanh", has_top_k=True), 0.05,
    ),
    "7b-relu": (DecoderShape(4096, 32, 8, 128, 11008, 32000, 4, 1024, "float32"), MlpForm("relu"), 0.25),
    "7b-silu": (DecoderShape(4096, 32, 8, 128, 11008, 32000, 4, 1024, "float32"), MlpForm("silu"), 0.25),
    "tiny": (DecoderShape(64, 4, 2, 16, 320, 96, 2, 1024, "float32"), MlpForm("relu"), 0.1),
}  # fmt: skip


def shape_of(name: str, active: float | None, precision: str) -> DecoderShape:
    """The decoder of a model.

    Args:
        name: of ``MODELS``.
        active: the share of active neurons; None: the model's.
        precision: of ``PRECISIONS``.
    """
    shape, form, usual = MODELS[name]
    share = usual if active is None else active
    # Values of SiLU are not zero: which ones count as active is up to the selection.
    form = form if form.activation == "silu" else replace(form, active=share)
    if precision.startswith("int4"):
        return replace(shape, mlp=form, block_size=_BLOCK, accuracy_level=4 if precision == "int4a8" else 0)
    return replace(shape, mlp=form, dtype=precision)


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints and stores every model that the arguments ask for; 3 where a variant is missing."""
    if unknown := set(arguments.variants or ()) - {v.name for v in VARIANTS}:
        raise ValueError(f"no variant {', '.join(sorted(unknown))}; there are {', '.join(v.name for v in VARIANTS)}")
    device: DecoderDevice
    if arguments.device == "cuda":
        device = CudaDevice()
    else:
        measure.pin(arguments.threads[0])
        device = HostDevice(arguments.threads[0])
    records = []
    for name in arguments.models:
        for precision in arguments.precisions:
            active = arguments.active if arguments.active is not None else MODELS[name][2]
            record = measure_model(name, shape_of(name, active, precision), active, precision, device, arguments)
            store(arguments.results / f"decoder-mlp-{arguments.device}.json", record)
            say(*describe(record))
            records.append(record)
            gc.collect()
    return 3 if any(r["missing"] for r in records) else 0


def measure_model(
    name: str, shape: DecoderShape, active: float, precision: str, device: DecoderDevice, arguments: argparse.Namespace
) -> Record:
    """The record of one model: microseconds of its steps by variant, active shares, resident bytes, bounds."""
    start = time.monotonic()
    rate = device.read_rate()
    wanted = [v for v in VARIANTS if arguments.variants is None or v.name in arguments.variants]
    with temporary_folder() as folder:
        decoder = build_decoder(shape)
        write_weights(decoder, device, folder)
        say(f"{name}, {precision}: weights of {file_size(decoder)}; {time.monotonic() - start:.0f} s")
        files = _Files(decoder, folder, device.name, active)
        for variant in wanted:
            files.write(variant)
        say(f"  files after {time.monotonic() - start:.0f} s")
        variants = [v for v in wanted if v.name in files.paths]
        resident = {}
        if device.name == "cpu" and not arguments.no_memory:
            resident = {v.name: _resident_bytes(files.paths[v.name], v, shape, folder) for v in variants}
        found = _time_steps(device, shape, files, variants, arguments)
    bounds = _bounds(shape, decoder, files.active, rate)
    return {
        "key": [name, precision, round(active, 4), arguments.threads[0] if device.name == "cpu" else 0],
        "grid": "decoder-mlp",
        "model": name,
        "precision": precision,
        "shape": {
            "hidden": shape.hidden, "inner": shape.inner, "layers": shape.layers, "vocabulary": shape.vocabulary,
            "H": shape.heads, "G": shape.kv_heads, "D": shape.head_size, "activation": shape.mlp.activation,
            "is_gated": shape.mlp.is_gated,
        },
        "stated_active": active,
        "active": files.active,
        "steps": found,
        "resident_bytes": resident,
        "weight_bytes": decoder.size,
        "bound_times_faster": bounds,
        "missing": files.missing,
        "machine": {**device.machine(), "read_gbps": round(rate / 1e9, 1)},
        "seconds": round(time.monotonic() - start, 1),
    }  # fmt: skip


class _Files:
    """The files of the variants: all read one file of weights; rewritten weights lie in further ones.

    Attributes:
        paths: of the files, by variant.
        missing: why others do not exist.
        active: the mean share of neurons that a variant computes, where it was measured.
    """

    def __init__(self, decoder: Decoder, folder: Path, target: str, active: float) -> None:
        self.paths: dict[str, Path] = {}
        self.missing: dict[str, str] = {}
        self.active: dict[str, float] = {}
        self._folder, self._target, self._share = folder, target, active
        self._original = folder / "original.onnx"
        write_bytes("model", self._original, decoder.model.SerializeToString())
        rng = np.random.default_rng(0)
        count, length = _CALIBRATION
        self._prompts = folder / "prompts.json"
        ids = rng.integers(0, decoder.shape.vocabulary, (count, length))
        self._prompts.write_text(json.dumps(ids.tolist()))
        self._inputs = folder / "inputs.npz"
        empty = np.zeros(decoder.shape.cache_shape(1, 0), decoder.shape.dtype)
        caches = {
            f"past_key_values.{i}.{kind}": empty for i in range(decoder.shape.layers) for kind in ("key", "value")
        }
        mask = np.ones((1, length), np.int64)
        np.savez(self._inputs, **{"input_ids": ids[:1], "attention_mask": mask, **caches})  # type: ignore[arg-type]

    def write(self, variant: MlpVariant) -> None:
        """Writes the file of a variant, or notes why there is none."""
        if not variant.optimized:
            self.paths[variant.name] = self._original
            return
        from stof.options import Options
        from stof.pipeline import optimize

        options = Options(
            verify=False, target=self._target, capability=90 if self._target == "cuda" else 0, force=True,
            skip=("mlp:*",) if variant.dense else (),
            inputs=() if variant.dense or variant.predicted else (str(self._inputs),),
            sparse_mlp=f"{self._prompts},kind=svd,active={self._share}" if variant.predicted else "",
        )  # fmt: skip
        path = self._folder / f"{variant.name}.onnx"
        try:
            report = optimize(self._original, path, options)
        except Exception as failure:  # the other variants are measured without it
            self.missing[variant.name] = reason(failure)
            return
        rows = [
            row for section in report.sections.values() for row in getattr(section, "rows", ()) if hasattr(row, "mlp")
        ]
        replaced = [row for row in rows if row.replaced]
        if not variant.dense and len(replaced) != len(rows):
            kept = next((row.reason for row in rows if not row.replaced), "")
            self.missing[variant.name] = f"{len(replaced)} of {len(rows)} MLPs are replaced; {kept}"
        if not path.is_file() or (not variant.dense and not replaced):
            self.missing.setdefault(variant.name, "no MLP is replaced")
            return
        self.paths[variant.name] = path
        shares = [row.density for row in replaced if row.density is not None]
        if shares:
            self.active[variant.name] = round(float(np.mean(shares)), 4)


def _time_steps(
    device: DecoderDevice,
    shape: DecoderShape,
    files: _Files,
    variants: Sequence[MlpVariant],
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
        times = dict(zip(calls, device.time(list(calls.values()), rounds), strict=True))
        found[label] = _summarize(times, logits)
    return found


def _first_run(device: DecoderDevice, session: Any, tensors: DecoderTensors, graph: int) -> Callable[[], None]:
    """A step as a call, after a first run."""
    binding = tensors.bind(session)
    number = graph if device.name == "cuda" else 0
    device.run(session, binding, number)
    if not np.isfinite(tensors.logits()).all():
        raise ValueError("a logit is not finite")
    return lambda: device.run(session, binding, number)


def _summarize(times: dict[str, Timing], logits: dict[str, np.ndarray]) -> Record:
    reference = logits.get("original", next(iter(logits.values())))
    spread = float(reference.max() - reference.min())
    medians = {name: t.median for name, t in times.items()}
    return {
        "us": {name: round(t.median * 1e6, 1) for name, t in times.items()},
        "spread_us": {name: [round(t.best * 1e6, 1), round(t.worst * 1e6, 1)] for name, t in times.items()},
        "times_faster": {
            baseline: {n: round(medians[baseline] / t, 4) for n, t in medians.items()}
            for baseline in ("original", "dense")
            if baseline in medians
        },
        "differs": {n: float(f"{np.abs(x - reference).max() / spread:.1e}") for n, x in logits.items()},
    }


def _bounds(shape: DecoderShape, decoder: Decoder, active: dict[str, float], rate: float) -> dict[str, float]:
    """How many times fewer bytes of weights and caches a token reads, by variant, and the seconds of the dense one."""
    item = (0.5 + 4 / shape.block_size) if shape.block_size else shape.item
    matrix = shape.layers * shape.hidden * shape.inner * item
    matrices = 3 if shape.mlp.is_gated else 2
    dense = decoder.read_bytes + shape.cache_bytes(1, CONTEXT)
    rank = 0.04 * shape.inner
    predictor = shape.layers * rank * (shape.hidden + shape.inner) * (1 if shape.block_size else shape.item)
    found = {"dense_us": round(dense / rate * 1e6, 1)}
    for name, share in active.items():
        left_out = (matrices if name == "predicted" else matrices - 1) * (1 - share) * matrix
        found[name] = round(dense / (dense - left_out + (predictor if name == "predicted" else 0)), 4)
    return found


_CHILD = """
import sys
from stof.bench.decoder.mlp_decoder import print_resident_bytes
print_resident_bytes(*sys.argv[1:])
"""


def _resident_bytes(path: Path, variant: MlpVariant, shape: DecoderShape, folder: Path) -> int:
    """The Pss of a process of its own that runs a few tokens of a variant; -1 where it fails."""
    for file in (*folder.glob("*.data"), folder / WEIGHTS):
        if file.exists():
            drop_cached_pages(file)
    sizes = [shape.layers, shape.kv_heads, shape.head_size, shape.vocabulary]
    command = [sys.executable, "-c", _CHILD, str(path), str(int(variant.optimized)), shape.dtype, *map(str, sizes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    return int(done.stdout) if done.returncode == 0 else -1


def print_resident_bytes(path: str, stof: str, dtype: str, *sizes: str) -> None:
    """Runs tokens of a model as a serving process does, with weights mapped, and prints what the process then holds."""
    import onnxruntime as ort

    from stof.bench.core.resident_memory import resident_bytes
    from stof.runtime import library

    layers, kv_heads, head_size, vocabulary = map(int, sizes)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    options.add_session_config_entry("session.disable_prepacking", "1")  # copies of weights would be held, too
    options.log_severity_level = 3
    if int(stof):
        library.register(options)
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    rng: Any = np.random.default_rng(1)
    names = [f"{i}.{kind}" for i in range(layers) for kind in ("key", "value")]
    caches = [np.zeros((1, kv_heads, 0, head_size), dtype)] * len(names)
    for step in range(_TOKENS_HELD):
        feeds = {"input_ids": rng.integers(0, vocabulary, (1, 1)), "attention_mask": np.ones((1, step + 1), np.int64)}
        feeds |= {f"past_key_values.{name}": cache for name, cache in zip(names, caches, strict=True)}
        caches = session.run([f"present.{name}" for name in names], feeds)
    print(resident_bytes())


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
    for name, size in record["resident_bytes"].items():
        found.append(f"  resident {name:10s} {size / 1e6:10.0f} MB")
    return [*found, *(f"  missing: {k}: {v}" for k, v in record["missing"].items())]
