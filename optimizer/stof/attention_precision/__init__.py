# SPDX-License-Identifier: Apache-2.0
"""Attention that rounds the operands of its two matmuls to a narrower type: which nodes, their errors, and the loss."""
