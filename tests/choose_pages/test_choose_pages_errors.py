# SPDX-License-Identifier: Apache-2.0
"""What StofCachedAttention refuses of choose pages: each error names the node, what was found and what is expected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from tests.choose_pages.page_decoder import (
    BOUNDS,
    BOUNDS_INDEX,
    INPUTS,
    OUTPUTS,
    PageDecoder,
    make_model,
    make_session,
    run,
)
from tests.helpers.attention_sessions import run_switched_off

import stof

B, G, H, D, C = 2, 2, 4, 64, 300


def feeds(dtype: str = "float32", length: int = 1, **changed: Any) -> dict[str, Any]:
    """A step behind 200 and 90 keys."""
    rng = np.random.default_rng(0)
    shapes = {
        "query": (B, length, H * D),
        "key": (B, length, G * D),
        "value": (B, length, G * D),
        "past_key": (B, G, C, D),
        "past_value": (B, G, C, D),
        BOUNDS: (B, G, 5, 2, D),
    }
    made = {n: rng.standard_normal(s).astype(dtype) for n, s in shapes.items()}
    made |= {"seqlens_k": np.array([200, 90], np.int32), "total_sequence_length": np.array(201, np.int32)}
    return made | changed


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({"chosen_pages": -1}, "attribute chosen_pages is -1, expected 0 to 4194304"),
        ({"chosen_pages": 1 << 23}, "attribute chosen_pages is 8388608, expected 0 to 4194304"),
        ({"chosen_pages": 4, "page_rows": 48}, "attribute page_rows is 48, expected 16, 32, 64 or 128"),
        ({"chosen_pages": 4, "page_rows": 0}, "attribute page_rows is 0, expected 16, 32, 64 or 128"),
        ({"chosen_pages": 4, "sliding_window_cache": 64}, "attribute chosen_pages is 4, expected 0 beside sliding"),
    ],
)
def test_attributes(attributes: dict[str, int], expected: str) -> None:
    node = helper.make_node("StofCachedAttention", [*INPUTS, *[""] * 14, BOUNDS], list(OUTPUTS), name="step", domain="stof",
                            num_heads=H, kv_num_heads=G, mask="k <= q", **attributes)  # fmt: skip
    types = dict.fromkeys(INPUTS[5:], TensorProto.INT32)
    infos = [helper.make_tensor_value_info(n, types.get(n, TensorProto.FLOAT), None) for n in (*INPUTS, BOUNDS)]
    results = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in OUTPUTS]
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("stof", 1)]
    model = helper.make_model(helper.make_graph([node], "g", infos, results), opset_imports=opsets, ir_version=9)
    assert node.input[BOUNDS_INDEX] == BOUNDS
    with pytest.raises(Exception, match="step") as error:
        make_session(model.SerializeToString())
    assert expected in str(error.value)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((B, G, 4, 2, D), "float32"),
        ((B, G, 6, 2, D), "float32"),
        ((B, G, 5, 1, D), "float32"),
        ((B, G, 5, 2, D - 1), "float32"),
        ((B, 1, 5, 2, D), "float32"),
        ((1, G, 0, 2, D), "float32"),
        ((B, G, 5, 2 * D), "float32"),
    ],
)
def test_shapes_of_bounds(shape: tuple[int, ...], dtype: str) -> None:
    made = make_session(make_model("float32", 2, num_heads=H, kv_num_heads=G))
    with pytest.raises(Exception, match="step") as error:
        run(made, feeds(**{BOUNDS: np.zeros(shape, dtype)}))
    found = ", ".join(map(str, shape))
    words = f"past_page_bounds has shape [{found}] and data type 1, expected [2, 2, 5 (one for each 64 rows of past_key) or 0"
    assert words in str(error.value)


def test_the_number_of_outputs() -> None:
    made = make_session(make_model("float32", 2, OUTPUTS[:3], num_heads=H, kv_num_heads=G))
    with pytest.raises(Exception, match="step") as error:
        run(made, feeds())
    assert "has 3 outputs, expected output, present_key, present_value and present_page_bounds" in str(error.value)


def test_lengths_are_checked_before_bounds_change() -> None:
    made = make_session(make_model("float32", 2, num_heads=H, kv_num_heads=G))
    with pytest.raises(Exception, match=r"seqlens_k\[1\] is 250, expected 0 to 200"):
        run(made, feeds(seqlens_k=np.array([200, 250], np.int32)))


def check_switch() -> None:
    """In a process with STOF_SKIP_SCORES=0: all pages are attended, bit for bit, and key bounds are written."""
    for dtype in ("float32", "float16"):
        decoder = PageDecoder(np.random.default_rng(1), chosen=1, capacity=700, rows=16, dtype=dtype)
        decoder.fill([600, 555])
        for length in (1, 4):
            decoder.step(length, is_checked=False)
            np.testing.assert_array_equal(decoder.output, decoder.run_dense())
            decoder.check_caches(700)
    assert stof.skip_counts().scored == 0


def test_switched_off() -> None:
    run_switched_off(check_switch)
