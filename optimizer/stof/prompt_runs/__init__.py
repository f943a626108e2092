# SPDX-License-Identifier: Apache-2.0
"""Runs of models on prompts: inputs that hold their tokens, and how much next tokens change."""
