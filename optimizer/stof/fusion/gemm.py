# SPDX-License-Identifier: Apache-2.0
"""Matrix products with what follows them as one operator: StofGemm (docs/reference/gemm-format.md).

The templates with compute-bound operators of the search: one product, or two of the same left side, and element-wise operators.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import onnx
from onnx import TensorProto

from stof.errors import UnsupportedError
from stof.execution.upcast import HALF
from stof.fusion.description import REDUCTIONS, Output, Pool, describe_chain
from stof.fusion.element_ops import TYPES, kind_of_node
from stof.fusion.index_terms import Limits, Puller
from stof.fusion.translate import Chain, Region
from stof.graph.index import describe, domain_of, producers
from stof.symbolic import Int, Symbolic, integer, var
from stof.symbolic.rules.movement_helpers import element_count
from stof.symbolic.tensor import Shape

PRODUCTS = frozenset({"MatMul", "Gemm"})
_AS_THEY_ARE = {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 0}
MOST_INPUTS = 13  # beside the factors
_STEP = 8  # elements that CUDA kernels read at a time
_NARROWEST = 24  # columns of a factor that is worth packing, for every instruction set
_ZERO, _ONE = integer(0), integer(1)
_M, _N = "m", "n"

# What a library says of an epilogue: the kernel's form, empty with the reason where there is none.
Forms = Callable[[str, int], tuple[str, str]]


@dataclass(frozen=True)
class Product(Chain):
    """A region with one or two products as one operator.

    ``inputs`` are the factors and then what the epilogue reads, of which ``reads`` says how: "mn", "n", "m" or "".
    """

    pair: int = 0
    reads: tuple[str, ...] = ()

    @property
    def factors(self) -> int:
        """How many of the inputs are factors."""
        return 3 if self.pair == 2 else 2


def is_plain(node: onnx.NodeProto) -> bool:
    """Whether a node multiplies two matrices as they are."""
    if domain_of(node) or node.op_type not in PRODUCTS:
        return False
    given = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    return all(given.get(k, v) == v for k, v in _AS_THEY_ARE.items())


def is_product(node: onnx.NodeProto, symbolic: Symbolic) -> bool:
    """Whether a node multiplies by a matrix as StofGemm does."""
    if not is_plain(node):
        return False
    left, right = (symbolic.shape(n) for n in node.input[:2])
    if left is None or right is None:
        return False
    return len(left) >= 2 and len(right) == 2 and right[1].constant is not None


def product_of(
    region: Region,
    nodes: Sequence[onnx.NodeProto],
    symbolic: Symbolic,
    forms: Forms,
    packed: Collection[str] | None = None,
) -> Product:
    """The operator of a region that begins with products.

    Args:
        region: the products and what follows them.
        nodes: of the graph.
        symbolic: of the model.
        forms: of epilogues.
        packed: on the CPU, whose kernels are for products in fp32 by constants: the constants. A product alone is one, too.

    Raises:
        UnsupportedError: with the first reason found.
    """
    found = _Epilogue(region, nodes, symbolic, packed).product()
    form, reason = forms(found.description.text, found.pair)
    if not form:
        raise UnsupportedError(f"no kernel computes it: {reason}")
    return found


class _Epilogue:
    def __init__(
        self, region: Region, nodes: Sequence[onnx.NodeProto], symbolic: Symbolic, packed: Collection[str] | None
    ) -> None:
        own = [nodes[p] for p in region.places]
        self.region = region
        self.symbolic = symbolic
        self.packed = packed
        self.products = [n for n in own if is_product(n, symbolic)]
        self.rest = [n for n in own if not is_product(n, symbolic)]
        self.pool = Pool()
        self.extra: dict[str, str] = {}  # how each further input is read

    def product(self) -> Product:
        self._check()
        (name,) = self.region.outputs
        shape, first = self._shape(name), self.products[0]
        left, right = self._shape(first.input[0]), self._shape(first.input[1])
        packed = right[1] == shape[-1] * integer(2)
        if shape[:-1] != left[:-1] or not (packed or right[1] == shape[-1]):
            raise UnsupportedError(f"{name!r} is not of the shape of the product")
        pair = len(self.products) if len(self.products) == 2 else int(packed)
        if len(self.products) == 2 and packed:
            raise UnsupportedError("two products, each twice as wide as what comes out")
        index, limits = _place(shape)
        puller = Puller(self.symbolic, producers(self.rest), (_N, shape[-1]), limits)
        root = puller.at(name, index, limits)
        kind = self.symbolic.dtype(name)
        factors = [*first.input[:2], *(n.input[1] for n in self.products[1:])]
        self._check_factors(kind, factors[1:], left[-1], shape[-1])
        reading = _Reading(self, list(puller.inputs), puller.pool, (index, shape), pair)
        term = reading.copied(root)
        if self.pool.terms[term][0] == "read" and self.packed is None:
            raise UnsupportedError("a product alone: nothing to fuse")
        text = describe_chain(
            self.pool,
            [(_M, "x0.0"), (_N, "x0.1")],
            [Output(TYPES[kind], ((_M,), (_N,)), term)],
            len(self.extra) + 1 + bool(pair),
        )
        if any(self.symbolic.dtype(n) != kind for n in (*factors, *self.extra)):
            raise UnsupportedError("its inputs and its output are of different types")
        if len(self.extra) > MOST_INPUTS:
            raise UnsupportedError(f"{len(self.extra)} inputs of its epilogue, expected at most {MOST_INPUTS}")
        sizes = (element_count(shape[:-1]), shape[-1], left[-1])
        return Product(
            self.region, text, (*factors, *self.extra), (kind,), sizes, pair, tuple(self.extra.values())
        )  # fmt: skip

    def _check(self) -> None:
        if len(self.region.outputs) != 1:
            raise UnsupportedError(f"{len(self.region.outputs)} outputs, expected one")
        if not 1 <= len(self.products) <= 2:
            raise UnsupportedError(f"{len(self.products)} products, expected one or two")
        first, last = self.products[0], self.products[-1]
        if first.input[0] != last.input[0] or self._shape(first.input[1]) != self._shape(last.input[1]):
            raise UnsupportedError("products of different left sides, or of factors of different shapes")
        for node in self.rest:
            if kind_of_node(node) not in ("elementwise", "moving"):
                raise UnsupportedError(f"{describe(node)} is neither element-wise nor moves elements")

    def _check_factors(self, kind: int, factors: Sequence[str], inner: Int, columns: Int) -> None:
        if self.packed is None:
            if kind not in HALF:
                raise UnsupportedError("products in fp32 stay with the runtime")
            if any(size.constant is None or size.constant % _STEP for size in (inner, columns)):
                raise UnsupportedError(
                    f"factors of {inner} by {columns}, expected multiples of {_STEP}: slow otherwise"
                )
            return
        if kind != TensorProto.FLOAT:
            raise UnsupportedError("products in half precision stay with the runtime on the CPU")
        if any(f not in self.packed for f in factors):
            raise UnsupportedError("a factor is no constant, so that it would be packed in every run")
        if columns.constant is None or columns.constant < _NARROWEST:
            raise UnsupportedError(f"factors of {inner} by {columns}, expected {_NARROWEST} columns: slow otherwise")

    def _shape(self, name: str) -> Shape:
        shape = self.symbolic.shape(name)
        if shape is None:
            raise UnsupportedError(f"the shape of {name!r} is not known")
        return shape


def _place(shape: Shape) -> tuple[tuple[Int, ...], Limits]:
    """The place of an element, an axis for each dimension, and their limits."""
    names = [f"l{i}" for i in range(len(shape) - 1)] + [_N]
    index = tuple(_ZERO if d == _ONE and n != _N else var(n) for n, d in zip(names, shape, strict=True))
    return index, Limits(tuple((n, _ZERO, d - _ONE) for n, d in zip(names, shape, strict=True)))


class _Reading:
    """Terms over a tensor's own axes, copied to terms over the product's rows and columns."""

    def __init__(
        self,
        owner: _Epilogue,
        names: Sequence[str],
        source: Pool,
        element: tuple[tuple[Int, ...], Shape],
        pair: int,
    ) -> None:
        self.owner = owner
        self.names = names
        self.source = source
        self.index, self.shape = element
        self.pair = pair
        self.memo: dict[int, int] = {}

    def copied(self, term: int) -> int:
        """The term of a term."""
        if term not in self.memo:
            op, args = self.source.terms[term]
            if op in REDUCTIONS or op == "below":
                raise UnsupportedError("an epilogue has no reductions, and chooses by no axis")
            if op == "num":
                self.memo[term] = self.owner.pool.make(op, *args)
            elif op == "read":
                number, indices = args
                assert isinstance(number, int)
                assert isinstance(indices, tuple)
                self.memo[term] = self._read(self.names[number], indices)
            else:
                own = [self.copied(a) for a in self.source.arguments(term)]
                self.memo[term] = self.owner.pool.make(op, *own)
        return self.memo[term]

    def _read(self, name: str, indices: tuple[Int, ...]) -> int:
        written = {n.output[0]: i for i, n in enumerate(self.owner.products)}
        if name not in written:
            return self._further(name, indices)
        offset = indices[-1] - var(_N)
        half = self.pair == 1 and offset == self.shape[-1]
        if indices[:-1] != self.index[:-1] or not (offset == _ZERO or half):
            raise UnsupportedError(f"{name!r} is read at another place than its own")
        pool = self.owner.pool
        read = pool.make("read", written[name] + half, (var(_M), var(_N)))
        node = self.owner.products[written[name]]
        if len(node.input) < 3 or not node.input[2]:
            return read
        if self.pair == 1:
            raise UnsupportedError(f"{describe(node)} has a bias of both halves")
        shape = self.owner._shape(node.input[2])
        place = tuple(
            _ZERO if d == _ONE else i for d, i in zip(shape, indices[-len(shape) :] if shape else (), strict=True)
        )
        return pool.make("add", read, self._further(node.input[2], place))

    def _further(self, name: str, indices: tuple[Int, ...]) -> int:
        shape = self.owner._shape(name)
        how = self._how(name, indices, shape)
        if self.owner.extra.setdefault(name, how) != how:
            raise UnsupportedError(f"{name!r} is read in two ways")
        number = 1 + bool(self.pair) + list(self.owner.extra).index(name)
        return self.owner.pool.make("read", number, tuple(var(a) for a in how))

    def _how(self, name: str, indices: tuple[Int, ...], shape: Shape) -> str:
        if shape == self.shape and indices == self.index:
            return "mn"
        if element_count(shape) == _ONE:
            return ""
        if shape and shape[-1] == self.shape[-1] and indices[-1] == var(_N) and element_count(shape[:-1]) == _ONE:
            return "n"
        rows = self.index[:-1]
        if (shape, indices) in ((self.shape[:-1], rows), ((*self.shape[:-1], _ONE), (*rows, _ZERO))):
            return "m"
        raise UnsupportedError(f"{name!r} of shape [{', '.join(map(str, shape))}] goes along neither rows nor columns")
