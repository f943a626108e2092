# SPDX-License-Identifier: Apache-2.0
"""Declared sparse patterns: what --sparsify puts on the attentions of a dense model."""
