# SPDX-License-Identifier: Apache-2.0
"""Ends runs of ``stof-optimize`` at random moments by SIGKILL and SIGTERM, and looks at what they leave.

``python tests/command/end_at_random.py [--runs 200] [--seed N]``: so many runs by each signal, over three models, one of them
with external data. The input stays as it was; the output is whole or absent. After SIGTERM nothing else is left, within a
second. After SIGKILL at most one hidden folder is, and the next run removes it. Ends with 1 when something is wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "models"))
from build import write  # noqa: E402

MODELS = ("narrow/bert.dynamo.sdpa", "narrow/modernbert.dynamo.sdpa", "narrow/embeddinggemma.dynamo.sdpa")
SECONDS_TO_END = 1.0
MARK = "STOF_ENDED_AT_RANDOM"  # in the environment of each run and its processes: others may run beside them
LONGEST_RUN = 300.0


def prepare(folder: Path) -> list[Path]:
    """The three models, each in a folder of its own; the first one's weights in a file beside it."""
    found = []
    for i, name in enumerate(MODELS):
        path = folder / str(i) / "model.onnx"
        path.parent.mkdir()
        write(name, path, external=i == 0)
        found.append(path)
    return found


def start(model: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "stof.cli", str(model), "-o", str(model.with_name("result.onnx"))]
    environment = {**os.environ, MARK: str(os.getpid())}
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True, env=environment
    )


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def what_is_wrong(model: Path, inputs: dict[str, str], whole: str, hidden: int) -> list[str]:
    """Faults in the folder of a model after a run has ended.

    Args:
        model: the input.
        inputs: digests of the files that were there before.
        whole: digest of a complete output.
        hidden: how many hidden entries may be left.
    """
    faults = [f"{name} has changed" for name, before in inputs.items() if digest(model.with_name(name)) != before]
    result = model.with_name("result.onnx")
    if result.exists() and digest(result) != whole:
        faults.append("the output is not whole")
    others = {p.name for p in model.parent.iterdir()} - set(inputs) - {"result.onnx"}
    if len(others) > hidden or not all(name.startswith(".stof-") for name in others):
        faults.append(f"left behind: {sorted(others)}")
    return faults


def end_one(model: Path, sent: signal.Signals, moment: float, inputs: dict[str, str], whole: str) -> list[str]:
    model.with_name("result.onnx").unlink(missing_ok=True)
    process = start(model)
    time.sleep(moment)
    process.send_signal(sent)
    begin = time.monotonic()
    _, said = process.communicate(timeout=LONGEST_RUN)
    seconds = time.monotonic() - begin
    faults = what_is_wrong(model, inputs, whole, hidden=int(sent == signal.SIGKILL))
    if b"Traceback" in said:
        faults.append(f"a traceback: {said.decode(errors='replace')[-300:]}")
    if seconds > SECONDS_TO_END:
        faults.append(f"it took {seconds:.2f} s to end")
    if children := _left_by_run():
        faults.append(f"processes left: {children}")
    return faults


def _left_by_run() -> list[int]:
    """A run's processes that still live one second after its end."""
    end = time.monotonic() + SECONDS_TO_END
    while (found := _living_of_runs()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def _living_of_runs() -> list[int]:
    """Processes that inherited the mark of this script's runs."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            is_zombie = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            is_ours = f"{MARK}={os.getpid()}".encode() in (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if is_ours and not is_zombie:
            found.append(int(entry.name))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        prepared = []
        for model in prepare(Path(folder)):
            inputs = {p.name: digest(p) for p in model.parent.iterdir()}
            begin = time.monotonic()
            status = start(model).wait(LONGEST_RUN)
            result = model.with_name("result.onnx")
            if status or not result.is_file():
                raise SystemExit(f"{model} cannot be optimized: status {status}")
            prepared.append((model, inputs, digest(result), time.monotonic() - begin))
        for sent in (signal.SIGKILL, signal.SIGTERM):
            wrong = 0
            for run in range(arguments.runs):
                model, inputs, whole, seconds = prepared[run % len(prepared)]
                moment = rng.uniform(0, 1.1 * seconds)
                for fault in end_one(model, sent, moment, inputs, whole):
                    wrong += 1
                    print(
                        f"{sent.name} after {moment:.2f} of {seconds:.2f} s, {model.parent.name}: {fault}", flush=True
                    )
            print(f"{sent.name}: {arguments.runs} runs, {wrong} faults", flush=True)
            failed += wrong
        for model, inputs, whole, _ in prepared:  # a whole run removes what others left
            start(model).wait(LONGEST_RUN)
            for fault in what_is_wrong(model, inputs, whole, hidden=0):
                failed += 1
                print(f"after a whole run, {model.parent.name}: {fault}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
