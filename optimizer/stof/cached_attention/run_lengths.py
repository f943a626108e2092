# SPDX-License-Identifier: Apache-2.0
"""How many keys each sequence has in a run: ``seqlens_k`` and the total, computed from the run's inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper

from stof.cached_attention.site import CacheSite, count_held_rows
from stof.errors import UnsupportedError
from stof.graph.external_data import is_external
from stof.graph.index import is_standard, producers, subgraphs
from stof.symbolic import Symbolic
from stof.symbolic.algebra.sizes import evaluate

_MOST_NODES = 64  # between inputs and lengths
Feed = Mapping[str, np.ndarray]


class RunLengths:
    """Computes the lengths of sites from inputs, and which rows of outputs are defined.

    Args:
        model: that the sites are nodes of.
        symbolic: its facts.
        sites: those that are replaced.
    """

    def __init__(self, model: onnx.ModelProto, symbolic: Symbolic, sites: Sequence[CacheSite]) -> None:
        self._model = model
        self._symbolic = symbolic
        self._sites = tuple(sites)
        self._by_present = {o: s for s in sites for o in s.node.output[1:3]}
        self._readers: dict[str, _TensorReader | None] = {}

    def keys(self, site: CacheSite, feed: Feed) -> np.ndarray | None:
        """The number of valid keys [B] after the run; None where it cannot be computed from the inputs."""
        lengths = self.read(site.input("seqlens_k"), feed)
        return None if lengths is None or lengths.ndim != 1 else lengths.astype(np.int64) + site.uncounted_keys

    def read(self, tensor: str, feed: Feed) -> np.ndarray | None:
        """A small integer tensor that is computed from inputs and sizes; None where it cannot be."""
        if tensor not in self._readers:
            self._readers[tensor] = _TensorReader.make(self._model, self._symbolic, tensor)
        reader = self._readers[tensor]
        return None if reader is None else reader.read(feed)

    def padded_queries(self, feed: Feed) -> np.ndarray | None:
        """Which queries [B, S] are padding of a first prompt, by all sites; None where that is not known."""
        padded: list[np.ndarray] = []
        for site in {(s.input("seqlens_k"), s.queries): s for s in self._sites}.values():
            keys, queries = self.keys(site, feed), self.size(site.queries, feed)
            total = self.read(site.input("total_sequence_length"), feed)
            if keys is None or queries is None or total is None or total.size != 1:
                return None
            is_first = int(total.reshape(-1)[0]) == queries
            padded.append((np.arange(queries)[None] >= keys[:, None]) & is_first)
        return np.logical_and.reduce(padded) if len({x.shape for x in padded}) == 1 else None

    def cache_rows(self, output: str, feed: Feed, rows: int) -> np.ndarray | None:
        """Which of the rows [B, ``rows``] of an output hold keys, where it is the present of a site; else None."""
        site = self._by_present.get(output)
        keys = None if site is None else self.keys(site, feed)
        if site is None or keys is None:
            return None
        held = count_held_rows(keys, rows, site.window) if site.sliding else keys
        return np.asarray(np.arange(rows)[None] < held[:, None])

    def size(self, size: Any, feed: Feed) -> int | None:
        """A size at the shapes of inputs."""
        try:
            return evaluate(size, _sizes_of(self._symbolic, feed))
        except UnsupportedError:  # a name of a size that no input has
            return None


def _sizes_of(symbolic: Symbolic, feed: Feed) -> dict[str, int]:
    """Dimension names by the shapes of inputs."""
    sizes: dict[str, int] = {}
    for name, array in feed.items():
        for dim, size in zip(symbolic.shape(name) or (), array.shape, strict=False):
            if dim.atom is not None and dim.atom.kind == "size":
                sizes.setdefault(str(dim.atom.args[0]), size)
    return sizes


class _TensorReader:
    """Computes one tensor by the few nodes between it and the inputs; shapes on the way come from facts."""

    def __init__(self, symbolic: Symbolic, evaluator: Any, inputs: Sequence[str], shapes: Mapping[str, Any]) -> None:
        self._symbolic = symbolic
        self._evaluator = evaluator
        self._inputs = tuple(inputs)
        self._shapes = shapes

    @classmethod
    def make(cls, model: onnx.ModelProto, symbolic: Symbolic, tensor: str) -> _TensorReader | None:
        """A reader; None where it takes many nodes, or nodes that are not of the ONNX standard."""
        from onnx.reference import ReferenceEvaluator

        graph = model.graph
        writers = producers(graph.node)
        graph_inputs = {i.name: i for i in graph.input}
        stored = {t.name: t for t in graph.initializer if t.name not in graph_inputs}
        nodes: dict[int, onnx.NodeProto] = {}
        inputs: dict[str, onnx.ValueInfoProto] = {}
        shapes: dict[str, Any] = {}
        constants: dict[str, onnx.TensorProto] = {}
        pending, seen = [tensor], set[str]()
        while pending:
            name = pending.pop()
            if name in seen or not name:
                continue
            seen.add(name)
            node = writers.get(name)
            if node is None:
                if name in graph_inputs:
                    inputs[name] = graph_inputs[name]
                elif name in stored and not is_external(stored[name]):
                    constants[name] = stored[name]
                else:
                    return None
            elif node.op_type == "Shape" and is_standard(node):
                dims = symbolic.shape(node.input[0])
                if dims is None:
                    return None
                ends = {a.name: a.i for a in node.attribute}
                shapes[name] = dims[ends.get("start", 0) : ends.get("end", len(dims))]
            elif not is_standard(node) or subgraphs(node) or len(nodes) >= _MOST_NODES:
                return None
            else:
                nodes[id(node)] = node
                pending.extend(node.input)
        order = [n for n in graph.node if id(n) in nodes]
        infos = [helper.make_tensor_value_info(n, onnx.TensorProto.INT64, None) for n in shapes]
        output = helper.make_tensor_value_info(tensor, onnx.TensorProto.UNDEFINED, None)
        part = helper.make_graph(order, "lengths", [*inputs.values(), *infos], [output], list(constants.values()))
        small = helper.make_model(part, opset_imports=model.opset_import, ir_version=model.ir_version)
        try:
            return cls(symbolic, ReferenceEvaluator(small), list(inputs), shapes)
        except Exception:  # operators that the evaluator does not have
            return None

    def read(self, feed: Feed) -> np.ndarray | None:
        """The tensor's value."""
        sizes = _sizes_of(self._symbolic, feed)
        try:
            arrays = {n: feed[n] for n in self._inputs}
            arrays |= {n: np.array([evaluate(d, sizes) for d in dims], np.int64) for n, dims in self._shapes.items()}
            value = np.asarray(self._evaluator.run(None, arrays)[0])
        except Exception:  # inputs that are absent, and whatever the evaluator raises on a damaged graph
            return None
        return value if value.dtype.kind in "iu" and value.size < 1 << 20 else None
