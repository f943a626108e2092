# SPDX-License-Identifier: Apache-2.0
"""Steps over the graph: matching and emission."""
