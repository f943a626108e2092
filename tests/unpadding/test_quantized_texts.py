# SPDX-License-Identifier: Apache-2.0
"""Dynamic quantization without padding: scales are of real tokens, and verification says what the original's padding does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from encoders import INT64, LONGEST, Graph, check_unpadded, encoder, feeds_for, rows_of, session
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import quantize_dynamic

import stof
from stof.html_report import to_html
from stof.options import Options
from stof.report import Report
from stof.unpadding import rewrite
from stof.unpadding.padded_batches import describe_batches
from stof.verification.padding.longer_padding import LongerPadding
from stof.verification.quantization import has_one_scale
from stof.verification.result import PaddingMove


def quantized(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    """The model with dynamic int8 matmuls."""
    onnx.save(model, folder / "float.onnx")
    quantize_dynamic(folder / "float.onnx", folder / "int8.onnx")
    return onnx.load(folder / "int8.onnx")


def optimize(model: onnx.ModelProto, **options: Any) -> tuple[onnx.ModelProto, Report]:
    settings: dict[str, Any] = {"chains": "off"} | options
    written, report = stof.optimize(model, options=Options(**settings), return_report=True)
    return written, report


def moves_of(report: Report) -> list[PaddingMove]:
    assert report.verification is not None
    return report.verification.padding_moves


@pytest.mark.parametrize(
    ("poolings", "unpad"), [(("mean", "first"), "auto"), (("max", "last real"), "auto"), (("all", "mean"), "on")]
)
def test_how_far_padding_moves_outputs(poolings: tuple[str, ...], unpad: str, tmp_path: Path) -> None:
    model = quantized(encoder(*poolings, layers=3), tmp_path)
    result, report = optimize(model, unpad=unpad)
    check_unpadded(result, 3)
    moves = moves_of(report)
    assert {m.output for m in moves} == {p.replace(" ", "_") for p in poolings}
    assert all(m.longer > m.length for m in moves)
    assert any(m.apart > 1e-4 for m in moves)
    for move in moves:
        assert 1e-4 < move.moved < 0.1 * move.largest
        assert move.apart <= 4 * move.moved + 1e-5


def test_both_figures_are_in_every_report(tmp_path: Path) -> None:
    _, report = optimize(quantized(encoder("mean", "first"), tmp_path))
    worst = max(moves_of(report), key=lambda m: m.apart / m.largest)
    assert worst.apart > 0
    stated = (
        f"With padding from {worst.length} to {worst.longer} positions the original's '{worst.output}' moves by up to "
        f"{worst.moved:.2e}; without padding it is {worst.apart:.2e} from the original's"
    )
    assert stated in report.to_text()
    assert stated.replace("'", "&#x27;") in to_html(report)
    verification = json.loads(report.to_json())["verification"]
    assert len(verification["padding_moves"]) == len(moves_of(report))
    assert verification["padding_moves"][0]["moved"] == moves_of(report)[0].moved
    assert verification["padding_not_measured"] == ""


def test_the_figures_are_those_of_onnx_runtime(tmp_path: Path) -> None:
    """What the report states of a case is in the range of what other draws of the same kind give."""
    model = quantized(encoder("mean", layers=3), tmp_path)
    result, report = optimize(model)
    rng = np.random.default_rng(5)
    moved, apart = 0.0, 0.0
    original, without = session(model, False), session(result)
    for length in (9, 40):
        lengths = rng.integers(1, length // 2, 4)
        mask = (np.arange(length) < lengths[:, None]).astype(np.int64)
        feeds = feeds_for(model, mask)
        longer = {
            "input_ids": np.pad(feeds["input_ids"], ((0, 0), (0, length)), mode="wrap"),
            "attention_mask": np.pad(mask, ((0, 0), (0, length))),
        }
        (plain,), (other,), (found,) = (
            s.run(None, f) for s, f in ((original, feeds), (original, longer), (without, feeds))
        )
        (same,) = without.run(None, longer)
        np.testing.assert_allclose(same, found, atol=1e-6)
        moved, apart = max(moved, float(np.abs(plain - other).max())), max(apart, float(np.abs(plain - found).max()))
    stated = moves_of(report)
    assert moved / 10 < max(m.moved for m in stated) < 10 * moved
    assert apart / 10 < max(m.apart for m in stated) < 10 * apart


@pytest.mark.parametrize("sizes", [{"length": 24}, {"batch": 4, "length": 24}])
def test_a_fixed_length_gets_other_tokens_as_padding(sizes: dict[str, int], tmp_path: Path) -> None:
    _, report = optimize(quantized(encoder("mean", layers=3, **sizes), tmp_path))
    assert rows_of(report)[0].replaced
    moves = moves_of(report)
    assert moves
    assert all((m.length, m.longer) == (24, 24) and m.moved > 1e-4 for m in moves)
    assert "With other tokens as padding the original's 'mean' moves" in report.to_text()


@pytest.mark.parametrize("lengths", [(16, 24), ("first_length", "second_length"), ("first_length", 24)])
def test_each_of_two_batches_gets_other_padding(
    lengths: tuple[int | str, int | str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[dict[str, float]] = []
    run = LongerPadding.add_runs

    def note(self: LongerPadding, legal: list[list[list[np.ndarray]]], *given: Any) -> None:
        before = [len(runs) for runs in legal]
        run(self, legal, *given)
        for i, count in enumerate(before):
            plain = self._reference.plain[i]
            moved = [[float(np.abs(x - y).max()) for x, y in zip(plain, r, strict=True)] for r in legal[i][count:]]
            found.extend(dict(zip(self._names, m, strict=True)) for m in moved)

    monkeypatch.setattr(LongerPadding, "add_runs", note)
    g = Graph()
    for name, length in zip(("first", "second"), lengths, strict=True):
        ids, mask = (g.input(f"{name}_{n}", INT64, (f"{name}_batch", length)) for n in ("ids", "mask"))
        x = g.layer(g.embed(ids), g.bias(mask))
        g.output(g.pool(g.layer(x, g.bias(mask)), "mean", mask), name, rank=2)
    optimize(quantized(g.model(), tmp_path))
    assert found
    assert all(max(run[name] for run in found) > 1e-4 for name in ("first", "second"))


def test_padding_stays_within_stated_sizes(tmp_path: Path) -> None:
    model = quantized(encoder("mean", layers=3), tmp_path)
    _, report = optimize(model, shapes={"sequence": (8, 30)})
    assert moves_of(report)
    assert all(m.longer <= 30 for m in moves_of(report))


def test_padding_ends_where_positions_do(tmp_path: Path) -> None:
    """A table of 82 positions: texts of 59 get no 30 more, but half of that."""
    model = quantized(encoder("mean", layers=3, positions="table"), tmp_path)
    _, report = optimize(model)
    assert moves_of(report)
    assert all(m.length < m.longer <= LONGEST + 2 for m in moves_of(report))
    assert {m.longer for m in moves_of(report) if m.length == 59} == {59 + 15}


def test_other_models_have_no_such_figures(tmp_path: Path) -> None:
    _, report = optimize(encoder("mean"))
    assert rows_of(report)[0].replaced
    assert moves_of(report) == []
    assert "dynamic quantization" not in report.to_text()
    _, report = optimize(quantized(encoder("mean"), tmp_path), unpad="off")
    assert moves_of(report) == []
    assert "real tokens alone" not in report.to_text()


def scale_output(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [helper.make_node("Mul", ["right", "factor"], ["mean"])]


def add_length(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """What depends on how long padding is, as much as the original's scales do."""
    return [
        helper.make_node("Shape", ["attention_mask"], ["sizes"], start=1),
        helper.make_node("Cast", ["sizes"], ["length"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["length", "little"], ["more"]),
        helper.make_node("Add", ["right", "more"], ["mean"]),
    ]


@pytest.mark.parametrize("spoil", [scale_output, add_length])
def test_faults_are_found_all_the_same(
    spoil: Callable[[onnx.ModelProto], list[onnx.NodeProto]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer padding is no reason to accept what scales do not explain: padding stays then."""
    model = quantized(encoder("mean", layers=3, opset=17), tmp_path)
    emit = rewrite.emit_regions

    def spoiled(*given: Any) -> onnx.ModelProto:
        result = emit(*given)
        last = next(n for n in result.graph.node if "mean" in n.output)
        last.output[0] = "right"
        result.graph.node.extend(spoil(result))
        for name, number in (("factor", 0.8), ("little", 5e-3)):
            result.graph.initializer.append(numpy_helper.from_array(np.float32(number), name))
        return result

    monkeypatch.setattr(rewrite, "emit_regions", spoiled)
    result, report = optimize(model)
    (row,) = rows_of(report)
    assert not row.replaced
    assert "differs by" in row.reason
    assert "right" not in {n for node in result.graph.node for n in node.output}


def test_what_verification_knows_of_batches(tmp_path: Path) -> None:
    captured: list[Any] = []

    def capture(model: onnx.ModelProto) -> tuple[Any, ...]:
        captured.clear()
        original = rewrite.emit_regions
        rewrite.emit_regions = lambda *given: captured.append(given) or original(*given)  # type: ignore[func-returns-value]
        try:
            optimize(model, verify=False)
        finally:
            rewrite.emit_regions = original
        return describe_batches(*captured[0])

    (plain,) = capture(encoder("mean"))
    assert not plain.is_quantized
    (batch,) = capture(quantized(encoder("mean", types=True), tmp_path))
    assert (batch.mask, batch.number, batch.dimensions) == ("attention_mask", 0, {"sequence"})
    assert batch.is_quantized
    assert batch.axes == {"input_ids": (1,), "attention_mask": (1,), "token_type_ids": (1,)}
    (fixed,) = capture(quantized(encoder("mean", length=9), tmp_path))
    assert fixed.dimensions == frozenset()
    assert fixed.axes == {"input_ids": (1,), "attention_mask": (1,)}


@pytest.mark.parametrize(
    ("op", "level", "expected"),
    [
        ("DynamicQuantizeLinear", None, True),
        ("DynamicQuantizeMatMul", None, True),
        ("MatMulNBits", 4, False),
        ("QuantizeLinear", None, False),
    ],
)
def test_quantizers_of_whole_tensors(op: str, level: int | None, expected: bool) -> None:
    attributes = {} if level is None else {"accuracy_level": level}
    assert has_one_scale(helper.make_node(op, ["x"], ["y"], **attributes)) is expected
