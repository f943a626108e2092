# SPDX-License-Identifier: Apache-2.0
"""Masks: lifted from graph nodes to expressions, checked by execution, and written as nodes again."""
