# SPDX-License-Identifier: Apache-2.0
"""Runs the original and the sparsified model on prompts and token by token, and measures how much next tokens change."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import onnx

from stof.cached_attention.paged.find import reads_pages
from stof.cached_attention.paged.run_inputs import PagedInputMaker
from stof.cached_attention.run_inputs import CacheInputMaker
from stof.errors import ArgumentError, ModelError, VerifyError
from stof.execution.case import Case, Padding
from stof.execution.inputs import InputMaker
from stof.execution.ort_sessions import Sessions, VerifiedSession
from stof.execution.run_limits import LimitReached, RunLimits
from stof.execution.session_process import RuntimeFailure, release_sessions
from stof.files import temporary_folder
from stof.graph.index import all_nodes
from stof.options import Options
from stof.sparsify.loss import LossMeter, bucket_limits
from stof.sparsify.prompts import TOKENS
from stof.sparsify.report import Loss, SparsityReport
from stof.verification.model_inputs import ModelInputs

_SECONDS = 86400.0  # prompts take as long as they take
_LOGITS, _POSITIONS = "logits", "position_ids"
_STEPS = 8  # tokens, the last ones of each bucket, that are decoded
Feed = dict[str, np.ndarray]


def measure_loss(
    source: Path,
    final: onnx.ModelProto,
    inputs: ModelInputs,
    prompts: Sequence[np.ndarray],
    folder: Path,
    options: Options,
) -> tuple[Loss, Loss | None]:
    """Runs both models on each prompt: as a first prompt, and token by token behind prefixes, each over its own cache.

    Args:
        source: the file of the original, which runs unless ``inputs`` have standard nodes for it.
        final: the sparsified model; its external data lies beside the original.
        inputs: draws the inputs besides tokens.
        prompts: token ids of each.
        folder: for temporary files.
        options: memory for the runs.

    Returns:
        The loss of whole prompts, and that of decoding; None where the model has no cache, or all prompts have one token.

    Raises:
        ArgumentError: when the model has no input for tokens or no logits, or refuses a prompt.
        VerifyError: when memory does not suffice.
    """
    whole, decoded = LossMeter(), LossMeter()
    maker = inputs.maker
    if kept := [n.name or n.output[0] for n in all_nodes(final.graph.node) if reads_pages(n)]:
        raise VerifyError(
            f"the loss on --prompts cannot be measured: {kept[0]!r} stays PagedAttention, of which ONNX Runtime's CPU provider "
            "has no kernel. Nothing was written; leave --prompts out"
        )
    try:
        with temporary_folder(folder) as scratch:
            limits = RunLimits(_SECONDS, options.verify_memory)
            sessions = Sessions(source.parent.resolve(), scratch, limits)
            original = sessions.make(inputs.original or source, optimized=True, library=False)
            result = sessions.make(final, optimized=True, library=True)
            _check_logits(original.outputs)
            for i, ids in enumerate(prompts):
                try:
                    feed = (
                        _paged_feed(maker, ids, 0, len(ids))
                        if isinstance(maker, PagedInputMaker)
                        else _feed(maker, ids)
                    )
                    one, other = (_logits(s, feed) for s in (original, result))
                    if isinstance(maker, PagedInputMaker):  # has no axis of sequences
                        one, other = (x[None] if x.ndim == 2 else x for x in (one, other))
                    _check_shapes(one, other, len(ids))
                    # Some models give the logits of the last token alone.
                    whole.add(one[0], other[0], np.arange(len(ids))[-one.shape[1] :])
                    if isinstance(maker, CacheInputMaker | PagedInputMaker):
                        _decode(maker, (original, result), ids, decoded)
                except RuntimeFailure as error:
                    raise ArgumentError(
                        f"--prompts {options.prompts}: a model does not run on prompt {i} of {len(ids)} tokens, with ids "
                        f"from {ids.min()} to {ids.max()}: {error}"
                    ) from error
            del original, result
    except LimitReached as error:
        raise VerifyError(f"the loss could not be measured: {error}") from error
    finally:
        release_sessions()
    return whole.loss(), decoded.loss() if decoded.prompts else None


def check_loss(report: SparsityReport, options: Options) -> None:
    """Refuses a loss above ``--max-kl``, of whole prompts or of decoding.

    Raises:
        VerifyError: with both numbers.
    """
    losses = [x for x in (report.loss, report.decode_loss) if x is not None]
    worst = max(losses, key=lambda loss: loss.kl)
    if worst.kl <= options.max_kl or options.force:
        return
    of = "" if worst is report.loss else " in decoding"
    raise VerifyError(
        f"--sparsify changes outputs too much: KL divergence {worst.kl:.4g}{of} on {options.prompts}, --max-kl allows "
        f"{options.max_kl:g}; next-token agreement is {100 * worst.agreement:.2f} %. Nothing was written; choose a denser "
        "pattern, raise --max-kl, or write it anyway with --force"
    )


def _decode(
    maker: CacheInputMaker | PagedInputMaker, models: Sequence[VerifiedSession], ids: np.ndarray, meter: LossMeter
) -> None:
    """Adds single tokens of a prompt, the last ones of each bucket; nothing where the model takes no such steps."""
    caches = maker.caches()
    positions: list[int] = []
    found: list[list[np.ndarray]] = [[] for _ in models]
    for start, limit in bucket_limits(len(ids)) if caches else ():
        end = min(limit, len(ids))
        first = max(start, end - _STEPS, 1)
        spans = [(0, first), *((t, t + 1) for t in range(first, end))]
        cases = [maker.case_of_step(b - a, b, len(ids)) for a, b in spans]
        if first >= end or any(c is None for c in cases):
            continue
        positions += range(first, end)
        for model, own in zip(models, found, strict=True):
            pasts: Feed = {}
            for (a, b), case in zip(spans, cases, strict=True):
                assert case is not None
                if isinstance(maker, PagedInputMaker):
                    feed = {**_paged_feed(maker, ids[a:b], a, len(ids)), **pasts}
                else:
                    feed = {**_feed(maker, ids[a:b], case, before=a, known=pasts), **pasts}
                logits, *presents = model.run([_LOGITS, *caches.values()], feed)
                pasts = dict(zip(caches, presents, strict=True))
                if a:
                    own.append(np.asarray(logits).reshape(-1, np.shape(logits)[-1])[-1:])
    if positions:
        one, other = (np.concatenate(x) for x in found)
        meter.add(one, other, np.array(positions))


def _check_logits(outputs: Sequence[str]) -> None:
    if _LOGITS not in outputs:
        raise ArgumentError(
            f"--prompts needs a model with output {_LOGITS!r}, which this one has not: {', '.join(outputs[:4])}"
        )


def _logits(model: VerifiedSession, feed: Feed) -> np.ndarray:
    return np.asarray(model.run([_LOGITS], feed)[0])


def _check_shapes(one: np.ndarray, other: np.ndarray, count: int) -> None:
    if one.ndim != 3 or one.shape != other.shape or one.shape[1] not in (1, count):
        raise ModelError(
            f"output {_LOGITS!r} is {list(one.shape)} for a prompt of {count} tokens, expected [1, {count}, V] or [1, 1, V]"
        )


def _feed(
    maker: InputMaker, ids: np.ndarray, case: Case | None = None, before: int = 0, known: Collection[str] = ()
) -> Feed:
    """The inputs of tokens that so many others come before; those that are known need not be drawn."""
    case = case or Case(1, len(ids), Padding.NONE)
    needed = {v.name for v in maker.inputs}.difference(known)
    feed = maker.draw(case, np.random.default_rng(0), needed)
    if known and isinstance(maker, CacheInputMaker) and not maker.knows_lengths(feed):  # they follow from caches
        feed = maker.draw(case, np.random.default_rng(0))
    return _with_tokens(feed, ids, before, "[B, S]", {2})


def _paged_feed(maker: PagedInputMaker, ids: np.ndarray, before: int, rows: int) -> Feed:
    """The inputs of tokens of one sequence over pages, in which it has so many rows at least.

    Raises:
        ArgumentError: when the model takes no such step.
    """
    case = maker.case_of_step(len(ids), before + len(ids), rows)
    feed = None if case is None else maker.draw_step(case, np.random.default_rng(0))
    if feed is None:
        raise ArgumentError(
            f"--prompts: the model takes no step of {len(ids)} tokens of one sequence behind {before} keys: its sizes or "
            "rotary tables rule it out, or no inputs state lengths and blocks"
        )
    return _with_tokens(feed, ids, before, "[N] or [1, N]", {1, 2})


def _with_tokens(feed: Feed, ids: np.ndarray, before: int, shapes: str, ranks: Collection[int]) -> Feed:
    """The inputs with tokens and their positions."""
    tokens = feed.get(TOKENS)
    if tokens is None or tokens.dtype.kind != "i" or tokens.ndim not in ranks:
        raise ArgumentError(f"--prompts needs a model with integer input {TOKENS!r} {shapes}, which this one has not")
    if tokens.shape not in ((1, len(ids)), (len(ids),)):
        raise ArgumentError(
            f"--prompts: a prompt has {len(ids)} tokens, the model's {TOKENS!r} is {list(tokens.shape)}"
        )
    feed[TOKENS] = ids.reshape(tokens.shape).astype(tokens.dtype)
    positions = feed.get(_POSITIONS)
    if positions is not None and positions.dtype.kind == "i" and positions.shape == tokens.shape:
        feed[_POSITIONS] = (before + np.arange(len(ids))).reshape(tokens.shape).astype(positions.dtype)
    return feed
