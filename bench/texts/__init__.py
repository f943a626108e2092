# SPDX-License-Identifier: Apache-2.0
"""Batches of padded texts on a CPU or a GPU: useful tokens a second of stof and its peers, memory, and kernels' time."""
