# SPDX-License-Identifier: Apache-2.0
"""Attention over a KV cache: GroupQueryAttention nodes with a cache become StofCachedAttention."""
