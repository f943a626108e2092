# SPDX-License-Identifier: Apache-2.0
"""Runs the original and the result on prompts and token by token, and measures how much next tokens change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx

from stof.cached_attention.paged.find import reads_pages
from stof.cached_attention.paged.run_inputs import PagedInputMaker
from stof.cached_attention.run_inputs import CacheInputMaker
from stof.errors import ArgumentError, ModelError, VerifyError
from stof.execution.ort_sessions import Sessions
from stof.execution.run_limits import LimitReached
from stof.execution.runtime_faults import RuntimeFault
from stof.execution.session_process import RuntimeFailure, release_sessions
from stof.execution.upcast import TypedAttributes
from stof.execution.widened_sessions import sessions_for
from stof.files import temporary_folder
from stof.graph.index import all_nodes
from stof.options import Options
from stof.prompt_runs.feeds import Feed, make_feed, make_paged_feed, make_prompt_feed
from stof.prompt_runs.limits import prompt_limits
from stof.prompt_runs.page_bounds import BoundsSession, choosing_environment, find_bounds
from stof.prompts.files import PromptSet
from stof.prompts.loss import LOGITS, LossMeter, PromptLoss, bucket_limits
from stof.verification.model_inputs import ModelInputs

_STEPS = 8  # tokens, the last ones of each bucket, that are decoded


def measure_loss(
    source: Path,
    final: onnx.ModelProto,
    inputs: ModelInputs,
    prompts: PromptSet,
    folder: Path,
    options: Options,
    typed_attributes: TypedAttributes | None = None,
) -> PromptLoss:
    """Runs both models on each prompt: as a first prompt, and token by token behind prefixes, each over its own cache.

    Args:
        source: the file of the original, which runs unless ``inputs`` have standard nodes for it.
        final: the model whose outputs change; its external data lies beside the original.
        inputs: draws the inputs besides tokens.
        prompts: what they run on.
        folder: for temporary files.
        options: memory for the runs.
        typed_attributes: string attributes of stof's operators that name element types; if given, half-precision models run in
            fp32.

    Raises:
        ArgumentError: when the model has no input for tokens or no logits, or refuses a prompt.
        VerifyError: when memory does not suffice.
    """
    whole, decoded = LossMeter(), LossMeter()
    kept = [n.name or n.output[0] for n in all_nodes(final.graph.node) if reads_pages(n)]
    if kept and RuntimeFault.NO_PAGED_ATTENTION.is_present():
        raise VerifyError(
            f"the loss on --prompts cannot be measured: {kept[0]!r} stays PagedAttention, of which ONNX Runtime's CPU provider "
            "has no kernel. Nothing was written; leave --prompts out"
        )
    bounds = find_bounds(final)
    try:
        with temporary_folder(folder) as scratch, choosing_environment(bounds):
            limits = prompt_limits(options.verify_memory)
            sessions = sessions_for(Sessions(source.parent.resolve(), scratch, limits), typed_attributes)
            original = BoundsSession(sessions.make(inputs.original or source, optimized=True, library=False))
            result = BoundsSession(sessions.make(final, optimized=True, library=True), bounds)
            _check_logits(original.outputs)
            for i, ids in enumerate(prompts.prompts):
                try:
                    _run_prompt(inputs, (original, result), ids, whole, decoded)
                except RuntimeFailure as error:
                    raise ArgumentError(
                        f"{prompts.source}: a model does not run on prompt {i} of {len(ids)} tokens, with ids "
                        f"from {ids.min()} to {ids.max()}: {error}"
                    ) from error
            del original, result
    except LimitReached as error:
        raise VerifyError(f"the loss could not be measured: {error}") from error
    finally:
        release_sessions()
    return PromptLoss(prompts.source, whole.loss(), decoded.loss() if decoded.prompts else None)


def _run_prompt(
    inputs: ModelInputs,
    models: tuple[BoundsSession, BoundsSession],
    ids: np.ndarray,
    whole: LossMeter,
    decoded: LossMeter,
) -> None:
    """Adds the tokens of one prompt to the meters of whole prompts and of decoding."""
    maker = inputs.maker
    one, other = (_logits(model, make_prompt_feed(maker, ids)) for model in models)
    if isinstance(maker, PagedInputMaker):
        one, other = (x[None] if x.ndim == 2 else x for x in (one, other))  # no axis of sequences
    _check_shapes(one, other, len(ids))
    # Some models give the logits of the last token alone.
    whole.add(one[0], other[0], np.arange(len(ids))[-one.shape[1] :])
    if isinstance(maker, CacheInputMaker | PagedInputMaker):
        _decode(maker, models, ids, decoded)


def check_loss(loss: PromptLoss, changed_by: str, options: Options) -> None:
    """Refuses a loss above ``--max-kl``, of whole prompts or of decoding.

    Args:
        loss: what was measured.
        changed_by: the options that change outputs.
        options: have the bound.

    Raises:
        VerifyError: with both numbers.
    """
    if loss.worst_kl <= options.max_kl or options.force:
        return
    worst = max((x for x in (loss.whole, loss.decoded) if x is not None), key=lambda x: x.kl)
    of = "" if worst is loss.whole else " in decoding"
    ways = [
        words
        for words, is_given in (
            ("a denser pattern or a smaller threshold", options.sparsify),
            ("more neurons", options.sparse_mlp),
            ("a smaller --max-error", bool(options.precisions) and options.plan is None),
            (
                "a plan with fewer entries in attention_precision, gemm_precision or mlp_precision",
                bool(options.precisions) and options.plan is not None,
            ),
        )
        if is_given
    ]
    raise VerifyError(
        f"{changed_by} changes outputs too much: KL divergence {worst.kl:.4g}{of} on {loss.source}, --max-kl allows "
        f"{options.max_kl:g}; next-token agreement is {100 * worst.agreement:.2f} %. Nothing was written; choose "
        f"{' or '.join(ways)}, raise --max-kl, or write it anyway with --force"
    )


def _decode(
    maker: CacheInputMaker | PagedInputMaker, models: Sequence[BoundsSession], ids: np.ndarray, meter: LossMeter
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
                    feed = {**make_paged_feed(maker, ids[a:b], a, len(ids)), **pasts}
                else:
                    feed = {**make_feed(maker, ids[a:b], case, before=a, known=pasts), **pasts}
                logits, *presents = model.run([LOGITS, *caches.values()], feed, is_next=a > 0)
                pasts = dict(zip(caches, presents, strict=True))
                if a:
                    own.append(np.asarray(logits).reshape(-1, np.shape(logits)[-1])[-1:])
    if positions:
        one, other = (np.concatenate(x) for x in found)
        meter.add(one, other, np.array(positions))


def _check_logits(outputs: Sequence[str]) -> None:
    if LOGITS not in outputs:
        raise ArgumentError(
            f"--prompts needs a model with output {LOGITS!r}, which this one has not: {', '.join(outputs[:4])}"
        )


def _logits(model: BoundsSession, feed: Feed) -> np.ndarray:
    return np.asarray(model.run([LOGITS], feed)[0])


def _check_shapes(one: np.ndarray, other: np.ndarray, count: int) -> None:
    if one.ndim != 3 or one.shape != other.shape or one.shape[1] not in (1, count):
        raise ModelError(
            f"output {LOGITS!r} is {list(one.shape)} for a prompt of {count} tokens, expected [1, {count}, V] or [1, 1, V]"
        )
