# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of a decoder through ONNX Runtime GenAI on the CPU, before and after: both folders in turns."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.core.candidate import require
from stof.api.genai_config import GENAI_CONFIG
from stof.bench import measure
from stof.bench.results import Record, store
from stof.errors import explained
from stof.files import read_text
from stof.options import Options
from stof.terminal import say

_WARM = 3  # tokens before the first that is timed
_CHUNK = 512  # tokens of a prompt that are appended at once
_FIRST_TOKEN = 3  # below are those that begin, end and pad sequences


def run(arguments: argparse.Namespace, threads: int) -> int:
    """Measures, prints and stores a model folder at every context."""
    source: Path = arguments.folder
    target: Path = arguments.optimized or Path("build/bench") / f"{source.name}.stof"
    if not target.is_dir():
        from stof.api.folder import optimize_folder

        say(f"optimizing {source}")
        target.parent.mkdir(parents=True, exist_ok=True)
        report = optimize_folder(source, target, Options(verify=False))
        if report.failures:
            say(*report.to_text().split("\n"))
            return 3
    folders = {"original": source, "optimized": target}
    for record in measure_contexts(folders, sorted(arguments.contexts), arguments.tokens, threads):
        store(arguments.results / "decode-genai.json", record)
        say(*describe_record(record))
    return 0


def measure_contexts(folders: dict[str, Path], contexts: Sequence[int], tokens: int, threads: int) -> Iterator[Record]:
    """Measures one sequence that grows from context to context; gives a record at each.

    Args:
        folders: the model folders, "original" and "optimized".
        contexts: keys in the cache before the first token that is timed, in ascending order.
        tokens: how many tokens are timed at each.
        threads: of a session.

    Raises:
        Unavailable: without onnxruntime_genai.
        ArgumentError: for a folder without a configuration.
        ValueError: for contexts that overlap, or are longer than the model's; a folder that the runtime refuses.
    """
    og = require("onnxruntime_genai")
    config = json.loads(read_text("configuration", folders["original"] / GENAI_CONFIG))["model"]
    _check_contexts(contexts, tokens, int(config["context_length"]))
    length = contexts[-1] + _WARM + tokens
    generators = {name: _make_generator(og, folder, threads, length) for name, folder in folders.items()}
    rng = np.random.default_rng(0)
    given = 0
    for context in contexts:
        ids = rng.integers(_FIRST_TOKEN, config["vocab_size"], context - given).astype(np.int32)
        rates = measure.rates(threads)
        prompt = dict.fromkeys(generators, 0.0)
        for start in range(0, len(ids), _CHUNK):
            for name, generator in generators.items():
                prompt[name] += _seconds(partial(generator.append_tokens, ids[start : start + _CHUNK]))
        samples: dict[str, list[float]] = {name: [] for name in generators}
        worked: dict[str, list[float]] = {name: [] for name in generators}
        same = 0
        for i in range(_WARM + tokens):
            for name in [*generators] if i % 2 else [*generators][::-1]:
                before = time.process_time()
                samples[name].append(_seconds(generators[name].generate_next_token))
                worked[name].append(time.process_time() - before)
            first, second = (int(g.get_next_tokens()[0]) for g in generators.values())
            same += first == second
        rates = measure.best_rates(rates, measure.rates(threads))
        given = context + _WARM + tokens
        yield {
            "key": [folders["original"].name, context, threads],
            "grid": "decode-genai",
            "model": folders["original"].name,
            "shape": {"B": 1, "context": context},
            "machine": {**measure.machine(threads), **rates},
            "genai": og.__version__,
            "tokens": tokens,
            "same_tokens": same,
            "prompt": {"tokens": len(ids), "seconds": {k: round(v, 6) for k, v in prompt.items()}},
            "seconds": {k: round(min(v[_WARM:]), 6) for k, v in samples.items()},
            "median_seconds": {k: round(median(v[_WARM:]), 6) for k, v in samples.items()},
            # Of all threads: what says something where other processes take the cores.
            "cpu_seconds": {k: round(median(v[_WARM:]), 6) for k, v in worked.items()},
            "least_cpu_seconds": {k: round(min(v[_WARM:]), 6) for k, v in worked.items()},
        }


def _check_contexts(contexts: Sequence[int], tokens: int, most: int) -> None:
    given = 0
    for context in contexts:
        if context <= given:
            raise ValueError(
                f"context {context} is not above the {given} tokens before it; leave it out, or time fewer tokens"
            )
        given = context + _WARM + tokens
    if given > most:
        raise ValueError(f"{given} tokens exceed the model's context of {most}")


def _make_generator(og: Any, folder: Path, threads: int, length: int) -> Any:
    config = og.Config(str(folder))
    # Threads that spin after a token would take the other folder's time.
    options = {"intra_op_num_threads": threads, "session.intra_op.allow_spinning": "0"}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
    try:
        model = og.Model(config)
    except RuntimeError as error:
        raise ValueError(f"ONNX Runtime GenAI refuses {folder}: {explained(error)}") from error
    parameters = og.GeneratorParams(model)
    parameters.set_search_options(max_length=length, min_length=length, do_sample=False)
    return og.Generator(model, parameters)


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def describe_record(record: Record) -> list[str]:
    """The record as text."""
    machine, seconds, prompt = record["machine"], record["seconds"], record["prompt"]
    worked, least = record["cpu_seconds"], record["least_cpu_seconds"]
    found = [
        f"{record['model']}  context {record['shape']['context']}, {machine['threads']} thread(s), {record['tokens']} tokens; "
        f"read {machine['read_gbps']:.1f} GB/s"
    ]
    for name, value in seconds.items():
        rate = prompt["tokens"] / prompt["seconds"][name]
        found.append(
            f"  {name:10s} {1 / value:8.1f} tokens/s at best, {1 / record['median_seconds'][name]:8.1f} in the median; "
            f"{seconds['original'] / value:5.2f}x; {1e3 * worked[name]:.2f} ms of CPU a token ({1e3 * least[name]:.2f} at best, "
            f"{least['original'] / least[name]:.2f}x); "
            f"prompt {rate:8.1f} tokens/s"
        )
    return found
