# SPDX-License-Identifier: Apache-2.0
"""The graph around an operator that replaces a site: operands in its layouts, and nodes that nothing needs any more."""
