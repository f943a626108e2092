# SPDX-License-Identifier: Apache-2.0
"""Prompts, and by how much a model's next tokens change on them: for options that change outputs."""
