# SPDX-License-Identifier: Apache-2.0
"""Inputs of a model that hold the tokens of a prompt."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from stof.cached_attention.paged.run_inputs import PagedInputMaker
from stof.cached_attention.run_inputs import CacheInputMaker
from stof.errors import ArgumentError
from stof.execution.case import Case, Padding
from stof.execution.inputs import InputMaker
from stof.prompts.files import TOKENS

_POSITIONS = "position_ids"
_OF_SINGLE_SEQUENCES = {"attention_mask": 1, "token_type_ids": 0}  # what they hold without padding
Feed = dict[str, np.ndarray]


def make_feed(
    maker: InputMaker,
    ids: np.ndarray,
    case: Case | None = None,
    before: int = 0,
    known: Collection[str] = (),
    option: str = "--prompts",
) -> Feed:
    """The inputs of the tokens of one sequence.

    Args:
        maker: draws the inputs besides tokens.
        ids: token ids [S].
        case: sizes of the inputs; None: a prompt without a past.
        before: how many tokens come before these.
        known: inputs that the caller has, which need not be drawn.
        option: that names the prompts, for messages.

    Raises:
        ArgumentError: when the model has no input for tokens, or one of another size.
    """
    case = case or Case(1, len(ids), Padding.NONE, _without_past(maker))
    needed = {v.name for v in maker.inputs}.difference(known)
    feed = maker.draw(case, np.random.default_rng(0), needed)
    if known and isinstance(maker, CacheInputMaker) and not maker.knows_lengths(feed):  # they follow from caches
        feed = maker.draw(case, np.random.default_rng(0))
    feed = _with_tokens(feed, ids, before, "[B, S]", {2}, option)
    if not isinstance(maker, CacheInputMaker):
        for name, value in _OF_SINGLE_SEQUENCES.items():
            if name in feed and feed[name].ndim == 2:
                feed[name] = np.full_like(feed[name], value)
    return feed


def make_prompt_feed(maker: InputMaker, ids: np.ndarray) -> Feed:
    """The inputs of a whole prompt [S] without a past, over pages where the model has them.

    Raises:
        ArgumentError: as of :func:`make_feed` and :func:`make_paged_feed`.
    """
    if isinstance(maker, PagedInputMaker):
        return make_paged_feed(maker, ids, 0, len(ids))
    return make_feed(maker, ids)


def make_paged_feed(maker: PagedInputMaker, ids: np.ndarray, before: int, rows: int, option: str = "--prompts") -> Feed:
    """The inputs of the tokens of one sequence over pages.

    Args:
        maker: draws the inputs besides tokens.
        ids: token ids [N].
        before: how many tokens come before these.
        rows: that the blocks of the sequence have at least, the same in all of its steps.
        option: that names the prompts, for messages.

    Raises:
        ArgumentError: when the model takes no such step, or has no input for tokens.
    """
    case = maker.case_of_step(len(ids), before + len(ids), rows)
    feed = None if case is None else maker.draw_step(case, np.random.default_rng(0))
    if feed is None:
        raise ArgumentError(
            f"{option}: the model takes no step of {len(ids)} tokens of one sequence behind {before} keys: its sizes or "
            "rotary tables rule it out, or no inputs state lengths and blocks"
        )
    return _with_tokens(feed, ids, before, "[N] or [1, N]", {1, 2}, option)


def _with_tokens(feed: Feed, ids: np.ndarray, before: int, shapes: str, ranks: Collection[int], option: str) -> Feed:
    """The inputs with tokens and their positions."""
    tokens = feed.get(TOKENS)
    if tokens is None or tokens.dtype.kind != "i" or tokens.ndim not in ranks:
        raise ArgumentError(f"{option} needs a model with integer input {TOKENS!r} {shapes}, which this one has not")
    if tokens.shape not in ((1, len(ids)), (len(ids),)):
        raise ArgumentError(f"{option}: a prompt has {len(ids)} tokens, the model's {TOKENS!r} is {list(tokens.shape)}")
    feed[TOKENS] = ids.reshape(tokens.shape).astype(tokens.dtype)
    positions = feed.get(_POSITIONS)
    if positions is not None and positions.dtype.kind == "i" and positions.shape == tokens.shape:
        feed[_POSITIONS] = (before + np.arange(len(ids))).reshape(tokens.shape).astype(positions.dtype)
    return feed


def _without_past(maker: InputMaker) -> tuple[tuple[str, int], ...]:
    """Sizes of 0 for the dimensions of pasts that the model continues by Concat."""
    if isinstance(maker, CacheInputMaker):
        return ()
    given, outputs = {i.name for i in maker.inputs}, {o.name for o in maker.model.graph.output}
    names: dict[str, int] = {}
    for node in maker.model.graph.node:
        if node.op_type != "Concat" or not outputs.intersection(node.output):
            continue
        axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
        for name in given.intersection(node.input):
            shape = maker.symbolic.shape(name) or ()
            size = shape[axis].atom if -len(shape) <= axis < len(shape) else None
            if size is not None and size.kind == "size":
                names[str(size.args[0])] = 0
    of_tokens = {str(d) for d in maker.symbolic.shape(TOKENS) or ()}
    return tuple((n, size) for n, size in names.items() if n not in of_tokens)
