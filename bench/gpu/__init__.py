# SPDX-License-Identifier: Apache-2.0
"""stof beside its baselines on a CUDA device (docs/design/benchmarks.md)."""
