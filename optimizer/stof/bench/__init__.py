# SPDX-License-Identifier: Apache-2.0
"""``stof-bench``: attention, models and sites timed beside their baselines (docs/design/benchmarks.md)."""
