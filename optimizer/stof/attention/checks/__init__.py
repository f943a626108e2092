# SPDX-License-Identifier: Apache-2.0
"""Attention nodes beside what they replace, and attention in fp64."""
