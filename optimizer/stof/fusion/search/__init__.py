# SPDX-License-Identifier: Apache-2.0
"""The search for fusion schemes: spaces, cost model, measurements, two stages (docs/design/fusion-search.md)."""
