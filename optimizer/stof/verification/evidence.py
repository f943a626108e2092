# SPDX-License-Identifier: Apache-2.0
"""Whether a verification compared enough to say something: else its result must not read as verified."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto

from stof.errors import VerifyError
from stof.graph.external_data import all_tensors, map_array
from stof.verification.result import Comparison, Verification

_MOST_NAMES = 4
_BLOCK = 1 << 20  # elements of a weight that are looked at together
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
_WHAT_TO_DO = (
    "look for NaN in the model's weights, give inputs with finite results by --inputs FILE, or leave verification out with "
    "--no-verify"
)


def check_evidence(
    result: Verification,
    by_case: Sequence[Sequence[Comparison]],
    names: Sequence[str],
    find_weight: Callable[[], str | None],
) -> None:
    """Refuses a verification without a fault that compared nothing, or not one element of some output for NaN in a weight.

    Outputs may be NaN on all inputs without such a weight, by masks of -inf for instance: reports count them as not compared.

    Args:
        result: what was compared.
        by_case: the comparisons of all outputs, case by case.
        names: of the outputs.
        find_weight: gives the name of a weight that holds NaN; called where an output has no compared element.

    Raises:
        VerifyError: names the outputs.
    """
    if not result.has_evidence:
        raise VerifyError(
            "verification compared nothing: runs of the original itself differ as much as its outputs vary, and no site "
            "was compared. Nothing was written; --no-verify leaves verification out"
        )
    unseen = [] if result.failures else find_nonfinite_outputs(by_case, names)
    if not unseen or (weight := find_weight()) is None:
        return
    count = len(by_case)
    inputs = "the one set of inputs that ran" if count == 1 else f"each of the {count} sets of inputs that ran"
    raise VerifyError(
        f"verification compared no element of output{'s' if len(unseen) > 1 else ''} {_list(unseen)}: all of them are NaN or "
        f"infinite in the original, on {inputs}, and its weight {weight!r} holds NaN. Nothing was written; {_WHAT_TO_DO}"
    )


def find_nan_weight(model: onnx.ModelProto, folder: Path) -> str | None:
    """The name of the first stored tensor that holds NaN, "a constant" where it has none; None: there is none.

    Args:
        model: whose tensors.
        folder: of its external data.

    Raises:
        OSError: when a file cannot be read.
    """
    for tensor in all_tensors(model):
        if tensor.data_type not in _FLOATS:
            continue
        flat = map_array(tensor, folder).reshape(-1)
        if any(np.isnan(flat[i : i + _BLOCK]).any() for i in range(0, flat.size, _BLOCK)):
            return tensor.name or "a constant"
    return None


def check_sites_alone(result: Verification) -> None:
    """Refuses sites that were compared without outputs of the model, and without a fault, where none has a finite element.

    Raises:
        VerifyError: names the sites.
    """
    sites = [c for c in result.comparisons if c.site]
    is_unseen = any(c.coverage.nonfinite for c in sites) and not any(c.coverage.compared for c in sites)
    if is_unseen and not result.failures:
        names = list(dict.fromkeys(c.site for c in sites))
        where = f"site {_list(names)}" if len(names) == 1 else f"all {len(names)} sites ({_list(names)})"
        raise VerifyError(
            "verification compared no element: the original does not run here, and the original's nodes give only NaN or "
            f"infinity at {where}. Nothing was written; {_WHAT_TO_DO}"
        )


def _list(names: Sequence[str]) -> str:
    """The first names in words."""
    return ", ".join(map(repr, names[:_MOST_NAMES])) + (" and others" if len(names) > _MOST_NAMES else "")


def find_nonfinite_outputs(by_case: Sequence[Sequence[Comparison]], names: Sequence[str]) -> list[str]:
    """The outputs without a compared element or an infinity that both models have, of which the original gives NaN or infinity.

    Args:
        by_case: the comparisons of all outputs, case by case.
        names: of the outputs.
    """
    found = []
    for i, name in enumerate(names):
        covered = [comparisons[i].coverage for comparisons in by_case]
        if any(c.nonfinite for c in covered) and not any(c.compared or c.equal_infinite for c in covered):
            found.append(name)
    return found
