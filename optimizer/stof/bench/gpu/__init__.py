# SPDX-License-Identifier: Apache-2.0
"""stof beside its peers on a CUDA device (docs/guide/benchmarks.md)."""
