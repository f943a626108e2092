# SPDX-License-Identifier: Apache-2.0
"""Packed sequences of StofAttention: tensors without padding, compared with the padded problem in fp64."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from tests.helpers.packed_sequences import BHSD, PackedProblem, compare

import stof
from stof.attention.checks.reference import Problem, assert_close, random_problem
from stof.mask.site import EmptyRows
from stof.runtime.library import LibraryError, Op

CUMULATIVE = "cumulative_sequence_length"
WINDOW = "k <= q and q - k < 200"
GLOBAL = "abs(q - k) <= 60 or k < 3 or q < 3"


def problem_of(rng: np.random.Generator, lengths: list[int], T: int, *, first: Any = None, **settings: Any) -> Any:
    padded = random_problem(rng, len(lengths), settings.pop("H", 2), T, settings.pop("D", 64), **settings)
    where = None if first is None else np.array(first, np.int32)
    return PackedProblem(padded, np.array(lengths, np.int32), where)


def test_random_problems() -> None:
    compare(seed=54, draws=400)


@pytest.mark.skipif(os.environ.get("STOF_TEST_ALL") != "1", reason="long: STOF_TEST_ALL=1")
def test_many_random_problems() -> None:
    compare(seed=55, draws=100_000)


IS_ARM = platform.machine().lower() in ("aarch64", "arm64")
ARM_ISAS = ("portable", "neon", "neon_dotprod", "neon_bf16")
X86_ISAS = ("portable", "avx2", "avx_vnni", "avx512", "avx512_vnni", "avx512_vbmi", "avx512_bf16")
ISAS = ARM_ISAS if IS_ARM else X86_ISAS


@pytest.mark.parametrize("isa", ISAS)
def test_instruction_sets(isa: str) -> None:
    command = [sys.executable, "-m", "tests.helpers.packed_sequences", "56", "150"]
    done = subprocess.run(
        command, env={**os.environ, "STOF_CPU_ISA": isa, "PYTHONPATH": os.pathsep.join(sys.path)}, check=False
    )
    assert done.returncode == 0


@pytest.mark.parametrize("mask", ["", "k <= q", WINDOW, GLOBAL, "(q + b) % 3 != k % 3"])
@pytest.mark.parametrize("first", [None, [0, 7, 0, 100]])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_sequences_too_long_for_a_ring(mask: str, first: list[int] | None, dtype: type) -> None:
    # Packed keys of sequences this long do not fit a worker's ring: all panels are packed beforehand.
    rng = np.random.default_rng(1)
    problem_of(rng, [1300, 0, 129, 1201], 1301, first=first, mask=mask, dtype=dtype, padded=False).check(2)


@pytest.mark.parametrize("mask", ["", "k <= q", "table0[q, k]"])
def test_full_lengths_give_the_bits_of_the_padded_call(mask: str) -> None:
    rng = np.random.default_rng(2)
    operands = {"table0": rng.random((130, 130)) < 0.5} if "table0" in mask else {}
    problem = problem_of(rng, [130] * 3, 130, mask=mask, operands=operands)
    packed = problem.run(2)[0].reshape(2, 3, 130, 64).transpose(1, 0, 2, 3)
    np.testing.assert_array_equal(packed, problem.padded.run(2))


@pytest.mark.parametrize("mask", ["", "k <= q", "table0[q, k]"])
def test_a_sequence_reads_no_row_of_another(mask: str) -> None:
    rng = np.random.default_rng(3)
    operands = {"table0": rng.random((99, 99)) < 0.5} if "table0" in mask else {}
    problem = problem_of(rng, [33, 99, 1, 64], 99, mask=mask, operands=operands)
    whole = problem.run()
    starts = problem.starts
    for b in range(4):
        p = problem.padded
        rows = {name: np.where(np.arange(4)[:, None, None, None] == b, np.nan, getattr(p, name)) for name in "qkv"}
        rows = {name: array.astype(np.float32) for name, array in rows.items()}
        found = replace(problem, padded=replace(p, **rows)).run()
        others = np.ones(whole.shape[2], bool)
        others[starts[b] : starts[b + 1]] = False
        np.testing.assert_array_equal(found[:, :, others], whole[:, :, others])


@pytest.mark.parametrize("empty_rows", list(EmptyRows))
@pytest.mark.parametrize("has_queries", [True, False])
def test_rows_without_keys(empty_rows: EmptyRows, has_queries: bool) -> None:
    rng = np.random.default_rng(4)
    operands = {"lengths": np.array([3, 0, 40, 0], np.int32)}
    problem = problem_of(rng, [20, 30, 0, 1], 40, mask="k < lengths[b]", operands=operands, empty_rows=empty_rows)
    # Without T of an operand it is the largest length.
    problem = replace(problem, lengths=np.array([20, 40, 0, 1], np.int32), has_queries=has_queries)
    problem.check()


def test_threads_give_the_same_bits() -> None:
    rng = np.random.default_rng(5)
    problem = problem_of(rng, rng.integers(0, 200, 24).tolist(), 200, H=6, operands={"pad": np.ones((1, 200), bool)})
    problem = replace(problem, padded=replace(problem.padded, mask="pad[b, k] and k <= q"))
    found = [problem.run(threads) for threads in (1, 2, 5)]
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


@pytest.mark.parametrize("has_queries", [True, False])
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_no_rows(lengths: list[int], has_queries: bool) -> None:
    problem = problem_of(np.random.default_rng(6), lengths, 8, padded=True)
    replace(problem, has_queries=has_queries).check()


@pytest.mark.parametrize("layout", ["BHSD", "BSHD", "BSN"])
@pytest.mark.parametrize("lengths", [[], [0], [0, 0], [5], [3, 0, 9]])
@pytest.mark.parametrize("spare", [1, 33])
@pytest.mark.parametrize("empty_rows", list(EmptyRows))
def test_rows_behind_the_last_sequence(layout: str, lengths: list[int], spare: int, empty_rows: EmptyRows) -> None:
    """They may hold anything, and give 0, whatever rows of sequences give."""
    rng = np.random.default_rng(11)
    operands = {"lengths": np.array([0] * len(lengths), np.int32), "pad": np.ones((len(lengths), 12), bool)}
    made = problem_of(rng, lengths, 12, mask="k < lengths[b] and pad[b, k]", operands=operands, empty_rows=empty_rows)
    for has_queries in (True, False):
        replace(made, spare=spare, layouts=(layout,) * 4, has_queries=has_queries).check()
    rest = replace(made, spare=spare).run()[:, :, sum(lengths) :]
    assert rest.shape[2] == spare
    assert not rest.any()


def test_query_key_and_value_in_one_tensor() -> None:
    """Attribute packed names heads of one tensor, and the sequences are packed along its rows."""
    made = problem_of(np.random.default_rng(10), [33, 0, 70], 70, H=4, D=16, mask="k <= q")
    p = made.padded
    rows = np.concatenate([made.pack(a)[0] for a in (p.q, p.k, p.v)])  # [12, L, 16]
    whole = np.ascontiguousarray(rows.transpose(1, 0, 2)).reshape(1, 103, 12 * 16)
    attributes = {**made.attributes(), "layout": "BSN", "packed": [0, 12, 4, 12, 8, 12]}
    out = np.full((1, 103, 64), np.nan, np.float32)
    Op("StofAttention", attributes).run([whole, whole, whole, *made.inputs()[3:]], [out])
    assert_close(out.reshape(1, 103, 4, 16).transpose(0, 2, 1, 3), made.reference())


# ---- errors ----
LENGTHS = [3, 0, 5]


def arrays(**changed: Any) -> dict[str, Any]:
    rng = np.random.default_rng(7)
    found: dict[str, Any] = {n: rng.standard_normal((1, 2, 8, 16)).astype(np.float32) for n in "qkv"}
    found["pad"] = np.ones((3, 9), bool)
    found[CUMULATIVE] = np.array([0, 3, 3, 8], np.int32)
    found["first_position"] = np.array([6, 0, 4], np.int32)
    found.update(changed)
    return {name: array for name, array in found.items() if array is not None}


def run_arrays(given: dict[str, Any], **attributes: Any) -> np.ndarray:
    out = np.full((*given["q"].shape[:3], given["v"].shape[-1]), 7.0, np.float32)
    roles = " ".join(n for n in given if len(n) > 1)
    op = Op("StofAttention", {"mask": "pad[b, k]" if "pad" in given else "", "operands": roles, **attributes})
    try:
        op.run([np.ascontiguousarray(a) for a in given.values()], [out])
    except LibraryError:
        assert (out == 7.0).all(), "the output was written"
        raise
    return out


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "first entry": ({CUMULATIVE: i32(1, 3, 3, 8)}, f"{CUMULATIVE}[0] is 1, expected 0"),
    "negative": ({CUMULATIVE: i32(0, -1, 3, 8)}, f"{CUMULATIVE}[1] is -1, expected 0 (the entry before it) to 8"),
    "falling": ({CUMULATIVE: i32(0, 5, 3, 8)}, f"{CUMULATIVE}[2] is 3, expected 5 (the entry before it) to 8"),
    "beyond": ({CUMULATIVE: i32(0, 3, 9, 9)}, f"{CUMULATIVE}[2] is 9, expected 3 (the entry before it) to 8"),
    "last entry": (
        {CUMULATIVE: i32(0, 3, 3, 9)},
        f"{CUMULATIVE}[3] is 9, expected 3 (the entry before it) to 8 (the length of query); "
        "a model of fixed capacity needs a larger --unpad-capacity",
    ),
    "no sequence": (
        {CUMULATIVE: i32(1), "pad": np.ones((0, 9), bool), "first_position": i32()},
        "[0] is 1, expected 0",
    ),
    "negative position": ({"first_position": i32(0, -1, 0)}, "first_position[1] is -1, expected 0 or more"),
    "position beyond": (
        {"first_position": i32(0, 0, 5)},
        "first_position[2] is 5 with 5 rows behind it, expected at most 9 positions, the length of pad",
    ),
    "largest position": ({"first_position": i32(2**31 - 1, 0, 0)}, "first_position[0] is 2147483647 with 3 rows"),
    "far position without pad": (
        {"pad": None, "first_position": i32(2**22 - 2, 0, 0)},
        "first_position[0] is 4194302 with 3 rows behind it, expected at most 2^22 positions",
    ),
    "longer than pad": (
        {"pad": np.ones((3, 4), bool), "first_position": None},
        f"{CUMULATIVE}[3] is 8: sequence 2 has 5 rows, expected at most 4 positions, the length of pad",
    ),
    "int64": (
        {CUMULATIVE: np.array([0, 3, 3, 8])},
        f"{CUMULATIVE} has shape [4] and data type 7, expected [B + 1] and int32",
    ),
    "rank": ({CUMULATIVE: i32(0, 3, 3, 8)[None]}, f"{CUMULATIVE} has shape [1, 4] and data type 6, expected [B + 1]"),
    "no entry": ({CUMULATIVE: i32()}, f"{CUMULATIVE} has shape [0] and data type 6, expected [B + 1] and int32"),
    "positions of another batch": (
        {"first_position": i32(0, 0)},
        "first_position has shape [2] and data type 6, expected [3], the number of sequences",
    ),
    "fp32 positions": (
        {"first_position": np.zeros(3, np.float32)},
        "first_position has shape [3] and data type 1, expected [B] and int32",
    ),
    "batch": (
        {"q": np.zeros((2, 2, 4, 16), np.float32)},
        f"query has shape [2, 2, 4, 16], expected batch size 1 beside {CUMULATIVE}",
    ),
    "batch of value": (
        {"v": np.zeros((2, 2, 8, 16), np.float32)},
        "value has shape [2, 2, 8, 16], expected batch size",
    ),
    "rows of query": (
        {"q": np.zeros((1, 2, 7, 16), np.float32)},
        f"query and key differ in length: query [1, 2, 7, 16], key [1, 2, 8, 16], expected the same rows beside {CUMULATIVE}",
    ),
    "pad of another batch": ({"pad": np.ones((2, 9), bool)}, "pad has shape [2, 9], expected [3, 9]"),
    "rank of pad": ({"pad": np.ones(9, bool)}, "pad has shape [9], expected [3,"),
    "length of a bias": (
        {"bias": np.zeros((1, 1, 1, 8), np.float32)},
        "bias has shape [1, 1, 1, 8], expected one that broadcasts to [3, 2, 9, 9]",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_inputs(name: str) -> None:
    changed, message = WRONG[name]
    run_arrays(arrays())
    with pytest.raises(LibraryError, match=re.escape(message)):
        run_arrays(arrays(**changed))


WRONG_KEYS: dict[str, tuple[dict[str, Any], str]] = {
    "queries": (
        {"q": np.zeros((2, 2, 4, 16), np.float32)},
        "cumulative_key_length has shape [4], expected one entry more than the batch size of query [2, 2, 4, 16]",
    ),
    "keys of a batch": (
        {"k": np.zeros((3, 2, 8, 16), np.float32)},
        "key has shape [3, 2, 8, 16], expected batch size 1",
    ),
    "last entry": (
        {"cumulative_key_length": i32(0, 3, 3, 9)},
        "cumulative_key_length[3] is 9, expected 3 (the entry before it) to 8 (the length of key); a model of fixed",
    ),
}


@pytest.mark.parametrize("name", WRONG_KEYS)
def test_wrong_inputs_of_packed_keys(name: str) -> None:
    changed, message = WRONG_KEYS[name]
    given = {**arrays(q=np.zeros((3, 2, 4, 16), np.float32), pad=None), "cumulative_key_length": i32(0, 3, 3, 8)}
    del given[CUMULATIVE]
    run_arrays(given)
    with pytest.raises(LibraryError, match=re.escape(message)):
        run_arrays({**given, **changed})


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        (
            {"operands": f"{CUMULATIVE} cumulative_key_length"},
            f"names {CUMULATIVE} and cumulative_key_length, expected",
        ),
        ({"operands": "pad first_position"}, f"names first_position alone, expected {CUMULATIVE} or"),
        ({"operands": CUMULATIVE, "results": "lse"}, f"results is 'lse', expected nothing beside operand {CUMULATIVE}"),
        ({"operands": "cumulative_length"}, "has role 'cumulative_length', which this build does not know; a newer"),
        ({"operands": f"{CUMULATIVE} {CUMULATIVE}"}, f"names '{CUMULATIVE}' twice"),
    ],
)
def test_wrong_roles(attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(LibraryError, match=re.escape(message)):
        Op("StofAttention", attributes)


def test_missing_data() -> None:
    given = list(arrays().values())
    op = Op("StofAttention", {"mask": "pad[b, k]", "operands": f"pad {CUMULATIVE} first_position"})
    for i, name in ((4, CUMULATIVE), (5, "first_position")):
        with pytest.raises(LibraryError, match=f"operand {name} is missing"):
            op.run([a if n != i else None for n, a in enumerate(given)], [np.zeros((1, 2, 8, 16), np.float32)])


def test_query_offset_with_packed_keys() -> None:
    given = {**arrays(q=np.zeros((3, 2, 10, 16), np.float32)), "cumulative_key_length": i32(0, 3, 3, 8)}
    del given[CUMULATIVE]
    with pytest.raises(LibraryError, match="query_offset is 1 with S = 10 > T = 9"):
        run_arrays(given, query_offset=1)


# ---- ONNX Runtime ----
def session_of(problem: PackedProblem, operands: list[str]) -> ort.InferenceSession:
    names, types = ["q", "k", "v", *operands], {np.float32: TensorProto.FLOAT, np.int32: TensorProto.INT32}
    given = [
        helper.make_tensor_value_info(
            name, types.get(array.dtype.type, TensorProto.BOOL), [f"{name}{i}" for i in range(array.ndim)]
        )
        for name, array in zip(names, problem.inputs(), strict=True)
    ]
    node = helper.make_node("StofAttention", names, ["out"], "attention", domain="stof", **problem.attributes())
    out = helper.make_tensor_value_info("out", TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "g", given, [out])
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("stof", 1)]
    options = ort.SessionOptions()
    options.log_severity_level = 4
    stof.register(options)
    model = helper.make_model(graph, opset_imports=imports, ir_version=8).SerializeToString()
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("has_queries", [True, False])
def test_sessions(has_queries: bool) -> None:
    rng = np.random.default_rng(8)
    roles = ["pad", CUMULATIVE if has_queries else "cumulative_key_length", "first_position"]
    made = problem_of(rng, [5, 0, 17], 17, first=[12, 3, 0], D=16, padded=True)
    made = replace(made, has_queries=has_queries, layouts=("BSN", "BSN", "BSHD", "BSN") if has_queries else BHSD)
    made = replace(made, padded=replace(made.padded, operands={"pad": np.ones((3, 17), bool)}))
    session = session_of(made, roles)
    feed = dict(zip(["q", "k", "v", *roles], made.inputs(), strict=True))
    found = session.run(None, feed)[0]
    wanted = made.reference()
    if has_queries:
        wanted = wanted.transpose(0, 2, 1, 3).reshape(1, 22, 32)
    assert_close(found, wanted)
    feed[roles[1]] = i32(0, 5, 23, 22)
    with pytest.raises(Exception, match=rf"{roles[1]}\[2\] is 23, expected 5 \(the entry before it\) to 22"):
        session.run(None, feed)


def test_problem_of_the_definition() -> None:
    """The definition itself: a padded problem whose padding is forbidden gives the same rows."""
    rng = np.random.default_rng(9)
    made = problem_of(rng, [5, 0, 17], 17, first=[12, 3, 0], D=16, mask="k <= q")
    pad = np.zeros((3, 17), bool)
    for b, positions in enumerate(made.ranges()):
        pad[b, positions] = True
    p: Problem = made.padded
    padded = replace(p, mask="k <= q and pad[b, k]", operands={"pad": pad}).run()
    assert_close(made.pack(padded), made.reference())
