# SPDX-License-Identifier: Apache-2.0
"""How --sparse-mlp selects neurons: selectors that are fitted on prompts or read from files, and their quality."""
