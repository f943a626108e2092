# SPDX-License-Identifier: Apache-2.0
"""Checks of single StofCachedAttention nodes against fp64."""
