# SPDX-License-Identifier: Apache-2.0
"""Which neurons of an MLP to compute: thresholds and low-rank predictors, their quality, and their files."""
