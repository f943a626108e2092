# SPDX-License-Identifier: Apache-2.0
"""Wrong models and wrong inputs in ONNX Runtime with the library: an error that names the node, never a crash."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import stof
from stof.attention.checks.reference import Problem, assert_close, random_problem, reference

NODE = "layers.0/attention"
_TYPES = {np.dtype(t): helper.np_dtype_to_tensor_dtype(np.dtype(t)) for t in ("f4", "f8", "f2", "i8", "i4", "u1", "?")}


def session(
    inputs: dict[str, np.ndarray], attributes: dict[str, Any], *, fixed: bool = False, constants: tuple[str, ...] = ()
) -> Any:
    """A session of one StofAttention node; inputs of open shape, fixed shape, or initializers."""
    names = list(inputs)
    given = [
        helper.make_tensor_value_info(
            n, _TYPES[a.dtype], list(a.shape) if fixed else [f"{n}{i}" for i in range(a.ndim)]
        )
        for n, a in inputs.items()
        if n not in constants
    ]
    graph = helper.make_graph(
        [helper.make_node("StofAttention", names, ["out"], NODE, domain="stof", **attributes)],
        "g",
        given,
        [helper.make_tensor_value_info("out", _TYPES.get(inputs["q"].dtype, TensorProto.FLOAT), None)],
        [numpy_helper.from_array(inputs[n], n) for n in constants],
    )
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("stof", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=8)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 2
    stof.register(options)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(inputs: dict[str, np.ndarray], attributes: dict[str, Any], **settings: Any) -> np.ndarray:
    constants = settings.get("constants", ())
    one = session(inputs, attributes, **settings)
    found: np.ndarray = one.run(None, {n: a for n, a in inputs.items() if n not in constants})[0]
    return found


def f(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def qkv(B: int = 2, H: int = 4, S: int = 9, D: int = 8) -> dict[str, np.ndarray]:
    return {n: f(B, H, S, D) for n in "qkv"}


PACKED: dict[str, Any] = {"layout": "BSN", "num_heads": 4}

WRONG: dict[str, tuple[dict[str, np.ndarray], dict[str, Any], str]] = {
    "head size": (qkv(D=257), {}, "head sizes must be 1 to 256: query [2, 4, 9, 257]"),
    "packed head size": (
        {n: f(1, 5, 4 * 300) for n in "qkv"},
        {**PACKED, "kv_num_heads": 4},
        "head sizes must be 1 to 256",
    ),
    "head size 0": (qkv(D=0), {}, "head sizes must be 1 to 256"),
    "rank": ({**qkv(), "k": f(2, 9, 8)}, {}, "key has shape [2, 9, 8], expected rank 4 for layout BHSD"),
    "rank of packed": (qkv(), {**PACKED, "kv_num_heads": 4}, "query has shape [2, 4, 9, 8], expected rank 3"),
    "batch": ({**qkv(), "v": f(1, 4, 9, 8)}, {}, "batch sizes differ"),
    "heads": ({**qkv(), "v": f(2, 2, 9, 8)}, {}, "key and value differ in heads"),
    "groups": ({**qkv(), "k": f(2, 3, 9, 8), "v": f(2, 3, 9, 8)}, {}, "no multiple of that of key heads"),
    "length": ({**qkv(), "v": f(2, 4, 8, 8)}, {}, "key and value differ in length"),
    "size": ({**qkv(), "k": f(2, 4, 9, 16)}, {}, "query and key differ in head size"),
    "declared heads": (qkv(), {"num_heads": 8}, "expected 8 heads"),
    "no heads": ({n: f(2, 9, 32) for n in "qkv"}, {"layout": "BSN"}, "number of heads"),
    "uneven heads": ({n: f(2, 9, 30) for n in "qkv"}, {**PACKED, "kv_num_heads": 4}, "number of heads (4) divides"),
    "offset": ({**qkv(), "q": f(2, 4, 12, 8)}, {"query_offset": 1}, "query_offset is 1 with S = 12 > T = 9"),
    "pad length": (
        {**qkv(), "pad": np.ones((2, 8), np.int64)},
        {"mask": "pad[b, k]", "operands": "pad"},
        "pad has shape [2, 8], expected [2, 9]",
    ),
    "pad batch": (
        {**qkv(), "pad": np.ones((3, 9), np.int64)},
        {"mask": "pad[b, k]", "operands": "pad"},
        "pad has shape [3, 9], expected [2, 9]",
    ),
    "pad type": (
        {**qkv(), "pad": np.ones((2, 9))},
        {"mask": "pad[b, k]", "operands": "pad"},
        "pad has data type 11, expected bool",
    ),
    "pad unread": ({**qkv(), "pad": np.ones((2, 9), np.int64)}, {"operands": "pad"}, "does not read pad[b, k]"),
    "pad missing": (qkv(), {"mask": "pad[b, k]"}, "reads pad, but no operand has that role"),
    "bias": (
        {**qkv(), "bias": f(4, 9, 8)},
        {"operands": "bias"},
        "bias has shape [4, 9, 8], expected one that broadcasts",
    ),
    "segments": (
        {**qkv(), "s": np.zeros((2, 9), np.float32)},
        {"mask": "segment_q[b, q] == 0", "operands": "segment_q"},
        "segment_q has data type 1, expected int32 or int64",
    ),
    "segment length": (
        {**qkv(), "s": np.zeros((2, 7), np.int64)},
        {"mask": "segment_q[b, q] == 0", "operands": "segment_q"},
        "segment_q",
    ),
    "table length": (
        {**qkv(), "t": np.ones(8, np.bool_)},
        {"mask": "table0[k]", "operands": "table0"},
        "table0",
    ),
    "table rank": (
        {**qkv(), "t": np.ones((9, 9), np.bool_)},
        {"mask": "table0[k]", "operands": "table0"},
        "table0",
    ),
    "table type": (
        {**qkv(), "t": np.ones(9, np.float32)},
        {"mask": "table0[k] != 0", "operands": "table0"},
        "table0",
    ),
    "table missing": (qkv(), {"mask": "table0[k]"}, "table0"),
    "table of rank 5": (
        {**qkv(), "t": np.ones((1, 1, 1, 9, 9), np.bool_)},
        {"mask": "table0[b, h, 0, q, k]", "operands": "table0"},
        "table0",
    ),
    "more inputs": ({**qkv(), "x": f(1)}, {}, "inputs, expected query, key, value"),
    "fewer inputs": (qkv(), {"operands": "pad", "mask": "pad[b, k]"}, "inputs, expected query, key, value"),
    "mask": (qkv(), {"mask": "abs(q - k <= 4"}, "mask expression, column 11: expected ')'"),
    "role": (qkv(), {"operands": "past_key"}, "role 'past_key', which this build does not know"),
    "relative bias type": (
        {**qkv(), "r": np.ones((1, 3), np.float16)},
        {"operands": "relative_bias"},
        "relative_bias has data type 10, expected fp32",
    ),
    "relative bias of even length": ({**qkv(), "r": f(1, 4)}, {"operands": "relative_bias"}, "an odd number"),
    "relative bias of other heads": ({**qkv(), "r": f(3, 5)}, {"operands": "relative_bias"}, "shape [3, 5], expected"),
    "relative bias of rank 1": ({**qkv(), "r": f(5)}, {"operands": "relative_bias"}, "shape [5], expected"),
    "sink of other heads": ({**qkv(), "s": f(3)}, {"operands": "sink"}, "sink has shape [3], expected"),
    "sink of rank 2": ({**qkv(), "s": f(1, 4)}, {"operands": "sink"}, "sink has shape [1, 4], expected"),
    "sink type": ({**qkv(), "s": np.ones(4, np.int64)}, {"operands": "sink"}, "sink has data type 7"),
    "sink and mean": (
        {**qkv(), "s": f(4)},
        {"operands": "sink", "empty_rows": "mean"},
        "expected zero: beside a sink a row without keys is 0",
    ),
    "layout": (qkv(), {"layout": "BDHS"}, "expected BHSD, BSHD or BSN"),
    "empty rows": (qkv(), {"empty_rows": "one"}, "empty_rows is 'one', expected zero, nan, mean or all"),
    "results": (qkv(), {"results": "present_key"}, "results is 'present_key'"),
}


@pytest.mark.parametrize("constants", [False, True], ids=["", "constants"])
@pytest.mark.parametrize("fixed", [False, True], ids=["open", "fixed"])
@pytest.mark.parametrize("name", WRONG)
def test_an_error_names_the_node(name: str, fixed: bool, constants: bool) -> None:
    inputs, attributes, words = WRONG[name]
    extra = tuple(n for n in inputs if n not in "qkv") if constants else ()
    if constants and not extra:
        extra = ("v",)
    with pytest.raises(Exception, match=NODE) as caught:
        run(inputs, attributes, fixed=fixed, constants=extra)
    assert type(caught.value).__module__.startswith("onnxruntime")
    assert words in str(caught.value)


@pytest.mark.parametrize("found", [b"\xff\xfe", b"\xc3", b"a\0b", b"\x1b[31m", "größer".encode()])
@pytest.mark.parametrize("name", ["mask", "layout", "operands", "results", "empty_rows"])
def test_an_error_shows_bytes_that_are_no_text(name: str, found: bytes) -> None:
    """Python has no message at all of one that is not UTF-8, a NUL cuts one off, and a terminal obeys others."""
    with pytest.raises(Exception, match=NODE) as caught:
        run(qkv(), {name: found})
    assert type(caught.value).__module__.startswith("onnxruntime")
    message = str(caught.value)
    assert name in message
    assert message.isprintable()
    if name == "mask":  # where the parser stops
        assert "unknown name" in message or "unexpected '" in message
    else:
        assert repr(found.decode("utf-8", "surrogateescape"))[1:-1].replace("udc", "x") in message
    assert name == "mask" or "expected" in message or "newer stof library" in message


def renamed(name: bytes, **attributes: Any) -> Any:
    """A session of one StofAttention node of a name that may be any bytes."""
    placeholder = "X" * len(name)
    node = helper.make_node("StofAttention", list("qkv"), ["out"], placeholder, domain="stof", **attributes)
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["B", 4, f"S{n}", 8]) for n in "qkv"]
    graph = helper.make_graph([node], "g", infos, [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)])
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("stof", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=8)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    stof.register(options)
    data = model.SerializeToString().replace(placeholder.encode(), name)
    return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"], enable_fallback=0)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (b"a\x1b[31m\nwritten: fake", r"a\x1b[31m\nwritten: fake"),
        ("a\u202eb\x9b".encode(), r"a\u202eb\x9b"),
        ("größer".encode(), "größer"),
        (b"n" * 10_000 + b"end", "n" * 128 + "..." + "n" * 61 + "end:"),
    ],
    ids=["terminal", "direction", "letters", "long"],
)
def test_an_error_shows_the_name_of_a_node_as_text(name: bytes, shown: str) -> None:
    with pytest.raises(Exception, match="StofAttention ") as caught:
        renamed(name, mask="k <")
    assert type(caught.value).__module__.startswith("onnxruntime")
    message = str(caught.value)
    assert f"StofAttention {shown}" in message
    assert message.isprintable()
    assert message.endswith(": mask expression, column 4: unexpected end")


@pytest.mark.parametrize("name", [b"\xff\xfeattention", b"attention\xc3", b"\xed\xa0\x80"])
def test_a_node_with_a_name_that_is_not_utf8_is_refused(name: bytes) -> None:
    """ONNX Runtime quotes it in each error of a run, of which Python would then have no message."""
    with pytest.raises(Exception, match="StofAttention ") as caught:
        renamed(name)
    assert type(caught.value).__module__.startswith("onnxruntime")
    assert "the node's name is not UTF-8" in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_node_without_a_name_is_called_by_its_operator() -> None:
    with pytest.raises(Exception, match=r": StofAttention: mask expression"):
        renamed(b"", mask="k <")


def test_numbers_in_errors_are_those_of_the_model() -> None:
    with pytest.raises(Exception, match="attribute softcap is 1e-31, expected 0 or 1e-30 to 1e30"):
        run(qkv(), {"softcap": 1e-31})


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("mask", 3, "a string"),
        ("scale", 1, "a float"),
        ("softcap", "1", "a float"),
        ("num_heads", 4.0, "an integer"),
        ("query_offset", [1], "an integer"),
        ("packed", 4.0, "a list of integers"),
        ("packed", [1.0, 2.0], "a list of integers"),
        ("operands", ["pad"], "a string"),
    ],
)
def test_an_attribute_of_another_type_is_named(name: str, value: Any, words: str) -> None:
    with pytest.raises(Exception, match=f"{NODE}: attribute {name} is of another type, expected {words}"):
        run(qkv(), {name: value})


@pytest.mark.parametrize("constants", [(), ("x",)])
def test_an_input_of_too_many_dimensions_is_named(constants: tuple[str, ...]) -> None:
    inputs = {**qkv(), "x": f(*[1] * 9)}
    with pytest.raises(Exception, match=f"{NODE}: input 3 has rank 9, expected 8 or less"):
        run(inputs, {"operands": "unused"}, constants=constants)


def test_too_many_inputs_are_counted() -> None:
    names = [f"x{i}" for i in range(40)]
    node = helper.make_node("StofChain", names, ["y"], NODE, domain="stof", chain="axes n = 1; out y0 f32 [n] = 1")
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1]) for n in names]
    graph = helper.make_graph([node], "g", infos, [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])])
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("stof", 1)]
    options = ort.SessionOptions()
    options.log_severity_level = 4
    stof.register(options)
    model = helper.make_model(graph, opset_imports=imports, ir_version=8).SerializeToString()
    with pytest.raises(Exception, match=f"{NODE}: has 40 inputs, expected at most 32"):
        ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def test_types_without_a_kernel_are_refused() -> None:
    inputs = {n: a.astype(np.float64) for n, a in qkv().items()}
    with pytest.raises(Exception, match="StofAttention") as caught:
        run(inputs, {})
    assert type(caught.value).__module__.startswith("onnxruntime")


def test_a_session_survives_a_wrong_input() -> None:
    problem = random_problem(np.random.default_rng(0), 2, 4, 70, 16, mask="abs(q - k) <= 9", padded=True)
    names = ["q", "k", "v", "pad"]
    given = dict(zip(names, problem.inputs(), strict=True))
    one = session(given, problem.attributes())
    for _ in range(3):
        with pytest.raises(Exception, match=NODE):
            one.run(None, {**given, "pad": given["pad"][:, :-1]})
        with pytest.raises(Exception, match=NODE):
            one.run(None, {**given, "k": given["k"][:, :3]})
        assert_close(one.run(None, given)[0], reference(problem))


@pytest.mark.parametrize("mask", ["", "k <= q and q - k <= 3", "abs(q - k) <= 2 and pad[b, k]"])
@pytest.mark.parametrize(
    ("B", "S", "T"), [(1, 0, 0), (2, 0, 5), (2, 5, 0), (0, 4, 4), (1, 1, 1), (2, 1, 7), (2, 7, 1), (1, 2, 2)]
)
def test_lengths_of_zero_and_one(mask: str, B: int, S: int, T: int) -> None:
    padded = "pad" in mask
    rng = np.random.default_rng(0)
    problem: Problem = random_problem(rng, B, 4, S, 8, T=T, mask=mask.removesuffix(" and pad[b, k]"), padded=padded)
    given = dict(zip(["q", "k", "v", "pad"], problem.inputs(), strict=False))
    for fixed in (False, True):
        found = run(given, problem.attributes(), fixed=fixed)
        assert found.shape == (B, 4, S, 8)
        assert_close(found, reference(problem))
