# SPDX-License-Identifier: Apache-2.0
"""Hooks of other tools: each module needs the tool that it is named after, which ``import stof`` does not load."""
