# SPDX-License-Identifier: Apache-2.0
"""Attention that rounds the operands of its two matmuls to bf16 or 8 bits: which nodes, their errors, and the loss."""
