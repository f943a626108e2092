# SPDX-License-Identifier: Apache-2.0
"""The patterns ``triangle`` and ``radial`` in ONNX Runtime's CUDA provider, on a machine with a GPU: models of ONNX's
Attention are optimized for CUDA with ``--sparsify`` and compared with fp64 under a mask drawn pair by pair.

``python tests/cuda/check_presets.py`` with onnxruntime-gpu, torch and ``STOF_LIBRARY``. Ends with an error where one is wrong.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper
from ort_models import TYPES

import stof
from stof.options import Options

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "sparsify"))
import masks

H, D = 8, 64
TRIANGLE = "triangle(sink=7,window=40,last=20,layers=0)"
# Largest difference from fp64: sums of fp32, and weights rounded to half precision before the second matmul.
TOLERANCE = {"float32": 3e-5, "float16": 2.0**-11 * 6}


def attention(groups: int, dtype: str, *, causal: bool) -> onnx.ModelProto:
    """ONNX's Attention: batch and length are open, queries, keys and values have one length."""
    shapes = {"q": H, "k": groups, "v": groups}
    given = [helper.make_tensor_value_info(x, TYPES[dtype], ["B", n, "S", D]) for x, n in shapes.items()]
    result = helper.make_tensor_value_info("y", TYPES[dtype], ["B", H, "S", D])
    node = helper.make_node("Attention", list(shapes), ["y"], is_causal=int(causal))
    graph = helper.make_graph([node], "g", given, [result])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)


def exact(feeds: dict[str, np.ndarray], mask: np.ndarray) -> np.ndarray:
    """Attention [B, H, S, D] in fp64 under a mask [S, S] that leaves each query a key."""
    q, k, v = (feeds[x].astype(np.float64) for x in "qkv")
    k, v = (np.repeat(x, H // x.shape[1], axis=1) for x in (k, v))
    scores = np.where(mask, q @ k.swapaxes(2, 3) / np.sqrt(D), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True) @ v)


def session(path: Path) -> ort.InferenceSession:
    """A session on the CUDA provider that writes a profile beside the model; nodes of shapes may run on the CPU."""
    options = ort.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(path.with_suffix(""))
    stof.register(options)
    return ort.InferenceSession(str(path), options, providers=["CUDAExecutionProvider", "CPUExecutionProvider"])


def providers_of_attention(profiled: ort.InferenceSession) -> set[str]:
    """The providers that ran StofAttention in a session."""
    events = json.loads(Path(profiled.end_profiling()).read_text())
    calls = [event.get("args", {}) for event in events]
    return {call["provider"] for call in calls if call.get("op_name") == "StofAttention" and "provider" in call}


def check(spec: str, groups: int, dtype: str) -> float:
    """The largest difference from fp64 over several batches and lengths."""
    causal = spec.startswith("triangle")
    rng = np.random.default_rng(58)
    largest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        path, written = Path(folder) / "model.onnx", Path(folder) / "out.onnx"
        onnx.save(attention(groups, dtype, causal=causal), str(path))
        # At the lengths below, a dense bias may be estimated to be faster; the operator is right at any length.
        options = Options(target="cuda", sparsify=spec, verify=False, shapes={"S": (2048, 4096)})
        (site,) = stof.optimize(path, written, options).sites
        assert site.replaced, site.reason
        sparse = session(written)
        for batch, length in ((1, 1), (2, 61), (3, 129), (2, 300), (1, 515)):
            shapes = {"q": H, "k": groups, "v": groups}
            feeds = {x: rng.standard_normal((batch, n, length, D)).astype(dtype) for x, n in shapes.items()}
            mask = masks.triangle(1, length, 7, 40, 20)[0] if causal else masks.radial(1, length, 20, 1)[0]
            wanted = exact(feeds, mask)
            if length >= 300:
                apart = np.abs(exact(feeds, np.tri(length, dtype=bool) if causal else mask | True) - wanted).max()
                assert apart > 0.1, "the pattern changes no output: nothing is shown"
            largest = max(largest, float(np.abs(sparse.run(None, feeds)[0] - wanted).max()))
        providers = providers_of_attention(sparse)
        assert providers == {"CUDAExecutionProvider"}, f"StofAttention ran on {providers or 'nothing'}"
    return largest


def main() -> int:
    wrong = 0
    for spec in (TRIANGLE, "radial(tokens=20)"):
        for groups in (H, 2):
            for dtype, allowed in TOLERANCE.items():
                largest = check(spec, groups, dtype)
                is_right = largest <= allowed
                wrong += not is_right
                verdict = "right" if is_right else f"WRONG, allowed {allowed:.1e}"
                print(f"{spec}, {groups} KV heads, {dtype}: largest difference {largest:.1e}, {verdict}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
