# SPDX-License-Identifier: Apache-2.0
"""Inputs of a whole model, drawn as verification and ``--time`` draw them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx

from stof.errors import ArgumentError, ModelError, UnsupportedError
from stof.execution.case import Case
from stof.execution.given_inputs import GivenFeed, InputSource, read_given_inputs
from stof.execution.ort_sessions import file_session
from stof.execution.session_process import RuntimeFailure, Session, release_sessions
from stof.graph.load_save import load_with_opset
from stof.op_rewrite import Job
from stof.ops import OPS
from stof.options import Options
from stof.recursion import deep_recursion
from stof.runtime.library import build_info
from stof.selection import select
from stof.stages import find_model_inputs, rewrite
from stof.symbolic.algebra.sizes import evaluate
from stof.verification.input_labels import describe_feeds
from stof.verification.model_inputs import ModelInputs
from stof.verification.timed_cases import NotTimedError, Shapes, case_of, choose_cases

_SECONDS = 120.0  # of all runs for which lengths are chosen
_RUNS = 20  # of both models at each length
_LONGEST = 600.0  # seconds that the first run of the original may take


@dataclass(frozen=True)
class TimedFeeds:
    """One set of inputs.

    Attributes:
        words: their sizes by name.
        batch: rows.
        length: what was asked for; keys of the attention where nothing was.
        scores: queries and keys of the largest scores.
        feeds: the arrays by name.
        is_token: one token behind a past, rather than a prompt.
        case: the sizes.
    """

    words: str
    batch: int
    length: int
    scores: tuple[int, int]
    feeds: Mapping[str, np.ndarray]
    is_token: bool
    case: Case


class ModelFeeds:
    """Draws inputs of a model file.

    Args:
        path: the original.
        shapes: the least and the largest size in use of dimensions, by name.
        inputs: sets of inputs of the user's.

    Raises:
        ArgumentError: for dimensions that no input has, and inputs that do not fit.

    Attributes:
        inputs: how they are drawn.
        user_inputs: the user's sets.
    """

    def __init__(self, path: Path, shapes: Shapes, inputs: InputSource = ()) -> None:
        self.path = path
        self.shapes = dict(shapes)
        with deep_recursion():
            self.model, _ = load_with_opset(path)
            self.user_inputs = read_given_inputs(inputs, self.model)
            self.inputs = _find_model_inputs(path, self.model, self.shapes)

    def draw(self, lengths: Sequence[int] | None, batch: int | None) -> list[TimedFeeds]:
        """Inputs on which the original runs: the user's sets, or a prompt of each length and one token behind as many others.

        Args:
            lengths: those of dimensions that are lengths; None: up to three for which time and memory suffice.
            batch: of dimensions that count rows of a batch; None: 1, or what ``shapes`` says.

        Raises:
            ArgumentError: when the original does not run on inputs, or memory suffices for no length.
            ModelError: when ONNX Runtime's CPU provider cannot load it.
        """
        if self.user_inputs:
            return [self._take_given(feed) for feed in self.user_inputs]
        maker, shapes = self.inputs.maker, dict(self.shapes)
        if batch is not None:
            shapes = {**dict.fromkeys(maker.dimensions.batch_names, (batch, batch)), **shapes}
        if lengths is None:
            try:
                chosen = choose_cases(maker, shapes, self.path.stat().st_size, _SECONDS, _RUNS)
            except NotTimedError as error:
                raise ArgumentError(f"{self.path}: {error}; name shorter ones with --lengths") from error
        else:
            chosen = [case_of(maker, shapes, length) for length in lengths]
        feeds: dict[object, TimedFeeds] = {}
        for timed in chosen:
            length = timed.length if lengths is not None else timed.keys
            prompt = self._draw(timed.case, length, is_token=False)
            # Where all sizes are fixed, another length changes nothing.
            feeds.setdefault(_shapes_of(prompt.feeds), prompt)
            case = maker.token_case(length) if lengths is not None or timed is chosen[-1] else None
            if case is not None:
                token = self._draw(self._with_batch(case, shapes), length, is_token=True)
                feeds.setdefault(_shapes_of(token.feeds), token)
        return list(feeds.values())

    def _with_batch(self, case: Case, shapes: Shapes) -> Case:
        names = self.inputs.maker.dimensions.batch_names
        rows = {n: high for n, (_, high) in shapes.items() if n in names}
        return replace(case, other=tuple({**dict(case.other), **rows}.items()))

    def _take_given(self, feed: GivenFeed) -> TimedFeeds:
        (case,) = [c for c in replace(self.inputs, user_feeds=(feed,)).select_cases(0.0) if c.source]
        self._check_run(feed)
        words = f"{feed.label}: {describe_feeds(self.model.graph.input, feed.arrays)}"
        return TimedFeeds(words, case.batch, case.length, self._find_scores(case), feed.arrays, False, case)

    def _find_scores(self, case: Case) -> tuple[int, int]:
        """Queries and keys of the largest scores at a case."""
        scores = [(0, (case.length, case.length))]
        sizes = self.inputs.maker.sizes(case)
        for shape in self.inputs.maker.dimensions.scores:
            with suppress(KeyError, UnsupportedError, ZeroDivisionError):
                dims = [evaluate(d, sizes) for d in shape]
                if len(dims) > 1:
                    scores.append((math.prod(dims), (dims[-2], dims[-1])))
        return max(scores)[1]

    def _load(self) -> Session:
        """The original in a process of its own, which may end without harm."""
        try:
            return file_session(self.path.absolute(), library=False, seconds=_LONGEST)
        except RuntimeFailure as error:
            raise ModelError(
                f"{self.path} cannot be timed, because ONNX Runtime's CPU provider cannot load it: {error}"
            ) from error

    def _check_run(self, feed: GivenFeed) -> None:
        session = self._load()
        try:
            session.run(None, feed.arrays, _LONGEST)
        except RuntimeFailure as error:
            raise ArgumentError(f"inputs {feed.label}: the model does not run on them: {error}") from error
        finally:
            del session
            release_sessions()

    def _draw(self, case: Case, length: int, *, is_token: bool) -> TimedFeeds:
        """Inputs of a case, drawn otherwise as long as the original refuses them."""
        session = self._load()
        try:
            while True:
                feeds = self.inputs.maker.draw(case, np.random.default_rng(0))
                words = describe_feeds(self.model.graph.input, feeds)
                try:
                    session.run(None, feeds, _LONGEST)
                    break
                except RuntimeFailure as error:
                    if not self.inputs.narrow(self.model, str(error), case, feeds):
                        raise ArgumentError(
                            f"{self.path} does not run on the inputs that were drawn ({words}): {error}. Give inputs that it "
                            "runs on with --inputs FILE, or other sizes with --lengths and --shape"
                        ) from error
                    case = self.inputs.restate(case)
                    session = session if session.is_alive else self._load()
        except TimeoutError:
            raise ArgumentError(
                f"one run of {self.path} takes more than {_LONGEST:.0f} s ({words}); ask for shorter ones with --lengths"
            ) from None
        finally:
            del session
            release_sessions()
        sizes = self.inputs.maker.sizes(case)
        batch = max([case.batch, *(sizes[n] for n in self.inputs.maker.dimensions.batch_names if n in sizes)])
        return TimedFeeds(words, batch, length, self._find_scores(case), feeds, is_token, case)


def draw_static_feeds(path: Path) -> dict[str, np.ndarray]:
    """Inputs of a file whose sizes are all fixed; nothing is run."""
    with deep_recursion():
        model, _ = load_with_opset(path)
        maker = _find_model_inputs(path, model, {}).maker
    return maker.draw(maker.prompt_case(1), np.random.default_rng(0))


def _find_model_inputs(path: Path, model: onnx.ModelProto, shapes: dict[str, tuple[int, int]]) -> ModelInputs:
    """How inputs are drawn, by the first op that knows what they mean."""
    options = Options(shapes=shapes, chains="off")
    selections = dict(zip((op.key for op in OPS), select(options, [op.names for op in OPS]), strict=True))
    job = Job(options, path, model, build_info(), None, lambda _: nullcontext(), selections)
    return find_model_inputs(job, rewrite(job, OPS))


def _shapes_of(feeds: Mapping[str, np.ndarray]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, array.shape) for name, array in sorted(feeds.items()))
