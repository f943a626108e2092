# SPDX-License-Identifier: Apache-2.0
"""The check by execution: the subgraph that makes a mask is cut out, run at concrete sizes, and compared with the
lifted expression element by element. Edges through Shape carry no data: they are fed.
"""

from __future__ import annotations

import re

import numpy as np
import onnx
from onnx import TensorProto, helper

from stof.errors import UnsupportedError
from stof.graph import GraphIndex
from stof.inputs import Case, InputMaker, Padding, evaluate
from stof.mask.lift import LOWEST, SOFT_FORBID
from stof.runtime import Mask
from stof.site import AttentionSite, LiftedMask, MaskTerm, TermKind
from stof.symbolic import Int, Symbolic
from stof.widen import widen

_LONGEST = 1200


def lengths(expression: str) -> list[int]:
    """Lengths that show a mask: below, at and above its constants, odd ones among them."""
    numbers = [int(n) for n in re.findall(r"\d+", expression) if 0 < int(n) <= _LONGEST]
    most = max(numbers, default=16)
    return sorted({2, 7, most, most + 1, min(_LONGEST, most + most // 2 + 3)})


def tables_of(mask: LiftedMask) -> dict[str, np.ndarray]:
    """The tables of a lifted mask as arrays."""
    return {n: np.frombuffer(data, np.dtype(t)).reshape(shape) for n, t, shape, data in mask.tables}


class MaskChecker:
    """Checks the masks of one model. Results are kept per distinct (terms, expression)."""

    def __init__(self, model: onnx.ModelProto, symbolic: Symbolic) -> None:
        self.model = model
        self.symbolic = symbolic
        self.index = GraphIndex(model.graph)
        self.initializers = {t.name: t for t in model.graph.initializer}
        self.passed: set[tuple[object, ...]] = set()

    def check(self, site: AttentionSite, mask: LiftedMask) -> None:
        """Compares at several sizes.

        Raises:
            UnsupportedError: naming the first element at which graph and expression differ.
        """
        terms = [t for t in site.terms if t not in mask.bias]
        key = (tuple(terms), mask.expression, mask.tables, mask.operands, site.row_guard)
        if (not terms and site.row_guard is None) or key in self.passed:
            return
        for number, length in enumerate(lengths(mask.expression)):
            padding = (Padding.NONE, Padding.LEFT, Padding.RIGHT)[number % 3]
            self._compare(site, mask, terms, Case(2, length, padding), seed=number)
        self.passed.add(key)

    def _compare(self, site: AttentionSite, mask: LiftedMask, terms: list[MaskTerm], case: Case, seed: int) -> None:
        maker = InputMaker(self.model, self.symbolic, frozenset(o.tensor for o in mask.operands if o.role == "pad"))
        feeds = maker.draw(case, np.random.default_rng(seed))
        sizes = maker.sizes(case)
        B, H, S, T = (evaluate(d, sizes) for d in site.dims)
        wanted = np.ones((B, H, S, T), bool)
        for term, value in zip(terms, self._run([t.tensor for t in terms], feeds, sizes), strict=True):
            wanted &= _kept(term, value, self.symbolic.dtype(term.tensor))
        P = T - S if site.query_offset else 0
        runtime = {}
        for operand in mask.operands:
            array = feeds[operand.tensor]
            runtime[operand.role] = (array != 0) if operand.role == "pad" else array.astype(np.int64)
        found = Mask(mask.expression or "True", tables_of(mask)).evaluate(B, H, S, T, P, runtime)
        if site.row_guard is not None:
            (zeroed,) = self._run([site.row_guard], feeds, sizes)
            empty = ~wanted.any(axis=-1, keepdims=True)
            if not np.array_equal(np.broadcast_to(zeroed.astype(bool), empty.shape), empty):
                raise UnsupportedError(f"{site.row_guard!r} zeroes other rows than those without a key, at {case}")
        if not np.array_equal(found, wanted):
            where = tuple(int(i) for i in np.argwhere(found != wanted)[0])
            raise UnsupportedError(
                f"the lifted mask {mask.expression!r} differs from the graph at {case}: (b, h, q, k) = {where} is "
                f"{'allowed' if wanted[where] else 'forbidden'} there"
            )

    def _run(self, tensors: list[str], feeds: dict[str, np.ndarray], sizes: dict[str, int]) -> list[np.ndarray]:
        import onnxruntime as ort

        nodes, given, used = self._cut(tensors, feeds, sizes)
        names = list(dict.fromkeys(tensors))
        inputs = [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for n, a in given.items()
        ]
        outputs = [helper.make_tensor_value_info(n, self.symbolic.dtype(n) or TensorProto.FLOAT, None) for n in names]
        graph = helper.make_graph(nodes, "mask", inputs, outputs, [self.initializers[n] for n in used])
        model = helper.make_model(graph, opset_imports=self.model.opset_import, ir_version=self.model.ir_version)
        # The CPU provider has few bfloat16 kernels, and every bfloat16 number is one of fp32.
        model = widen(model, kinds={int(TensorProto.BFLOAT16)})
        given = {n: a.astype(np.float32) if a.dtype.name == "bfloat16" else a for n, a in given.items()}
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = 1
        try:
            session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
            results = session.run(names, given)
        except Exception as error:  # whatever the runtime raises: the mask cannot be confirmed
            raise UnsupportedError(f"the subgraph of mask {names[0]!r} does not run: {error}") from error
        by_name = dict(zip(names, results, strict=True))
        return [by_name[n] for n in tensors]

    def _cut(
        self, tensors: list[str], feeds: dict[str, np.ndarray], sizes: dict[str, int]
    ) -> tuple[list[onnx.NodeProto], dict[str, np.ndarray], list[str]]:
        needed: set[str] = set()
        given: dict[str, np.ndarray] = {}
        used: list[str] = []
        pending = list(tensors)
        while pending:
            name = pending.pop()
            if not name or name in needed:
                continue
            needed.add(name)
            node = self.index.producer(name)
            if node is None:
                if name in feeds:
                    given[name] = feeds[name]
                elif name in self.initializers:
                    used.append(name)
                else:
                    raise UnsupportedError(f"the mask depends on {name!r}, which is neither input nor initializer")
            elif node.op_type == "Shape":
                value = self.symbolic.value(name)
                elements = None if value is None else value.elements()
                if elements is None:
                    raise UnsupportedError(f"the shape of {node.input[0]!r}, on which the mask depends, is unknown")
                given[name] = np.array([evaluate(e, sizes) for e in elements if isinstance(e, Int)], np.int64)
            else:
                pending.extend(node.input)
        nodes = [n for n in self.model.graph.node if n.op_type != "Shape" and any(o in needed for o in n.output)]
        return nodes, given, used


def _kept(term: MaskTerm, value: np.ndarray, dtype: int) -> np.ndarray:
    if term.kind is TermKind.KEEP:
        return value.astype(bool)
    if term.kind is TermKind.DROP:
        return ~value.astype(bool)
    scaled = value.astype(np.float64) * term.scale
    limit = -LOWEST.get(dtype, LOWEST[TensorProto.FLOAT]) / 2
    others = np.unique(scaled[scaled != 0])
    soft = len(others) == 1 and others[0] <= SOFT_FORBID
    kept: np.ndarray = ~((scaled <= limit) | (soft & (scaled <= SOFT_FORBID)))
    return kept
