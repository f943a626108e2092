# SPDX-License-Identifier: Apache-2.0
"""Choose pages: inputs and outputs of a decoder for bounds of its caches' pages, by which steps attend the best ones."""
