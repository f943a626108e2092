# SPDX-License-Identifier: Apache-2.0
"""Bounds of tensors: what is proven finite, every reason against a proof, and that no bound is too small."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from stof.graph.index import GraphIndex
from stof.mask.empty_rows.value_bounds import ValueBounds
from stof.symbolic import Symbolic

HALF, SINGLE = np.float16, np.float32
INPUTS = "int64[S] positions, float[S] data, bool[S] kept"


def graph(body: str, inputs: str = INPUTS, **tables: np.ndarray) -> onnx.ModelProto:
    """A graph of this body that gives ``out``, whatever its type."""
    text = f'<ir_version: 9, opset_import: ["": 18]>\ng ({inputs}) => (float[] out) {{\n{body}\n}}'
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in tables.items())
    return model


def bound(model: onnx.ModelProto, folder: Path | None = None) -> float:
    """That of ``out``."""
    return ValueBounds(GraphIndex(model.graph), Symbolic(model), folder).of("out")


TABLE = np.arange(-6, 6, dtype=SINGLE).reshape(4, 3)
LARGE = np.full(3, 3e38, SINGLE)
LONG = np.full(2, 60000, HALF)
MINUS = np.array(-np.inf, SINGLE)
WHOLE = np.array([[2, 1]])
BUCKETS = """from = Unsqueeze (positions, first)  to = Unsqueeze (positions, last)  far = Sub (to, from)
    near = Abs (far)  least = Min (near, three)  entry = Cast <to = 7> (least)"""
AXES = {"first": np.array([0]), "last": np.array([1]), "three": np.array(3)}

FINITE: dict[str, tuple[float, onnx.ModelProto]] = {
    "a constant": (6.0, graph("out = Identity (table)", table=TABLE)),
    "buckets": (6.0, graph(f"{BUCKETS} rows = Gather (table, entry) out = Transpose (rows)", table=TABLE, **AXES)),
    "moved": (
        6.0,
        graph(
            "a = Unsqueeze (table, first) b = Squeeze (a, first) c = Expand (b, sizes) d = Tile (c, sizes) "
            "e = Slice (d, first, last) f = Flatten (e) g, h = Split <axis = 0, num_outputs = 2> (f) "
            "i = Concat <axis = 0> (g, h) out = Reshape (i, all)",
            table=TABLE,
            sizes=np.array([4, 3]),
            all=np.array([-1]),
            **AXES,
        ),
    ),
    "padded": (9.0, graph("out = Pad (table, pads, filled)", table=TABLE, pads=np.ones(4, np.int64), filled=SINGLE(9))),
    "padded with zeros": (6.0, graph("out = Pad (table, pads)", table=TABLE, pads=np.ones(4, np.int64))),
    "a choice": (65504.0, graph("out = Where (kept, low, one)", low=np.full(1, -65504, HALF), one=HALF(1))),
    "one number": (2.5, graph("out = Constant <value = float {-2.5}> ()")),
    "as many as there are": (3.0, graph("n = Shape (data) out = ConstantOfShape <value = float[1] {3}> (n)")),
    "a sum": (18.0, graph("a = Add (table, table) out = Sub (a, table)", table=TABLE)),
    "a product": (36.0, graph("out = Mul (table, table)", table=TABLE)),
    "extremes": (
        6.0,
        graph("a = Max (table, one) b = Min (a, table) c = Neg (b) out = Abs (c)", table=TABLE, one=SINGLE(1)),
    ),
    "a sum in fp16 that fits": (65504.0, graph("out = Add (a, a)", a=np.full(2, 32752, HALF))),
    "a cast to fp16 that fits": (6.0, graph("out = Cast <to = 10> (table)", table=TABLE)),
    "a cast of integers to fp16": (2.0, graph("out = Cast <to = 10> (whole)", whole=WHOLE)),
    "distances of a fixed length in fp16": (
        14.0,
        graph(
            "n = Range (zero, eight, one) from = Unsqueeze (n, first) to = Unsqueeze (n, last) d = Sub (to, from) "
            "f = Cast <to = 10> (d) out = Mul (f, slope)",
            slope=HALF(2),
            zero=np.array(0),
            one=np.array(1),
            eight=np.array(8),
            **AXES,
        ),
    ),
    "distances of any length in fp32": (
        2.0**24,
        graph(
            "s = Shape (data) n = Squeeze (s) r = Range (zero, n, one) f = Cast <to = 1> (r) out = Mul (f, slope)",
            slope=SINGLE(-4),
            zero=np.array(0),
            one=np.array(1),
        ),
    ),
    "truth": (3.0, graph("f = Cast <to = 1> (kept) out = Mul (f, three)", three=SINGLE(3))),
    "integers of a run in fp32": (2.0**63, graph("out = Cast <to = 1> (positions)")),
}
UNBOUNDED: dict[str, onnx.ModelProto] = {
    "-inf in a table": graph("out = Identity (table)", table=np.array([1, -np.inf], SINGLE)),
    "NaN in a table": graph("out = Identity (table)", table=np.array([1, np.nan], SINGLE)),
    "-inf in a choice": graph("out = Where (kept, table, minus)", table=SINGLE(1), minus=MINUS),
    "-inf around": graph("out = Pad (table, pads, minus)", table=TABLE, pads=np.ones(4, np.int64), minus=MINUS),
    "-inf, as many as there are": graph("n = Shape (data) out = ConstantOfShape <value = float[1] {-inf}> (n)"),
    "data": graph("out = Identity (data)"),
    "a table times data": graph("out = Mul (one, data)", one=SINGLE(1)),
    "a table that a caller may replace": graph("out = Identity (table)", f"{INPUTS}, float[4,3] table", table=TABLE),
    "a sum that may overflow": graph("out = Add (large, large)", large=LARGE),
    "a difference that may overflow": graph("out = Sub (large, large)", large=LARGE),
    "a product that may overflow": graph("out = Mul (large, ten)", large=LARGE, ten=SINGLE(10)),
    "a sum in fp16 that may overflow": graph("out = Add (long, long)", long=LONG),
    "an overflow that is undone": graph("a = Add (long, long) out = Mul (a, half)", long=LONG, half=HALF(0.5)),
    "infinity times zero": graph("a = Add (large, large) out = Mul (a, zero)", large=LARGE, zero=SINGLE(0)),
    "a cast to fp16 that overflows": graph("out = Cast <to = 10> (table)", table=np.array([1, 1e5], SINGLE)),
    "a cast of integers to fp16 that overflows": graph("out = Cast <to = 10> (whole)", whole=np.array([1 << 17])),
    "integers of a run in fp16": graph("out = Cast <to = 10> (positions)"),
    "products of integers of a run in fp16": graph("a = Mul (positions, positions) out = Cast <to = 10> (a)"),
    "distances of any length in fp16": graph(
        "s = Shape (data) n = Squeeze (s) r = Range (zero, n, one) out = Cast <to = 10> (r)",
        zero=np.array(0),
        one=np.array(1),
    ),
    "unsigned integers below zero in fp16": graph(
        "a = Cast <to = 12> (whole) out = Cast <to = 10> (a)", whole=np.array([-1])
    ),
    "integers that wrap around in fp16": graph(
        "a = Sub (zero, one) out = Cast <to = 10> (a)", zero=np.zeros(2, np.uint32), one=np.array([1, 0], np.uint32)
    ),
    "a difference of unsigned integers, all the same, in fp16": graph(
        "a = Sub (one, two) out = Cast <to = 10> (a)",
        one=np.full((7, 4), 1, np.uint32),
        two=np.full((7, 4), 2, np.uint32),
    ),
    "unsigned integers below zero, all the same, in fp16": graph(
        "a = Cast <to = 12> (whole) out = Cast <to = 10> (a)", whole=np.full((7, 4), -1, np.int32)
    ),
    "a larger one of unsigned integers that wrapped around, in fp16": graph(
        "a = Sub (one, two) b = Max (a, one) out = Cast <to = 10> (b)",
        one=np.full((7, 4), 1, np.uint32),
        two=np.full((7, 4), 2, np.uint32),
    ),
    "a logarithm": graph("out = Log (table)", table=TABLE),
    "a quotient": graph("out = Div (table, table)", table=TABLE),
}


@pytest.mark.parametrize("name", FINITE)
def test_bounds(name: str) -> None:
    wanted, model = FINITE[name]
    assert wanted <= bound(model) <= wanted * 1.02 + 1e-5


@pytest.mark.parametrize("name", UNBOUNDED)
def test_what_has_no_bound(name: str) -> None:
    assert bound(UNBOUNDED[name]) == math.inf


@pytest.mark.parametrize("entry", [2.0, np.inf, np.nan])
def test_external_data_is_read_where_it_lies(entry: float, tmp_path: Path) -> None:
    """In parts: the number that decides is the last one, in the second part."""
    table = np.ones((3, 1 << 19), SINGLE)
    table[-1, -1] = entry
    onnx.save(
        graph("out = Identity (table)", table=table, other=np.zeros(1 << 10, SINGLE)),
        str(tmp_path / "m.onnx"),
        save_as_external_data=True,
        location="weights.bin",
    )
    model = onnx.load(str(tmp_path / "m.onnx"), load_external_data=False)
    assert bound(model, tmp_path) == (entry if np.isfinite(entry) else math.inf)
    assert bound(model) == math.inf, "without its folder"
    (tmp_path / "weights.bin").unlink()
    assert bound(model, tmp_path) == math.inf, "without the file"


@pytest.mark.parametrize(
    ("dims", "entries"),
    [
        ([3, 4], {"offset": "-4"}),
        ([3, 4], {"offset": "1"}),
        ([3, -4], {}),
        ([1 << 62, 4], {"length": "0"}),
        ([1 << 60, 8], {}),
        ([3, 5], {}),
        ([3, 4], {"offset": "none"}),
        ([3, 4], {"location": "missing.bin"}),
    ],
)
def test_damaged_external_data_has_no_bound(dims: list[int], entries: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(np.ones(12, SINGLE).tobytes())
    model = graph("out = Identity (table)", table=np.ones((3, 4), SINGLE))
    (table,) = model.graph.initializer
    table.ClearField("raw_data")
    table.data_location = onnx.TensorProto.EXTERNAL
    del table.external_data[:]
    table.external_data.add(key="location", value="weights.bin")
    assert bound(model, tmp_path) == 1.0
    for key, value in entries.items():
        for old in [e for e in table.external_data if e.key == key]:
            table.external_data.remove(old)
        table.external_data.add(key=key, value=value)
    table.dims[:] = dims
    assert bound(model, tmp_path) == math.inf


_ENTRIES = st.sampled_from([0.0, 1e-7, 0.3, -1.0, 7.5, 100.0, -30000.0, 65504.0, 1e5, -1e30, 3.4e38, np.inf, np.nan])
_STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["Add", "Sub", "Mul", "Max", "Min", "Neg", "Abs", "Cast1", "Cast10", "Identity", "Where", "Concat"]
        ),
        st.integers(0, 7),
        st.integers(0, 7),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=300)
@given(entries=st.lists(_ENTRIES, min_size=6, max_size=6), steps=_STEPS)
def test_no_bound_is_too_small(entries: list[float], steps: list[tuple[str, int, int]]) -> None:
    """Chains of operators over tables in both types, beside what they give."""
    with np.errstate(over="ignore"):
        tables = {
            "t0": np.array(entries[:2], SINGLE),
            "t1": np.array(entries[2:4], HALF),
            "t2": np.array(entries[4:], SINGLE),
        }
    kinds, lines = {"t0": 1, "t1": 10, "t2": 1}, []
    for number, (operator, one, other) in enumerate(steps):
        names, name = list(kinds), f"s{number}"
        x, y = names[-1 - one % len(names)], names[-1 - other % len(names)]
        if kinds[y] != kinds[x]:
            lines.append(f"{name}_y = Cast <to = {kinds[x]}> ({y})")
            y = f"{name}_y"
        match operator:
            case "Cast1" | "Cast10":
                lines.append(f"{name} = Cast <to = {operator[4:]}> ({x})")
            case "Neg" | "Abs" | "Identity":
                lines.append(f"{name} = {operator} ({x})")
            case "Where":
                lines.append(f"{name} = Where (chosen, {x}, {y})")
            case "Concat":
                lines.append(f"{name}_j = Concat <axis = 0> ({x}, {y}) {name} = Slice ({name}_j, begin, end)")
            case _:
                lines.append(f"{name} = {operator} ({x}, {y})")
        kinds[name] = int(operator[4:]) if operator.startswith("Cast") else kinds[x]
    lines.append(f"out = Identity (s{len(steps) - 1})")
    others = {"chosen": np.array([True, False]), "begin": np.array([1]), "end": np.array([3])}
    model = graph("\n".join(lines), "float[1] unread", **tables, **others)
    found = bound(model)
    if not math.isfinite(found):
        return
    with np.errstate(all="ignore"):
        (out,) = ReferenceEvaluator(model).run(None, {"unread": np.zeros(1, SINGLE)})
    assert np.isfinite(out).all()
    assert float(np.abs(out.astype(np.float64)).max()) <= found
