# SPDX-License-Identifier: Apache-2.0
"""GEMMs by constant weights that round their operands to a narrower type: which nodes, their errors, and the edit."""
