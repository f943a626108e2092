# SPDX-License-Identifier: Apache-2.0
"""Fused attention nodes, expanded to primitive nodes in a working copy of the model."""
