# SPDX-License-Identifier: Apache-2.0
"""Which MLPs are replaced: what a target computes faster, and the reasons against each."""
