# SPDX-License-Identifier: Apache-2.0
"""Unpadding: the tensors of a batch of padded sequences become tensors of its real tokens, one sequence after the other."""
