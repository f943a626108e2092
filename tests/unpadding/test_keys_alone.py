# SPDX-License-Identifier: Apache-2.0
"""Decoders that get the states of an encoder: keys and values of cross-attention are of real tokens alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from encoders import (
    BOOL,
    FLOAT,
    INT64,
    TYPES,
    WIDTH,
    WORDS,
    Graph,
    attentions,
    masks,
    rows_of,
    session,
    unpadded,
)
from onnxruntime.quantization import quantize_dynamic

import stof
from stof.options import Options


def decoder(
    layers: int = 2,
    *,
    dtype: int = INT64,
    inverted: bool = False,
    apply: str = "add",
    own: bool = False,
    opset: int = 17,
) -> onnx.ModelProto:
    """A decoder of which queries are its own tokens; ``own``: with causal attention between these."""
    g = Graph(opset=opset)
    ids = g.input("decoder_input_ids", INT64, ("batch", "target"))
    states = g.input("encoder_hidden_states", FLOAT, ("batch", "source", WIDTH))
    mask = g.input("encoder_attention_mask", dtype, ("batch", "source"))
    bias = g.bias(mask, dtype, inverted) if apply == "add" else g.allowed(mask, dtype, inverted)
    x = g.embed(ids)
    columns = g.add("Range", g.constant(0), g.add("Gather", g.add("Shape", ids), g.constant(1)), g.constant(1))
    causal = str(g.add("LessOrEqual", columns, g.unsqueeze(columns, 1)))
    for _ in range(layers):
        if own:
            x = g.self_attention(x, causal, "where")
        x = g.feed_forward(g.self_attention(x, bias, apply, keys=states))
    g.output(x, "y", rank=3)
    return g.model()


def feeds_for(
    model: onnx.ModelProto, mask: np.ndarray, inverted: bool = False, target: int = 4
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)
    dtype = next(i for i in model.graph.input if i.name == "encoder_attention_mask").type.tensor_type.elem_type
    return {
        "decoder_input_ids": rng.integers(0, WORDS, (len(mask), target)),
        "encoder_hidden_states": rng.uniform(-1, 1, (*mask.shape, WIDTH)).astype(np.float32),
        "encoder_attention_mask": (1 - mask if inverted else mask).astype(TYPES[dtype]),
    }


def check_same(original: onnx.ModelProto, result: onnx.ModelProto, inverted: bool = False, target: int = 4) -> None:
    oracle = session(original, False)
    for with_library in (True, False):
        found = session(result, with_library)
        for label, mask in masks().items():
            feeds = feeds_for(original, mask, inverted, target)
            (one,), (other,) = oracle.run(None, feeds), found.run(None, feeds)
            np.testing.assert_allclose(other, one, rtol=2e-4, atol=2e-5, err_msg=f"{label}, {with_library}")


def kinds_of(model: onnx.ModelProto) -> list[str]:
    return ["keys" if "cumulative_key_length" in roles else "" for _, roles in attentions(model)]


@pytest.mark.parametrize(
    ("dtype", "inverted", "apply"), [(INT64, False, "add"), (BOOL, False, "where"), (BOOL, True, "where")]
)
@pytest.mark.parametrize("target", [1, 4, 9])
def test_keys_and_values_are_of_real_tokens(dtype: int, inverted: bool, apply: str, target: int) -> None:
    model = decoder(dtype=dtype, inverted=inverted, apply=apply)
    result, report = unpadded(model)
    (row,) = rows_of(report)
    assert row.replaced
    assert (row.attentions, row.of_attentions, row.keys_only, row.rest) == (0, 2, 2, "")
    assert row.nodes >= 2 * 2 * 2  # matmul and bias, of keys and values, in two layers
    assert row.gains[0] == 1
    assert 1 < row.gains[1] < row.gains[-1]
    assert kinds_of(result) == ["keys", "keys"]
    check_same(model, result, inverted, target)


@pytest.mark.parametrize("opset", [13, 17, 21])
def test_attention_of_its_own_stays_as_it_is(opset: int) -> None:
    model = decoder(own=True, opset=opset)
    result, report = unpadded(model)
    assert [r.batch for r in rows_of(report)] == ["encoder_attention_mask"]
    assert kinds_of(result) == ["", "keys", "", "keys"]
    check_same(model, result)


def test_random_lengths() -> None:
    """Texts of 0 to 13 tokens, in batches of 1 to 6."""
    model = decoder(layers=1)
    result, _ = unpadded(model)
    oracle, found = session(model, False), session(result)
    rng = np.random.default_rng(7)
    for _ in range(200):
        batch, length = rng.integers(1, 7), rng.integers(1, 14)
        mask = (np.arange(length) < rng.integers(0, length + 1, (batch, 1))).astype(np.int64)
        if rng.random() < 0.3:
            mask = mask[:, ::-1].copy()
        feeds = feeds_for(model, mask, target=int(rng.integers(1, 6)))
        np.testing.assert_allclose(found.run(None, feeds)[0], oracle.run(None, feeds)[0], rtol=2e-4, atol=2e-5)


def test_states_that_something_else_reads_stay_beside_the_keys() -> None:
    """Their sum over all positions is an output: the projections do not depend on who else reads the input."""
    model = decoder(layers=1)
    axis = onnx.helper.make_tensor("axis_of_sum", INT64, [1], [1])
    model.graph.initializer.append(axis)
    model.graph.node.append(onnx.helper.make_node("ReduceSum", ["encoder_hidden_states", "axis_of_sum"], ["sums"]))
    model.graph.output.append(onnx.helper.make_tensor_value_info("sums", FLOAT, None))
    result, report = unpadded(model)
    assert rows_of(report)[0].keys_only == 1
    feeds = feeds_for(model, masks()["right"])
    for one, other in zip(session(model, False).run(None, feeds), session(result).run(None, feeds), strict=True):
        np.testing.assert_allclose(other, one, rtol=2e-4, atol=2e-5)


def test_keys_that_are_an_output_stay_padded() -> None:
    model = decoder(layers=1)
    projections = {n.output[0] for n in model.graph.node if "encoder_hidden_states" in n.input}
    keys = next(n for n in model.graph.node if n.op_type == "Add" and projections.intersection(n.input))
    model.graph.output.append(onnx.helper.make_tensor_value_info(keys.output[0], FLOAT, None))
    result, report = unpadded(model)
    (row,) = rows_of(report)
    assert not row.replaced
    assert row.reason == f"output {keys.output[0]!r} has a row for every position"
    assert kinds_of(result) == [""]


def test_keys_that_no_matmul_computes_are_not_copied() -> None:
    """Keys and values are inputs of the model: to copy their real tokens gains nothing."""
    g = Graph()
    ids = g.input("decoder_input_ids", INT64, ("batch", "target"))
    keys, values = (g.input(n, FLOAT, ("batch", "source", WIDTH)) for n in ("keys", "values"))
    mask = g.input("encoder_attention_mask", INT64, ("batch", "source"))
    q, k, v = g.heads(g.embed(ids)), g.heads(g.add("Neg", keys)), g.heads(g.add("Neg", values))
    g.output(g.merge_heads(g.attend(q, k, v, g.bias(mask))), "y", rank=3)
    _, report = unpadded(g.model())
    (row,) = rows_of(report)
    assert not row.replaced
    assert row.reason == "no matmul computes the keys and values of its attention from tokens"


def test_verified_whole(tmp_path: Path) -> None:
    model = decoder(layers=2, own=True)
    onnx.save(model, tmp_path / "model.onnx")
    report = stof.optimize(tmp_path / "model.onnx", tmp_path / "out.onnx", Options())
    assert rows_of(report)[0].replaced
    assert "0 of 2 attentions, keys and values alone of 2 more" in report.to_text()
    assert report.verification is not None
    assert any(report.verification.padding_shares)
    check_same(model, onnx.load(tmp_path / "out.onnx"))


def test_dynamic_quantization(tmp_path: Path) -> None:
    onnx.save(decoder(layers=3), tmp_path / "float.onnx")
    quantize_dynamic(tmp_path / "float.onnx", tmp_path / "int8.onnx")
    report = stof.optimize(tmp_path / "int8.onnx", tmp_path / "out.onnx", Options(chains="off"))
    assert rows_of(report)[0].replaced
    assert report.verification is not None
    moves = report.verification.padding_moves
    assert moves
    assert all(m.output == "y" and m.longer > m.length for m in moves)
    assert kinds_of(onnx.load(tmp_path / "out.onnx")) == ["keys"] * 3
