# SPDX-License-Identifier: Apache-2.0
"""Attention: finds its sites, decides about them, and writes StofAttention nodes.

expand/ makes the working copy with primitive nodes. ``find`` starts at each softmax (``softmax_forms``), walks backwards
(``scores``, ``sinks``) and forwards (``weights``), and reads operands through movements (``move_paths``, ``layouts``).
decide/ chooses kernels and refuses. ``emit`` edits the graph; ``subgraphs`` does all of this in every subgraph.
"""
