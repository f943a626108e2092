# SPDX-License-Identifier: Apache-2.0
"""Sparse MLPs that round their weights to a narrower type: which nodes, their errors, and the attribute."""
