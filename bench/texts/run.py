# SPDX-License-Identifier: Apache-2.0
"""``python -m bench texts``: models that embed and rerank, on batches of padded texts, beside their peers."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence

from bench.core.candidate import select
from bench.core.point import measure_point
from bench.texts.candidates import CANDIDATES, STOF, TextCandidate
from bench.texts.lengths import LENGTHS, TextWindow
from bench.texts.memory import measure_memory
from bench.texts.problem import TextDevice, TextProblem, is_absent
from bench.texts.text_models import DEFAULT_MODELS, MODELS, TextFiles, TextModel, write_files
from stof.bench.results import Record, store
from stof.files import temporary_folder
from stof.terminal import say

_MB = 1e6


def run(arguments: argparse.Namespace, threads: int) -> int:
    """Measures, prints and stores every point that the arguments ask for; 3 where stof could not run one."""
    candidates = select(CANDIDATES, arguments.peers)
    has_failed = False
    for name in arguments.models or DEFAULT_MODELS:
        model = MODELS[name]
        chosen = [n for n in model.lengths if arguments.lengths is None or n in arguments.lengths]
        if not chosen:
            raise ValueError(f"{name} is timed with {', '.join(model.lengths)}")
        with temporary_folder() as folder:
            for precision in arguments.precisions:
                say(f"{name} {precision}: making the models")
                files = write_files(model, precision, folder, {c.kind for c in candidates})
                for lengths in chosen:
                    record = _measure(model, precision, files, lengths, candidates, arguments, threads)
                    store(arguments.results / "texts-cpu.json", record)
                    say(*describe_record(record))
                    has_failed |= _has_failed(record, candidates)
                    gc.collect()
    return 3 if has_failed else 0


def _measure(
    model: TextModel,
    precision: str,
    files: TextFiles,
    lengths: str,
    candidates: Sequence[TextCandidate],
    arguments: argparse.Namespace,
    threads: int,
) -> Record:
    """The record of a point: times, then memory."""
    window = TextWindow(LENGTHS[lengths], model.vocabulary, model.inputs, arguments.seed)
    problem = TextProblem(model, precision, files, window, arguments.batch, arguments.batches, threads)
    record = measure_point(problem, candidates, TextDevice(threads), arguments.rounds)
    record["seed"] = arguments.seed
    problem.close()
    if not arguments.no_memory:
        timed = [name for name, row in record["peers"].items() if "us" in row]
        record["memory"] = measure_memory(problem, files, timed, threads)
    return record


def _has_failed(record: Record, candidates: Sequence[TextCandidate]) -> bool:
    """Whether a candidate of stof has no time, or left the padding where it should not."""
    kept = record["files"].get("unpadded", {}).get("padded_because")
    own = [c.name for c in candidates if c.engine == STOF]
    return bool(kept) or any("us" not in record["peers"][name] for name in own)


def describe_record(record: Record) -> list[str]:
    """The record as text."""
    machine, padding = record["machine"], record["padded_over_real"]
    found = [
        f"{record['model']} {record['precision']}, {record['lengths']}; {record['batches']} batches of {record['rows']}, "
        f"padded/real {padding['arrival']:.2f}, sorted {padding['sorted']:.2f}; {machine['threads']} thread(s), "
        f"FMA {machine['fma_gflops']:.0f} GFLOP/s, read {machine['read_gbps']:.1f} GB/s"
    ]
    for name, row in record["peers"].items():
        if "us" not in row:
            absent = "absent" if is_absent(name, row) else "missing"
            found.append(f"  {row['label']:36s} {absent}: {row['missing']}")
            continue
        text = f"  {row['label']:36s} {row['useful_tokens_per_second']:10,.0f} tokens/s  error {row['error']:.0e}"
        for field, label in (("ratio", "stof"), ("ratio_sorted", "stof sorted")):
            if name in record.get(field, {}):
                text += f"  {label} {record[field][name]:.2f}x"
        memory = record.get("memory", {}).get(name, {})
        if "peak" in memory:
            text += f"  peak {memory['peak'] / _MB:,.0f} MB, {memory['above'] / _MB:,.0f} of them for the run"
        found.append(text)
    if "share_of_padded_over_real" in record:
        found.append(f"  unpadding gains {record['share_of_padded_over_real']:.0%} of padded/real")
    for kind, facts in record["files"].items():
        if "fused" in facts and not {"Attention", "MultiHeadAttention"} & facts["fused"].keys():
            found.append(f"  the {kind} optimizer fuses no attention of this model")
        if reasons := facts.get("padded_because"):
            found.append(f"  padding stays: {'; '.join(reasons)}")
    return found
