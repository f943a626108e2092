# SPDX-License-Identifier: Apache-2.0
"""Runs mask tensors by themselves, at concrete sizes and on drawn inputs.

The subgraph that makes them is cut out of the model. Edges through Shape carry no data, so shapes are fed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import onnx
from onnx import TensorProto, helper

from stof.errors import UnsupportedError
from stof.execution.case import Case
from stof.execution.inputs import InputMaker
from stof.execution.narrow_inputs import InputNarrower
from stof.execution.session_process import create_session, has_onnxruntime
from stof.execution.session_worker import SessionSpec
from stof.execution.upcast import widen
from stof.graph.external_data import external_files
from stof.graph.index import GraphIndex
from stof.mask.expression import allows_number, find_key_vector
from stof.mask.site import AttentionSite, LiftedMask, MaskTerm
from stof.mask.strength import LOWEST
from stof.symbolic import Int, Symbolic
from stof.symbolic.algebra.sizes import evaluate

_VECTOR_TYPES = frozenset({TensorProto.BOOL, TensorProto.UINT8, TensorProto.INT32, TensorProto.INT64})
_SECONDS = 60.0  # limit of a run, which takes a few milliseconds


class DoesNotRunError(UnsupportedError):
    """The subgraph that makes a mask cannot be run at a length, or does not fit the scores.

    Args:
        text: for the user.
        refused: what ONNX Runtime said; or two shapes that it would refuse, as it writes them.
    """

    def __init__(self, text: str, refused: str = "") -> None:
        super().__init__(text)
        self.refused = refused

    @classmethod
    def of_shapes(cls, text: str, one: Sequence[int], other: Sequence[int]) -> DoesNotRunError:
        """The error for two shapes that do not broadcast."""
        return cls(text, " ".join("{" + ",".join(map(str, shape)) + "}" for shape in (one, other)))


def tensors_by_role(
    masks: Iterable[tuple[AttentionSite, LiftedMask]],
) -> tuple[frozenset[str], dict[str, Int], frozenset[str], frozenset[str], frozenset[str]]:
    """The tensors that masks read, by role, as :class:`InputMaker` takes them.

    Padding, numbers of keys (with the key lengths), segments, padding that is true where a key is none, table indices.
    A segment_k vector is padding, too, where its condition allows, of -1, 0, 1 and 2, only 0, only 1, or only 1 and 2.
    """
    masks = list(masks)
    read = [(o, site.dims[3]) for site, m in masks for o in m.operands]
    forbidding = {o.tensor for _, m in masks for o in m.operands if o.role == "pad" and m.expression.forbids_padding}
    pads = frozenset(o.tensor for o, _ in read if o.role == "pad")
    for _, mask in masks:
        vectors = {o.role: o.tensor for o in mask.operands if o.role == "segment_k"}
        for condition in mask.expression.conjuncts:
            tensor = vectors.get(find_key_vector(condition) or "")
            allowed = [number for number in (0, 1, 2, -1) if tensor and allows_number(condition, number)]
            if tensor and "segment_q" not in mask.expression.vectors and allowed in ([0], [1], [1, 2]):
                pads |= {tensor}
                forbidding |= {tensor} if allowed == [0] else set()
    limits = {o.tensor: keys for o, keys in read if o.role == "lengths"}
    segments = frozenset(o.tensor for o, _ in read) - pads - frozenset(limits)
    indexing = {o.tensor for _, m in masks for o in m.operands if m.expression.indexes_table(o.role)}
    return pads, limits, segments, frozenset(forbidding), frozenset(indexing)


def score_sizes(site: AttentionSite, sizes: Mapping[str, int]) -> tuple[int, int, int, int]:
    """The sizes B, H, S, T of a site's scores.

    Raises:
        DoesNotRunError: when one of them is negative, as strides and slices of short inputs can make it.
    """
    B, H, S, T = (evaluate(d, sizes) for d in site.dims)
    if min(B, H, S, T) < 0:
        raise DoesNotRunError(f"scores of shape [{B}, {H}, {S}, {T}]")
    return B, H, S, T


class MaskRunner:
    """Runs mask tensors of one model."""

    def __init__(self, model: onnx.ModelProto, symbolic: Symbolic) -> None:
        self.model = model
        self.symbolic = symbolic
        self.index = GraphIndex(model.graph)
        self._initializers = {t.name: t for t in model.graph.initializer}
        self.inputs = {i.name for i in model.graph.input} - set(self._initializers)
        self._node_index = {o: i for i, n in enumerate(model.graph.node) for o in n.output if o}
        self._makers: dict[object, InputMaker] = {}
        self._narrowers: dict[int, InputNarrower] = {}

    def vectors(self, site: AttentionSite) -> list[str]:
        """The model inputs of rank 2, integer or boolean, on whose data the mask tensors of a site depend."""
        names = []
        for name in self.sources_of(site):
            shape = self.symbolic.shape(name) if name in self.inputs else None
            if shape is not None and len(shape) == 2 and self.symbolic.dtype(name) in _VECTOR_TYPES:
                names.append(name)
        return sorted(names)

    def _float_vectors(self, site: AttentionSite) -> frozenset[str]:
        """Float inputs of rank 2 behind a site's masks. They are padding, too: only 0 and 1 show what a mask makes of them."""
        return frozenset(
            name
            for name in self.sources_of(site) & self.inputs
            if (shape := self.symbolic.shape(name)) is not None
            and len(shape) == 2
            and self.symbolic.dtype(name) in LOWEST
        )

    def sources_of(self, site: AttentionSite) -> set[str]:
        """The tensors on whose data the mask tensors of a site depend."""
        return self._sources([t.tensor for t in site.terms])

    def inputs_behind(self, tensor: str, replaced: Iterable[str] = ()) -> set[str]:
        """The model inputs on whose data a tensor depends, beside those behind tensors that are ``replaced``."""
        return self._sources([tensor], replaced) & self.inputs - set(replaced)

    def _sources(self, tensors: Iterable[str], replaced: Iterable[str] = ()) -> set[str]:
        seen: set[str] = set(replaced)
        pending = list(tensors)
        while pending:
            name = pending.pop()
            if name in seen:
                continue
            seen.add(name)
            node = self.index.producer(name)
            if node is not None and node.op_type != "Shape":
                pending.extend(n for n in node.input if n)
        return seen

    def sizes(self, case: Case) -> dict[str, int]:
        """The sizes of the model's dimensions.

        Raises:
            UnsupportedError: when inputs of such sizes cannot be made.
        """
        try:
            return self._maker(frozenset()).sizes(case)
        except ValueError as error:
            raise UnsupportedError(f"no inputs can be made to check the mask: {error}") from error

    def _maker(
        self,
        pads: frozenset[str],
        limits: dict[str, Int] | None = None,
        segments: frozenset[str] = frozenset(),
        forbidding: frozenset[str] = frozenset(),
        indexing: frozenset[str] = frozenset(),
    ) -> InputMaker:
        """What draws inputs for masks that read tensors of these roles. All draw the same sizes."""
        key = pads, tuple(sorted((limits or {}).items(), key=str)), segments, forbidding, indexing
        if key not in self._makers:
            maker = InputMaker(
                self.model, self.symbolic, pads, limits, segments, forbidding, indexing, index=self.index
            )
            self._makers[key] = maker
            first = next(iter(self._makers.values())).dimensions
            maker.dimensions.fixed, maker.dimensions.most = first.fixed, first.most
        return self._makers[key]

    def _maker_of(self, site: AttentionSite, mask: LiftedMask) -> InputMaker:
        pads, limits, segments, forbidding, indexing = tensors_by_role([(site, mask)])
        return self._maker(pads | self._float_vectors(site), limits, segments, forbidding, indexing)

    def lengths(self, site: AttentionSite, case: Case) -> tuple[int, ...]:
        """The numbers of queries and keys that a site's scores have in a case."""
        return score_sizes(site, self.sizes(case))[2:]

    @contextlib.contextmanager
    def keep_sizes(self) -> Iterator[None]:
        """Forgets narrowed sizes where the block raises: they are those of a mask that does not run."""
        dimensions = self._maker(frozenset()).dimensions
        before = dict(dimensions.fixed), dict(dimensions.most)
        try:
            yield
        except UnsupportedError:
            for sizes, previous_sizes in zip((dimensions.fixed, dimensions.most), before, strict=True):
                sizes.clear()
                sizes.update(previous_sizes)
            raise

    def narrow(self, site: AttentionSite, mask: LiftedMask, case: Case, seed: int, message: str) -> bool:
        """Draws other inputs from now on, going by what ONNX Runtime refused, as verification does; False: nothing changed."""
        maker = self._maker_of(site, mask)
        narrower = self._narrowers.setdefault(id(maker), InputNarrower(maker))
        feed, _ = self.draw(site, mask, case, seed)
        return narrower.narrow(self.model, message, case, feed)

    def draw(
        self, site: AttentionSite, mask: LiftedMask, case: Case, seed: int
    ) -> tuple[dict[str, np.ndarray], dict[str, int]]:
        """Inputs of the model on which masks and guards of the site depend, and the sizes of the model's dimensions.

        Raises:
            UnsupportedError: when they cannot be made.
        """
        maker = self._maker_of(site, mask)
        guards = [site.row_guard or "", "" if site.pair_guard is None else site.pair_guard.tensor]
        needed = self._sources([t.tensor for t in site.terms] + [o.tensor for o in mask.operands] + guards)
        try:
            return maker.draw(case, np.random.default_rng(seed), needed), maker.sizes(case)
        except (ValueError, MemoryError) as error:
            raise UnsupportedError(f"no inputs can be made to check the mask: {error}") from error

    def with_computed(
        self, mask: LiftedMask, feeds: dict[str, np.ndarray], sizes: dict[str, int]
    ) -> dict[str, np.ndarray]:
        """The inputs and the operands that the graph computes from them."""
        names = list(dict.fromkeys(o.tensor for o in mask.operands if o.tensor not in feeds))
        return {**feeds, **dict(zip(names, self.run(names, feeds, sizes), strict=True))} if names else feeds

    def values(
        self,
        site: AttentionSite,
        terms: Sequence[MaskTerm],
        feeds: dict[str, np.ndarray],
        sizes: dict[str, int],
        replaced: Mapping[str, np.ndarray] = MappingProxyType({}),
    ) -> list[np.ndarray]:
        """The tensors of terms as they broadcast to [B, H, S, T].

        Raises:
            DoesNotRunError: when they cannot be run at these sizes, or broadcast to another shape.
        """
        whole = score_sizes(site, sizes)
        arrays = self.run([t.tensor for t in terms], feeds, sizes, replaced)
        try:
            return [t.spread(a, whole) for t, a in zip(terms, arrays, strict=True)]
        except ValueError as error:
            raise DoesNotRunError(f"a mask does not broadcast to the scores: {error}") from error

    def run(
        self,
        tensors: list[str],
        feeds: dict[str, np.ndarray],
        sizes: dict[str, int],
        replaced: Mapping[str, np.ndarray] = MappingProxyType({}),
    ) -> list[np.ndarray]:
        """Tensors of the model, of what is fed. Tensors that are ``replaced`` are fed, too, instead of being computed.

        Raises:
            DoesNotRunError: when a runtime cannot compute them.
            UnsupportedError: when what they depend on is not known.
        """
        nodes, cut_feeds, used = self._cut(tensors, feeds, sizes, replaced)
        names = list(dict.fromkeys(tensors))
        inputs = [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for n, a in cut_feeds.items()
        ]
        outputs = [helper.make_tensor_value_info(n, self.symbolic.dtype(n) or TensorProto.FLOAT, None) for n in names]
        graph = helper.make_graph(nodes, "mask", inputs, outputs, [self._initializers[n] for n in used])
        model = helper.make_model(graph, opset_imports=self.model.opset_import, ir_version=self.model.ir_version)
        if files := external_files(model):
            raise UnsupportedError(
                f"mask {names[0]!r} depends on a constant in {min(files)!r} that is too large to be read"
            )
        # The CPU provider has few bfloat16 kernels, and every bfloat16 number is one of fp32. What is replaced by larger numbers
        # than fp16 holds runs in fp32 as well.
        wide = {int(TensorProto.BFLOAT16), *([int(TensorProto.FLOAT16)] if replaced else [])}
        names_of_wide = {helper.tensor_dtype_to_np_dtype(t).name for t in wide}
        model = widen(model, kinds=wide)
        cut_feeds = {n: a.astype(np.float32) if a.dtype.name in names_of_wide else a for n, a in cut_feeds.items()}
        try:
            results = _execute(model, names, cut_feeds)
        except TimeoutError:
            words = f"the subgraph of mask {names[0]!r} does not end within {_SECONDS:.0f} s"
            raise UnsupportedError(words) from None
        except Exception as error:  # whatever the runtime raises: the mask cannot be confirmed
            raise DoesNotRunError(f"the subgraph of mask {names[0]!r} does not run: {error}", str(error)) from error
        by_name = dict(zip(names, results, strict=True))
        return [by_name[n] for n in tensors]

    def _cut(
        self,
        tensors: list[str],
        feeds: dict[str, np.ndarray],
        sizes: dict[str, int],
        replaced: Mapping[str, np.ndarray],
    ) -> tuple[list[onnx.NodeProto], dict[str, np.ndarray], list[str]]:
        needed: set[str] = set()
        cut_feeds: dict[str, np.ndarray] = {}
        used: list[str] = []
        pending = list(tensors)
        while pending:
            name = pending.pop()
            if not name or name in needed:
                continue
            if name in replaced:
                cut_feeds[name] = replaced[name]
                continue
            needed.add(name)
            node = self.index.producer(name)
            if node is None:
                if name in feeds:
                    cut_feeds[name] = feeds[name]
                elif name in self._initializers:
                    used.append(name)
                else:
                    raise UnsupportedError(f"the mask depends on {name!r}, which is neither input nor initializer")
            elif node.op_type == "Shape":
                value = self.symbolic.value(name)
                elements = None if value is None else value.elements()
                if elements is None:
                    raise UnsupportedError(f"the shape of {node.input[0]!r}, on which the mask depends, is unknown")
                cut_feeds[name] = np.array([evaluate(e, sizes) for e in elements if isinstance(e, Int)], np.int64)
            else:
                pending.extend(node.input)
        indices = sorted({self._node_index[n] for n in needed if n in self._node_index})
        nodes = [self.model.graph.node[i] for i in indices]
        return [n for n in nodes if n.op_type != "Shape"], cut_feeds, used


def _execute(model: onnx.ModelProto, names: list[str], feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    spec = SessionSpec(
        model.SerializeToString(),
        log_severity=4,  # a stored mask is expected to fail beyond its length
        threads=1,
        reference=not has_onnxruntime(),  # with --no-verify it need not be installed
    )
    return create_session(spec, _SECONDS).run(names, feeds, _SECONDS)
