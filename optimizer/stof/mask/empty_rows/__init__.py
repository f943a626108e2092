# SPDX-License-Identifier: Apache-2.0
"""Fully masked rows: the policy that a graph has for them, and proofs that there are none."""
