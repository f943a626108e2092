# SPDX-License-Identifier: Apache-2.0
"""Optimized models in fastembed: ``add_custom_model`` and ``add_custom_reranker`` take what fastembed's own functions take.

fastembed makes its sessions itself and takes no session options from callers. Models that are added here belong to
subclasses of its own, which register stof's library in the one method that it has for additional options. Docs:
docs/guide/fastembed.md.
"""

from __future__ import annotations

from typing import Any, ClassVar

from stof.runtime.library import register

try:
    from fastembed import TextEmbedding
    from fastembed.common.model_description import BaseModelDescription, DenseModelDescription, ModelSource, PoolingType
    from fastembed.rerank.cross_encoder import TextCrossEncoder
    from fastembed.rerank.cross_encoder.custom_text_cross_encoder import CustomTextCrossEncoder
    from fastembed.rerank.cross_encoder.onnx_text_model import TextRerankerWorker
    from fastembed.text.custom_text_embedding import CustomTextEmbedding, PostprocessingConfig
    from fastembed.text.onnx_text_model import TextEmbeddingWorker
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "fastembed":
        raise
    raise ImportError("stof.integrations.fastembed needs fastembed: pip install 'fastembed>=0.9'") from error


class _Registering:
    """Adds the library to the options of each session that a class of fastembed makes."""

    @classmethod
    def add_extra_session_options(cls, session_options: Any, extra_options: dict[str, Any]) -> None:
        super().add_extra_session_options(session_options, extra_options)  # type: ignore[misc]
        register(session_options)


class OptimizedTextEmbedding(_Registering, CustomTextEmbedding):
    """A text encoder whose file holds stof's operators."""

    # Registries of this class: those of CustomTextEmbedding belong to models that need no library.
    SUPPORTED_MODELS: ClassVar[list[DenseModelDescription]] = []
    POSTPROCESSING_MAPPING: ClassVar[dict[str, PostprocessingConfig]] = {}

    @classmethod
    def _get_worker_class(cls) -> type[TextEmbeddingWorker]:
        return OptimizedTextEmbeddingWorker


class OptimizedTextEmbeddingWorker(TextEmbeddingWorker):
    """A process of ``embed(..., parallel=N)``."""

    def init_embedding(
        self,
        model_name: str,
        cache_dir: str,
        model_description: DenseModelDescription,
        postprocessing_config: PostprocessingConfig,
        **options: Any,
    ) -> OptimizedTextEmbedding:
        """A new process knows no model that its parent added: the description travels with the call."""
        OptimizedTextEmbedding.add_model(
            model_description,
            pooling=postprocessing_config.pooling,
            normalization=postprocessing_config.normalization,
            output_name=postprocessing_config.output_name,
        )
        return OptimizedTextEmbedding(model_name, cache_dir, threads=1, **options)


class OptimizedTextCrossEncoder(_Registering, CustomTextCrossEncoder):
    """A reranker whose file holds stof's operators."""

    SUPPORTED_MODELS: ClassVar[list[BaseModelDescription]] = []

    @classmethod
    def _get_worker_class(cls) -> type[TextRerankerWorker]:
        return OptimizedTextCrossEncoderWorker


class OptimizedTextCrossEncoderWorker(TextRerankerWorker):
    """A process of ``rerank(..., parallel=N)``."""

    def init_embedding(
        self, model_name: str, cache_dir: str, model_description: BaseModelDescription, **options: Any
    ) -> OptimizedTextCrossEncoder:
        """As that of :class:`OptimizedTextEmbeddingWorker`."""
        OptimizedTextCrossEncoder.add_model(model_description)
        return OptimizedTextCrossEncoder(model_name, cache_dir, threads=1, **options)


def add_custom_model(
    model: str,
    pooling: PoolingType,
    normalization: bool,
    sources: ModelSource,
    dim: int,
    model_file: str = "onnx/model.onnx",
    output_name: str | None = None,
    **description: Any,
) -> None:
    """``TextEmbedding.add_custom_model`` for an optimized model: ``TextEmbedding(model, ...)`` then registers the library.

    Args:
        model: the name, which no other model of fastembed has.
        pooling: how rows of tokens become a vector.
        normalization: whether vectors get the length 1.
        sources: where fastembed looks for files, unless ``specific_model_path`` names a folder.
        dim: the size of a vector.
        model_file: the file in that folder.
        output_name: the output to read; None: the first one.
        **description: ``license``, ``additional_files`` and others of fastembed's ``DenseModelDescription``.

    Raises:
        ValueError: where the name is taken.
    """
    _add_class(TextEmbedding.EMBEDDINGS_REGISTRY, OptimizedTextEmbedding)
    _check_name(model, TextEmbedding._list_supported_models())
    fields = {"description": "", "license": "", "size_in_GB": 0.0, **description}
    OptimizedTextEmbedding.add_model(
        DenseModelDescription(model=model, sources=sources, dim=dim, model_file=model_file, **fields),
        pooling=pooling,
        normalization=normalization,
        output_name=output_name,
    )


def add_custom_reranker(
    model: str, sources: ModelSource, model_file: str = "onnx/model.onnx", **description: Any
) -> None:
    """``TextCrossEncoder.add_custom_model`` for an optimized model; arguments as those of :func:`add_custom_model`.

    Raises:
        ValueError: where the name is taken.
    """
    _add_class(TextCrossEncoder.CROSS_ENCODER_REGISTRY, OptimizedTextCrossEncoder)
    _check_name(model, TextCrossEncoder._list_supported_models())
    fields = {"description": "", "license": "", "size_in_GB": 0.0, **description}
    OptimizedTextCrossEncoder.add_model(
        BaseModelDescription(model=model, sources=sources, model_file=model_file, **fields)
    )


def _add_class(registry: list[Any], kind: type) -> None:
    if kind not in registry:
        registry.append(kind)


def _check_name(model: str, descriptions: list[Any]) -> None:
    if any(model.lower() == known.model.lower() for known in descriptions):
        raise ValueError(f"fastembed has a model named {model!r}; add this one by another name")
