# SPDX-License-Identifier: Apache-2.0
"""Masked attention for PyTorch: a function, its export to ONNX, the merge of partial results (docs/guide/pytorch.md).

Needs PyTorch 2.7 or later, which ``import stof`` does not load.
"""

try:
    from stof.torch.attention import attention
    from stof.torch.block_mask import MaskWithTables, from_block_mask
    from stof.torch.merge import merge
    from stof.torch.translation import translation_table
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError("stof.torch needs PyTorch 2.7 or later: pip install 'torch>=2.7'") from error

__all__ = ["MaskWithTables", "attention", "from_block_mask", "merge", "translation_table"]
