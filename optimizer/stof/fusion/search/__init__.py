# SPDX-License-Identifier: Apache-2.0
"""The search for fusion schemes: spaces, costs, the two stages, and what was measured before (docs/design/fusion-search.md)."""
