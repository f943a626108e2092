# SPDX-License-Identifier: Apache-2.0
"""Descriptions of fused chains as text (docs/reference/chain-format.md): printer, parser and evaluation in fp64."""
