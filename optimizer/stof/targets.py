# SPDX-License-Identifier: Apache-2.0
"""Targets: what a model is optimized for. Options, plans and commands name one; the ops ask for its properties."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Target:
    """What runs an optimized model, as far as choices depend on it. There is one instance for each.

    Attributes:
        name: in ``--target``, in plans and in the limits of the plugin library.
        provider: the execution provider of ONNX Runtime that it is.
        uses_gpu: kernels run on a GPU: its rates decide, and it computes all neurons of many tokens.
        uses_cuda_provider: ONNX Runtime's CUDA provider runs the model; its speed is estimated where nothing was measured.
        keeps_plugins: the operators become TensorRT plugins: nodes hold what its parser needs, which reads no function bodies.
        has_inplace_ops: an operator may write into one of its inputs, as into a KV cache.
        reads_packed_heads: StofAttention reads heads inside of a wider tensor.
        packs_sequences: StofAttention takes packed sequences, without rows of padding.
        copies_sequences: packed sequences are copied into padded tensors first (stof.unpadding.padded_copies: what that lacks).
        takes_relative_terms: StofAttention multiplies queries and keys by rows of tables by relative position, as far as the
            library states roles for the target.
        times_models: ``--time`` can time whole models.
        times_chains: measurements decide about fused chains. TensorRT measures by itself.
        estimates_gains: estimates tell whether an attention gains over what the runtime has for it.
        fuses_lone_norms: a norm by itself may become a chain.
        has_cpu_gemm: matmuls may become the CPU's packed GEMM.
        has_cuda_gemm: matmuls may become the GEMM with an epilogue on CUDA; biases are split off for it, and matmuls merged.
    """

    name: str
    provider: str
    uses_gpu: bool = True
    uses_cuda_provider: bool = False
    keeps_plugins: bool = False
    has_inplace_ops: bool = True
    reads_packed_heads: bool = True
    packs_sequences: bool = False
    copies_sequences: bool = False
    takes_relative_terms: bool = False
    times_models: bool = False
    times_chains: bool = True
    estimates_gains: bool = True
    fuses_lone_norms: bool = False
    has_cpu_gemm: bool = False
    has_cuda_gemm: bool = False


CPU = Target(
    name="cpu",
    provider="CPUExecutionProvider",
    uses_gpu=False,
    packs_sequences=True,
    takes_relative_terms=True,
    times_models=True,
    has_cpu_gemm=True,
)
CUDA = Target(
    name="cuda",
    provider="CUDAExecutionProvider",
    uses_cuda_provider=True,
    packs_sequences=True,
    takes_relative_terms=True,
    copies_sequences=True,
    fuses_lone_norms=True,
    has_cuda_gemm=True,
)
TENSORRT = Target(
    name="tensorrt",
    provider="TensorrtExecutionProvider",
    keeps_plugins=True,
    has_inplace_ops=False,
    reads_packed_heads=False,
    times_chains=False,
    estimates_gains=False,
)
TARGETS: Mapping[str, Target] = {target.name: target for target in (CPU, CUDA, TENSORRT)}
