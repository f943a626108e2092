# SPDX-License-Identifier: Apache-2.0
"""Queries without an allowed key: what the graph gives them, and proofs that there is none."""
