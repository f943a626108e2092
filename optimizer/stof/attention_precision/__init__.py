# SPDX-License-Identifier: Apache-2.0
"""Attention whose two matmuls are computed in a type below that of its inputs: which nodes, their errors, and the loss."""
