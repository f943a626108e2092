# SPDX-License-Identifier: Apache-2.0
"""What a site asks of kernels: its mask, checked by running the graph, and the problem that follows."""
