# SPDX-License-Identifier: Apache-2.0
"""The models of one verification: the original, its working copy and the optimized model, in the types they are run in."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import helper

from stof.execution.case import Case, Counts
from stof.execution.ort_sessions import Sessions, VerifiedSession
from stof.execution.run_failure import parse_failure
from stof.execution.run_limits import LimitReached
from stof.execution.session_process import RuntimeFailure
from stof.execution.upcast import BF16, HALF, Twins, holds, widen_feeds
from stof.symbolic import Symbolic
from stof.verification.perturb import Noisy
from stof.verification.quantization import quantizer_noise
from stof.verification.result import Comparison, Verification

if TYPE_CHECKING:
    from stof.verification.verifier import Verifier

_FLOOR = 1e-6  # of an output's range, what is allowed anyway
# For half-precision models, which run widened: fp16 scores stand beside 1024 there (see upcast.py).
_WIDENED_FLOORS = {int(onnx.TensorProto.FLOAT16): 2e-4, int(onnx.TensorProto.BFLOAT16): 1e-5}
_WIDENED_FLOOR = 1e-5  # where sites are of no such type
_SINGLE = int(onnx.TensorProto.FLOAT)
_MOST_CONSTANT = 16  # elements of a half-precision constant that is kept as it is
_REFUSED_BY = 0.1  # of the time that is left: what has run so long is not refused


class VerifiedModels:
    """What is run of the original and of the optimized model.

    Args:
        verifier: has the original, and draws inputs; its cases become those that the original runs on.
        source: the file that the original was read from.
        final: the optimized model.
        scratch: a folder to write into.
        result: gets what is found out.

    Attributes:
        sessions: runs them.
        feeds: the inputs of each case.
        reference: the original; where the runtime refuses its fused nodes, its working copy.
        probed: the original's working copy.
        final: the optimized model.
        floor: what is allowed of an output's range.
    """

    def __init__(
        self, verifier: Verifier, source: Path, final: onnx.ModelProto, scratch: Path, result: Verification
    ) -> None:
        self._verifier = verifier
        self._source: Path | None = source  # while the file is what is run of the original
        self._twins: Twins | None = None
        self._unwidened: tuple[Path | onnx.ModelProto, onnx.ModelProto] | None = None
        self.sessions = Sessions(source.parent.resolve(), scratch, verifier.limits, lean=verifier.is_tight)
        verifier.limits.check_time()
        self.feeds = verifier.inputs.draw(verifier.cases)
        self.reference, self.final, self.floor = verifier.sliced or verifier.original, final, _FLOOR
        if verifier.sliced is not None or not verifier.is_from_file or verifier.unread:
            self._source = None
        if self._is_half():
            result.widened = True
            self._unwidened = self._source or verifier.original, final
            self._widen(scratch)
        is_original = verifier.inputs.working is verifier.original
        self.probed = self.reference if is_original else self.twin(verifier.inputs.working)
        if self.probed is not self.reference and not self._runs_redrawn():
            self._run_otherwise(result)

    def twin(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """A model in the types in which it is run."""
        return model if self._twins is None else self._twins.of(model)

    def widen_feed(self, feed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Inputs in the types in which models are run."""
        if self._twins is None:
            return dict(feed)
        return widen_feeds(feed)

    def widen_noise(self, noisy: Noisy) -> Noisy:
        """Noise in the type in which models are run."""
        return noisy if self._twins is None else replace(noisy, dtype=_SINGLE)

    def site_noise(self, captured: Mapping[str, np.ndarray]) -> dict[str, Noisy]:
        """What ops and the nodes that they replace may differ by at the sites' outputs, by tensor."""
        noise: dict[str, Noisy] = {}
        for sites in self._verifier.sites:
            noise |= sites.checks.rounding_errors(captured)
        return {name: self.widen_noise(noisy) for name, noisy in noise.items()}

    def quantizer_noise(self) -> dict[str, Noisy]:
        """Noise in the last places of what is quantized, by tensor."""
        inputs = self._verifier.inputs
        noise = quantizer_noise(inputs.working, inputs.symbolic)
        return {name: self.widen_noise(noisy) for name, noisy in noise.items()}

    def dtype(self, tensor: str, symbolic: Symbolic | None = None) -> int:
        """A tensor's element type in the models that are run; by default a tensor of the working copy."""
        dtype = (symbolic or self._verifier.inputs.symbolic).dtype(tensor)
        return _SINGLE if self._twins is not None and dtype in HALF else dtype

    def with_outputs(
        self, model: onnx.ModelProto, tensors: Sequence[str], symbolic: Symbolic | None = None
    ) -> onnx.ModelProto:
        """A copy of a model that also gives tensors of known types."""
        extended = onnx.ModelProto()
        extended.CopyFrom(model)
        declared = {o.name for o in extended.graph.output}
        for name in tensors:
            if name not in declared and (dtype := self.dtype(name, symbolic)):
                extended.graph.output.append(helper.make_tensor_value_info(name, dtype, None))
        return extended

    def run_subgraph(
        self, model: onnx.ModelProto, wanted: Sequence[str], feed: Mapping[str, np.ndarray]
    ) -> Mapping[str, np.ndarray]:
        """Runs a subgraph as a model of its own; gives some of its tensors, and the inputs as it got them."""
        widened = self.widen_feed(feed)
        session = self.sessions.make(self.twin(model), optimized=False, library=False)
        return {**widened, **dict(zip(wanted, session.run(list(wanted), widened), strict=True))}

    def original_session(self) -> VerifiedSession:
        """The original with graph optimizations."""
        if self._source is None:
            return self.sessions.make(self.reference, optimized=True, library=False)
        try:
            return self.sessions.make(self._source, optimized=True, library=False)
        except RuntimeFailure:
            # Runtimes refuse files whose axes and sizes are external data; in the model that was loaded, they are not.
            return self.sessions.make(self._verifier.original, optimized=True, library=False)

    def _types(self) -> frozenset[int]:
        return frozenset[int]().union(*(s.checks.types for s in self._verifier.sites))

    def _is_half(self) -> bool:
        has_sites = any(s.checks.sites for s in self._verifier.sites)
        return bool(self._types() & HALF) or holds(self._verifier.original, BF16 if has_sites else HALF)

    def _widen(self, scratch: Path) -> None:
        typed = self._verifier.typed_attributes
        self._twins = Twins(self.sessions.weights, scratch, self._half_constants(), typed)
        self._source = None
        self.floor = max([_WIDENED_FLOORS.get(t, _WIDENED_FLOOR) for t in self._types()], default=_WIDENED_FLOOR)
        self.reference, self.final = self.twin(self.reference), self.twin(self.final)
        self.feeds = [self.widen_feed(f) for f in self.feeds]

    def _half_constants(self) -> dict[str, np.ndarray]:
        inputs = self._verifier.inputs
        return find_half_constants(inputs.working, inputs.symbolic)

    def compare_unwidened(self, case: Case, until: float) -> list[Comparison]:
        """Whether a model that is compared widened runs in its own types where the original does, without comparing numbers.

        Args:
            case: the inputs.
            until: the moment at which the runs have to be over.

        Raises:
            LimitReached: when there is too little time or memory.
        """
        if self._unwidened is None:
            return []
        original, final = self._unwidened
        feed = self._verifier.inputs.draw([case])[0]
        try:
            first = self.sessions.make(original, optimized=True, library=False).run(None, feed, until)
        except RuntimeFailure:  # the CPU provider lacks a kernel; nothing can be told then
            return []
        what = "the optimized model in its own types"
        try:
            second = self.sessions.make(final, optimized=True, library=True).run(None, feed, until)
        except RuntimeFailure as error:
            return [Comparison(what, np.inf, 0.0, False, detail=f"does not run: {error}")]
        same = all((a.dtype, a.shape) == (b.dtype, b.shape) for a, b in zip(first, second, strict=True))
        return [] if same else [Comparison(what, np.inf, 0.0, False, detail="outputs of other types or shapes")]

    def _run_otherwise(self, result: Verification) -> None:
        """Makes a reference that runs of an original that does not: on batches of one row, or with fused nodes expanded."""
        single = [c if c.source else replace(c, batch=1, counts=Counts.USUAL) for c in self._verifier.cases]
        alone = [self.widen_feed(f) for f in self._verifier.inputs.draw(single)]
        if self._runs(self.reference, alone[0]):  # some fused nodes take a past with one row only
            self._verifier.cases, self.feeds = single, alone
        elif self._runs(self.probed, self.feeds[0]):
            result.expanded = True
            self._source, self.reference = None, self.probed

    def _runs_redrawn(self) -> bool:
        """Whether the original runs on the first inputs, which are drawn otherwise where it refuses their numbers."""
        inputs, cases = self._verifier.inputs, self._verifier.cases
        while (error := self._refusal(self.reference, self.feeds[0])) is not None:
            is_of_values = parse_failure(str(error)).is_of_values
            is_narrowed = is_of_values and inputs.narrow(self.reference, str(error), cases[0], self.feeds[0])
            if not is_narrowed and not inputs.shorten(cases[0]):
                return False
            self.redraw()
        return True

    def redraw(self) -> None:
        """Draws all inputs anew, by what is known of them now."""
        inputs, cases = self._verifier.inputs, self._verifier.cases
        cases[:] = [inputs.restate(c) for c in cases]
        self.feeds = [self.widen_feed(f) for f in inputs.draw(cases)]

    def _runs(self, model: onnx.ModelProto, feed: Mapping[str, np.ndarray]) -> bool:
        """Whether the runtime has every node of a model."""
        return self._refusal(model, feed) is None

    def _refusal(self, model: onnx.ModelProto, feed: Mapping[str, np.ndarray]) -> RuntimeFailure | None:
        """What the runtime says about a model or its inputs; None where it runs, or is not refused at once."""
        limits = self._verifier.limits
        try:
            session = self.sessions.make(model, optimized=False, library=False)
            session.run(None, feed, time.monotonic() + _REFUSED_BY * (limits.end - time.monotonic()))
        except RuntimeFailure as error:
            # Runs that are compared search for numbers that do not take too much memory, or too long. Of several batches
            # some may have fewer tokens.
            failure = parse_failure(str(error))
            return None if failure.is_of_memory or failure.is_of_capacity else error
        except LimitReached:
            return None
        return None


def find_half_constants(model: onnx.ModelProto, symbolic: Symbolic) -> dict[str, np.ndarray]:
    """Small half-precision tensors that nodes of a model compute, whatever the inputs are, by name."""
    constants = {}
    for node in model.graph.node:
        for name in node.output:
            array = symbolic.constant(name) if symbolic.dtype(name) in HALF else None
            if array is not None and array.size <= _MOST_CONSTANT:
                constants[name] = array
    return constants
