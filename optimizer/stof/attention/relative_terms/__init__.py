# SPDX-License-Identifier: Apache-2.0
"""Operands and function body of products with rows by relative position."""
