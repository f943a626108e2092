# SPDX-License-Identifier: Apache-2.0
"""Generates tokens by ONNX Runtime GenAI from model folders as its builder wrote them, and from the optimized ones.

``python tests/genai/check_tokens.py [--folder DIR] [--json FILE] [--only NAME] [--count N]``: a line for each request, and
status 1 when one fails. A request passes when greedy decoding gives the same tokens. Where a token differs, the original's two
best logits have to lie within 4 times the spread of two legal runs of the original, and with the original's tokens forced all
logits within 4 times that spread. Runs in an environment with tests/genai/requirements.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import onnx
from generation import Generation, GenerationError, generate

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "models"))
import genai  # noqa: E402

COUNT = 200  # tokens
FACTOR = 4.0
RANGE = 1e-6  # of the logits' range, which every comparison allows
# Lengths of the prompts of a request. Where the original refuses prompts of different lengths, the later ones are run.
REQUESTS: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((1,),),
    ((40,),),
    ((300,),),
    ((1, 40, 300), (40, 40, 40), (300, 300, 300)),
)
# Of GroupQueryAttention: scores and softmax one after the other in place of tiles.
_OTHER_KERNEL = {"ORT_GQA_DISABLE_FLASH_ATTENTION": "1"}


@dataclass
class Outcome:
    """What was found of one request.

    Attributes:
        name: of the model folder.
        lengths: of the prompts.
        differing: how many rows of the batch got other tokens.
        spread: the largest difference of logits between two legal runs of the original; 0 where it was not needed.
        error: the largest difference of stof's logits from the original's, with the original's tokens forced; likewise.
        is_damaged: a wrong mask was put into the optimized folder, which has to be found.
        faults: what is wrong, in words.
    """

    name: str
    lengths: tuple[int, ...]
    differing: int = 0
    spread: float = 0.0
    error: float = 0.0
    is_damaged: bool = False
    faults: list[str] = field(default_factory=list)

    def line(self) -> str:
        """A row of the table."""
        same = "" if self.faults else "same tokens" if self.lengths else "verified in part"
        if self.is_damaged:
            same = "" if self.faults else "the damage was found"
        if self.differing:
            same = f"{self.differing} rows differ, error {self.error:.1e}, spread {self.spread:.1e}"
        return f"{self.name:24} {self.lengths!s:16} {same:50} {'; '.join(self.faults) or 'pass'}"


def _forced_logits(folder: Path, prompts: list[np.ndarray], tokens: np.ndarray, **how: object) -> np.ndarray:
    found: Generation = generate(folder, prompts, tokens.shape[1], forced=tokens, **how)  # type: ignore[arg-type]
    assert found.logits is not None
    if not np.array_equal(found.tokens, tokens):
        raise GenerationError("the forced tokens were not taken")
    return found.logits.astype(np.float64)


def _compare_forced(
    outcome: Outcome, source: Path, target: Path, prompts: list[np.ndarray], expected: np.ndarray, found: np.ndarray
) -> None:
    """Judges tokens that differ, by logits with the original's tokens forced."""
    first = _forced_logits(source, prompts, expected)
    others = [_forced_logits(source, prompts, expected, environment=_OTHER_KERNEL)]
    # Each prompt alone and token by token: matmuls of one row.
    alone = [_forced_logits(source, [p], expected[i : i + 1], chunk=1) for i, p in enumerate(prompts)]
    others.append(np.concatenate(alone, axis=1))
    own = _forced_logits(target, prompts, expected)
    spread = np.max([np.abs(other - first).max(axis=(0, 2)) for other in others], axis=0)
    error = np.abs(own - first).max(axis=(0, 2))
    allowed = FACTOR * spread + RANGE * np.ptp(first)
    outcome.spread, outcome.error = float(spread.max()), float(error.max())
    for row, (tokens, other) in enumerate(zip(expected, found, strict=True)):
        if not error[row] <= allowed[row]:
            outcome.faults.append(f"row {row}: logits off by {error[row]:.2e}, {allowed[row]:.2e} allowed")
        if (tokens != other).any():
            step = int(np.argmax(tokens != other))
            second, best = np.sort(first[step, row])[-2:]
            if not best - second <= allowed[row]:
                outcome.faults.append(
                    f"row {row}, token {step}: {other[step]} in place of {tokens[step]}, whose logit leads by {best - second:.2e}"
                )


def check(name: str, source: Path, target: Path, lengths: tuple[int, ...], count: int) -> Outcome:
    """Runs one request on both folders.

    Raises:
        GenerationError: where the original refuses it.
    """
    outcome = Outcome(name, lengths)
    rng = np.random.default_rng(sum(lengths))
    prompts = [rng.integers(3, genai.VOCABULARY, length) for length in lengths]
    expected = generate(source, prompts, count).tokens
    if min(len(set(row)) for row in expected) < 10:
        outcome.faults.append("the original repeats fewer than 10 tokens, which says nothing")
    try:
        found = generate(target, prompts, count).tokens
        outcome.differing = int((expected != found).any(axis=1).sum())
        if outcome.differing:
            _compare_forced(outcome, source, target, prompts, expected, found)
    except GenerationError as error:
        outcome.faults.append(f"refused: {error}")
    return outcome


def _optimize(source: Path, target: Path) -> str:
    """Optimizes a folder; what went wrong, or empty."""
    report = target.with_name(f"{target.name}.json")
    command = [sys.executable, "-m", "stof.cli", str(source), "-o", str(target), "--json", str(report)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT / "optimizer")}
    )
    if done.returncode:
        return f"status {done.returncode}: {(done.stderr.strip() or done.stdout.strip())[-300:]}"
    found = json.loads(report.read_text())
    sites = found["files"]["model.onnx"]["caches"]
    left = [site for site in sites if not site["replaced"]]
    if left or not sites:
        return f"{len(left)} of {len(sites)} attentions over a KV cache were left: {left[0]['reason'] if left else ''}"
    return "" if found["registrations"] else "the library is not registered"


def _build(name: str, folder: Path) -> None:
    """Builds a model folder; in a process of its own, since the builder says much."""
    command = [sys.executable, str(ROOT / "models/genai.py"), "-o", str(folder), name]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} cannot be built: {done.stderr[-1000:]}")


def _damage(target: Path, damaged: Path) -> None:
    """Copies an optimized folder; its attention forgets all but the last 16 keys."""
    shutil.copytree(target, damaged, dirs_exist_ok=True)
    model = onnx.load(damaged / "model.onnx", load_external_data=False)
    for node in model.graph.node:
        if node.domain == "stof":
            for attribute in [a for a in node.attribute if a.name == "mask"]:
                node.attribute.remove(attribute)
            node.attribute.append(onnx.helper.make_attribute("mask", "k <= q and q - k < 16"))
    (damaged / "model.onnx").write_bytes(model.SerializeToString())


def _check_damage(name: str, folder: Path, count: int) -> Outcome:
    """A damaged folder has to be found: what is allowed for rounding allows no wrong mask."""
    damaged = folder / f"{name}.damaged"
    _damage(folder / f"{name}.stof", damaged)
    found = check(name, folder / name, damaged, (40,), count)
    return Outcome(name, (40,), is_damaged=True, faults=[] if found.faults else ["the damage was not found"])


def _check_folder(name: str, folder: Path, count: int) -> list[Outcome]:
    source, target = folder / name, folder / f"{name}.stof"
    if not (source / "genai_config.json").is_file():
        _build(name, folder)
    shutil.rmtree(target, ignore_errors=True)
    if fault := _optimize(source, target):
        return [Outcome(name, (), faults=[fault])]
    outcomes = []
    for forms in REQUESTS:
        for lengths in forms:
            try:
                outcomes.append(check(name, source, target, lengths, count))
            except GenerationError as error:
                if len(set(lengths)) == 1:
                    outcomes.append(Outcome(name, lengths, faults=[f"the original refuses it: {error}"]))
                continue
            if len(set(lengths)) > 1:
                break
    return [*outcomes, _check_damage(name, folder, count)]


def _check_part(name: str, folder: Path) -> Outcome:
    """A folder whose original does not run on a CPU: it is optimized without any option, verified in part."""
    source, target = folder / name, folder / f"{name}.stof"
    if not (source / "genai_config.json").is_file():
        _build(name, folder)
    shutil.rmtree(target, ignore_errors=True)
    if fault := _optimize(source, target):
        return Outcome(name, (), faults=[fault])
    found = json.loads((folder / f"{name}.stof.json").read_text())["files"]["model.onnx"]
    verification = found["verification"]
    sites = {c["site"] for c in verification["comparisons"] if c["ok"]}
    is_right = verification["partial"] is not None and sites == {c["cache"] for c in found["caches"]}
    return Outcome(name, (), faults=[] if is_right else ["not every site was compared by itself"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("build/genai"), help="keeps the model folders")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="folders whose name holds this")
    parser.add_argument("--count", type=int, default=COUNT, help=f"tokens ({COUNT})")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for name in (f"{n}-{p}" for n in genai.TESTED for p in genai.PRECISIONS):
        if arguments.only in name:
            for outcome in _check_folder(name, arguments.folder, arguments.count):
                print(outcome.line(), flush=True)
                outcomes.append(outcome)
    for name in (f"{n}-{p}" for n in genai.TESTED for p in genai.PRECISIONS_OF_GPUS):
        if arguments.only in name:
            outcomes.append(_check_part(name, arguments.folder))
            print(outcomes[-1].line(), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(o) for o in outcomes], indent=1) + "\n")
    failed = sum(bool(o.faults) for o in outcomes)
    print(f"{failed} of {len(outcomes)} failed")
    return int(failed > 0 or not outcomes)


if __name__ == "__main__":
    sys.exit(main())
