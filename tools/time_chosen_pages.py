# SPDX-License-Identifier: Apache-2.0
"""Times decode steps of StofCachedAttention over a full cache in ONNX Runtime on the CPU: all pages, and the best ones.

``python tools/time_chosen_pages.py [--keys 32768] [--share 0.05] [--rows 64] [--threads 2] [--dtype float16] [--tokens 1]``

Prints the minima of rounds in turns, in ms, with past and present in one buffer. Keys are random: how many pages are read
depends on their number alone. Each variant has caches of its own.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

import stof

H, G, D = 32, 8, 128
INPUTS = ("query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length")


class Decoder:
    """One node with caches of its own; ``chosen`` 0: it attends all pages."""

    def __init__(self, keys: int, dtype: str, tokens: int, chosen: int, rows: int, threads: int) -> None:
        names = [*INPUTS, *[""] * 14, "past_page_bounds"] if chosen else list(INPUTS)
        outputs = ["output", "present_key", "present_value", *(["present_page_bounds"] if chosen else [])]
        attributes = {"chosen_pages": chosen, "page_rows": rows} if chosen else {}
        node = helper.make_node("StofCachedAttention", names, outputs, domain="stof", num_heads=H, kv_num_heads=G,
                                mask="k <= q", **attributes)  # fmt: skip
        rng = np.random.default_rng(0)
        pages = -(-keys // rows)
        feeds = {
            "query": rng.standard_normal((1, tokens, H * D)),
            **{n: rng.standard_normal((1, tokens, G * D)) for n in ("key", "value")},
            **{n: rng.standard_normal((1, G, keys, D), np.float32) for n in ("past_key", "past_value")},
            "past_page_bounds": np.zeros((1, G, pages, 2, D)),
        }
        element = TensorProto.FLOAT16 if dtype == "float16" else TensorProto.FLOAT
        given = {n: a.astype(dtype) for n, a in feeds.items() if n in names}
        given |= {"seqlens_k": np.array([keys - 1], np.int32), "total_sequence_length": np.array(keys, np.int32)}
        types = {n: TensorProto.INT32 if n in INPUTS[5:] else element for n in given}
        infos = [helper.make_tensor_value_info(n, types[n], None) for n in names if n]
        results = [helper.make_tensor_value_info(n, element, None) for n in outputs]
        opsets = [helper.make_opsetid("", 20), helper.make_opsetid("stof", 1)]
        model = helper.make_model(helper.make_graph([node], "g", infos, results), opset_imports=opsets, ir_version=9)
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        stof.register(options)
        self._session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        self._values = {n: ort.OrtValue.ortvalue_from_numpy(a) for n, a in given.items()}
        self._binding = self._session.io_binding()
        self._values["output"] = ort.OrtValue.ortvalue_from_numpy(np.zeros((1, tokens, H * D), dtype))
        for name in given:
            self._binding.bind_ortvalue_input(name, self._values[name])
        for name in outputs:
            self._binding.bind_ortvalue_output(name, self._values[name.replace("present", "past")])
        if chosen:  # bounds of all pages, once
            empty = self._session.io_binding()
            for name in given:
                empty.bind_ortvalue_input(name, self._values[name])
            none = ort.OrtValue.ortvalue_from_numpy(np.zeros((1, G, 0, 2, D), dtype))
            empty.bind_ortvalue_input("past_page_bounds", none)
            for name in outputs:
                empty.bind_ortvalue_output(name, self._values[name.replace("present", "past")])
            self._session.run_with_iobinding(empty)

    def step(self) -> float:
        """Milliseconds of one step."""
        start = time.perf_counter()
        self._session.run_with_iobinding(self._binding)
        return 1e3 * (time.perf_counter() - start)


def main() -> None:
    """Prints a line for each variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=32768)
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("float32", "float16"), default="float32")
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    a = parser.parse_args()
    chosen = max(1, round(a.share * a.keys / a.rows))
    variants = {
        n: Decoder(a.keys, a.dtype, a.tokens, k, a.rows, a.threads) for n, k in (("all", 0), ("chosen", chosen))
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(a.rounds):
        for name, decoder in variants.items():
            times[name].append(decoder.step())
    best = {name: min(found) for name, found in times.items()}
    print(
        f"{a.dtype} T {a.keys} S {a.tokens}, {chosen} of {-(-a.keys // a.rows)} pages of {a.rows}, {a.threads} threads: "
        f"all {best['all']:.3f} ms, chosen {best['chosen']:.3f} ms, {best['all'] / best['chosen']:.1f}x"
    )


if __name__ == "__main__":
    main()
