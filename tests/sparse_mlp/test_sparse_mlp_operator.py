# SPDX-License-Identifier: Apache-2.0
"""StofSparseMLP in ONNX Runtime on the CPU, against its definition in fp64 NumPy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from ml_dtypes import bfloat16
from onnx import TensorProto, helper, numpy_helper
from tests.sparse_mlp.dense_mlp import NAMES, Array, Case, Problem, activate, draw, unit_roundoff

from stof.errors import UnsupportedError
from stof.runtime.library import library_path, op_limits
from stof.sparse_mlp.activations import ACTIVATIONS
from stof.sparse_mlp.limits import MlpLimits, mlp_limits
from stof.sparse_mlp.quantized import read_quantized

F16, BF16 = np.float16, bfloat16
GATED = Case(K=100, F=150, N=70, biases=True)
RUN_TIME = ("input", "gate")  # the others are constants
RELUS = ("relu", "relu2")


def _model(problem: Problem, feeds: dict[str, Array], **attributes: Any) -> bytes:
    """The node alone. Its inputs come in fp32, so that NumPy can feed bf16, too."""
    element = helper.np_dtype_to_tensor_dtype(np.dtype(problem.case.dtype))
    names = [n if n in feeds else "" for n in NAMES]
    node = helper.make_node("StofSparseMLP", names, ["y"], "mlp", domain="stof", **problem.attributes() | attributes)
    given = [n for n in RUN_TIME if n in feeds]
    nodes = [helper.make_node("Cast", [f"{n}_fp32"], [n], to=element) for n in given]
    nodes += [node, helper.make_node("Cast", ["y"], ["y_fp32"], to=TensorProto.FLOAT)]
    inputs = [helper.make_tensor_value_info(f"{n}_fp32", TensorProto.FLOAT, feeds[n].shape) for n in given]
    outputs = [helper.make_tensor_value_info("y_fp32", TensorProto.FLOAT, None)]
    constants = [numpy_helper.from_array(a, n) for n, a in feeds.items() if n not in RUN_TIME]
    graph = helper.make_graph(nodes, "g", inputs, outputs, constants)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("stof", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()


def _session(model: bytes, threads: int = 2) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.register_custom_ops_library(str(library_path()))
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def run(problem: Problem, feeds: dict[str, Array] | None = None, threads: int = 2, **attributes: Any) -> Array:
    """Output of the node, [tokens, N]."""
    feeds = problem.feeds if feeds is None else feeds
    session = _session(_model(problem, feeds, **attributes), threads)
    found: Array = session.run(None, {f"{n}_fp32": feeds[n].astype(np.float32) for n in RUN_TIME if n in feeds})[0]
    lead = feeds["input"].shape[:-1]
    assert found.shape == (*lead, problem.case.N)
    return found.reshape(int(np.prod(lead)), problem.case.N)


def check(case: Case, seed: int = 0) -> None:
    """Compares a random problem with fp64."""
    problem = draw(case, seed)
    expected, size = problem.expected()
    found = run(problem)
    bound = unit_roundoff(case.dtype) * np.abs(expected) + 4 * 2.0**-24 * size + 1e-30
    if case.dtype == F16:
        bound += 2.0**-25
    error = np.abs(found - expected)
    worst = np.unravel_index(np.argmax(error / bound), error.shape) if error.size else ()
    assert np.all(error <= bound), f"{case}: {found[worst]} at {worst}, expected {expected[worst]} +- {bound[worst]}"


@pytest.mark.parametrize("density", [0, 0.001, 0.01, 0.1, 0.5, 1])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 7, 16, 17, 64, 65, 100])
def test_densities_and_tokens(density: float, tokens: int) -> None:
    for up in (False, True):
        check(replace(GATED, lead=(tokens,), density=density, up=up))


@pytest.mark.parametrize("dtype", [np.float32, F16, BF16])
@pytest.mark.parametrize("tokens", [1, 5, 20])
@pytest.mark.parametrize("bits", [0, 4, 8])
def test_types(dtype: Any, tokens: int, bits: int) -> None:
    for density in (0.1, 0.9):
        for zero_points in (False, True) if bits else (False,):
            case = replace(GATED, lead=(tokens,), dtype=dtype, bits=bits, zero_points=zero_points, density=density)
            check(case)
            check(replace(case, selection="predictor", activation="silu"))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("selection", ["nonzero", "magnitude", "predictor"])
def test_activations_and_selections(activation: str, selection: str) -> None:
    for tokens in (1, 6):
        for thresholds in ("one", "each"):
            check(replace(GATED, lead=(tokens,), activation=activation, selection=selection, thresholds=thresholds))


@pytest.mark.parametrize("size", [1, 7, 8, 15, 16, 17, 33, 1023, 1025, 1100, 2050])
def test_sizes_beside_vectors_and_slabs(size: int) -> None:
    for tokens, dtype in ((1, np.float32), (3, np.float32), (1, F16), (5, BF16)):
        check(replace(GATED, lead=(tokens,), K=size, N=size, density=0.4, dtype=dtype))
        check(replace(GATED, lead=(tokens,), F=size, density=0.4, dtype=dtype))
    check(replace(GATED, selection="predictor", R=size))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block", [16, 32, 64, 128, 256])
def test_blocks_and_odd_sizes(bits: int, block: int) -> None:
    for size in (1, 31, 33, 257):
        case = replace(GATED, bits=bits, block=block, zero_points=True, density=0.5)
        check(replace(case, K=size))
        check(replace(case, F=size, lead=(3,)))
        check(replace(case, N=size, lead=(1, 2)))


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("selection", ["nonzero", "magnitude", "predictor"])
def test_no_active_neuron_gives_the_bias(selection: str, biases: bool) -> None:
    for lead in ((1,), (2, 3)):
        problem = draw(replace(GATED, lead=lead, selection=selection, biases=biases, density=0))
        bias = problem.feeds["down_bias"] if biases else np.zeros(problem.case.N, np.float32)
        assert not problem.active()[1].any()
        assert np.array_equal(run(problem), np.broadcast_to(bias, (int(np.prod(lead)), problem.case.N)))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("selection", ["nonzero", "magnitude"])
def test_gate_values_may_be_any_number(value: float, selection: str) -> None:
    """As the dense MLP: NaN and infinity are active, and reach their own token alone."""
    problem = draw(replace(GATED, lead=(3,), activation="none", selection=selection, density=0.2))
    problem.feeds["gate"][1, 77] = value
    problem.feeds["gate"][1, 78] = -value
    found = run(problem)
    with np.errstate(all="ignore"):
        expected, _ = problem.expected()
    assert np.array_equal(found[1], expected[1].astype(np.float32), equal_nan=True)
    assert not np.isfinite(found[1]).any()
    assert np.allclose(found[[0, 2]], expected[[0, 2]], rtol=1e-4, atol=1e-5)
    alone = run(problem, problem.feeds | {"gate": problem.feeds["gate"][:1], "input": problem.feeds["input"][:1]})
    assert np.array_equal(alone, found[:1])


def test_nan_scores_are_active() -> None:
    problem = draw(replace(GATED, selection="predictor", density=0.0, activation="silu", biases=False))
    problem.feeds["predictor_up"][5] = np.nan
    gate, up = (problem.weights[n][5] @ problem.feeds["input"][0].astype(float) for n in ("gate", "up"))
    expected = activate("silu", gate) * up * problem.weights["down"][5]
    assert np.allclose(run(problem)[0], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("selection", ["magnitude", "predictor"])
@pytest.mark.parametrize("tokens", [1, 33])
def test_neurons_of_nan_thresholds_are_active(selection: str, tokens: int) -> None:
    case = replace(GATED, lead=(tokens,), selection=selection, density=0.1, activation="silu", thresholds="each")
    problem = draw(case)
    problem.feeds["threshold"][::3] = np.nan
    expected, size = problem.expected()
    assert np.all(np.abs(run(problem) - expected) <= 2.0**-20 * size)


@pytest.mark.parametrize(("lead", "R"), [((1,), 12), ((3, 5), 33), ((70,), 70)])
def test_predictors_with_relu(lead: tuple[int, ...], R: int) -> None:
    for dtype in (np.float32, F16, BF16):
        check(
            replace(GATED, lead=lead, R=R, selection="predictor", activation="silu", predictor_relu=True, dtype=dtype)
        )


def test_relu_of_a_predictor_keeps_nan() -> None:
    case = replace(GATED, selection="predictor", density=0.0, activation="silu", biases=False, predictor_relu=True)
    problem = draw(case)
    assert np.array_equal(run(problem), np.zeros((1, case.N), np.float32))
    problem.feeds["predictor_down"][5, 3] = np.nan
    assert np.count_nonzero(run(problem)) == case.N  # every score reads it: the dense MLP


@pytest.mark.parametrize(("K", "R"), [(100, 12), (32, 32), (1050, 70)])
def test_quantized_predictors(K: int, R: int) -> None:
    case = replace(GATED, K=K, R=R, selection="predictor", activation="silu", quantized_predictor=True)
    for tokens, dtype, bits in ((1, np.float32, 0), (3, F16, 4), (20, BF16, 0)):
        check(replace(case, lead=(tokens,), dtype=dtype, bits=bits))


def test_infinite_weights_of_idle_neurons_are_not_read() -> None:
    problem = draw(replace(GATED, lead=(4,), density=0.1))
    idle = ~problem.active()[1].any(0)
    assert idle.sum() > 20
    expected = run(problem)
    for name in ("up_weight", "down_weight", "up_bias"):
        problem.feeds[name][idle] = np.inf
    assert np.array_equal(run(problem), expected)


@pytest.mark.parametrize("dtype", [np.float32, F16])
@pytest.mark.parametrize("bits", [0, 4, 8])
@pytest.mark.parametrize("level", [0, 4])
def test_results_depend_neither_on_other_tokens_nor_on_threads(dtype: Any, bits: int, level: int) -> None:
    """Bit by bit, also where other tokens need most neurons."""
    for selection in ("nonzero", "predictor"):
        case = replace(GATED, lead=(19,), K=1100, F=150, N=600, dtype=dtype, bits=bits, level=level, density=0.15)
        problem = draw(replace(case, selection=selection))
        if "gate" in problem.feeds:
            gate = problem.feeds["gate"]
            gate[10:] = np.abs(gate[10:])
        found = run(problem)
        assert np.array_equal(run(problem, threads=1), found)
        for t in (0, 5, 18):
            feeds = problem.feeds | {n: problem.feeds[n][t : t + 1] for n in RUN_TIME if n in problem.feeds}
            assert np.array_equal(run(problem, feeds)[0], found[t]), (selection, t)


def test_ranks_and_empty_inputs() -> None:
    check(replace(GATED, lead=()))
    check(replace(GATED, lead=(2, 1, 3)))
    for lead, sizes in (((0,), {}), ((2, 0), {}), ((2,), {"N": 0}), ((2,), {"F": 0}), ((2,), {"K": 0})):
        check(replace(GATED, lead=lead, **sizes))
    check(replace(GATED, lead=(2,), K=0, selection="predictor"))
    check(replace(GATED, lead=(2,), R=0, selection="predictor"))


def test_plain_mlp_reads_the_type_of_input_alone() -> None:
    problem = draw(replace(GATED, lead=(3,), up=False))
    assert problem.feeds["input"] is problem.feeds["gate"]
    found = run(problem)
    other = run(problem, problem.feeds | {"input": np.full((3, 5), np.nan, np.float32)})
    assert np.array_equal(found, other)


DAMAGES: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("gate", {"gate": np.zeros((3, 151), np.float32)}, {}, r"gate has shape \[3, 151\] and data type 1, expected \[3, 150\]"),
    ("leading dimensions", {"gate": np.zeros((4, 150), np.float32)}, {}, r"gate has shape \[4, 150\]"),
    ("no gate", {"gate": None}, {}, "gate is missing, expected it with selection = nonzero"),
    ("down", {"down_weight": np.zeros((150, 70, 1), np.float32)}, {}, r"down_weight has shape \[150, 70, 1\]"),
    ("type", {"down_weight": np.zeros((150, 70), np.float16)}, {}, "down_weight has shape .* data type 10, expected"),
    ("up", {"up_weight": np.zeros((150, 99), np.float32)}, {}, r"up_weight has shape \[150, 99\] .* expected \[150, 100\]"),
    ("up bias", {"up_bias": np.zeros(149, np.float32)}, {}, r"up_bias has shape \[149\] .* expected \[150\]"),
    ("down bias", {"down_bias": np.zeros(71, np.float32)}, {}, r"down_bias has shape \[71\] .* expected \[70\]"),
    ("stray bias", {"up_weight": None}, {}, "up_bias is given, expected none without up_weight"),
    ("stray gate", {"gate_weight": np.zeros((150, 100), np.float32)}, {}, "gate_weight is given, expected none with sel"),
    ("stray threshold", {"threshold": np.zeros(1, np.float32)}, {}, "threshold is given, expected none with selection"),
    ("stray scales", {"up_scales": np.zeros((150, 4), np.float32)}, {}, "up_scales is given, expected none as attribute bits"),
    ("no threshold", {}, {"selection": "magnitude"}, "threshold is missing, expected it with selection = magnitude"),
    ("threshold", {"threshold": np.zeros(2, np.float32)}, {"selection": "magnitude"}, r"threshold has shape \[2\] .* or \[150\]"),
    ("predictor", {}, {"selection": "predictor"}, "gate_weight is missing, expected it with selection = predictor"),
    ("word", {}, {"activation": "Relu"}, "attribute activation is 'Relu', expected one of none, relu, relu2"),
    ("selection", {}, {"selection": "top"}, "attribute selection is 'top', expected one of nonzero, magnitude, pred"),
    ("relu", {}, {"predictor_activation": "relu"},
     'attribute predictor_activation is "relu", expected "none" with selection = nonzero'),
    ("word of the predictor", {}, {"predictor_activation": "silu"},
     "attribute predictor_activation is 'silu', expected one of none, relu"),
    ("bits", {}, {"bits": 3, "block_size": 32}, "attribute bits is 3, expected 0, 4 or 8"),
    ("block", {}, {"bits": 4, "block_size": 48}, "attribute block_size is 48, expected a power of two from 16 to 256"),
    ("block of none", {}, {"block_size": 32}, "attribute block_size is 32, expected 0, as attribute bits is 0"),
    ("hot neurons", {}, {"hot_neurons": -1}, "attribute hot_neurons is -1, expected 0 or more"),
    ("level", {}, {"accuracy_level": 5}, "attribute accuracy_level is 5, expected 0 to 4"),
    ("type of an attribute", {}, {"bits": 4.0}, "attribute bits is of another type, expected an integer"),
    ("no scales", {}, {"bits": 4, "block_size": 32}, "down_scales is missing, expected it with attribute bits"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "attributes", "message"), [d[1:] for d in DAMAGES], ids=[d[0] for d in DAMAGES])
def test_wrong_inputs_are_named(changes: dict[str, Any], attributes: dict[str, Any], message: str) -> None:
    problem = draw(replace(GATED, lead=(3,)))
    feeds = {n: a for n, a in (problem.feeds | changes).items() if a is not None}
    with pytest.raises(Exception, match=rf"StofSparseMLP.*mlp.*{message}"):
        run(problem, feeds, **attributes)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("up_weight", (150, 4, 15), r"\[150, 4, 16\] and 2"),
        ("up_scales", (150, 3), r"\[150, 4\]"),
        ("up_zero_points", (150, 4), r"\[150, 2\]"),
        ("down_weight", (150, 36), r"\[150, 35\]"),
        ("down_scales", (4, 70), r"\[5, 70\]"),
        ("down_zero_points", (5, 35), r"\[5, 70\]"),
    ],
)
def test_wrong_quantized_inputs_are_named(name: str, shape: tuple[int, ...], expected: str) -> None:
    problem = draw(replace(GATED, lead=(3,), bits=4, zero_points=True))
    feeds = problem.feeds | {name: np.zeros(shape, problem.feeds[name].dtype)}
    with pytest.raises(Exception, match=rf"{name} has shape .*expected {expected}"):
        run(problem, feeds)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("predictor_up_scales", None, "predictor_up_scales is missing, expected it beside predictor_down_scales"),
        ("predictor_up_scales", np.zeros(12, np.float32), r"predictor_up_scales has shape \[12\] .* \[150\]"),
        ("predictor_down", np.zeros((12, 100), np.uint8), r"predictor_down has shape \[12, 100\] .* \[12, 128\]"),
        ("predictor_up", np.zeros((150, 12), np.float32), r"predictor_up has shape .* \[150, 32\] and 2"),
    ],
)
def test_wrong_quantized_predictors_are_named(name: str, array: Array | None, message: str) -> None:
    problem = draw(replace(GATED, selection="predictor", quantized_predictor=True))
    feeds = {n: a for n, a in (problem.feeds | {name: array}).items() if a is not None}
    with pytest.raises(Exception, match=message):
        run(problem, feeds)


def test_the_number_of_inputs_is_checked() -> None:
    problem = draw(GATED)
    model = onnx.load_from_string(_model(problem, problem.feeds))
    node = next(n for n in model.graph.node if n.op_type == "StofSparseMLP")
    del node.input[4:]
    with pytest.raises(Exception, match="has 4 inputs, expected 5 to 19"):
        _session(model.SerializeToString())


def test_limits_are_given_out() -> None:
    assert mlp_limits() == MlpLimits(16, 256, predictor_multiple_of=32, most_accuracy_level=4)


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"block_size": 8}, "K 512, N 4, bits 4, block_size 8"),
        ({"block_size": 512}, "K 512, N 4, bits 4, block_size 512"),
        ({"block_size": 48}, "K 512, N 4, bits 4, block_size 48"),
        ({"accuracy_level": 5}, "accuracy_level 5, expected 0 to 4"),
    ],
)
def test_nodes_beyond_the_limits_stay(attributes: dict[str, int], reason: str) -> None:
    values = {"K": 512, "N": 4, "bits": 4, "block_size": 32, **attributes}
    node = helper.make_node("MatMulNBits", ["x", "b", "scales"], ["y"], "m", domain="com.microsoft", **values)
    with pytest.raises(UnsupportedError, match=f"'m' has {reason}"):
        read_quantized(node, {}, (), sums_over_neurons=False)


def test_a_library_without_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = {name: limits for name, limits in op_limits().items() if name != "StofSparseMLP"}
    monkeypatch.setattr("stof.sparse_mlp.limits.op_limits", lambda: earlier)
    with pytest.raises(UnsupportedError, match="the plugin library has no StofSparseMLP; install one of this version"):
        mlp_limits()
