# SPDX-License-Identifier: Apache-2.0
"""The models in which regions are looked for: copies with matmuls merged, packed heads read, and biases of Gemm apart.

Merged matmuls gain only where a chain takes what they write. So copies are alternatives, in the order in which they are tried,
and each is made when the one before it was not taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import onnx

from stof.errors import StofError
from stof.fusion.merge_matmuls import MergeScope, merge_matmuls
from stof.fusion.packed_qkv import read_packed_heads
from stof.fusion.policy import ChainPolicy
from stof.fusion.split_gemm_bias import SplitGemms, split_gemm_bias
from stof.symbolic import Symbolic


@dataclass(frozen=True, eq=False)
class FusionCopy:
    """One of the models.

    Attributes:
        whole: with Gemm as it is: what is emitted where no region is found.
        model: with the biases of Gemm apart, where the target has an epilogue for them.
        symbolic: its facts; None where there are none.
        gemms: what stands for each Gemm in ``model``.
        splits: names of Split nodes behind merged matmuls that read and write a tensor anew unless a chain takes them.
        failure: why nothing can be looked for in it; empty where it can.
    """

    whole: onnx.ModelProto
    model: onnx.ModelProto
    symbolic: Symbolic | None
    gemms: SplitGemms = field(default_factory=dict)
    splits: frozenset[str] = frozenset()
    failure: str = ""


def make_copies(
    model: onnx.ModelProto, policy: ChainPolicy, interpret: Callable[[onnx.ModelProto], Symbolic] = Symbolic
) -> Iterator[FusionCopy]:
    """The alternatives for a model, which itself may be the last one. There is at least one.

    Args:
        model: the model.
        policy: what the target allows.
        interpret: gives the facts of the model, where they may be known already.
    """
    try:
        symbolic = interpret(model)
    except StofError:
        raise
    except Exception as error:  # without chains the model is slower; attention stays replaced
        yield FusionCopy(model, model, None, failure=explain_fault(error))
        return
    yield from _with_merged_matmuls(model, symbolic, policy)
    yield _with_packed_heads(model, symbolic, policy)


def explain_fault(error: Exception) -> str:
    """The reason in the report where the search for chains fails."""
    return f"chains cannot be looked for ({type(error).__name__}: {error}); please report this model"


def _with_merged_matmuls(model: onnx.ModelProto, symbolic: Symbolic, policy: ChainPolicy) -> Iterator[FusionCopy]:
    if policy.merge_decider is None:
        return
    for scope in MergeScope:  # where no chain splits query, key and value again, attention alone may still gain
        merged = merge_matmuls(model, symbolic, policy.merge_decider, scope, policy.reads_packed_heads)
        if merged.model is model:
            return
        try:
            merged_symbolic = Symbolic(merged.model)
        except StofError:
            raise
        except Exception as error:  # as in make_copies
            yield FusionCopy(merged.model, merged.model, None, splits=merged.splits, failure=explain_fault(error))
        else:
            yield _with_packed_heads(merged.model, merged_symbolic, policy, merged.splits)
        if not merged.splits:
            return


def _with_packed_heads(
    model: onnx.ModelProto, symbolic: Symbolic, policy: ChainPolicy, splits: frozenset[str] = frozenset()
) -> FusionCopy:
    if policy.reads_packed_heads:
        model, symbolic = _read_packed_heads(model, symbolic)
    apart, gemms = split_gemm_bias(model, symbolic) if policy.splits_gemm_bias else (model, {})
    return FusionCopy(model, apart, symbolic if apart is model else Symbolic(apart), gemms, splits)


def _read_packed_heads(model: onnx.ModelProto, symbolic: Symbolic) -> tuple[onnx.ModelProto, Symbolic]:
    try:
        packed = read_packed_heads(model, symbolic)
        return (model, symbolic) if packed is model else (packed, Symbolic(packed))
    except StofError:
        raise
    except Exception:  # the copies of heads stay; attention stays replaced
        return model, symbolic
