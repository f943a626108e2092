# SPDX-License-Identifier: Apache-2.0
"""Fused chains: regions of memory-bound operators, with or without matmuls, that one kernel computes.

Each module imports only modules before it:

* description_format, description_parser, description_printer: the text of a chain (docs/reference/chain-format.md);
  evaluate, work_bound: what it computes, and how much.
* terms, gelu, element_ops, index_terms: the expressions of a chain.
* translate, gemm: a region of the graph to a chain, to StofChain or StofGemm; function_body: to standard ONNX.
* fusion_graph, regions: finds the regions. policy: what the target allows.
* merge_matmuls, packed_qkv, split_gemm_bias: changes of the graph before that.
* check, emit: compares a chain with what it replaces; writes its node.
* search, decide, apply: the search for fusion schemes; who decides about a region; all steps in order.
"""
