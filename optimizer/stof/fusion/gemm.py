# SPDX-License-Identifier: Apache-2.0
"""Translates matmuls and their epilogue to one operator: StofGemm (docs/reference/gemm-format.md).

A fused GEMM has one matmul, or two of the same left operand, and element-wise operators behind them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import onnx
from onnx import TensorProto

from stof.errors import UnsupportedError
from stof.execution.upcast import HALF
from stof.fusion.description.format import REDUCTIONS
from stof.fusion.description.from_terms import OutputTerm, describe_chain
from stof.fusion.description.nodes import AxisSize
from stof.fusion.element_ops import TYPES, kind_of_node
from stof.fusion.index_terms import AxisRanges, TermBuilder
from stof.fusion.policy import EpilogueForms
from stof.fusion.terms import TermPool
from stof.fusion.translate import FusedChain, Region
from stof.graph.index import describe, domain_of
from stof.graph.node_fields import attributes_of
from stof.symbolic import Int, Symbolic, integer, var
from stof.symbolic.rules.movement_helpers import element_count
from stof.symbolic.tensor import Shape

MATMUL_OPS = frozenset({"MatMul", "Gemm"})
# Of a plain matmul. A Gemm with other values is none.
PLAIN_GEMM_ATTRIBUTES = {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 0}
MOST_INPUTS = 13  # of an epilogue
_ALIGNMENT = 8  # elements that CUDA kernels load at once
_FEWEST_COLUMNS = 24  # of a weight that is worth packing on every CPU
_ZERO, _ONE = integer(0), integer(1)
_M, _N = "m", "n"


@dataclass(frozen=True)
class FusedGemm(FusedChain):
    """A region of one or two matmuls and their epilogue as one operator.

    Attributes:
        inputs: the matmuls' operands, then what the epilogue reads.
        pair: 0 for one matmul, 1 for one whose output has two halves of columns, 2 for two of the same left operand.
        reads: the axes by which the epilogue reads each of its inputs: "mn", "n", "m" or "" (a scalar).
    """

    pair: int = 0
    reads: tuple[str, ...] = ()

    @property
    def operand_count(self) -> int:
        """How many of the inputs are operands of the matmuls."""
        return 3 if self.pair == 2 else 2


def is_plain_matmul(node: onnx.NodeProto) -> bool:
    """Whether a node is MatMul, or Gemm with neither transposition nor factors."""
    if domain_of(node) or node.op_type not in MATMUL_OPS:
        return False
    attributes = attributes_of(node)
    return all(attributes.get(k, v) == v for k, v in PLAIN_GEMM_ATTRIBUTES.items())


def is_fusable_matmul(node: onnx.NodeProto, symbolic: Symbolic) -> bool:
    """Whether StofGemm computes a node: a plain matmul by a matrix with a known number of columns."""
    if not is_plain_matmul(node):
        return False
    left, right = (symbolic.shape(n) for n in node.input[:2])
    if left is None or right is None:
        return False
    return len(left) >= 2 and len(right) == 2 and right[1].constant is not None


def translate_gemm(
    region: Region,
    nodes: Sequence[onnx.NodeProto],
    symbolic: Symbolic,
    forms: EpilogueForms,
    constants: Collection[str] | None = None,
    cpu_types: Collection[int] = (TensorProto.FLOAT,),
) -> FusedGemm:
    """Translates a region that begins with matmuls.

    Args:
        region: the matmuls and their epilogue.
        nodes: all nodes of the graph.
        symbolic: shapes, types and constants of the model.
        forms: the kernels that compute an epilogue.
        constants: for the CPU, the names of constant tensors: its kernels take packed weights, also without an epilogue.
            None for CUDA.
        cpu_types: element types that its kernels take.

    Raises:
        UnsupportedError: with the first reason found.
    """
    gemm = _GemmTranslator(region, nodes, symbolic, constants, cpu_types).translate()
    form, reason = forms(gemm.description.text, gemm.pair)
    if not form:
        raise UnsupportedError(f"no kernel computes it: {reason}")
    return gemm


class _GemmTranslator:
    """One region; collects the epilogue's terms over rows m and columns n, and its inputs."""

    def __init__(
        self,
        region: Region,
        nodes: Sequence[onnx.NodeProto],
        symbolic: Symbolic,
        constants: Collection[str] | None,
        cpu_types: Collection[int],
    ) -> None:
        members = [nodes[p] for p in region.node_indices]
        self.region = region
        self.symbolic = symbolic
        self.constants = constants
        self.cpu_types = cpu_types
        self.matmuls = [n for n in members if is_fusable_matmul(n, symbolic)]
        self.others = [n for n in members if not is_fusable_matmul(n, symbolic)]
        self.pool = TermPool()
        self.extra: dict[str, str] = {}  # each input of the epilogue: the axes by which it is read

    def translate(self) -> FusedGemm:
        self._check()
        (name,) = self.region.outputs
        shape, first = self._shape(name), self.matmuls[0]
        left, right = self._shape(first.input[0]), self._shape(first.input[1])
        is_two_halves = right[1] == shape[-1] * integer(2)
        if shape[:-1] != left[:-1] or not (is_two_halves or right[1] == shape[-1]):
            raise UnsupportedError(f"{name!r} does not have the shape of the matmul")
        pair = len(self.matmuls) if len(self.matmuls) == 2 else int(is_two_halves)
        if len(self.matmuls) == 2 and is_two_halves:
            raise UnsupportedError("two matmuls, each twice as wide as the output")
        index, ranges = _element_index(shape)
        producers = {o: n for n in self.others for o in n.output if o}
        builder = TermBuilder(self.symbolic, producers, (_N, shape[-1]), ranges)
        root = builder.term_at(name, index, ranges)
        kind = self.symbolic.dtype(name)
        operands = [*first.input[:2], *(n.input[1] for n in self.matmuls[1:])]
        self._check_weights(kind, operands[1:], left[-1], shape[-1])
        terms = _EpilogueTerms(self, list(builder.inputs), builder.pool, (index, shape), pair)
        term = terms.copy_term(root)
        if self.pool.terms[term][0] == "read" and self.constants is None:
            raise UnsupportedError("a matmul alone: nothing to fuse")
        description = describe_chain(
            self.pool,
            ((_M, AxisSize(1, 0, 0)), (_N, AxisSize(1, 0, 1))),
            [OutputTerm(TYPES[kind], ((_M,), (_N,)), term)],
            len(self.extra) + 1 + bool(pair),
        )
        if any(self.symbolic.dtype(n) != kind for n in (*operands, *self.extra)):
            raise UnsupportedError("its inputs and its output are of different types")
        if len(self.extra) > MOST_INPUTS:
            raise UnsupportedError(f"{len(self.extra)} inputs of its epilogue, expected at most {MOST_INPUTS}")
        sizes = (element_count(shape[:-1]), shape[-1], left[-1])
        return FusedGemm(
            self.region, description, (*operands, *self.extra), (kind,), sizes, pair, tuple(self.extra.values())
        )  # fmt: skip

    def _check(self) -> None:
        if len(self.region.outputs) != 1:
            raise UnsupportedError(f"{len(self.region.outputs)} outputs, expected one")
        if not 1 <= len(self.matmuls) <= 2:
            raise UnsupportedError(f"{len(self.matmuls)} matmuls, expected one or two")
        first, last = self.matmuls[0], self.matmuls[-1]
        if first.input[0] != last.input[0] or self._shape(first.input[1]) != self._shape(last.input[1]):
            raise UnsupportedError("matmuls of different left operands, or of weights of different shapes")
        for node in self.others:
            if kind_of_node(node) not in ("elementwise", "moving"):
                raise UnsupportedError(f"{describe(node)} is neither element-wise nor moves elements")

    def _check_weights(self, kind: int, weights: Sequence[str], inner: Int, columns: Int) -> None:
        if self.constants is None:
            if kind not in HALF:
                raise UnsupportedError("matmuls in fp32 stay with the runtime")
            if any(size.constant is None or size.constant % _ALIGNMENT for size in (inner, columns)):
                raise UnsupportedError(
                    f"weights of {inner} by {columns}, expected multiples of {_ALIGNMENT}: slow otherwise"
                )
            return
        if kind not in self.cpu_types:
            raise UnsupportedError("matmuls in fp16 and bf16 stay with the runtime on the CPU")
        if any(w not in self.constants for w in weights):
            raise UnsupportedError("a weight is not constant: it would be packed in every run")
        if columns.constant is None or columns.constant < _FEWEST_COLUMNS:
            raise UnsupportedError(
                f"weights of {inner} by {columns}, expected {_FEWEST_COLUMNS} columns: slow otherwise"
            )

    def _shape(self, name: str) -> Shape:
        shape = self.symbolic.shape(name)
        if shape is None:
            raise UnsupportedError(f"the shape of {name!r} is not known")
        return shape


def _element_index(shape: Shape) -> tuple[tuple[Int, ...], AxisRanges]:
    """The index of an output's element, one axis for each dimension, and the axes' ranges."""
    names = [f"l{i}" for i in range(len(shape) - 1)] + [_N]
    index = tuple(_ZERO if d == _ONE and n != _N else var(n) for n, d in zip(names, shape, strict=True))
    return index, AxisRanges(tuple((n, _ZERO, d - _ONE) for n, d in zip(names, shape, strict=True)))


class _EpilogueTerms:
    """Copies terms over an output's own axes to terms over the matmul's rows and columns."""

    def __init__(
        self,
        owner: _GemmTranslator,
        names: Sequence[str],
        source: TermPool,
        element: tuple[tuple[Int, ...], Shape],
        pair: int,
    ) -> None:
        self.owner = owner
        self.names = names
        self.source = source
        self.index, self.shape = element
        self.pair = pair
        self.memo: dict[int, int] = {}

    def copy_term(self, term: int) -> int:
        """The same term over rows and columns."""
        if term not in self.memo:
            op, args = self.source.terms[term]
            if op in REDUCTIONS or op == "below":
                raise UnsupportedError("an epilogue has no reductions, and no select on an axis")
            if op == "num":
                self.memo[term] = self.owner.pool.make(op, *args)
            elif op == "read":
                number, indices = args
                assert isinstance(number, int)
                assert isinstance(indices, tuple)
                self.memo[term] = self._read(self.names[number], indices)
            else:
                operands = [self.copy_term(a) for a in self.source.arguments(term)]
                self.memo[term] = self.owner.pool.make(op, *operands)
        return self.memo[term]

    def _read(self, name: str, indices: tuple[Int, ...]) -> int:
        written = {n.output[0]: i for i, n in enumerate(self.owner.matmuls)}
        if name not in written:
            return self._extra_input(name, indices)
        offset = indices[-1] - var(_N)
        second_half = self.pair == 1 and offset == self.shape[-1]
        if indices[:-1] != self.index[:-1] or not (offset == _ZERO or second_half):
            raise UnsupportedError(f"{name!r} is read at another position than its own")
        pool = self.owner.pool
        read = pool.make("read", written[name] + second_half, (var(_M), var(_N)))
        node = self.owner.matmuls[written[name]]
        if len(node.input) < 3 or not node.input[2]:
            return read
        if self.pair == 1:
            raise UnsupportedError(f"{describe(node)} has a bias for both halves of its columns")
        shape = self.owner._shape(node.input[2])
        bias_index = tuple(
            _ZERO if d == _ONE else i for d, i in zip(shape, indices[-len(shape) :] if shape else (), strict=True)
        )
        return pool.make("add", read, self._extra_input(node.input[2], bias_index))

    def _extra_input(self, name: str, indices: tuple[Int, ...]) -> int:
        shape = self.owner._shape(name)
        axes = self._access_of(name, indices, shape)
        if self.owner.extra.setdefault(name, axes) != axes:
            raise UnsupportedError(f"{name!r} is read in two ways")
        number = 1 + bool(self.pair) + list(self.owner.extra).index(name)
        return self.owner.pool.make("read", number, tuple(var(a) for a in axes))

    def _access_of(self, name: str, indices: tuple[Int, ...], shape: Shape) -> str:
        if shape == self.shape and indices == self.index:
            return "mn"
        if element_count(shape) == _ONE:
            return ""
        if shape and shape[-1] == self.shape[-1] and indices[-1] == var(_N) and element_count(shape[:-1]) == _ONE:
            return "n"
        rows = self.index[:-1]
        if (shape, indices) in ((self.shape[:-1], rows), ((*self.shape[:-1], _ONE), (*rows, _ZERO))):
            return "m"
        raise UnsupportedError(
            f"{name!r} of shape [{', '.join(map(str, shape))}] is broadcast along neither rows nor columns"
        )
