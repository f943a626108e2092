# SPDX-License-Identifier: Apache-2.0
"""Selectors of neurons on arrays, without a model: thresholds, low-rank predictors, their quality and their files."""
