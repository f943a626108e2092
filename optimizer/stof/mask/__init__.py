# SPDX-License-Identifier: Apache-2.0
"""Masks: from graph nodes to expressions, and back to nodes."""
