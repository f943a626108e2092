# SPDX-License-Identifier: Apache-2.0
"""Predicted mode: which neurons --sparse-mlp leaves out, calibrated on prompts or read from files, and what that changes."""
