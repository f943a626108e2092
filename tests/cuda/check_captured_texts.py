# SPDX-License-Identifier: Apache-2.0
"""Encoders without padding, at a fixed capacity, in captured CUDA graphs: replays give what the original gives on the CPU,
and NaN where there is no room for all tokens.

``python tests/cuda/check_captured_texts.py`` with onnxruntime-gpu and ``STOF_LIBRARY``; ends with an error when one is wrong, or
when ONNX Runtime cannot capture the model. With ``cpu`` behind it the same runs on the CPU, without a graph.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

import stof

sys.path.insert(0, str(Path(__file__).parents[1] / "unpadding"))
from encoders import count_tokens, encoder, feeds_for, masks, session, unpadded

BATCH, LENGTH, ROOM = 5, 7, 28
POOLINGS = (("mean", "max"), ("first", "mean"), ("last real", "max"), ("all", "mean"))


class Captured:
    """A session whose inputs and outputs stay at their addresses."""

    def __init__(self, model: onnx.ModelProto, shapes: dict[str, tuple[int, ...]], device: str) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 3
        stof.register(options)
        cuda = ("CUDAExecutionProvider", {"enable_cuda_graph": "1", "use_tf32": "0"})
        providers = [cuda] if device == "cuda" else ["CPUExecutionProvider"]
        self.session = ort.InferenceSession(model.SerializeToString(), options, providers=providers)
        self.binding = self.session.io_binding()
        self.inputs: dict[str, ort.OrtValue] = {}
        for value in self.session.get_inputs():
            zeros = np.zeros((BATCH, LENGTH), np.int64)
            self.inputs[value.name] = ort.OrtValue.ortvalue_from_numpy(zeros, device, 0)
            self.binding.bind_ortvalue_input(value.name, self.inputs[value.name])
        self.outputs: dict[str, ort.OrtValue] = {}
        for name, shape in shapes.items():
            poisoned = np.full(shape, 7, np.float32)
            self.outputs[name] = ort.OrtValue.ortvalue_from_numpy(poisoned, device, 0)
            self.binding.bind_ortvalue_output(name, self.outputs[name])

    def run(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The outputs by name."""
        for name, array in feeds.items():
            self.inputs[name].update_inplace(array)
        self.session.run_with_iobinding(self.binding)
        return {name: np.array(value.numpy()) for name, value in self.outputs.items()}


def is_refused(captured: Captured, feeds: dict[str, np.ndarray], wanted: dict[str, np.ndarray], device: str) -> bool:
    """Whether a batch without room gives no wrong number that could be taken for a result.

    An output that reads no token, as the maximum over the tokens of empty texts, may be that of the original.
    """
    if device == "cuda":
        found = captured.run(feeds)
        return all(np.isnan(array).any() or np.allclose(array, wanted[name]) for name, array in found.items())
    try:
        captured.run(feeds)
    except Exception as error:
        return "--unpad-capacity" in str(error)
    return False


def check(poolings: tuple[str, ...], device: str) -> tuple[int, int]:
    """Runs all masks of one encoder; the numbers of batches that fit, and that do not."""
    model = encoder(*poolings)
    exact, result = unpadded(model, "on")[0], unpadded(model, "on", unpad_capacity=ROOM)[0]
    oracle, names = session(model, False), [o.name for o in model.graph.output]
    batches = {label: mask for label, mask in masks(BATCH, LENGTH).items() if mask.shape == (BATCH, LENGTH)}
    first = oracle.run(None, feeds_for(model, batches["right"]))
    captured = Captured(result, {n: array.shape for n, array in zip(names, first, strict=True)}, device)
    right = refused = 0
    for label, mask in [*batches.items(), *batches.items()]:
        feeds = feeds_for(model, mask)
        originals = dict(zip(names, oracle.run(None, feeds), strict=True))
        if count_tokens(exact, feeds) > ROOM:
            assert is_refused(captured, feeds, originals, device), f"{poolings}, {label}: no sign of too many tokens"
            refused += 1
            continue
        found = captured.run(feeds)
        for name, wanted in originals.items():
            rows = (mask != 0) | ~mask.any(1, keepdims=True) if name == "all" else ...
            np.testing.assert_allclose(
                found[name][rows], wanted[rows], rtol=1e-3, atol=1e-4, err_msg=f"{name}, {label}"
            )
        right += 1
    assert right, "no batch fits"
    assert refused, "all batches fit"
    return right, refused


def main() -> int:
    """All encoders."""
    device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    counts = [check(poolings, device) for poolings in POOLINGS]
    right, refused = (sum(numbers) for numbers in zip(*counts, strict=True))
    where = "in captured graphs" if device == "cuda" else "on the CPU"
    print(f"{right} batches without padding are right {where}, {refused} are refused")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
