# SPDX-License-Identifier: Apache-2.0
"""The decoders of ``python -m bench decoder-mlp`` by name, and the variants of each that are timed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench.decoder.graph import DecoderShape
from bench.decoder.mlp_form import MlpForm

_BLOCK = 32  # of int4
PRECISIONS = ("float32", "float16", "int4", "int4a8")  # a8: tokens are rounded to 8 bits, accuracy_level 4


@dataclass(frozen=True)
class MlpDecoderVariant:
    """One of the files that are timed.

    Attributes:
        name: in results.
        label: in words.
        optimized: whether it comes from stof-optimize.
        predicted: whether neurons are predicted by ``kind=svd``; else only zeros are left out.
        dense: whether the MLPs stay as they are.
    """

    name: str
    label: str
    optimized: bool = True
    predicted: bool = False
    dense: bool = False


VARIANTS = (
    MlpDecoderVariant("original", "ONNX Runtime", optimized=False),
    MlpDecoderVariant("dense", "stof-optimize, MLPs dense", dense=True),
    MlpDecoderVariant("exact", "stof-optimize: zeros are left out"),
    MlpDecoderVariant("predicted", "stof-optimize --sparse-mlp kind=svd", predicted=True),
)


@dataclass(frozen=True)
class MlpDecoderModel:
    """A decoder with the sizes of a public model's configuration.

    Attributes:
        shape: its sizes, in fp32 and without the form of its MLPs.
        form: of its MLPs, without a share of active neurons.
        active: the share of the neurons that is active where nothing else is asked for.
    """

    shape: DecoderShape
    form: MlpForm
    active: float


# Layers and vocabulary are cut alike where it is said.
_LLAMA_3B = DecoderShape(3072, 24, 8, 128, 8192, 36644, 8, 1024, "float32")  # 8 of 28 layers
_7B = DecoderShape(4096, 32, 8, 128, 11008, 32000, 4, 1024, "float32")  # 4 of 32 layers
MODELS: dict[str, MlpDecoderModel] = {
    "llama-3b-relu": MlpDecoderModel(_LLAMA_3B, MlpForm("relu"), 0.25),
    "llama-3b-silu": MlpDecoderModel(_LLAMA_3B, MlpForm("silu"), 0.25),
    "opt-1.3b": MlpDecoderModel(
        DecoderShape(2048, 32, 32, 64, 8192, 50272, 24, 1024, "float32"), MlpForm("relu", is_gated=False), 0.05
    ),
    "nllb-1.3b": MlpDecoderModel(  # the decoder without cross-attention, a quarter of the vocabulary
        DecoderShape(1024, 16, 16, 64, 8192, 64052, 24, 1024, "float32"), MlpForm("relu", is_gated=False), 0.05
    ),
    "nemotron-4b": MlpDecoderModel(  # 8 of 32 layers
        DecoderShape(3072, 24, 8, 128, 9216, 64000, 8, 1024, "float32"), MlpForm("relu2", is_gated=False), 0.1
    ),
    "gemma-3n-e2b": MlpDecoderModel(  # the 10 layers with the threshold of 30, an eighth of the vocabulary
        DecoderShape(2048, 8, 2, 256, 8192, 32768, 10, 1024, "float32"), MlpForm("gelu_tanh", has_top_k=True), 0.05
    ),
    "7b-relu": MlpDecoderModel(_7B, MlpForm("relu"), 0.25),
    "7b-silu": MlpDecoderModel(_7B, MlpForm("silu"), 0.25),
    "memory": MlpDecoderModel(  # for resident memory: the proportions of llama-3b-relu, 600 MB of MLPs
        DecoderShape(1536, 12, 4, 128, 4096, 4000, 8, 1024, "float32"), MlpForm("relu"), 0.1
    ),
    "tiny": MlpDecoderModel(DecoderShape(64, 4, 2, 16, 320, 96, 2, 1024, "float32"), MlpForm("relu"), 0.1),
}


def shape_of(name: str, active: float | None = None, precision: str = "float32", idle: float = 0.0) -> DecoderShape:
    """The decoder of a model.

    Args:
        name: of ``MODELS``.
        active: the share of the neurons that is active for a token; None: the model's.
        precision: of ``PRECISIONS``.
        idle: the share of the neurons that never are.

    Raises:
        ValueError: for shares that cannot be.
    """
    model = MODELS[name]
    share = model.active if active is None else active
    if not 0 < share < 1:
        raise ValueError(f"{name}: the share of active neurons is {share:g}, expected more than 0 and less than 1")
    # Values of SiLU are not zero: which ones count as active is up to the selection.
    form = model.form if model.form.activation == "silu" else replace(model.form, active=share)
    try:
        form = replace(form, idle=idle)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if precision.startswith("int4"):
        return replace(
            model.shape, mlp=form, block_size=_BLOCK, accuracy_level=4 if precision == "int4a8" else 0
        )  # fmt: skip
    return replace(model.shape, mlp=form, dtype=precision)
