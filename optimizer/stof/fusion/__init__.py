# SPDX-License-Identifier: Apache-2.0
"""Chains: regions of memory-bound operators that one kernel computes (docs/reference/chain-format.md)."""
