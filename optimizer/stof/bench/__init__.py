# SPDX-License-Identifier: Apache-2.0
"""``stof-bench``: attention, models and sites timed beside their peers (docs/guide/benchmarks.md)."""
