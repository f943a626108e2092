# SPDX-License-Identifier: Apache-2.0
"""Fused chains: regions of memory-bound operators, with or without matmuls, that one kernel computes.

A group of modules imports only from itself and from the groups before it:

* policy: what a target allows. description: the text of a chain
  (docs/reference/chain-format.md). work_bound: how much it computes.
* terms, gelu, element_ops, index_terms: the expressions of a chain.
* translate, gemm: from a region of the graph to a chain. function_body, tensorrt_plugin: what its node needs.
* merge_matmuls, packed_qkv, split_gemm_bias, working_copies: the copies of a model in which regions are looked for.
* fusion_graph, regions: finds the regions. check, emit: compares a chain with what it replaces, and writes its node.
* describe: the problem of each region. search: the search for fusion schemes. decide: which parts of a region become chains.
* rewrite: the steps of the protocol.
"""
