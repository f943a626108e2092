# SPDX-License-Identifier: Apache-2.0
"""Attention over a paged KV cache: PagedAttention nodes become StofPagedAttention."""
