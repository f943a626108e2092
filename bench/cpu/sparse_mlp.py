# SPDX-License-Identifier: Apache-2.0
"""StofSparseMLP beside the dense MLP in ONNX Runtime, in the same precision: MLPs of several layers, in turns."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from bench.core.candidate import Candidate, Runner, require
from bench.core.problem import PointProblem
from bench.cpu.sparse_mlp_reference import MlpReference
from stof.bench.measure import Timing
from stof.bench.results import Record
from stof.runtime import library

_BLOCK = 32  # of int4 weights
_LAYERS = 3
_INPUTS = 16  # random tokens that take turns: their active neurons differ, so that rows do not stay in the caches
_RANK = 0.04  # of a predictor, of the neurons
_LEVEL = 4  # the accuracy level of int4, as ONNX Runtime GenAI's builder writes it
_FILE = "weights"
# Of the largest value. int4: matmuls round what they multiply to int8; bf16: weights are rounded.
TOLERANCE = {"fp32": 1e-4, "bf16": 0.02, "int4": 0.05}

Array = npt.NDArray[Any]

SHAPES = {"llama-3b": (3072, 8192), "opt-1.3b": (2048, 8192)}
SMALL_SIZES = {f"k{K}": K for K in (128, 256, 512, 768, 1024)}  # weights that caches hold
MODES = ("plain", "gated", "predicted")
PRECISIONS = ("fp32", "bf16", "int4")  # bf16: fp32 models with --allow-bf16
DENSITIES = (1.0, 0.5, 0.25, 0.1, 0.05, 0.01)
TOKENS = (1, 4, 16)


@dataclass(frozen=True)
class MlpCase:
    """A call of an MLP: T tokens, each with a share of active neurons.

    Attributes:
        mode: ``plain`` (fc1, relu, fc2) and ``gated`` (gate, relu, up, down) compute the first matmul densely;
            ``predicted`` is gated with a predictor of rank 4 % of F.
        precision: of the weights that the operator reads; the dense MLP of ``bf16`` reads fp32.
    """

    shape: str
    mode: str
    precision: str
    density: float
    T: int

    @property
    def K(self) -> int:
        """The size of a token."""
        return sizes_of(self.shape, self.mode)[0]

    @property
    def F(self) -> int:
        """The number of neurons."""
        return sizes_of(self.shape, self.mode)[1]

    def row_bytes(self, size: int) -> float:
        """Bytes of a row of a gate or up weight in the model, with its scales."""
        return 4 * size if self.precision != "int4" else size / 2 + 4 * size / _BLOCK

    def read_bytes(self, size: int) -> float:
        """Bytes of such a row as the operator reads it."""
        return 2 * size if self.precision == "bf16" else self.row_bytes(size)

    def touched_bytes(self, active: Array) -> float:
        """Bytes of weights that a call reads. active: which neurons are active, [T, F]."""
        K, F = self.K, self.F
        used = active.any(0)
        rows = int(used.sum())
        total = rows * self.read_bytes(K) * (self.mode != "plain")
        total += F * self.row_bytes(K) if self.mode != "predicted" else rows * self.read_bytes(K)
        if self.mode == "predicted":
            total += (4 if self.precision != "int4" else 1) * rank(F) * (K + F)
        if self.precision != "int4":
            return total + rows * self.read_bytes(K)
        groups = int(used.reshape(-1, _BLOCK).any(1).sum())
        return total + rows * K / 2 + 4 * groups * K

    def dense_bytes(self) -> float:
        """Bytes of weights that the dense MLP reads."""
        return self.F * self.row_bytes(self.K) * (2 if self.mode == "plain" else 3)

    def __str__(self) -> str:
        return f"{self.shape} {self.mode} {self.precision} T{self.T} {self.density:.0%} active"


def sizes_of(shape: str, mode: str) -> tuple[int, int]:
    """K and F. A small MLP has 4 K neurons, with a gate 8 K / 3, a multiple of 32."""
    if shape in SHAPES:
        return SHAPES[shape]
    K = SMALL_SIZES[shape]
    return K, 4 * K if mode == "plain" else round(8 * K / 3 / 32) * 32


def rank(F: int) -> int:
    """The rank of a predictor."""
    return round(_RANK * F)


def grid(
    tokens: Sequence[int] = TOKENS, densities: Sequence[float] = DENSITIES, shapes: Sequence[str] | None = None
) -> Iterator[MlpCase]:
    """The grid, or the same with other tokens, densities and shapes."""
    chosen = shapes or list(SHAPES)
    for shape, mode, precision, T, density in itertools.product(chosen, MODES, PRECISIONS, tokens, densities):
        yield MlpCase(shape, mode, precision, density, T)


def _pack(values: Array) -> Array:
    """Two 4-bit values in a byte, the first one in the low half."""
    packed: Array = values[:, ::2] | values[:, 1::2] << 4
    return packed


class Layers:
    """Random weights of a shape, a mode and a precision, and sessions of both candidates over them.

    A density is a bias of the gate, or a threshold of the scores: an input of the models.
    """

    def __init__(self, shape: str, mode: str, precision: str, threads: int, layers: int = _LAYERS) -> None:
        self.shape, self.mode, self.precision = shape, mode, precision
        self.K, self.F = sizes_of(shape, mode)
        self.rng = np.random.default_rng(0)
        self.threads = threads
        self._kept: list[Any] = []
        self.weights = [self._draw() for _ in range(layers)]
        self.stof = [self._session(self._sparse(allow_bf16=precision == "bf16"), w, stof=True) for w in self.weights]
        self.fp32 = [self._session(self._sparse(), w, stof=True) for w in self.weights if precision == "bf16"]
        self.dense = [self._session(self._dense(), w, stof=False) for w in self.weights]

    def _normal(self, rows: int, size: int) -> Array:
        return self.rng.standard_normal((rows, size), np.float32) * np.float32(1 / np.sqrt(size))

    def _draw(self) -> dict[str, Array]:
        K, F = self.K, self.F
        names = ("gate", "down") if self.mode == "plain" else ("gate", "up", "down")
        found: dict[str, Array] = {}
        if self.mode == "predicted":
            found |= self._predictor()
        for name in names:
            if self.precision != "int4":
                found[name] = self._normal(F, K)
                if name != "down":
                    found[f"{name}_dense"] = np.ascontiguousarray(found[name].T)
                continue
            values = self.rng.integers(0, 16, (F, K), dtype=np.uint8)
            scale = np.float32(1 / np.sqrt(21.25 * (F if name == "down" else K)))
            if name == "down":
                found["down"] = _pack(values)
                found["down_dense"] = _pack(np.ascontiguousarray(values.T)).reshape(K, F // _BLOCK, _BLOCK // 2)
                found["down_scales"] = np.full((F // _BLOCK, K), scale, np.float32)
                found["down_dense_scales"] = np.full((K, F // _BLOCK), scale, np.float32)
            else:
                found[name] = _pack(values).reshape(F, K // _BLOCK, _BLOCK // 2)
                found[f"{name}_scales"] = np.full((F, K // _BLOCK), scale, np.float32)
        return found

    def _predictor(self) -> dict[str, Array]:
        factors = {"predictor_down": (rank(self.F), self.K), "predictor_up": (self.F, rank(self.F))}
        if self.precision != "int4":
            return {name: self._normal(*shape) for name, shape in factors.items()}
        found: dict[str, Array] = {}
        for name, (rows, size) in factors.items():
            found[name] = self.rng.integers(0, 256, (rows, -(-size // 32) * 32), dtype=np.uint8)
            found[f"{name}_scales"] = np.full(rows, 1 / np.sqrt(5461.0 * size), np.float32)
        return found

    # ---- the graphs ----
    def _dense_matmul(self, x: str, name: str, y: str) -> onnx.NodeProto:
        """A dense matmul by ONNX Runtime's node of the precision."""
        is_down = name == "down"
        if self.precision != "int4":
            return helper.make_node("MatMul", [x, "down" if is_down else f"{name}_dense"], [y])
        names = ["down_dense", "down_dense_scales"] if is_down else [name, f"{name}_scales"]
        sizes = (self.F, self.K) if is_down else (self.K, self.F)
        return helper.make_node(
            "MatMulNBits",
            [x, *names],
            [y],
            domain="com.microsoft",
            K=sizes[0],
            N=sizes[1],
            bits=4,
            block_size=_BLOCK,
            accuracy_level=_LEVEL,
        )

    def _gate(self) -> list[onnx.NodeProto]:
        return [self._dense_matmul("x", "gate", "g0"), helper.make_node("Add", ["g0", "shift"], ["g"])]

    def _dense(self) -> list[onnx.NodeProto]:
        nodes = [*self._gate(), helper.make_node("Relu", ["g"], ["h" if self.mode == "plain" else "a"])]
        if self.mode != "plain":
            nodes += [self._dense_matmul("x", "up", "u"), helper.make_node("Mul", ["a", "u"], ["h"])]
        return [*nodes, self._dense_matmul("h", "down", "y")]

    def _sparse(self, *, allow_bf16: bool = False) -> list[onnx.NodeProto]:
        is_predicted, is_plain = self.mode == "predicted", self.mode == "plain"
        names = ["g" if is_plain else "x", "" if is_predicted else "g", "gate" if is_predicted else "",
                 "" if is_plain else "up", "down", *[""] * 14]  # fmt: skip
        if is_predicted:
            names[8:11] = ["shift", "predictor_down", "predictor_up"]
        if self.precision == "int4":
            for at, name in ((11, "gate"), (13, "up"), (15, "down")):
                names[at] = f"{name}_scales" if name in names else ""
            if is_predicted:
                names[17:19] = ["predictor_down_scales", "predictor_up_scales"]
        attributes: dict[str, Any] = (
            {} if self.precision != "int4" else {"bits": 4, "block_size": _BLOCK, "accuracy_level": _LEVEL}
        )
        attributes |= {"allow_bf16": 1} if allow_bf16 else {}
        selection = "predictor" if is_predicted else "nonzero"
        node = helper.make_node(
            "StofSparseMLP", names, ["y"], domain="stof", activation="relu", selection=selection, **attributes
        )
        return [*([] if is_predicted else self._gate()), node]

    def _session(self, nodes: Sequence[onnx.NodeProto], weights: dict[str, Array], *, stof: bool) -> Any:
        ort = require("onnxruntime")
        used = {n for node in nodes for n in node.input}
        constants = {n: a for n, a in weights.items() if n in used}
        tensors = []
        options = ort.SessionOptions()
        for name, array in constants.items():  # the memory of the arrays is that of the sessions
            value = ort.OrtValue.ortvalue_from_numpy(array)
            self._kept.append(value)
            options.add_initializer(name, value)
            tensor = onnx.TensorProto(
                name=name, dims=array.shape, data_type=helper.np_dtype_to_tensor_dtype(array.dtype)
            )
            tensor.data_location = TensorProto.EXTERNAL
            tensor.external_data.add(key="location", value=_FILE)
            tensors.append(tensor)
        inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["T", self.K])]
        if "shift" in used:
            inputs.append(helper.make_tensor_value_info("shift", TensorProto.FLOAT, [1]))
        outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["T", self.K])]
        graph = helper.make_graph(list(nodes), "mlp", inputs, outputs, tensors)
        opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1), helper.make_opsetid("stof", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        if stof:
            library.register(options)
        with tempfile.TemporaryDirectory() as folder:  # the runtime wants to see the file, but does not read it
            Path(folder, _FILE).touch()
            onnx.save(model, str(Path(folder, "model.onnx")))
            return ort.InferenceSession(
                str(Path(folder, "model.onnx")), options, providers=["CPUExecutionProvider"], enable_fallback=0
            )

    # ---- one density ----
    def shift(self, case: MlpCase, x: Array) -> Array:
        """The bias of the gate, or the threshold of the scores, that gives the density."""
        if case.mode != "predicted":
            z = NormalDist().inv_cdf(min(max(case.density, 1e-9), 1 - 1e-9))
            return np.array([10.0 if case.density >= 1 else z], np.float32)
        scores = self.reference().scores(x)[0]
        return np.array([np.quantile(scores, 1 - case.density) - 1e-6], np.float32)

    def reference(self) -> MlpReference:
        """The first layer in fp64."""
        stored = "int4" if self.precision == "int4" else "fp32"
        return MlpReference(self.weights[0], stored, self.mode, self.F, self.K, rank(self.F))

    def runner(self, sessions: Sequence[Any], inputs: Sequence[Array], shift: Array) -> Callable[[], Array]:
        """What runs the next layer on the next tokens."""
        ort = require("onnxruntime")
        bindings = []
        for i in range(len(sessions) * len(inputs)):
            session, x = sessions[i % len(sessions)], inputs[i % len(inputs)]
            binding = session.io_binding()
            feeds = {"x": x, "shift": shift}
            for entry in session.get_inputs():
                binding.bind_ortvalue_input(entry.name, ort.OrtValue.ortvalue_from_numpy(feeds[entry.name]))
            binding.bind_output("y", "cpu")
            bindings.append((session, binding))
        order = itertools.cycle(bindings)

        def run() -> Array:
            session, binding = next(order)
            session.run_with_iobinding(binding)
            found: Array = binding.get_outputs()[0].numpy()
            return found

        return run


class MlpPointProblem(PointProblem):
    """An MLP of active neurons on tokens that take turns, over layers that take turns.

    Args:
        case: the call.
        layers: of its shape, mode and precision.

    Attributes:
        inputs: the tokens of each turn.
        shift: the bias of the gate, or the threshold of the scores, that gives the density.
    """

    def __init__(self, case: MlpCase, layers: Layers) -> None:
        self.case = case
        self.layers = layers
        self.tolerance = TOLERANCE[case.precision]
        rng = np.random.default_rng(1)
        # One less than the layers' multiple: all pairs of a layer and an input take turns.
        self.inputs = [rng.standard_normal((case.T, case.K), np.float32) for _ in range(_INPUTS - 1)]
        self.shift = layers.shift(case, np.concatenate(self.inputs))
        self._expected = layers.reference().expected(self.inputs[0], self.shift)
        active = self._expected.active
        self._touched = {"stof": case.touched_bytes(active), "ort": case.dense_bytes()}
        self._touched["stof-fp32"] = replace(case, precision="fp32").touched_bytes(active)

    def error(self, output: Array) -> float:
        """The largest difference of the first layer's output on the first input from fp64."""
        return self._expected.error(output)

    def is_checked(self, candidate: str) -> bool:
        """Whether a candidate computes the same: predicted neurons are not those of the dense MLP."""
        return candidate != "ort" or self.case.mode != "predicted"

    def describe(self, threads: int) -> Record:
        """Key, shape, and the shares of active neurons."""
        case, active = self.case, self._expected.active
        return {
            "key": [case.shape, case.mode, case.precision, case.T, round(case.density * 1000), threads],
            "grid": "sparse-mlp",
            "shape": {"T": case.T, "K": case.K, "F": case.F, "dtype": case.precision},
            "density": round(float(active.mean()), 4),
            "union": round(float(active.any(0).mean()), 4),
            "bound": round(self._touched["ort"] / self._touched["stof"], 3),
        }

    def figures(self, candidate: str, seconds: float, rates: Mapping[str, float]) -> dict[str, float]:
        """Bytes of weights that a run reads, GB/s of them, and the share of the machine's bandwidth."""
        read = self._touched[candidate]
        gbps = read / seconds * 1e-9
        return {
            "touched_mb": round(read * 1e-6, 2),
            "gbps": round(gbps, 2),
            "bandwidth": round(gbps / rates["read_gbps"], 3),
        }

    def compare(self, timings: Mapping[str, Timing]) -> Record:
        """How many times faster the sparse MLP is."""
        if "stof" not in timings or "ort" not in timings:
            return {}
        found = {"speedup": round(timings["ort"].best / timings["stof"].best, 3)}
        if "stof-fp32" in timings:
            found["over_fp32"] = round(timings["stof-fp32"].best / timings["stof"].best, 3)
        return found


def _runner_of(sessions: Callable[[Layers], Sequence[Any]]) -> Callable[[MlpPointProblem, int], Runner]:
    def build(problem: MlpPointProblem, threads: int) -> Runner:
        del threads  # of the layers' sessions
        run = problem.layers.runner(sessions(problem.layers), problem.inputs, problem.shift)
        return Runner(run, run)

    return build


CANDIDATES: tuple[Candidate[MlpPointProblem, int, Runner], ...] = (
    Candidate("stof", "StofSparseMLP", _runner_of(lambda layers: layers.stof)),
    Candidate("ort", "ONNX Runtime, dense", _runner_of(lambda layers: layers.dense)),
)
_FP32 = Candidate("stof-fp32", "StofSparseMLP in fp32", _runner_of(lambda layers: layers.fp32))


def candidates_of(precision: str) -> tuple[Candidate[MlpPointProblem, int, Runner], ...]:
    """What is timed in turns; of bf16 also the operator without it."""
    return (*CANDIDATES, _FP32) if precision == "bf16" else CANDIDATES


def describe_record(record: Record) -> list[str]:
    """The record as text."""
    own, other = record["peers"]["stof"], record["peers"]["ort"]
    shape, mode, precision, T, density, threads = record["key"]
    text = str(MlpCase(shape, mode, precision, density / 1000, T))
    head = f"{text:44s} {threads} thread(s): "
    if missing := [f"{row['label']} missing: {row['missing']}" for row in (own, other) if "us" not in row]:
        return [head + "; ".join(missing)]
    return [
        f"{head}stof {own['us']:9.1f} us, "
        f"{own['bandwidth']:4.0%} of {record['machine']['read_gbps']:.1f} GB/s (error {own['error']:.0e}); "
        f"ONNX Runtime {other['us']:9.1f} us, {other['bandwidth']:4.0%}: {record['speedup']:5.2f}x, "
        f"by bytes {record['bound']:.2f}x"
        + (f"; {record['over_fp32']:.2f}x over the operator in fp32" if "over_fp32" in record else "")
    ]
