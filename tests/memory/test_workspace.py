# SPDX-License-Identifier: Apache-2.0
"""What stof's operators take besides inputs and outputs, as the library says it and as a run shows it."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper
from run_node import measure_node

from stof.memory.run_estimate import MemoryEstimate
from stof.runtime.library import LibraryError, Op, shape_of
from stof.symbolic import Symbolic

_HEADS, _SIZE = 8, 64
_FLOAT = int(onnx.TensorProto.FLOAT)


def _attention(
    mask: str, length: int, batch: int = 1, operands: str = ""
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    shape = (batch, length, _HEADS * _SIZE)
    feed = {name: rng.standard_normal(shape).astype(np.float32) for name in ("q", "k", "v")}
    if operands:
        pad = np.ones((batch, length), bool)
        pad[:, length // 2 :] = rng.random((batch, length - length // 2)) < 0.5
        feed["pad"] = pad
    attributes = {"mask": mask, "layout": "BSN", "num_heads": _HEADS, "kv_num_heads": _HEADS, "operands": operands}
    node = helper.make_node("StofAttention", list(feed), ["y"], domain="stof", **attributes)
    inputs = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in feed.items()
    ]
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", _FLOAT, shape)])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("stof", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9), feed


@pytest.mark.parametrize(
    ("mask", "batch", "length", "operands"),
    [("", 1, 4096, ""), ("", 4, 1500, ""), ("pad[b, k]", 2, 3001, "pad"), ("abs(q - k) <= 64", 1, 16384, "")],
)
def test_a_run_takes_what_the_library_says(mask: str, batch: int, length: int, operands: str) -> None:
    model, feed = _attention(mask, length, batch, operands)
    estimated = MemoryEstimate(model, Symbolic(model), is_strict=True).run({}).peak
    measured = measure_node(model, feed)
    assert abs(estimated - measured) <= max(4 << 20, 0.06 * measured), (estimated, measured)


def _workspace(mask: str, length: int, threads: int = 1, **more: str) -> int | None:
    attributes = {"mask": mask, "layout": "BSN", "num_heads": _HEADS, "kv_num_heads": _HEADS, **more}
    tensors = [shape_of(_FLOAT, (1, length, _HEADS * _SIZE))] * 3
    return Op("StofAttention", attributes).workspace(tensors, threads)


def test_keys_are_packed_but_for_windows() -> None:
    keys = 4096 * _HEADS * _SIZE * 4
    dense, window = _workspace("", 4096), _workspace("abs(q - k) <= 64", 4096)
    assert dense is not None
    assert window is not None
    assert 2 * keys <= dense <= 2 * keys + (4 << 20)  # values, too: rows of a head are not dense
    assert window < keys / 2
    two = _workspace("", 4096, 2)
    assert two is not None
    assert dense < two


def test_what_the_library_cannot_say(monkeypatch: pytest.MonkeyPatch) -> None:
    op = Op("StofAttention", {"mask": "", "layout": "BSN", "num_heads": _HEADS, "kv_num_heads": _HEADS})
    with pytest.raises(LibraryError, match="threads must be 1 to 64"):
        op.workspace([shape_of(_FLOAT, (1, 8, 512))] * 3, 65)
    with pytest.raises(LibraryError, match="has 1 inputs, expected 3"):
        op.workspace([shape_of(_FLOAT, (1, 8, 512))])
    with pytest.raises(ValueError, match="rank 9"):
        shape_of(_FLOAT, (1,) * 9)
    monkeypatch.setattr("stof.runtime.library.library", lambda: object())  # of an earlier version
    assert op.workspace([shape_of(_FLOAT, (1, 8, 512))] * 3) is None
    monkeypatch.undo()


def test_what_only_a_run_knows_counts_with_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = _attention("", 2048)

    def refuse(*_: object) -> None:
        raise LibraryError("only a run knows the lengths of packed sequences")

    monkeypatch.setattr("stof.runtime.library.Op.workspace", refuse)
    tensor = 2048 * _HEADS * _SIZE * 4
    assert (
        MemoryEstimate(model, Symbolic(model), is_strict=True).run({}).peak == 3 * tensor
    )  # of these one is the output
