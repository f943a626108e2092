# SPDX-License-Identifier: Apache-2.0
"""Runs of a model on prompts that give what enters its MLPs and their activated neurons, for a bounded number of tokens."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from stof.errors import ArgumentError
from stof.execution.inputs import InputMaker
from stof.execution.ort_sessions import Sessions, VerifiedSession
from stof.execution.run_limits import LimitReached
from stof.execution.session_process import RuntimeFailure, release_sessions
from stof.graph.protobuf import copy_model
from stof.prompt_runs.feeds import make_feed
from stof.prompt_runs.limits import prompt_limits
from stof.prompts.files import PromptSet
from stof.sparse_mlp.calibration.spec import OPTION
from stof.sparse_mlp.site import MlpSite

_LONGEST = 2048  # tokens of a prompt that run
_GROUP_BYTES = 1 << 30  # of samples that are held at once
_ROWS = "stof_rows"
_PREFIX = "stof_samples_of/"
_ACTIVATED, _INPUT = "activated", "input"


@dataclass(frozen=True, eq=False)
class SiteSamples:
    """What one MLP gets and computes for some tokens, in fp32.

    Attributes:
        activated: neurons behind the activation, [T, F].
        inputs: tokens [T, K]; None where the site has no matmul of them.
    """

    activated: np.ndarray
    inputs: np.ndarray | None


class ActivationRuns:
    """Samples of the MLPs of a model.

    Each prompt runs whole, or its first 2048 tokens. Of all prompts a number of tokens is kept, spread evenly. The samples of all
    MLPs may be more than memory holds: they are made for some of them at a time, by further runs of the prompts.

    Args:
        model: that the sites were found in; its external data lies in ``folder``.
        folder: of the external data.
        maker: draws the inputs besides tokens.
        memory: bytes for the runs; 0: half of what is free.
    """

    def __init__(self, model: onnx.ModelProto, folder: Path, maker: InputMaker, memory: int) -> None:
        self._model, self._folder, self._maker, self._memory = model, folder, maker, memory

    def samples(
        self, sites: Sequence[MlpSite], prompts: Sequence[PromptSet], tokens: Sequence[int]
    ) -> Iterator[tuple[MlpSite, list[SiteSamples]]]:
        """Samples of each site, of each set of prompts.

        Args:
            sites: the sites.
            prompts: sets of prompts.
            tokens: how many of each set are kept.

        Raises:
            ArgumentError: when the model has no input for tokens, does not run on a prompt, or memory does not suffice.
        """
        wanted = {
            t: (site.neurons if what == _ACTIVATED else _size_of(site)) for site in sites for what, t in _tensors(site)
        }
        shown = _with_samples(self._model, wanted)
        chosen = [_choose_rows(p, n) for p, n in zip(prompts, tokens, strict=True)]
        total = sum(len(rows) for each in chosen for rows in each)
        try:
            with tempfile.TemporaryDirectory(prefix="stof-") as scratch:
                limits = prompt_limits(self._memory)
                session = Sessions(self._folder, Path(scratch), limits).make(shown, optimized=True, library=True)
                for group in _groups(sites, total):
                    yield from self._run(session, group, prompts, chosen)
                del session
        except LimitReached as error:
            raise ArgumentError(f"{OPTION}: calibration was ended: {error}") from error
        finally:
            release_sessions()

    def _run(
        self,
        session: VerifiedSession,
        sites: Sequence[MlpSite],
        prompts: Sequence[PromptSet],
        chosen: Sequence[Sequence[np.ndarray]],
    ) -> Iterator[tuple[MlpSite, list[SiteSamples]]]:
        names = list(dict.fromkeys(t for site in sites for _, t in _tensors(site)))
        samples: list[dict[str, np.ndarray]] = []
        for each, rows_of in zip(prompts, chosen, strict=True):
            pieces: dict[str, list[np.ndarray]] = {n: [] for n in names}
            for i, (ids, rows) in enumerate(zip(each.prompts, rows_of, strict=True)):
                if len(rows):
                    for name, array in zip(names, self._run_prompt(session, each, i, ids, rows, names), strict=True):
                        pieces[name].append(array)
            samples.append({name: np.concatenate(arrays) for name, arrays in pieces.items()})
            del pieces
        for site in sites:
            tensors = dict(_tensors(site))
            yield (
                site,
                [
                    SiteSamples(x[tensors[_ACTIVATED]], x[tensors[_INPUT]] if _INPUT in tensors else None)
                    for x in samples
                ],
            )

    def _run_prompt(
        self, session: VerifiedSession, prompts: PromptSet, i: int, ids: np.ndarray, rows: np.ndarray, names: list[str]
    ) -> list[np.ndarray]:
        ids = ids[:_LONGEST]
        feed = {**make_feed(self._maker, ids, option=OPTION), _ROWS: rows}
        try:
            return [np.asarray(x) for x in session.run([_PREFIX + n for n in names], feed)]
        except RuntimeFailure as error:
            raise ArgumentError(
                f"{prompts.source}: the model does not run on prompt {i} of {len(ids)} tokens, with ids from {ids.min()} to "
                f"{ids.max()}: {error}"
            ) from error


def _tensors(site: MlpSite) -> list[tuple[str, str]]:
    """The tensors of a site that are sampled, by what they are."""
    tokens = site.gate_input or site.input
    return [(_ACTIVATED, site.activated), *([(_INPUT, tokens)] if tokens else [])]


def _size_of(site: MlpSite) -> int:
    """The size of a token, where the site has a matmul of them."""
    if site.gate_weight is not None:
        return site.gate_weight.inner
    return site.up.inner if site.up is not None else 0


def _with_samples(model: onnx.ModelProto, wanted: dict[str, int]) -> onnx.ModelProto:
    """A copy that gives the chosen rows of tensors [..., size] in fp32; an input has the rows' numbers.

    A tensor may have fewer rows than the prompt has tokens: an MLP may read the last token alone. Numbers beyond the last row
    start again at the first one.
    """
    sampled = copy_model(model)
    graph = sampled.graph
    graph.input.append(helper.make_tensor_value_info(_ROWS, TensorProto.INT64, ["stof_row_count"]))
    one = "stof_one"
    graph.initializer.append(helper.make_tensor(one, TensorProto.INT64, [1], [1]))
    for tensor, size in wanted.items():
        shape, flat, rows, name = (f"stof_{what}_of/{tensor}" for what in ("shape", "flat", "rows", "samples"))
        sizes, count, least, numbers = (f"stof_{what}_of/{tensor}" for what in ("sizes", "count", "least", "numbers"))
        graph.initializer.append(helper.make_tensor(shape, TensorProto.INT64, [2], [-1, size]))
        graph.initializer.append(helper.make_tensor(f"{sizes}/parts", TensorProto.INT64, [2], [1, 1]))
        add = graph.node.append
        add(helper.make_node("Reshape", [tensor, shape], [flat], name=flat))
        add(helper.make_node("Shape", [flat], [sizes], name=sizes))
        add(helper.make_node("Split", [sizes, f"{sizes}/parts"], [count, f"{count}/other"], name=count, axis=0))
        add(helper.make_node("Max", [count, one], [least], name=least))  # no division by 0
        add(helper.make_node("Mod", [_ROWS, least], [numbers], name=numbers))
        add(helper.make_node("Gather", [flat, numbers], [rows], name=rows, axis=0))
        add(helper.make_node("Cast", [rows], [name], name=name, to=TensorProto.FLOAT))
        graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    return sampled


def _choose_rows(prompts: PromptSet, tokens: int) -> list[np.ndarray]:
    """Which tokens of each prompt are kept, int64, so many of all prompts; all of them where they are fewer."""
    lengths = [min(len(ids), _LONGEST) for ids in prompts.prompts]
    ends = np.cumsum([0, *lengths])
    kept = np.unique(np.linspace(0, ends[-1] - 1, min(tokens, int(ends[-1]))).astype(np.int64))
    return [kept[(kept >= a) & (kept < b)] - a for a, b in pairwise(ends)]


def _groups(sites: Sequence[MlpSite], tokens: int) -> Iterator[list[MlpSite]]:
    """Sites whose samples are held at once."""
    group: list[MlpSite] = []
    held = 0
    for site in sites:
        needed = 4 * tokens * (site.neurons + _size_of(site))
        if group and held + needed > _GROUP_BYTES:
            yield group
            group, held = [], 0
        group.append(site)
        held += needed
    if group:
        yield group
