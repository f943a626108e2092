# SPDX-License-Identifier: Apache-2.0
"""Runs the original and the sparsified model on prompts, and measures by how much next tokens change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx

from stof.errors import ArgumentError, ModelError, VerifyError
from stof.execution.case import Case, Padding
from stof.execution.ort_sessions import Sessions
from stof.execution.run_limits import LimitReached, RunLimits
from stof.execution.session_process import RuntimeFailure, release_sessions
from stof.files import temporary_folder
from stof.options import Options
from stof.sparsify.loss import LossMeter
from stof.sparsify.report import Loss
from stof.verification.model_inputs import ModelInputs

_SECONDS = 86400.0  # prompts take as long as they take
_TOKENS, _LOGITS = "input_ids", "logits"


def measure_loss(
    source: Path,
    final: onnx.ModelProto,
    inputs: ModelInputs,
    prompts: Sequence[np.ndarray],
    folder: Path,
    options: Options,
) -> Loss:
    """Runs both models on each prompt, alone and as a first prompt.

    Args:
        source: the file of the original.
        final: the sparsified model; its external data lies beside the original.
        inputs: draws the inputs besides tokens.
        prompts: token ids of each.
        folder: for temporary files.
        options: memory for the runs.

    Raises:
        ArgumentError: when the model has no input for tokens or no logits, or refuses a prompt.
        VerifyError: when memory does not suffice.
    """
    meter = LossMeter()
    try:
        with temporary_folder(folder) as scratch:
            limits = RunLimits(_SECONDS, options.verify_memory)
            sessions = Sessions(source.parent.resolve(), scratch, limits)
            original = sessions.make(source, optimized=True, library=False)
            result = sessions.make(final, optimized=True, library=True)
            name = _logits_of(original.outputs)
            for i, ids in enumerate(prompts):
                feed = _feed(inputs, ids)
                try:
                    one, other = (np.asarray(s.run([name], feed)[0]) for s in (original, result))
                except RuntimeFailure as error:
                    raise ArgumentError(
                        f"--prompts {options.prompts}: a model does not run on prompt {i} of {len(ids)} tokens: {error}"
                    ) from error
                if one.ndim != 3 or one.shape != other.shape or one.shape[1] not in (1, len(ids)):
                    raise ModelError(
                        f"output {name!r} is {list(one.shape)} for a prompt of {len(ids)} tokens, expected [1, S, V]"
                    )
                # Some models give the logits of the last token alone.
                meter.add(one[0], other[0], np.arange(len(ids))[-one.shape[1] :])
            del original, result
    except LimitReached as error:
        raise VerifyError(f"the loss could not be measured: {error}") from error
    finally:
        release_sessions()
    return meter.loss()


def check_loss(loss: Loss, options: Options) -> None:
    """Refuses a loss above ``--max-kl``.

    Raises:
        VerifyError: with both numbers.
    """
    if loss.kl <= options.max_kl or options.force:
        return
    raise VerifyError(
        f"--sparsify changes outputs too much: KL divergence {loss.kl:.4g} on {options.prompts}, --max-kl allows "
        f"{options.max_kl:g}; next-token agreement is {100 * loss.agreement:.2f} %. Nothing was written; choose a denser "
        "pattern, raise --max-kl, or write it anyway with --force"
    )


def _logits_of(outputs: Sequence[str]) -> str:
    if _LOGITS not in outputs:
        raise ArgumentError(
            f"--prompts needs a model with output {_LOGITS!r}, which this one has not: {', '.join(outputs[:4])}"
        )
    return _LOGITS


def _feed(inputs: ModelInputs, ids: np.ndarray) -> Mapping[str, np.ndarray]:
    """The inputs of a prompt."""
    feed = inputs.maker.draw(Case(1, len(ids), Padding.NONE), np.random.default_rng(0))
    tokens = feed.get(_TOKENS)
    if tokens is None or tokens.dtype.kind != "i" or tokens.ndim != 2:
        raise ArgumentError(f"--prompts needs a model with integer input {_TOKENS!r} [B, S], which this one has not")
    if tokens.shape != (1, len(ids)):
        raise ArgumentError(
            f"--prompts: a prompt has {len(ids)} tokens, the model's {_TOKENS!r} is {list(tokens.shape)}"
        )
    return {**feed, _TOKENS: ids[None].astype(tokens.dtype)}
